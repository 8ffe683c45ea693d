// What is said of an answer: whether the model knows, and how far its word can be trusted.
import { count, nats, percent, sourceName, whole } from "./words.js";

export const ENOUGH = 30; // test images behind a sentence about reliability
export const RARE = 95; // of 100 test images have less doubt: beyond, and unless told otherwise, the page says "I don't know"

// Of the run's own test images; undefined if it was not evaluated.
export const own = (model) => {
  const inside = model.evaluations.filter((each) => !each.outside);
  return inside.find((each) => each.source === model.source) ?? inside[0];
};

// { abstains, why }: by the run's own rule if it has one; else if no class has half of the probability, or the doubt is rare.
export function judged(prediction, model) {
  if (prediction.abstain !== null) {
    return { abstains: prediction.abstain, why: `The run was told when to abstain: here it does${prediction.abstain ? "" : " not"}.` };
  }
  if (prediction.confidence < 0.5) return { abstains: true, why: "No class has half of the probability." };
  const limit = own(model)?.entropy_percentiles?.[RARE];
  if (limit === undefined) return { abstains: false, why: "One class has more than half of the probability." };
  const abstains = prediction.entropy > limit;
  return { abstains, why: `It ${abstains ? "doubts" : "does not doubt"} this more than ${RARE} of 100 test images (${nats(limit)} nats).` };
}

// How often the model was right where it was about as confident: its bin, and neighbours until there are enough images.
export function nearest(confidence, reliability) {
  const { edges, count: counts, accuracy } = reliability;
  const last = counts.length - 1;
  let low = Math.min(Math.max(edges.findIndex((edge) => edge > confidence) - 1, 0), last);
  if (confidence >= edges[last]) low = last;
  let high = low;
  const sum = (values) => values.slice(low, high + 1).reduce((total, each) => total + each, 0);
  while (sum(counts) < ENOUGH && (low > 0 || high < last)) {
    if (low > 0) low -= 1;
    if (high < last) high += 1;
  }
  const n = sum(counts);
  if (!n) return null;
  const right = sum(counts.map((each, bin) => each * (accuracy[bin] ?? 0)));
  return { from: edges[low], to: edges[high + 1], n, right: right / n };
}

export function nearestSentence(confidence, model) {
  const evaluation = own(model);
  if (!evaluation?.reliability) return "Not known: the run has not been evaluated on test images.";
  const found = nearest(confidence, evaluation.reliability);
  if (found === null) return "Not known: no test image had a confidence like this.";
  return `When this model said between ${whole(found.from)} and ${whole(found.to)}, it was right ${percent(found.right)} of the time, on ${
    count(found.n, "test image")} of ${sourceName(evaluation.source)}. That holds for pictures like those.`;
}

// How many of 100 test images have less doubt; null where that is not known.
export function rank(entropy, percentiles) {
  if (!percentiles) return null;
  const above = percentiles.findIndex((each) => each > entropy);
  return above === -1 ? 100 : Math.max(above - 1, 0);
}
