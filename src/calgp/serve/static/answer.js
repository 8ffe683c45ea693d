// The answer, changed in place while samples arrive.
import { byId, element } from "./dom.js";
import { Bar, doubtFigure, markConfidence } from "./figures.js";
import { judged, nearestSentence, own, rank } from "./verdict.js";
import { nats, percent } from "./words.js";

const ALL = 12; // classes that are shown in their order; of more, the likeliest
const LIKELIEST = 8;

export class AnswerView {
  #model;
  #rows;
  #draws = [];

  constructor(model) {
    this.#model = model;
    this.#rows = model.classes.map((name) => {
      const bar = new Bar(), probability = element("td", { class: "number" }), spread = element("td", { class: "number spread" });
      const row = element("tr", {}, element("th", { scope: "row" }, name), element("td", { class: "chart" }, bar.shown), probability, spread);
      return { bar, probability, spread, row };
    });
    const raw = model.calibrator ? ", before calibration" : "";
    byId("bars-says").textContent = model.random
      ? `Bars are averages over samples, dots single samples${raw}, lines one standard deviation to both sides.`
      : "This model draws no samples: its probabilities have no spread.";
  }

  begin(samples) {
    this.#draws = [];
    byId("waiting").hidden = true;
    byId("announced").textContent = "Asking the model.";
    byId("answer").setAttribute("aria-busy", "true");
    byId("progress").max = samples;
    byId("progress").value = 0;
  }

  end() {
    byId("answer").removeAttribute("aria-busy");
    byId("announced").textContent = "";
  }

  clear() {
    this.end();
    byId("answered").hidden = byId("doubt").hidden = true;
    byId("waiting").hidden = false;
    markConfidence(null);
  }

  show({ predictions: [prediction], draws, samples, total, done }) {
    if (draws) this.#draws.push(...draws[0]);
    byId("answered").hidden = byId("doubt").hidden = false;
    byId("progress").max = done ? samples : total;
    byId("progress").value = samples;
    byId("drawn").textContent = this.#model.random ? `${samples.toLocaleString("en")} of ${total.toLocaleString("en")} samples` : "one pass";
    this.#showVerdict(prediction, done);
    this.#showBars(prediction);
    this.#showDoubt(prediction);
    if (done) this.#announce(prediction);
  }

  #showVerdict(prediction, done) {
    const { abstains, why } = judged(prediction, this.#model);
    const guess = `${prediction.label}, with ${percent(prediction.confidence)}`;
    byId("verdict").className = `verdict ${!done ? "running" : abstains ? "abstains" : "answers"}`;
    byId("says").replaceChildren(...(done && abstains
      ? ["I don’t know"]
      : [element("strong", {}, prediction.label), element("span", {}, ` ${percent(prediction.confidence)} sure${done ? "" : " so far"}`)]));
    const set = prediction.conformal_set ? ` It is one of: ${prediction.conformal_set.join(", ") || "none of its classes"} (conformal set).` : "";
    byId("why").textContent = !done ? "Samples are arriving." : abstains ? `${why} Its best guess is ${guess}.${set}` : set.trim();
  }

  #showBars({ index, probabilities, spread }) {
    const { classes } = this.#model;
    const order = classes.length <= ALL ? classes.map((_, place) => place)
      : classes.map((_, place) => place).sort((a, b) => probabilities[b] - probabilities[a]).slice(0, LIKELIEST);
    for (const place of order) {
      const each = this.#rows[place];
      each.row.className = place === index ? "best" : "";
      each.probability.textContent = percent(probabilities[place]);
      each.spread.textContent = this.#model.random ? `± ${percent(spread[place])}` : "";
      each.bar.show(probabilities[place], spread[place], this.#draws.map((draw) => draw[place]));
    }
    byId("bars").replaceChildren(...order.map((place) => this.#rows[place].row));
  }

  #showDoubt({ entropy, aleatoric, epistemic, confidence }) {
    const model = this.#model, most = Math.log(model.classes.length);
    const evaluations = model.evaluations.filter((each) => each.entropy_percentiles)
      .map(({ source, outside, entropy_percentiles: percentiles }) => ({ source, outside, percentiles }))
      .sort((a, b) => a.outside - b.outside).slice(0, 3);
    const parts = model.calibrator ? null : { aleatoric, epistemic };
    byId("doubt-says").textContent = this.#doubtSentence(entropy, most);
    byId("doubt-figure").replaceChildren(doubtFigure({ entropy, parts, most, evaluations }));
    const before = model.calibrator ? ", before calibration" : "";
    byId("parts").replaceChildren(
      part("aleatoric", `In the picture (aleatoric${before})`, aleatoric, "what each sample doubts by itself: more training would leave it"),
      part("epistemic", `In the model (epistemic${before})`, epistemic, "where samples disagree: more training images could take it away"),
    );
    byId("nearest").textContent = nearestSentence(confidence, model);
    markConfidence(confidence);
  }

  #doubtSentence(entropy, most) {
    const evaluation = own(this.#model), more = rank(entropy, evaluation?.entropy_percentiles);
    const among = more === null ? "" : more >= 100 ? ": more than any of its test images"
      : more < 1 ? ": less than nearly all of its test images" : `: more than ${more} of 100 of its test images`;
    return `Entropy ${nats(entropy)} of at most ${nats(most)} nats${among}.`;
  }

  #announce(prediction) {
    const { abstains, why } = judged(prediction, this.#model);
    const guess = `${prediction.label}, ${percent(prediction.confidence)} sure`;
    byId("answer").removeAttribute("aria-busy");
    byId("announced").textContent = `${abstains ? `I don’t know. ${why} Best guess: ${guess}.` : `${guess}.`} ${byId("doubt-says").textContent}`;
  }
}

function part(kind, name, value, says) {
  return element("div", { class: kind }, element("dt", {}, name), element("dd", {}, element("strong", {}, `${nats(value)} nats`), `, ${says}`));
}
