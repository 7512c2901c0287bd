// @anthropic-ai/sdk.

import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import * as asked from "./asked.mjs";

const client = new Anthropic({ baseURL: asked.URL, apiKey: asked.KEY, maxRetries: 0 });
const model = asked.MODEL;
const short = { model, max_tokens: asked.MAX_TOKENS, messages: asked.user(asked.QUESTION) };

async function text() {
  return (await client.messages.create(short)).content[0].text;
}

async function stream() {
  const events = client.messages.stream(short);
  const pieces = [];
  events.on("text", (piece) => pieces.push(piece));
  await events.finalMessage();
  return pieces;
}

async function tools() {
  const messages = asked.user(asked.WEATHER_QUESTION);
  const weather = {
    name: "get_weather",
    description: asked.DESCRIPTION,
    input_schema: asked.WEATHER_SCHEMA,
  };
  const common = { model, max_tokens: asked.MAX_FORM_TOKENS, tools: [weather] };
  const first = await client.messages.create({
    ...common,
    messages,
    tool_choice: { type: "any", disable_parallel_tool_use: true },
  });
  const use = first.content.find((block) => block.type === "tool_use");
  const result = { type: "tool_result", tool_use_id: use.id, content: asked.WEATHER };
  const history = [
    ...messages,
    { role: "assistant", content: first.content },
    { role: "user", content: [result] },
  ];
  const second = await client.messages.create({
    ...common,
    messages: history,
    tool_choice: { type: "none" },
  });
  return asked.called(use.name, use.input, second.content[0].text);
}

async function schema() {
  const Person = z.object({ name: z.string(), age: z.number().int() });
  const answer = await client.messages.parse({
    model,
    max_tokens: asked.MAX_FORM_TOKENS,
    messages: asked.user(asked.PERSON_QUESTION),
    output_config: { format: zodOutputFormat(Person) },
  });
  return answer.parsed_output;
}

await asked.report({ text, stream, tools, schema });
