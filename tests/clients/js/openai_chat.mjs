// openai for JavaScript, on the chat API.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import * as asked from "./asked.mjs";

const client = new OpenAI({ baseURL: `${asked.URL}/v1`, apiKey: asked.KEY, maxRetries: 0 });
const chat = client.chat.completions;
const model = asked.MODEL;
const short = { model, messages: asked.user(asked.QUESTION), max_tokens: asked.MAX_TOKENS };

async function text() {
  return (await chat.create(short)).choices[0].message.content;
}

async function stream() {
  const chunks = await chat.create({ ...short, stream: true });
  return asked.joined(chunks, (chunk) => chunk.choices[0]?.delta.content);
}

async function tools() {
  const messages = asked.user(asked.WEATHER_QUESTION);
  const weather = {
    name: "get_weather",
    description: asked.DESCRIPTION,
    parameters: asked.WEATHER_SCHEMA,
  };
  const common = {
    model,
    tools: [{ type: "function", function: weather }],
    parallel_tool_calls: false,
    max_tokens: asked.MAX_FORM_TOKENS,
  };
  const first = await chat.create({ ...common, messages, tool_choice: "required" });
  const { message } = first.choices[0];
  const [call] = message.tool_calls;
  const result = { role: "tool", tool_call_id: call.id, content: asked.WEATHER };
  const second = await chat.create({
    ...common,
    messages: [...messages, message, result],
    tool_choice: "none",
  });
  const { name, arguments: given } = call.function;
  return asked.called(name, given, second.choices[0].message.content);
}

async function schema() {
  const Person = z.object({ name: z.string(), age: z.number().int() });
  const answer = await chat.parse({
    model,
    messages: asked.user(asked.PERSON_QUESTION),
    max_tokens: asked.MAX_FORM_TOKENS,
    response_format: zodResponseFormat(Person, "person"),
  });
  return answer.choices[0].message.parsed;
}

await asked.report({ text, stream, tools, schema });
