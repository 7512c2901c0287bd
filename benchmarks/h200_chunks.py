"""Attention of long prompts, chunk by chunk: python -m benchmarks.h200_chunks [FILE.json]

Of Gemma 4 31B's layers, behind ever longer contexts and by one or two blocks to a tile
(attend_many.cu); what all chunks of a prompt add up to, with the linears beside them; and passes in
which requests decode, by both. Random weights and keys. Ends within about a minute.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.accepted_length import describe_environment
from benchmarks.h200_attention import BF16, CUDA, LAYERS, PAGE_SIZE, Layer
from benchmarks.h200_pass import COUNTS, PASSES, Sequences, make_views, measure_linears
from benchmarks.h200_timing import graph_microseconds, num_copies
from flashdraft.kernels.cuda.attention.attend import make_meetings
from flashdraft.kernels.cuda.attention.few_rows import MAX_MEETINGS
from flashdraft.kernels.cuda.attention.many_rows import (
    ManyRowsPlan,
    attend_by,
    make_flags,
    plan_alone,
    plan_teams,
)
from flashdraft.kernels.cuda.attention.paged import paged_attention
from flashdraft.kernels.cuda.backend import TritonKernels
from flashdraft.kernels.cuda.driver import Kernel
from flashdraft.kernels.cuda.plan import plan_attention
from flashdraft.kernels.interface import CAUSAL, PagedKeys

ROWS = (2048, 4096)
CONTEXTS = (0, 2048, 8192, 32768, 120_000)
PROMPTS = (8192, 32768, 131_072)
TEAMS = (1, 2)
MAX_DIFFERENCE = 0.02


def count_operations(layer: Layer, context: int, rows: int) -> float:
    """Of products with the keys that rows see, and with their values."""
    seen = sum(min(context + row + 1, layer.window or 1 << 30) for row in range(rows))
    return 4.0 * layer.head_dim * layer.heads * seen


def make_inputs(layer: Layer, sequences: Sequences) -> tuple[Tensor, list[PagedKeys]]:
    """Queries, and keys on as many different pages as no cache holds."""
    count = sum(-(-(context + rows) // PAGE_SIZE) for context, rows in sequences)
    copies = min(4, max(1, num_copies(2 * layer.key_bytes * PAGE_SIZE * count)))
    shape = (count * copies, PAGE_SIZE, layer.kv_heads, layer.head_dim)
    caches = [torch.empty(shape, device=CUDA, dtype=BF16).normal_() for _ in range(2)]
    views = make_views(sequences, count * copies, copies)
    num_rows = sum(rows for _, rows in sequences)
    query = torch.randn(num_rows, layer.heads, layer.head_dim, device=CUDA, dtype=BF16)
    scale = layer.head_dim**-0.5
    return query, [PagedKeys(*caches, view, scale, layer.window, CAUSAL) for view in views]


def make_plans(kernels: TritonKernels, query: Tensor, keys: PagedKeys) -> dict[int, ManyRowsPlan]:
    """By the number of blocks that have a tile together."""
    num_seqs, num_kv_heads = keys.view.context_lens.shape[0], keys.value_cache.shape[2]
    rows, heads, dim = query.shape
    alone = plan_alone(rows, num_seqs, heads, num_kv_heads, dim, kernels._limits)
    assert alone is not None
    return {1: alone, 2: plan_teams(alone, num_seqs)}


def compile_kernels(kernels: TritonKernels) -> None:
    """All at the same time: the compiler does not hold Python up."""
    tasks = []
    for kind in COUNTS:
        query, keys = make_inputs(LAYERS[kind], ((0, 2048),))
        for plan in make_plans(kernels, query, keys[0]).values():
            tasks.append(tuple(make_flags(plan, query, keys[0]).items()))
    with ThreadPoolExecutor(len(tasks)) as pool:
        list(pool.map(_load, tasks))


def _load(flags: tuple[tuple[str, int], ...]) -> None:
    Kernel.load("attention/attend_many.cu", "attend_many", CUDA, *flags)


def measure(
    kernels: TritonKernels, layer: Layer, sequences: Sequences, checks: bool
) -> dict[int, float]:
    """Microseconds of one layer, by the number of blocks to a tile."""
    query, all_keys = make_inputs(layer, sequences)
    meetings = make_meetings(CUDA)[MAX_MEETINGS:]
    plans = make_plans(kernels, query, all_keys[0])
    results = [attend_by(plan, query, all_keys[0], meetings) for plan in plans.values()]
    if checks:
        plan = plan_attention(query, all_keys[0], kernels._limits)
        results.append(paged_attention(query, all_keys[0], plan))
    for result in results:
        worst = (result - results[0]).abs().max() / results[0].abs().max()
        assert worst < MAX_DIFFERENCE, f"{sequences}: ways differ by {worst:.3f}"
    return {
        team: graph_microseconds(
            [partial(attend_by, plan, query, keys, meetings) for keys in all_keys]
        )
        for team, plan in plans.items()
    }


def measure_chunks(kernels: TritonKernels) -> dict[str, Any]:
    """Of each kind of layer, size of chunks and number of blocks to a tile: by context."""
    found: dict[str, Any] = {}
    for kind in COUNTS:
        layer = LAYERS[kind]
        for rows in ROWS:
            for context in CONTEXTS if layer.window is None else CONTEXTS[:2]:
                times = measure(kernels, layer, ((context, rows),), checks=context <= 2048)
                operations = count_operations(layer, context, rows)
                for team, us in times.items():
                    here = found.setdefault(f"{kind}, {rows} rows, {team} to a tile", {})
                    speed = operations / us / 1e6
                    here[str(context)] = {"us": round(us, 1), "TFLOP/s": round(speed)}
                told = ", ".join(
                    f"{team} to a tile {us:9.1f} us {operations / us / 1e6:4.0f} TFLOP/s"
                    for team, us in times.items()
                )
                print(f"{kind:12} {rows} rows behind {context:6}: {told}", flush=True)
                torch.cuda.empty_cache()
    return found


def between(measured: dict[str, dict[str, float]], context: int) -> float:
    """Microseconds behind a context, along the line between those measured."""
    points = sorted((int(key), value["us"]) for key, value in measured.items())
    if context >= points[-1][0] and points[-1][0] <= 2048:
        return points[-1][1]  # a window sees no more
    upper = next((i for i in range(1, len(points)) if points[i][0] >= context), len(points) - 1)
    (x0, y0), (x1, y1) = points[upper - 1], points[upper]
    return y0 + (y1 - y0) * (context - x0) / (x1 - x0)


def add_up(chunks: dict[str, Any], linears: dict[str, float]) -> dict[str, Any]:
    """Seconds of a prompt's linears and attention, by its length, chunks and blocks to a tile."""
    found: dict[str, Any] = {}
    for rows in ROWS:
        for team in TEAMS:
            for length in PROMPTS:
                contexts = range(0, length, rows)
                parts = {"linears": linears[str(rows)] * len(contexts) / 1e3}
                for kind, count in COUNTS.items():
                    by_context = chunks[f"{kind}, {rows} rows, {team} to a tile"]
                    microseconds = sum(between(by_context, context) for context in contexts)
                    parts[kind] = count * microseconds / 1e6
                parts = {name: round(seconds, 2) for name, seconds in parts.items()}
                name = f"{length} tokens, chunks of {rows}, {team} to a tile"
                found[name] = parts | {"together": round(sum(parts.values()), 2)}
                print(f"{name}: {found[name]} s", flush=True)
    return found


def measure_passes(kernels: TritonKernels) -> dict[str, Any]:
    """Full layers in passes of h200_pass.py, which has them by the rule's plan."""
    found = {}
    for name, (few, prompts) in PASSES.items():
        times = measure(kernels, LAYERS["31B full"], (*few, *prompts), checks=False)
        found[name] = {f"{team} to a tile": round(us, 1) for team, us in times.items()}
        print(f"31B full, {name}: us {found[name]}", flush=True)
    return found


def main(arguments: Sequence[str]) -> None:
    """Print, and write where a file is named."""
    torch.manual_seed(0)
    kernels = TritonKernels(CUDA, BF16)
    compile_kernels(kernels)
    chunks = measure_chunks(kernels)
    passes = measure_passes(kernels)
    linears = measure_linears(kernels, ROWS)
    results = {
        "model": "Gemma 4 31B, random weights and keys",
        "environment": describe_environment("benchmarks.h200_chunks", CUDA),
        "chunks": chunks,
        "passes, us of a full layer": passes,
        "linears, ms by rows": linears,
        "prompts, seconds of linears and attention": add_up(chunks, linears),
    }
    if arguments:
        Path(arguments[0]).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main(sys.argv[1:])
