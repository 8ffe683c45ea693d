// Figures as SVG, from the API's numbers. Colours are in the style sheet.
import { svg } from "./dom.js";
import { count, nats, percent, sourceName, whole } from "./words.js";

export const FEW = 10; // images in a bin whose accuracy says little
const DOTS = 300; // single samples shown for a class: more cannot be distinguished

// The chart of one class: a bar for the mean, a line for ± the spread, a dot for each sample. It is drawn once and changed.
export class Bar {
  constructor() {
    this.bar = svg("rect", { class: "mean", x: 0, y: 4, height: 12, width: 0, rx: 2 });
    this.dots = svg("path", { class: "dots", d: "" });
    this.range = svg("path", { class: "range", d: "" });
    this.shown = svg("svg", { class: "bar", viewBox: "0 0 200 20", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("rect", { class: "track", x: 0, y: 4, height: 12, width: 200, rx: 2 }), this.bar, this.dots, this.range);
  }

  show(probability, spread, samples) {
    this.bar.setAttribute("width", 200 * probability);
    const [low, high] = [probability - spread, probability + spread].map((end) => 200 * Math.min(Math.max(end, 0), 1));
    this.range.setAttribute("d", spread > 5e-4 ? `M${low} 10H${high}M${low} 6v8M${high} 6v8` : "");
    const dots = samples.slice(0, DOTS).map((each, i) => `M${198 * each + 1} ${5 + (10 * ((i * 0.618) % 1))}h0`);
    this.dots.setAttribute("d", spread > 5e-4 ? dots.join("") : "");
  }
}

// Entropy between 0 and log Q: of this image if there is one, above that of the test images.
export function uncertaintyFigure({ entropy, parts, most, evaluations }) {
  const width = 330, left = 2, right = 328;
  const x = (value) => left + (right - left) * Math.min(value / most, 1);
  const marks = [], names = [svg("text", { x: left, y: 14, class: "name" }, "your image")];
  if (entropy === null) {
    marks.push(svg("path", { class: "tick", d: `M${left} 29H${right}` }));
  } else if (parts) {
    marks.push(svg("rect", { class: "aleatoric", x: left, y: 20, height: 18, width: x(parts.aleatoric) - left }));
    marks.push(svg("rect", { class: "epistemic", x: x(parts.aleatoric), y: 20, height: 18, width: Math.max(x(entropy) - x(parts.aleatoric), 0) }));
  } else {
    marks.push(svg("rect", { class: "aleatoric", x: left, y: 20, height: 18, width: x(entropy) - left }));
  }
  let y = 40;
  for (const { source, percentiles, outside } of evaluations) {
    const at = (share) => x(percentiles[share]);
    names.push(svg("text", { x: left, y: y + 16, class: "name" }, `${sourceName(source)}${outside ? ", unknown classes" : ", test images"}`));
    marks.push(svg("path", { class: outside ? "range outside" : "range", d: `M${at(5)} ${y + 29}H${at(95)}` }));
    marks.push(svg("rect", { class: outside ? "half outside" : "half", x: at(25), y: y + 23, height: 12, width: Math.max(at(75) - at(25), 1), rx: 1 }));
    marks.push(svg("path", { class: "middle", d: `M${at(50)} ${y + 21}v16` }));
    y += 40;
  }
  if (entropy !== null) marks.push(svg("path", { class: "here", d: `M${x(entropy)} 18V${y}` }));
  const step = most > 4 ? 1 : most > 1 ? 0.5 : 0.25;
  const ticks = Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step).map((at) => svg("g", {},
    svg("path", { class: "tick", d: `M${x(at)} ${y}v5` }),
    at > 0.88 * most ? null : svg("text", { x: x(at), y: y + 18, "text-anchor": at === 0 ? "start" : "middle" }, String(at))));
  const ranges = evaluations.map((each) => `Half of ${sourceName(each.source)} have between ${nats(each.percentiles[25])} and ${nats(each.percentiles[75])}.`);
  const here = entropy === null ? "" : `Entropy of your image: ${nats(entropy)} of at most ${nats(most)} nats. `;
  return svg("svg", { viewBox: `0 0 ${width} ${y + 24}`, role: "img", "aria-label": `${here}${ranges.join(" ") || "The test images have not been evaluated."}` },
    svg("path", { class: "axis", d: `M${left} ${y}H${right}` }), ...marks, ...names, ...ticks,
    svg("text", { x: right, y: y + 18, "text-anchor": "end", class: "name" }, "nats"));
}

// Accuracy by confidence: bars are accuracies, on the diagonal both agree.
export function reliabilityFigure({ edges, count: counts, accuracy, confidence }) {
  const side = 260, left = 46, top = 10, size = side, strip = 44;
  const x = (value) => left + size * value, y = (value) => top + size * (1 - value);
  const most = Math.max(...counts);
  const bins = [];
  counts.forEach((n, bin) => {
    if (!n) return;
    const [from, to] = [edges[bin], edges[bin + 1]];
    const over = accuracy[bin] < confidence[bin];
    const [low, high] = wilson(accuracy[bin], n), middle = x((from + to) / 2);
    const height = Math.max((strip * Math.log1p(n)) / Math.log1p(most), 1);
    bins.push(svg("g", {},
      svg("title", {}, `Confidence ${whole(from)} to ${whole(to)}: accuracy ${percent(accuracy[bin])} on ${count(n, "image")}`),
      svg("rect", { class: n < FEW ? "accuracy few" : "accuracy", x: x(from) + 0.7, width: x(to) - x(from) - 1.4, y: y(accuracy[bin]), height: y(0) - y(accuracy[bin]) }),
      svg("path", { class: over ? "gap over" : "gap under", d: `M${x(from) + 0.7} ${y(confidence[bin])}H${x(to) - 0.7}` }),
      svg("path", { class: "range", d: `M${middle} ${y(low)}V${y(high)}` }),
      svg("rect", { class: "counted", x: x(from) + 0.7, width: x(to) - x(from) - 1.4, y: y(0) + 74 - height, height })));
  });
  const ticks = [0, 0.25, 0.5, 0.75, 1].flatMap((share) => [
    svg("path", { class: "grid", d: `M${x(0)} ${y(share)}H${x(1)}` }),
    svg("text", { x: left - 6, y: y(share) + 4, "text-anchor": "end" }, whole(share)),
    svg("text", { x: x(share), y: y(0) + 16, "text-anchor": share === 1 ? "end" : "middle" }, whole(share)),
  ]);
  const n = counts.reduce((sum, each) => sum + each, 0);
  return svg("svg", { viewBox: `0 0 ${left + size + 8} ${top + size + 96}`, role: "img",
    "aria-label": `Reliability diagram of ${count(n, "test image")}. The table below has its numbers.` },
    ...ticks, ...bins, svg("path", { class: "agree", d: `M${x(0)} ${y(0)}L${x(1)} ${y(1)}` }),
    svg("path", { class: "axis", d: `M${x(0)} ${y(0)}H${x(1)}M${x(0)} ${y(0) + 74}H${x(1)}` }),
    svg("path", { class: "here", id: "here", d: "" }),
    svg("text", { x: x(0) + 4, y: top + 12, class: "name" }, "accuracy"),
    svg("text", { x: x(0) + 4, y: y(0) + 70, class: "name" }, "images"),
    svg("text", { x: x(1), y: y(0) + 92, "text-anchor": "end", class: "name" }, "confidence"));
}

// Mark where an answer stands on the reliability diagram.
export function markConfidence(confidence) {
  document.getElementById("here")?.setAttribute("d", confidence === null ? "" : `M${46 + 260 * confidence} 10v260`);
}

// Wilson's 95 % interval of a share.
function wilson(share, n, z = 1.96) {
  const centre = share + (z * z) / (2 * n), scale = 1 + (z * z) / n;
  const half = z * Math.sqrt((share * (1 - share)) / n + (z * z) / (4 * n * n));
  return [Math.max((centre - half) / scale, 0), Math.min((centre + half) / scale, 1)];
}
