// Wires the page: who is asked when what is pressed. The parts do the work.

import { Attachments } from "./chats/attachments.js";
import { Chat } from "./chats/chat.js";
import { Library } from "./chats/library.js";
import { moveOldTurns } from "./chats/moving.js";
import { Sidebar } from "./chats/sidebar.js";
import { copyFrom } from "./dom.js";
import { Panels } from "./panels.js";
import { Race } from "./race.js";
import { Server } from "./server.js";
import { Presets } from "./settings/presets.js";
import { Settings } from "./settings/settings.js";
import { lasting, Theme } from "./storage.js";

// every element with an id, by its id in camel case
const page = {};
for (const found of document.querySelectorAll("[id]")) {
  page[found.id.replace(/-(\w)/g, (_, letter) => letter.toUpperCase())] = found;
}

const say = (text) => (page.status.textContent = text);
const server = new Server();
const library = await Library.open();
const settings = new Settings({ page, server });
new Presets({ page, settings });
const attachments = new Attachments({ page, server, say });
const chat = new Chat({ page, server, settings, library, attachments, say });
const sidebar = new Sidebar({ page, library, chat, say });
const race = new Race({ page, server, settings });
const panels = new Panels(page);
new Theme(page.theme);

// -- views: #race, #chat and #chat/ID ----------------------------------------------------------

async function showView() {
  const [view, id] = location.hash.slice(1).split("/");
  const isRace = view === "race";
  page.chat.hidden = page.composer.hidden = page.newChat.hidden = isRace;
  page.race.hidden = !isRace;
  panels.setUsable(!isRace);
  for (const link of document.querySelectorAll("[data-view]")) {
    if ((link.dataset.view === "race") === isRace) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (isRace) {
    document.title = "Race · flashdraft";
    window.scrollTo(0, 0);
    return;
  }
  if (!id) chat.startNew();
  else if (!(await chat.open(id))) location.replace("#chat"); // deleted, or another browser's
  showChat();
}

function showChat() {
  showTitle();
  chat.scroll();
  sidebar.draw();
}

function showTitle() {
  const { title } = chat.conversation;
  if (page.race.hidden) document.title = title ? `${title} · flashdraft` : "flashdraft";
}
chat.onNamed = showTitle;
window.addEventListener("hashchange", showView);
page.skip.addEventListener("click", (event) => {
  event.preventDefault(); // its address would be a view's
  (page.race.hidden ? page.question : page.racePrompt).focus();
});

chat.onOpened = (id) => {
  const hash = id ? `#chat/${id}` : "#chat";
  if ((location.hash.split("/")[1] ?? "") !== id) history.pushState(null, "", hash);
  for (const link of document.querySelectorAll("[data-view=chat]")) link.href = hash;
  showChat();
};

function startNew() {
  if (page.race.hidden === false) location.hash = "#chat";
  chat.startNew();
  panels.closeDrawer();
  page.question.focus();
}

// -- the server's state ------------------------------------------------------------------------

server.addEventListener("change", () => {
  const { trouble, model } = server;
  page.model.textContent = model ?? (trouble?.kind === "offline" ? "offline" : "connecting");
  page.model.title = model ?? "";
  settings.suggest(server);
  const isShown = trouble !== null && trouble.kind !== "key";
  page.banner.hidden = !isShown;
  if (isShown && page.banner.textContent !== trouble.message) {
    page.banner.textContent = trouble.message;
  }
  if (trouble?.kind === "key") askForKey(null);
});

let afterKey = null;

function askForKey(retry) {
  afterKey = retry;
  page.keyNote.textContent = server.key
    ? "It does not know the key you gave. A key is kept in this tab only."
    : "It is kept in this tab only, and forgotten when the tab closes.";
  page.key.value = "";
  if (!page.keyDialog.open) page.keyDialog.showModal();
}
chat.onKeyNeeded = race.onKeyNeeded = askForKey;

page.keyDialog.querySelector("form").addEventListener("submit", async () => {
  server.useKey(page.key.value.trim());
  const retry = afterKey;
  await server.connect();
  if (retry && server.trouble === null) retry();
});
page.keyCancel.addEventListener("click", () => page.keyDialog.close());

// -- asking ------------------------------------------------------------------------------------

const fitsItself = CSS.supports("field-sizing", "content");

function fitQuestion() {
  if (fitsItself) return;
  page.question.style.height = "auto";
  page.question.style.height = `${page.question.scrollHeight}px`;
}

function submit() {
  if (chat.stop()) return;
  const text = page.question.value;
  page.question.value = ""; // before sending: what an edit had put aside comes back then
  if (!chat.send(text)) page.question.value = text;
  fitQuestion();
}

page.question.addEventListener("input", fitQuestion);
page.composer.addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
page.question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!chat.running) submit(); // Enter never stops an answer
  } else if (event.key === "ArrowUp" && page.question.value === "") {
    if (chat.edit()) event.preventDefault();
  }
});
page.racePrompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    race.run();
  }
});
page.cancelEdit.addEventListener("click", () => chat.endEdit());
page.newChat.addEventListener("click", startNew);
page.chatList.addEventListener("click", ({ target }) => {
  if (target.closest("a")) panels.closeDrawer();
});
page.examples.addEventListener("click", (event) => {
  if (event.target.tagName === "BUTTON") chat.send(event.target.textContent);
});
document.addEventListener("click", (event) => {
  if (event.target.dataset?.copies !== "code") return;
  copyFrom(event.target, event.target.closest("figure").querySelector("code").textContent);
});

// -- keys --------------------------------------------------------------------------------------

const isTyping = (event) => event.target.closest?.("input, textarea, select") !== null;

document.addEventListener("keydown", (event) => {
  // what is open over the page takes its keys itself
  if (event.defaultPrevented || document.querySelector("dialog[open], :popover-open")) return;
  const control = event.ctrlKey || event.metaKey;
  if (event.key === "Escape") {
    if (page.race.hidden) panels.closeDrawer() || chat.stop() || chat.endEdit();
    else race.stop();
  } else if ((control && event.key === "/") || (event.key === "?" && !isTyping(event))) {
    event.preventDefault();
    page.keyHelp.showModal();
  } else if (control && event.key.toLowerCase() === "k" && page.race.hidden) {
    event.preventDefault();
    panels.open();
    page.search.select();
  } else if (control && event.shiftKey && event.key.toLowerCase() === "o") {
    event.preventDefault();
    startNew();
  }
});

// -- options -----------------------------------------------------------------------------------

function showColours(coloured) {
  page.colour.setAttribute("aria-pressed", String(coloured));
  page.legend.hidden = !coloured;
  chat.setColoured(coloured);
}
page.colour.addEventListener("click", () => {
  const coloured = !chat.coloured;
  lasting.write("colours", coloured);
  showColours(coloured);
});
page.openSettings.addEventListener("click", () => settings.open());
page.openKeys.addEventListener("click", () => page.keyHelp.showModal());
page.raceOrder.addEventListener("change", () => {
  page.raceNote.hidden = page.raceOrder.value !== "together";
});
page.raceForm.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!race.stop()) race.run();
});

const moved = await moveOldTurns(library);
if (moved && !location.hash) history.replaceState(null, "", `#chat/${moved}`);
showColours(lasting.read("colours") === true);
await showView();
server.connect();
if (page.race.hidden) page.question.focus();
