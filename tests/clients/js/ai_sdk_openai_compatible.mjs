// The AI SDK with @ai-sdk/openai-compatible.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { report } from "./ai_sdk.mjs";
import * as asked from "./asked.mjs";

const provider = createOpenAICompatible({
  name: "flashdraft",
  baseURL: `${asked.URL}/v1`,
  apiKey: asked.KEY,
  supportsStructuredOutputs: true,
});
await report(provider(asked.MODEL));
