// The AI SDK's functions on one of its providers; the scripts beside this name the provider.

import { Output, generateText, generateObject, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import * as asked from "./asked.mjs";

const Person = z.object({ name: z.string(), age: z.number().int() });

export async function report(model) {
  const short = {
    model,
    prompt: asked.QUESTION,
    maxOutputTokens: asked.MAX_TOKENS,
    maxRetries: 0,
  };
  const person = {
    ...short,
    prompt: asked.PERSON_QUESTION,
    maxOutputTokens: asked.MAX_FORM_TOKENS,
  };
  const get_weather = tool({
    description: asked.DESCRIPTION,
    inputSchema: z.object({ city: z.string(), days: z.number().int() }),
    execute: async () => asked.WEATHER,
  });
  const weather = { ...person, prompt: asked.WEATHER_QUESTION, tools: { get_weather } };

  /** The SDK's own loop: call, result, answer. Only the first step is forced, where one is. */
  async function ask(choice) {
    const { steps, text: answer } = await generateText({
      ...weather,
      stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => (stepNumber ? { toolChoice: "none" } : choice),
    });
    const [call] = steps[0].toolCalls;
    return asked.called(call.toolName, call.input, answer);
  }

  await asked.report({
    text: async () => (await generateText(short)).text,
    stream: () => asked.joined(streamText(short).textStream, (piece) => piece),
    tools: () => ask({ toolChoice: "required" }),
    loop: () => ask({}),
    schema: async () =>
      (await generateText({ ...person, output: Output.object({ schema: Person }) })).output,
    generate_object: async () => (await generateObject({ ...person, schema: Person })).object,
  });
}
