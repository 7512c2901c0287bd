"""Sweeps of paged attention over its plans, at the shapes of Gemma 4 and of its drafters.

Run through benchmarks/h200_kernels.py. The rule's plan is checked against float32 where that is
affordable, every other plan against the rule's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.h200_timing import (
    BANDWIDTH,
    Deadline,
    compile_in_parallel,
    graph_microseconds,
    is_refusal,
    num_copies,
)
from flashdraft.kernels.cuda.attention.paged import paged_attention
from flashdraft.kernels.cuda.card import read_limits
from flashdraft.kernels.cuda.plan import (
    MAX_SPLITS,
    AttentionPlan,
    plan_attention,
    plan_exact_attention,
)
from flashdraft.kernels.interface import BIDIRECTIONAL, CAUSAL, BlockMask, PagedKeys, PageView
from flashdraft.kernels.torch_backend import TorchKernels

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
PAGE_SIZE = 16
POOL_BYTES = 40 << 30  # of keys; values take as much again
REFERENCE_KEYS = 40_000
BATCHES = ((1, 16), (1, 1), (8, 4), (8, 1), (32, 4), (32, 1))  # sequences, rows of each
DRAFT_BATCHES = ((1, 16), (8, 16), (32, 16))
CONTEXTS = (1024, 256, 8192, 32768, 131072)
# head size: (block_m, block_n, warps, stages)
TILES = {
    128: [
        (16, 64, 4, 3),
        (16, 128, 4, 3),
        (64, 64, 4, 3),
        (64, 128, 4, 3),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
    ],
    256: [
        (16, 32, 4, 3),
        (16, 64, 4, 3),
        (32, 32, 4, 3),
        (32, 64, 4, 3),
        (64, 32, 4, 3),
        (64, 64, 4, 2),
        (64, 64, 8, 2),
        (128, 64, 8, 2),
    ],
    512: [
        (16, 32, 4, 3),
        (16, 32, 8, 3),
        (16, 64, 8, 3),
        (32, 32, 8, 3),
        (64, 32, 8, 3),
        (64, 32, 8, 2),
        (64, 64, 8, 2),
        (128, 32, 8, 2),
    ],
}


@dataclass(frozen=True)
class Layer:
    """One kind of attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    drafts: bool = False

    @property
    def mask(self) -> BlockMask:
        """A drafter's block sees itself whole."""
        return BIDIRECTIONAL if self.drafts else CAUSAL

    @property
    def key_bytes(self) -> int:
        """Of one token's keys; its values take as much again."""
        return self.kv_heads * self.head_dim * 2


LAYERS = {
    "31B sliding": Layer(32, 16, 256, 1024),
    "31B full": Layer(32, 4, 512),
    "26B sliding": Layer(16, 8, 256, 1024),
    "26B full": Layer(16, 2, 512),
    "drafter 64/8 sliding": Layer(64, 8, 128, 2048, drafts=True),
    "drafter 64/8 full": Layer(64, 8, 128, drafts=True),
    "drafter 32/8 sliding": Layer(32, 8, 128, 2048, drafts=True),
    "drafter 32/8 full": Layer(32, 8, 128, drafts=True),
}
PREFILL = ((2048, 0), (2048, 6144))


@dataclass(frozen=True)
class Batch:
    """Queries and pages; several views of other pages, so that the cache never helps."""

    layer: Layer
    query: Tensor
    keys: Tensor
    values: Tensor
    views: list[PageView]

    def attend(self, plan: AttentionPlan, view: PageView) -> Tensor:
        """One call under a plan."""
        return paged_attention(
            self.query,
            PagedKeys(
                self.keys,
                self.values,
                view,
                scale=self.layer.head_dim**-0.5,
                window=self.layer.window,
                mask=self.layer.mask,
            ),
            plan,
        )


def make_batch(layer: Layer, num_seqs: int, rows: int, context: int, copies: int) -> Batch:
    """Random keys; every view has its own pages, and stale ones behind the window."""
    length = context + rows
    first = 0 if layer.window is None else max(0, context - layer.window + 1) // PAGE_SIZE
    num_pages = -(-length // PAGE_SIZE)
    real = num_seqs * (num_pages - first)
    shape = (copies * real, PAGE_SIZE, layer.kv_heads, layer.head_dim)
    keys, values = (torch.empty(shape, device=CUDA, dtype=BF16).normal_() for _ in range(2))
    order = torch.randperm(copies * real, device=CUDA, dtype=torch.int32)
    views = []
    for own in order.view(copies, num_seqs, -1):
        table = torch.zeros(num_seqs, num_pages, device=CUDA, dtype=torch.int32)
        table[:, first:] = own
        starts = torch.arange(num_seqs + 1, device=CUDA, dtype=torch.int32) * rows
        lens = torch.full((num_seqs,), context, device=CUDA, dtype=torch.int32)
        views.append(PageView(starts, lens, table, starts, PAGE_SIZE, rows, length))
    query = torch.randn(num_seqs * rows, layer.heads, layer.head_dim, device=CUDA, dtype=BF16)
    return Batch(layer, query, keys, values, views)


def seen_keys(layer: Layer, rows: int, context: int) -> int:
    """How many keys of a sequence some row sees."""
    return context + rows if layer.window is None else min(context, layer.window - 1) + rows


def candidates(layer: Layer, num_seqs: int, rows: int, context: int) -> Iterator[AttentionPlan]:
    """Tiles near the number of pairs, with splits for one, two and four programs a processor."""
    pairs = rows * (layer.heads // layer.kv_heads)
    num_keys = seen_keys(layer, rows, context)
    for block_m, block_n, warps, stages in TILES[layer.head_dim]:
        if block_m > 16 and block_m >= 2 * pairs or block_m < min(64, pairs // 8):
            continue
        plan = AttentionPlan(block_m, block_n, warps, stages)
        programs = num_seqs * -(-pairs // block_m) * layer.kv_heads
        for aim in (1, 2, 4):
            splits = min(132 * aim // programs, num_keys // 64, MAX_SPLITS)
            least = max(64, block_n)
            if splits > 1:
                yield plan._replace(num_splits=splits, split_keys=least, spread=True)
            elif aim == 1 or num_keys <= 256:
                yield plan


def rule_plans(layer: Layer, num_seqs: int, rows: int, context: int) -> list[AttentionPlan]:
    """What the backend would use, and what it would with `exact`."""
    query = torch.empty(num_seqs * rows, layer.heads, layer.head_dim, device="meta", dtype=BF16)
    cache = torch.empty(1, PAGE_SIZE, layer.kv_heads, layer.head_dim, device="meta", dtype=BF16)
    lens = torch.empty(num_seqs, device="meta", dtype=torch.int32)
    view = PageView(lens, lens, lens, lens, PAGE_SIZE, rows, context + rows)
    limits = read_limits(CUDA)
    keys = PagedKeys(cache, cache, view, 1.0, layer.window, layer.mask)
    return [make_plan(query, keys, limits) for make_plan in (plan_attention, plan_exact_attention)]


def all_plans(layer: Layer, num_seqs: int, rows: int, context: int) -> list[AttentionPlan]:
    """The rules' plans, then the candidates."""
    case = (layer, num_seqs, rows, context)
    return list(dict.fromkeys([*rule_plans(*case), *candidates(*case)]))


def cases() -> Iterator[tuple[str, int, int, int]]:
    """(layer, sequences, rows, context), the target's layers at verify and decode sizes first."""
    for context in CONTEXTS:
        for name, layer in LAYERS.items():
            if layer.window is not None and context > 8192:
                continue  # the same keys as at 8192
            for num_seqs, rows in DRAFT_BATCHES if layer.drafts else BATCHES:
                if num_seqs * seen_keys(layer, rows, context) * layer.key_bytes <= POOL_BYTES:
                    yield name, num_seqs, rows, context
    for name, layer in LAYERS.items():
        if not layer.drafts:
            yield from ((name, 1, rows, context) for rows, context in PREFILL)


def launch_small(task: tuple[str, AttentionPlan]) -> None:
    """Compile one plan by a launch on a small batch."""
    name, plan = task
    batch = make_batch(LAYERS[name], 2, 4, 64, 1)
    batch.attend(plan, batch.views[0])
    torch.cuda.synchronize()


def compile_attention() -> float:
    """Compile what `sweep_attention` will launch; in seconds."""
    tasks = {
        (name, plan._replace(num_splits=min(2, plan.num_splits)))
        for name, num_seqs, rows, context in cases()
        for plan in all_plans(LAYERS[name], num_seqs, rows, context)
    }
    return compile_in_parallel(launch_small, sorted(tasks))


def sweep_attention(deadline: Deadline) -> list[dict[str, Any]]:
    """The best plans of every layer and batch, beside the rule's and the exact one's."""
    results = []
    for name, num_seqs, rows, context in cases():
        if deadline.passed():
            break
        results.append(sweep_case(name, num_seqs, rows, context))
    return results


def sweep_case(name: str, num_seqs: int, rows: int, context: int) -> dict[str, Any]:
    """All candidates of one case."""
    layer = LAYERS[name]
    num_keys = num_seqs * seen_keys(layer, rows, context)
    copies = min(num_copies(2 * num_keys * layer.key_bytes), 64)
    batch = make_batch(layer, num_seqs, rows, context, copies)
    rules = rule_plans(layer, num_seqs, rows, context)
    expected, checked = batch.attend(rules[0], batch.views[0]), False
    if num_keys <= REFERENCE_KEYS and rows < 2048:
        expected, checked = reference(batch), True
    entries = []
    for plan in all_plans(layer, num_seqs, rows, context):
        try:
            found = batch.attend(plan, batch.views[0])
            error = float((found.float() - expected.float()).norm() / expected.float().norm())
            calls = [partial(batch.attend, plan, view) for view in batch.views]
            us = round(graph_microseconds(calls), 2)
        except Exception as refusal:
            if not is_refusal(refusal):
                raise
            continue
        if not error < 1e-2:
            print(f"  WRONG: {plan} is off by {error:.1e}")
        entries.append({"plan": list(plan), "us": us, "error": error})
    num_bytes = 2 * num_keys * layer.key_bytes + 4 * batch.query.numel()
    pairs = math.fsum(seen_keys(layer, 1, context + i) for i in range(rows)) * num_seqs
    found_rules = [next((e for e in entries if e["plan"] == list(p)), None) for p in rules]
    return describe(
        name, (num_seqs, rows, context), num_bytes, pairs, checked, found_rules, entries
    )


def reference(batch: Batch) -> Tensor:
    """The torch backend's result in float32."""
    layer = batch.layer
    return TorchKernels(CUDA, torch.float32).attention(
        batch.query.float(),
        PagedKeys(
            batch.keys.float(),
            batch.values.float(),
            batch.views[0],
            scale=layer.head_dim**-0.5,
            window=layer.window,
            mask=layer.mask,
        ),
    )


def describe(
    name: str,
    case: tuple[int, int, int],
    num_bytes: int,
    pairs: float,
    checked: bool,
    rules: list[dict[str, Any] | None],
    entries: list[dict[str, Any]],
) -> dict[str, Any]:
    """One result, printed as one line."""
    floor = num_bytes / BANDWIDTH * 1e6
    layer = LAYERS[name]
    best = min(entries, key=lambda e: float(e["us"]))
    said = [f"{e['us']:8.1f} {tuple(e['plan'][:6])}" if e else "refused" for e in rules]
    operations = 4 * pairs * layer.heads * layer.head_dim
    print(
        f"{name:21} {case[0]:>2} x {case[1]:<4} at {case[2]:<6} floor {floor:7.1f}"
        f"  rule {said[0]}  exact {said[1]}"
        f"  best {best['us']:8.1f} ({floor / best['us']:4.0%}, "
        f"{operations / best['us'] / 1e6:.0f} TF) {tuple(best['plan'][:6])}",
        flush=True,
    )
    return {
        "layer": name,
        "sequences": case[0],
        "rows": case[1],
        "context": case[2],
        "floor_us": round(floor, 2),
        "operations": operations,
        "checked_in_float32": checked,
        "rule": rules[0],
        "exact": rules[1],
        "plans": sorted(entries, key=lambda e: e["us"])[:4],
    }
