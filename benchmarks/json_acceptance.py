"""How much of a draft is accepted where an answer is JSON by a schema, on the default pair.

    python -m benchmarks.json_acceptance --output benchmarks/results/json_acceptance.json

    python -m benchmarks.json_acceptance --trees --output benchmarks/results/json_trees.json

The default pair answers a few prompts by three schemas, greedily and sampled, with as many draft
tokens verified a step as a block has. What counts are tokens a step; no time is taken. With --trees
the host's trees of 15 draft tokens stand beside its chains, both in one engine that grows trees;
answers by both must be the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.accepted_length import describe_environment, write_results
from flashdraft import LLM, SamplingParams
from flashdraft.core import Generation, GrammarSpec, Request
from flashdraft.engine.draft.guided import MOST_GUIDED
from flashdraft.engine.engine import Engine

PROMPTS = (
    "Describe a person who works in a bakery.",
    "Describe a small dog and its owner.",
    "Describe a city by the sea.",
    "Describe a book about the stars.",
    "Describe a meal for four guests.",
    "Describe a train journey in winter.",
)
TEXT = {"type": "string", "maxLength": 60}
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "listed": {
        "type": "object",
        "properties": {"parts": {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 4}},
        "required": ["parts"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "title": TEXT,
            "place": {
                "type": "object",
                "properties": {"name": TEXT, "kind": {"enum": ["city", "house", "other"]}},
                "required": ["name", "kind"],
                "additionalProperties": False,
            },
        },
        "required": ["title", "place"],
        "additionalProperties": False,
    },
}
SAMPLED = {"temperature": 0.7, "top_p": 0.9}
VERIFY, MAX_TOKENS, NUM_SEEDS = 7, 256, 3


def accepted_length(llm: LLM, schema: dict[str, Any], settings: dict[str, Any]) -> float:
    """Tokens of the answers by the steps that brought them."""
    grammar = GrammarSpec("json_schema", json.dumps(schema))
    prompts = [llm.chat_prompt([{"role": "user", "content": one}]) for one in PROMPTS]
    params = SamplingParams(max_tokens=MAX_TOKENS, **settings)
    answers = llm.generate(prompts, params, grammar=grammar)
    steps = sum(one.stats.steps for one in answers)
    return sum(one.stats.decode_tokens for one in answers) / steps


def answer(engine: Engine, requests: Sequence[Request]) -> list[Generation]:
    """All requests together, in their order."""
    found: dict[str, Generation] = {}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for event in engine.step():
            if event.generation is not None:
                found[event.request_id] = event.generation
    return [found[request.id] for request in requests]


def beside_chains(llm: LLM, schema: dict[str, Any], settings: dict[str, Any]) -> dict[str, float]:
    """Tokens a step by the host's chains and by its trees, of the same answers."""
    grammar = GrammarSpec("json_schema", json.dumps(schema))
    params = SamplingParams(max_tokens=MAX_TOKENS, **settings)
    prompts = [llm.chat_prompt([{"role": "user", "content": one}]) for one in PROMPTS]
    answers, lengths = list[list[list[int]]](), {}
    for name, verify in (("chain", MOST_GUIDED), ("tree", None)):  # what is fixed is a chain
        requests = [
            Request(f"{name} {n}", ids, params, n, grammar=grammar, verify=verify)
            for n, ids in enumerate(prompts)
        ]
        found = answer(llm.engine, requests)
        answers.append([one.token_ids for one in found])
        steps = sum(one.stats.steps for one in found)
        lengths[name] = sum(one.stats.decode_tokens for one in found) / steps
    assert answers[0] == answers[1], "drafts change no token"
    return {**lengths, "by_chain": lengths["tree"] / lengths["chain"]}


def compare_trees(output: Path | None) -> dict[str, float]:
    """Trees beside chains, by schema and kind of draw; the means of their ratios."""
    llm = LLM(tree=MOST_GUIDED)
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for name, schema in SCHEMAS.items():
        kinds = {"greedy": {}, "sampled": SAMPLED}
        rows[name] = {kind: beside_chains(llm, schema, one) for kind, one in kinds.items()}
        print(name, rows[name], file=sys.stderr)
    kinds_of = [*rows.values()]
    means = {
        kind: statistics.mean(row[kind]["by_chain"] for row in kinds_of)
        for kind in ("greedy", "sampled")
    }
    document = {
        "environment": describe_environment("benchmarks.json_acceptance", torch.device("cpu")),
        "tree": MOST_GUIDED,
        "sampling": SAMPLED,
        "accepted_length": rows,
        "mean_by_chain": means,
    }
    write_results(output, document)
    return means


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.json_acceptance", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--trees", action="store_true", help="put trees beside chains")
    found = parser.parse_args(arguments)
    if found.trees:
        print(json.dumps(compare_trees(found.output)))
        return 0
    llm = LLM(verify=VERIFY)
    rows = {}
    for name, schema in SCHEMAS.items():
        seeded = [accepted_length(llm, schema, {**SAMPLED, "seed": s}) for s in range(NUM_SEEDS)]
        rows[name] = {
            "greedy": accepted_length(llm, schema, {}),
            "sampled": statistics.mean(seeded),
        }
        print(name, rows[name], file=sys.stderr)
    means = {
        kind: statistics.mean(row[kind] for row in rows.values()) for kind in ("greedy", "sampled")
    }
    document = {
        "environment": describe_environment("benchmarks.json_acceptance", torch.device("cpu")),
        "verify": VERIFY,
        "sampling": SAMPLED,
        "accepted_length": rows,
        "mean": means,
    }
    write_results(found.output, document)
    print(json.dumps(means))
    return 0


if __name__ == "__main__":
    sys.exit(main())
