// What is told of the run: facts, scores, the reliability diagram, test images.
import { byId, element } from "./dom.js";
import { FEW, reliabilityFigure } from "./figures.js";
import { own } from "./verdict.js";
import { count, interval, nats, percent, sourceName, sure, whole } from "./words.js";

const four = (value) => value.toFixed(4);
const SCORES = [
  ["err", "Error", percent, "of the test images it gets wrong"],
  ["ece", "ECE", four, "mean distance between what it says and how often it is right"],
  ["mnll", "MNLL", four, "−log of the probability of the true class, on average"],
  ["brier", "Brier", four, "squared distance between probabilities and the truth"],
];

export function showFacts(model) {
  const { classes, input } = model;
  const named = classes.length <= 12 ? classes.join(", ") : `${classes.slice(0, 8).join(", ")}, … (${classes.length})`;
  const calibrated = model.calibrator ? `, calibrated by ${model.calibrator}` : "";
  byId("facts").replaceChildren(
    element("strong", {}, model.label), ` on ${model.network}, trained on ${count(model.train_images, "image")} of ${sourceName(model.source)}${calibrated}. `,
    `It knows ${named}, and takes ${input.width} × ${input.height} ${input.channels === 1 ? "grey" : "colour"} pixels.`);
  byId("version").textContent = `calgp ${model.version}.`;
}

export function showReliability(model) {
  const evaluation = own(model);
  if (!evaluation?.scores || !evaluation.reliability) {
    byId("reliability").replaceChildren(element("p", { class: "note" },
      "Not known: the run has not been evaluated on images of its own classes. ", element("code", {}, "calgp evaluate"), " does that."));
    return;
  }
  const { scores, intervals, reliability } = evaluation;
  const tiles = SCORES.map(([key, name, form, says]) => element("li", { class: "card" },
    element("span", { class: "name" }, name), element("span", { class: "value" }, form(scores[key])),
    element("span", { class: "under" }, interval(intervals?.[key], form)), element("span", { class: "means" }, says)));
  const outside = model.evaluations.filter((each) => each.outside && each.ood).map((each) => element("p", {},
    `It doubts a picture of ${sourceName(each.source)}, which it does not know, more than one of ${sourceName(evaluation.source)} in ${
      percent(each.ood.entropy.auroc.value)} of all pairs (50 % would be chance).`));
  byId("reliability").replaceChildren(
    element("p", { class: "summary" }, `On ${count(evaluation.n, "test image")} of ${sourceName(evaluation.source)} it was ${
      percent(scores.confidence)} sure on average, and ${percent(1 - scores.err)} right.`),
    ...outside,
    element("div", { class: "grid" },
      element("figure", { class: "card" }, reliabilityFigure(reliability), element("figcaption", {},
        `Bars: how often it was right, by how sure it was, with 95 % intervals; pale where there are fewer than ${FEW} images. Ideal is the diagonal. Short lines: how sure it was on average, `,
        element("span", { class: "over" }, "dashed if more than right"), ". Below: how many images, on a logarithmic scale. The dotted line is your picture.")),
      element("div", {}, element("ul", { class: "tiles" }, ...tiles),
        element("p", { class: "caption" }, `Small numbers: 95 % intervals over test images. Less is better.${model.random ? ` All with ${count(evaluation.samples, "sample")} an image.` : ""}`),
        table(reliability))));
}

function table({ edges, count: counts, accuracy, confidence }) {
  const rows = counts.flatMap((n, bin) => (n ? [element("tr", {},
    element("th", { scope: "row" }, `${whole(edges[bin])} – ${whole(edges[bin + 1])}`),
    ...[n.toLocaleString("en"), percent(confidence[bin]), percent(accuracy[bin])].map((cell) => element("td", { class: "number" }, cell)))] : []));
  return element("details", {}, element("summary", {}, "The diagram as a table"), element("table", {},
    element("thead", {}, element("tr", {}, ...["Confidence", "Images", "Said", "Right"].map((name, place) =>
      element("th", { scope: "col", class: place ? "number" : null }, name)))),
    element("tbody", {}, ...rows)));
}

export function showGalleries(told, model, choose) {
  const groups = [
    ["Least certain", "The highest entropy: what to ask a person about.", told.least_certain],
    ["Confidently wrong", "The mistakes with the highest confidence.", told.confidently_wrong],
    ["Most certain", "The lowest entropy.", told.most_certain],
  ].filter(([, , shown]) => shown.length);
  if (!groups.length) {
    byId("galleries").replaceChildren(element("p", { class: "note" },
      `The test images of ${sourceName(model.source)} are not on this machine, or the run has not been evaluated on them (`, element("code", {}, "calgp evaluate"), ")."));
    return;
  }
  byId("galleries").replaceChildren(element("p", {}, "Press one to ask the model about it again."),
    ...groups.flatMap(([title, note, shown]) => [
      element("h3", {}, title), element("p", { class: "caption" }, note),
      element("ul", { class: "gallery" }, ...shown.map((each) => element("li", {}, thumbnail(each, choose))))]));
}

function thumbnail(shown, choose) {
  const image = element("img", { src: shown.picture, alt: "" });
  const button = element("button", { type: "button", class: shown.wrong ? "card wrong" : "card", title: shown.name }, image,
    element("span", { class: "told" }, "says ", element("strong", {}, shown.label), ` ${sure(shown.confidence)}`),
    element("span", { class: "truth" }, shown.wrong ? `✗ it is ${shown.truth}` : `✓ it is ${shown.truth}`),
    element("span", { class: "under" }, `entropy ${nats(shown.entropy)}`));
  button.addEventListener("click", () => choose(image));
  return button;
}
