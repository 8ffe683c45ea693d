// The page: what is sent to the model, and how the answer is shown while its samples arrive.
import * as api from "./api.js";
import { AnswerView } from "./answer.js";
import { byId, element } from "./dom.js";
import { showFacts, showGalleries, showReliability } from "./run.js";
import { Pad } from "./pad.js";
import { paint, paintGrey, prepared, sendable } from "./images.js";

const SAMPLES = [10, 50, 200, 1000];
const LISTED = 256; // pixels a side of drawings that are sent as lists of numbers
const STILL = window.matchMedia("(prefers-reduced-motion: reduce)");
const UNHURRIED = 900; // milliseconds that an answer takes at least, so that its samples can be seen to arrive

let model = null;
let view = null;
let pad = null;
let file = null; // the last one chosen, as it was
let sent = null; // the last image, as it was sent
let asking = new AbortController();

async function ask(image) {
  asking.abort();
  asking = new AbortController();
  const { signal } = asking;
  sent = image;
  showProblem("");
  const samples = model.random ? Number(byId("samples").value) : 1;
  view.begin(samples);
  const pause = STILL.matches ? 0 : UNHURRIED / Math.min(samples, 50);
  try {
    const draws = model.random && samples * model.classes.length <= model.limits.draws;
    for await (const line of api.ask(image, { samples, draws, signal })) {
      view.show(line);
      if (!line.done && pause) await new Promise((done) => setTimeout(done, pause));
      if (signal.aborted) return;
    }
  } catch (error) {
    if (signal.aborted) return;
    view.end();
    report(error);
  }
}

function report(error) {
  if (error.status === 401) byId("token-form").hidden = false;
  else showProblem(error.message);
}

function showProblem(sentence) {
  byId("problem").hidden = !sentence;
  byId("problem").textContent = sentence;
}

async function askDrawing(strokes) {
  const grey = prepared(strokes, model.input.height);
  file = null;
  byId("invert-row").hidden = true;
  paintGrey(byId("preview"), grey);
  describe(`What the model sees: ${model.input.width} × ${model.input.height} pixels, scaled and centred as in MNIST.`);
  const large = grey.length > LISTED; // as lists of numbers it might be more than the server accepts
  await ask(large ? { file: await new Promise((done) => byId("preview").toBlob(done, "image/png")) } : { grey });
}

async function askFile(chosen) {
  if (chosen !== file) pad ? pad.clear() : forget();
  showProblem("");
  asking.abort();
  asking = new AbortController();
  const { signal } = asking;
  try {
    const grey = model.input.channels === 1, invert = grey && byId("invert").checked;
    const { blob, bitmap } = await sendable(chosen, { limits: model.limits, invert });
    if (signal.aborted) return; // another image has come while this one was opened
    file = chosen;
    byId("invert-row").hidden = !grey;
    const preview = byId("preview");
    [preview.width, preview.height] = [model.input.width, model.input.height];
    paint(preview, bitmap, invert, grey);
    describe(`Roughly what the model sees: ${chosen.name ? `“${chosen.name}”, ` : ""}resized to ${model.input.width} × ${model.input.height} pixels.`);
    await ask({ file: blob });
  } catch (error) {
    report(error);
  }
}

// What is said beside the small image; without a sentence there is no image yet.
function describe(sentence) {
  byId("seen").classList.toggle("empty", !sentence);
  byId("seen-says").textContent = sentence || "Your image as the model sees it will appear here.";
}

// A test image of the gallery, from the page itself.
async function askShown(image) {
  const canvas = element("canvas", { width: image.naturalWidth, height: image.naturalHeight });
  canvas.getContext("2d").drawImage(image, 0, 0);
  const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
  byId("answer").focus({ preventScroll: true });
  byId("ask").scrollIntoView({ behavior: STILL.matches ? "auto" : "smooth" });
  await askFile(new File([blob], "a test image", { type: "image/png" }));
}

function forget() {
  asking.abort();
  file = sent = null;
  describe("");
  byId("preview").width = model.input.width; // empties it
  byId("invert-row").hidden = true;
  byId("invert").checked = false;
  byId("file").value = "";
  view.clear();
}

function takeFiles(event, files) {
  if (!model || !files.length) return;
  event.preventDefault();
  askFile(files[0]);
}

function listen() {
  byId("file").addEventListener("change", (event) => takeFiles(event, event.target.files));
  byId("clear").addEventListener("click", () => (pad ? pad.clear() : forget()));
  byId("invert").addEventListener("change", () => file && askFile(file));
  byId("samples").addEventListener("change", () => sent && ask(sent));
  document.addEventListener("paste", (event) => takeFiles(event, event.clipboardData.files));
  document.addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget || document.body.classList.remove("dropping"));
  document.addEventListener("drop", (event) => {
    document.body.classList.remove("dropping");
    takeFiles(event, event.dataTransfer.files);
  });
  byId("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    api.useToken(byId("token").value.trim());
    byId("token-form").hidden = true;
    start();
  });
}

function prepare() {
  view = new AnswerView(model);
  const choices = [...new Set([...SAMPLES, model.default_samples])].filter((each) => each <= model.limits.samples);
  byId("samples").replaceChildren(
    ...choices.sort((a, b) => a - b).map((each) => new Option(each.toLocaleString("en"), each, false, each === model.default_samples)),
  );
  byId("samples-row").hidden = !model.random;
  byId("one-pass").hidden = model.random;
  describe("");
  const drawable = model.input.channels === 1 && model.input.height === model.input.width;
  byId("drawing").hidden = !drawable;
  if (drawable) pad = new Pad(byId("pad"), { drawn: askDrawing, started: () => asking.abort(), cleared: forget });
}

async function start() {
  try {
    model = await api.model();
    prepare();
    showFacts(model);
    showReliability(model);
    showGalleries(await api.gallery(), model, askShown);
    document.documentElement.dataset.ready = "";
  } catch (error) {
    report(error);
  }
}

listen();
start();
