"""What the CUDA backend does with a mixture of experts: route, mix, by rows and formats."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashdraft.kernels.cuda.experts.few_rows import mix_few_rows
from flashdraft.kernels.cuda.experts.grouped import mix_rows
from flashdraft.kernels.cuda.experts.one_row import mix_one_row
from flashdraft.kernels.cuda.experts.plan import plan_exact_experts, plan_experts
from flashdraft.kernels.cuda.experts.routing import choose_rows, route_rows
from flashdraft.kernels.cuda.experts.slabs import mix_slabs
from flashdraft.kernels.cuda.plan import DeviceLimits
from flashdraft.kernels.cuda.quantized_backend import FEW_EXPERT_ROWS, floats_of, is_packed, mix
from flashdraft.kernels.interface import Choice
from flashdraft.kernels.kinds import Activation

MAX_ROUTED_ROWS = 4  # estimated: more of them keep two launches busy


def route(
    x: Tensor, router: Any, num_chosen: int, scale: Tensor, arrivals: Tensor, exact: bool
) -> Choice | None:
    """`Kernels.route` in one launch; None where the product is a launch of its own."""
    if exact or x.shape[0] > MAX_ROUTED_ROWS or not isinstance(router, Tensor):
        return None
    return route_rows(x, router, num_chosen, scale, arrivals)


def choose(logits: Tensor, num_chosen: int, scale: Tensor) -> Choice:
    """`Kernels.choose_experts`."""
    return choose_rows(logits, num_chosen, scale)


def mix_experts(
    x: Tensor,
    gate_up: Any,
    down: Any,
    choice: Choice,
    activation: Activation,
    arrivals: Tensor,
    limits: DeviceLimits,
    exact: bool,
    is_settled: bool,
) -> Tensor:
    """`Kernels.experts`; `is_settled`: the experts were chosen long ago."""
    chosen, weights = choice
    num_rows, num_chosen = chosen.shape
    x = x.contiguous()
    if not exact:
        found = mix_slabs(x, gate_up, down, chosen, weights, activation, limits)
        if found is not None:
            return found
    are_few = num_rows <= FEW_EXPERT_ROWS or exact
    if are_few and is_packed(gate_up) and is_packed(down):
        inputs = (x, gate_up, down, chosen, weights, activation)
        return mix(*inputs, arrivals, limits, exact, is_settled)
    plan = plan_experts(num_rows, num_chosen, gate_up.shape[0], x.itemsize)
    if exact:
        plan = plan_exact_experts(x.itemsize)
    routed, processors = (chosen, weights, activation, plan), limits.num_processors

    def to_floats(weight: Any) -> Tensor:
        """All experts of a layer: for prompts the arithmetic is what costs."""
        return floats_of(weight, x.dtype)

    if plan.block_m and not plan.splits:
        return mix_rows(x, gate_up, down, *routed, processors, to_floats)
    gate_up, down = to_floats(gate_up), to_floats(down)
    if plan.splits:
        return mix_few_rows(x, gate_up, down, *routed, processors)
    return mix_one_row(x, gate_up, down, *routed)
