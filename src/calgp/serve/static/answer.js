// The answer, changed in place while samples arrive.
import { byId, element } from "./dom.js";
import { Bar, doubtFigure, markConfidence } from "./figures.js";
import { judged, nearestSentence, own, rank } from "./verdict.js";
import { brief, nats, sure } from "./words.js";

const ALL = 12; // classes that are shown in their order; of more, the likeliest
const LIKELIEST = 8;

export class AnswerView {
  #model;
  #most; // nats: all classes alike
  #rows;
  #draws = [];

  constructor(model) {
    this.#model = model;
    this.#most = Math.log(model.classes.length);
    this.#rows = model.classes.map((name) => {
      const bar = new Bar(), probability = element("td", { class: "number" }), spread = element("td", { class: "number spread" });
      const row = element("tr", {}, element("th", { scope: "row" }, name), element("td", { class: "chart" }, bar.shown), probability, spread);
      return { bar, probability, spread, row };
    });
    const raw = model.calibrator ? ", before calibration" : "";
    byId("bars-says").textContent = model.random
      ? `Bars are averages over samples, dots single samples${raw}, lines one standard deviation to both sides.`
      : "This model draws no samples: its probabilities have no spread.";
    const table = byId("bars").closest("table");
    table.classList.toggle("long", model.classes.some((name) => name.length > 4));
    table.classList.toggle("single", !model.random);
    this.clear();
  }

  begin(samples) {
    this.#draws = [];
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
    byId("verdict").className = "verdict running";
    byId("says").textContent = "Nothing asked yet";
    byId("why").textContent = "Try something that the model knows, then something that it does not.";
    byId("progress").value = 0;
    byId("drawn").textContent = "0";
    for (const each of this.#rows) {
      each.row.className = "";
      each.probability.textContent = each.spread.textContent = "–";
      each.bar.show(0, 0, []);
    }
    byId("bars").replaceChildren(...this.#rows.slice(0, this.#rows.length <= ALL ? ALL : LIKELIEST).map((each) => each.row));
    byId("doubt-says").textContent = "How much it doubts your picture will stand above how much it doubts its test images.";
    byId("doubt-figure").replaceChildren(this.#figure(null, null));
    byId("parts").replaceChildren();
    byId("nearest").textContent = "How often the model was right where it was as sure as it will be here.";
    markConfidence(null);
  }

  show({ predictions: [prediction], draws, samples, total, done }) {
    if (draws) this.#draws.push(...draws[0]);
    byId("progress").max = done ? samples : total;
    byId("progress").value = samples;
    byId("drawn").textContent = samples.toLocaleString("en");
    this.#showVerdict(prediction, done);
    this.#showBars(prediction);
    this.#showDoubt(prediction);
    if (done) this.#announce(prediction);
  }

  #showVerdict(prediction, done) {
    const { abstains, why } = judged(prediction, this.#model);
    const guess = `${prediction.label}, with ${sure(prediction.confidence)}`;
    byId("verdict").className = `verdict ${!done ? "running" : abstains ? "abstains" : "answers"}`;
    byId("says").replaceChildren(...(done && abstains
      ? ["I don’t know"]
      : [element("strong", {}, prediction.label), element("span", {}, ` ${sure(prediction.confidence)} sure${done ? "" : " so far"}`)]));
    const set = prediction.conformal_set ? ` It is one of: ${prediction.conformal_set.join(", ") || "none of its classes"} (conformal set).` : "";
    byId("why").textContent = !done ? "Samples are arriving." : `${why}${abstains ? ` Its best guess is ${guess}.` : ""}${set}`;
  }

  #showBars({ index, probabilities, spread }) {
    const { classes } = this.#model;
    const order = classes.length <= ALL ? classes.map((_, place) => place)
      : classes.map((_, place) => place).sort((a, b) => probabilities[b] - probabilities[a]).slice(0, LIKELIEST);
    for (const place of order) {
      const each = this.#rows[place];
      each.row.className = place === index ? "best" : "";
      each.probability.textContent = brief(probabilities[place]);
      each.spread.textContent = this.#model.random ? `±${(100 * spread[place]).toFixed(1)}` : "";
      each.bar.show(probabilities[place], spread[place], this.#draws.map((draw) => draw[place]));
    }
    byId("bars").replaceChildren(...order.map((place) => this.#rows[place].row));
  }

  #showDoubt({ entropy, aleatoric, epistemic, confidence }) {
    const model = this.#model;
    byId("doubt-says").textContent = this.#doubtSentence(entropy);
    byId("doubt-figure").replaceChildren(this.#figure(entropy, model.calibrator ? null : { aleatoric, epistemic }));
    const before = model.calibrator ? ", before calibration" : "";
    byId("parts").replaceChildren(
      part("aleatoric", `In the picture (aleatoric${before})`, aleatoric, "what each sample doubts by itself: more training would leave it"),
      part("epistemic", `In the model (epistemic${before})`, epistemic, "where samples disagree: more training images could take it away"),
    );
    byId("nearest").textContent = nearestSentence(confidence, model);
    markConfidence(confidence);
  }

  #figure(entropy, parts) {
    const evaluations = this.#model.evaluations.filter((each) => each.entropy_percentiles)
      .map(({ source, outside, entropy_percentiles: percentiles }) => ({ source, outside, percentiles }))
      .sort((a, b) => a.outside - b.outside).slice(0, 3);
    return doubtFigure({ entropy, parts, most: this.#most, evaluations });
  }

  #doubtSentence(entropy) {
    const evaluation = own(this.#model), more = rank(entropy, evaluation?.entropy_percentiles);
    const among = more === null ? "" : more >= 100 ? ": more than any of its test images"
      : more < 1 ? ": less than nearly all of its test images" : `: more than ${more} of 100 of its test images`;
    return `Entropy ${nats(entropy)} of at most ${nats(this.#most)} nats${among}.`;
  }

  #announce(prediction) {
    const { abstains, why } = judged(prediction, this.#model);
    const guess = `${prediction.label}, ${sure(prediction.confidence)} sure`;
    byId("answer").removeAttribute("aria-busy");
    byId("announced").textContent = `${abstains ? `I don’t know. ${why} Best guess: ${guess}.` : `${guess}.`} ${byId("doubt-says").textContent}`;
  }
}

function part(kind, name, value, says) {
  return element("div", { class: kind }, element("dt", {}, name), element("dd", {}, element("strong", {}, `${nats(value)} nats`), `, ${says}`));
}
