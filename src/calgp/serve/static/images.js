// From strokes or files to what is sent.

const FINE = 10; // the drawing is rendered this much finer than it is sent, and averaged: antialiased alike in all browsers
const STROKE = 2.3 / 28; // a pen's width, of the side: about MNIST's
const BOX = 20 / 28;
const LARGEST = 1024; // a side, of files that have to be made smaller

// Strokes (lists of [x, y], any scale) as MNIST's images are made: white on black, the longer side fills 20 of 28 pixels, the
// centre of mass is the centre. The pen has one width however large the drawing is.
export function prepared(strokes, side = 28) {
  const points = strokes.flat();
  const [left, right] = ends(points.map(([x]) => x));
  const [top, bottom] = ends(points.map(([, y]) => y));
  const room = (BOX - STROKE) * side;
  const scale = room / Math.max(right - left, bottom - top, 1e-9);
  const small = Math.max(right - left, bottom - top) < 0.02; // a dot stays a dot
  const centred = strokes.map((stroke) =>
    stroke.map(([x, y]) => [
      side / 2 + (small ? 0 : (x - (left + right) / 2) * scale),
      side / 2 + (small ? 0 : (y - (top + bottom) / 2) * scale),
    ]),
  );
  const [x, y] = massCentre(rendered(centred, side));
  const shift = ([a, b]) => [a + side / 2 - x, b + side / 2 - y];
  return rendered(centred.map((stroke) => stroke.map(shift)), side);
}

function ends(values) {
  return [Math.min(...values), Math.max(...values)];
}

function rendered(strokes, side) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = side * FINE;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.scale(FINE, FINE);
  trace(context, strokes, STROKE * side, "#fff");
  const fine = context.getImageData(0, 0, side * FINE, side * FINE).data;
  return Array.from({ length: side }, (_, row) => Array.from({ length: side }, (_, column) => {
    let sum = 0;
    for (let i = 0; i < FINE; i++) {
      for (let j = 0; j < FINE; j++) sum += fine[4 * ((row * FINE + i) * side * FINE + column * FINE + j) + 3];
    }
    return Math.round(sum / FINE ** 2);
  }));
}

export function trace(context, strokes, width, colour) {
  context.lineWidth = width;
  context.lineCap = context.lineJoin = "round";
  context.strokeStyle = colour;
  for (const stroke of strokes) {
    context.beginPath();
    context.moveTo(...stroke[0]);
    for (const point of stroke.slice(1)) context.lineTo(...point);
    context.lineTo(stroke.at(-1)[0] + width / 100, stroke.at(-1)[1]); // a line of no length would draw nothing
    context.stroke();
  }
}

function massCentre(grey) {
  let mass = 0, x = 0, y = 0;
  grey.forEach((line, row) => line.forEach((shade, column) => {
    mass += shade;
    x += shade * (column + 0.5);
    y += shade * (row + 0.5);
  }));
  return [x / mass, y / mass];
}

// A file as it can be sent: as it is if the server takes it, else as a smaller PNG.
export async function sendable(file, { limits, invert }) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error("This file is not an image that the browser can open. Use PNG, JPEG or WebP.");
  }
  const taken = ["image/png", "image/jpeg", "image/webp"].includes(file.type);
  const fits = file.size < limits.body - 4096 && Math.max(bitmap.width, bitmap.height) <= limits.side
    && bitmap.width * bitmap.height <= limits.pixels;
  const blob = taken && fits && !invert ? file : await redrawn(bitmap, Math.min(LARGEST, limits.side), invert);
  return { blob, bitmap };
}

function redrawn(bitmap, largest, invert) {
  const shrink = Math.min(1, largest / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(Math.round(bitmap.width * shrink), 1);
  canvas.height = Math.max(Math.round(bitmap.height * shrink), 1);
  paint(canvas, bitmap, invert);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

// A bitmap stretched over a canvas, on white where it is transparent.
export function paint(canvas, bitmap, invert = false, grey = false) {
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  if (!invert && !grey) return;
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < pixels.data.length; i += 4) {
    let colours = [0, 1, 2].map((channel) => pixels.data[i + channel]);
    if (grey) colours = Array(3).fill(0.299 * colours[0] + 0.587 * colours[1] + 0.114 * colours[2]);
    colours.forEach((shade, channel) => { pixels.data[i + channel] = invert ? 255 - shade : shade; });
  }
  context.putImageData(pixels, 0, 0);
}

export function paintGrey(canvas, grey) {
  canvas.height = grey.length;
  canvas.width = grey[0].length;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const pixels = context.createImageData(canvas.width, canvas.height);
  grey.flat().forEach((shade, place) => pixels.data.set([shade, shade, shade, 255], 4 * place));
  context.putImageData(pixels, 0, 0);
}
