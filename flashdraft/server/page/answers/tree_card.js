// The card that shows what a step tried: near the token or the column that is pointed at, and at the
// page's end on a phone. There is one for the page; it stays where somebody has pressed.

import { button, element } from "../dom.js";
import { drawTree, inWords, placesOf } from "./tree.js";

const DWELL_MS = 120; // on a token, before there is a card: who moves across a text reads it
const LINGER_MS = 250; // on the way from a token to the card
const EDGE = 12; // pixels
const NARROW = matchMedia("(max-width: 46rem)");

class TreeCard {
  constructor() {
    this.title = element("strong");
    this.words = element("p", "tree-words");
    this.drawing = element("div", "tree-drawing");
    this.drawing.tabIndex = 0;
    this.places = element("ul", "unseen");
    const [back, on] = [this.stepper("‹", "Earlier step", -1), this.stepper("›", "Later step", 1)];
    const close = button("×", () => this.hide());
    close.setAttribute("aria-label", "Close");
    this.root = element("aside", "tree-card", element("header", "", this.title, back, on, close),
      this.words, this.places, this.drawing);
    this.root.hidden = true;
    this.root.setAttribute("role", "group");
    this.root.addEventListener("pointerenter", () => clearTimeout(this.timer));
    this.root.addEventListener("pointerleave", () => this.leave());
    document.addEventListener("keydown", (event) => this.press(event));
    document.addEventListener("pointerdown", ({ target }) => {
      if (!this.root.contains(target) && !this.view?.root.contains(target)) this.hide();
    });
    window.addEventListener("scroll", () => this.follow(), { passive: true });
    window.addEventListener("resize", () => this.follow());
    window.addEventListener("hashchange", () => this.hide());
    document.body.append(this.root);
  }

  stepper(sign, words, by) {
    const made = button(sign, () => this.view?.openBeside(this.step, by, true));
    made.setAttribute("aria-label", words);
    return made;
  }

  get isShown() {
    return !this.root.hidden;
  }

  // `view` is the answer's, `anchor` the element that the card belongs to.
  show(view, step, trees, anchor, isPinned) {
    clearTimeout(this.timer);
    const isSame = this.isShown && this.view === view && this.step === step;
    this.isPinned = isPinned || (isSame && this.isPinned);
    if (!isSame) this.view?.mark(null);
    Object.assign(this, { view, step, anchor });
    view.mark(step);
    if (!isSame) this.fill(step, trees);
    this.root.hidden = false;
    this.place();
  }

  fill(step, trees) {
    this.title.textContent = `Step ${step}`;
    this.words.textContent = trees.map(inWords).join(". ");
    this.root.setAttribute("aria-label", `Step ${step}: what was tried`);
    this.places.replaceChildren(...trees.flatMap(placesOf).map((words) => element("li", "", words)));
    this.drawing.replaceChildren(...trees.map(drawTree));
    this.drawing.scrollTo(0, 0);
  }

  // Somebody points at something that `open` would show the card of.
  point(open) {
    if (this.isPinned) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(open, this.isShown ? 0 : DWELL_MS);
  }

  // On a wide page below its anchor, or above it where there is no room.
  place() {
    const { style } = this.root;
    if (NARROW.matches) {
      style.left = style.top = "";
      return;
    }
    const { left, top, bottom } = this.anchor.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.root;
    const isAbove = bottom + EDGE + height > innerHeight && top - EDGE - height > 0;
    style.left = `${Math.max(EDGE, Math.min(left - EDGE, innerWidth - width - EDGE))}px`;
    style.top = `${isAbove ? top - EDGE / 2 - height : Math.min(bottom + EDGE / 2, innerHeight - height - EDGE)}px`;
  }

  follow() {
    if (!this.isShown) return;
    if (!this.anchor.isConnected) this.anchor = this.view.anchorOf(this.step); // it was drawn anew
    if (this.isPinned && this.anchor) this.place();
    else this.hide();
  }

  leave() {
    if (this.isPinned) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.hide(), LINGER_MS);
  }

  press(event) {
    if (event.key !== "Escape" || !this.isShown || document.querySelector("dialog[open], :popover-open")) return;
    if (this.isPinned) event.preventDefault(); // it stops no answer
    this.hide();
  }

  hide() {
    clearTimeout(this.timer);
    if (!this.isShown) return;
    const hadFocus = this.root.contains(document.activeElement);
    this.root.hidden = true;
    this.isPinned = false;
    this.view.mark(null);
    if (hadFocus) this.view.strip.focus();
  }
}

export const treeCard = new TreeCard();
