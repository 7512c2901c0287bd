"""Linears of Gemma 4 31B with rows in 8 bits, against those in bfloat16 and cuBLAS's, on one GPU.

    python -m benchmarks.h200_activations --output FILE.json

A line says what all linears of a pass take, in milliseconds, for a number of rows; of the kernel in
CUDA C++ several tiles are tried, with and without teams, and `best` takes the fastest of each
product. `coded` is what rounding the rows takes besides. Times are of graph replays over copies of
a weight, of which the cache holds none. Every way is checked before it is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import h200_timing as timing
from benchmarks.accepted_length import describe_environment, write_results
from benchmarks.h200_linear import error_of
from flashdraft.kernels.cuda import quantized_backend
from flashdraft.kernels.cuda.backend import MAX_TILES
from flashdraft.kernels.cuda.card import read_limits
from flashdraft.kernels.cuda.driver import Kernel
from flashdraft.kernels.cuda.quantized import activations, coded_rows, fp8_rows
from flashdraft.kernels.cuda.quantized.layout import pack_quantized
from flashdraft.kernels.cuda.quantized.linear import dequantize
from flashdraft.kernels.kinds import Activation, Scheme
from flashdraft.kernels.quantized import code_rows, quantize
from flashdraft.kernels.torch_backend import TorchKernels

CUDA = torch.device("cuda")
ROWS = (16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048)
SHAPES = {  # name: (out, in, how many in a pass)
    "qkv, sliding": (16384, 5376, 50),
    "qkv, full": (18432, 5376, 10),
    "o, sliding": (5376, 8192, 50),
    "o, full": (5376, 16384, 10),
    "gate_up": (43008, 5376, 60),
    "down": (5376, 21504, 60),
}
TILES = (*fp8_rows.TILES, fp8_rows.Tile(128, 1, 1))
TEAMS = (1, 2)
LARGEST_ERROR = 0.01  # of a product, in proportion
DIFFERENT_ROWS = 1024  # of a weight: the rest repeats them
Way = Callable[[int], object]  # by the copy of the weight


class Product:
    """One linear's weight, in copies, and rows for it."""

    def __init__(self, name: str, most_rows: int) -> None:
        out, depth, self.count = SHAPES[name]
        self.activation = Activation.GELU_TANH if name == "gate_up" else None
        few = quantize(torch.randn(DIFFERENT_ROWS, depth, device=CUDA) * depth**-0.5, Scheme.FP8)
        weight = pack_quantized(few.rows(torch.arange(out, device=CUDA) % DIFFERENT_ROWS))
        copies = range(timing.num_copies(weight.num_bytes))
        self.packed = [
            dataclasses.replace(weight, codes=weight.codes.clone() if i else weight.codes)
            for i in copies
        ]
        self.floats = [dequantize(weight, torch.bfloat16) for _ in copies]
        codes = few.codes.view(torch.uint8).repeat(-(-out // DIFFERENT_ROWS), 1)[:out]
        self.codes = [codes.clone().view(torch.float8_e4m3fn) for _ in copies]
        self.scale = weight.scale.values.flatten()[:out].contiguous()
        self.rows = torch.randn(most_rows, depth, device=CUDA).bfloat16()
        self.arrivals = torch.zeros(MAX_TILES, device=CUDA, dtype=torch.int32)
        self.limits = read_limits(CUDA)
        self.shape = out, depth

    def expect(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Of rounded rows the product in float32, and gated where it is."""
        x = activations.round_rows(self.rows[:num_rows], self.packed[0]).float()
        found = x @ dequantize(self.packed[0], torch.float32).T
        if self.activation is None:
            return found, found
        return found, TorchKernels(CUDA, torch.float32).gated(found, self.activation)

    def plans(self, num_rows: int) -> Iterator[tuple[str, fp8_rows.Fp8Plan]]:
        """Every tile that is neither far too large nor far too small."""
        out, gated = self.shape[0], self.activation is not None
        steps = self.packed[0].num_steps
        for tile in TILES:
            if 2 * tile.rows < min(num_rows, 256) or tile.rows >= max(64, 2 * num_rows):
                continue
            for team in TEAMS:
                sizes = num_rows, out // (2 if gated else 1), steps, gated, self.limits
                plan = fp8_rows.plan_fp8(*sizes, tile, team)
                if plan is not None:
                    name = f"{tile.rows}{'' if tile.parts == 2 else 's'}x{team}"
                    yield name, plan

    def ways(self, num_rows: int) -> Iterator[tuple[str, Way, bool]]:
        """Name, what is timed, and whether it is gated as it should be."""
        x, weights = self.rows[:num_rows], self.packed
        for name, plan in self.plans(num_rows):
            coded = activations.code_rows(x, weights[0], plan.tile.rows)
            call = partial(fp8_rows.multiply_fp8, coded, plan=plan, arrivals=self.arrivals)
            call = partial(call, dtype=x.dtype, activation=self.activation)
            yield name, lambda i, call=call: call(weights[i]), True
        coded = activations.code_rows(x, weights[0])
        yield (
            "triton",
            lambda i: coded_rows.multiply_tiles(coded, weights[i], x.dtype, self.activation),
            True,
        )
        rest = self.arrivals, self.limits, False, self.activation
        yield "weights", lambda i: quantized_backend.multiply(x, weights[i], *rest), True
        codes, scale = code_rows(x, Scheme.FP8)
        for fast in (False, True):
            settings = {"out_dtype": x.dtype, "use_fast_accum": fast}
            scales = scale[:, None], self.scale[None]
            yield (
                f"cublas{' fast' if fast else ''}",
                lambda i, settings=settings, scales=scales: torch._scaled_mm(
                    codes, self.codes[i].T, *scales, **settings
                ),
                False,
            )
        yield "bf16", lambda i: torch.mm(x, self.floats[i].T), False

    def code(self, num_rows: int) -> Way:
        """What comes before each of them."""
        return lambda i: activations.code_rows(self.rows[:num_rows], self.packed[i], 256)


def measure(product: Product, num_rows: int) -> dict[str, Any]:
    """Microseconds of every way that is right; of the others why they are not."""
    plain, gated = product.expect(num_rows)
    copies, found = range(len(product.packed)), dict[str, Any]()
    for name, way, is_gated in product.ways(num_rows):
        try:
            error = error_of(gated if is_gated else plain, way(0))
            limit = 0.1 if name == "bf16" else LARGEST_ERROR  # whose rows are not rounded
            if name == "weights":
                limit = 0.1
            found[name] = round(timing.graph_microseconds([partial(way, i) for i in copies]), 2)
            if not error < limit:
                found[name] = f"is off by {error:.2g}"
        except RuntimeError as refusal:
            found[name] = str(refusal).splitlines()[0][:80]
    code = product.code(num_rows)
    found["coded"] = round(timing.graph_microseconds([partial(code, i) for i in copies]), 2)
    return found


def compile_all(rows: tuple[int, ...]) -> None:
    """All tiles at once: each takes a compiler a second or two."""
    limits, wanted = read_limits(CUDA), set()
    for gated in (False, True):
        for tile in TILES:
            for team in TEAMS:
                plan = fp8_rows.plan_fp8(max(rows), 5376, 42, gated, limits, tile, team)
                if plan is not None:
                    activation = Activation.GELU_TANH if gated else None
                    wanted.add(tuple(fp8_rows.make_flags(plan, activation).items()))
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(_load, wanted))


def _load(flags: tuple[tuple[str, int], ...]) -> None:
    torch.cuda.set_device(0)
    Kernel.load("quantized/fp8_rows.cu", "multiply_coded", torch.device("cuda", 0), *flags)


def sum_up(results: list[dict[str, Any]], num_rows: int) -> dict[str, float]:
    """Milliseconds of a pass by way, where it is right for all linears."""
    mine = [one for one in results if one["rows"] == num_rows]
    names = [name for name in mine[0]["us"] if all(name in one["us"] for one in mine)]
    totals = {}
    for name in names:
        times = [one["us"][name] for one in mine]
        if not any(isinstance(us, str) for us in times):
            counts = (one["count"] for one in mine)
            pass_us = sum(us * count for us, count in zip(times, counts, strict=True))
            totals[name] = round(pass_us / 1e3, 2)
    ours = [[us for name, us in one["us"].items() if "x" in name] for one in mine]
    least = [min((us for us in some if not isinstance(us, str)), default=0.0) for some in ours]
    best = sum(us * one["count"] for us, one in zip(least, mine, strict=True))
    return {"best": round(best / 1e3, 2), **totals}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Rows in 8 bits, by tiles and against cuBLAS.")
    parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))), default=ROWS)
    parser.add_argument("--seconds", type=float, default=50.0, help="of timing")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    torch.manual_seed(0)
    compile_all(options.rows)
    deadline, results = timing.Deadline(options.seconds), list[dict[str, Any]]()
    document = {"environment": describe_environment("benchmarks.h200_activations", CUDA)}
    for name in SHAPES:
        product = Product(name, max(options.rows))
        for num_rows in options.rows:
            if deadline.passed():
                print(f"# stopped after {options.seconds:g} s")
                break
            found = measure(product, num_rows)
            results.append({"name": name, "rows": num_rows, "count": product.count, "us": found})
            words = ", ".join(f"{way} {us}" for way, us in found.items())
            print(f"{name:14} {num_rows:5}: {words}", flush=True)
        del product
        write_results(options.output, document | {"results": results})
    print("# milliseconds of a pass")
    for num_rows in options.rows:
        if sum(one["rows"] == num_rows for one in results) == len(SHAPES):
            totals = sum_up(results, num_rows)
            print(f"{num_rows:5} rows: " + ", ".join(f"{k} {v}" for k, v in totals.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
