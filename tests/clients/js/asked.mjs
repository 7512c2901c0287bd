// What every client is asked, and how its script reports: as python/asked.py has it.

export const [URL, MODEL, ...WANTED] = process.argv.slice(2);
export const KEY = "test-key"; // a server without a key takes any
export const QUESTION = "Name three colours.";
export const WEATHER_QUESTION = "What is the weather in Paris for the next 2 days?";
export const PERSON_QUESTION = "Ada Lovelace is 36 years old. Who is it?";
export const WEATHER = "cloudy, 12 degrees";
export const MAX_TOKENS = 256; // the answer ends before
export const MAX_FORM_TOKENS = 200;
export const DESCRIPTION = "The weather in a city.";
export const WEATHER_SCHEMA = {
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" } },
  required: ["city", "days"],
};
export const PERSON_SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};

export function user(content) {
  return [{ role: "user", content }];
}

/** A call as the tests want it, and the text after its result was sent back. */
export function called(name, given, answer = null) {
  return { name, arguments: typeof given === "string" ? JSON.parse(given) : given, answer };
}

export async function joined(stream, piece) {
  const pieces = [];
  for await (const part of stream) pieces.push(piece(part) ?? "");
  return pieces;
}

/** Runs the aspects that were asked for; one that fails does not keep the others from it. */
export async function report(aspects) {
  const found = {};
  for (const name of WANTED) {
    try {
      found[name] = { value: (await aspects[name]()) ?? null };
    } catch (error) {
      found[name] = { error: `${error.stack ?? error}`.slice(0, 4000) };
    }
  }
  console.log(JSON.stringify(found));
}
