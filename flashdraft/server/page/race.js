// The race: one prompt answered plainly and drafted, two clocks, and the two texts compared.

import { Answer } from "./answers/answer.js";
import { AnswerView } from "./answers/view.js";
import { drawError, element } from "./dom.js";
import { ServerError } from "./server.js";

const SEED = 1;
const TEMPERATURE = 0.8; // of a sampled race, where neither the settings nor the model sample
const FRAME_MS = 50; // drawing takes time from an engine on the same machine
const CONTEXT = 24; // characters shown before and after the place where two texts part

class Lane {
  constructor(root, options) {
    this.root = root;
    this.options = options; // of the request's extension field
    this.clock = root.querySelector(".clock");
    this.rate = root.querySelector(".rate");
    this.hint = this.rate.textContent;
    this.place = root.querySelector(".lane-answer");
    this.reset();
  }

  reset() {
    this.answer = new Answer();
    this.view = new AnswerView();
    this.place.replaceChildren(this.view.root);
    this.startedAt = null;
    this.seconds = 0;
    this.drawn = null; // what the answer's view shows
    this.root.classList.remove("running", "done", "won");
    this.draw();
  }

  start() {
    this.startedAt = performance.now();
    this.root.classList.add("running");
  }

  end() {
    this.seconds = (performance.now() - this.startedAt) / 1000;
    this.startedAt = null;
    this.root.classList.replace("running", "done");
    this.draw();
  }

  get text() {
    return this.answer.reasoning.text + this.answer.content.text;
  }

  draw() {
    const isRunning = this.startedAt !== null;
    const seconds = isRunning ? (performance.now() - this.startedAt) / 1000 : this.seconds;
    this.clock.firstChild.data = seconds.toFixed(2);
    const state = `${isRunning} ${this.answer.numTokens} ${this.text.length}`;
    if (state === this.drawn) return;
    this.drawn = state;
    this.view.draw(this.answer, { live: isRunning, coloured: true });
    const rate = this.answer.rate();
    const length = this.answer.acceptedLength();
    this.rate.textContent = rate
      ? `${rate.toFixed(rate < 10 ? 1 : 0)} tok/s, ${length.toFixed(2)} tokens a step, ` +
        `${this.answer.steps.length} steps`
      : this.hint;
  }
}

// Where two texts first differ, or null when they are the same to the last character.
export function firstDifference(one, other) {
  const length = Math.max(one.length, other.length);
  for (let i = 0; i < length; i++) if (one[i] !== other[i]) return i;
  return null;
}

export class Race {
  constructor({ page, server, settings }) {
    Object.assign(this, { page, server, settings });
    this.plain = new Lane(page.lanePlain, { tokens: true, verify: 0 });
    this.drafted = new Lane(page.laneDrafted, { tokens: true });
    this.controller = null;
  }

  fields(options, length) {
    const { system } = this.settings;
    const messages = system ? [{ role: "system", content: system }] : [];
    messages.push({ role: "user", content: this.page.racePrompt.value.trim() });
    const common = { ...this.settings.template, max_tokens: length, flashdraft: options };
    return { messages, ...this.drawing, ...common };
  }

  // How tokens are chosen; both runs have one seed.
  get drawing() {
    if (this.page.raceDrawing.value === "greedy") return { temperature: 0, seed: SEED };
    const { sampling } = this.settings;
    const temperature = sampling.temperature || this.server.defaults.temperature || TEMPERATURE;
    return { seed: SEED, ...sampling, temperature };
  }

  stop() {
    this.controller?.abort();
    return this.controller !== null;
  }

  async run() {
    if (this.controller || !this.page.racePrompt.value.trim()) return;
    this.controller = new AbortController();
    for (const lane of [this.plain, this.drafted]) lane.reset();
    this.announce("running", element("p", "", "Reading the prompt."));
    this.page.raceStart.textContent = "Stop";
    this.page.lanes.style.setProperty("--columns", this.page.raceLength.value);
    const drawing = this.keepDrawing();
    try {
      await this.runBoth(Number(this.page.raceLength.value));
      this.judge();
    } catch (error) {
      this.showEnd(error);
    }
    this.controller = null;
    clearInterval(drawing);
    this.page.raceStart.textContent = "Start";
  }

  async runBoth(length) {
    // both runs find the prompt in the cache: the second would otherwise be favoured
    for await (const chunk of this.server.chat(this.fields({}, 1), this.controller.signal)) void chunk;
    if (this.page.raceOrder.value === "together") {
      this.announce("running", element("p", "", "Both are writing."));
      await Promise.all([this.runLane(this.plain, length), this.runLane(this.drafted, length)]);
    } else {
      this.announce("running", element("p", "", "Plain goes first."));
      await this.runLane(this.plain, length);
      this.announce("running", element("p", "", "Now drafted."));
      await this.runLane(this.drafted, length);
    }
  }

  async runLane(lane, length) {
    lane.start();
    try {
      const fields = this.fields(lane.options, length);
      for await (const chunk of this.server.chat(fields, this.controller.signal)) {
        lane.answer.absorb(chunk, performance.now());
      }
    } finally {
      lane.end();
    }
  }

  keepDrawing() {
    return setInterval(() => {
      for (const lane of [this.plain, this.drafted]) if (lane.startedAt !== null) lane.draw();
    }, FRAME_MS);
  }

  judge() {
    const { plain, drafted } = this;
    const ratio = plain.seconds / drafted.seconds;
    const winner = ratio >= 1 ? drafted : plain;
    winner.root.classList.add("won");
    const at = firstDifference(plain.text, drafted.text);
    const count = plain.text.length.toLocaleString("en");
    const equality = at === null
      ? element("p", "", element("strong", "", "Identical text."), ` All ${count} characters agree.`)
      : this.describeDifference(at);
    equality.dataset.identical = String(at === null);
    const speed = element("p", "speed", element("strong", "", `${ratio.toFixed(2)}×`),
      " as fast drafted as plain");
    this.announce("done", speed, equality);
  }

  announce(state, ...nodes) {
    this.page.verdict.dataset.state = state;
    this.page.verdict.replaceChildren(...nodes);
    this.page.verdict.hidden = false;
  }

  describeDifference(at) {
    const around = (text) => `“${text.slice(Math.max(0, at - CONTEXT), at + CONTEXT)}”`;
    return element("p", "", element("strong", "", `The texts part at character ${at + 1}.`),
      ` Plain: ${around(this.plain.text)} Drafted: ${around(this.drafted.text)} On a GPU in`,
      " bfloat16 this may happen where two tokens score the same within rounding.");
  }

  showEnd(error) {
    if (error.name === "AbortError") {
      this.announce("stopped", element("p", "", "Stopped before the end."));
      return;
    }
    this.announce("failed");
    this.stop(); // the other lane has nobody to race against
    const shown = error instanceof ServerError ? error : new ServerError("failed", String(error));
    drawError(this.page.verdict, shown, () => this.run());
    this.server.report(shown);
    if (shown.kind === "key") this.onKeyNeeded(() => this.run());
  }
}
