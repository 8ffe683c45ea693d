// What is said about an answer: whether the model knows, and how reliable it is.
import { count, nats, percent, sourceName, whole } from "./words.js";

export const ENOUGH = 30; // test images behind a sentence about reliability
export const RARE = 95; // per cent of the test images have a lower entropy: above, and without a rule of the run, the page says "I don't know"

// That of the run's own test images; undefined if it was not evaluated.
export const ownEvaluation = (model) => {
  const inside = model.evaluations.filter((each) => !each.outside);
  return inside.find((each) => each.source === model.source) ?? inside[0];
};

// { abstains, why }: by the run's own rule if it has one; else if no class has half of the probability, or the entropy is rare.
export function decide(prediction, model) {
  if (prediction.abstain !== null) {
    return { abstains: prediction.abstain, why: `By its own rule, the run ${prediction.abstain ? "abstains" : "answers"} here.` };
  }
  if (prediction.confidence < 0.5) return { abstains: true, why: "No class has a probability of 50\u202f% or more." };
  const limit = ownEvaluation(model)?.entropy_percentiles?.[RARE];
  if (limit === undefined) return { abstains: false, why: "One class has a probability of 50\u202f% or more." };
  const abstains = prediction.entropy > limit;
  const range = `${abstains ? "above" : "within"} the range of ${RARE}\u202f% of the test images (up to ${nats(limit)} nats)`;
  return { abstains, why: `The entropy is ${range}.` };
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
  const evaluation = ownEvaluation(model);
  if (!evaluation?.reliability) return "Unknown: the run has not been evaluated on test images.";
  const found = nearest(confidence, evaluation.reliability);
  if (found === null) return "Unknown: no test image had a confidence like this.";
  return `On ${count(found.n, "test image")} of ${sourceName(evaluation.source)} with a confidence between ${whole(found.from)} and ${
    whole(found.to)}, the model was right ${percent(found.right)} of the time. This holds for similar images only.`;
}

// How many of 100 test images have a lower entropy; null where that is unknown.
export function rank(entropy, percentiles) {
  if (!percentiles) return null;
  const above = percentiles.findIndex((each) => each > entropy);
  return above === -1 ? 100 : Math.max(above - 1, 0);
}
