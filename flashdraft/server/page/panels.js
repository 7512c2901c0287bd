// What stands beside the conversation: the list of chats, a column on wide screens and a drawer over
// the page on narrow ones; and how much of a phone's screen its keyboard leaves.

import { lasting } from "./storage.js";

const WIDE = "(min-width: 64rem)";

export class Panels {
  constructor(page) {
    this.page = page;
    this.wide = matchMedia(WIDE);
    this.isWanted = lasting.read("chats") !== false; // the column
    this.isDrawn = false; // the drawer
    this.isUsable = true;
    page.toggleChats.addEventListener("click", () => this.toggle());
    page.scrim.addEventListener("click", () => this.closeDrawer());
    this.wide.addEventListener("change", () => this.show());
    this.show();
    const viewport = window.visualViewport;
    for (const name of ["resize", "scroll"]) viewport?.addEventListener(name, () => this.fit(viewport));
  }

  get isOpen() {
    return this.isUsable && (this.wide.matches ? this.isWanted : this.isDrawn);
  }

  show() {
    const { page, isOpen } = this;
    const isDrawer = isOpen && !this.wide.matches;
    page.chats.hidden = !isOpen;
    page.scrim.hidden = !isDrawer;
    page.toggleChats.hidden = !this.isUsable;
    page.toggleChats.setAttribute("aria-expanded", String(isOpen));
    document.body.classList.toggle("beside", isOpen && !isDrawer);
    for (const part of [page.chat, page.composer]) part.inert = isDrawer;
  }

  // Not beside the race.
  setUsable(isUsable) {
    this.isUsable = isUsable;
    this.isDrawn = false;
    this.show();
  }

  toggle() {
    if (this.isOpen) this.close();
    else this.open();
  }

  open() {
    if (this.wide.matches) {
      this.isWanted = true;
      lasting.write("chats", true);
    } else {
      this.isDrawn = true;
    }
    this.show();
    if (this.isDrawn) this.page.search.focus();
  }

  close() {
    if (this.closeDrawer()) return;
    this.isWanted = false;
    lasting.write("chats", false);
    this.show();
  }

  closeDrawer() {
    if (!this.isDrawn) return false;
    this.isDrawn = false;
    this.show();
    this.page.toggleChats.focus();
    return true;
  }

  // A phone's keyboard covers the page's end: what sticks to it moves up.
  fit(viewport) {
    const covered = Math.max(0, innerHeight - viewport.height - viewport.offsetTop);
    const isZoomed = viewport.scale > 1.01;
    document.documentElement.style.setProperty("--covered", `${isZoomed ? 0 : covered}px`);
  }
}
