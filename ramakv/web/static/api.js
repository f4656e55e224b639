// Talking to the daemon: reads, actions, and the stream of snapshots, each with the token.

const KEY = "ramakv.token";
const SILENCE_MS = 6000; // a snapshot comes each second
const RETRY_MS_MAX = 10000;

let token = kept();
let asking = null;

function kept() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

function keep(text) {
  token = text;
  try {
    sessionStorage.setItem(KEY, text);
  } catch { /* it lasts as long as the page, then */ }
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function request(path, options = {}) {
  for (;;) {
    const sent = token;
    const headers = { ...options.headers };
    if (sent) headers.Authorization = `Bearer ${sent}`;
    const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
    if (response.status !== 401) return response;
    if (sent === token) await askForToken(Boolean(sent));
  }
}

/** Ask for the token, once for all requests that need it. */
function askForToken(wasWrong) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("token-dialog");
    const form = document.getElementById("token-form");
    const input = document.getElementById("token");
    document.getElementById("token-error").hidden = !wasWrong;
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    form.addEventListener("submit", () => {
      keep(input.value.trim());
      input.value = "";
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

async function unpack(response) {
  let body = {};
  try {
    body = await response.json();
  } catch { /* no JSON: the status says it */ }
  if (!response.ok) throw new Refused(response.status, body.error ?? `HTTP ${response.status}`);
  return body;
}

export async function read(path, parameters) {
  return unpack(await request(`${path}?${new URLSearchParams(parameters)}`));
}

export async function act(path, body = {}) {
  const headers = { "Content-Type": "application/json", "X-Ramakv-Action": "1" };
  return unpack(await request(path, { method: "POST", headers, body: JSON.stringify(body) }));
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/**
 * Follow the stream for ever, connecting again whenever it breaks off or falls silent.
 * EventSource cannot send a token, so the stream is read by fetch.
 */
export async function follow({ onEvent, onLost }) {
  for (let failures = 0; ; ) {
    try {
      await followOnce((kind, data) => {
        failures = 0;
        onEvent(kind, data);
      });
    } catch (error) {
      onLost(error);
    }
    await pause(Math.min(RETRY_MS_MAX, 500 * 2 ** failures) * (0.75 + Math.random() / 2));
    failures += 1;
  }
}

async function followOnce(onEvent) {
  const stop = new AbortController();
  let silence;
  const heard = () => {
    clearTimeout(silence);
    silence = setTimeout(() => stop.abort(new Error("silent")), SILENCE_MS);
  };
  try {
    const response = await request("/api/stream", { signal: stop.signal });
    if (!response.ok) await unpack(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (heard(); ; heard()) {
      const { value, done } = await reader.read();
      if (done) throw new Error("ended");
      const parts = (text + value).split("\n\n");
      text = parts.pop();
      for (const part of parts) deliver(part, onEvent);
    }
  } finally {
    clearTimeout(silence);
    stop.abort();
  }
}

function deliver(part, onEvent) {
  let kind = "message";
  let data = "";
  for (const line of part.split("\n")) {
    if (line.startsWith("event: ")) kind = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  if (data) onEvent(kind, JSON.parse(data));
}
