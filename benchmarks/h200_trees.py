"""Trees of draft tokens beside chains at full size: what steps take, and tokens a second.

    python -m benchmarks.h200_trees trees.json --model 31b --walks tree_length.json
    python -m benchmarks.h200_trees trees.json --model 31b --walks tree_length.json --sections steps
    python -m benchmarks.h200_trees trees.json --model 26b --walks tree_length.json --profile
    python -m benchmarks.h200_trees trees.json --model tiny --walks tree_length.json

Random weights; how far drafts are accepted are walks of a real pair (walks.py), tilted so that the
chain brings so many tokens a step. `steps`: one to eight requests behind a long prompt, so many
rows in all, as chains and as trees; medians of what the device's clocks say. `speed`: one request
of 128 tokens, an answer of 384, sampled as Gemma 4 is (1.0, 0.95, 64) and greedy. `long`, with
--long: steps of one request behind 32k tokens. `profile`, with --profile: kernels by time of a
chain's and of a large tree's step. The file is written after every row. tiny tries everything out
on a CPU: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.accepted_length import describe_environment, write_results
from benchmarks.h200_measure import measure_load, random_requests
from benchmarks.h200_profile import profile_steps
from benchmarks.traffic.engines import (
    DEGENERATE,
    MODEL_NAMES,
    UNIFORM,
    Bench,
    EngineSpec,
    model_named,
    prepare,
)
from benchmarks.traffic.workload import GREEDY, OWN_SAMPLING, SAMPLED
from benchmarks.walks import Walks
from flashdraft.engine.config import MAX_VERIFY
from flashdraft.engine.engine import Engine

FORMAT = "flashdraft-trees/1"
CONDITIONS = "random weights, prescribed walks"
MEANS = (8.6, 4.2)  # tokens a step of the chain
KINDS: dict[str, dict[str, Any]] = {SAMPLED: OWN_SAMPLING, GREEDY: {}}
TREES = (15, 31, 63)
SPEED_TREES = (None, 63, "auto", 31, 15)  # whom there may be no time for comes last
ROWS = (16, 32, 64, 128)  # of a step
REQUESTS = (1, 4, 8)
STEADY_STEPS, WARM_STEPS = 36, 12
SECTIONS = ("steps", "speed", "long", "profile")
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Tokens of prompts and answers, and how often a load is repeated."""

    context: int = 4096  # before the steps that are timed
    long: int = 32768
    prompt: int = 128
    answer: int = 384
    repeats: int = 5
    steady: int = STEADY_STEPS


TINY = Sizes(context=96, long=256, prompt=24, answer=48, repeats=1, steady=6)


class UnseenError(RuntimeError):
    """Steps that were to be timed did not come."""


@dataclass
class Run:
    """One invocation: its rows as they come."""

    bench: Bench
    walks: dict[str, Walks]  # by kind, as they were measured
    sizes: Sizes
    routing: str | None
    deadline: float
    say: Callable[[str], None]
    keep: Callable[[], None]
    chains: dict[tuple[float, str], float] = field(default_factory=dict)  # their tokens a second
    rows: dict[str, list[Row]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def spec(
        self, tree: int | str | None, max_batch: int, tokens: int, is_fixed: bool = False
    ) -> EngineSpec:
        """An engine for so many tokens of context and answer; fixed, whole chains are verified."""
        context = -(-(tokens + 64) // 256) * 256
        walks = self.walks[GREEDY].tilted(MEANS[-1])
        verify = MAX_VERIFY if is_fixed and tree is None else None
        return EngineSpec(walks, self.routing, max_batch, context, tree=tree, verify=verify)

    def use(self, what: str, spec: EngineSpec, work: Callable[[Engine], None]) -> None:
        """Work with an engine; what fails is a row, and the other engines go on."""
        if self.is_over(f"{what}, {spec.label}"):
            return
        try:
            self.bench.use(spec, work)
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"[:1000]
            self.add(what, {"engine": spec.label, "error": text})

    def is_over(self, what: str) -> bool:
        """Whether the time is up; what is left out then is told."""
        is_over = time.perf_counter() > self.deadline
        if is_over:
            self.skipped.append(f"{what}: the time was up")
            self.keep()
        return is_over

    def add(self, what: str, row: Row) -> None:
        """Write a row down."""
        self.rows.setdefault(what, []).append(row | {"conditions": CONDITIONS})
        self.say(f"{what}: {row}"[:300])
        self.keep()

    # -- what steps take -----------------------------------------------------------------------

    def steps(self) -> None:
        """All numbers of requests and rows, as chains and as trees of three sizes."""
        self._steps("steps", REQUESTS, self.sizes.context)

    def long(self) -> None:
        """One request behind a long context."""
        self._steps("long", (1,), self.sizes.long)

    def _steps(self, what: str, requests: Sequence[int], context: int) -> None:
        room = (WARM_STEPS + self.sizes.steady + 8) * (1 + MAX_VERIFY)
        for tree in (None, *reversed(TREES)):
            spec = self.spec(tree, max(requests), context + room, is_fixed=True)
            cases = list(cases_of(tree, requests))
            self.use(what, spec, partial(self._time_cases, what, tree, cases, context))

    def _time_cases(
        self,
        what: str,
        tree: int | None,
        cases: Sequence[tuple[int, int]],
        context: int,
        engine: Engine,
    ) -> None:
        kind = "chain" if tree is None else "tree"
        for count, rows in cases:
            if self.is_over(f"{what}, {count} requests, {rows} rows, {kind} {tree or ''}"):
                continue
            drafted = rows // count - 1
            row: Row = {"drafts": kind, "columns": tree, "requests": count, "rows": rows}
            row |= {"draft_tokens_each": drafted}
            try:
                row |= self._time_steps(engine, count, drafted, context)
            except UnseenError as error:  # the other cases go on
                row["error"] = str(error)
            self.add(what, row)

    def _time_steps(self, engine: Engine, count: int, drafted: int, context: int) -> Row:
        """Steps of so many requests that all decode, and verify so many draft tokens each."""
        engine.step_policy.fixed = drafted
        config, seed = engine.target.config, self.bench.seed
        left = engine.max_context - context - 1 - MAX_VERIFY
        for request in random_requests(count, context, left, config, seed):
            engine.submit(request)
        times, walks = list[tuple[float, float]](), list[tuple[int, int]]()
        warm, wanted = 0, (drafted,) * count
        while engine.has_work and len(times) < self.sizes.steady:
            engine.step()
            stats = engine.last_step
            if stats.num_prefill_tokens or stats.verify_lengths != wanted:
                continue
            warm += 1
            if warm > WARM_STEPS:
                times.append((stats.draft_s, stats.verify_s))
                walks += engine.last_walks
        lengths = [len(live.tokens) for live in engine.scheduler.running]
        cancel_all(engine)
        if not times:
            raise UnseenError(f"no step of {count} requests verified {drafted} draft tokens each")
        draft, rest = (statistics.median(one) for one in zip(*times, strict=True))
        return {
            "context": round(statistics.fmean(lengths)) if lengths else context,
            "step_ms": round(1e3 * statistics.median(sum(one) for one in times), 4),
            "draft_ms": round(1e3 * draft, 4),
            "rest_ms": round(1e3 * rest, 4),
            "steps": len(times),
            **describe_walks(walks),
        }

    # -- tokens a second -----------------------------------------------------------------------

    def speed(self) -> None:
        """One request alone: chains, then trees of fixed sizes and of as many nodes as pay."""
        for tree in SPEED_TREES:
            spec = self.spec(tree, 1, self.sizes.prompt + self.sizes.answer)
            self.use("speed", spec, partial(self._speeds, tree))

    def _speeds(self, tree: int | str | None, engine: Engine) -> None:
        if engine.config.fixed is None:  # there are steps to choose from
            prepare(engine)
        for mean, kind in product(MEANS, KINDS):
            if not self.is_over(f"speed, {kind}, chain of {mean}, tree {tree}"):
                row = self._speed(engine, mean, kind)
                rate = row["median"]["tok_s"]
                if tree is None:
                    self.chains[mean, kind] = rate
                chain = self.chains.get((mean, kind))
                by_chain = None if chain is None else round(rate / chain, 4)
                self.add("speed", {"tree": tree, "by_chain": by_chain, **row})

    def _speed(self, engine: Engine, mean: float, kind: str) -> Row:
        walks, sizes = self.walks[kind].tilted(mean), self.sizes
        assert self.bench.walks is not None
        self.bench.walks.prescribe(walks)
        tokens = sizes.prompt, sizes.answer
        counts = {"seed": self.bench.seed, "repeats": sizes.repeats, "warm_up_tokens": sizes.answer}
        found = measure_load(engine, 1, *tokens, **counts, sampling=KINDS[kind])
        told = {"chain": mean, **{str(size): round(walks.mean(size), 3) for size in walks.by_size}}
        return {"kind": kind, "chain_mean": mean, "prescribed": told, **found}

    # -- kernels -------------------------------------------------------------------------------

    def profile(self) -> None:
        """Kernels of a step: a chain's, and a large tree's."""
        for tree in (None, TREES[-1]):
            spec = self.spec(tree, 1, self.sizes.prompt + 1024, is_fixed=True)
            self.use("profile", spec, partial(self._profile, tree))

    def _profile(self, tree: int | None, engine: Engine) -> None:
        prompt, seed = self.sizes.prompt, self.bench.seed
        found = profile_steps(engine, 1, prompt, seed=seed, num_steps=5)
        self.add("profile", {"tree": tree, **found})


def cases_of(tree: int | None, requests: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Requests and rows that an engine of chains, or of trees of so many columns, is timed with.

    A size of trees has the cases that no smaller one has room for.
    """
    most = MAX_VERIFY if tree is None else tree
    least = max((size for size in TREES if size < most), default=0)
    for count in requests:
        for rows in ROWS:
            drafted = rows // count - 1
            if least < drafted <= most:
                yield count, rows


def describe_walks(walks: list[tuple[int, int]]) -> Row:
    """Means of walks that were gone: tokens a step, and of those on the chain."""
    on_chain, length = (statistics.fmean(one) for one in zip(*walks, strict=True))
    return {"accepted_length": round(1 + length, 3), "on_chain": round(1 + on_chain, 3)}


def cancel_all(engine: Engine) -> None:
    """End what still runs; the next load must find an empty engine."""
    engine.cancel_all()
    while engine.has_work:
        engine.step()


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.h200_trees", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT.json", help="written after every row")
    parser.add_argument("--model", choices=MODEL_NAMES, required=True)
    parser.add_argument("--walks", type=Path, required=True, help="a document of tree_length")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds; later rows are left")
    parser.add_argument("--sections", help=f"of {','.join(SECTIONS)}; default: the first two")
    parser.add_argument("--long", action="store_true", help="steps behind 32k tokens, too")
    parser.add_argument("--profile", action="store_true", help="kernels by time, too")
    parser.add_argument("--routing", choices=[UNIFORM, DEGENERATE], default=UNIFORM)
    parser.add_argument("--cache-gb", type=float)
    parser.add_argument("--seed", type=int, default=0)
    found = parser.parse_args(arguments)
    chosen = found.sections.split(",") if found.sections else list(SECTIONS[:2])
    for name in chosen:
        if name not in SECTIONS:
            parser.error(f"--sections has {name!r}; known are {', '.join(SECTIONS)}")
    for name in SECTIONS[2:]:
        chosen += [name] if getattr(found, name) and name not in chosen else []
    found.sections = chosen
    return found


def main(arguments: list[str] | None = None) -> int:
    found, begin = parse_arguments(arguments), time.perf_counter()

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - begin:6.1f} s] {line}", file=sys.stderr, flush=True)

    walks = {kind: Walks.read(found.walks, kind) for kind in KINDS}
    is_tiny = found.model.startswith("tiny")
    bench = Bench.load(
        found.model,
        device="cpu" if is_tiny else "auto",
        dtype="float32" if is_tiny else "auto",
        seed=found.seed,
        cache_gb=found.cache_gb,
        limits={},
        has_grammars=False,
    )
    say(f"weights: {bench.pair.facts}")
    routing = None if model_named(found.model).target_config().experts is None else found.routing
    sizes = TINY if is_tiny else Sizes()
    run = Run(bench, walks, sizes, routing, begin + found.budget, say, keep=lambda: None)
    environment = describe_environment("benchmarks.h200_trees", torch.device(bench.device_type))
    environment |= {"cuda": torch.version.cuda, "kernels": bench.pair.target.kernels.name}
    head = {
        "format": FORMAT,
        "environment": environment,
        "seed": found.seed,
        "model": bench.pair.facts,
        "settings": {
            "cache_gb": bench.cache_gb,
            "routing": routing,
            "walks": {kind: describe_source(one) for kind, one in walks.items()},
        },
    }
    run.keep = lambda: write_results(found.output, head | run.rows | {"skipped": run.skipped})
    for name in found.sections:
        getattr(run, name)()
    run.keep()
    return 1 if any("error" in row for rows in run.rows.values() for row in rows) else 0


def describe_source(walks: Walks) -> dict[str, float]:
    """Tokens a step as they were measured, by size; the chain's beside them."""
    return {"chain": round(walks.chain_mean, 3)} | {
        str(size): round(walks.mean(size), 3) for size in walks.by_size
    }


if __name__ == "__main__":
    sys.exit(main())
