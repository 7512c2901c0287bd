// The tree of draft tokens that a step verified: what it says in words, where each token stands in a
// drawing, and the drawing. Row 0 is the way that won, branches that were tried hang below it.

const SVG = "http://www.w3.org/2000/svg";
const MAX_NODES = 64;
const MAX_TREES = 8; // of one step: several are joined where a reader is late
const MAX_TEXT = 40; // characters kept of a token, of which a drawing has room for MAX_LABEL
const MAX_LABEL = 12;
const [ROW, PILL, PAD, GAP, BEND] = [27, 21, 7, 20, 7]; // pixels
const FONT_PX = 12.5;
const SIGNS = [[/\n/g, "⏎"], [/\t/g, "⇥"], [/^ +$/, "␣"]];

const isPlace = (value, below) => Number.isInteger(value) && value >= 0 && value < below;
const isText = (value) => typeof value === "string";

// A tree as it is kept, of what a server or a file says; null where that is none. Tokens are
// numbered from 1 on, 0 is the one before all of them; `own` is the target's after the path.
export function treeOf(value) {
  const { texts, parents, path, before, own } = value ?? {};
  if (![texts, parents, path].every(Array.isArray)) return null;
  const count = texts.length;
  if (count === 0 || count > MAX_NODES || parents.length !== count || !texts.every(isText)) return null;
  if (!parents.every((parent, i) => isPlace(parent, i + 1))) return null;
  const isPath = path.every((row, i) => isPlace(row, count + 1) && row > 0 && parents[row - 1] === (path[i - 1] ?? 0));
  if (!isPath) return null;
  const cut = (text) => (isText(text) ? text.slice(0, MAX_TEXT) : null);
  return { texts: texts.map(cut), parents: [...parents], path: [...path], before: cut(before), own: cut(own) };
}

export function treesOf(values) {
  const found = Array.isArray(values) ? values.slice(0, MAX_TREES).map(treeOf).filter(Boolean) : [];
  return found.length ? found : null;
}

// -- in words ----------------------------------------------------------------------------------

function shown(text) {
  const made = SIGNS.reduce((kept, [pattern, sign]) => kept.replace(pattern, sign), text).trim();
  return made || "∅";
}

function label(text) {
  const letters = [...shown(text)];
  return letters.length > MAX_LABEL ? `${letters.slice(0, MAX_LABEL - 1).join("")}…` : letters.join("");
}

// The drafter's likeliest tokens one after another: the first child of each.
function chainOf({ parents }) {
  const chain = [0];
  parents.forEach((parent, i) => {
    if (parent === chain.at(-1)) chain.push(i + 1);
  });
  return new Set(chain);
}

export function inWords(tree) {
  const { texts, path, own } = tree;
  const chain = chainOf(tree);
  const off = path.filter((row) => !chain.has(row)).length;
  const tried = `${texts.length} token${texts.length === 1 ? "" : "s"} tried`;
  const parts = [`${tried}, ${path.length || "none"} accepted`];
  if (off) parts.push(`${off} of them off the chain`);
  const ending = own === null ? "" : `; the target went on with “${shown(own)}”`;
  return `${parts.join(", ")}${ending}`;
}

// What stood at each place, for those who do not see the drawing.
export function placesOf({ texts, parents, path }) {
  const depths = [0];
  const places = [];
  parents.forEach((parent, i) => {
    depths.push(depths[parent] + 1);
    const word = path.includes(i + 1) ? `${shown(texts[i])} (accepted)` : shown(texts[i]);
    (places[depths[i + 1] - 1] ??= []).push(word);
  });
  return places.map((words, i) => `Place ${i + 1}: ${words.join(", ")}`);
}

// -- where each token stands -------------------------------------------------------------------

// Cells are half columns wide: a token has one, the line to its left the one before. A branch goes
// into the first row below where its cells are free, deep ones first, so that no lines cross.
class Layout {
  constructor({ texts, parents, path, own }) {
    this.children = Array.from({ length: texts.length + 1 }, () => []);
    parents.forEach((parent, i) => this.children[parent].push(i + 1));
    this.next = new Map(); // who goes on in the same row
    this.children.forEach((found, row) => this.next.set(row, found[0] ?? null));
    const way = [0, ...path];
    way.forEach((row, i) => this.next.set(row, way[i + 1] ?? null));
    this.end = own === null ? null : way.at(-1); // behind whom the target's own token stands
    this.places = this.block(0, 0, null).places; // [token, row, column]
  }

  // A token with all that goes on from it; rows are counted from its own.
  block(first, column, parent) {
    const line = [];
    for (let node = first; node !== null; node = this.next.get(node)) line.push(node);
    const cells = new Map([[`0,${2 * column - 1}`, parent]]);
    const last = column + line.length - (line.at(-1) === this.end ? 0 : 1);
    for (let x = 2 * column; x <= 2 * last; x++) cells.set(`0,${x}`, null);
    const places = line.map((node, i) => [node, 0, column + i]);
    for (let i = line.length - 1; i >= 0; i--) {
      for (const child of this.children[line[i]]) {
        if (child !== this.next.get(line[i])) this.hang(child, line[i], column + i + 1, cells, places);
      }
    }
    return { cells, places };
  }

  hang(child, parent, column, cells, places) {
    const block = this.block(child, column, parent);
    const moved = (by) => Array.from(block.cells, ([key, owner]) => {
      const [row, x] = key.split(",").map(Number);
      return [`${row + by},${x}`, owner];
    });
    // lines that leave one token may share their cells
    const isFree = ([key, owner]) => !cells.has(key) || (owner !== null && cells.get(key) === owner);
    let by = 1;
    while (!moved(by).every(isFree)) by += 1;
    for (const [key, owner] of moved(by)) cells.set(key, owner);
    for (let row = 1; row < by; row++) cells.set(`${row},${2 * column - 1}`, parent);
    for (const [node, row, x] of block.places) places.push([node, row + by, x]);
  }
}

export function layoutOf(tree) {
  return new Layout(tree).places;
}

// -- the drawing -------------------------------------------------------------------------------

const canvas = document.createElement("canvas").getContext("2d");

// How wide a text is, in the drawing's letters.
function ruler() {
  const family = getComputedStyle(document.documentElement).getPropertyValue("--mono");
  canvas.font = `${FONT_PX}px ${family || "monospace"}`;
  return (text) => canvas.measureText(text).width;
}

function make(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A line from the right of one token to the left of another, down through the gap before it.
function line(from, to) {
  const [x, y, right, below] = [from.x + from.width, from.y, to.x, to.y];
  if (y === below) return `M${x} ${y}H${right}`;
  const middle = to.left - GAP / 2;
  return `M${x} ${y}H${middle - BEND}q${BEND} 0 ${BEND} ${BEND}V${below - BEND}q0 ${BEND} ${BEND} ${BEND}H${right}`;
}

function token({ x, y, width, text, kind }) {
  const box = make("rect", { x, y: y - PILL / 2, width, height: PILL, rx: 5 });
  const word = make("text", { x: x + PAD, y: y + FONT_PX * 0.35, "font-size": FONT_PX }, label(text));
  return make("g", { class: kind }, box, word, make("title", {}, shown(text)));
}

export function drawTree(tree) {
  const { texts, parents, path, before, own } = tree;
  const tokens = new Map();
  for (const [node, row, column] of layoutOf(tree)) {
    const kind = node === 0 ? "before" : path.includes(node) ? "won" : "tried";
    tokens.set(node, { row, column, kind, parent: parents[node - 1], text: node ? texts[node - 1] : (before ?? "…") });
  }
  if (own !== null) {
    const parent = path.at(-1) ?? 0;
    tokens.set("own", { row: 0, column: tokens.get(parent).column + 1, kind: "own", parent, text: own });
  }
  const widthOf = ruler();
  const widths = [];
  for (const one of tokens.values()) {
    one.width = Math.ceil(widthOf(label(one.text))) + 2 * PAD;
    widths[one.column] = Math.max(widths[one.column] ?? 0, one.width);
  }
  const lefts = [1];
  widths.forEach((width, i) => lefts.push(lefts[i] + width + GAP));
  for (const one of tokens.values()) {
    one.left = one.x = lefts[one.column];
    one.y = one.row * ROW + PILL / 2 + 1;
  }
  const order = { tried: 0, own: 1, won: 2 };
  const others = [...tokens.values()].filter((one) => one.kind !== "before")
    .sort((one, other) => order[one.kind] - order[other.kind]);
  const lines = others.map((one) =>
    make("path", { class: one.kind, d: line(tokens.get(one.parent), one), pathLength: 1 }));
  const height = Math.max(...Array.from(tokens.values(), ({ row }) => row)) * ROW + PILL + 2;
  const width = lefts.at(-1) - GAP + 1;
  return make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": true },
    ...lines, ...Array.from(tokens.values(), token));
}
