# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Rows in 8 bits times weights in the same 8 bits: which way, and the one in Triton. CUDA only.

On Hopper e4m3 goes to fp8_rows.py. Elsewhere Triton multiplies: e4m3 where a card has it, int8 on
all of them. Every step's products are added up in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.cuda.card import capability_of
from flashdraft.kernels.cuda.dense.rows import gate
from flashdraft.kernels.cuda.plan import LEAST_FP8_CAPABILITY, DeviceLimits
from flashdraft.kernels.cuda.quantized.activations import FP8, CodedRows, code_rows
from flashdraft.kernels.cuda.quantized.fp8_rows import can_multiply, multiply_fp8, plan_fp8
from flashdraft.kernels.cuda.quantized.layout import Code, PackedWeight
from flashdraft.kernels.cuda.quantized.tiles import describe, load_numbers, pick_number
from flashdraft.kernels.kinds import Activation

# Rows of x from which codes are multiplied; fewer become floats again, and the weight's bytes take
# the time either way. Estimated.
MIN_ROWS = 17
LANES = (32, 64)  # of a weight's step: what tensor cores take


class CodedPlan(NamedTuple):
    """Launch settings of one product in Triton."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 3


def multiply_coded(
    x: Tensor,
    weight: PackedWeight,
    limits: DeviceLimits,
    arrivals: Tensor,
    activation: Activation | None = None,
) -> Tensor | None:
    """x [num_rows, depth] @ weight.T, of the codes of both; `arrivals` as in `multiply_rows`.

    With an activation the weight is [gate | up] by its rows: the result is that of `Kernels.gated`.
    None where this is not the way to multiply.
    """
    num_rows, gated = x.shape[0], activation is not None
    if num_rows < MIN_ROWS or not _has_instructions(weight, x.device):
        return None
    if can_multiply(weight, x.device) and x.dtype is torch.bfloat16:
        columns = weight.shape[0] // (2 if gated else 1)
        plan = plan_fp8(num_rows, columns, weight.num_steps, gated, limits)
        if plan is not None:
            coded = code_rows(x, weight, plan.tile.rows)
            return multiply_fp8(coded, weight, plan, arrivals, x.dtype, activation)
    if weight.lanes not in LANES or not weight.is_whole:
        return None
    return multiply_tiles(code_rows(x, weight), weight, x.dtype, activation)


def plan_coded(num_rows: int, gated: bool) -> CodedPlan:
    """Tiles that the smallest card's shared memory has room for; estimated."""
    block_m = max(16, triton.next_power_of_2(min(num_rows, 64 if gated else 128)))
    return CodedPlan(block_m, 64, 4 if block_m < 64 else 8)


def multiply_tiles(
    x: CodedRows, weight: PackedWeight, dtype: torch.dtype, activation: Activation | None = None
) -> Tensor:
    """The product in Triton."""
    num_rows, gated = len(x.codes), activation is not None
    num_columns = weight.shape[0] // (2 if gated else 1)
    output = torch.empty(num_rows, num_columns, device=x.codes.device, dtype=dtype)
    plan = plan_coded(num_rows, gated)
    tiles = triton.cdiv(num_rows, plan.block_m), triton.cdiv(num_columns, plan.block_n)
    _multiply_tile[tiles](
        x.codes,
        x.scale,
        *weight.tensors,
        output,
        num_rows,
        num_columns,
        weight.packed_rows,
        weight.num_steps,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        GATED=gated,
        GELU=activation is Activation.GELU_TANH,
        FORMAT=describe(weight),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    return output


def _has_instructions(weight: PackedWeight, device: torch.device) -> bool:
    capability = capability_of(device)
    if capability is None or weight.code is not Code.FP8:
        return True
    return capability >= LEAST_FP8_CAPABILITY


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_tile(
    x: tl.tensor,
    x_scale: tl.tensor,
    codes: tl.tensor,
    high: tl.tensor,
    scale: tl.tensor,
    scale_over: tl.tensor,
    minimum: tl.tensor,
    minimum_over: tl.tensor,
    output: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    packed_rows: tl.tensor,
    num_steps: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    FORMAT: tl.constexpr,
) -> None:
    """One tile of the product."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < num_rows
    weight = (codes, high, scale, scale_over, minimum, minimum_over)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(num_steps):
        place = (rows.to(tl.int64) * num_steps + step)[:, None] * FORMAT.lanes
        lanes = tl.arange(0, FORMAT.lanes)[None, :]
        tile = tl.load(x + place + lanes, mask=is_row[:, None], other=0)
        total += _step(tile, weight, step, columns, packed_rows, FORMAT)
        if GATED:
            up += _step(tile, weight, step, columns + num_columns, packed_rows, FORMAT)
    of_x = tl.load(x_scale + rows, mask=is_row, other=0.0)[:, None]
    if FORMAT.steps_per_group == 0:
        total *= tl.load(scale + tl.minimum(columns, packed_rows - 1))[None, :]
        if GATED:
            up *= tl.load(scale + tl.minimum(columns + num_columns, packed_rows - 1))[None, :]
    total *= of_x
    dtype: tl.constexpr = output.dtype.element_ty
    if GATED:
        total = gate(total, up * of_x, dtype, GELU)
    target = output + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(target, total.to(dtype), mask=is_row[:, None] & (columns < num_columns)[None, :])


@triton.jit
def _step(
    x: tl.tensor,
    weight: tl.tuple,
    step: tl.tensor,
    rows: tl.tensor,
    packed_rows: tl.tensor,
    FORMAT: tl.constexpr,
) -> tl.tensor:
    """The products of a step, plane by plane, with the weight's scales of it."""
    rows = tl.minimum(rows, packed_rows - 1)
    place = (step * packed_rows + rows).to(tl.int64)[:, None] * FORMAT.lanes
    tile = tl.load(weight[0] + place + tl.arange(0, FORMAT.lanes)[None, :])
    numbers, over, _, _ = load_numbers(weight, step, rows, packed_rows, FORMAT)
    total = tl.zeros([x.shape[0], tile.shape[0]], tl.float32)
    planes: tl.constexpr = FORMAT.planes
    for plane in tl.static_range(planes):
        left, right = _codes(x, plane, FORMAT), tl.trans(_codes(tile, plane, FORMAT))
        if FORMAT.code == FP8:
            products = tl.dot(left, right, max_num_imprecise_acc=0)
        else:
            products = tl.dot(left, right, out_dtype=tl.int32).to(tl.float32)
        if FORMAT.steps_per_group > 0:
            group = plane * FORMAT.groups_per_step // FORMAT.planes
            factor = pick_number(
                numbers, over, weight[2], step, rows, packed_rows, group, FORMAT.scale, FORMAT
            )
            products *= factor[None, :]
        total += products
    return total


@triton.jit
def _codes(tile: tl.tensor, plane: tl.constexpr, FORMAT: tl.constexpr) -> tl.tensor:
    """A plane of int16, as tensor cores take it."""
    byte = (tile >> 8 * plane).to(tl.int8)
    return byte.to(tl.float8e4nv, bitcast=True) if FORMAT.code == FP8 else byte
