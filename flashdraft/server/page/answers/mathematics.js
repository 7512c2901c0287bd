// Formulas as MathML nodes. Only what stands in the lists below is made of what the typesetting
// worker answers: nothing that loads, links, runs or leaves its place.

import { typesetter } from "./typesetting.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MAX_TEX = 4000; // characters
const NAMES = new Set(
  ("math mrow mi mo mn ms mtext mspace mfrac msqrt mroot mstyle msub msup msubsup munder mover " +
    "munderover mmultiscripts mprescripts mtable mtr mtd mpadded mphantom menclose merror none").split(" "),
);
const ATTRIBUTES = new Set(
  ("display displaystyle scriptlevel width height depth lspace rspace voffset fence form stretchy " +
    "symmetric separator largeop movablelimits minsize maxsize accent accentunder linethickness " +
    "mathvariant notation columnalign rowspacing columnspacing columnspan rowspan").split(" "),
);
const STYLES = new Set(
  ("color paddingLeft paddingRight padding paddingTop paddingBottom border borderTop borderBottom " +
    "borderLeft borderRight textAlign width mathStyle mathDepth").split(" "),
);
const PLAIN = /^[\w#%. -]{1,60}$/;
const CLASS = /^(?:tml|chr|wbk)-[\w-]+$|^(?:upstrike|downstrike|sout|mathcal|mathscr)$/;

function build(tree) {
  if (typeof tree === "string") return document.createTextNode(tree);
  const [name, attributes, styles, classes, ...children] = tree;
  if (!NAMES.has(name)) throw new TypeError(`${name} is no part of a formula`);
  const made = document.createElementNS(MATHML, name);
  for (const [key, value] of Object.entries(attributes)) {
    if (ATTRIBUTES.has(key) && PLAIN.test(value)) made.setAttribute(key, value);
  }
  for (const [key, value] of Object.entries(styles)) {
    if (STYLES.has(key) && PLAIN.test(value)) made.style[key] = value;
  }
  const known = classes.filter((one) => CLASS.test(one));
  if (known.length) made.setAttribute("class", known.join(" "));
  made.append(...children.map(build));
  return made;
}

function show(place, tex, tree) {
  if (tree === null) return; // what is no formula stays as it was written
  try {
    place.replaceChildren(build(tree));
    place.classList.add("set");
    place.title = tex;
  } catch {
    // something that no formula needs: likewise
  }
}

// Makes a formula of `place`, which holds its source until then.
export function setFormula(place, tex, isDisplay) {
  if (tex.length > MAX_TEX) return;
  const { tree, later } = typesetter.formula(tex, isDisplay);
  if (later) later.then((found) => show(place, tex, found));
  else show(place, tex, tree);
}
