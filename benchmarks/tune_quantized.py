"""Splits, warps and stages of the linears in few bits, tried at Gemma 4's sizes on one GPU.

    python -m benchmarks.tune_quantized --seconds 300 --output FILE.json

A line says what the plan chose, the best of what it could have chosen, and how far apart they are;
GB/s are of the weight's bytes, as a share of what this card was just measured to read. Times are of
graph replays over copies of a weight, of which the cache holds none. Mixtures of experts are timed
with the plan's own choice. `--seconds` limits the timing, not the compilation before it. --tiny
tries it out on a CPU in Triton's interpreter (TRITON_INTERPRET=1): its figures mean nothing.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from benchmarks import h200_timing as timing
from benchmarks.accepted_length import describe_environment, write_results
from benchmarks.h200_linear import SHAPES, error_of
from benchmarks.h200_profile import measure_bandwidth
from flashdraft.bench.plan.sizes import LEAST_VALUES
from flashdraft.kernels.cuda.backend import MAX_TILES
from flashdraft.kernels.cuda.experts.quantized import MAX_ROWS, mix_quantized
from flashdraft.kernels.cuda.quantized import linear as kernels
from flashdraft.kernels.cuda.quantized.layout import PackedWeight, pack_quantized, stack_packed
from flashdraft.kernels.kinds import Activation, Scheme
from flashdraft.kernels.quantized import quantize
from flashdraft.kernels.torch_backend import TorchKernels

LINEARS = {  # name: (out, in); smaller ones stay floats, and a drafter's o is the sliding target's
    **{name: shape for name, shape in SHAPES.items() if math.prod(shape) >= LEAST_VALUES},
    "31B drafter qkv": (10240, 5376),
    "31B drafter gate_up": (21504, 5376),
    "31B drafter down": (5376, 10752),
    "31B drafter taps": (5376, 32256),
    "26B drafter qkv": (6144, 2816),
    "26B drafter gate_up": (11264, 2816),
    "26B drafter down": (2816, 5632),
    "26B drafter taps": (2816, 16896),
}
EXPERTS = {"26B experts": (128, 8, 2816, 704)}  # experts, chosen, hidden, inner
TINY_LINEARS = {"tiny": (128, 768), "tiny odd": (80, 384), "tiny gate_up": (256, 384)}
TINY_EXPERTS = {"tiny experts": (4, 2, 64, 32)}
SCHEMES = ("int4", "int8", "fp8")
STAGES = (3, 4)
WARPS = (2, 4)
DIFFERENT_ROWS = 256  # of a random weight: they are repeated, for time does not depend on them
LARGEST_ERROR = 1e-2  # norm of the error over the norm of the result


class Bench(NamedTuple):
    """Where calls run, and how they are timed."""

    device: torch.device
    dtype: torch.dtype
    num_processors: int
    stages: tuple[int, ...]
    time_calls: Callable[[Sequence[Callable[[], object]]], float]  # microseconds of one
    arrivals: Tensor


def make_bench(tiny: bool = False) -> Bench:
    """The GPU, or the interpreter, where stages make no difference."""
    device = torch.device("cpu" if tiny else "cuda")
    arrivals = torch.zeros(MAX_TILES, device=device, dtype=torch.int32)
    if tiny:
        return Bench(device, torch.float32, 2, (3,), time_once, arrivals)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Bench(device, torch.bfloat16, processors, STAGES, timing.graph_microseconds, arrivals)


def time_once(calls: Sequence[Callable[[], object]]) -> float:
    """Of the first call: the interpreter's figures mean nothing."""
    begin = time.perf_counter()
    calls[0]()
    return 1e6 * (time.perf_counter() - begin)


def random_weight(shape: tuple[int, int], scheme: Scheme, device: torch.device) -> PackedWeight:
    """In the very format that floats are quantised to."""
    out, depth = shape
    floats = torch.randn(min(out, DIFFERENT_ROWS), depth, device=device) * depth**-0.5
    few = quantize(floats, scheme)
    return pack_quantized(few.rows(torch.arange(out, device=device) % few.shape[0]))


def candidates(
    plan: kernels.QuantizedPlan, weight: PackedWeight, stages: Sequence[int]
) -> Iterator[kernels.QuantizedPlan]:
    """Every number of splits that a plan could have chosen, with other warps and stages."""
    for splits, warps, count in itertools.product(
        kernels.split_choices(weight.num_steps), WARPS, stages
    ):
        yield plan._replace(num_splits=splits, num_warps=warps, num_stages=count)


def tune_linear(
    shape: tuple[int, int],
    scheme: Scheme,
    num_rows: int,
    bench: Bench,
    activation: Activation | None = None,
) -> dict[str, Any]:
    """Every candidate's time for one weight, the fastest first; wrong ones come last."""
    weight, gated = random_weight(shape, scheme, bench.device), activation is not None
    x = torch.randn(num_rows, shape[1], device=bench.device, dtype=bench.dtype)
    expected = x.float() @ kernels.dequantize(weight, torch.float32).T
    if activation is not None:
        expected = TorchKernels(bench.device, torch.float32).gated(expected, activation)
    copies = [copy.deepcopy(weight) for _ in range(timing.num_copies(weight.num_bytes))]
    plan = kernels.plan_quantized(num_rows, weight, bench.num_processors, gated=gated)
    entries: list[dict[str, Any]] = []
    for other in dict.fromkeys([plan, *candidates(plan, weight, bench.stages)]):
        call = partial(
            kernels.multiply_quantized,
            x,
            plan=other,
            arrivals=bench.arrivals,
            activation=activation,
        )
        calls = [partial(call, one) for one in copies]
        try:
            error = error_of(expected, calls[0]())
            us = bench.time_calls(calls)
        except Exception as refusal:
            if not timing.is_refusal(refusal):
                raise
            continue  # it does not fit the card
        entry: dict[str, Any] = {"splits": other.num_splits, "warps": other.num_warps}
        entry["stages"] = other.num_stages
        entry |= {"us": round(us, 2), "is_plan": other == plan}
        entries.append(entry | {"is_wrong": not error < LARGEST_ERROR})
    entries.sort(key=lambda entry: (entry["is_wrong"], entry["us"]))
    return {"bytes": weight.num_bytes, "plan": plan._asdict(), "timed": entries}


def time_experts(
    sizes: tuple[int, int, int, int], scheme: Scheme, num_rows: int, bench: Bench, uniform: bool
) -> dict[str, Any]:
    """A whole mixture as it is planned; every call chooses other experts than the last."""
    num_experts, num_chosen, hidden, inner = sizes
    shapes = (2 * inner, hidden), (hidden, inner)
    weights = (random_weight(shape, scheme, bench.device) for shape in shapes)
    gate_up, down = (stack_packed([weight] * num_experts) for weight in weights)
    x = torch.randn(num_rows, hidden, device=bench.device, dtype=bench.dtype)
    shares = torch.full((num_rows, num_chosen), 1 / num_chosen, device=bench.device)
    calls, distinct = [], 0
    for place in range(num_experts // num_chosen):
        mine = torch.arange(num_chosen, device=bench.device) + place * num_chosen
        chosen = mine.expand(num_rows, -1).contiguous()
        if uniform:
            lottery = torch.rand(num_rows, num_experts, device=bench.device)
            chosen = lottery.argsort(1)[:, :num_chosen].contiguous()
        distinct += len(chosen.unique())
        inputs = (x, gate_up, down, chosen, shares, Activation.GELU_TANH)
        calls.append(partial(mix_quantized, *inputs, bench.num_processors, bench.arrivals))
    each = (gate_up.num_bytes + down.num_bytes) / num_experts
    entry = {"us": round(bench.time_calls(calls), 2), "is_plan": True}
    return {"bytes": round(each * distinct / len(calls)), "timed": [entry]}


def work(options: argparse.Namespace) -> Iterator[tuple[str, Scheme, int, Callable[..., Any]]]:
    """Everything that is to be measured: name, scheme, rows, and what measures it on a bench."""
    linears, experts = (TINY_LINEARS, TINY_EXPERTS) if options.tiny else (LINEARS, EXPERTS)
    for scheme, num_rows in itertools.product(map(Scheme, options.schemes), options.rows):
        found: dict[str, Callable[..., Any]] = {}
        for name, shape in linears.items():
            gate = Activation.GELU_TANH if "gate_up" in name else None
            found[name] = partial(tune_linear, shape, scheme, num_rows, activation=gate)
        for name, sizes in experts.items():
            mixture = partial(time_experts, sizes, scheme, num_rows)
            found[f"{name}, degenerate"] = partial(mixture, uniform=False)
            found[f"{name}, uniform"] = partial(mixture, uniform=True)
        for name, measure in found.items():
            if any(word in name for word in options.only.split(",")):
                yield name, scheme, num_rows, measure


def compile_one(measure: Callable[..., Any]) -> None:
    """Launch all of a measurement's kernels once, in a process of its own."""
    measure(make_bench()._replace(time_calls=lambda calls: 0.0))


def line(name: str, scheme: Scheme, num_rows: int, found: dict[str, Any], read: float) -> str:
    """One row of the table; a plan that does not fit the card has no time."""
    best, plan = found["timed"][0], found.get("plan")
    speed = found["bytes"] / best["us"] / 1e3
    text = f"{name:24} {scheme:5} {num_rows:4} {best['us']:9.2f} {speed:7.0f} {speed / read:6.0%}"
    if plan is None:
        return text
    chosen = tuple(plan[key] for key in ("num_splits", "num_warps", "num_stages"))
    fastest = tuple(best[key] for key in ("splits", "warps", "stages"))
    for splits, warps, stages in (fastest, chosen):
        text += f"  {splits:2} x {warps} x {stages}"
    own = [entry["us"] for entry in found["timed"] if entry["is_plan"]]
    text += "".join(f" {us:9.2f} {us / best['us'] - 1:6.1%}" for us in own)
    wrong = sum(entry["is_wrong"] for entry in found["timed"])
    return f"{text}  {wrong} WRONG" if wrong else text


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Splits, warps and stages of linears in few bits.")
    parser.add_argument("--rows", type=_numbers, default=[1, 16])
    parser.add_argument("--schemes", type=lambda text: text.split(","), default=[*SCHEMES])
    parser.add_argument("--only", default="", help="names that hold one of these words, a,b,…")
    parser.add_argument("--seconds", type=float, default=600.0, help="of timing")
    parser.add_argument("--output", type=Path, help="where to write everything, as JSON")
    parser.add_argument("--tiny", action="store_true", help="try it out, in the interpreter")
    options = parser.parse_args(arguments)
    if not set(options.schemes) <= set(SCHEMES):
        parser.error(f"--schemes is {options.schemes}; known are {', '.join(SCHEMES)}")
    if not all(1 <= count <= MAX_ROWS for count in options.rows):
        parser.error(f"--rows is {options.rows}; they must be from 1 to {MAX_ROWS}")
    if options.tiny and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--tiny needs Triton's interpreter: set TRITON_INTERPRET=1")
    if not options.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU to tune; --tiny tries this out on a CPU")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    torch.manual_seed(0)
    tasks = list(work(options))
    if not options.tiny:
        seconds = timing.compile_in_parallel(compile_one, [measure for *_, measure in tasks])
        print(f"# compiled in {seconds:.0f} s", flush=True)
    bench = make_bench(options.tiny)
    read = 1e3 * measure_bandwidth(bench.device)["read_tb_s"]
    print(f"# the device reads {read:.0f} GB/s; splits x warps x stages; µs of best and plan")
    head = "rows   best µs    GB/s  share        best        plan   plan µs   off"
    print(f"{'':30} {head}")
    environment = describe_environment("benchmarks.tune_quantized", bench.device)
    environment |= {"triton": triton.__version__, "tiny": options.tiny}
    document = {"environment": environment, "read_gb_s": round(read, 1)}
    deadline, results = timing.Deadline(options.seconds), list[dict[str, Any]]()
    for name, scheme, num_rows, measure in tasks:
        if deadline.passed():
            print(f"# stopped after {options.seconds:g} s: {len(results)} of {len(tasks)} measured")
            break
        found = measure(bench)
        results.append({"name": name, "scheme": scheme.value, "rows": num_rows, **found})
        print(line(name, scheme, num_rows, found, read), flush=True)
        done = {"complete": len(results) == len(tasks), "results": results}
        write_results(options.output, document | done)  # after each: a later one may fail
    return 0


if __name__ == "__main__":
    sys.exit(main())
