"""The requests that serve_vllm_diff sends to both servers, and the differences that are right.

Greedy throughout, so that both must answer alike. It sends nothing and knows no server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.prompts import PROMPTS

CHAT, RAW = "/v1/chat/completions", "/v1/completions"
JSON_HEADER = {"Content-Type": "application/json"}

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
COLOURS = ["crimson red", "navy blue", "forest green"]
CAPITAL = "What is the capital of France?"
COUNTING = "1, 2, 3, 4, 5,"


@dataclass(frozen=True)
class Case:
    """One request, and whether it is also sent as a stream."""

    name: str
    route: str
    body: Mapping[str, Any] | bytes
    streams: bool = True


@dataclass(frozen=True)
class Reason:
    """Why a field may differ in the cases whose names match."""

    cases: str
    field: str
    why: str


JUSTIFIED = (
    Reason("*", "null name *", "null in vLLM's answer; we leave names without a value out"),
    Reason(
        "*",
        "name system_fingerprint",
        "names a build of the server, and is optional at OpenAI",
    ),
    Reason(
        "*", "name *stop_reason", "vLLM's own: the stop string or token id that ended the answer"
    ),
    Reason("*", "name *prompt_token_ids", "vLLM's own: the prompt's ids, which echo brings along"),
    Reason(
        "*", "name *prompt_logprobs", "vLLM's own; with echo, OpenAI's lists have the same values"
    ),
    Reason("*: n of temperature 0*", "status", "vLLM refuses n > 1 greedily; OpenAI does not"),
    Reason("*: stop included*", "status", "include_stop_str_in_output is refused, as documented"),
    Reason(
        "*: choice*",
        "usage",
        "the same text in other tokens: where only one text can follow, our grammar library allows "
        "the tokenizer's own tokens of it alone, vLLM's every way to spell it",
    ),
    Reason(
        "completions: logprobs and regex*",
        "*logprob*",
        "ours are the model's own, as without a grammar; vLLM's are those under the grammar",
    ),
    Reason(
        "chat: *logprobs*",
        "tokens before the end",
        "chat lists no log-probability of the end token, as OpenAI does not; vLLM does",
    ),
    Reason(
        "*logprobs unicode*",
        "*tokens*",
        "parts of a character: ours are U+FFFD each, with exact bytes in chat; vLLM's are empty, "
        "and the character stands at its last token",
    ),
    Reason(
        "completions: logprobs unicode*",
        "top_logprobs*",
        "parts of a character have one name, and this API's JSON one entry for a name: ours is the "
        "likeliest token's, vLLM's the last one's",
    ),
    Reason(
        "completions: logprobs unicode*",
        "text",
        "max_tokens ends it inside a character: U+FFFD, as the tokenizer decodes it; vLLM drops it",
    ),
    Reason(
        "completions: echo alone",
        "usage",
        "max_tokens 0 writes and counts nothing; vLLM writes, counts and hides a token",
    ),
    Reason(
        "bad: max_tokens over the context", "status", "ends at the context's end, as documented"
    ),
    Reason("bad: unknown field", "status", "refused, as documented: it may be a misspelt one"),
    Reason("bad: unknown role", "status", "OpenAI's roles alone; vLLM hands any to the template"),
)


def chat(name: str, messages: str | Sequence[Mapping[str, Any]], **fields: Any) -> Case:
    """A greedy chat request."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return Case("chat: " + name, CHAT, {"messages": messages, **greedy(fields)})


def raw(name: str, prompt: Any, **fields: Any) -> Case:
    """A greedy request for a completion."""
    return Case("completions: " + name, RAW, {"prompt": prompt, **greedy(fields)})


def greedy(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": 16, **fields}


def sampling_cases(make: Any, prompt: str) -> Iterator[Case]:
    """What both routes take."""
    yield make("one token", prompt, max_tokens=1)
    yield make("to its end", prompt, max_tokens=48)
    yield make("n of top_k 1", prompt, n=2, temperature=1, top_k=1, seed=1)
    yield make("n of temperature 0", prompt, n=2)
    yield make("stop word", prompt, stop=[" is", ","])
    yield make("stop across tokens", prompt, stop=["s P", "\n\nTh"])
    yield make("stop never seen", prompt, stop=["@@@"])
    yield make("stop token", prompt, stop_token_ids=[30, 314, 28])
    yield make("stop included", prompt, stop=[" is", ","], include_stop_str_in_output=True)
    yield make("logit_bias", prompt, logit_bias={"7042": -100, "28": 5})
    yield make("min_tokens", prompt, min_tokens=14)
    yield make("ignore_eos", prompt, ignore_eos=True)
    yield make("presence penalty", prompt, presence_penalty=1.5)
    yield make("frequency penalty", prompt, frequency_penalty=1.5)
    yield make("repetition penalty", prompt, repetition_penalty=1.3)
    yield make("top_p and seed", prompt, top_p=0.5, seed=3)
    yield make("choice", prompt, structured_outputs={"choice": COLOURS})
    yield make("regex", prompt, structured_outputs={"regex": "[a-f]{3}-[0-9]{2}"})
    yield make("schema", prompt, structured_outputs={"json": PERSON}, max_tokens=48)


def bad_cases() -> Iterator[Case]:
    """What is refused; and what one of the two takes."""
    raw_fields: dict[str, dict[str, Any]] = {
        "unknown model": {"model": "no-such-model"},
        "temperature -1": {"temperature": -1},
        "temperature text": {"temperature": "hot"},
        "top_p 2": {"top_p": 2},
        "top_k -2": {"top_k": -2},
        "min_p 2": {"min_p": 2},
        "max_tokens 0": {"max_tokens": 0},
        "max_tokens -1": {"max_tokens": -1},
        "max_tokens over the context": {"max_tokens": 100_000},
        "n 0": {"n": 0},
        "presence_penalty 3": {"presence_penalty": 3},
        "repetition_penalty 0": {"repetition_penalty": 0},
        "min_tokens over max_tokens": {"min_tokens": 30},
        "logit_bias outside": {"logit_bias": {"49999": 1}},
        "logit_bias 200": {"logit_bias": {"5": 200}},
        "logprobs 99": {"logprobs": 99},
        "empty stop": {"stop": [""]},
        "unknown field": {"temprature": 0.5},
        "stream_options without stream": {"stream_options": {"include_usage": True}},
        "broken regex": {"structured_outputs": {"regex": "("}},
        "broken schema": {"structured_outputs": {"json": {"type": "nonsense"}}},
        "two constraints": {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    }
    for name, fields in raw_fields.items():
        yield Case(f"bad: {name}", RAW, {"prompt": COUNTING, **greedy(fields)}, streams=False)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    chat_fields: dict[str, dict[str, Any]] = {
        "no messages": {"messages": None},
        "empty messages": {"messages": []},
        "unknown role": {"messages": [{"role": "robot", "content": "?"}]},
        "image": {"messages": [{"role": "user", "content": [picture]}]},
        "top_logprobs 50": {"logprobs": True, "top_logprobs": 50},
        "top_logprobs alone": {"top_logprobs": 2},
        "forced tool without tools": {"tool_choice": "required"},
        "unknown response_format": {"response_format": {"type": "yaml"}},
        "prompt over the context": {"messages": [{"role": "user", "content": "a b " * 2000}]},
    }
    for name, fields in chat_fields.items():
        yield Case(
            f"bad: {name}", CHAT, {"messages": user(CAPITAL), **greedy(fields)}, streams=False
        )
    yield Case("bad: no prompt", RAW, {"max_tokens": 2}, streams=False)
    yield Case("bad: empty prompt", RAW, {"prompt": "", **greedy({})}, streams=False)
    yield Case("bad: prompt ids outside", RAW, {"prompt": [60000], **greedy({})}, streams=False)
    yield Case("bad: no JSON", CHAT, b"{", streams=False)
    yield Case("bad: a JSON list", CHAT, b"[]", streams=False)
    yield Case("bad: no such route", "/v1/nothing", {}, streams=False)


def cases() -> Iterator[Case]:
    """Every request, in the order they are sent."""
    for index, prompt in enumerate(PROMPTS):
        yield chat(f"prompt {index + 1}", prompt, max_tokens=24)
    yield chat("system", [{"role": "system", "content": "Answer in one word."}, *user(CAPITAL)])
    answer = {"role": "assistant", "content": "The capital of France is Paris."}
    yield chat("turns", [*user(CAPITAL), answer, *user("And of Italy?")])
    yield chat("text parts", user([{"type": "text", "text": t} for t in ("One ", "two")]))
    yield chat("unicode", "Repeat exactly: ¿Dónde está el niño? 日本語 👩‍👩‍👧", max_tokens=40)
    yield chat("max_completion_tokens", CAPITAL, max_tokens=None, max_completion_tokens=4)
    yield chat("logprobs", CAPITAL, logprobs=True)
    yield chat("top_logprobs", CAPITAL, logprobs=True, top_logprobs=4)
    yield chat("top_logprobs unicode", "Say: 日本語 👩‍👩‍👧", logprobs=True, top_logprobs=2)
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    yield chat("json_schema", "Invent a person.", response_format=schema, max_tokens=48)
    yield chat("json_object", PROMPTS[9], response_format={"type": "json_object"}, max_tokens=48)
    yield chat("response_format text", CAPITAL, response_format={"type": "text"})
    yield from sampling_cases(chat, CAPITAL)
    yield raw("ids", [504, 3575, 282, 4649, 314])
    yield raw("two prompts", ["The capital of France is", COUNTING])
    yield raw("no max_tokens", COUNTING, max_tokens=None)
    yield raw("logprobs 0", COUNTING, logprobs=0)
    yield raw("logprobs 3", COUNTING, logprobs=3)
    yield raw("logprobs unicode", "日本語, 👩‍👩‍👧, ", logprobs=2)
    yield raw("logprobs and logit_bias", COUNTING, logprobs=2, logit_bias={"28": -5})
    yield raw("logprobs and penalty", COUNTING, logprobs=2, repetition_penalty=1.3)
    yield raw("logprobs and top_k", COUNTING, logprobs=2, temperature=0.5, top_k=1)
    code = {"regex": "[a-f]{3}-[0-9]{2}"}
    yield raw("logprobs and regex", COUNTING, logprobs=2, structured_outputs=code)
    yield raw("echo", COUNTING, echo=True)
    for name, fields in {
        "echo and logprobs": {"echo": True, "logprobs": 2, "max_tokens": 4},
        "echo alone": {"echo": True, "logprobs": 1, "max_tokens": 0},
    }.items():  # only plain: a stream of them is refused by us
        yield Case("completions: " + name, RAW, {"prompt": COUNTING, **greedy(fields)}, False)
    yield from sampling_cases(raw, "The capital of France is")
    yield from bad_cases()
    yield Case("tokenize: text", "/tokenize", {"prompt": "Hello, wörld!"}, streams=False)
    yield Case("tokenize: chat", "/tokenize", {"messages": user(CAPITAL)}, streams=False)
    yield Case("detokenize", "/detokenize", {"tokens": [504, 3575, 282]}, streams=False)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]
