// Numbers as people read them, as in calgp's reports.
const THIN = "\u202f"; // a narrow space that does not break

export function percent(share) {
  if (share <= 0 || share >= 1) return `${share <= 0 ? 0 : 100}${THIN}%`;
  if (share < 5e-5 || share >= 1 - 5e-5) return `${share < 0.5 ? "<0.01" : ">99.99"}${THIN}%`;
  return `${(100 * share).toFixed(share >= 0.1 && share < 0.9995 ? 1 : 2)}${THIN}%`;
}

// A model is never certain: what would read 100 % only rounds to it.
export const sure = (share) => percent(Math.min(Math.max(share, 1e-9), 1 - 1e-9));
export const shortPercent = (share) => (share < 5e-4 ? `<0.1${THIN}%` : share > 0.9995 ? `>99.9${THIN}%` : `${(100 * share).toFixed(1)}${THIN}%`);
export const whole = (share) => `${Math.round(100 * share)}${THIN}%`;
export const nats = (value) => value.toFixed(2).replace("-", "−");
export const sourceName = (name) => (name.startsWith("folder:") ? name.split(/[/\\]/).filter(Boolean).at(-1).replace(/^folder:/, "") : name);
export const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

export function interval(ends, form) {
  if (!ends) return "";
  const [low, high] = ends.map(form);
  return `${low.replace(`${THIN}%`, "")} – ${high}`;
}
