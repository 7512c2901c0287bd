"""A whole layer of Gemma 4 26B-A4B's experts, from logits to the sum: Triton's ways, and slabs.cu.

    python -m benchmarks.h200_slabs --seconds 60 --output benchmarks/results/h200_slabs.json

Every line has a number of rows, how they choose, the time of Triton's ways and of slabs.cu with its
own plan, launch by launch, against the floor: every chosen expert read once at the measured
bandwidth, or the arithmetic at the measured peak. Other plans follow until the time is up. As in
h200_experts.py graphs are replayed over several layers' weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.accepted_length import describe_environment
from benchmarks.h200_experts import (
    ARITHMETIC,
    GELU,
    HIDDEN,
    INNER,
    NUM_CHOSEN,
    NUM_EXPERTS,
    NUM_LAYERS,
    make_weights,
    microseconds,
)
from benchmarks.h200_timing import BANDWIDTH, Deadline, compile_in_parallel, is_refusal
from flashdraft.kernels.cuda.backend import TritonKernels
from flashdraft.kernels.cuda.experts import slabs
from flashdraft.kernels.cuda.experts.few_rows import mix_few_rows
from flashdraft.kernels.cuda.experts.grouped import mix_parts, mix_rows
from flashdraft.kernels.cuda.experts.plan import (
    FEW_ROWS,
    SOME_ROWS,
    ExpertsPlan,
    SlabsPlan,
    TilePlan,
    plan_experts,
    plan_slabs,
)
from flashdraft.kernels.cuda.experts.routing import gather_rows
from flashdraft.kernels.cuda.plan import DeviceLimits
from flashdraft.kernels.cuda.quantized.layout import PackedWeight, pack_quantized
from flashdraft.kernels.cuda.quantized_backend import FEW_EXPERT_ROWS, floats_of, mix
from flashdraft.kernels.kinds import Scheme
from flashdraft.kernels.quantized import Quantized

ROWS = (16, 32, 64, 128, 256, 384, 512, 1024, 4096)
FORMATS = ("bf16", "int4")
LARGEST_DIFFERENCE = 1.2e-2  # of two ways, relative: each rounds in its own places
# rows of a tile, slabs of a job, blocks on a processor, the most stages
PLANS = [
    SlabsPlan(64, 4),
    SlabsPlan(64, 4, max_stages=4),
    SlabsPlan(64, 3),
    SlabsPlan(32, 4),
    SlabsPlan(32, 2, resident=2),
    SlabsPlan(128, 3),
    SlabsPlan(128, 2),
]
# Triton's, with tiles of fewer rows: block_m, then up and down
TILES = [
    FEW_ROWS,
    FEW_ROWS._replace(block_m=32),
    SOME_ROWS._replace(block_m=32),
    ExpertsPlan(TilePlan(32, 128, 4, 3, 2), TilePlan(64, 128, 4, 3, 2), 16),
]

Weights = list[tuple[Tensor | PackedWeight, Tensor | PackedWeight]]


class Case(NamedTuple):
    """Rows that choose, of all layers."""

    format: str
    rows: int
    is_uniform: bool

    @property
    def name(self) -> str:
        return f"{self.format} {self.rows:5} {'uniform' if self.is_uniform else 'degener.'}"


class Inputs(NamedTuple):
    """One layer's."""

    x: Tensor
    logits: Tensor
    gate_up: Tensor | PackedWeight
    down: Tensor | PackedWeight


def draw_few_bits(num_layers: int = NUM_LAYERS) -> Weights:
    """Random codes: their sums are about as large as x."""

    def draw(rows: int, depth: int) -> PackedWeight:
        shape = (NUM_EXPERTS, rows, depth)
        codes = torch.randint(0, 16, shape, device="cuda", dtype=torch.uint8)
        scale = torch.rand(*shape[:2], depth // 32, device="cuda").add_(0.5)
        scale = (scale * (0.2 * depth**-0.5)).half()
        return pack_quantized(Quantized(Scheme.INT4, codes, scale, 32, 8))

    return [(draw(2 * INNER, HIDDEN), draw(HIDDEN, INNER)) for _ in range(num_layers)]


def make_inputs(weights: Weights, case: Case) -> list[Inputs]:
    found = []
    for gate_up, down in weights:
        logits = torch.randn(case.rows if case.is_uniform else 1, NUM_EXPERTS, device="cuda")
        logits = logits.bfloat16().expand(case.rows, -1).contiguous()
        x = torch.randn(case.rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        found.append(Inputs(x, logits, gate_up, down))
    return found


class Bench:
    """The kernels of this card, and what is drawn for them."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.kernels = TritonKernels(self.device, torch.bfloat16)
        self.limits: DeviceLimits = self.kernels._limits
        self.scale = torch.ones(NUM_EXPERTS, device=self.device)

    def choose(self, one: Inputs) -> tuple[Tensor, Tensor]:
        return self.kernels.choose_experts(one.logits, NUM_CHOSEN, self.scale)

    def by_triton(self, one: Inputs, plan: ExpertsPlan | None = None) -> Tensor:
        """As the backend does where slabs.cu is not the way; or by another plan."""
        x, _, gate_up, down = one
        routed, num_rows = (*self.choose(one), GELU), one.x.shape[0]
        processors = self.limits.num_processors
        if (
            isinstance(gate_up, PackedWeight)
            and isinstance(down, PackedWeight)
            and num_rows <= FEW_EXPERT_ROWS
        ):
            others = (self.kernels._arrivals, self.limits, False)
            return mix(x, gate_up, down, *routed, *others)
        plan = plan or plan_experts(num_rows, NUM_CHOSEN, NUM_EXPERTS, 2)
        if plan.splits:
            assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
            return mix_few_rows(x, gate_up, down, *routed, plan, processors)

        def to_floats(weight: Any) -> Tensor:
            return floats_of(weight, x.dtype)

        return mix_rows(x, gate_up, down, *routed, plan, processors, to_floats)

    def by_slabs(self, one: Inputs, plan: SlabsPlan) -> Tensor:
        inputs = (one.x, one.gate_up, one.down, *self.choose(one), GELU)
        found = slabs.mix_planned(*inputs, plan, self.limits)
        assert found is not None, plan
        return found

    def time_parts(self, layers: list[Inputs], plan: SlabsPlan) -> dict[str, float]:
        """Of slabs.cu's way, launch by launch."""
        products = [
            (slabs.describe_experts(one.gate_up, True), slabs.describe_experts(one.down, False))
            for one in layers
        ]
        choices = [self.choose(one) for one in layers]

        def gather(i: int) -> Any:
            is_few = isinstance(layers[i].gate_up, PackedWeight)
            return gather_rows(layers[i].x, choices[i][0], NUM_EXPERTS, plan.rows, is_few)

        gathered = [gather(i) for i in range(len(layers))]

        def multiply(i: int, last: bool) -> Tensor:
            weight = layers[i].down if last else layers[i].gate_up
            product, rows = products[i][last], gathered[i]
            assert product is not None
            x = between[i] if last else rows.x
            others = (None, False) if last else (GELU, product.code is not None)
            return slabs.multiply(x, weight, product, rows, plan, self.limits, *others)

        between: list[Tensor] = []
        between += [multiply(i, False) for i in range(len(layers))]
        parts = multiply(0, True)
        return {
            "choose": microseconds(lambda i: self.choose(layers[i])),
            "gather": microseconds(gather),
            "up": microseconds(lambda i: multiply(i, False)),
            "down": microseconds(lambda i: multiply(i, True)),
            "mix": microseconds(lambda i: mix_parts(parts, choices[i][1])),
        }

    def find_floor(self, layers: list[Inputs]) -> tuple[float, float]:
        """Distinct experts, and the shortest possible time."""
        distinct = sum(len(self.choose(one)[0].unique()) for one in layers) / len(layers)
        each = sum(
            weight.num_bytes if isinstance(weight, PackedWeight) else weight.nbytes
            for weight in (layers[0].gate_up, layers[0].down)
        )
        memory = distinct * each / NUM_EXPERTS / BANDWIDTH
        work = len(layers[0].x) * NUM_CHOSEN * 3 * HIDDEN * INNER * 2 / ARITHMETIC
        return distinct, max(memory, work) * 1e6


def compile_case(task: tuple[str, int, SlabsPlan | ExpertsPlan | None]) -> None:
    """Launch what a way launches once."""
    format, num_rows, plan = task
    bench = Bench()
    if format == "bf16":
        shapes = (NUM_EXPERTS, 2 * INNER, HIDDEN), (NUM_EXPERTS, HIDDEN, INNER)
        weights: Any = [tuple(torch.empty(s, device="cuda").bfloat16() for s in shapes)]
    else:
        weights = draw_few_bits(1)
    (one,) = make_inputs(weights, Case(format, num_rows, True))
    if isinstance(plan, SlabsPlan):
        bench.by_slabs(one, plan)
    else:
        bench.by_triton(one, plan)


def other_ways(case: Case) -> Iterator[SlabsPlan | ExpertsPlan]:
    own = own_plan(case)
    if case.rows <= 1024:
        yield from (plan for plan in PLANS if plan != own)
    if case.format == "bf16" and 32 <= case.rows <= 512:
        triton = plan_experts(case.rows, NUM_CHOSEN, NUM_EXPERTS, 2)
        yield from (plan for plan in TILES if plan != triton)


def own_plan(case: Case) -> SlabsPlan:
    """What the backend takes, or would take of fewer rows."""
    plan = plan_slabs(max(case.rows, 17), is_few_bits=True)  # of any number of rows
    assert plan is not None
    return plan


def tasks(cases: list[Case]) -> Iterator[tuple[str, int, SlabsPlan | ExpertsPlan | None]]:
    for case in cases:
        if case.is_uniform:
            yield case.format, case.rows, None
            for plan in (own_plan(case), *other_ways(case)):
                # Of slabs the number of rows matters to the launch before them alone.
                yield case.format, case.rows if isinstance(plan, ExpertsPlan) else 128, plan


def measure(bench: Bench, case: Case, weights: Weights) -> dict[str, Any]:
    """The backend's own plans."""
    layers, plan = make_inputs(weights, case), own_plan(case)
    expected, found = bench.by_triton(layers[0]).float(), bench.by_slabs(layers[0], plan).float()
    distinct, floor = bench.find_floor(layers)
    report = {
        **case._asdict(),
        "distinct": distinct,
        "floor": floor,
        "difference": float((found - expected).norm() / expected.norm()),
        "triton": microseconds(lambda i: bench.by_triton(layers[i])),
        "slabs": microseconds(lambda i: bench.by_slabs(layers[i], plan)),
        "plan": plan,
        "parts": bench.time_parts(layers, plan),
        "others": [],
    }
    parts = " ".join(f"{name} {time:.1f}" for name, time in report["parts"].items())
    print(
        f"{case.name} {distinct:5.1f} experts  floor {floor:6.1f}  triton {report['triton']:7.1f}  "
        f"slabs {report['slabs']:6.1f} ({floor / report['slabs']:4.0%})  {parts}  "
        f"differ {report['difference']:.1e}",
        flush=True,
    )
    return report


def try_others(bench: Bench, case: Case, weights: Weights, report: dict[str, Any]) -> None:
    layers = make_inputs(weights, case)
    for plan in other_ways(case):
        way: Callable[..., Tensor] = bench.by_triton
        if isinstance(plan, SlabsPlan):
            way = bench.by_slabs

        def run(i: int, way: Callable[..., Tensor] = way, plan: Any = plan) -> Tensor:
            return way(layers[i], plan)

        try:
            time = microseconds(run)
        except Exception as error:
            if not is_refusal(error):
                raise
            continue
        report["others"].append({"plan": plan, "microseconds": time})
    shown = " ".join(
        f"{'s' if isinstance(one['plan'], SlabsPlan) else 'm'}"
        f"{'/'.join(map(str, one['plan'] if isinstance(one['plan'], SlabsPlan) else short(one)))}"
        f" {one['microseconds']:.1f}"
        for one in report["others"]
    )
    print(f"{case.name}  {shown}", flush=True)


def short(one: dict[str, Any]) -> list[Any]:
    return [one["plan"].block_m, one["plan"].up.block_n, one["plan"].down.block_k]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="stop trying plans after this")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--output", type=Path, help="write all figures to this JSON file")
    arguments = parser.parse_args()
    cases = [Case(f, n, u) for f in FORMATS for n in arguments.rows for u in (True, False)]
    seconds = compile_in_parallel(compile_case, dict.fromkeys(tasks(cases)))
    print(f"compiled in {seconds:.0f} s; microseconds", flush=True)
    deadline = Deadline(arguments.seconds)
    torch.manual_seed(0)
    bench = Bench()
    weights: dict[str, Weights] = {"bf16": [*make_weights()], "int4": draw_few_bits()}
    report: dict[str, Any] = {
        "environment": describe_environment("benchmarks.h200_slabs", bench.device),
        "cases": [measure(bench, case, weights[case.format]) for case in cases],
    }
    print("slabs: rows, slabs, resident, most stages; triton m: rows, columns, depth", flush=True)
    for case, found in zip(cases, report["cases"], strict=True):
        if not deadline.passed():
            try_others(bench, case, weights[case.format], found)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    wrong = [one for one in report["cases"] if not one["difference"] < LARGEST_DIFFERENCE]
    if wrong:
        raise SystemExit(f"parity: {wrong}; at most {LARGEST_DIFFERENCE} is rounding")


if __name__ == "__main__":
    main()
