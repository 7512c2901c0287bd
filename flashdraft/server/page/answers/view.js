// An answer on the page: thinking, text, the strip of accepted blocks, the gauge. Chat and race
// draw with it; it asks nothing of the server.

import { element } from "../dom.js";
import { DRAFTED, TARGET } from "./answer.js";
import { CodeColours } from "./code.js";
import { renderMarkdown } from "./markdown.js";
import { setFormula } from "./mathematics.js";
import { inWords } from "./tree.js";
import { treeCard } from "./tree_card.js";

const ORIGINS = {
  [DRAFTED]: ["drafted", "drafted, and accepted by the target"],
  [TARGET]: ["own", "the target's own"],
};
const FULL_BLOCK = 8; // tokens a step that fill the gauge
let bestRate = 1; // what fills the other gauge: the fastest seen on this page

// Adds text, each token in an element of its own when `coloured`.
function leafOf(channel, coloured, steps) {
  if (!coloured) return (parent, text) => parent.append(text);
  const { ends } = channel;
  return (parent, text, at) => {
    let run = firstBeyond(ends, at(0));
    for (let k = 0; k < text.length; ) {
      while (run < ends.length && ends[run] <= at(k)) run += 1;
      let end = k + 1;
      while (end < text.length && at(end) < (ends[run] ?? Infinity)) end += 1;
      parent.append(token(text.slice(k, end), channel.runs[run], steps));
      k = end;
    }
  };
}

function firstBeyond(ends, offset) {
  let low = 0;
  let high = ends.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle] <= offset) low = middle + 1;
    else high = middle;
  }
  return low;
}

function token(text, run, steps) {
  const origin = run && ORIGINS[run[1]];
  if (!origin) return text;
  // an indent or an empty line has nothing to colour
  const indent = /^\s{2,}/.exec(text)?.[0] ?? "";
  const made = element("span", `token ${origin[0]}`, text.slice(indent.length));
  if (steps[run[2]]?.[2]) made.dataset.step = run[2]; // its card says more
  else made.title = `step ${run[2]}: ${origin[1]}`;
  return indent ? joined(indent, made) : made;
}

function joined(...nodes) {
  const made = document.createDocumentFragment();
  made.append(...nodes);
  return made;
}

export class AnswerView {
  constructor() {
    this.colours = new CodeColours();
    this.summary = element("summary");
    this.thoughts = element("div", "thoughts");
    this.thinking = element("details", "thinking", this.summary, this.thoughts);
    this.text = element("div", "answer");
    this.strip = element("div", "strip");
    this.strip.setAttribute("role", "img");
    this.strip.tabIndex = 0;
    this.gauge = element("p", "gauge");
    this.root = element("div", "answer-view", this.thinking, this.text, this.strip, this.gauge);
    this.root.addEventListener("pointerover", (event) => this.point(event));
    this.root.addEventListener("pointerout", ({ target }) => {
      if (target.dataset.step) treeCard.leave();
    });
    this.root.addEventListener("click", (event) => this.press(event));
    this.strip.addEventListener("keydown", (event) => this.walk(event));
  }

  draw(answer, { live, coloured }) {
    this.root.classList.toggle("live", live);
    this.root.classList.toggle("coloured", coloured);
    this.steps = answer.steps;
    const leaf = leafOf(answer.content, coloured, this.steps);
    this.drawThinking(answer, live, coloured);
    const code = (place, lines, language) => this.colours.draw(place, lines, language, leaf);
    // a formula's tokens show in its source only
    const pen = { leaf, code, formula: coloured ? null : setFormula };
    renderMarkdown(this.text, answer.content.text, pen, coloured ? "tokens" : "plain");
    this.strip.hidden = !coloured || !answer.steps.length;
    if (coloured) this.drawStrip(answer.steps, live);
    this.drawGauge(answer, live);
    if (treeCard.view !== this || !treeCard.isShown) return;
    if (coloured) this.mark(treeCard.step);
    else treeCard.hide();
  }

  drawThinking(answer, live, coloured) {
    const { text } = answer.reasoning;
    this.thinking.hidden = !text;
    if (!text) return;
    const seconds = (answer.thoughtMs / 1000).toFixed(1);
    const isThinking = live && !answer.content.text;
    this.summary.textContent = isThinking ? `Thinking, ${seconds} s` : `Thought for ${seconds} s`;
    // it only grows, and who has unfolded it may be reading: add what is new
    const before = this.shownThoughts;
    const isSame = before?.coloured === coloured && text.startsWith(before.text);
    const from = isSame ? before.text.length : 0;
    if (!isSame) this.thoughts.replaceChildren();
    this.shownThoughts = { text, coloured };
    if (from === text.length) return;
    leafOf(answer.reasoning, coloured, this.steps)(this.thoughts, text.slice(from), (k) => from + k);
  }

  // A column for each step: accepted drafts, and on top of them the target's own token.
  drawStrip(steps, live) {
    const { strip } = this;
    while (strip.children.length > steps.length) strip.lastChild.remove();
    const known = strip.children.length;
    for (let i = Math.max(0, known - 1); i < steps.length; i++) {
      const [accepted, own] = steps[i];
      const column = strip.children[i] ?? strip.appendChild(element("i"));
      column.style.setProperty("--accepted", accepted);
      column.style.setProperty("--own", own);
      const words = `${accepted} accepted + ${own} of the target's own`;
      column.title = steps[i][2] ? "" : `step ${i}: ${words}`;
      if (steps[i][2]) column.dataset.step = i;
    }
    if (steps.length > known && live) strip.scrollLeft = strip.scrollWidth;
    const accepted = steps.reduce((sum, step) => sum + step[0], 0);
    const words = `${accepted} drafted tokens accepted in ${steps.length} steps`;
    const hasTrees = steps.some((step) => step[2]);
    strip.setAttribute("role", hasTrees ? "slider" : "img");
    strip.setAttribute("aria-label", hasTrees ? `${words}. Arrow keys show what each tried` : words);
    if (!hasTrees) return;
    strip.setAttribute("aria-valuemin", 0);
    strip.setAttribute("aria-valuemax", steps.length - 1);
    if (!strip.hasAttribute("aria-valuenow")) strip.setAttribute("aria-valuenow", 0);
  }

  // -- what a step tried -------------------------------------------------------------------------

  open(step, anchor, isPinned) {
    const trees = this.steps[step]?.[2];
    if (!trees || !anchor.isConnected) return;
    this.strip.setAttribute("aria-valuenow", step);
    this.strip.setAttribute("aria-valuetext", `Step ${step}: ${trees.map(inWords).join(". ")}`);
    treeCard.show(this, step, trees, anchor, isPinned);
  }

  // The next step with branches, `by` steps on.
  openBeside(step, by, isPinned) {
    let found = step + by;
    while (this.steps[found] && !this.steps[found][2]) found += Math.sign(by);
    const column = this.strip.children[found];
    if (!this.steps[found]?.[2] || !column) return;
    column.scrollIntoView({ block: "nearest", inline: "nearest" });
    this.open(found, column, isPinned);
  }

  point({ target, pointerType }) {
    if (target.dataset.step && pointerType === "mouse") {
      treeCard.point(() => this.open(Number(target.dataset.step), target, false));
    }
  }

  press({ target }) {
    if (!target.dataset.step || target.closest("a") || !getSelection().isCollapsed) return;
    this.open(Number(target.dataset.step), target, true);
  }

  walk(event) {
    if (this.strip.getAttribute("role") !== "slider") return;
    const now = treeCard.isShown && treeCard.view === this ? treeCard.step : null;
    const last = this.steps.length;
    const moves = {
      ArrowRight: [now ?? -1, 1], ArrowLeft: [now ?? last, -1], Home: [-1, 1], End: [last, -1],
      Enter: [(now ?? 0) - 1, 1], " ": [(now ?? 0) - 1, 1],
    };
    if (event.key in moves) {
      event.preventDefault();
      this.openBeside(...moves[event.key], true);
    }
  }

  anchorOf(step) {
    return this.root.isConnected ? this.root.querySelector(`[data-step="${step}"]`) : null;
  }

  // The tokens and the column of a step that is looked at; none where that is null.
  mark(step) {
    for (const one of this.root.querySelectorAll(".of-step")) one.classList.remove("of-step");
    if (step === null) return;
    for (const one of this.root.querySelectorAll(`[data-step="${step}"]`)) one.classList.add("of-step");
  }

  drawGauge(answer, live) {
    const rate = answer.rate();
    const length = answer.acceptedLength();
    this.gauge.hidden = rate === 0;
    if (rate === 0) return;
    bestRate = Math.max(bestRate, rate);
    const figures = [figure(rate.toFixed(rate < 10 ? 1 : 0), "tok/s", live && rate / bestRate)];
    if (length) {
      figures.push(figure(length.toFixed(2), "tokens a step", live && length / FULL_BLOCK));
    }
    if (!live) {
      figures.push(figure(answer.numTokens.toLocaleString("en"), "tokens"));
      const { drafted, accepted, ttft_s: wait } = answer.stats ?? {};
      if (drafted) figures.push(figure(`${Math.round((accepted / drafted) * 100)}%`, "of drafts accepted"));
      if (wait) figures.push(figure(`${wait.toFixed(2)} s`, "to the first"));
    }
    this.gauge.replaceChildren(...figures);
  }
}

function figure(value, label, share = false) {
  const made = element("span", "figure", element("b", "", value), ` ${label}`);
  if (share !== false) {
    const fill = element("i");
    fill.style.setProperty("--share", Math.min(share, 1));
    made.append(element("span", "track", fill));
  }
  return made;
}
