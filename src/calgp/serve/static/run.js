// The run: facts, scores, the reliability diagram, test images.
import { byId, element } from "./dom.js";
import { FEW, reliabilityFigure } from "./figures.js";
import { ownEvaluation } from "./verdict.js";
import { count, interval, nats, percent, sourceName, sure, whole } from "./words.js";

const four = (value) => value.toFixed(4);
const SCORES = [
  ["err", "Error", percent, "share of test images with a wrong label"],
  ["ece", "ECE", four, "mean gap between confidence and accuracy"],
  ["mnll", "MNLL", four, "mean −log probability of the true class"],
  ["brier", "Brier", four, "squared distance between probabilities and the truth"],
];

export function showFacts(model) {
  const { classes, input } = model;
  const named = classes.length <= 12 ? classes.join(", ") : `${classes.slice(0, 8).join(", ")}, … (${classes.length})`;
  const calibrated = model.calibrator ? `, calibrated by ${model.calibrator}` : "";
  byId("facts").replaceChildren(
    element("strong", {}, model.label), ` on ${model.network}, trained on ${count(model.train_images, "image")} of ${sourceName(model.source)}${calibrated}. `,
    `Classes: ${named}. Input: ${input.width} × ${input.height} ${input.channels === 1 ? "grey" : "colour"} pixels.`);
  byId("version").textContent = `calgp ${model.version}.`;
}

export function showReliability(model) {
  const evaluation = ownEvaluation(model);
  if (!evaluation?.scores || !evaluation.reliability) {
    byId("reliability").replaceChildren(element("p", { class: "note" },
      "Unknown: the run has not been evaluated on images of its own classes. Run ", element("code", {}, "calgp evaluate"), "."));
    return;
  }
  const { scores, intervals, reliability } = evaluation;
  const tiles = SCORES.map(([key, name, form, says]) => element("li", { class: "card" },
    element("span", { class: "name" }, name), element("span", { class: "value" }, form(scores[key])),
    element("span", { class: "under" }, interval(intervals?.[key], form)), element("span", { class: "means" }, says)));
  const outside = model.evaluations.filter((each) => each.outside && each.ood).map((each) => element("p", {},
    `In ${percent(each.ood.entropy.auroc.value)} of all pairs it is more uncertain about an image of ${
      sourceName(each.source)}, whose classes it does not know, than about one of ${sourceName(evaluation.source)} (chance: 50\u202f%).`));
  byId("reliability").replaceChildren(
    element("p", { class: "summary" }, `On ${count(evaluation.n, "test image")} of ${sourceName(evaluation.source)} its mean confidence was ${
      percent(scores.confidence)} and its accuracy ${percent(1 - scores.err)}.`),
    ...outside,
    element("div", { class: "grid" },
      element("figure", { class: "card" }, reliabilityFigure(reliability), element("figcaption", {},
        `Bars: accuracy by confidence, with 95\u202f% intervals; pale bars have fewer than ${FEW} images. On the diagonal, confidence equals accuracy. Short lines: mean confidence, `,
        element("span", { class: "over" }, "dashed where it exceeds accuracy"), ". Below: the number of images, on a logarithmic scale. Dotted line: your image.")),
      element("div", {}, element("ul", { class: "tiles" }, ...tiles),
        element("p", { class: "caption" }, `Small numbers are 95\u202f% intervals. Lower is better.${model.random ? ` Computed with ${count(evaluation.samples, "sample")} per image.` : ""}`),
        table(reliability))));
}

function table({ edges, count: counts, accuracy, confidence }) {
  const rows = counts.flatMap((n, bin) => (n ? [element("tr", {},
    element("th", { scope: "row" }, `${whole(edges[bin])} – ${whole(edges[bin + 1])}`),
    ...[n.toLocaleString("en"), percent(confidence[bin]), percent(accuracy[bin])].map((cell) => element("td", { class: "number" }, cell)))] : []));
  return element("details", {}, element("summary", {}, "The diagram as a table"), element("table", {},
    element("thead", {}, element("tr", {}, ...["Confidence", "Images", "Mean confidence", "Accuracy"].map((name, place) =>
      element("th", { scope: "col", class: place ? "number" : null }, name)))),
    element("tbody", {}, ...rows)));
}

export function showGalleries(gallery, model, choose) {
  const groups = [
    ["Least certain", "The highest entropy: the first images that a person should check.", gallery.least_certain],
    ["Confidently wrong", "The mistakes with the highest confidence.", gallery.confidently_wrong],
    ["Most certain", "The lowest entropy.", gallery.most_certain],
  ].filter(([, , shown]) => shown.length);
  if (!groups.length) {
    byId("galleries").replaceChildren(element("p", { class: "note" },
      `The test images of ${sourceName(model.source)} are not on this machine, or the run has not been evaluated on them (`, element("code", {}, "calgp evaluate"), ")."));
    return;
  }
  byId("galleries").replaceChildren(element("p", {}, "Select an image to send it to the model."),
    ...groups.flatMap(([title, note, shown]) => [
      element("h3", {}, title), element("p", { class: "caption" }, note),
      element("ul", { class: "gallery" }, ...shown.map((each) => element("li", {}, thumbnail(each, choose))))]));
}

function thumbnail(shown, choose) {
  const image = element("img", { src: shown.image, alt: "" });
  const button = element("button", { type: "button", class: shown.wrong ? "card wrong" : "card", title: shown.name }, image,
    element("span", { class: "said" }, element("strong", {}, shown.label), `, ${sure(shown.confidence)}`),
    element("span", { class: "truth" }, shown.wrong ? `✗ true: ${shown.truth}` : "✓ correct"),
    element("span", { class: "under" }, `entropy ${nats(shown.entropy)}`));
  button.addEventListener("click", () => choose(image));
  return button;
}
