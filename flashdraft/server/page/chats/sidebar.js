// The list of conversations: open, search, rename, delete with undo, export, import.

import { button, element, saveFile } from "../dom.js";
import { conversationsOf, MAX_FILE_BYTES, toJson, toMarkdown } from "./exchange.js";

const SEARCH_MS = 150;
const UNDO_MS = 12_000;
const MAX_ROWS = 200; // drawn anew with every answer
const DAY_MS = 24 * 3600 * 1000;

function groupOf(updated, now) {
  const today = new Date(now).setHours(0, 0, 0, 0);
  if (updated >= today) return "Today";
  if (updated >= today - DAY_MS) return "Yesterday";
  if (updated >= today - 7 * DAY_MS) return "Last seven days";
  return "Earlier";
}

export class Sidebar {
  constructor({ page, library, chat, say }) {
    Object.assign(this, { page, library, chat, say });
    this.found = null; // ids that fit what is searched; null where nothing is
    this.renaming = null; // id
    this.maxRows = MAX_ROWS;
    library.addEventListener("change", () => this.draw());
    page.search.addEventListener("input", () => this.searchSoon());
    page.search.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !page.search.value) return;
      event.preventDefault();
      page.search.value = "";
      this.searchSoon();
    });
    page.exportAll.addEventListener("click", () => this.exportAll());
    page.importChats.addEventListener("click", () => page.importPicker.click());
    page.importPicker.addEventListener("change", () => this.importFiles());
    page.chatMenu.addEventListener("click", ({ target }) => {
      if (!target.dataset.act) return;
      page.chatMenu.hidePopover();
      this[target.dataset.act](page.chatMenu.dataset.id);
    });
    page.chatMenu.addEventListener("keydown", (event) => this.walkMenu(event));
    this.draw();
  }

  // What the browser keeps, and before it what it could not.
  get all() {
    const { conversation, isNew } = this.chat;
    const { list } = this.library;
    const isUnkept = !isNew && !conversation.isKept;
    return isUnkept ? [conversation.record, ...list] : list;
  }

  // -- the list ----------------------------------------------------------------------------------

  draw() {
    if (this.renaming) return; // whoever types a name goes on
    const { library, found } = this;
    const now = Date.now();
    const shown = this.all.filter(({ id }) => found === null || found.has(id));
    const rest = shown.splice(this.maxRows).length;
    const rows = [];
    let group = null;
    for (const record of shown) {
      const next = groupOf(record.updated, now);
      if (next !== group) rows.push(element("li", "group", next));
      group = next;
      rows.push(this.row(record));
    }
    if (rest) rows.push(element("li", "group", button(`Show ${rest} more`, () => this.showAll())));
    this.replace(rows);
    this.page.noChats.hidden = shown.length > 0;
    this.page.noChats.textContent = found === null ? "No chats yet." : "No chat has these words.";
    const { trouble, isLasting } = library;
    this.page.keeping.textContent = trouble ?? (isLasting
      ? "Chats are kept in this browser only."
      : "This browser keeps nothing: chats are gone when the tab closes. Export what matters.");
    this.page.keeping.classList.toggle("warns", trouble !== null || !isLasting);
  }

  showAll() {
    this.maxRows = Infinity;
    this.draw();
  }

  // The focus stays on what had it, though all of it is new.
  replace(rows) {
    const { chatList } = this.page;
    const active = chatList.contains(document.activeElement) ? document.activeElement : null;
    const id = active?.closest("[data-id]")?.dataset.id;
    chatList.replaceChildren(...rows);
    if (id) chatList.querySelector(`[data-id="${CSS.escape(id)}"] .${active.classList[0]}`)?.focus();
  }

  row({ id, title }) {
    const link = element("a", "chat-link", title || "Chat");
    link.href = `#chat/${id}`;
    link.title = title;
    if (id === this.chat.conversation.id) link.setAttribute("aria-current", "true");
    const more = button("⋯", () => this.openMenu(more, id), "more");
    more.setAttribute("aria-label", `Actions for ${title}`);
    more.setAttribute("aria-haspopup", "menu");
    const made = element("li", "chat-row", link, more);
    made.dataset.id = id;
    return made;
  }

  openMenu(more, id) {
    const { chatMenu } = this.page;
    const box = more.getBoundingClientRect();
    chatMenu.dataset.id = id;
    chatMenu.showPopover();
    const [width, height] = [chatMenu.offsetWidth, chatMenu.offsetHeight];
    chatMenu.style.left = `${Math.max(8, Math.min(box.right - width, innerWidth - width - 8))}px`;
    chatMenu.style.top = `${Math.min(box.bottom + 4, innerHeight - height - 8)}px`;
    chatMenu.querySelector("button").focus();
  }

  walkMenu(event) {
    const items = [...this.page.chatMenu.querySelectorAll("button")];
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    items.at((items.indexOf(document.activeElement) + step) % items.length).focus();
  }

  // -- search ------------------------------------------------------------------------------------

  searchSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.search(), SEARCH_MS);
  }

  async search() {
    const text = this.page.search.value.trim();
    const isWanted = () => this.page.search.value.trim() === text;
    const found = text ? await this.library.search(text, isWanted) : null;
    if (!isWanted()) return;
    this.found = found;
    this.draw();
    if (found) this.say(`${found.size} found`);
  }

  // -- one conversation --------------------------------------------------------------------------

  rename(id) {
    const link = this.page.chatList.querySelector(`[data-id="${CSS.escape(id)}"] .chat-link`);
    if (!link) return;
    const input = element("input", "rename");
    input.value = link.textContent;
    input.maxLength = 200;
    input.setAttribute("aria-label", "Name of the chat");
    this.renaming = id;
    const end = async (isKept) => {
      if (this.renaming !== id) return;
      this.renaming = null;
      const title = input.value.trim();
      if (isKept && title && title !== link.textContent) await this.library.rename(id, title);
      this.draw();
      this.page.chatList.querySelector(`[data-id="${CSS.escape(id)}"] .chat-link`)?.focus();
    };
    input.addEventListener("blur", () => end(true));
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault();
      end(event.key === "Enter");
    });
    link.replaceWith(input);
    input.select();
  }

  async remove(id) {
    const title = this.library.list.find((one) => one.id === id)?.title ?? "";
    this.chat.runs.get(id)?.controller.abort();
    await this.library.remove(id);
    if (this.chat.conversation.id === id) this.chat.startNew();
    this.offerUndo(`Deleted “${title}”.`, () => this.library.restore(id));
  }

  offerUndo(words, undo) {
    const { toast } = this.page;
    clearTimeout(this.undoTimer);
    const hide = () => {
      const isLost = toast.contains(document.activeElement);
      toast.hidden = true;
      if (isLost) this.page.toggleChats.focus();
    };
    const act = button("Undo", async () => {
      hide();
      await undo();
      this.say("Brought back");
    });
    toast.replaceChildren(element("span", "", words), act);
    toast.hidden = false;
    act.focus(); // what had it is gone with the chat
    this.undoTimer = setTimeout(hide, UNDO_MS);
  }

  async exportMarkdown(id) {
    const found = await this.chat.find(id);
    if (found) saveFile(`${fileName(found.title)}.md`, toMarkdown(found), "text/markdown");
  }

  async exportJson(id) {
    const found = await this.chat.find(id);
    if (found) saveJson(fileName(found.title), [found]);
  }

  // -- all of them -------------------------------------------------------------------------------

  async exportAll() {
    const all = [];
    for (const { id } of this.all) {
      const found = await this.chat.find(id);
      if (found) all.push(found);
    }
    saveJson("flashdraft-chats", all);
  }

  async importFiles() {
    const { importPicker } = this.page;
    const read = [];
    try {
      for (const file of importPicker.files) {
        if (file.size > MAX_FILE_BYTES) {
          throw new Error(`“${file.name}” is larger than ${MAX_FILE_BYTES / 1024 / 1024} MB.`);
        }
        const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
        read.push(...conversationsOf(file.name, text));
      }
      await this.library.addAll(read);
      this.tell(`${read.length} ${read.length === 1 ? "chat" : "chats"} imported.`);
    } catch (error) {
      this.tell(error instanceof TypeError ? "The file is no text in UTF-8. Nothing was imported."
        : `${error.message} Nothing was imported.`);
    }
    importPicker.value = "";
  }

  tell(words) {
    clearTimeout(this.undoTimer);
    this.page.toast.replaceChildren(element("span", "", words));
    this.page.toast.hidden = false;
    this.undoTimer = setTimeout(() => (this.page.toast.hidden = true), UNDO_MS);
  }
}

function saveJson(name, conversations) {
  for (const [place, text] of toJson(conversations).entries()) {
    saveFile(`${name}${place ? `-${place + 1}` : ""}.json`, text, "application/json");
  }
}

function fileName(title) {
  return title.replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 60) || "chat";
}
