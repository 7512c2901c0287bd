"""Tools on a served model: forced calls, what tools cost simple questions, and the calls' speed.

    flashdraft serve --port 8000 &
    python -m benchmarks.default_tools --url http://127.0.0.1:8000 \\
        --output benchmarks/results/default_tools.json

A hundred requests must call one of ten tools, whose parameters grow deeper from one to the next;
every call's arguments are judged by the tool's schema. The forty questions of default_answers are
asked without and with tools that they do not need (tool_choice auto). Speed is of one request at a
time, tokens of the answer by the time to its end, calls beside free answers to the same prompts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jsonschema
import torch

from benchmarks.accepted_length import describe_environment, write_results
from benchmarks.default_answers import is_right, load_questions

TEXT, NUMBER, WHOLE, YES = ({"type": name} for name in ("string", "number", "integer", "boolean"))
PROMPTS = (
    "Please use the tool for a trip to Paris in May.",
    "I need this for my shop in Berlin.",
    "Two adults and a child, on Monday morning.",
    "My name is Ada, and I like tea.",
    "Do it for the book about whales.",
    "Something cheap and quick for tonight.",
    "For 25 people, and no meat.",
    "The red one, in size 42, twice.",
    "Remind me of the meeting at 10:30.",
    "Use it with whatever you know of Tokyo.",
)
MAX_TOKENS, FREE_TOKENS = 1024, 96


def record(properties: dict[str, Any], required: Sequence[str] | None = None) -> dict[str, Any]:
    """A closed object; all of it must come unless said otherwise."""
    needed = list(properties) if required is None else list(required)
    return {
        "type": "object",
        "properties": properties,
        "required": needed,
        "additionalProperties": False,
    }


def listed(items: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def one_of(*words: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(words)}


PLACE = record({"city": TEXT, "country": one_of("France", "Germany", "Japan", "other")})
PERSON = record({"name": TEXT, "age": {**WHOLE, "minimum": 0, "maximum": 120}}, ["name"])
ITEM = record({"title": TEXT, "count": {**WHOLE, "minimum": 1, "maximum": 99}, "price": NUMBER})
TOOLS: dict[str, dict[str, Any]] = {
    "now": record({}),
    "search": record({"query": TEXT}),
    "set_alarm": record({"hour": {**WHOLE, "minimum": 0, "maximum": 23}, "repeat": YES}),
    "convert": record({"amount": NUMBER, "unit": one_of("km", "mile", "kg", "pound")}),
    "get_weather": record({"place": PLACE, "days": {**WHOLE, "minimum": 1, "maximum": 7}}),
    "invite": record({"guests": listed(PERSON, 3), "at": PLACE}),
    "order": record({"items": listed(ITEM, 3), "note": {"type": ["string", "null"]}}),
    "book": record({"who": PERSON, "stay": record({"where": PLACE, "nights": WHOLE})}),
    "plan": record(
        {"steps": listed(record({"do": TEXT, "with": listed(PERSON, 2), "at": PLACE}), 2)}
    ),
    "file": record(
        {
            "entry": {
                "anyOf": [
                    record({"kind": {"const": "bill"}, "of": record({"items": listed(ITEM, 2)})}),
                    record({"kind": {"const": "visit"}, "of": record({"to": listed(PLACE, 2)})}),
                ]
            },
            "tags": listed(one_of("home", "work", "later"), 2),
        }
    ),
}


def offered(*names: str) -> list[dict[str, Any]]:
    """Tools as the chat API has them."""
    return [
        {
            "type": "function",
            "function": {"name": name, "description": f"Tool {name}.", "parameters": TOOLS[name]},
        }
        for name in names
    ]


def depth(schema: Any) -> int:
    """Objects and lists within one another."""
    if isinstance(schema, list):
        return max(map(depth, schema), default=0)
    if not isinstance(schema, dict):
        return 0
    inner = max(map(depth, schema.values()), default=0)
    return inner + (schema.get("type") in ("object", "array"))


class Asked:
    """One answer, and what it took."""

    def __init__(self, client: httpx.Client, prompt: str, **more: Any) -> None:
        body = {"messages": [{"role": "user", "content": prompt}], **more}
        start = time.perf_counter()
        response = client.post("/v1/chat/completions", json=body)
        self.seconds = time.perf_counter() - start
        response.raise_for_status()
        choice = response.json()["choices"][0]
        self.finish, message = choice["finish_reason"], choice["message"]
        self.text: str = message.get("content") or ""
        self.calls: list[dict[str, Any]] = [
            call["function"] for call in message.get("tool_calls") or ()
        ]
        self.tokens: int = response.json()["usage"]["completion_tokens"]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def judge(asked: Asked, allowed: Sequence[str]) -> str:
    """What is wrong with a forced call; empty where nothing is."""
    if asked.finish != "tool_calls" or not asked.calls:
        return f"finish reason {asked.finish}, {len(asked.calls)} calls"
    for call in asked.calls:
        if call["name"] not in allowed:
            return f"called {call['name']}"
        try:
            jsonschema.validate(json.loads(call["arguments"]), TOOLS[call["name"]])
        except (ValueError, jsonschema.ValidationError) as error:
            return f"{call['name']}: {error}"[:300]
    return ""


def force(client: httpx.Client) -> tuple[list[dict[str, Any]], list[float]]:
    """Every tool with every prompt: named, or required among three, in turns."""
    rows, speeds, names = [], [], list(TOOLS)
    for place, name in enumerate(names):
        problems, tokens = [], 0
        for number, prompt in enumerate(PROMPTS):
            among = [name] if number % 2 else [names[place - 2], names[place - 1], name]
            choice = {"type": "function", "function": {"name": name}} if number % 2 else "required"
            more = {"tools": offered(*among), "tool_choice": choice, "max_tokens": MAX_TOKENS}
            asked = Asked(client, prompt, **more)
            problem = judge(asked, among)
            problems += [f"{prompt} {problem}"] if problem else []
            tokens += asked.tokens
            speeds.append(asked.tokens_per_s)
        row = {"tool": name, "depth": depth(TOOLS[name]), "tokens": tokens, "problems": problems}
        rows.append({**row, "valid": len(PROMPTS) - len(problems)})
        print(f"{name}: {rows[-1]['valid']} of {len(PROMPTS)}", *problems, file=sys.stderr)
    return rows, speeds


def question_scores(client: httpx.Client) -> dict[str, Any]:
    """How many of the forty are answered right, without and with tools that nobody needs."""
    questions, digest = load_questions()
    found: dict[str, Any] = {"questions_sha256": digest, "questions": len(questions)}
    for name, tools in {"without": None, "with": offered("search", "get_weather", "order")}.items():
        more = {} if tools is None else {"tools": tools}
        answers = [Asked(client, one["question"], **more) for one in questions]
        rights = [
            is_right(asked.text, one["answers"])
            for asked, one in zip(answers, questions, strict=True)
        ]
        found[name] = {
            "right": sum(rights),
            "calls": sum(bool(asked.calls) for asked in answers),
            "empty": sum(not asked.text.strip() and not asked.calls for asked in answers),
            "texts": [asked.text[:160] for asked in answers],
        }
        print(f"{name} tools: {found[name]['right']} right", file=sys.stderr)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.default_tools", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--output", type=Path)
    found = parser.parse_args(arguments)
    with httpx.Client(base_url=found.url, timeout=600.0) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        free = [Asked(client, prompt, max_tokens=FREE_TOKENS) for prompt in PROMPTS * 2]
        rows, speeds = force(client)
        scores = question_scores(client)
    free_speeds = [asked.tokens_per_s for asked in free[len(PROMPTS) :]]  # the first warm up
    valid = sum(row["valid"] for row in rows)
    speed = {
        "free_tokens_per_s": statistics.median(free_speeds),
        "call_tokens_per_s": statistics.median(speeds),
    }
    document = {
        "environment": describe_environment("benchmarks.default_tools", torch.device("cpu")),
        "model": model,
        "forced": {"requests": len(rows) * len(PROMPTS), "valid": valid, "rows": rows},
        "questions": scores,
        "speed": {
            **speed,
            "ratio": speed["call_tokens_per_s"] / speed["free_tokens_per_s"],
        },
    }
    write_results(found.output, document)
    print(json.dumps({"valid": valid, "of": len(rows) * len(PROMPTS), **document["speed"]}))
    counts = {name: scores[name]["right"] for name in ("without", "with")}
    print(json.dumps({"questions": scores["questions"], **counts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
