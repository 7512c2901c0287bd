// One turn on the page: the question with its files, the answer, what can be done with both.

import { AnswerView } from "../answers/view.js";
import { button, copyFrom, drawError, element } from "../dom.js";
import { sizeOf } from "./attachments.js";
import { thumbnail } from "./pictures.js";

const FRESH_MS = 15_000; // an unfinished answer kept more recently may still be coming elsewhere
const FINISHES = new Map([
  ["length", "The answer reached its longest length."],
  ["stopped", "Stopped."],
  ["content_filter", "The answer was withheld."],
]);
const CAN_GO_ON = new Set(["length", "stopped", null]); // null: it was cut off
const NAMES = {
  temperature: "temperature", top_p: "top p", top_k: "top k", min_p: "min p",
  max_tokens: "max tokens", seed: "seed",
};

export function endOf(answer) {
  return FINISHES.get(answer.finish) ?? "";
}

export class TurnView {
  // `act` has what the buttons do: retry, retryWith, goOn, edit, choose.
  constructor(turn, act) {
    this.turn = turn;
    this.act = act;
    this.answer = new AnswerView();
    this.heading = element("h2", "question", turn.question);
    this.heading.hidden = !turn.question;
    this.note = element("div", "turn-note");
    this.actions = element("div", "actions");
    const parts = [this.heading, ...this.drawFiles(), this.answer.root, this.note, this.actions];
    this.root = element("article", "turn", ...parts);
  }

  drawFiles() {
    return this.turn.files.map((file) => {
      if (file.picture) return thumbnail(file);
      const { name, text } = file;
      const summary = element("summary", "", name, element("span", "size", ` ${sizeOf(text.length)}`));
      return element("details", "file", summary, element("pre", "", text));
    });
  }

  draw({ live, coloured, isLast, beside }) {
    const { turn } = this;
    this.answer.draw(turn.answer, { live, coloured });
    this.root.classList.toggle("waiting", live && turn.answer.isEmpty);
    if (turn.error) drawError(this.note, turn.error, () => this.act.retry(turn));
    else this.note.textContent = live ? "" : this.words(beside).join(" ");
    this.drawActions(live, isLast, beside);
  }

  // How the answer ended, and where there are several, what each was asked with.
  words(beside) {
    const asked = beside.length > 1 ? this.asked() : "";
    return [endOf(this.turn.answer), this.unfinished(), asked].filter(Boolean);
  }

  unfinished() {
    const { answer, keptAt } = this.turn;
    if (answer.finish || this.turn.error) return "";
    const isFresh = Date.now() - keptAt < FRESH_MS;
    return isFresh ? "Not finished yet." : "The answer was cut off.";
  }

  asked() {
    const { asked } = this.turn;
    const words = Object.keys(NAMES).filter((name) => name in asked)
      .map((name) => `${NAMES[name]} ${asked[name]}`);
    return words.length ? `Asked with ${words.join(", ")}.` : "";
  }

  drawActions(live, isLast, beside) {
    const { turn } = this;
    const place = beside.indexOf(turn);
    const parts = [turn.answer.finish, isLast, turn.answer.isEmpty, turn.error !== null, place, beside.length];
    const kind = live ? "none" : parts.join(" ");
    if (this.actions.dataset.kind === kind) return; // keeps the focus where it is
    this.actions.dataset.kind = kind;
    this.actions.replaceChildren();
    if (live) return;
    const { text } = turn.answer.content;
    const add = (label, act, title = "") => {
      const made = button(label, act);
      if (title) made.title = title;
      this.actions.append(made);
    };
    if (beside.length > 1) this.actions.append(this.drawBranches(beside, place));
    if (text) add("Copy", (pressed) => copyFrom(pressed, turn.answer.content.text));
    if (!turn.error) add("Retry", () => this.act.retry(turn));
    if (!turn.error) add("Retry with…", () => this.act.retryWith(turn), "Answer again with other settings");
    if (isLast && text && CAN_GO_ON.has(turn.answer.finish)) add("Continue", () => this.act.goOn(turn));
    add("Edit question", () => this.act.edit(turn));
  }

  drawBranches(beside, place) {
    const step = (label, words, to) => {
      const made = button(label, () => this.act.choose(beside[to]));
      made.setAttribute("aria-label", words);
      made.disabled = to < 0 || to >= beside.length;
      return made;
    };
    const shown = element("span", "", `${place + 1}/${beside.length}`);
    const group = element("span", "branches", step("‹", "Previous version", place - 1), shown,
      step("›", "Next version", place + 1));
    group.setAttribute("role", "group");
    group.setAttribute("aria-label", `Version ${place + 1} of ${beside.length}`);
    return group;
  }
}
