"""Linears of Gemma 4 31B with 17 to 512 rows over weights in few bits, every way there is.

    python -m benchmarks.h200_quantized_rows [--rows 32,128] [--formats int4,fp8,int8,bf16]
        [--only 31B] [--shapes 128x1x12,256x1x12] [--seconds 90] [--output FILE.json]

A line is a linear with so many rows in one format: microseconds by cuBLAS over bfloat16 (bf16), by
what the backend does (chosen), by a bfloat16 copy that is made for the moment (copy), by Triton,
and by many_rows.cu with tiles of every shape (rows x tiles x warps), the best of them first. Then
come milliseconds of all linears of a pass. Times are of graph replays over weights that are not in
the cache. Each result is compared with that of the bfloat16 copy before it is timed.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.accepted_length import describe_environment
from benchmarks.h200_linear import error_of
from benchmarks.h200_timing import Deadline, compile_in_parallel, graph_microseconds, num_copies
from benchmarks.tune_quantized import random_weight
from flashdraft.kernels.cuda.backend import MAX_TILES
from flashdraft.kernels.cuda.card import read_limits
from flashdraft.kernels.cuda.dense.rows import gate_rows
from flashdraft.kernels.cuda.quantized import many_rows
from flashdraft.kernels.cuda.quantized.few_rows_plan import Product, describe_product
from flashdraft.kernels.cuda.quantized.layout import PackedWeight
from flashdraft.kernels.cuda.quantized.linear import (
    dequantize,
    multiply_quantized,
    plan_quantized,
)
from flashdraft.kernels.cuda.quantized.many_rows_plan import SHAPES, ManyPlan, make_plan
from flashdraft.kernels.cuda.quantized_backend import multiply
from flashdraft.kernels.kinds import Activation, Scheme

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
ROWS = (17, 32, 48, 64, 96, 128, 192, 256, 384, 512)
LINEARS = {  # columns, depth, how many a pass has; those of a name's first word make a total
    "31B qkv, sliding": (16384, 5376, 50),
    "31B qkv, full": (18432, 5376, 10),
    "31B output, sliding": (5376, 8192, 50),
    "31B output, full": (5376, 16384, 10),
    "31B gate and up": (43008, 5376, 60),
    "31B down": (5376, 21504, 60),
    "26B qkv, sliding": (8192, 2816, 25),
    "26B output, sliding": (2816, 4096, 25),
    "26B gate and up": (4224, 2816, 30),
    "26B down": (2816, 2112, 30),
}
LARGEST_ERROR = 1e-2  # from the product of the bfloat16 copy, over its norm
MAX_TRITON_ROWS = 128  # more would take all the time
Shape = tuple[int, int, int]
Way = Callable[[Tensor, PackedWeight], Tensor]


class Ways:
    """Every way to multiply, over one weight and its copies; or over a small one like it."""

    def __init__(self, name: str, scheme: Scheme, is_small: bool = False) -> None:
        columns, self.depth, _ = LINEARS[name]
        self.activation = Activation.GELU_TANH if "gate" in name else None
        first = random_weight((512 if is_small else columns, self.depth), scheme, CUDA)
        copies = 1 if is_small else num_copies(first.num_bytes)
        self.weights = [copy.deepcopy(first) for _ in range(copies)]
        self.arrivals = torch.zeros(MAX_TILES, device=CUDA, dtype=torch.int32)
        self.limits = read_limits(CUDA)
        product = describe_product(first, self.activation is not None)
        assert product is not None
        self.product: Product = product

    def by_backend(self, x: Tensor, weight: PackedWeight) -> Tensor:
        return multiply(x, weight, self.arrivals, self.limits, False, self.activation)

    def by_copy(self, x: Tensor, weight: PackedWeight) -> Tensor:
        output = F.linear(x, dequantize(weight, BF16))
        return output if self.activation is None else gate_rows(output, self.activation)

    def by_triton(self, x: Tensor, weight: PackedWeight) -> Tensor:
        gated = self.activation is not None
        plan = plan_quantized(len(x), weight, self.limits.num_processors, gated=gated)
        return multiply_quantized(x, weight, plan, self.arrivals, self.activation)

    def by_plan(self, plan: ManyPlan, x: Tensor, weight: PackedWeight) -> Tensor:
        return many_rows.launch(x, weight, self.product, plan, self.arrivals, self.activation)

    def all_of(self, num_rows: int, shapes: Sequence[Shape]) -> dict[str, Way]:
        """By name; tiles that are less than half full, or small beside the rows, are left out."""
        ways: dict[str, Way] = {"chosen": self.by_backend, "copy": self.by_copy}
        if num_rows <= MAX_TRITON_ROWS:
            ways["triton"] = self.by_triton
        for shape in shapes:
            plan = make_plan(shape, num_rows, self.product, self.limits)
            filled = -(-num_rows // shape[0]) * shape[0]
            is_small = num_rows > 2 * shape[0] and shape[0] < 128
            if plan is not None and filled < 1.5 * num_rows + 16 and not is_small:
                ways["x".join(map(str, shape))] = partial(self.by_plan, plan)
        return ways

    def measure(self, num_rows: int, shapes: Sequence[Shape]) -> dict[str, float]:
        """Microseconds; what is wrong has none."""
        x = torch.randn(num_rows, self.depth, device=CUDA, dtype=BF16)
        expected, found = self.by_copy(x, self.weights[0]).float(), {}
        for name, way in self.all_of(num_rows, shapes).items():
            error = error_of(expected, way(x, self.weights[0]))
            if error > LARGEST_ERROR:
                print(f"  WRONG: {name} is off by {error:.1e}")
                continue
            calls = [partial(way, x, weight) for weight in self.weights]
            found[name] = round(graph_microseconds(calls), 1)
        assert not self.arrivals.any(), "counters were left behind"
        return found


def measure_floats(name: str, num_rows: int, weights: list[Tensor]) -> dict[str, float]:
    """cuBLAS over weights in bfloat16."""
    x = torch.randn(num_rows, weights[0].shape[1], device=CUDA, dtype=BF16)
    calls: list[Callable[[], Tensor]] = [partial(F.linear, x, weight) for weight in weights]
    if "gate" in name:
        calls = [
            lambda weight=weight: gate_rows(F.linear(x, weight), Activation.GELU_TANH)
            for weight in weights
        ]
    return {"bf16": round(graph_microseconds(calls), 1)}


def compile_one(task: tuple[str, str, Shape | None]) -> None:
    """Into the cache on disk: one kernel of many_rows.cu, or the others."""
    name, scheme, shape = task
    ways = Ways(name, Scheme(scheme), is_small=True)
    x = torch.zeros(shape[0] if shape else 32, ways.depth, device=CUDA, dtype=BF16)
    if shape is None:
        ways.by_copy(x, ways.weights[0])
        ways.by_triton(x, ways.weights[0])
    elif (plan := make_plan(shape, len(x), ways.product, ways.limits)) is not None:
        ways.by_plan(plan, x, ways.weights[0])
    torch.cuda.synchronize()


def tell(format_: str, name: str, num_rows: int, found: dict[str, float]) -> None:
    """One line: what is not many_rows.cu first, then its shapes by their time."""
    shapes = {way: us for way, us in found.items() if "x" in way}
    others = [f"{way} {us:7.1f}" for way, us in found.items() if way not in shapes]
    ranked = [f"{way} {us:.1f}" for way, us in sorted(shapes.items(), key=lambda one: one[1])]
    print(
        f"{format_:5}{num_rows:4} {name:20} {'  '.join(others)} | {'  '.join(ranked)}", flush=True
    )


def total(results: dict[str, Any], formats: list[str], rows: list[int]) -> dict[str, Any]:
    """Milliseconds of a pass of 31B: by way, and by the best way for each linear."""
    totals: dict[str, Any] = {}
    names = [name for name in LINEARS if name.startswith("31B")]
    print("\nms of a pass of 31B")
    for format_ in formats:
        for num_rows in rows:
            lines = [results.get(f"{format_} {num_rows} {name}") for name in names]
            if not all(lines):
                continue
            here = [
                (LINEARS[name][2], line) for name, line in zip(names, lines, strict=True) if line
            ]
            ways = [way for way in here[0][1] if all(way in line for _, line in here)]
            sums = {way: sum(n * line[way] for n, line in here) / 1e3 for way in ways}
            sums["best"] = sum(n * min(line.values()) for n, line in here) / 1e3
            totals[f"{format_} {num_rows}"] = {way: round(ms, 2) for way, ms in sums.items()}
            told = "  ".join(f"{way} {ms:.2f}" for way, ms in sums.items())
            print(f"{format_:5}{num_rows:4}  {told}")
    return totals


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Linears in few bits with many rows.")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--formats", default="bf16,int4,fp8,int8")
    parser.add_argument("--only", default="31B", help="names that hold one of these words, a,b,…")
    parser.add_argument("--shapes", default=",".join(map(_name, SHAPES)), help="of tiles")
    parser.add_argument("--seconds", type=float, default=90.0, help="of timing")
    parser.add_argument("--output", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    torch.manual_seed(0)
    rows, formats = [int(count) for count in options.rows.split(",")], options.formats.split(",")
    shapes = [shape for shape in SHAPES if _name(shape) in options.shapes.split(",")]
    names = [n for n in LINEARS if any(word in n for word in options.only.split(","))]
    few = [format_ for format_ in formats if format_ != "bf16"]
    # Kernels depend on the format, the gate and the shape alone.
    kinds = {("gate" in name): name for name in reversed(names)}.values()
    tasks = [(name, f, shape) for f in few for name in kinds for shape in (None, *shapes)]
    begin = time.monotonic()
    compile_in_parallel(compile_one, tasks)
    print(f"# compiled in {time.monotonic() - begin:.0f} s", flush=True)
    deadline, results = Deadline(options.seconds), dict[str, Any]()
    for format_ in formats:
        for name in names:
            columns, depth, _ = LINEARS[name]
            if format_ == "bf16":
                copies = num_copies(2 * columns * depth)
                floats = [torch.randn(columns, depth, device=CUDA).to(BF16) for _ in range(copies)]
                measure = partial(measure_floats, name, weights=floats)
            else:
                ways = Ways(name, Scheme(format_))
                measure = partial(ways.measure, shapes=shapes)
            for num_rows in rows:
                if deadline.passed():
                    print(f"# stopped after {options.seconds:g} s")
                    break
                found = measure(num_rows=num_rows)
                results[f"{format_} {num_rows} {name}"] = found
                tell(format_, name, num_rows, found)
    totals = total(results, formats, rows)
    if options.output:
        environment = describe_environment("benchmarks.h200_quantized_rows", CUDA)
        document = {"environment": environment, "us": results, "ms of a pass of 31B": totals}
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _name(shape: Shape) -> str:
    return "x".join(map(str, shape))


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
