// A conversation as a tree: every turn follows another one, or none. Editing a question or asking
// again makes a branch beside the turn; one branch at each place is the chosen one.

import { Answer } from "../answers/answer.js";
import { contentOf } from "./pictures.js";

const MAX_TITLE = 60;
const ROOT = ""; // what the first turns follow

// Works without https too, where crypto.randomUUID does not.
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export class Turn {
  constructor({ id, parent, question, files, asked, at, keptAt, answer } = {}) {
    this.id = id ?? newId();
    this.parent = parent ?? ROOT;
    this.question = question ?? "";
    this.files = files ?? []; // { name, text } or { name, picture }
    this.asked = asked ?? {}; // the settings it was asked with: fields of the request
    this.at = at ?? Date.now();
    this.keptAt = keptAt ?? this.at; // how fresh an unfinished answer is
    this.answer = new Answer(answer);
    this.error = null;
  }

  // As it is kept: the texts apart from who wrote each token, which nobody searches.
  toRecords(conversation) {
    const { id, parent, question, files, asked, at } = this;
    const { content, reasoning, steps, ...figures } = this.answer.toJSON();
    const texts = { content: content.text, reasoning: reasoning.text };
    return {
      turn: { id, conversation, parent, question, files, asked, at, keptAt: Date.now(), ...texts, figures },
      tokens: { id, conversation, content: content.runs, reasoning: reasoning.runs, steps },
    };
  }

  static fromRecords(turn, tokens) {
    const { content, reasoning, figures, ...kept } = turn;
    const runs = tokens ?? { content: [], reasoning: [], steps: [] };
    const channels = {
      content: { text: content, runs: runs.content },
      reasoning: { text: reasoning, runs: runs.reasoning },
    };
    return new Turn({ ...kept, answer: { ...figures, ...channels, steps: runs.steps } });
  }

  // What the model reads of the question: its files first, each in a fence that it cannot close.
  get prompt() {
    const texts = this.files.filter((file) => !file.picture).map(fenced);
    return [...texts, this.question].filter(Boolean).join("\n\n");
  }

  get content() {
    return contentOf(this.prompt, this.files);
  }
}

function fenced({ name, text }) {
  let longest = 2;
  for (const [run] of text.matchAll(/`+/g)) longest = Math.max(longest, run.length);
  const fence = "`".repeat(longest + 1);
  const kind = /\.(\w{1,12})$/.exec(name)?.[1] ?? "";
  return `File ${name.replace(/[\r\n`]/g, " ")}:\n${fence}${kind}\n${text.replace(/\n$/, "")}\n${fence}`;
}

export class Conversation {
  constructor({ id, title, created, updated, chosen } = {}, turns = []) {
    this.id = id ?? newId();
    this.title = title ?? "";
    this.created = created ?? Date.now();
    this.updated = updated ?? this.created;
    this.chosen = new Map(Object.entries(chosen ?? {})); // parent: the turn that is shown after it
    this.branches = new Map(); // parent: its turns, oldest first
    this.isKept = false; // by the browser, at least in part
    this.unkept = new Set(); // turns whose last state is not
    for (const turn of [...turns].sort((one, other) => one.at - other.at)) this.place(turn);
  }

  place(turn) {
    const beside = this.branches.get(turn.parent);
    if (beside) beside.push(turn);
    else this.branches.set(turn.parent, [turn]);
  }

  get record() {
    const { id, title, created, updated } = this;
    return { id, title, created, updated, chosen: Object.fromEntries(this.chosen) };
  }

  add(turn) {
    this.place(turn);
    this.choose(turn);
    this.updated = Date.now();
    this.title ||= titleOf(turn);
  }

  choose(turn) {
    this.chosen.set(turn.parent, turn.id);
  }

  beside(turn) {
    return this.branches.get(turn.parent) ?? [];
  }

  // The turns that are shown, from the first one. A turn comes once, whatever was read.
  get path() {
    const found = [];
    const seen = new Set();
    for (let parent = ROOT; ; ) {
      const branches = this.branches.get(parent) ?? [];
      const turn = branches.find(({ id }) => id === this.chosen.get(parent)) ?? branches.at(-1);
      if (!turn || seen.has(turn.id)) return found;
      seen.add(turn.id);
      found.push(turn);
      parent = turn.id;
    }
  }

  // What the model is shown up to a turn: no thinking, and no questions without an answer.
  messages(last, system) {
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const turn of this.path) {
      const { text } = turn.answer.content;
      if (turn === last) {
        messages.push({ role: "user", content: turn.content });
        break;
      }
      if (!text) continue;
      messages.push({ role: "user", content: turn.content }, { role: "assistant", content: text });
    }
    return messages;
  }
}

export function titleOf(turn) {
  const line = turn.question.trim().split("\n")[0] || turn.files[0]?.name || "Chat";
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1).trimEnd()}…` : line;
}
