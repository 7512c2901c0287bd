// Conversations as files: JSON with everything, Markdown of what is shown, and both read back. A file
// is a stranger's: it is checked part by part, its ids are replaced, and its texts stay texts.

import { treesOf } from "../answers/tree.js";
import { Conversation, newId, titleOf, Turn } from "./conversation.js";
import { isPictureAddress } from "./pictures.js";

export const MAX_FILE_BYTES = 32 * 1024 * 1024;
const MAX_CONVERSATIONS = 5000;
const MAX_TURNS = 20_000; // in all
const MAX_NAME = 200; // characters of a title
const FORMAT = "flashdraft chats";
const MARK = /^<!-- flashdraft: (question|answer) -->$/;
const MARK_LIKE = /^\\*<!-- flashdraft:/;

// -- writing -----------------------------------------------------------------------------------

// As many files as it takes for each to be read back: mostly one.
export function toJson(conversations) {
  const files = [];
  let [turns, bytes] = [0, 0];
  for (const conversation of conversations) {
    const kept = plain(conversation);
    const text = JSON.stringify(kept);
    const size = new Blob([text]).size + 1;
    [turns, bytes] = [turns + kept.turns.length, bytes + size];
    const isFull = turns > MAX_TURNS || bytes > MAX_FILE_BYTES - 100;
    if (isFull || files.at(-1)?.length === MAX_CONVERSATIONS || !files.length) {
      files.push([]);
      [turns, bytes] = [kept.turns.length, size];
    }
    files.at(-1).push(text);
  }
  return files.map((texts) => `{"format":"${FORMAT}","version":1,"conversations":[${texts}]}`);
}

function plain(conversation) {
  const { title, created, updated, chosen } = conversation.record;
  const turns = [...conversation.branches.values()].flat().map((turn) => {
    const { id, parent, question, files, asked, at, answer } = turn;
    return { id, parent, question, files, asked, at, answer: answer.toJSON() };
  });
  return { title, created, updated, chosen, turns };
}

export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title}`];
  for (const turn of conversation.path) {
    parts.push("<!-- flashdraft: question -->", "## Question", guarded(turn.prompt));
    const { text } = turn.answer.content;
    if (text) parts.push("<!-- flashdraft: answer -->", "## Answer", guarded(text));
  }
  return `${parts.join("\n\n")}\n`;
}

// A text that has our marks of its own would end itself: they get a backslash, taken off again.
function guarded(text) {
  return text.split("\n").map((line) => (MARK_LIKE.test(line) ? `\\${line}` : line)).join("\n");
}

// -- reading -----------------------------------------------------------------------------------

class ImportError extends Error {}

export function conversationsOf(name, text) {
  return /^\s*\{/.test(text) ? fromJson(text) : [fromMarkdown(name, text)];
}

function check(holds, what) {
  if (!holds) throw new ImportError(`This is no file of chats from this page: ${what}.`);
}

const isText = (value) => typeof value === "string";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isRow = (row) => Array.isArray(row) && row.length <= 3 && row.every((x) => x === null || isNumber(x));
const rows = (value) => (Array.isArray(value) && value.every(isRow) ? value : []);

function fromJson(text) {
  let whole = null;
  try {
    whole = JSON.parse(text);
  } catch {
    check(false, "it is not JSON");
  }
  check(isObject(whole) && whole.format === FORMAT && whole.version === 1, "its format is another one");
  const { conversations } = whole;
  check(Array.isArray(conversations), "it has no list of chats");
  check(conversations.length <= MAX_CONVERSATIONS, `it has more than ${MAX_CONVERSATIONS} chats`);
  let left = MAX_TURNS;
  return conversations.map((found) => {
    check(isObject(found) && Array.isArray(found.turns), "a chat has no turns");
    left -= found.turns.length;
    check(left >= 0, `it has more than ${MAX_TURNS} turns`);
    return conversationOf(found);
  });
}

function conversationOf(found) {
  const ids = new Map([["", ""]]); // theirs: ours
  const turns = [...found.turns].map((turn) => {
    check(isObject(turn) && isText(turn.id) && isText(turn.parent), "a turn has no place");
    check(!ids.has(turn.id), "two turns have one name");
    ids.set(turn.id, newId());
    return turn;
  });
  const read = turns.map((turn) => {
    check(ids.has(turn.parent), "a turn follows one that is not there");
    return turnOf(turn, ids.get(turn.id), ids.get(turn.parent));
  });
  const chosen = Object.entries(isObject(found.chosen) ? found.chosen : {})
    .filter(([parent, turn]) => ids.has(parent) && ids.has(turn))
    .map(([parent, turn]) => [ids.get(parent), ids.get(turn)]);
  const times = { created: timeOf(found.created), updated: timeOf(found.updated) };
  const title = (isText(found.title) && nameOf(found.title)) || "Imported chat";
  return new Conversation({ title, ...times, chosen: Object.fromEntries(chosen) }, read);
}

// One line: in Markdown a second one could be anything.
const nameOf = (title) => title.slice(0, 1000).replace(/\s+/g, " ").trim().slice(0, MAX_NAME);
const timeOf = (value) => (isNumber(value) && value > 0 && value < 8e15 ? value : Date.now());

function turnOf(turn, id, parent) {
  check(isText(turn.question), "a question is no text");
  const files = Array.isArray(turn.files) ? turn.files : [];
  const isFile = (file) => isObject(file) && isText(file.name) && (isText(file.text) || isPictureAddress(file.picture));
  check(files.every(isFile), "a file is no text and no picture");
  const answer = isObject(turn.answer) ? turn.answer : {};
  return new Turn({
    id,
    parent,
    question: turn.question,
    files: files.map(({ name, text, picture }) => (isText(text) ? { name, text } : { name, picture })),
    asked: settingsOf(turn.asked),
    at: timeOf(turn.at),
    answer: answerOf(answer),
  });
}

function answerOf(answer) {
  const channel = (value) => {
    const text = isObject(value) && isText(value.text) ? value.text : "";
    return { text, runs: isObject(value) ? rows(value.runs) : [] };
  };
  const figure = (value) => (isNumber(value) && value >= 0 ? value : 0);
  const stats = isObject(answer.stats) ? numbersOf(answer.stats) : null;
  const isWhole = stats && ["tokens_per_s", "mean_accepted_length"].every((name) => name in stats);
  return {
    content: channel(answer.content),
    reasoning: channel(answer.reasoning),
    steps: stepsOf(answer.steps),
    numTokens: figure(answer.numTokens),
    promptTokens: figure(answer.promptTokens),
    thoughtMs: figure(answer.thoughtMs),
    lastRate: figure(answer.lastRate),
    finish: isText(answer.finish) ? answer.finish.slice(0, 40) : "stop",
    stats: isWhole ? stats : null,
  };
}

// Accepted drafts and tokens of the target's own, and the trees of a step with branches.
function stepsOf(steps) {
  if (!Array.isArray(steps)) return [];
  const isCount = (value) => isNumber(value) && value >= 0 && value < 1000;
  return steps.filter((row) => Array.isArray(row) && row.length >= 2 && isCount(row[0]) && isCount(row[1]))
    .map(([accepted, own, trees]) => {
      const found = treesOf(trees);
      return found ? [accepted, own, found] : [accepted, own];
    });
}

const numbersOf = (value) => Object.fromEntries(Object.entries(value).filter(([, x]) => isNumber(x)));

function settingsOf(asked) {
  return isObject(asked) ? numbersOf(asked) : {};
}

function fromMarkdown(name, text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const parts = []; // [question or answer, lines]
  for (const line of lines) {
    const mark = MARK.exec(line);
    if (mark) parts.push([mark[1], []]);
    else if (parts.length) parts.at(-1)[1].push(MARK_LIKE.test(line) ? line.slice(1) : line);
  }
  check(parts.length > 0, "it has no question with a mark of this page");
  check(parts.length <= MAX_TURNS, `it has more than ${MAX_TURNS} turns`);
  const turns = [];
  for (const [kind, body] of parts) {
    const words = body.join("\n").replace(/^\s*## (?:Question|Answer)\n/, "").trim();
    if (kind === "question") {
      turns.push(new Turn({ parent: turns.at(-1)?.id, question: words, at: Date.now() + turns.length }));
    } else {
      check(turns.length > 0, "it begins with an answer");
      turns.at(-1).answer.content.text = words;
      turns.at(-1).answer.finish = "stop";
    }
  }
  const title = /^# (.+)/.exec(lines[0])?.[1] ?? titleOf(turns[0]) ?? name;
  return new Conversation({ title: nameOf(title) }, turns);
}
