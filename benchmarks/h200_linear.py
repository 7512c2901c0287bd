"""A sweep of the skinny linear over its plans, against torch's own.

Run through benchmarks/h200_kernels.py. Every plan that is timed is also checked against float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.h200_timing import (
    BANDWIDTH,
    Deadline,
    compile_in_parallel,
    graph_microseconds,
    is_refusal,
    num_copies,
)
from flashdraft.kernels.cuda.backend import MAX_TILES
from flashdraft.kernels.cuda.card import read_limits
from flashdraft.kernels.cuda.dense.linear import multiply_rows
from flashdraft.kernels.cuda.plan import LinearPlan, plan_exact_linear

CUDA = torch.device("cuda")
ROWS = (16, 32, 64, 128, 192, 256, 1, 8)  # 1 and 8 try the plans that won at 16
SHAPES = {  # name: (out, in)
    "31B o, sliding": (5376, 8192),
    "31B o, full": (5376, 16384),
    "31B down": (5376, 21504),
    "26B qkv, sliding": (8192, 2816),
    "26B qkv, full": (9216, 2816),
    "26B o, sliding": (2816, 4096),
    "26B o, full": (2816, 8192),
    "26B gate_up": (4224, 2816),
    "26B down": (2816, 2112),
    "26B router": (128, 2816),
    "31B qkv, sliding": (16384, 5376),
    "31B qkv, full": (18432, 5376),
    "31B gate_up": (43008, 5376),
}
# (block_n, block_k, warps, stages, swap)
FEW_ROWS = [
    (16, 256, 4, 4, False),
    (32, 128, 4, 5, False),
    (32, 256, 4, 4, False),
    (64, 64, 4, 6, False),
    (64, 128, 4, 4, False),
    (64, 128, 4, 5, False),
    (128, 64, 4, 5, False),
    (128, 128, 8, 4, False),
    (64, 64, 4, 6, True),
    (64, 128, 4, 4, True),
    (64, 256, 4, 3, True),
    (128, 64, 4, 5, True),
    (128, 128, 8, 3, True),
]
MORE_ROWS = [
    (32, 128, 4, 4, False),
    (64, 64, 4, 5, False),
    (64, 128, 4, 3, False),
    (128, 64, 4, 4, False),
    (128, 128, 8, 3, False),
    (64, 64, 4, 5, True),
    (64, 128, 4, 3, True),
    (128, 64, 4, 4, True),
]
MANY_ROWS = [
    (64, 64, 4, 5, False),
    (64, 128, 4, 3, False),
    (128, 64, 8, 5, False),
    (128, 64, 8, 4, False),
    (128, 64, 4, 4, False),
    (256, 64, 8, 3, False),
    (256, 64, 8, 4, False),
    (128, 128, 8, 3, False),
    (128, 64, 8, 4, True),
]
PROGRAMS = (132, 264, 528)  # how many a split weight aims at


def linear_plans(num_rows: int, num_columns: int, depth: int) -> Iterator[LinearPlan]:
    """Candidates: every tile, with the splits that make about one, two or four programs a core."""
    if num_rows <= 32:
        block_m, tiles_tried = 16 if num_rows <= 16 else 32, FEW_ROWS
    elif num_rows <= 64:
        block_m, tiles_tried = 64, MORE_ROWS
    else:
        block_m, tiles_tried = 128, MANY_ROWS
    for block_n, block_k, warps, stages, swap in tiles_tried:
        if depth % block_k:
            continue
        tiles, steps = -(-num_columns // block_n) * -(-num_rows // block_m), depth // block_k
        wanted = {max(1, min(16, steps // 2, round(programs / tiles))) for programs in PROGRAMS}
        for splits in sorted({-(-steps // -(-steps // w)) for w in wanted}):
            yield LinearPlan(block_m, block_n, block_k, warps, stages, splits, swap)


def exact_plan(num_columns: int, depth: int) -> LinearPlan:
    """What the backend uses with `exact`."""
    return plan_exact_linear(num_columns, depth, 2, read_limits(CUDA))


def launch_small(plan: LinearPlan) -> None:
    """Compile one plan by a launch on a small weight."""
    x = torch.zeros(plan.block_m, 32 * plan.block_k, device=CUDA, dtype=torch.bfloat16)
    weight = torch.zeros(2 * plan.block_n, x.shape[1], device=CUDA, dtype=torch.bfloat16)
    multiply_rows(x, weight, plan, torch.zeros(64, device=CUDA, dtype=torch.int32))
    torch.cuda.synchronize()


def compile_linears() -> float:
    """Compile what `sweep_linears` will launch; in seconds."""
    plans = {
        (plan._replace(num_splits=min(2, plan.num_splits)))
        for out, depth in SHAPES.values()
        for num_rows in ROWS
        for plan in [exact_plan(out, depth), *linear_plans(num_rows, out, depth)]
    }
    return compile_in_parallel(launch_small, sorted(plans))


def sweep_linears(deadline: Deadline) -> list[dict[str, Any]]:
    """The best plans of every shape and number of rows, beside torch's own linear."""
    arrivals = torch.zeros(MAX_TILES, device=CUDA, dtype=torch.int32)
    results: list[dict[str, Any]] = []
    for name, (out, depth) in SHAPES.items():
        if deadline.passed():
            break
        copies = num_copies(out * depth * 2)
        weights = torch.randn(copies, out, depth, device=CUDA, dtype=torch.bfloat16)
        exact = exact_plan(out, depth)
        winners: list[LinearPlan] = []
        for num_rows in ROWS:
            x = torch.randn(num_rows, depth, device=CUDA, dtype=torch.bfloat16)
            expected = x.float() @ weights[0].float().T

            plans = (
                [exact, *winners] if num_rows < 16 else [exact, *linear_plans(num_rows, out, depth)]
            )
            ranked = rank(
                {p: [partial(multiply_rows, x, w, p, arrivals) for w in weights] for p in plans},
                partial(error_of, expected),
            )
            if num_rows == 16:
                winners = [LinearPlan(*entry["plan"]) for entry in ranked["plans"][:2]]
            torch_us = graph_microseconds([partial(F.linear, x, w) for w in weights])
            num_bytes = 2 * (out * depth + num_rows * (out + depth))
            results.append(describe(name, (out, depth), num_rows, num_bytes, torch_us, ranked))
        del weights
    assert int(arrivals.abs().sum()) == 0, "a linear left its counters behind"
    return results


def error_of(expected: Tensor, found: Tensor) -> float:
    """The error's norm over the result's."""
    return float((found.float() - expected).norm() / expected.norm())


def rank(
    calls: dict[LinearPlan, list[Callable[[], Any]]], error: Callable[[Any], float]
) -> dict[str, Any]:
    """Time and check every plan; the first is the exact one."""
    entries: list[dict[str, Any]] = []
    refused = 0
    for plan, repeated in calls.items():
        try:
            wrong = error(repeated[0]())
            us = graph_microseconds(repeated)
        except Exception as refusal:
            if not is_refusal(refusal):
                raise
            refused += 1
            continue
        if not wrong < 1e-2:
            print(f"  WRONG: {plan} is off by {wrong:.1e}")
        entries.append({"plan": list(plan), "us": round(us, 2), "error": wrong})
    best = sorted(entries, key=lambda entry: float(entry["us"]))[:4]
    return {"first": entries[0], "plans": best, "refused": refused}


def describe(
    name: str,
    shape: tuple[int, int],
    num_rows: int,
    num_bytes: int,
    torch_us: float,
    ranked: dict[str, Any],
) -> dict[str, Any]:
    """One result, printed as one line."""
    floor = num_bytes / BANDWIDTH * 1e6
    best = ranked["plans"][0]
    print(
        f"{name:18} M={num_rows:<4} floor {floor:7.1f}"
        f"  torch {torch_us:7.1f} ({floor / torch_us:4.0%})"
        f"  best {best['us']:7.1f} ({floor / best['us']:4.0%}) {tuple(best['plan'])}"
        f"  first {ranked['first']['us']:7.1f}",
        flush=True,
    )
    return {
        "name": name,
        "shape": shape,
        "rows": num_rows,
        "floor_us": round(floor, 2),
        "torch_us": round(torch_us, 2),
        **ranked,
    }
