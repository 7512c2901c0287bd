// The page's side of the worker that colours code and sets formulas (../typesetter.js). It runs
// other people's code on a model's text: whatever takes too long there is ended, and the text stays
// as it was written.

const LIMIT_MS = 2000;
const START_MS = 10_000; // the first job waits for the worker's files too
const MAX_FAILURES = 5; // then texts stay plain until the page is opened again
const MAX_KNOWN = 400; // formulas kept set

// The one address that may become a script.
const policy = globalThis.trustedTypes?.createPolicy("flashdraft", {
  createScriptURL: () => new URL("../typesetter.js", import.meta.url).href,
});

class Typesetter {
  constructor() {
    this.waiting = []; // { job, done }
    this.failures = 0;
    this.worker = null;
    this.known = new Map(); // formulas: what became of them, null where they are wrong
  }

  // What the worker makes of a job, or null.
  ask(job) {
    if (this.failures >= MAX_FAILURES) return Promise.resolve(null);
    return new Promise((done) => {
      this.waiting.push({ job, done });
      if (this.waiting.length === 1) this.next();
    });
  }

  next() {
    if (!this.waiting.length) return;
    const limit = this.worker ? LIMIT_MS : START_MS;
    this.worker ??= this.start();
    this.timer = setTimeout(() => this.fail(), limit);
    this.worker.postMessage(this.waiting[0].job);
  }

  start() {
    const address = policy ? policy.createScriptURL("") : new URL("../typesetter.js", import.meta.url);
    const worker = new Worker(address);
    worker.addEventListener("message", ({ data }) => this.end(data));
    worker.addEventListener("error", () => this.fail());
    return worker;
  }

  fail() {
    this.failures += 1;
    this.worker?.terminate();
    this.worker = null;
    this.end(null);
  }

  end(result) {
    clearTimeout(this.timer);
    this.waiting.shift()?.done(result);
    this.next();
  }

  // A formula's tree: at once where it is known, later by the promise where it is not.
  formula(tex, isDisplay) {
    const key = `${isDisplay} ${tex}`;
    if (this.known.has(key)) return { tree: this.known.get(key) };
    const later = this.ask({ kind: "formula", tex, isDisplay }).then((tree) => {
      if (this.known.size >= MAX_KNOWN) this.known.delete(this.known.keys().next().value);
      this.known.set(key, tree);
      return tree;
    });
    return { later };
  }
}

export const typesetter = new Typesetter();
