"""Drafted beside plain for several requests at once on this CPU, by how tokens are drawn.

    python -m benchmarks.cpu_sampled --output benchmarks/results/cpu_sampled.json

The default pair answers the same chat prompts at once, plainly and drafted in turns, whole requests
from submission to the last token. Compare ratios alone: absolute figures are this machine's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.accepted_length import describe_environment, write_results
from flashdraft import LLM, SamplingParams
from tests.prompts import PROMPTS

FORMAT = "flashdraft-cpu-sampled/1"
DRAWN: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T 0.7": {"temperature": 0.7},
    "T 1, top-p 0.95, top-k 64": {"temperature": 1.0, "top_p": 0.95, "top_k": 64},
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_sampled")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    found = parser.parse_args(arguments)
    engines = {
        name: LLM("smollm2-135m", draft=draft, max_batch=found.requests)
        for name, draft in (("plain", None), ("drafted", "auto"))
    }
    prompts = [PROMPTS[n % len(PROMPTS)] for n in range(found.requests)]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    rows = []
    for drawn, settings in DRAWN.items():
        params = [
            SamplingParams(max_tokens=found.max_tokens, ignore_eos=True, seed=seed, **settings)
            for seed in range(found.requests)
        ]
        rates, texts, lengths = {name: list[float]() for name in engines}, [], list[float]()
        for turn in range(1 + found.rounds):  # the first is not counted
            for name, llm in engines.items():
                begin = time.perf_counter()
                answers = llm.chat(chats, params)
                seconds = time.perf_counter() - begin
                if turn:
                    rates[name].append(found.requests * found.max_tokens / seconds)
                texts.append([one.token_ids for one in answers])
            lengths = [one.stats.mean_accepted_length for one in answers]
        ratios = [d / p for p, d in zip(rates["plain"], rates["drafted"], strict=True)]
        rows.append(
            {
                "drawn": drawn,
                "ratio": round(statistics.median(ratios), 3),
                "least": round(min(ratios), 3),
                "most": round(max(ratios), 3),
                "plain_tokens_per_s": round(statistics.median(rates["plain"]), 1),
                "drafted_tokens_per_s": round(statistics.median(rates["drafted"]), 1),
                "mean_accepted_length": round(statistics.fmean(lengths), 2),
                "identical": all(one == texts[0] for one in texts),
            }
        )
        row = rows[-1]
        print(f"{drawn}: {row['ratio']} ({row['least']} to {row['most']}) × plain", flush=True)
    document = {
        "format": FORMAT,
        "environment": describe_environment("benchmarks.cpu_sampled", torch.device("cpu")),
        "requests": found.requests,
        "max_tokens": found.max_tokens,
        "rounds": found.rounds,
        "rows": rows,
    }
    write_results(found.output, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
