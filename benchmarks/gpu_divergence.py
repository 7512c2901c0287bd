"""How often greedy text in bf16 on a GPU parts from plain decoding, and at which top-2 margins.

    python -m benchmarks.gpu_divergence --model smollm2-135m --output benchmarks/results/FILE.json

Every request is decoded plainly, then with drafts taken from that answer and corrupted one time in
four, so that every verify length occurs, then with a drafter's chains and trees. At the first token
that differs the margin between the plain run's two most likely tokens is recorded: only a margin
within bf16's rounding may part them.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.accepted_length import load_pair
from flashdraft.core import Generation, Request, SamplingParams
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.kernels.select import select_kernels
from flashdraft.models.drafter.model import PackedDrafter
from flashdraft.models.layers import Target
from tests import zoo
from tests.prompts import PROMPTS

# Logits near 20 have a bf16 spacing of 1/8; rounding along the layers adds up to three of them.
TOLERANCE = 0.375
MAX_TOKENS = 128
TREES = (15, 31, 63)


def compare(
    target: Target, requests: list[Request], drafter: PackedDrafter | None = None
) -> dict[str, Any]:
    """Plain against drafted text: tokens compared, divergences, and their margins."""
    watched = [
        dataclasses.replace(r, params=dataclasses.replace(r.params, logprobs=2)) for r in requests
    ]
    config = EngineConfig(cache=CacheOptions(cache_gb=0.5), verify=0, ngram=False)
    plain = zoo.run(Engine(target, config=config), watched)
    answers = {key: list(g.token_ids) for key, g in plain.items()}
    proposer = zoo.ScriptedProposer(answers, 0.25, max_drafts=15)
    cache = CacheOptions(cache_gb=0.5)
    engines = {"scripted": Engine(target, config=EngineConfig(cache=cache), proposer=proposer)}
    ways: list[dict[str, Any]] = [{"verify": 7}, *({"tree": nodes} for nodes in TREES)]
    for way in ways if drafter is not None else ():
        config = EngineConfig(cache=cache, ngram=False, **way)
        [(name, number)] = way.items()
        engines[f"{name} {number}"] = Engine(target, drafter, config)
    rows = {name: compare_one(plain, zoo.run(one, requests)) for name, one in engines.items()}
    margins = sorted(margin for row in rows.values() for margin in row["margins"])
    steps = sum(row["steps"] for row in rows.values())
    decoded = sum(row["decoded"] for row in rows.values())
    return {
        "requests": len(plain) * len(rows),
        "tokens": sum(row["tokens"] for row in rows.values()),
        "divergences": len(margins),
        "margins": margins,
        "mean_accepted_length_pooled": round(decoded / max(1, steps), 3),
        "by_drafts": rows,
    }


def compare_one(plain: dict[str, Generation], drafted: dict[str, Generation]) -> dict[str, Any]:
    """What one engine's answers have in common with the plain ones."""
    found = [first_difference(one, drafted[key]) for key, one in plain.items()]
    return {
        "tokens": sum(length for length, _ in found),
        "margins": sorted(round(margin, 4) for _, margin in found if margin is not None),
        "steps": sum(one.stats.steps for one in drafted.values()),
        "decoded": sum(one.stats.decode_tokens for one in drafted.values()),
    }


def first_difference(plain: Generation, drafted: Generation) -> tuple[int, float | None]:
    """Tokens before the first difference, and the plain run's top-2 margin there."""
    pairs = zip(plain.token_ids, drafted.token_ids, strict=False)
    for place, (one, other) in enumerate(pairs):
        if one != other:
            assert plain.logprobs is not None
            (_, first), (_, second) = plain.logprobs[place].top
            return place, first - second
    return min(len(plain.token_ids), len(drafted.token_ids)), None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    kernels = select_kernels(arguments.device, arguments.dtype)
    rows: dict[str, Any] = {}
    for family in zoo.CONFIGS:
        target = zoo.tiny_target(family, kernels, taps=(0, 2))
        requests = [r for r in zoo.mixed_requests(24, max_tokens=96) if r.params.is_greedy]
        drafter = zoo.tiny_drafter(kernels)
        rows[f"tiny {family}, random weights"] = compare(target, requests, drafter)
    pair = load_pair(arguments.model, "auto", arguments.device, arguments.dtype)
    target, params = pair.llm.engine.target, SamplingParams(max_tokens=MAX_TOKENS)
    requests = [
        Request(
            f"p{i}", pair.llm.chat_prompt([{"role": "user", "content": prompt}]), params, seed=0
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    drafter = PackedDrafter(pair.drafter, target.kernels)
    rows["SmolLM2-135M-Instruct (Q4_1 GGUF, dequantised)"] = compare(target, requests, drafter)
    result = {
        "environment": {
            "device": torch.cuda.get_device_name() if kernels.device.type == "cuda" else "cpu",
            "kernels": kernels.name,
            "dtype": str(kernels.dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "date": datetime.date.today().isoformat(),
            "command": f"python -m benchmarks.gpu_divergence --model {arguments.model}",
            "prompts": "tests/prompts.py as chat turns; random token ids (tests/zoo.py); greedy",
            "drafts": "scripted: the plain answer, one token in four corrupted (seed 7)",
        },
        "tolerance": TOLERANCE,
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
