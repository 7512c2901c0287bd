"""A mixture of experts for one row, over weights in few bits, in CUDA C++. CUDA only.

All of it is products of quantized/few_rows.cu, and nothing lies between them. The experts are
chosen beside the first one, of the dense MLP, so that the third, which starts while the second
runs, can ask for their weights at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashdraft.kernels.cuda.plan import DeviceLimits
from flashdraft.kernels.cuda.quantized.few_rows import (
    Normed,
    Routed,
    beats_triton,
    is_readable,
    is_readable_row,
    launch,
    multiply_few,
    multiply_normed,
)
from flashdraft.kernels.cuda.quantized.few_rows_plan import (
    Experts,
    FewPlan,
    Product,
    describe_product,
    plan_few,
)
from flashdraft.kernels.cuda.quantized.layout import PackedWeight
from flashdraft.kernels.interface import Mixture, Residual
from flashdraft.kernels.kinds import Activation

MAX_EXPERTS, MAX_CHOSEN = 512, 16

_Planned = tuple[Experts, Product, FewPlan]


def mix_row(
    residual: Residual, parts: Mixture, limits: DeviceLimits, arrivals: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`Kernels.mixture` for one row, in four launches; None where this is not the way."""
    router, packed = parts.router, (parts.gate_up, parts.expert_gate_up, parts.expert_down)
    if not isinstance(router, Tensor) or not all(isinstance(w, PackedWeight) for w in packed):
        return None
    if residual.x.shape[0] != 1 or not _can_choose(parts, residual.x.shape[1]):
        return None
    chosen = torch.empty(1, parts.num_chosen, device=router.device, dtype=torch.int64)
    shares = torch.empty(1, parts.num_chosen, device=router.device, dtype=torch.float32)
    experts = Experts(chosen, shares, are_settled=True)
    weights, activation = (parts.expert_gate_up, parts.expert_down), parts.activation
    # All of it is planned before the first launch: what comes after that cannot refuse.
    if not _can_multiply(parts.down, limits) or not is_readable_row(parts.experts_norm):
        return None
    planned = plan_mixture(*weights, experts, limits, 1)
    if planned is None:
        return None
    routed = Routed(router, parts.router_norm, parts.scale, chosen, shares)
    both = multiply_normed(
        residual, parts.norm, parts.eps, parts.gate_up, limits, arrivals, activation, routed
    )
    if both is None:
        return None
    stream, gated = both
    dense = multiply_few(gated, parts.down, limits, arrivals)
    assert dense is not None
    normed = Normed(Residual(stream), parts.experts_norm, parts.eps, stream)
    return stream, dense, _launch(stream, *weights, planned, activation, arrivals, normed)


def _can_choose(parts: Mixture, depth: int) -> bool:
    """Whether a block can, of a row of this depth."""
    router, scale = parts.router, parts.scale
    is_small = len(router) <= MAX_EXPERTS and parts.num_chosen <= min(MAX_CHOSEN, len(router))
    fits = router.is_contiguous() and is_readable(router) and router.shape[1] == depth
    fits = fits and scale.is_contiguous() and scale.dtype is torch.float32
    return is_small and fits and is_readable_row(parts.router_norm)


def mix_one(
    x: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    experts: Experts,
    activation: Activation,
    limits: DeviceLimits,
    arrivals: Tensor,
) -> Tensor | None:
    """`Kernels.experts` for one row, in two launches; None where this is not the way."""
    if x.shape[0] != 1 or not is_readable(x):
        return None
    assert experts.chosen.is_contiguous() and experts.chosen.dtype is torch.int64
    assert experts.shares is not None and experts.shares.dtype is torch.float32
    assert experts.shares.is_contiguous()
    planned = plan_mixture(gate_up, down, experts, limits, 0)
    if planned is None:
        return None
    return _launch(x, gate_up, down, planned, activation, arrivals)


def _launch(
    x: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    planned: tuple[_Planned, _Planned],
    activation: Activation,
    arrivals: Tensor,
    normed: Normed | None = None,
) -> Tensor:
    """Both products of the experts, of x or of its norm."""
    (ups, first, plan), (downs, second, last_plan) = planned
    between = launch(x, gate_up, first, plan, arrivals, activation, ups, normed)
    between = between.view(downs.chosen.numel(), -1)
    return launch(between, down, second, last_plan, arrivals, experts=downs)


def _can_multiply(weight: Any, limits: DeviceLimits) -> bool:
    """Whether `multiply_few` takes one row of this."""
    if not isinstance(weight, PackedWeight) or not beats_triton(1, weight):
        return False
    product = describe_product(weight)
    return product is not None and plan_few(1, product, limits) is not None


def plan_mixture(
    gate_up: PackedWeight, down: PackedWeight, experts: Experts, limits: DeviceLimits, normed: int
) -> tuple[_Planned, _Planned] | None:
    """Both products of the experts; None where there is no such plan."""
    if not beats_triton(1, gate_up):
        return None
    # The second of the launches: they were chosen before the first one.
    ups, downs = experts._replace(shares=None), experts._replace(are_settled=True)
    first, second = describe_product(gate_up, True, ups), describe_product(down, False, downs)
    if first is None or second is None:
        return None
    first = first._replace(normed=normed)
    plans = plan_few(1, first, limits), plan_few(1, second, limits)
    if plans[0] is None or plans[1] is None:
        return None
    return (ups, first, plans[0]), (downs, second, plans[1])
