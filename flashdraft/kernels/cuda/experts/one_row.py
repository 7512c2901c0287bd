# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""A mixture of experts over one row in Triton: its experts are read once, in two launches.

CUDA only. One row leaves the tensor cores nothing to do: weights go straight to registers and are
multiplied there. The first launch ends with the activation, the second with the weighted sum, all
in float32 and in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.cuda.dense.rows import gate
from flashdraft.kernels.cuda.experts.plan import ExpertsPlan
from flashdraft.kernels.cuda.overlap import overlap, wait
from flashdraft.kernels.kinds import Activation


def mix_one_row(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    chosen: Tensor,
    weights: Tensor,
    activation: Activation,
    plan: ExpertsPlan,
) -> Tensor:
    """`Kernels.experts` for x [1, hidden], with all experts in one tensor each.

    gate_up [num_experts, 2 * inner, hidden], down [num_experts, hidden, inner].
    """
    hidden, inner, num_chosen = x.shape[1], down.shape[2], chosen.shape[1]
    between = torch.empty(num_chosen, inner, device=x.device, dtype=x.dtype)
    output = torch.empty(1, hidden, device=x.device, dtype=x.dtype)
    num_tiles = triton.cdiv(hidden, plan.down.block_n)
    block_c = triton.next_power_of_2(num_chosen)
    _up_one[(triton.cdiv(inner, plan.up.block_n), num_chosen)](
        x,
        gate_up,
        chosen,
        between,
        INNER=inner,
        HIDDEN=hidden,
        GELU=activation is Activation.GELU_TANH,
        BLOCK_N=plan.up.block_n,
        BLOCK_K=plan.up.block_k,
        STAGES=plan.up.num_stages,
        **overlap(x),
        num_warps=plan.up.num_warps,
    )
    _down_one[(num_tiles,)](
        between,
        down,
        chosen,
        weights,
        output,
        INNER=inner,
        HIDDEN=hidden,
        NUM_CHOSEN=num_chosen,
        BLOCK_C=block_c,
        BLOCK_N=plan.down.block_n,
        BLOCK_K=plan.down.block_k,
        STAGES=plan.down.num_stages,
        **overlap(x),
        num_warps=plan.down.num_warps,
    )
    return output


@triton.jit
def load_tile(
    pointers: tl.tensor, real_row: tl.tensor, real_lane: tl.tensor, WHOLE: tl.constexpr
) -> tl.tensor:
    """A tile of a matrix; without masks where the tiles divide it."""
    if WHOLE:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=real_row[:, None] & real_lane[None, :], other=0.0)
    return tile


@triton.jit
def _up_one(
    x: tl.tensor,
    gate_up: tl.tensor,
    chosen: tl.tensor,
    between: tl.tensor,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Some columns of one chosen expert."""
    wait(PDL)
    choice = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    real = columns < INNER
    whole: tl.constexpr = INNER % BLOCK_N == 0 and HIDDEN % BLOCK_K == 0
    expert = tl.load(chosen + choice)
    weight = gate_up + expert * (2 * INNER * HIDDEN) + columns[:, None] * HIDDEN + lanes[None, :]
    gates = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k in tl.range(0, HIDDEN, BLOCK_K, num_stages=STAGES):
        real_lane = k + lanes < HIDDEN
        row = tl.load(x + k + lanes, mask=real_lane, other=0.0).to(tl.float32)[None, :]
        gates += load_tile(weight + k, real, real_lane, whole).to(tl.float32) * row
        ups += load_tile(weight + INNER * HIDDEN + k, real, real_lane, whole).to(tl.float32) * row
    gated = gate(tl.sum(gates, 1), tl.sum(ups, 1), between.dtype.element_ty, GELU)
    tl.store(between + choice * INNER + columns, gated.to(between.dtype.element_ty), mask=real)


@triton.jit
def _down_one(
    between: tl.tensor,
    down: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    output: tl.tensor,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Some columns of all chosen experts, and their weighted sum."""
    wait(PDL)
    places = tl.arange(0, BLOCK_C * BLOCK_N)  # [choice, column]
    choices = places // BLOCK_N
    columns = tl.program_id(0) * BLOCK_N + places % BLOCK_N
    lanes = tl.arange(0, BLOCK_K)
    real = (choices < NUM_CHOSEN) & (columns < HIDDEN)
    whole: tl.constexpr = HIDDEN % BLOCK_N == 0 and INNER % BLOCK_K == 0 and NUM_CHOSEN == BLOCK_C
    experts = tl.load(chosen + choices, mask=choices < NUM_CHOSEN, other=0)
    weight = down + (experts * HIDDEN + columns)[:, None] * INNER + lanes[None, :]
    rows = between + choices[:, None] * INNER + lanes[None, :]
    totals = tl.zeros([BLOCK_C * BLOCK_N, BLOCK_K], tl.float32)
    for k in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
        real_lane = k + lanes < INNER
        row = load_tile(rows + k, real, real_lane, whole).to(tl.float32)
        totals += load_tile(weight + k, real, real_lane, whole).to(tl.float32) * row
    total = tl.sum(totals, 1).to(output.dtype.element_ty).to(tl.float32)
    total *= tl.load(weights + choices, mask=choices < NUM_CHOSEN, other=0.0)
    mixed = tl.sum(tl.reshape(total, [BLOCK_C, BLOCK_N]), 0)
    target = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(output + target, mixed.to(output.dtype.element_ty), mask=target < HIDDEN)
