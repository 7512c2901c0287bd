// A worker that colours code and sets formulas with the libraries in vendor/. It answers ranges and
// plain trees, never markup; the page checks them and makes the nodes. It has no network: the
// headers of this file see to that.

const KINDS = {
  comment: "comment prolog doctype cdata shebang",
  string: "string char template-string attr-value regex url triple-quoted-string",
  number: "number boolean constant symbol date time datetime null",
  keyword: "keyword atrule important directive selector operator-keyword builtin-keyword instruction",
  name: "function function-name class-name builtin macro tag decorator annotation",
  property: "property attr-name variable parameter key label section table attribute",
  inserted: "inserted",
  deleted: "deleted",
};
const kindOf = new Map(
  Object.entries(KINDS).flatMap(([kind, names]) => names.split(" ").map((name) => [name, kind])),
);
// what a language's file builds on, and other names of languages
const REQUIRES = {
  javascript: ["clike"], typescript: ["javascript"], jsx: ["markup", "javascript"], c: ["clike"],
  cpp: ["c"], java: ["clike"], go: ["clike"], ruby: ["clike"], kotlin: ["clike"],
};
const MAX_NODES = 5000; // of a formula
const MAX_SIZE = 20; // em
const loaded = new Set();

self.Prism = { manual: true, disableWorkerMessageHandler: true };

function load(name) {
  if (loaded.has(name)) return;
  loaded.add(name);
  if (name !== "core") load("core");
  for (const other of REQUIRES[name] ?? []) load(other);
  importScripts(`vendor/prism-${name}.min.js`);
}

// [start, end, kind] of everything that has a colour, in order and apart.
function rangesOf(code, language) {
  load(language);
  const ranges = [];
  let at = 0;
  const walk = (part, kind) => {
    if (typeof part === "string") {
      if (kind && part) ranges.push([at, at + part.length, kind]);
      at += part.length;
    } else if (Array.isArray(part)) {
      for (const inner of part) walk(inner, kind);
    } else {
      const aliases = Array.isArray(part.alias) ? part.alias : [part.alias];
      const own = [part.type, ...aliases].map((name) => kindOf.get(name)).find(Boolean);
      walk(part.content, own ?? kind);
    }
  };
  walk(Prism.tokenize(code, Prism.languages[language]), null);
  return ranges;
}

// A formula as [name, attributes, styles, classes, ...children]; text is a string.
function treeOf(tex, isDisplay) {
  if (!self.temml) importScripts("vendor/temml.min.js");
  let left = MAX_NODES;
  const plain = (node) => {
    left -= 1;
    if (left < 0) throw new RangeError("the formula is too large");
    if (typeof node.text === "string" && !node.children) return node.text;
    const children = (node.children ?? []).map(plain);
    return [node.type ?? "mrow", { ...node.attributes }, styles(node), node.classes ?? [], ...children];
  };
  const settings = { displayMode: isDisplay, throwOnError: true, trust: false, maxExpand: 500 };
  return plain(temml.__renderToMathMLTree(tex, { ...settings, maxSize: [MAX_SIZE, MAX_SIZE] }));
}

function styles(node) {
  const texts = Object.entries(node.style ?? {}).filter(([, value]) => typeof value === "string");
  return Object.fromEntries(texts);
}

self.addEventListener("message", ({ data }) => {
  let result = null;
  try {
    result = data.kind === "code" ? rangesOf(data.code, data.language) : treeOf(data.tex, data.isDisplay);
  } catch {
    // no formula, or code that the grammar stumbles over: it stays as it was written
  }
  self.postMessage(result);
});
