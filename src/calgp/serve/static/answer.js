// The answer, changed in place while samples arrive.
import { byId, element } from "./dom.js";
import { Bar, markConfidence, uncertaintyFigure } from "./figures.js";
import { decide, nearestSentence, ownEvaluation, rank } from "./verdict.js";
import { nats, shortPercent, sure, whole } from "./words.js";

const ALL = 12; // classes that are shown in their order; of more, the most probable ones
const MOST_PROBABLE = 8;

export class AnswerView {
  #model;
  #most; // nats: all classes equally probable
  #hasSpread;
  #rows;
  #draws = [];

  constructor(model) {
    this.#model = model;
    this.#most = Math.log(model.classes.length);
    this.#hasSpread = model.random || model.engine === "moments";
    this.#rows = model.classes.map((name) => {
      const bar = new Bar(), probability = element("td", { class: "number" }), spread = element("td", { class: "number spread" });
      const row = element("tr", {}, element("th", { scope: "row" }, name), element("td", { class: "chart" }, bar.shown), probability, spread);
      return { bar, probability, spread, row };
    });
    const raw = model.calibrator ? ", before calibration" : "";
    byId("bars-says").textContent = model.random
      ? `Bars: averages over samples. Dots: single samples${raw}. Lines: ± one standard deviation.`
      : this.#hasSpread ? "Bars: probabilities. Lines: ± one standard deviation, by what the last layer leaves uncertain."
        : "This model has a single set of weights: its probabilities have no spread.";
    const table = byId("bars").closest("table");
    table.classList.toggle("long", model.classes.some((name) => name.length > 4));
    table.classList.toggle("single", !this.#hasSpread);
    this.clear();
  }

  begin(samples) {
    this.#draws = [];
    byId("announced").textContent = "The model is computing.";
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
    byId("says").textContent = "No image yet";
    byId("why").textContent = "Try an image that the model should know, then one that it should not.";
    byId("progress").value = 0;
    byId("drawn").textContent = "0";
    for (const each of this.#rows) {
      each.row.className = "";
      each.probability.textContent = each.spread.textContent = "–";
      each.bar.show(0, 0, []);
    }
    byId("bars").replaceChildren(...this.#rows.slice(0, this.#rows.length <= ALL ? ALL : MOST_PROBABLE).map((each) => each.row));
    byId("uncertainty-says").textContent = "The uncertainty of your image will be shown above that of the test images.";
    byId("uncertainty-figure").replaceChildren(this.#figure(null, null));
    byId("parts").replaceChildren();
    byId("nearest").textContent = "How often the model was right on test images with the same confidence.";
    markConfidence(null);
  }

  show({ predictions: [prediction], draws, samples, total, done }) {
    if (draws) this.#draws.push(...draws[0]);
    byId("progress").max = done ? samples : total;
    byId("progress").value = samples;
    byId("drawn").textContent = samples.toLocaleString("en");
    this.#showVerdict(prediction, done);
    this.#showBars(prediction);
    this.#showUncertainty(prediction);
    if (done) this.#announce(prediction);
  }

  #showVerdict(prediction, done) {
    const { abstains, why } = decide(prediction, this.#model);
    const guess = `${prediction.label}, with ${sure(prediction.confidence)}`;
    byId("verdict").className = `verdict ${!done ? "running" : abstains ? "abstains" : "answers"}`;
    byId("says").replaceChildren(...(done && abstains
      ? ["I don’t know"]
      : [element("strong", {}, prediction.label), element("span", {}, ` ${sure(prediction.confidence)} sure${done ? "" : " so far"}`)]));
    const set = prediction.conformal_set ? ` Conformal set: ${prediction.conformal_set.join(", ") || "empty"}.` : "";
    byId("why").textContent = !done ? "Samples are arriving." : `${why}${abstains ? ` Best guess: ${guess}.` : ""}${set}`;
  }

  #showBars({ index, probabilities, spread }) {
    const { classes } = this.#model;
    const order = classes.length <= ALL ? classes.map((_, place) => place)
      : classes.map((_, place) => place).sort((a, b) => probabilities[b] - probabilities[a]).slice(0, MOST_PROBABLE);
    for (const place of order) {
      const each = this.#rows[place];
      each.row.className = place === index ? "best" : "";
      each.probability.textContent = shortPercent(probabilities[place]);
      each.spread.textContent = this.#hasSpread ? `±${(100 * spread[place]).toFixed(1)}` : "";
      each.bar.show(probabilities[place], spread[place], this.#draws.map((draw) => draw[place]));
    }
    byId("bars").replaceChildren(...order.map((place) => this.#rows[place].row));
  }

  #showUncertainty({ entropy, aleatoric, epistemic, confidence }) {
    const model = this.#model;
    byId("uncertainty-says").textContent = this.#sentence(entropy);
    const adds = this.#hasSpread && !model.calibrator; // only then the parts add up to the entropy
    byId("uncertainty-figure").replaceChildren(this.#figure(entropy, adds ? { aleatoric, epistemic } : null));
    const before = model.calibrator ? ", before calibration" : "", draws = model.random ? "samples" : "draws of the last layer";
    byId("parts").replaceChildren(...(this.#hasSpread ? [
      part("aleatoric", `In the image (aleatoric${before})`, aleatoric, `the mean uncertainty of single ${draws}. More training images would not reduce it.`),
      part("epistemic", `In the model (epistemic${before})`, epistemic, `the disagreement between ${draws}. More training images could reduce it.`),
    ] : []));
    byId("nearest").textContent = nearestSentence(confidence, model);
    markConfidence(confidence);
  }

  #figure(entropy, parts) {
    const evaluations = this.#model.evaluations.filter((each) => each.entropy_percentiles)
      .map(({ source, outside, entropy_percentiles: percentiles }) => ({ source, outside, percentiles }))
      .sort((a, b) => a.outside - b.outside).slice(0, 3);
    return uncertaintyFigure({ entropy, parts, most: this.#most, evaluations });
  }

  #sentence(entropy) {
    const higher = rank(entropy, ownEvaluation(this.#model)?.entropy_percentiles);
    const among = higher === null ? "" : higher >= 100 ? " That is higher than for any test image."
      : higher < 1 ? " That is lower than for nearly all test images." : ` That is higher than for ${whole(higher / 100)} of the test images.`;
    return `Entropy ${nats(entropy)} of at most ${nats(this.#most)} nats.${among}`;
  }

  #announce(prediction) {
    const { abstains, why } = decide(prediction, this.#model);
    const guess = `${prediction.label}, ${sure(prediction.confidence)} sure`;
    byId("answer").removeAttribute("aria-busy");
    byId("announced").textContent = `${abstains ? `I don’t know. ${why} Best guess: ${guess}.` : `${guess}.`} ${byId("uncertainty-says").textContent}`;
  }
}

function part(kind, name, value, says) {
  return element("div", { class: kind }, element("dt", {}, name), element("dd", {}, element("strong", {}, `${nats(value)} nats`), `: ${says}`));
}
