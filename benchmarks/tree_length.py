"""Accepted length of trees beside chains on the five test tasks, through the engine.

    python -m benchmarks.tree_length BENCH --output benchmarks/results/tree_length.json

BENCH is a folder of <task>.jsonl files with a `prompt` a row. One request at a time, the block
drafter alone (no n-grams): a whole chain verified, then trees of so many draft tokens, greedily and
sampled (1.0, top-p 0.95, top-k 64, a seed each); then chains and trees of the policy's choice.
Tokens per decode step, bonus token included, the mean over requests. Every answer must be the
chain's. Tokens a second are those of all answers, their prompts included, after a first one to warm
up. `walks` has how far each whole tree was walked, along its chain and in all (walks.py).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.accepted_length import (
    TASKS,
    describe_environment,
    load_pair,
    read_task,
    report_progress,
    task_parser,
    write_results,
)
from benchmarks.walks import Walk, describe
from flashdraft.core import Generation, Request, SamplingParams
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.models.drafter.model import PackedDrafter

TREES = (15, 31, 63)
PREPARE_S = 60.0
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.95, "top_k": 64},
}


class Measured(NamedTuple):
    """What an engine did with some prompts."""

    lengths: list[float]  # accepted, of each answer
    answers: list[list[int]]
    walks: list[Walk]  # of all steps that had room for a whole tree, and did not end an answer
    seconds: float


def answer(
    engine: Engine, ids: Sequence[int], params: SamplingParams, seed: int, walks: list[Walk]
) -> Generation:
    """One answer, nobody beside it; its walks are added to the others."""
    engine.submit(Request("one", list(ids), params, seed))
    while engine.has_work:
        for event in engine.step():
            if event.generation is not None:
                return event.generation
        if engine.last_step.verify_lengths == (engine.config.fixed,):
            walks += engine.last_walks
    raise RuntimeError("the engine lost its request")


def measure(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Measured:
    """All answers, one after another."""
    walks: list[Walk] = []
    answer(engine, prompts[0], params, 0, [])
    begin = time.perf_counter()
    found = [answer(engine, ids, params, seed, walks) for seed, ids in enumerate(prompts)]
    seconds = time.perf_counter() - begin
    lengths = [one.stats.mean_accepted_length for one in found]
    return Measured(lengths, [one.token_ids for one in found], walks, seconds)


def compare(
    engines: dict[str, Engine], prompts: Sequence[Sequence[int]], params: SamplingParams
) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """Mean accepted length by engine, beside the chain's, which comes first; walks by tree."""
    row: dict[str, Any] = {"requests": len(prompts)}
    walks: dict[str, dict[str, int]] = {}
    answers, chain, pace = None, 1.0, 1.0
    for name, engine in engines.items():
        found = measure(engine, prompts, params)
        mean = statistics.fmean(found.lengths)
        tokens_per_s = sum(map(len, found.answers)) / found.seconds
        if answers is None:
            answers, chain, pace = found.answers, mean, tokens_per_s
        row[name] = {
            "accepted_length": round(mean, 4),
            "by_chain": round(mean / chain, 4),
            "tokens_per_s": round(tokens_per_s, 1),
            "pace_by_chain": round(tokens_per_s / pace, 4),
            "same_answers": sum(a == b for a, b in zip(answers, found.answers, strict=True)),
        }
        if isinstance(engine.config.tree, int):
            walks[str(engine.config.tree)] = describe(found.walks)
        paces = f"{tokens_per_s:.0f} tok/s, {tokens_per_s / pace:.2f}"
        report_progress(f"  {name}: {mean:.2f}, {mean / chain:.2f} of the chain's; {paces}")
    return row, walks


def main() -> int:
    found = task_parser("Accepted length of trees beside chains.", limit=20).parse_args()
    pair = load_pair(found.model, found.draft, found.device, found.dtype)
    target = pair.llm.engine.target
    drafter = PackedDrafter(pair.drafter, target.kernels)
    alone: dict[str, Any] = {"max_batch": 1, "ngram": False, "max_context": 2048}
    alone["cache"] = CacheOptions(cache_gb=1.0)
    configs = {"chain": EngineConfig(verify=drafter.config.block_size - 1, run_ahead=True, **alone)}
    configs |= {f"tree {n}": EngineConfig(tree=n, **alone) for n in (*TREES, "auto")}
    engines = {name: Engine(target, drafter, config) for name, config in configs.items()}
    for engine in engines.values():
        engine.prepare(PREPARE_S)
    document: dict[str, Any] = {
        "environment": describe_environment("benchmarks.tree_length", target.kernels.device),
        "settings": {
            "model": Path(pair.llm.model).name,
            "drafter": pair.name,
            "drafter_fingerprint": pair.fingerprint,
            "kernels": target.kernels.name,
            "dtype": target.kernels.weight_dtype,
            "max_tokens": found.tokens,
            "limit": found.limit,
            "seed": found.seed,
            "sampling": SETTINGS,
        },
        "tasks": {kind: {} for kind in SETTINGS},
        "walks": {kind: {} for kind in SETTINGS},
    }
    for kind, settings in SETTINGS.items():
        params = SamplingParams(max_tokens=found.tokens, **settings)
        for task in TASKS:
            report_progress(f"{kind}, {task}")
            prompts = read_task(found.bench, task, found.limit, found.seed)
            ids = [pair.llm.chat_prompt(one.messages) for one in prompts]
            row, walks = compare(engines, ids, params)
            document["tasks"][kind][task], document["walks"][kind][task] = row, walks
            document["means"] = means_of(document["tasks"])
            write_results(found.output, document)
    print(json.dumps(document["means"], indent=1))
    return 0


def means_of(tasks: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Over the tasks: each engine's accepted length, and by how much it is the chain's."""
    means: dict[str, Any] = {}
    for kind, rows in tasks.items():
        names = [name for row in list(rows.values())[:1] for name in row if name != "requests"]
        for name in names:
            lengths = [row[name]["accepted_length"] for row in rows.values()]
            ratios = [row[name]["by_chain"] for row in rows.values()]
            paces = [row[name]["pace_by_chain"] for row in rows.values()]
            means.setdefault(kind, {})[name] = {
                "accepted_length": round(statistics.fmean(lengths), 4),
                "by_chain": round(statistics.fmean(ratios), 4),
                "least_by_chain": min(ratios),
                "pace_by_chain": round(statistics.fmean(paces), 4),
            }
    return means


if __name__ == "__main__":
    sys.exit(main())
