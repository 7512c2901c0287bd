// One answer as it arrives: its text, who wrote each token first, and how fast it comes.
// It knows chunks, not the page: drawing is view.js.

import { treesOf } from "./tree.js";

const RATE_WINDOW_MS = 2000;
const LOOK_AHEAD = 8; // tokens without visible text (marks of a turn, of thinking) that may be skipped

const MAX_SHOWN_TREES = 2000; // steps of an answer

export const TARGET = 0;
export const DRAFTED = 1;
export const UNKNOWN = 2;

// Text of one channel, with runs of [characters, origin, step] that cover it from the start.
class Channel {
  constructor(text = "", runs = []) {
    this.text = text;
    this.runs = runs;
  }

  add(text, origin, step) {
    this.text += text;
    this.runs.push([text.length, origin, step]);
  }

  // Where each run ends; it grows with the runs.
  get ends() {
    this.knownEnds ??= [];
    for (let i = this.knownEnds.length; i < this.runs.length; i++) {
      this.knownEnds.push((this.knownEnds[i - 1] ?? 0) + this.runs[i][0]);
    }
    return this.knownEnds;
  }

  toJSON() {
    return { text: this.text, runs: this.runs };
  }
}

export class Answer {
  constructor(saved = {}) {
    this.content = new Channel(saved.content?.text, saved.content?.runs);
    this.reasoning = new Channel(saved.reasoning?.text, saved.reasoning?.runs);
    this.steps = saved.steps ?? []; // [accepted drafts, tokens of the target's own, its trees if any]
    this.numTokens = saved.numTokens ?? 0;
    this.promptTokens = saved.promptTokens ?? 0;
    this.thoughtMs = saved.thoughtMs ?? 0;
    this.finish = saved.finish ?? null; // the API's finish_reason, or "stopped" here
    this.stats = saved.stats ?? null; // the server's own figures, once it has sent them
    this.lastRate = saved.lastRate ?? 0;
    this.earlierTokens = 0; // of an answer that goes on
    this.pending = []; // tokens whose text has not been shown yet: [rest of text, origin, step]
    this.arrivals = []; // [ms, tokens so far]
    this.lastStep = null;
    this.lastText = null; // of the last token
  }

  toJSON() {
    const { steps, numTokens, promptTokens, thoughtMs, finish, stats } = this;
    const [content, reasoning] = [this.content.toJSON(), this.reasoning.toJSON()];
    const lastRate = this.rate();
    return { content, reasoning, steps, numTokens, promptTokens, thoughtMs, finish, stats, lastRate };
  }

  // More is to come after all: it is added to what is there.
  goOn() {
    this.finish = this.stats = this.lastStep = null;
    this.pending = [];
    this.arrivals = [];
    this.earlierTokens = this.numTokens;
  }

  get isEmpty() {
    return !this.content.text && !this.reasoning.text;
  }

  absorb(chunk, now) {
    const extra = chunk.flashdraft ?? {};
    if (Array.isArray(extra.tokens)) {
      const trees = this.treesOf(extra.trees, extra.tokens);
      this.addTokens(extra.tokens, extra.step ?? null, now);
      if (trees && this.steps.length <= MAX_SHOWN_TREES) this.steps[this.steps.length - 1][2] = trees;
    }
    if (typeof extra.steps === "number") this.stats = extra;
    if (chunk.usage) {
      const added = chunk.usage.completion_tokens;
      if (added !== undefined) this.numTokens = this.earlierTokens + added;
      this.promptTokens = chunk.usage.prompt_tokens ?? this.promptTokens;
    }
    for (const choice of chunk.choices ?? []) {
      const delta = choice.delta ?? {};
      if (delta.reasoning_content) {
        this.startedThinking ??= now;
        this.show(this.reasoning, delta.reasoning_content);
        this.thoughtMs = now - this.startedThinking;
      }
      if (delta.content) this.show(this.content, delta.content);
      if (choice.finish_reason) this.finish = choice.finish_reason;
    }
  }

  // Each with the text before it, and the target's own behind its path, which are tokens of the answer.
  treesOf(given, tokens) {
    if (!Array.isArray(given)) return null;
    const texts = [this.lastText, ...tokens.map(({ text }) => text)];
    return treesOf(given.map((one) => {
      const end = one?.at + one?.path?.length;
      const own = tokens[end]?.drafted === false ? tokens[end].text : null;
      return { ...one, before: texts[one?.at], own };
    }));
  }

  addTokens(tokens, step, now) {
    if (!tokens.length) return;
    if (step === null || step !== this.lastStep) this.steps.push([0, 0]);
    this.lastStep = step;
    const counts = this.steps[this.steps.length - 1];
    for (const { text, drafted } of tokens) {
      counts[drafted ? 0 : 1] += 1;
      this.pending.push([text, drafted ? DRAFTED : TARGET, this.steps.length - 1]);
    }
    this.lastText = tokens[tokens.length - 1].text;
    this.numTokens += tokens.length;
    this.arrivals.push([now, this.numTokens]);
  }

  // Text is the authority. Tokens are laid along it, past those whose text is not shown.
  show(channel, text) {
    let rest = text;
    while (rest) {
      const token = this.nextToken(rest);
      if (token === null) {
        channel.add(rest, UNKNOWN, null);
        return;
      }
      const length = Math.min(token[0].length, rest.length);
      channel.add(rest.slice(0, length), token[1], token[2]);
      token[0] = token[0].slice(length);
      rest = rest.slice(length);
      if (!token[0]) this.pending.shift();
    }
  }

  nextToken(rest) {
    for (let i = 0; i < Math.min(this.pending.length, LOOK_AHEAD); i++) {
      const text = this.pending[i][0];
      if (text && (rest.startsWith(text) || text.startsWith(rest))) {
        this.pending.splice(0, i);
        return this.pending[0];
      }
    }
    // a character that several tokens spell together has no text in any one of them
    const partial = this.pending.findIndex(([text]) => text === "" || /^\ufffd+$/.test(text));
    if (partial < 0 || partial >= LOOK_AHEAD) return null;
    const [, origin, step] = this.pending[partial];
    let end = partial;
    while (end < this.pending.length && /^\ufffd*$/.test(this.pending[end][0])) end += 1;
    const character = String.fromCodePoint(rest.codePointAt(0));
    this.pending.splice(0, end, [character, origin, step]);
    return this.pending[0];
  }

  // Tokens a second: the server's figure at the end, that of the last moments before.
  rate() {
    if (this.stats) return this.stats.tokens_per_s;
    const last = this.arrivals[this.arrivals.length - 1];
    if (!last) return this.lastRate;
    const first = this.arrivals.find(([at]) => at >= last[0] - RATE_WINDOW_MS);
    return last[0] > first[0] ? ((last[1] - first[1]) * 1000) / (last[0] - first[0]) : 0;
  }

  // Tokens a decode step; the first token comes from reading the prompt.
  acceptedLength() {
    if (this.stats) return this.stats.mean_accepted_length;
    const decoded = this.steps.slice(1);
    const tokens = decoded.reduce((sum, [accepted, own]) => sum + accepted + own, 0);
    return decoded.length ? tokens / decoded.length : 0;
  }
}
