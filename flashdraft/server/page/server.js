// The server as the page sees it: one key, one model name, streams of chunks, errors in words.
// Addresses are relative, so the page also works behind a path prefix.

import { ofThisTab } from "./storage.js";

const POLL_MS = 2000;
const WORDS = {
  offline: "The server does not answer. It may have been stopped, or the network is gone.",
  key: "The server asks for an API key, or does not know this one.",
  busy: "The server has as many requests waiting as it takes.",
  restarting: "The engine is starting. Questions are answered as soon as it is ready.",
  cut: "The connection ended before the answer did.",
  refused: "The server refused the request.",
  failed: "The server failed on this request.",
};

export class ServerError extends Error {
  constructor(kind, detail = "", retryAfter = null, status = null) {
    super(WORDS[kind]);
    this.status = status; // of the answer, where there was one
    this.kind = kind;
    this.detail = detail;
    this.retryAfter = retryAfter; // seconds
  }
}

function kindOf(status) {
  if (status === 401) return "key";
  if (status === 429) return "busy";
  if (status === 503) return "restarting";
  return status >= 500 ? "failed" : "refused";
}

// A page that was opened with a key in its address would lend it to every request, and fetch
// refuses such addresses.
function addressOf(path) {
  const url = new URL(path, document.baseURI);
  url.username = url.password = "";
  return url;
}

async function errorOf(response) {
  let detail = "";
  try {
    const body = await response.json();
    detail = body.error?.message ?? "";
  } catch {
    // not JSON: the status must do
  }
  const seconds = Number.parseFloat(response.headers.get("Retry-After") ?? "");
  const kind = kindOf(response.status);
  return new ServerError(kind, detail, Number.isFinite(seconds) ? Math.ceil(seconds) : null, response.status);
}

// The data of server-sent events, however the network cut them.
async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // tells the server that nobody listens any more
  }
}

export class Server extends EventTarget {
  constructor() {
    super();
    this.model = null;
    this.defaults = {}; // what a request gets where it says nothing
    this.context = null; // tokens
    this.canThink = false;
    this.able = [];
    this.canSee = false;
    this.trouble = null; // a ServerError while the server cannot be asked
    this.key = ofThisTab.read("key");
  }

  useKey(key) {
    this.key = key;
    ofThisTab.write("key", key);
  }

  async ask(path, options = {}) {
    const headers = new Headers(options.headers);
    if (this.key) headers.set("Authorization", `Bearer ${this.key}`);
    let response;
    try {
      response = await fetch(addressOf(path), { cache: "no-store", ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("offline");
    }
    if (!response.ok) throw await errorOf(response);
    return response;
  }

  // Learn the model's name; where that fails, say why and try again until it works.
  async connect() {
    clearTimeout(this.timer);
    try {
      const list = await (await this.ask("v1/models")).json();
      const [model] = list.data;
      this.model = model.id;
      this.defaults = model.sampling_defaults ?? {};
      this.context = model.max_model_len ?? null;
      this.able = model.capabilities ?? [];
      this.canThink = this.able.includes("thinking");
      this.canSee = this.able.includes("vision");
      this.trouble = null;
    } catch (error) {
      this.trouble = error instanceof ServerError ? error : new ServerError("failed");
      if (this.trouble.kind !== "key") this.timer = setTimeout(() => this.connect(), POLL_MS);
    }
    if (this.trouble === null) await this.checkHealth();
    this.dispatchEvent(new Event("change"));
  }

  // /v1/models answers while the engine is down; /health does not.
  async checkHealth() {
    try {
      await this.ask("health");
    } catch (error) {
      this.trouble = error;
      this.timer = setTimeout(() => this.connect(), POLL_MS);
    }
  }

  // A request met trouble: show it, and watch for the end of it.
  report(error) {
    if (!["offline", "restarting"].includes(error.kind)) return;
    this.trouble = error;
    this.dispatchEvent(new Event("change"));
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.connect(), POLL_MS);
  }

  // Once more where the server has another model since the page asked for its name.
  async askModel(fields, signal) {
    const { model } = this;
    const body = { model, stream: true, stream_options: { include_usage: true }, ...fields };
    try {
      return await this.ask("v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(body),
        signal,
      });
    } catch (error) {
      if (error.status !== 404) throw error;
      await this.connect();
      if (this.trouble !== null || this.model === model) throw error;
      return this.askModel(fields, signal);
    }
  }

  // The chunks of one chat completion. It ends with the answer, or throws.
  async *chat(fields, signal) {
    if (this.model === null) await this.connect();
    if (this.model === null) throw this.trouble;
    const response = await this.askModel(fields, signal);
    try {
      for await (const data of eventData(response.body)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ServerError("failed", chunk.error.message);
        yield chunk;
      }
    } catch (error) {
      if (error.name === "AbortError" || error instanceof ServerError) throw error;
    }
    throw new ServerError("cut"); // no [DONE]: whatever came is not the whole answer
  }
}
