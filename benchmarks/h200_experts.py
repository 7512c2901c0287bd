"""A mixture of experts at a model's sizes on one GPU: parity, then time against the floor.

    python -m benchmarks.h200_experts --seconds 90 --output benchmarks/results/FILE.json
    python -m benchmarks.h200_experts --model qwen3 --seconds 0 --rows 1 16 64 512

Times are of CUDA graph replays that rotate over several layers' weights, so that the L2 cache does
not help. The floor is the larger of reading every chosen expert once at the measured bandwidth and
of the arithmetic at the measured peak. After the backend's own plans others are tried, until the
time is up.
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
from benchmarks.h200_timing import (
    BANDWIDTH,
    Deadline,
    compile_in_parallel,
    graph_microseconds,
    is_refusal,
)
from flashdraft.kernels.cuda.backend import TritonKernels
from flashdraft.kernels.cuda.experts.few_rows import mix_few_rows
from flashdraft.kernels.cuda.experts.grouped import mix_parts, mix_rows, multiply_down, multiply_up
from flashdraft.kernels.cuda.experts.one_row import mix_one_row
from flashdraft.kernels.cuda.experts.plan import (
    ALL_ROWS,
    FEW_ROWS,
    SOME_ROWS,
    ExpertsPlan,
    TilePlan,
    plan_experts,
)
from flashdraft.kernels.cuda.experts.routing import sort_pairs
from flashdraft.kernels.interface import Residual
from flashdraft.kernels.kinds import Activation
from flashdraft.kernels.torch_backend import TorchKernels

SIZES = {  # width of the stream and of one expert: Gemma 4 26B-A4B's, Qwen3 30B-A3B's
    "gemma4": (2816, 704),
    "qwen3": (2048, 768),
}
NUM_EXPERTS, NUM_CHOSEN, NUM_LAYERS = 128, 8, 3
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 2048, 4096)
TRIED_ROWS = (1, 16, 32, 64, 512, 4096)  # with other plans, too
PARITY_ROWS = (1, 2, 7, 16, 33, 64, 512)
ARITHMETIC = 790e12  # operations a second that this card was measured to do
LARGEST_ERROR = 1e-2  # norm of the error over the norm of the result
GELU = Activation.GELU_TANH

# What to try beside the backend's own plans: block_n, block_k, warps, stages, resident programs.
UPS = {
    "one": [(8, 256, 4, 3), (8, 256, 2, 4), (16, 256, 4, 1), (16, 256, 4, 4), (16, 256, 8, 3),
            (4, 1024, 4, 1), (4, 512, 4, 3), (32, 128, 4, 3), (8, 512, 8, 3)],
    "all": [(16, 128, 4, 4, 5), (16, 128, 2, 5, 4), (16, 256, 4, 3, 4), (16, 256, 4, 4, 3),
            (32, 128, 4, 4, 3), (32, 64, 4, 5, 4), (64, 64, 4, 4, 3), (64, 128, 8, 3, 2)],
    "few": [(16, 128, 4, 4, 5), (16, 256, 4, 4, 3), (32, 128, 4, 4, 3), (64, 64, 4, 4, 3)],
    "some": [(32, 64, 4, 4, 3), (32, 64, 4, 5, 3), (32, 128, 8, 3, 2), (64, 64, 4, 4, 2),
             (64, 64, 8, 4, 2), (64, 128, 4, 3, 1)],
    "many": [(64, 64, 8, 3, 1), (64, 64, 8, 3, 2), (64, 64, 4, 4, 1), (128, 64, 8, 3, 1)],
}  # fmt: skip
DOWNS = {
    "one": [(8, 64, 4, 1), (8, 64, 4, 5), (8, 64, 8, 3), (4, 64, 2, 3), (4, 64, 4, 3),
            (4, 128, 4, 3), (16, 64, 8, 3), (8, 128, 8, 3), (4, 256, 8, 1), (4, 64, 4, 6)],
    "all": [(32, 64, 4, 9), (32, 64, 4, 19), (32, 64, 2, 15), (16, 64, 4, 15), (16, 64, 2, 19),
            (64, 64, 4, 9), (64, 64, 4, 13), (32, 128, 4, 9)],
    "few": [(32, 64, 4, 5, 6), (64, 128, 4, 4, 3), (128, 64, 4, 4, 3), (64, 64, 2, 5, 5)],
    "some": [(64, 64, 4, 5, 3), (64, 128, 4, 3, 3), (128, 64, 4, 4, 2), (128, 64, 8, 4, 2),
             (128, 128, 8, 3, 2)],
    "many": [(128, 64, 8, 3, 1), (128, 64, 8, 3, 2), (256, 64, 8, 3, 1), (128, 64, 4, 4, 1)],
}  # fmt: skip


class Layer(NamedTuple):
    """One layer's experts and routing for some number of rows."""

    gate_up: Tensor
    down: Tensor
    x: Tensor
    chosen: Tensor
    weights: Tensor

    @property
    def inputs(self) -> tuple[Any, ...]:
        """In the order `Kernels.experts` takes them."""
        return self.x, self.gate_up, self.down, self.chosen, self.weights, GELU


def make_weights(hidden: int, inner: int) -> list[tuple[Tensor, Tensor]]:
    """The experts of all layers, drawn on the device."""

    def draw(rows: int, columns: int) -> Tensor:
        weight = torch.empty(NUM_EXPERTS, rows, columns, device="cuda", dtype=torch.bfloat16)
        return weight.normal_(0.0, columns**-0.5)

    return [(draw(2 * inner, hidden), draw(hidden, inner)) for _ in range(NUM_LAYERS)]


def make_layers(weights: list[tuple[Tensor, Tensor]], num_rows: int, uniform: bool) -> list[Layer]:
    """Fresh inputs; degenerate: all rows of a layer choose the same experts."""
    layers = []
    for gate_up, down in weights:
        lottery = torch.rand(num_rows if uniform else 1, NUM_EXPERTS, device="cuda")
        chosen = lottery.argsort(1)[:, :NUM_CHOSEN].expand(num_rows, -1).contiguous()
        x = torch.randn(num_rows, gate_up.shape[2], device="cuda", dtype=torch.bfloat16)
        layers.append(
            Layer(gate_up, down, x, chosen, torch.rand(num_rows, NUM_CHOSEN, device="cuda"))
        )
    return layers


def microseconds(call: Callable[[int], Any]) -> float:
    """One call's time; call(i) is for layer i."""
    for i in range(NUM_LAYERS):
        call(i)
    return graph_microseconds([lambda i=i: call(i) for i in range(NUM_LAYERS)])


def mix(layer: Layer, plan: ExpertsPlan, processors: int) -> Tensor:
    """The whole mixture under a plan."""
    if plan.block_m == 0:
        return mix_one_row(*layer.inputs, plan)
    return (mix_few_rows if plan.splits else mix_rows)(*layer.inputs, plan, processors)


def compile_plan(task: tuple[str, int, ExpertsPlan]) -> None:
    """Launch a plan's kernels once, at the real sizes."""
    model, num_rows, plan = task
    hidden, inner = SIZES[model]
    shapes = (NUM_EXPERTS, 2 * inner, hidden), (NUM_EXPERTS, hidden, inner)
    gate_up, down = (torch.empty(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
    chosen = torch.arange(NUM_CHOSEN, device="cuda").expand(num_rows, -1).contiguous()
    x = torch.zeros(num_rows, hidden, device="cuda", dtype=torch.bfloat16)
    layer = Layer(gate_up, down, x, chosen, torch.ones(chosen.shape, device="cuda"))
    mix(layer, plan, processors=132)


def floor_microseconds(layers: list[Layer]) -> tuple[float, float]:
    """(distinct experts, the shortest possible time)."""
    distinct = sum(len(layer.chosen.unique()) for layer in layers) / len(layers)
    expert_size = layers[0].gate_up[0].numel() + layers[0].down[0].numel()
    memory = distinct * expert_size * 2 / BANDWIDTH
    arithmetic = layers[0].chosen.numel() * expert_size * 2 / ARITHMETIC
    return distinct, max(memory, arithmetic) * 1e6


def check_parity(kernels: TritonKernels, weights: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Relative errors against float32; raises where one is too large."""
    reference = TorchKernels(kernels.device, torch.float32)
    gate_up, down = (list(one.float()) for one in weights[0])
    errors = {}
    for num_rows in PARITY_ROWS:
        for uniform in (False, True):
            layer = make_layers(weights[:1], num_rows, uniform)[0]
            found = kernels.experts(*layer.inputs).float()
            expected = reference.experts(
                layer.x.float(), gate_up, down, layer.chosen, layer.weights, GELU
            )
            name = f"{num_rows} {'uniform' if uniform else 'degenerate'}"
            errors[name] = float((found - expected).norm() / expected.norm())
    wrong = {name: error for name, error in errors.items() if not error < LARGEST_ERROR}
    if wrong:
        raise SystemExit(f"parity: {wrong}; at most {LARGEST_ERROR} is rounding")
    return errors


def time_plan(layers: list[Layer], plan: ExpertsPlan, processors: int) -> dict[str, float]:
    """Microseconds of the whole mixture, and of its launches where they can be had one by one."""
    found = {"whole": microseconds(lambda i: mix(layers[i], plan, processors))}
    if plan.block_m == 0 or plan.splits:
        return found
    pairs = [sort_pairs(layer.chosen, NUM_EXPERTS, plan.block_m) for layer in layers]
    found["sort"] = microseconds(lambda i: sort_pairs(layers[i].chosen, NUM_EXPERTS, plan.block_m))

    def up(i: int) -> Tensor:
        return multiply_up(layers[i].x, layers[i].gate_up, pairs[i], GELU, plan, processors)

    between = [up(i) for i in range(NUM_LAYERS)]
    found["up"] = microseconds(up)

    def down(i: int) -> Tensor:
        return multiply_down(between[i], layers[i].down, pairs[i], plan, processors)

    parts = down(0)
    found["down"] = microseconds(down)
    found["mix"] = microseconds(lambda i: mix_parts(parts, layers[i].weights))
    return found


def candidates(num_rows: int) -> Iterator[ExpertsPlan]:
    """Other plans, and the other ways to go about it, around the backend's own plan."""
    own = plan_experts(num_rows, NUM_CHOSEN, NUM_EXPERTS, 2)
    if own.splits:
        yield from (own._replace(splits=splits) for splits in (2, 8))
        yield FEW_ROWS._replace(block_m=own.block_m)
    elif own == SOME_ROWS and num_rows <= own.block_m:
        yield ALL_ROWS._replace(block_m=own.block_m)
        yield from (own._replace(block_m=block_m) for block_m in (16, 32))
    kinds = {0: "one", 64: "some", 128: "many"}
    kind = "all" if own.splits else kinds.get(own.block_m, "few")
    yield from (own._replace(up=TilePlan(*tile)) for tile in UPS[kind])
    yield from (own._replace(down=TilePlan(*tile)) for tile in DOWNS[kind])
    if kind == "all":
        grouped = FEW_ROWS._replace(block_m=own.block_m)
        for up, down in zip(UPS["few"], DOWNS["few"], strict=True):
            yield grouped._replace(up=TilePlan(*up), down=TilePlan(*down))


def show(num_rows: int, uniform: bool, plan: ExpertsPlan, found: dict[str, Any]) -> None:
    tiles = " ".join("/".join(map(str, tile)) for tile in (plan.up, plan.down))
    times = " ".join(f"{name} {found[name]:.1f}" for name in ("whole", *PARTS) if name in found)
    print(
        f"{num_rows:5} {'uniform' if uniform else 'degener.'} {found['distinct']:5.1f} experts  "
        f"{found['fraction']:4.0%} of floor {found['floor']:.1f}  {times}  "
        f"m{plan.block_m} s{plan.splits} {tiles}",
        flush=True,
    )


PARTS = ("sort", "up", "down", "mix")


def time_small(kernels: TritonKernels, width: int) -> dict[str, float]:
    """The launches around the experts: norms, sums and the choice."""
    found = {}
    for num_rows in (1, 16, 64, 512):
        for hidden in (width, 5376):
            x = torch.randn(num_rows, hidden, device="cuda", dtype=torch.bfloat16)
            weight = torch.randn(hidden, device="cuda", dtype=torch.bfloat16)
            scalar, norms = weight[:1].clone(), [weight] * 3
            found[f"residual_norms {num_rows}x{hidden}, 1 delta, 1 output"] = microseconds(
                lambda i, x=x, w=weight, n=norms: kernels.residual_norms(
                    Residual(x, [(x, w)]), n[:1], 1e-6
                )
            )
            found[f"residual_norms {num_rows}x{hidden}, 2 deltas, post, 3 outputs"] = microseconds(
                lambda i, x=x, w=weight, s=scalar, n=norms: kernels.residual_norms(
                    Residual(x, [(x, w), (x, w)], w, s), n, 1e-6
                )
            )
        logits = torch.randn(num_rows, NUM_EXPERTS, device="cuda", dtype=torch.bfloat16)
        scale = torch.ones(NUM_EXPERTS, device="cuda")
        found[f"choose_experts {num_rows}"] = microseconds(
            lambda i, logits=logits, scale=scale: kernels.choose_experts(logits, NUM_CHOSEN, scale)
        )
        x = torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)
        router = torch.randn(NUM_EXPERTS, width, device="cuda", dtype=torch.bfloat16)
        found[f"route {num_rows}"] = microseconds(
            lambda i, x=x, w=router, scale=scale: kernels.route(x, w, NUM_CHOSEN, scale)
        )
    for name, time_of in found.items():
        print(f"{name}: {time_of:.1f} us")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="gemma4")
    parser.add_argument("--seconds", type=float, default=90.0, help="stop trying plans after this")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--output", type=Path, help="write all figures to this JSON file")
    arguments = parser.parse_args()
    own_plans = {n: plan_experts(n, NUM_CHOSEN, NUM_EXPERTS, 2) for n in arguments.rows}
    others = {n: list(candidates(n)) for n in arguments.rows if n in TRIED_ROWS}
    if not arguments.seconds:
        others = {}
    tasks = [
        (arguments.model, n, plan) for n in own_plans for plan in (own_plans[n], *others.get(n, ()))
    ]
    print(
        f"compiled in {compile_in_parallel(compile_plan, dict.fromkeys(tasks)):.0f} s", flush=True
    )
    deadline = Deadline(arguments.seconds)
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    kernels = TritonKernels(device, torch.bfloat16)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    weights = make_weights(*SIZES[arguments.model])
    report: dict[str, Any] = {
        "model": arguments.model,
        "environment": describe_environment("benchmarks.h200_experts", device),
    }
    report["parity"] = check_parity(kernels, weights)
    print(f"parity: largest relative error {max(report['parity'].values()):.1e}", flush=True)
    report["small"] = time_small(kernels, SIZES[arguments.model][0])
    report["plans"] = []

    def measure(num_rows: int, uniform: bool, plan: ExpertsPlan, own: bool) -> None:
        layers = make_layers(weights, num_rows, uniform)
        try:
            found: dict[str, Any] = time_plan(layers, plan, processors)
        except Exception as error:
            if not is_refusal(error):
                raise
            print(f"{num_rows} {plan}: {type(error).__name__}: {str(error)[:100]}", flush=True)
            return
        found["distinct"], found["floor"] = floor_microseconds(layers)
        found["fraction"] = found["floor"] / found["whole"]
        show(num_rows, uniform, plan, found)
        report["plans"].append(
            {"rows": num_rows, "uniform": uniform, "own": own, "plan": plan, **found}
        )

    for num_rows, plan in own_plans.items():
        for uniform in (False, True) if num_rows > 1 else (True,):
            measure(num_rows, uniform, plan, own=True)
    print("other plans:", flush=True)
    for num_rows, plans in others.items():
        for plan in plans:
            for uniform in (False, True) if num_rows > 1 else (True,):
                if not deadline.passed():
                    measure(num_rows, uniform, plan, own=False)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
