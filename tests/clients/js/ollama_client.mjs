// Ollama's own client for JavaScript.

import { Ollama } from "ollama";
import * as asked from "./asked.mjs";

const headers = { Authorization: `Bearer ${asked.KEY}` };
const client = new Ollama({ host: asked.URL, headers });
const model = asked.MODEL;
const short = {
  model,
  messages: asked.user(asked.QUESTION),
  options: { num_predict: asked.MAX_TOKENS },
};
const long = { num_predict: asked.MAX_FORM_TOKENS };
const weather = {
  name: "get_weather",
  description: asked.DESCRIPTION,
  parameters: asked.WEATHER_SCHEMA,
};
const offered = [{ type: "function", function: weather }];

async function text() {
  return (await client.chat(short)).message.content;
}

async function stream() {
  return asked.joined(await client.chat({ ...short, stream: true }), (part) => part.message.content);
}

async function tools() {
  const messages = asked.user(asked.WEATHER_QUESTION);
  const first = await client.chat({ model, messages, tools: offered, options: long });
  const { name, arguments: given } = first.message.tool_calls[0].function;
  const result = { role: "tool", tool_name: name, content: asked.WEATHER };
  const history = [...messages, first.message, result];
  const second = await client.chat({ model, messages: history, tools: offered, options: long });
  return asked.called(name, given, second.message.content);
}

async function schema() {
  const messages = asked.user(asked.PERSON_QUESTION);
  const answer = await client.chat({
    model,
    messages,
    format: asked.PERSON_SCHEMA,
    options: long,
  });
  return JSON.parse(answer.message.content);
}

async function models() {
  return {
    listed: (await client.list()).models.map((one) => one.model),
    context: (await client.ps()).models[0].context_length,
    capabilities: (await client.show({ model })).capabilities,
  };
}

/** Thoughts, text and calls of one answer, with the options that Ollama's users set. */
async function chat(isStream) {
  const found = await client.chat({
    model: `${model}:latest`,
    messages: asked.user(asked.WEATHER_QUESTION),
    tools: offered,
    think: true,
    stream: isStream,
    options: { num_ctx: 2048, temperature: 0.2, stop: ["zzz"] },
    keep_alive: "5m",
  });
  const parts = isStream ? await asked.joined(found, (part) => part) : [found];
  const last = parts.at(-1);
  return {
    content: parts.map((one) => one.message.content ?? "").join(""),
    thinking: parts.map((one) => one.message.thinking ?? "").join(""),
    calls: parts.flatMap((one) => one.message.tool_calls ?? []).map((c) => c.function.arguments),
    done: last.done,
    counts: [last.eval_count, last.total_duration],
  };
}

async function generate() {
  const pieces = await client.generate({ model, prompt: "hi", stream: true, raw: true });
  return {
    whole: (await client.generate({ model, prompt: "hi", system: "be brief" })).response,
    pieces: await asked.joined(pieces, (one) => one.response),
    loaded: (await client.generate({ model, prompt: "" })).done_reason,
  };
}

/** Status and words of everything that the server does not do. */
async function refusals() {
  const tooLong = { model, prompt: "x", stream: true, options: { num_ctx: 99999 } };
  const asks = [
    () => client.pull({ model: "x" }),
    () => client.push({ model: "x" }),
    () => client.create({ model: "x", from: "y" }),
    () => client.copy({ source: "x", destination: "y" }),
    () => client.delete({ model: "x" }),
    () => client.embed({ model, input: "x" }),
    () => client.generate(tooLong),
    () => client.chat({ ...short, model: "other" }),
  ];
  const found = [];
  for (const ask of asks) {
    found.push(await ask().then(
      () => [],
      (error) => [error.status_code, error.message],
    ));
  }
  return found;
}

const aspects = { text, stream, tools, schema, models, generate, refusals };
await asked.report({
  ...aspects,
  chat: () => chat(false),
  chat_stream: () => chat(true),
});
