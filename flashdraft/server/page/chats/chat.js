// The conversation on the page: questions, answers, stop, retry, edit, branches. An answer goes on
// while another conversation is looked at.

import { Answer } from "../answers/answer.js";
import { treeCard } from "../answers/tree_card.js";
import { ServerError } from "../server.js";
import { Conversation, Turn } from "./conversation.js";
import { endOf, TurnView } from "./turn_view.js";

const FRAME_MS = 40;
const KEEP_MS = 2000; // how much of an answer a closed tab may lose
const NEAR_END = 80; // pixels: who has scrolled further up is reading, and is left alone

export class Chat {
  constructor({ page, server, settings, library, attachments, say }) {
    Object.assign(this, { page, server, settings, library, attachments, say });
    this.coloured = false;
    this.runs = new Map(); // conversation's id: { conversation, turn, controller }
    this.editing = null; // the turn whose question is in the composer
    this.aside = null; // what was there before: text, files
    this.follows = true;
    this.missed = new Set(); // ids that other tabs wrote to while this one was answering
    this.onOpened = () => {}; // (id): another conversation is shown, or this one has begun
    this.onNamed = () => {}; // the conversation that is shown may have another title
    window.addEventListener("scroll", () => this.noticeScroll(), { passive: true });
    window.addEventListener("pagehide", () => this.keepAll());
    library.addEventListener("elsewhere", ({ detail }) => this.reload(detail));
    library.addEventListener("change", () => this.takeTitles());
    this.show(new Conversation(), true);
  }

  get running() {
    return this.runs.get(this.conversation.id) ?? null;
  }

  // -- which conversation ------------------------------------------------------------------------

  show(conversation, isNew, follows = true) {
    treeCard.hide();
    this.opening = null;
    this.conversation = conversation;
    this.isNew = isNew;
    this.views = new Map();
    this.follows = follows;
    this.redraw();
    this.scroll();
  }

  // The conversation with this id, in whatever state it is; null where there is none.
  async find(id) {
    if (id === this.conversation.id) return this.conversation;
    return this.runs.get(id)?.conversation ?? (await this.library.load(id));
  }

  // False where there is no such conversation.
  async open(id) {
    if (id === this.conversation.id) return true;
    this.opening = id;
    const found = await this.find(id);
    if (this.opening !== id) return true; // another one was wanted meanwhile
    if (!found) return false;
    this.endEdit();
    this.show(found, false);
    return true;
  }

  startNew() {
    this.endEdit();
    this.opening = null;
    if (this.isNew) return;
    this.show(new Conversation(), true);
    this.onOpened("");
  }

  // A name may be given in the list, and in another tab.
  takeTitles() {
    const open = [this.conversation, ...Array.from(this.runs.values(), ({ conversation }) => conversation)];
    for (const conversation of open) {
      const kept = this.library.list.find(({ id }) => id === conversation.id);
      if (kept) conversation.title = kept.title;
    }
    this.onNamed();
  }

  // Another tab wrote to a conversation; what this tab is answering is its own until it has ended.
  async reload(id) {
    if (this.runs.has(id)) this.missed.add(id);
    if (id !== this.conversation.id || this.isNew || this.running) return;
    const found = await this.library.load(id);
    if (id !== this.conversation.id || this.running) return;
    if (!found) {
      this.startNew();
      return;
    }
    const isEdited = this.editing && found.beside(this.editing).find((turn) => turn.id === this.editing.id);
    this.show(found, false, this.follows);
    if (isEdited) this.mark(isEdited);
  }

  // -- drawing -----------------------------------------------------------------------------------

  redraw() {
    const { path } = this.conversation;
    this.page.welcome.hidden = path.length > 0;
    const roots = path.map((turn) => {
      if (!this.views.has(turn.id)) this.views.set(turn.id, new TurnView(turn, this));
      this.drawTurn(turn, path);
      return this.views.get(turn.id).root;
    });
    this.place(roots);
    const { running } = this;
    this.page.send.textContent = running ? "Stop" : "Send";
    this.page.send.classList.toggle("stops", running !== null);
    this.page.turns.setAttribute("aria-busy", String(running !== null));
  }

  // Moves nothing that stands where it should: the focus stays.
  place(roots) {
    const { turns } = this.page;
    roots.forEach((root, i) => {
      if (turns.children[i] !== root) turns.insertBefore(root, turns.children[i] ?? null);
    });
    while (turns.children.length > roots.length) turns.lastChild.remove();
  }

  drawTurn(turn, path = this.conversation.path) {
    const live = this.running?.turn === turn;
    const { coloured } = this;
    const beside = this.conversation.beside(turn);
    this.views.get(turn.id)?.draw({ live, coloured, isLast: turn === path.at(-1), beside });
  }

  setColoured(coloured) {
    this.coloured = coloured;
    this.redraw();
  }

  // However fast the chunks come: drawing takes time from an engine on the same machine.
  drawSoon(run) {
    this.timer ??= setTimeout(() => {
      this.timer = null;
      if (this.running !== run) return;
      this.drawTurn(run.turn);
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

  // -- asking ------------------------------------------------------------------------------------

  send(text) {
    const question = text.trim();
    if (this.running || (!question && !this.attachments.files.length)) return false;
    const edited = this.editing;
    const files = this.attachments.take();
    this.endEdit();
    const parent = edited ? edited.parent : this.conversation.path.at(-1)?.id;
    this.ask(new Turn({ parent, question, files }));
    return true;
  }

  // Asks a turn's question once more, beside it; where it failed, in its place.
  retry(turn = this.conversation.path.at(-1), fields = this.settings.sampling) {
    if (this.running || !turn) return;
    this.endEdit();
    if (turn.error && turn.answer.isEmpty) {
      turn.answer = new Answer();
      this.run(turn, fields);
    } else {
      const { parent, question, files } = turn;
      this.ask(new Turn({ parent, question, files }), fields);
    }
    this.page.question.focus();
  }

  retryWith(turn) {
    this.settings.askOnce((fields) => this.retry(turn, fields));
  }

  // The answer goes on where it ended. No thought can stand there.
  goOn(turn) {
    if (this.running) return;
    this.endEdit();
    turn.answer.goOn();
    const { chat_template_kwargs: thinking, ...fields } = this.settings.sampling;
    this.run(turn, { ...fields, continue_final_message: true });
    this.page.question.focus();
  }

  ask(turn, fields = this.settings.sampling) {
    this.conversation.add(turn);
    this.run(turn, fields);
  }

  async run(turn, fields) {
    const { conversation } = this;
    const run = { conversation, turn, controller: new AbortController(), keptAt: performance.now() };
    this.runs.set(conversation.id, run);
    turn.error = null;
    turn.asked = Object.fromEntries(Object.entries(fields).filter(([, value]) => typeof value === "number"));
    this.follows = true;
    this.redraw();
    this.scroll();
    this.say("Answering");
    if (this.isNew) this.begin(conversation);
    const body = { ...fields, flashdraft: this.coloured ? { tokens: true, trees: true } : { tokens: true } };
    body.messages = conversation.messages(turn, this.settings.system);
    const begun = turn.answer.content.text;
    if (body.continue_final_message) body.messages.push({ role: "assistant", content: begun });
    await this.library.keep(conversation, [turn]);
    try {
      for await (const chunk of this.server.chat(body, run.controller.signal)) {
        turn.answer.absorb(chunk, performance.now());
        this.drawSoon(run);
        this.keepNow(run);
      }
    } catch (error) {
      if (error.name === "AbortError") turn.answer.finish = "stopped";
      else turn.error = error instanceof ServerError ? error : new ServerError("failed", String(error));
    }
    this.end(run);
  }

  async end({ conversation, turn }) {
    const { id } = conversation;
    this.runs.delete(id);
    conversation.updated = Date.now();
    const kept = this.library.keep(conversation, [turn]);
    if (conversation === this.conversation) {
      this.redraw();
      this.scroll();
    }
    this.say(turn.error ? "" : endOf(turn.answer) || "The answer is complete");
    if (turn.error) this.server.report(turn.error);
    if (turn.error?.kind === "key") this.onKeyNeeded(() => this.retry(turn));
    // an error, or what is not kept, is in this tab only
    if ((await kept) && !turn.error && this.missed.delete(id)) this.reload(id);
  }

  begin(conversation) {
    this.isNew = false;
    this.onOpened(conversation.id);
  }

  // A part of the answer now and then, for the day the tab is closed in the middle.
  keepNow(run) {
    const now = performance.now();
    if (now - run.keptAt < KEEP_MS) return;
    run.keptAt = now;
    this.library.keep(run.conversation, [run.turn], { isQuiet: true });
  }

  keepAll() {
    for (const run of this.runs.values()) this.library.keep(run.conversation, [run.turn], { isQuiet: true });
  }

  stop() {
    const { running } = this;
    running?.controller.abort();
    return running !== null;
  }

  // -- branches ----------------------------------------------------------------------------------

  choose(turn) {
    if (this.running) return;
    this.endEdit();
    this.conversation.choose(turn);
    this.redraw();
    this.library.keep(this.conversation, []);
    const { actions } = this.views.get(turn.id);
    actions.querySelector(".branches button:not(:disabled)")?.focus();
  }

  edit(turn = this.conversation.path.at(-1)) {
    if (this.running || !turn) return false;
    this.endEdit();
    this.aside = { text: this.page.question.value, files: this.attachments.files };
    this.mark(turn);
    this.attachments.set(turn.files);
    this.fillQuestion(turn.question);
    this.page.question.focus();
    return true;
  }

  mark(turn) {
    this.editing = turn;
    this.page.editing.hidden = false;
    this.views.get(turn.id)?.root.classList.add("edited");
  }

  endEdit() {
    if (!this.editing) return false;
    this.views.get(this.editing.id)?.root.classList.remove("edited");
    this.editing = null;
    this.page.editing.hidden = true;
    this.attachments.set(this.aside.files);
    this.fillQuestion(this.aside.text);
    return true;
  }

  fillQuestion(text) {
    this.page.question.value = text;
    this.page.question.dispatchEvent(new Event("input"));
  }
}
