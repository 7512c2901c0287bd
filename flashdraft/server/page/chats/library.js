// All conversations of this browser: the list, what becomes of each, and what other tabs do to them.

import { Conversation, Turn } from "./conversation.js";
import { DatabaseRecords, MemoryRecords } from "./records.js";

const OPEN_MS = 4000;
const FORGET_MS = 60_000; // a deleted conversation is only hidden for so long

// Some browsers never answer; the page must not wait for them.
function soon(promise) {
  const late = new Promise((_, reject) => setTimeout(reject, OPEN_MS, new Error("no answer")));
  return Promise.race([promise, late]);
}

// Fires "change" when the list changed, and "elsewhere" with an id when another tab wrote to one.
export class Library extends EventTarget {
  constructor(records) {
    super();
    this.records = records;
    this.list = []; // records of conversations, newest first
    this.trouble = null; // why nothing is kept any more, in words
    this.isLasting = records instanceof DatabaseRecords;
    if (this.isLasting) {
      this.channel = new BroadcastChannel("flashdraft");
      this.channel.addEventListener("message", ({ data }) => this.hear(data));
    }
  }

  static async open() {
    let records;
    try {
      records = await soon(DatabaseRecords.open());
    } catch {
      records = new MemoryRecords();
    }
    const library = new Library(records);
    await library.refresh();
    library.forgetDeleted();
    return library;
  }

  async refresh() {
    try {
      const found = await this.records.conversations();
      this.all = found;
      this.list = found.filter((one) => !one.deleted).sort((one, other) => other.updated - one.updated);
    } catch (error) {
      this.fail(error);
    }
    this.dispatchEvent(new Event("change"));
  }

  // Deleted before this page was opened: for good now.
  forgetDeleted() {
    for (const { id, deleted } of this.all ?? []) {
      if (deleted && Date.now() - deleted > FORGET_MS) this.records.remove(id).catch(() => {});
    }
  }

  hear({ id }) {
    this.refresh();
    this.dispatchEvent(new CustomEvent("elsewhere", { detail: id }));
  }

  async changed(id) {
    this.channel?.postMessage({ id });
    await this.refresh();
  }

  fail(error) {
    const isFull = error?.name === "QuotaExceededError";
    this.trouble = isFull
      ? "This browser has no room for more chats. Export some, and delete them."
      : "This browser does not keep this chat any more. Export it before you leave the page.";
    this.dispatchEvent(new Event("change"));
  }

  // Null where there is none, or it was deleted.
  async load(id) {
    try {
      const found = await this.records.read(id);
      if (!found || found.record.deleted) return null;
      const turns = found.turns.map(([turn, tokens]) => Turn.fromRecords(turn, tokens));
      const conversation = new Conversation(found.record, turns);
      conversation.isKept = true;
      return conversation;
    } catch (error) {
      this.fail(error);
      return null;
    }
  }

  // Keeps some turns of a conversation, and those that could not be kept before. False where it was
  // deleted meanwhile, or cannot be kept.
  async keep(conversation, turns, { isQuiet = false } = {}) {
    const { title, ...record } = conversation.record;
    const { unkept } = conversation;
    for (const turn of turns) unkept.add(turn);
    const all = [...unkept];
    const records = all.map((turn) => turn.toRecords(conversation.id));
    const isNew = !conversation.isKept;
    try {
      const changes = isNew ? { title, ...record } : record;
      const isDone = await this.records.write(conversation.id, changes, records, isNew);
      conversation.isKept = true;
      for (const turn of all) unkept.delete(turn);
      this.trouble = isDone ? null : "This chat was deleted in another tab, and is not kept any more.";
      if (!isQuiet) await this.changed(conversation.id);
      return isDone;
    } catch (error) {
      this.fail(error);
      return false;
    }
  }

  async change(id, changes) {
    try {
      await this.records.write(id, changes, [], false);
      await this.changed(id);
    } catch (error) {
      this.fail(error);
    }
  }

  rename(id, title) {
    return this.change(id, { title });
  }

  // Hidden now, gone in a minute; until then `restore` brings it back.
  async remove(id) {
    const deleted = Date.now();
    await this.change(id, { deleted });
    setTimeout(async () => {
      const found = this.all?.find((one) => one.id === id);
      if (found?.deleted === deleted) await this.records.remove(id).catch(() => {});
      await this.refresh();
    }, FORGET_MS);
  }

  restore(id) {
    return this.change(id, { deleted: 0 });
  }

  // Ids of conversations that have every word in their title, or all of them in one turn.
  async search(text, isWanted) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (...texts) => {
      const whole = texts.join("\n").toLowerCase();
      return words.every((word) => whole.includes(word));
    };
    try {
      const found = await this.records.find((turn) => fits(turn.question, turn.content), isWanted);
      for (const { id, title } of this.list) if (fits(title)) found.add(id);
      return found;
    } catch (error) {
      this.fail(error);
      return new Set();
    }
  }

  async addAll(conversations) {
    for (const conversation of conversations) {
      const turns = [...conversation.branches.values()].flat();
      await this.keep(conversation, turns, { isQuiet: true });
    }
    await this.changed(null);
  }
}
