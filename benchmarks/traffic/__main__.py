"""Traffic as a server meets it, on full-size random weights: arrivals, sampling, mixed settings.

    python -m benchmarks.traffic --model 31b --clients 8,32 --kinds greedy,sampled,logprobs,penalty
    python -m benchmarks.traffic --model 31b --rate 5 --draft --output traffic.json
    python -m benchmarks.traffic --model 26b --routing degenerate,uniform --acceptance 0.893,0.6,0.3
    python -m benchmarks.traffic --model 31b --draft --tree auto --walks FILE --walk-mean 8.6
    python -m benchmarks.traffic --model 31b --conversations --draft
    python -m benchmarks.traffic --model 31b --long 65536
    python -m benchmarks.traffic --model tiny --clients 2 --seconds 2

Closed loop: each client asks again at once. --rate: Poisson arrivals. Prompts of 256-1536 random
tokens, answers of 64-448 to their full length; a lone client asks 128 → 384. sampled is Gemma 4's
own setting (temperature 1.0, top-p 0.95, top-k 64); in logprobs, penalty and schema every eighth
request besides wants 5 log-probabilities, a repetition penalty of 1.1 or JSON by a schema; presence
is a presence penalty on all; in pictures every fourth request begins with one of 266 tokens that
nobody has seen, in pictures-as-text with as many tokens of text. Drafts are accepted at a
prescribed chance a slot and committed (h200_inject.py), or with --walks as far as those of a real
pair (walks.py), tilted so that chains bring --walk-mean tokens a step; trees (--tree) need walks.
Figures begin when the warm-up requests are answered; what anybody waited for before that is told
apart. The prefix cache is off but in --conversations. tiny tries everything out on a CPU: its
figures mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.accepted_length import describe_environment, write_results
from benchmarks.traffic.engines import (
    DEGENERATE,
    MODEL_NAMES,
    UNIFORM,
    Acceptance,
    Bench,
    model_named,
)
from benchmarks.traffic.rows import Run, Settings
from benchmarks.traffic.sources import NUM_TURNS, SYSTEM_TOKENS
from benchmarks.traffic.table import render
from benchmarks.traffic.workload import GREEDY, KINDS, SAMPLED, SCHEMA, Span
from benchmarks.walks import Walks
from flashdraft.kernels.kinds import WeightOptions

FORMAT = "flashdraft-traffic/1"
DEFAULT_CLIENTS = (1, 8, 32)


def _list_of(kind: type[int] | type[float]) -> Any:
    def parse(text: str) -> list[float]:
        values = [kind(part) for part in text.split(",") if part]
        if not values or min(values) <= 0:
            raise ValueError(f"{text!r} is no list of numbers above 0")
        return values

    return parse


def _acceptances(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0.0 < value < 1.0 for value in values):
        raise ValueError("acceptance is a chance between 0 and 1")
    return values


def _words(known: tuple[str, ...]) -> Any:
    def parse(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(known)}")
        return words

    return parse


def tree_of(text: str) -> int | str:
    """A number of draft tokens, or as many as pay."""
    return text if text == "auto" else int(text)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.traffic", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", choices=MODEL_NAMES, required=True)
    load = parser.add_argument_group("loads")
    load.add_argument("--clients", type=_list_of(int), help="closed loops, as 1,8,32 (default)")
    load.add_argument("--rate", type=_list_of(float), help="Poisson arrivals, requests a second")
    load.add_argument("--kinds", type=_words(KINDS), default=["greedy", "sampled"])
    load.add_argument("--conversations", action="store_true", help="8 × 6 turns, prefix cache on")
    load.add_argument("--system-tokens", type=int, default=SYSTEM_TOKENS, help="they share")
    load.add_argument("--turns", type=int, default=NUM_TURNS, help="of each conversation")
    load.add_argument("--long", type=int, metavar="TOKENS", help="a long prompt arrives at c=8")
    load.add_argument("--prompt-tokens", type=Span.parse, metavar="A-B")
    load.add_argument("--answer-tokens", type=Span.parse, metavar="A-B")
    load.add_argument("--seconds", type=float, default=20.0, help="of a row, after the warm-up")
    load.add_argument("--requests", type=int, help="of a row, if they are answered sooner")
    load.add_argument("--warm-up-seconds", type=float, default=60.0, help="at most")
    engine = parser.add_argument_group("engines")
    engine.add_argument("--draft", action="store_true", help="drafted (default: and plain)")
    engine.add_argument("--plain", action="store_true", help="plain decoding")
    engine.add_argument("--acceptance", type=_acceptances, help="a slot's, as 0.909,0.6,0.3")
    engine.add_argument("--walks", type=Path, metavar="FILE", help="in acceptance's place")
    engine.add_argument("--walk-mean", type=float, default=8.6, metavar="TOKENS")
    engine.add_argument("--tree", type=tree_of, metavar="N|auto", help="draft trees")
    engine.add_argument(
        "--routing", type=_words((DEGENERATE, UNIFORM)), default=[DEGENERATE], help="of experts"
    )
    engine.add_argument("--quantize", choices=["int4", "int8", "fp8"])
    engine.add_argument("--activations", choices=["int8", "fp8"])
    engine.add_argument("--device", default="auto")
    engine.add_argument("--dtype", default="auto")
    engine.add_argument("--max-batch", type=int, help="requests at once (default: 32 or --clients)")
    engine.add_argument("--cache-gb", type=float)
    engine.add_argument("--step-tokens", type=int, help="max_step_tokens")
    engine.add_argument("--prefill-chunk", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--profile", type=int, default=0, metavar="STEPS", help="kernels by time, behind each row"
    )
    parser.add_argument("--budget", type=float, default=540.0, help="seconds; later rows are left")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="written after every row")
    found = parser.parse_args(arguments)
    if found.tree is not None and found.walks is None:
        parser.error("--tree needs --walks: how far a tree is walked")
    if found.walks is not None and (found.plain or found.acceptance):
        parser.error("--walks is of drafted engines, and in the place of --acceptance")
    if not (found.clients or found.rate or found.conversations or found.long):
        found.clients = list(DEFAULT_CLIENTS)
    return found


def make_settings(found: argparse.Namespace) -> Settings:
    """The flags, completed."""
    model = model_named(found.model)
    both = found.draft == found.plain
    acceptances: list[Acceptance] = []
    if found.walks is not None:
        kind = GREEDY if found.kinds == [GREEDY] else SAMPLED
        acceptances.append(Walks.read(found.walks, kind).tilted(found.walk_mean))
    elif found.draft or both:
        acceptances += found.acceptance or [model.alpha]
    if found.plain or both:
        acceptances.append(None)
    has_experts = model.target_config().experts is not None
    clients, is_tiny = found.clients or [], found.model.startswith("tiny")
    most = max([*clients, 1 if is_tiny and clients else 8 if is_tiny else 32])
    return Settings(
        clients=clients,
        rates=found.rate or [],
        kinds=found.kinds,
        acceptances=acceptances,
        routings=found.routing if has_experts else [None],
        seconds=found.seconds,
        requests=found.requests,
        seed=found.seed,
        conversations=found.conversations,
        system_tokens=found.system_tokens,
        turns=found.turns,
        long=found.long,
        prompts=found.prompt_tokens,
        answers=found.answer_tokens,
        warm_up_s=found.warm_up_seconds,
        tree=found.tree,
        profiled=found.profile,
        max_batch=found.max_batch or most,
    )


def main(arguments: list[str] | None = None) -> int:
    found, begin = parse_arguments(arguments), time.perf_counter()
    settings = make_settings(found)

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - begin:6.1f} s] {line}", file=sys.stderr, flush=True)

    limits = {"max_step_tokens": found.step_tokens, "prefill_chunk": found.prefill_chunk}
    bench = Bench.load(
        found.model,
        device="cpu" if found.model.startswith("tiny") else found.device,
        dtype="float32" if found.model.startswith("tiny") else found.dtype,
        weights=WeightOptions(quantize=found.quantize, activations=found.activations),
        seed=found.seed,
        cache_gb=found.cache_gb,
        limits={name: value for name, value in limits.items() if value is not None},
        has_grammars=SCHEMA in found.kinds,
    )
    say(f"weights: {bench.pair.facts}")
    environment = describe_environment("benchmarks.traffic", torch.device(bench.device_type))
    environment |= {"cuda": torch.version.cuda, "kernels": bench.pair.target.kernels.name}
    run = Run(bench, settings, begin + found.budget, say, keep=lambda: None)

    def document() -> dict[str, Any]:
        return {
            "format": FORMAT,
            "environment": environment,
            "seed": found.seed,
            "model": bench.pair.facts,
            "settings": {
                "seconds": settings.seconds,
                "requests": settings.requests,
                "max_batch": settings.max_batch,
                "max_context": settings.max_context,
                "cache_gb": bench.cache_gb,
                "quantize": found.quantize,
                "activations": found.activations,
                **bench.limits,
            },
            "prepared": run.prepared,
            "rows": run.rows,
            "skipped": run.skipped,
        }

    run.keep = lambda: write_results(found.output, document())
    run.everything()
    run.keep()
    print(render(document()), end="")
    return 1 if any("error" in row for row in run.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
