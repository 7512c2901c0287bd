// Markdown of a model's answer, as DOM nodes. Model text becomes text nodes and nothing else: there
// is no way from it to markup, to an attribute other than a checked href, or to a loaded resource.
//
// Every leaf knows where in the source its characters stand, so that tokens can be coloured in the
// rendered text. Top-level blocks that did not change are kept, and those that cannot change any more
// are not read again: a growing answer costs what its end costs.
//
// A pen draws: leaf(parent, text, at) adds text, at(k) being where its k-th character stands in the
// source; code(element, lines, language) fills a block of code, and formula(element, tex, isDisplay)
// makes a formula of an element that holds its source. The last two may be missing.

import { renderInline } from "./inline.js";

const MAX_DEPTH = 12;
const MAX_COLUMNS = 200; // of a table; a row of few characters has as many cells as its head
// No two parts beside each other match the same: a long line costs what its length costs.
const FENCE = /^ {0,3}(`{3,}|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])([ \t]+|$)/;
const FORMULA = /^ {0,3}(\$\$|\\\[)/;
const TASK = /^\[([ xX])\][ \t]+(?=\S)/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*(?:\|[ \t]*)?$/;

// A line is { text, at }: `at` is where its first character stands in the source.
function cut(line, start, end = line.text.length) {
  return { text: line.text.slice(start, end), at: line.at + start };
}

function linesOf(source, start) {
  let at = start;
  return source.split("\n").map((text) => {
    const line = { text: text.replace(/\r$/, ""), at };
    at += text.length + 1;
    return line;
  });
}

const isBlank = (line) => line.text.trim() === "";

function startsBlock(line, next) {
  return (
    FENCE.test(line.text) || HEADING.test(line.text) || RULE.test(line.text) ||
    QUOTE.test(line.text) || ITEM.test(line.text) || startsFormula(line) || startsTable(line, next)
  );
}

// A line that begins with a formula and goes on in words after it is a paragraph.
function startsFormula(line) {
  const found = FORMULA.exec(line.text);
  if (!found) return false;
  const rest = line.text.slice(found[0].length).trimEnd();
  const end = rest.indexOf(closerOf(found[1]));
  return end < 0 || end === rest.length - 2;
}

const closerOf = (opener) => (opener === "$$" ? "$$" : "\\]");

function startsTable(line, next) {
  if (!next?.text.includes("-") || !line.text.includes("|") || !TABLE_RULE.test(next.text)) return false;
  const { length } = cells(line);
  return length <= MAX_COLUMNS && length === cells(next).length;
}

// The cells of a table's row; \| is no border.
function cells(line) {
  const found = [];
  let start = line.text.length - line.text.trimStart().length;
  if (line.text[start] === "|") start += 1;
  const end = line.text.trimEnd().length;
  for (let i = start; i < end; i++) {
    if (line.text[i] === "\\") i += 1;
    else if (line.text[i] === "|") {
      found.push(trimmed(cut(line, start, i)));
      start = i + 1;
    }
  }
  if (start < end) found.push(trimmed(cut(line, start, end)));
  return found;
}

function trimmed(line) {
  const start = line.text.length - line.text.trimStart().length;
  return cut(line, start, Math.max(start, line.text.trimEnd().length));
}

// The blocks of some lines: { kind, lines, … }, where lines are without their marks.
function blocksOf(lines) {
  const blocks = [];
  for (let i = 0; i < lines.length; ) {
    if (isBlank(lines[i])) {
      i += 1;
      continue;
    }
    const block = readBlock(lines, i);
    blocks.push({ ...block, from: i });
    i = block.next;
  }
  return blocks;
}

function readBlock(lines, i) {
  const line = lines[i];
  const heading = HEADING.exec(line.text);
  if (FENCE.test(line.text)) return readFence(lines, i);
  if (heading) {
    const start = line.text.length - heading[2].length;
    const text = cut(line, start, start + endOfTitle(heading[2]));
    return { kind: "heading", level: heading[1].length, lines: [text], next: i + 1 };
  }
  if (RULE.test(line.text)) return { kind: "rule", next: i + 1 };
  if (QUOTE.test(line.text)) return readQuote(lines, i);
  if (ITEM.test(line.text)) return readList(lines, i);
  if (startsFormula(line)) return readFormula(lines, i);
  if (startsTable(line, lines[i + 1])) return readTable(lines, i);
  let next = i + 1;
  while (next < lines.length && !isBlank(lines[next]) && !startsBlock(lines[next], lines[next + 1])) {
    next += 1;
  }
  return { kind: "paragraph", lines: lines.slice(i, next).map(trimmed), next };
}

// Without the marks that may close a heading.
function endOfTitle(text) {
  let end = text.length;
  for (const marks of [" \t", "#", " \t"]) while (end && marks.includes(text[end - 1])) end -= 1;
  return end;
}

function readFence(lines, i) {
  const [, fence, language] = FENCE.exec(lines[i].text);
  const indent = lines[i].text.length - lines[i].text.trimStart().length;
  let end = i + 1;
  for (; end < lines.length; end++) {
    const text = lines[end].text.trim();
    if (text.length >= fence.length && text === fence[0].repeat(text.length)) break;
  }
  const body = lines.slice(i + 1, end).map((line) => {
    const spaces = line.text.length - line.text.trimStart().length;
    return cut(line, Math.min(spaces, indent));
  });
  return { kind: "code", language: language.trim().split(/\s/)[0], lines: body, next: end + 1 };
}

// Up to the line that closes it; one that nothing closes is a paragraph up to the empty line.
function readFormula(lines, i) {
  const [opening, opener] = FORMULA.exec(lines[i].text);
  const closer = closerOf(opener);
  const closes = (text) => text.trimEnd().endsWith(closer);
  let end = i;
  const isWhole = closes(lines[i].text.slice(opening.length));
  while (!isWhole && end + 1 < lines.length && !isBlank(lines[end + 1])) {
    end += 1;
    if (closes(lines[end].text)) break;
  }
  const body = lines.slice(i, end + 1);
  const text = body.map((line) => line.text).join("\n").trimEnd().slice(opening.length);
  if (!isWhole && (end === i || !closes(lines[end].text))) {
    return { kind: "paragraph", lines: body.map(trimmed), next: end + 1 };
  }
  return { kind: "formula", tex: text.slice(0, -2), lines: body.map(trimmed), next: end + 1 };
}

function readQuote(lines, i) {
  let next = i;
  const body = [];
  for (; next < lines.length && QUOTE.test(lines[next].text); next++) {
    body.push(cut(lines[next], QUOTE.exec(lines[next].text)[0].length));
  }
  return { kind: "quote", lines: body, next };
}

function readList(lines, i) {
  const [, indent, mark] = ITEM.exec(lines[i].text);
  const ordered = /\d/.test(mark);
  const items = [];
  let next = i;
  while (next < lines.length) {
    const item = ITEM.exec(lines[next].text);
    const isOurs = item && item[1].length <= indent.length + 1 &&
      item[2].at(-1) === mark.at(-1) && !RULE.test(lines[next].text);
    if (!isOurs) break;
    const width = item[1].length + item[2].length + Math.min(Math.max(item[3].length, 1), 4);
    const body = [cut(lines[next], Math.min(width, lines[next].text.length))];
    next = readItem(lines, next + 1, item[1].length + 1, width, body);
    items.push(body);
    while (next < lines.length && isBlank(lines[next])) next += 1;
  }
  return { kind: ordered ? "ordered" : "bullets", start: Number.parseInt(mark, 10), items, next };
}

// The lines that belong to an item: those set in, and those that just go on with its paragraph.
function readItem(lines, start, least, width, body) {
  let i = start;
  let after = start; // the next line with text
  for (; i < lines.length; i++) {
    const line = lines[i];
    const spaces = line.text.length - line.text.trimStart().length;
    if (isBlank(line)) {
      for (after = Math.max(after, i); after < lines.length && isBlank(lines[after]); ) after += 1;
      if (after === lines.length || lines[after].text.search(/\S/) < least) break;
      body.push(cut(line, line.text.length));
    } else if (spaces >= least) {
      body.push(cut(line, Math.min(spaces, width)));
    } else if (isBlank(body[body.length - 1]) || startsBlock(line, lines[i + 1])) {
      break;
    } else {
      body.push(trimmed(line));
    }
  }
  return i;
}

function readTable(lines, i) {
  const aligns = cells(lines[i + 1]).map(({ text }) => {
    if (!text.endsWith(":")) return "";
    return text.startsWith(":") ? "centre" : "right";
  });
  let next = i + 2;
  while (next < lines.length && !isBlank(lines[next]) && lines[next].text.includes("|")) next += 1;
  const rows = [lines[i], ...lines.slice(i + 2, next)].map(cells);
  return { kind: "table", aligns, rows, next };
}

function element(name, className = "", ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function drawBlock(block, pen, depth) {
  const inline = (name, lines, className) => {
    const made = element(name, className);
    renderInline(made, lines, pen);
    return made;
  };
  const inner = (made, lines) => {
    if (depth >= MAX_DEPTH) renderInline(made, lines, pen);
    else drawBlocks(made, lines, pen, depth + 1);
    return made;
  };
  switch (block.kind) {
    case "heading": // a page has its own h1 and h2
      return inline(`h${Math.min(block.level + 2, 6)}`, block.lines, `level-${block.level}`);
    case "rule":
      return element("hr");
    case "code":
      return drawCode(block, pen);
    case "formula":
      return drawFormula(block, pen);
    case "quote":
      return inner(element("blockquote"), block.lines);
    case "table":
      return drawTable(block, inline);
    case "paragraph":
      return inline("p", block.lines);
    default: {
      const list = element(block.kind === "ordered" ? "ol" : "ul");
      if (block.start > 1) list.start = block.start;
      for (const lines of block.items) list.append(inner(element("li", ...drawTask(lines)), lines));
      return list;
    }
  }
}

// A task's box is a character; its mark is taken off the item's first line.
function drawTask(lines) {
  const found = TASK.exec(lines[0].text);
  if (!found) return [];
  lines[0] = cut(lines[0], found[0].length);
  const isDone = found[1] !== " ";
  const box = element("span", "box", isDone ? "☑" : "☐");
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", isDone ? "done" : "to do");
  return ["task", box];
}

function drawFormula(block, pen) {
  const made = element("div", "formula display");
  block.lines.forEach((line, i) => {
    if (i) made.append("\n");
    pen.leaf(made, line.text, (k) => line.at + k);
  });
  pen.formula?.(made, block.tex, true);
  return made;
}

function drawCode(block, pen) {
  const code = element("code");
  const { lines } = block;
  if (pen.code) pen.code(code, lines, block.language);
  else {
    lines.forEach((line, i) => {
      pen.leaf(code, line.text, (k) => line.at + k);
      if (i < lines.length - 1) code.append("\n");
    });
  }
  const copy = element("button", "copy", "Copy");
  copy.type = "button";
  copy.dataset.copies = "code";
  const head = element("div", "code-head", element("span", "", block.language || "text"), copy);
  const body = element("pre", "", code);
  body.tabIndex = 0; // a wide block must be scrollable by keys
  return element("figure", "code", head, body);
}

function drawTable(block, inline) {
  const [head, ...rows] = block.rows;
  const { aligns } = block;
  const row = (name, found) => {
    const made = element("tr", "", ...found.slice(0, aligns.length).map((cell, i) => inline(name, [cell], aligns[i])));
    const missing = aligns.length - found.length;
    if (missing > 0) made.append(Object.assign(element(name), { colSpan: missing }));
    return made;
  };
  const body = element("tbody");
  for (const found of rows) body.append(row("td", found));
  const table = element("table", "", element("thead", "", row("th", head)), body);
  const scroller = element("div", "table", table);
  scroller.tabIndex = 0;
  return scroller;
}

function drawBlocks(parent, lines, pen, depth) {
  const blocks = blocksOf(lines);
  // one paragraph in a list item is no paragraph of its own
  const isTight = parent.tagName === "LI" && blocks[0]?.kind === "paragraph";
  blocks.forEach((block, i) => {
    if (i === 0 && isTight) renderInline(parent, block.lines, pen);
    else parent.append(drawBlock(block, pen, depth));
  });
}

// Makes `parent` show `source`. Blocks with the same text and `style` as before are kept.
export function renderMarkdown(parent, source, pen, style) {
  const before = parent.shown?.style === style ? parent.shown : { source: "", blocks: [] };
  const settled = source.startsWith(before.source) ? before.blocks.filter((block) => block.isSettled) : [];
  const start = settled.at(-1)?.end ?? 0;
  const lines = linesOf(source.slice(start), start);
  const found = blocksOf(lines).map((block) => {
    const last = lines[Math.min(block.next, lines.length) - 1];
    const end = lines[block.next]?.at ?? source.length;
    const text = source.slice(lines[block.from].at, last.at + last.text.length);
    // where a block ends shows in the line after it, and a table's beginning in the next one:
    // with both of them whole, nothing that follows can change the block
    const isSettled = block.next + 2 < lines.length;
    return { block, key: `${lines[block.from].at} ${text}`, end, isSettled };
  });
  const shown = [...settled, ...found];
  let same = settled.length;
  while (same < shown.length && shown[same].key === before.blocks[same]?.key) same += 1;
  while (parent.childNodes.length > same) parent.lastChild.remove();
  for (const { block } of shown.slice(same)) parent.append(drawBlock(block, pen, 0));
  const blocks = shown.map(({ key, end, isSettled }) => ({ key, end, isSettled }));
  parent.shown = { source, style, blocks };
}
