"""What a pass of Gemma 4 31B with prompts is made of: python -m benchmarks.h200_pass [FILE.json]

Linears by rows, and attention of passes in which some requests decode and prompts ride, by the one
launch of attend_many.cu and by Triton's in turn. Random weights and keys. Times are of graph
replays, over weights and pages that are not in the cache.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.accepted_length import describe_environment
from benchmarks.h200_attention import BF16, CUDA, LAYERS, PAGE_SIZE, Layer
from benchmarks.h200_timing import BANDWIDTH, graph_microseconds, num_copies
from flashdraft.kernels.cuda.attention.attend import make_meetings
from flashdraft.kernels.cuda.attention.few_rows import MAX_MEETINGS
from flashdraft.kernels.cuda.attention.many_rows import attend_many
from flashdraft.kernels.cuda.attention.paged import paged_attention
from flashdraft.kernels.cuda.backend import TritonKernels
from flashdraft.kernels.cuda.plan import plan_attention
from flashdraft.kernels.interface import CAUSAL, PagedKeys, PageView

ROWS = (32, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024)
# columns, depth, how many there are
LINEARS = {
    "qkv, sliding": (16384, 5376, 50),
    "qkv, full": (18432, 5376, 10),
    "output, sliding": (5376, 8192, 50),
    "output, full": (5376, 16384, 10),
    "gate and up": (43008, 5376, 60),
    "down": (5376, 21504, 60),
}
Sequences = tuple[tuple[int, int], ...]  # of each: tokens before its rows, rows


COUNTS = {"31B sliding": 50, "31B full": 10}  # of layers
_random = random.Random(0)
EIGHT: Sequences = tuple((_random.randint(400, 1900), 16) for _ in range(8))
MANY: Sequences = tuple((_random.randint(400, 1900), 8) for _ in range(32))
ONE_EACH: Sequences = tuple((context, 1) for context, _ in MANY)
PASSES: dict[str, tuple[Sequences, Sequences]] = {
    "8 of 16": (EIGHT, ()),
    "8 of 16, 128 behind 300": (EIGHT, ((300, 128),)),
    "8 of 16, 384": (EIGHT, ((0, 384),)),
    "8 of 16, 384 behind 300": (EIGHT, ((300, 384),)),
    "8 of 16, 384 behind 900": (EIGHT, ((900, 384),)),
    "8 of 16, 896": (EIGHT, ((0, 896),)),
    "32 of 8": (MANY, ()),
    "32 of 8, 256 behind 300": (MANY, ((300, 256),)),
    "32 of 1": (ONE_EACH, ()),
    "32 of 1, 224 behind 300": (ONE_EACH, ((300, 224),)),
    "2048": ((), ((0, 2048),)),
    "2048 behind 2048": ((), ((2048, 2048),)),
}


def measure_linears(kernels: TritonKernels, sizes: tuple[int, ...] = ROWS) -> dict[str, Any]:
    """Milliseconds of all linears of a pass but the head, by rows."""
    found = {}
    for rows in sizes:
        total = 0.0
        for columns, depth, count in LINEARS.values():
            x = torch.randn(rows, depth, device=CUDA, dtype=BF16)
            copies = num_copies(2 * columns * depth)
            weights = [torch.randn(columns, depth, device=CUDA, dtype=BF16) for _ in range(copies)]
            total += count * graph_microseconds([partial(kernels.linear, x, w) for w in weights])
        found[str(rows)] = round(total / 1e3, 2)
        print(f"linears of {rows} rows: {total / 1e3:.2f} ms", flush=True)
    return found


def make_views(sequences: Sequences, num_pages: int, copies: int) -> list[PageView]:
    """As many views over other pages."""
    counts = [-(-(context + rows) // PAGE_SIZE) for context, rows in sequences]
    starts = torch.tensor([0, *(rows for _, rows in sequences)]).cumsum(0).int().to(CUDA)
    contexts = torch.tensor([context for context, _ in sequences], dtype=torch.int32, device=CUDA)
    views = []
    for _ in range(copies):
        free = torch.randperm(num_pages, dtype=torch.int32)
        table = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
        for s, count in enumerate(counts):
            table[s, :count], free = free[:count], free[count:]
        most = max(rows for _, rows in sequences), max(c + rows for c, rows in sequences)
        views.append(PageView(starts, contexts, table.to(CUDA), starts, PAGE_SIZE, *most))
    return views


def split_view(view: PageView, num_few: int) -> PageView:
    """The same with those who decode and prompts as its parts."""
    few = replace(
        view,
        query_start=view.query_start[: num_few + 1],
        context_lens=view.context_lens[:num_few],
        block_table=view.block_table[:num_few],
        max_query_len=16,
    )
    rest = replace(
        view,
        query_start=view.query_start[num_few:],
        context_lens=view.context_lens[num_few:],
        block_table=view.block_table[num_few:],
    )
    return replace(view, parts=(few, rest))


def attend_in_turn(kernels: TritonKernels, query: Tensor, keys: PagedKeys) -> Tensor:
    """Triton's kernel for each part."""
    output = torch.empty(query.shape[0], query.shape[1] * query.shape[2], device=CUDA, dtype=BF16)
    for view in keys.view.parts or (keys.view,):
        part = replace(keys, view=view)
        paged_attention(query, part, plan_attention(query, part, kernels._limits), output)
    return output


def measure_attention(kernels: TritonKernels, layer: Layer, name: str) -> dict[str, float]:
    """Microseconds of one layer in a pass, by both ways, and what reading its keys takes."""
    few, prompts = PASSES[name]
    sequences = (*few, *prompts)
    num_pages = 4 * sum(-(-(context + rows) // PAGE_SIZE) for context, rows in sequences)
    shape = (num_pages, PAGE_SIZE, layer.kv_heads, layer.head_dim)
    caches = [torch.randn(shape, device=CUDA, dtype=BF16) for _ in range(2)]
    seen = [min(context, (layer.window or context + 1) - 1) + rows for context, rows in sequences]
    num_bytes = 2 * layer.key_bytes * sum(seen)  # values too
    views = make_views(sequences, num_pages, min(8, max(2, num_copies(num_bytes))))
    if few and prompts:
        views = [split_view(view, len(few)) for view in views]
    num_rows = sum(rows for _, rows in sequences)
    query = torch.randn(num_rows, layer.heads, layer.head_dim, device=CUDA, dtype=BF16)
    scale = layer.head_dim**-0.5
    all_keys = [PagedKeys(*caches, view, scale, layer.window, CAUSAL) for view in views]
    meetings = make_meetings(CUDA)[MAX_MEETINGS:]
    ways: dict[str, Callable[[PagedKeys], Tensor | None]] = {
        "one launch": lambda keys: attend_many(query, keys, meetings, kernels._limits),
        "in turn": lambda keys: attend_in_turn(kernels, query, keys),
    }
    results = [way(all_keys[0]) for way in ways.values()]
    assert results[0] is not None and results[1] is not None
    worst = (results[0] - results[1]).abs().max() / results[1].abs().max()
    assert worst < 0.02, f"the two ways differ by {worst:.3f}"
    found = {
        way: round(graph_microseconds([partial(call, keys) for keys in all_keys]), 1)
        for way, call in ways.items()
    }
    return found | {"floor of reading": round(1e6 * num_bytes / BANDWIDTH, 1)}


def main(arguments: list[str]) -> None:
    """Print, and write where a file is named."""
    torch.manual_seed(0)
    kernels = TritonKernels(CUDA, BF16)
    results: dict[str, Any] = {
        "model": "Gemma 4 31B, random weights and keys",
        "environment": describe_environment("benchmarks.h200_pass", CUDA),
        "linears, ms by rows": measure_linears(kernels),
    }
    torch.cuda.empty_cache()
    for name in PASSES:
        layers = {kind: measure_attention(kernels, LAYERS[kind], name) for kind in COUNTS}
        ms = {
            way: round(sum(layers[kind][way] * COUNTS[kind] for kind in COUNTS) / 1e3, 2)
            for way in ("one launch", "in turn", "floor of reading")
        }
        results.setdefault("attention", {})[name] = {"us a layer": layers, "ms a pass": ms}
        print(f"attention, {name}: {layers} ms a pass: {ms}", flush=True)
        torch.cuda.empty_cache()
    if arguments:
        Path(arguments[0]).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main(sys.argv[1:])
