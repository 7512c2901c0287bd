// The conversation: questions, answers, stop, retry, edit. It is kept for this tab.

import { Answer } from "./page_answer.js";
import { ServerError } from "./page_server.js";
import { ofThisTab } from "./page_store.js";
import { AnswerView, copyFrom, drawError, element } from "./page_view.js";

const FRAME_MS = 40;
const NEAR_END = 80; // pixels: who has scrolled further up is reading, and is left alone
const FINISHES = {
  length: "The answer reached its longest length.",
  stopped: "Stopped.",
  content_filter: "The answer was withheld.",
};

class Turn {
  constructor(question, answer = new Answer()) {
    this.question = question;
    this.answer = answer;
    this.error = null;
    this.view = new AnswerView();
    this.heading = element("h2", "question", question);
    this.note = element("div", "turn-note");
    this.actions = element("div", "actions");
    this.root = element("article", "turn", this.heading, this.view.root, this.note, this.actions);
  }
}

export class Chat {
  constructor({ page, server, settings, say }) {
    Object.assign(this, { page, server, settings, say });
    this.coloured = false;
    this.running = null; // { turn, controller }
    this.isEditing = false;
    this.follows = true;
    window.addEventListener("scroll", () => this.noticeScroll(), { passive: true });
    this.turns = (ofThisTab.read("turns") ?? []).map(
      ({ question, answer }) => new Turn(question, new Answer(answer)),
    );
    page.turns.append(...this.turns.map((turn) => turn.root));
    this.redraw();
  }

  redraw() {
    this.page.welcome.hidden = this.turns.length > 0;
    for (const turn of this.turns) this.drawTurn(turn);
    const { running } = this;
    this.page.send.textContent = running ? "Stop" : "Send";
    this.page.send.classList.toggle("stops", running !== null);
    this.page.turns.setAttribute("aria-busy", String(running !== null));
  }

  drawTurn(turn) {
    const live = this.running?.turn === turn;
    turn.view.draw(turn.answer, { live, coloured: this.coloured });
    turn.root.classList.toggle("waiting", live && turn.answer.isEmpty);
    if (turn.error) drawError(turn.note, turn.error, () => this.retry());
    else turn.note.textContent = live ? "" : (FINISHES[turn.answer.finish] ?? "");
    this.drawActions(turn, live);
  }

  drawActions(turn, live) {
    const isLast = turn === this.turns.at(-1);
    const kind = live ? "none" : `${isLast} ${turn.answer.isEmpty} ${turn.error !== null}`;
    if (turn.actions.dataset.kind === kind) return; // keeps the focus where it is
    turn.actions.dataset.kind = kind;
    turn.actions.replaceChildren();
    if (live) return;
    const action = (label, act) => {
      const button = element("button", "", label);
      button.type = "button";
      button.addEventListener("click", () => act(button));
      turn.actions.append(button);
    };
    const { text } = turn.answer.content;
    if (text) action("Copy", (button) => copyFrom(button, text));
    if (isLast && !turn.error) action("Retry", () => this.retry());
    if (isLast) action("Edit question", () => this.edit());
  }

  setColoured(coloured) {
    this.coloured = coloured;
    this.redraw();
  }

  // What the model is shown: thinking of earlier turns and unanswered questions are left out.
  messages() {
    const { system } = this.settings;
    const messages = system ? [{ role: "system", content: system }] : [];
    this.turns.forEach((turn, i) => {
      const { text } = turn.answer.content;
      const isLast = i === this.turns.length - 1;
      if (!text && !isLast) return;
      messages.push({ role: "user", content: turn.question });
      if (!isLast) messages.push({ role: "assistant", content: text });
    });
    return messages;
  }

  send(question) {
    if (this.running || !question.trim()) return false;
    if (this.isEditing) this.dropLast();
    this.endEdit();
    const turn = new Turn(question.trim());
    this.turns.push(turn);
    this.page.turns.append(turn.root);
    this.run(turn);
    return true;
  }

  async run(turn) {
    const controller = new AbortController();
    this.running = { turn, controller };
    turn.error = null;
    this.follows = true;
    this.redraw();
    this.scroll();
    this.say("Answering");
    const fields = { ...this.settings.sampling, flashdraft: { tokens: true } };
    fields.messages = this.messages();
    try {
      for await (const chunk of this.server.chat(fields, controller.signal)) {
        turn.answer.absorb(chunk, performance.now());
        this.drawSoon(turn);
      }
    } catch (error) {
      if (error.name === "AbortError") turn.answer.finish = "stopped";
      else turn.error = error instanceof ServerError ? error : new ServerError("failed", String(error));
    }
    this.running = null;
    this.redraw();
    this.scroll();
    this.save();
    this.say(turn.error ? "" : (FINISHES[turn.answer.finish] ?? "The answer is complete"));
    if (turn.error) this.server.report(turn.error);
    if (turn.error?.kind === "key") this.onKeyNeeded(() => this.retry());
  }

  // However fast the chunks come: drawing takes time from an engine on the same machine.
  drawSoon(turn) {
    if (this.timer) return;
    this.timer = setTimeout(() => {
      this.timer = null;
      if (this.running?.turn !== turn) return;
      this.drawTurn(turn);
      this.scroll();
    }, FRAME_MS);
  }

  // Growing text fires no scroll event: only the reader decides whether the page follows.
  noticeScroll() {
    const { scrollHeight, scrollTop, clientHeight } = document.scrollingElement;
    this.follows = scrollHeight - scrollTop - clientHeight < NEAR_END;
  }

  scroll() {
    if (this.follows && !this.page.chat.hidden) {
      window.scrollTo(0, document.scrollingElement.scrollHeight);
    }
  }

  stop() {
    this.running?.controller.abort();
    return this.running !== null;
  }

  retry() {
    const turn = this.turns.at(-1);
    if (this.running || !turn) return;
    this.endEdit();
    turn.answer = new Answer();
    this.run(turn);
    this.page.question.focus();
  }

  edit() {
    const turn = this.turns.at(-1);
    if (this.running || !turn) return false;
    this.isEditing = true;
    this.page.editing.hidden = false;
    turn.root.classList.add("edited");
    this.page.question.value = turn.question;
    this.page.question.dispatchEvent(new Event("input"));
    this.page.question.focus();
    return true;
  }

  endEdit() {
    if (!this.isEditing) return false;
    this.isEditing = false;
    this.page.editing.hidden = true;
    this.turns.at(-1)?.root.classList.remove("edited");
    this.page.question.value = "";
    this.page.question.dispatchEvent(new Event("input"));
    return true;
  }

  dropLast() {
    this.turns.pop()?.root.remove();
  }

  clear() {
    this.stop();
    this.endEdit();
    while (this.turns.length) this.dropLast();
    this.save();
    this.redraw();
    this.page.question.focus();
  }

  // A tab's storage is small: where the conversation does not fit, its oldest turns are forgotten.
  save() {
    const turns = this.turns.map(({ question, answer }) => ({ question, answer }));
    while (!ofThisTab.write("turns", turns) && turns.length) turns.shift();
  }
}
