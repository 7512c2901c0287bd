// Wires the page: who is asked when what is pressed. The parts do the work.

import { Chat } from "./page_chat.js";
import { Race } from "./page_race.js";
import { Server } from "./page_server.js";
import { lasting, Settings, Theme } from "./page_store.js";
import { copyFrom } from "./page_view.js";

// every element with an id, by its id in camel case
const page = {};
for (const found of document.querySelectorAll("[id]")) {
  page[found.id.replace(/-(\w)/g, (_, letter) => letter.toUpperCase())] = found;
}

const server = new Server();
const settings = new Settings(page.settings.querySelector("form"), page.thinking);
const say = (text) => (page.status.textContent = text);
const chat = new Chat({ page, server, settings, say });
const race = new Race({ page, server, settings });
new Theme(page.theme);

// -- views -------------------------------------------------------------------------------------

function showView() {
  const isRace = location.hash === "#race";
  page.chat.hidden = page.composer.hidden = page.newChat.hidden = isRace;
  page.race.hidden = !isRace;
  for (const link of document.querySelectorAll("[data-view]")) {
    if ((link.dataset.view === "race") === isRace) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = isRace ? "Race · flashdraft" : "flashdraft";
  window.scrollTo(0, 0);
}
window.addEventListener("hashchange", showView);

// -- the server's state ------------------------------------------------------------------------

server.addEventListener("change", () => {
  const { trouble, model } = server;
  page.model.textContent = model ?? (trouble?.kind === "offline" ? "offline" : "connecting");
  page.model.title = model ?? "";
  settings.suggest(server.defaults);
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

function fitQuestion() {
  page.question.style.height = "auto";
  page.question.style.height = `${page.question.scrollHeight}px`;
}

function submit() {
  if (chat.stop()) return;
  const text = page.question.value;
  if (chat.send(text)) {
    page.question.value = "";
    fitQuestion();
  }
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
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented) return;
  if (page.settings.open || page.keyDialog.open) return;
  if (page.race.hidden) chat.stop() || chat.endEdit();
  else race.stop();
});
page.cancelEdit.addEventListener("click", () => chat.endEdit());
page.newChat.addEventListener("click", () => chat.clear());
page.examples.addEventListener("click", (event) => {
  if (event.target.tagName === "BUTTON") chat.send(event.target.textContent);
});
document.addEventListener("click", (event) => {
  if (event.target.dataset?.copies !== "code") return;
  copyFrom(event.target, event.target.closest("figure").querySelector("code").textContent);
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
page.openSettings.addEventListener("click", () => page.settings.showModal());
page.resetSettings.addEventListener("click", () => settings.reset());
page.raceOrder.addEventListener("change", () => {
  page.raceNote.hidden = page.raceOrder.value !== "together";
});
page.raceForm.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!race.stop()) race.run();
});

showColours(lasting.read("colours") === true);
showView();
server.connect();
if (page.race.hidden) page.question.focus();
