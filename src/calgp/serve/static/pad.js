// The drawing pad: strokes by pointer or by keyboard, kept as points of the unit square.
import { trace } from "./images.js";

const WIDTH = 0.075; // of a stroke, as shown
const STEP = 0.025; // of an arrow key

export class Pad {
  #canvas;
  #strokes = [];
  #pen = [0.5, 0.5]; // of the keyboard
  #down = false; // whether the keyboard's pen is
  #pointer = null;
  #pause = null;

  // `drawn` is called with the strokes after each; `started` when one begins; `cleared` when there are none any more.
  constructor(canvas, { drawn, started, cleared }) {
    this.#canvas = canvas;
    this.drawn = () => drawn(this.#strokes);
    this.started = started;
    this.cleared = cleared;
    canvas.addEventListener("pointerdown", (event) => this.#begin(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => this.#end(event));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    for (const name of ["focus", "blur"]) canvas.addEventListener(name, () => this.#show());
    this.#show();
  }

  clear() {
    clearTimeout(this.#pause);
    this.#strokes = [];
    this.#down = false;
    this.#show();
    this.cleared();
  }

  // Ask once the hand has rested: a 4, a 5 or an i has more strokes than one.
  #rest() {
    clearTimeout(this.#pause);
    this.#pause = setTimeout(() => this.drawn(), 450);
  }

  #begin(event) {
    if (event.button !== 0 || this.#pointer !== null) return;
    event.preventDefault();
    this.#canvas.focus({ preventScroll: true, focusVisible: false });
    clearTimeout(this.#pause);
    this.#pointer = event.pointerId;
    this.#canvas.setPointerCapture(event.pointerId);
    this.#down = false;
    this.#strokes.push([this.#place(event)]);
    this.#show();
    this.started();
  }

  #move(event) {
    if (event.pointerId !== this.#pointer) return;
    const passed = event.getCoalescedEvents?.() ?? [];
    for (const each of passed.length ? passed : [event]) this.#strokes.at(-1).push(this.#place(each));
    this.#show();
  }

  #end(event) {
    if (event.pointerId !== this.#pointer) return;
    this.#pointer = null;
    this.#rest();
  }

  #place(event) {
    const box = this.#canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  }

  #key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key in moves) {
      const far = event.shiftKey ? 4 * STEP : STEP;
      this.#pen = this.#pen.map((at, axis) => Math.min(Math.max(at + far * moves[event.key][axis], 0.05), 0.95));
      if (this.#down) this.#strokes.at(-1).push([...this.#pen]);
    } else if (event.key === " ") {
      this.#down = !this.#down;
      if (this.#down) {
        clearTimeout(this.#pause);
        this.#strokes.push([[...this.#pen]]);
        this.started();
      } else this.#rest();
    } else if (event.key === "Enter" && this.#strokes.length) {
      clearTimeout(this.#pause);
      this.#down = false;
      this.drawn();
    } else if (event.key === "Delete" || event.key === "Backspace") {
      this.clear();
    } else return;
    event.preventDefault();
    this.#show();
  }

  #show() {
    const canvas = this.#canvas, context = canvas.getContext("2d");
    context.setTransform(canvas.width, 0, 0, canvas.height, 0, 0);
    context.clearRect(0, 0, 1, 1);
    trace(context, this.#strokes, WIDTH, "#fff");
    if (canvas.matches(":focus-visible")) {
      context.lineWidth = 0.008;
      context.strokeStyle = this.#down ? "#e69f00" : "#56b4e9";
      context.beginPath();
      context.arc(...this.#pen, WIDTH / 2 + 0.012, 0, 2 * Math.PI);
      context.stroke();
    }
    const pen = this.#down ? ", pen down" : "";
    const shown = this.#strokes.length === 1 ? "1 stroke" : `${this.#strokes.length || "no"} strokes`;
    canvas.setAttribute("aria-label", `Drawing pad, ${shown}${pen}`);
  }
}
