// The marks inside a line of markdown: code, emphasis, links, formulas. Text nodes only, see
// markdown.js.

const MAX_DEPTH = 8;
const REACH = 2000; // characters a mark may span: bounds the search for its end
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const ADDRESS = /^https?:\/\/[^\s<>"'`]+/;
const WORD = /[\p{L}\p{N}_]/u;

// Only these two may be followed; everything else stays text.
function safeAddress(text) {
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}

function link(address) {
  const made = document.createElement("a");
  made.href = address;
  made.rel = "noopener noreferrer nofollow";
  made.target = "_blank";
  return made;
}

// The lines of a paragraph as one text that remembers where each character stands in the source.
function joined(lines) {
  const starts = [];
  let text = "";
  for (const line of lines) {
    if (starts.length) text += "\n";
    starts.push([text.length, line.at]);
    text += line.text;
  }
  const at = (i) => {
    let low = 0; // the last line that starts at or before i
    let high = starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (starts[middle][0] <= i) low = middle;
      else high = middle - 1;
    }
    return starts[low][1] + (i - starts[low][0]);
  };
  return { text, at };
}

export function renderInline(parent, lines, pen) {
  if (!lines.length) return;
  const { text, at } = joined(lines);
  const add = (to, start, end) => {
    if (end > start) pen.leaf(to, text.slice(start, end), (k) => at(start + k));
  };
  walk({ text, add, formula: pen.formula }, parent, 0, text.length, 0);
}

function walk(context, parent, from, to, depth) {
  const { text, add } = context;
  let plain = from; // where text without a mark began
  let i = from;
  while (i < to) {
    const mark = depth < MAX_DEPTH ? markAt(text, i, to) : null;
    if (mark === null) {
      i += 1;
      continue;
    }
    add(parent, plain, i);
    if (mark.name === "escape") {
      add(parent, i + 1, i + 2);
    } else if (mark.name === "formula") {
      const made = document.createElement("span");
      made.className = mark.isDisplay ? "formula display" : "formula";
      add(made, i, mark.next); // with its marks: it stays like this where it is no formula
      context.formula?.(made, text.slice(mark.start, mark.end), mark.isDisplay);
      parent.append(made);
    } else {
      const made = mark.address ? link(mark.address) : document.createElement(mark.name);
      if (mark.isLiteral) add(made, mark.start, mark.end);
      else walk(context, made, mark.start, mark.end, depth + 1);
      parent.append(made);
    }
    i = plain = mark.next;
  }
  add(parent, plain, to);
}

// The mark that begins at i, or null: what it makes, what it holds, where the text goes on.
function markAt(text, i, to) {
  switch (text[i]) {
    case "$":
      return dollarsAt(text, i, to);
    case "\\":
      if (text[i + 1] === "(" || text[i + 1] === "[") {
        const formula = bracketsAt(text, i, to);
        if (formula) return formula;
      }
      if (i + 1 < to && PUNCTUATION.test(text[i + 1])) return { name: "escape", next: i + 2 };
      return null;
    case "`":
      return codeAt(text, i, to);
    case "!":
      return text[i + 1] === "[" ? linkAt(text, i + 1, to) : null; // a picture is only named
    case "[":
      return linkAt(text, i, to);
    case "h":
    case "<":
      return addressAt(text, i, to);
    case "*":
    case "_":
    case "~":
      return emphasisAt(text, i, to);
    default:
      return null;
  }
}

function codeAt(text, i, to) {
  if (text[i - 1] === "`") return null; // inside a run that was tried as a whole
  let width = 1;
  while (text[i + width] === "`") width += 1;
  const fence = "`".repeat(width);
  let end = i + width;
  for (;;) {
    end = text.indexOf(fence, end);
    if (end < 0 || end + width > to || end - i > REACH) return null;
    if (text[end + width] !== "`" && text[end - 1] !== "`") break;
    end += 1;
  }
  let start = i + width;
  const next = end + width;
  if (end - start > 2 && text[start] === " " && text[end - 1] === " ") {
    start += 1;
    end -= 1;
  }
  return { name: "code", isLiteral: true, start, end, next };
}

// \( … \) and \[ … \]
function bracketsAt(text, i, to) {
  const isDisplay = text[i + 1] === "[";
  const length = text.slice(i + 2, Math.min(to, i + REACH)).indexOf(isDisplay ? "\\]" : "\\)");
  const end = i + 2 + length;
  if (length < 0 || !text.slice(i + 2, end).trim()) return null;
  return { name: "formula", isDisplay, start: i + 2, end, next: end + 2 };
}

// $ … $ and $$ … $$. Prices are no formulas: nothing blank stands inside the marks, no digit after.
function dollarsAt(text, i, to) {
  if (text[i - 1] === "$") return null;
  const width = text[i + 1] === "$" ? 2 : 1;
  const start = i + width;
  const mark = "$".repeat(width);
  if (width === 1 && (start >= to || /\s/.test(text[start]))) return null;
  for (let end = start + 1; end <= Math.min(to - width, i + REACH); end++) {
    if (text[end] === "\\") end += 1;
    else if (text[end] === "$" && text.startsWith(mark, end) && text[end + width] !== "$") {
      const isPrice = width === 1 && (/\s/.test(text[end - 1]) || /\d/.test(text[end + 1] ?? ""));
      if (isPrice) continue;
      return { name: "formula", isDisplay: width === 2, start, end, next: end + width };
    }
  }
  return null;
}

function linkAt(text, i, to) {
  let depth = 0;
  let close = i;
  for (; close < Math.min(to, i + REACH); close++) {
    if (text[close] === "\\") close += 1;
    else if (text[close] === "[") depth += 1;
    else if (text[close] === "]" && --depth === 0) break;
  }
  if (text[close] !== "]" || text[close + 1] !== "(") return null;
  const target = /^\(\s*<?([^\s<>]*?)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/;
  const found = target.exec(text.slice(close + 1, Math.min(to, close + 1 + REACH)));
  const address = found && safeAddress(found[1]);
  if (!address) return null;
  return { address, start: i + 1, end: close, next: close + 1 + found[0].length };
}

function addressAt(text, i, to) {
  const isBracketed = text[i] === "<";
  if (!isBracketed && i > 0 && WORD.test(text[i - 1])) return null;
  const start = isBracketed ? i + 1 : i;
  const found = ADDRESS.exec(text.slice(start, Math.min(to, start + REACH)));
  if (!found) return null;
  let end = start + found[0].length;
  if (isBracketed) {
    if (text[end] !== ">") return null;
  } else {
    while (/[.,;:!?*_~]/.test(text[end - 1]) || (text[end - 1] === ")" && !found[0].includes("("))) {
      end -= 1;
    }
  }
  const address = safeAddress(text.slice(start, end));
  if (!address) return null;
  return { address, isLiteral: true, start, end, next: end + (isBracketed ? 1 : 0) };
}

function emphasisAt(text, i, to) {
  const character = text[i];
  let width = 1;
  while (width < 3 && text[i + width] === character) width += 1;
  if (character === "~" && width < 2) return null;
  if (character === "~") width = 2;
  if (character === "_" && i > 0 && WORD.test(text[i - 1])) return null;
  const open = i + width;
  if (open >= to || /\s/.test(text[open])) return null;
  const mark = character.repeat(width);
  for (let end = open + 1; end <= Math.min(to - width, i + REACH); end++) {
    if (text[end] === "\\") end += 1;
    else if (text[end] === "`") end = (codeAt(text, end, to)?.next ?? end + 1) - 1;
    else if (text[end] === character && text.startsWith(mark, end) && closes(text, end, width, character)) {
      if (width === 3) return { name: "strong", start: i + 2, end: end + 1, next: end + 3 };
      const name = character === "~" ? "del" : width === 2 ? "strong" : "em";
      return { name, start: open, end, next: end + width };
    }
  }
  return null;
}

function closes(text, end, width, character) {
  if (/\s/.test(text[end - 1])) return false;
  const after = text[end + width];
  if (character === "_" && after !== undefined && WORD.test(after)) return false;
  if (width === 1) return after !== character && text[end - 1] !== character;
  return true;
}
