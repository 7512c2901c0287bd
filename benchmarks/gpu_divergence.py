"""How often greedy text in bf16 on a GPU parts from plain decoding, and at which top-2 margins.

    python -m benchmarks.gpu_divergence --model smollm2-135m --output benchmarks/results/FILE.json

Every request is decoded plainly, then with drafts taken from that answer and corrupted one time in
four, so that every verify length occurs. At the first token that differs the margin between the
plain run's two most likely tokens is recorded: only a margin within bf16's rounding may part them.
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

from flashdraft.chat.templates import render_chat
from flashdraft.core import Generation, Request, SamplingParams
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.kernels.select import select_kernels
from flashdraft.models.drafter.model import PackedDrafter
from flashdraft.models.layers import Target
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.registry import build_target
from flashdraft.models.sources import resolve_source
from flashdraft.models.tokenizer import Tokenizer
from tests import zoo
from tests.prompts import PROMPTS

# Logits near 20 have a bf16 spacing of 1/8; rounding along the layers adds up to three of them.
TOLERANCE = 0.375
MAX_TOKENS = 128


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
    runs = [
        zoo.run(
            Engine(
                target, config=EngineConfig(cache=CacheOptions(cache_gb=0.5)), proposer=proposer
            ),
            requests,
        )
    ]
    if drafter is not None:
        engine = Engine(
            target, drafter, EngineConfig(cache=CacheOptions(cache_gb=0.5), verify=7, ngram=False)
        )
        runs.append(zoo.run(engine, requests))
    margins, tokens, steps, decoded = [], 0, 0, 0
    for drafted in runs:
        for key, one in plain.items():
            length, margin = first_difference(one, drafted[key])
            tokens += length
            if margin is not None:
                margins.append(margin)
            steps += drafted[key].stats.steps
            decoded += drafted[key].stats.decode_tokens
    return {
        "requests": len(plain) * len(runs),
        "tokens": tokens,
        "divergences": len(margins),
        "margins": sorted(round(margin, 4) for margin in margins),
        "mean_accepted_length_pooled": round(decoded / max(1, steps), 3),
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


def chat_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """A user's turn in the model's chat format."""
    return tokenizer.encode(render_chat(tokenizer, [{"role": "user", "content": prompt}]))


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
    path = resolve_source(arguments.model).path
    checkpoint, tokenizer = open_checkpoint(path), Tokenizer.from_checkpoint(path)
    if tokenizer is None:
        raise SystemExit(f"{arguments.model} has no tokenizer; the prompts are text.")
    target = build_target(checkpoint.config, checkpoint.source, kernels)
    params = SamplingParams(max_tokens=MAX_TOKENS)
    requests = [
        Request(f"p{i}", chat_ids(tokenizer, prompt), params, seed=0)
        for i, prompt in enumerate(PROMPTS)
    ]
    rows["SmolLM2-135M-Instruct (Q4_1 GGUF, dequantised)"] = compare(target, requests)
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
