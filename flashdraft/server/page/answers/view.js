// An answer on the page: thinking, text, the strip of accepted blocks, the gauge. Chat and race
// draw with it; it asks nothing of the server.

import { element } from "../dom.js";
import { DRAFTED, TARGET } from "./answer.js";
import { CodeColours } from "./code.js";
import { renderMarkdown } from "./markdown.js";
import { setFormula } from "./mathematics.js";

const ORIGINS = {
  [DRAFTED]: ["drafted", "drafted, and accepted by the target"],
  [TARGET]: ["own", "the target's own"],
};
const FULL_BLOCK = 8; // tokens a step that fill the gauge
let bestRate = 1; // what fills the other gauge: the fastest seen on this page

// Adds text, each token in an element of its own when `coloured`.
function leafOf(channel, coloured) {
  if (!coloured) return (parent, text) => parent.append(text);
  const { ends } = channel;
  return (parent, text, at) => {
    let run = firstBeyond(ends, at(0));
    for (let k = 0; k < text.length; ) {
      while (run < ends.length && ends[run] <= at(k)) run += 1;
      let end = k + 1;
      while (end < text.length && at(end) < (ends[run] ?? Infinity)) end += 1;
      parent.append(token(text.slice(k, end), channel.runs[run]));
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

function token(text, run) {
  const origin = run && ORIGINS[run[1]];
  if (!origin) return text;
  // an indent or an empty line has nothing to colour
  const indent = /^\s{2,}/.exec(text)?.[0] ?? "";
  const made = element("span", `token ${origin[0]}`, text.slice(indent.length));
  made.title = `step ${run[2]}: ${origin[1]}`;
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
  }

  draw(answer, { live, coloured }) {
    this.root.classList.toggle("live", live);
    this.root.classList.toggle("coloured", coloured);
    this.drawThinking(answer, live, coloured);
    const leaf = leafOf(answer.content, coloured);
    const code = (place, lines, language) => this.colours.draw(place, lines, language, leaf);
    // a formula's tokens show in its source only
    const pen = { leaf, code, formula: coloured ? null : setFormula };
    renderMarkdown(this.text, answer.content.text, pen, coloured ? "tokens" : "plain");
    this.strip.hidden = !coloured || !answer.steps.length;
    if (coloured) this.drawStrip(answer.steps, live);
    this.drawGauge(answer, live);
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
    leafOf(answer.reasoning, coloured)(this.thoughts, text.slice(from), (k) => from + k);
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
      column.title = `step ${i}: ${accepted} accepted + ${own} of the target's own`;
    }
    if (steps.length > known && live) strip.scrollLeft = strip.scrollWidth;
    const accepted = steps.reduce((sum, step) => sum + step[0], 0);
    strip.setAttribute("aria-label", `${accepted} drafted tokens accepted in ${steps.length} steps`);
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
