"""A bench results document as a run writes it, made up from a seed: nothing here was measured."""

from __future__ import annotations

import random
from typing import Any

TASKS = ("gsm8k", "math500", "humaneval", "mbpp", "mt_bench")
SLOTS = 15


def bench_document(
    tasks: tuple[str, ...] = TASKS,
    concurrency: tuple[int, ...] = (1, 4, 8),
    num_prompts: int = 20,
    seed: int = 0,
) -> dict[str, Any]:
    """Plain and drafted rows of every task at every concurrency."""
    chance = random.Random(seed)
    document: dict[str, Any] = {
        "format": "flashdraft-bench/1",
        "is_partial": False,
        "problems": [],
        "environment": {
            "package": "0.1.0",
            "commit": "0123abc",
            "python": "3.11.7",
            "torch": "2.13.0",
            "platform": "Linux aarch64",
            "device": "aarch64 CPU, 2 cores",
            "cpu_count": 2,
            "threads": 2,
            "dtype": "int8",
            "kernels": "cpu-int8",
            "date": "2026-11-15T12:00:00+00:00",
            "command": "flashdraft bench --tasks " + ",".join(tasks),
        },
        "settings": {
            "engine": "in-process",
            "url": None,
            "model": "smollm2-135m",
            "draft": "auto",
            "verify": "auto",
            "tasks": list(tasks),
            "prompts_per_task": num_prompts,
            "max_tokens": 256,
            "thinking": False,
            "sampling": "greedy",
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": 0,
            "seed": 0,
            "concurrency": list(concurrency),
            "repeats": 1,
            "warm_up_prompts": 2,
        },
        "prompts_sha256": {task: f"{TASKS.index(task):064x}" for task in tasks},
        "rows": [],
        "speedup": {},
        "identical": {},
    }
    for task in tasks:
        for c in concurrency:
            plain = _row(task, c, "plain", num_prompts, chance)
            drafted = _row(task, c, "draft", num_prompts, chance)
            document["rows"] += [plain, drafted]
            ratio = drafted["tokens_per_s"] / plain["tokens_per_s"]
            document["speedup"].setdefault(task, {})[str(c)] = ratio
            same = {"same": num_prompts, "total": num_prompts}
            document["identical"].setdefault(task, {})[str(c)] = same
    return document


def _row(task: str, c: int, mode: str, num_prompts: int, chance: random.Random) -> dict[str, Any]:
    is_drafted = mode == "draft"
    agreement = (0.86 - 0.04 * TASKS.index(task) - 0.01 * c) if is_drafted else 0.0
    histogram: dict[int, int] = {}
    requests = []
    for _ in range(num_prompts):
        count, steps = chance.randint(80, 256), 0
        done = 1
        while done < count:
            length = 1
            while is_drafted and length <= SLOTS and chance.random() < agreement:
                length += 1
            length = min(length, count - done)
            histogram[length] = histogram.get(length, 0) + 1
            done, steps = done + length, steps + 1
        first = chance.uniform(0.08, 0.12) * (1 + 0.4 * c)
        seconds = first + steps * (0.02 if is_drafted else 0.0105) * (0.7 + 0.3 * c)
        requests.append([seconds, first, count, steps])
    tokens, busy = sum(r[2] for r in requests), sum(r[0] for r in requests)
    total_steps = sum(histogram.values())
    reached = [sum(n for k, n in histogram.items() if k > slot) for slot in range(SLOTS + 1)]
    firsts = sorted(r[1] for r in requests)
    gap = (busy - sum(firsts)) / tokens
    means = [(r[2] - 1) / r[3] for r in requests]
    return {
        "task": task,
        "concurrency": c,
        "mode": mode,
        "tokens_per_s": tokens / (busy / c),
        "wall_s": busy / c,
        "num_prompts": num_prompts,
        "output_tokens": tokens,
        "prompt_tokens": 75 * num_prompts,
        "ttft_p50_s": firsts[num_prompts // 2],
        "ttft_p95_s": firsts[-1],
        "itl_p50_s": gap,
        "itl_p95_s": gap * 1.8,
        "mean_accepted_length": sum(means) / len(means),
        "mean_accepted_length_pooled": (tokens - num_prompts) / total_steps,
        "accepted_histogram": {str(k): n for k, n in sorted(histogram.items())},
        "accepted_by_position": [
            reached[slot] / reached[slot - 1] if reached[slot - 1] else 0.0
            for slot in range(1, SLOTS + 1)
        ]
        if is_drafted
        else [],
        "trees": None,
        "buckets": {
            "queue_s": 0.0,
            "prefill_s": sum(firsts) * 0.9,
            "drafter_prefill_s": sum(firsts) * 0.1 if is_drafted else 0.0,
            "decode_s": busy - sum(firsts),
        },
        "accuracy": None,
        "requests": requests,
    }
