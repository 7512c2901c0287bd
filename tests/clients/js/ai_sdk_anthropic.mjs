// The AI SDK with @ai-sdk/anthropic.

import { createAnthropic } from "@ai-sdk/anthropic";
import { report } from "./ai_sdk.mjs";
import * as asked from "./asked.mjs";

const provider = createAnthropic({ baseURL: `${asked.URL}/v1`, apiKey: asked.KEY });
await report(provider(asked.MODEL));
