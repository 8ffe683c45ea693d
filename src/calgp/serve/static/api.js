// The server's API: every call to it is here.
let token = null;

export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export function useToken(given) {
  token = given;
}

async function call(address, options = {}) {
  const headers = { ...options.headers };
  if (token !== null) headers.Authorization = `Bearer ${token}`;
  let response;
  try {
    response = await fetch(address, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "The server does not answer. Is it still running?");
  }
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  throw new Problem(response.status, problem.detail || `The server answered ${response.status}.`);
}

export const model = async () => (await call("/v1/model")).json();
export const gallery = async () => (await call("/v1/gallery")).json();

// The answer to one image, line by line while samples arrive. An image: { grey: lines of pixels } or { file: a Blob }.
export async function* ask(image, { samples, draws, seed = 0, signal }) {
  const lines = Math.min(samples, 50);
  const address = `/v1/predict/stream?samples=${samples}&seed=${seed}&every=${Math.ceil(samples / lines)}&draws=${draws}`;
  const response = await call(address, { method: "POST", signal, ...body(image) });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) {
      const line = JSON.parse(part);
      if (line.status) throw new Problem(line.status, line.detail);
      yield line;
      if (line.done) return;
    }
  }
  throw new Problem(0, "The connection was lost. Try again.");
}

function body(image) {
  if (image.grey) {
    return { body: JSON.stringify({ images: [{ grey: image.grey }] }), headers: { "Content-Type": "application/json" } };
  }
  const form = new FormData();
  form.append("images", image.file, "image");
  return { body: form };
}
