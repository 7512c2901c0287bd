// Up to version 0.2 a tab kept its one conversation by itself. It becomes one of all.

import { Answer } from "../answers/answer.js";
import { ofThisTab } from "../storage.js";
import { Conversation, Turn } from "./conversation.js";

// The id of the conversation, or null where there was none.
export async function moveOldTurns(library) {
  const old = ofThisTab.read("turns");
  ofThisTab.write("turns", null);
  if (!Array.isArray(old) || !old.length) return null;
  const conversation = new Conversation();
  const turns = [];
  for (const { question, answer } of old) {
    if (typeof question !== "string") continue;
    const turn = new Turn({ parent: turns.at(-1)?.id, question, at: Date.now() + turns.length });
    turn.answer = new Answer(answer ?? {});
    turn.answer.finish ??= "stop";
    turns.push(turn);
    conversation.add(turn);
  }
  if (!turns.length) return null;
  await library.keep(conversation, turns);
  return conversation.id;
}
