// The code blocks of one answer, in colours. A block is drawn at once in the colours it already has,
// and again when the worker has looked at what is new.

import { typesetter } from "./typesetting.js";

const MAX_CODE = 40_000; // characters; longer code stays plain
const NAMES = {
  bash: "bash sh shell zsh console", c: "c h", cpp: "cpp c++ cc hpp cxx", css: "css scss less",
  diff: "diff patch", docker: "docker dockerfile", go: "go golang", ini: "ini cfg conf",
  java: "java", javascript: "javascript js mjs cjs node", json: "json jsonc json5", jsx: "jsx tsx",
  kotlin: "kotlin kt", lua: "lua", markup: "html xml svg markup xhtml vue", python: "python py python3",
  ruby: "ruby rb", rust: "rust rs", sql: "sql sqlite mysql postgresql", toml: "toml",
  typescript: "typescript ts", yaml: "yaml yml", clike: "csharp cs c# php swift scala dart",
};
const languageOf = new Map(
  Object.entries(NAMES).flatMap(([language, names]) => names.split(" ").map((name) => [name, language])),
);
const KINDS = new Set("comment string number keyword name property inserted deleted".split(" "));

// Lines of code, every range in an element of its own. `leaf` adds text, as in markdown.js.
function fill(code, lines, leaf, ranges) {
  let start = 0; // of the line, in the block's text
  let next = 0; // the first range that may reach into the line
  lines.forEach((line, i) => {
    const end = start + line.text.length;
    const add = (parent, from, to) => {
      if (to > from) leaf(parent, line.text.slice(from - start, to - start), (k) => line.at + from - start + k);
    };
    let at = start;
    while (next < ranges.length && ranges[next][1] <= start) next += 1;
    for (let k = next; k < ranges.length && ranges[k][0] < end; k++) {
      const [from, to, kind] = ranges[k];
      const [first, last] = [Math.max(from, at), Math.min(to, end)];
      if (!KINDS.has(kind) || last <= first) continue;
      add(code, at, first);
      const made = document.createElement("span");
      made.className = `syntax-${kind}`;
      add(made, first, last);
      code.append(made);
      at = last;
    }
    add(code, at, end);
    if (i < lines.length - 1) code.append("\n");
    start = end + 1;
  });
}

export class CodeColours {
  constructor() {
    this.known = new Map(); // by the place where a block begins: { text, ranges }
    this.latest = new Map(); // by the same: what was drawn last
    this.asked = new Set();
  }

  draw(code, lines, name, leaf) {
    const language = languageOf.get(name.toLowerCase());
    const text = lines.map((line) => line.text).join("\n");
    if (!language || !lines.length || text.length > MAX_CODE) {
      fill(code, lines, leaf, []);
      return;
    }
    const at = lines[0].at;
    const known = this.known.get(at);
    fill(code, lines, leaf, known && text.startsWith(known.text) ? known.ranges : []);
    this.latest.set(at, { code, lines, leaf, text });
    if (known?.text !== text && !this.asked.has(at)) this.ask(at, text, language);
  }

  async ask(at, text, language) {
    this.asked.add(at);
    const ranges = await typesetter.ask({ kind: "code", code: text, language });
    this.asked.delete(at);
    if (ranges === null) return;
    this.known.set(at, { text, ranges });
    const latest = this.latest.get(at);
    if (!latest.text.startsWith(text)) return;
    latest.code.replaceChildren();
    fill(latest.code, latest.lines, latest.leaf, ranges);
    if (latest.text !== text) this.ask(at, latest.text, language);
  }
}
