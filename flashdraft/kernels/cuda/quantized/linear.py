# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Linears whose weights stay in few bits, in Triton. CUDA only.

`multiply_quantized` is x @ weight.T for few rows, `dequantize` the weight itself, for many rows and
for embeddings. How a tile is multiplied is tiles.py's.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.cuda.dense.rows import gate
from flashdraft.kernels.cuda.quantized.layout import PackedWeight
from flashdraft.kernels.cuda.quantized.tiles import (
    BLOCK_N,
    INT6,
    NONE,
    describe,
    high_values,
    load_numbers,
    multiply_blocks,
    pick_number,
    plane_values,
)
from flashdraft.kernels.cuda.quantized.units import pick_expert
from flashdraft.kernels.kinds import Activation

TILE_ROWS = 32  # of x, at most
MAX_SPLITS = 16
MIN_STEPS = 3  # of a part
MIN_PROGRAMS = 4  # of a processor; fewer leave it waiting
WARPS = {8: 2, 16: 4, 32: 4}  # four together have instructions of their own on an H200
# Of a thread, by rows of x and blocks of weight rows: left to itself the compiler takes up to twice
# as many, and half as many programs find room. Fewer spill on some card.
REGISTERS = {(8, 1): 64, (8, 2): 88, (16, 1): 80, (16, 2): 128, (32, 1): 112, (32, 2): 168}


class QuantizedPlan(NamedTuple):
    """Launch settings of one product."""

    block_m: int
    num_splits: int
    num_warps: int
    registers: int
    num_stages: int = 3

    @property
    def block_n(self) -> int:
        """Weight rows of a block: sixteen for every warp."""
        return 16 * self.num_warps


def plan_quantized(
    num_rows: int,
    weight: PackedWeight,
    num_processors: int,
    exact: bool = False,
    gated: bool = False,
) -> QuantizedPlan:
    """Parts of the depth: as many as fill the card evenly; each of them costs a sum at the end.

    Measured on an H200 for the linears of Gemma 4.
    exact: as if there were TILE_ROWS rows, however many there are.
    """
    return _plan(
        TILE_ROWS if exact else num_rows,
        weight.num_steps,
        weight.packed_rows,
        weight.steps_per_group > 0,
        gated,
        num_processors,
    )


@functools.lru_cache(maxsize=1024)
def _plan(
    num_rows: int,
    num_steps: int,
    packed_rows: int,
    has_scales: bool,  # besides those of whole rows
    gated: bool,
    num_processors: int,
) -> QuantizedPlan:
    block_m = max(8, triton.next_power_of_2(min(num_rows, TILE_ROWS)))
    blocks, num_warps = 2 if gated else 1, WARPS[block_m]
    num_tiles = packed_rows // (16 * blocks * num_warps) * triton.cdiv(num_rows, block_m)
    # Programs of a processor: others wait until all of these are done. Measured with programs of
    # the next product beside them; since then it starts later.
    at_once = 8 if block_m == 8 else 4 if gated else 1
    # of a program, and of a part; in steps
    begin, addition = (0.5, 0.5) if block_m == 8 else (3, 3 if has_scales else 15)

    def cost(splits: int) -> float:
        rounds = max(triton.cdiv(num_tiles * splits, num_processors), MIN_PROGRAMS)
        rounds = triton.cdiv(rounds, at_once) * at_once
        return rounds * (triton.cdiv(num_steps, splits) + begin) + (splits > 1) * addition * splits

    num_splits = min(split_choices(num_steps), key=cost)
    return QuantizedPlan(block_m, num_splits, num_warps, REGISTERS[block_m, blocks])


def split_choices(num_steps: int) -> list[int]:
    """Numbers of parts that a depth of so many steps may be cut into: none is empty, or short."""
    most = min(MAX_SPLITS, max(1, num_steps // MIN_STEPS))
    return sorted({triton.cdiv(num_steps, triton.cdiv(num_steps, n)) for n in range(1, most + 1)})


def multiply_quantized(
    x: Tensor,
    weight: PackedWeight,
    plan: QuantizedPlan,
    arrivals: Tensor,
    activation: Activation | None = None,
) -> Tensor:
    """x [num_rows, depth] bfloat16 @ weight.T; `arrivals` as in dense.linear.multiply_rows.

    With an activation the weight is [gate | up] by its rows: the result is that of `Kernels.gated`.
    """
    num_rows, depth = x.shape
    num_columns = weight.shape[0] if activation is None else weight.shape[0] // 2
    output = torch.empty(num_rows, num_columns, device=x.device, dtype=x.dtype)
    if output.numel() == 0:
        return output
    assert x.stride(1) == 1 and weight.shape[1] == depth
    num_steps, packed_rows, _ = weight.codes.shape
    assert packed_rows % plan.block_n == 0
    tiles = (triton.cdiv(num_rows, plan.block_m), triton.cdiv(num_columns, plan.block_n))
    parts = None
    if plan.num_splits > 1:
        assert arrivals.numel() >= tiles[0] * tiles[1]
        shape = (plan.num_splits, packed_rows, num_rows)
        parts = torch.empty(shape, device=x.device, dtype=torch.float32)
    _multiply[(*tiles, plan.num_splits)](
        x,
        *weight.tensors,
        output,
        parts,
        arrivals,
        num_rows,
        num_columns,
        packed_rows,
        depth,
        x.stride(0),
        triton.cdiv(num_steps, plan.num_splits),
        num_steps,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        GATED=activation is not None,
        GELU=activation is Activation.GELU_TANH,
        FORMAT=describe(weight),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        maxnreg=plan.registers,
    )
    return output


def dequantize(
    weight: PackedWeight,
    dtype: torch.dtype,
    rows: Tensor | None = None,
    first: int = 0,
    count: int | None = None,
) -> Tensor:
    """Some rows of a weight [out, in], or of all weights of a stack, as floats.

    Those named in `rows`, or `count` from `first`.
    """
    *stack, num_rows, depth = weight.shape
    if rows is not None:
        count = rows.numel()
    elif count is None:
        count = num_rows - first
    output = torch.empty(*stack, count, depth, device=weight.codes.device, dtype=dtype)
    if output.numel() == 0:
        return output
    _dequantize[(triton.cdiv(count, BLOCK_N.value), weight.num_steps, math.prod(stack))](
        *weight.tensors,
        rows,
        output,
        first,
        count,
        *weight.strides,
        weight.packed_rows,
        depth,
        FORMAT=describe(weight),
        num_warps=2,
    )
    return output


@triton.jit(do_not_specialize=["num_rows", "split_steps"])
def _multiply(
    x: tl.tensor,
    codes: tl.tensor,
    high: tl.tensor,
    scale: tl.tensor,
    scale_over: tl.tensor,
    minimum: tl.tensor,
    minimum_over: tl.tensor,
    output: tl.tensor,
    parts: tl.tensor,
    arrivals: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    packed_rows: tl.tensor,
    depth: tl.tensor,
    row_stride: tl.tensor,
    split_steps: tl.tensor,
    num_steps: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    FORMAT: tl.constexpr,
) -> None:
    """One tile of the product, or one part of its depth."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(2) * split_steps
    end = tl.minimum(first + split_steps, num_steps)
    weight = (codes, high, scale, scale_over, minimum, minimum_over)
    start = tl.program_id(1) * BLOCK_N
    columns = start + tl.arange(0, BLOCK_N)
    starts = (start, start + num_columns) if GATED else (start,)
    totals = multiply_blocks(
        x, row_stride, rows, (rows < num_rows)[:, None], weight, starts, packed_rows, depth, first,
        end, BLOCK_M, BLOCK_N, FORMAT,
    )  # fmt: skip
    real = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    target = output + rows[:, None] * num_columns + columns[None, :]
    if parts is None:
        _write(target, real, tl.trans(totals[0]), tl.trans(totals[-1]), GATED, GELU)
    else:
        size = packed_rows.to(tl.int64) * num_rows
        for i in tl.static_range(len(starts)):  # as the tensor cores hold them
            place = (starts[i] + tl.arange(0, BLOCK_N))[:, None] * num_rows + rows[None, :]
            part = parts + tl.program_id(2) * size + place
            tl.store(part, totals[i], mask=tl.trans(real), cache_modifier=".cg")
        tl.debug_barrier()  # all of this program's part is written before it is counted
        counter = arrivals + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(2) - 1:
            sums = _add_parts(parts, size, rows, starts, real, num_rows, BLOCK_M, BLOCK_N)
            _write(target, real, sums[0], sums[-1], GATED, GELU)
            tl.atomic_xchg(counter, 0)  # ready for the next call


@triton.jit
def _add_parts(
    parts: tl.tensor,
    size: tl.tensor,
    rows: tl.tensor,
    starts: tl.tuple,
    real: tl.tensor,
    num_rows: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tuple:
    """All parts [splits, weight rows, rows of x] in their order, as blocks [BLOCK_M, BLOCK_N].

    Some are loaded at a time; the last one may be loaded again, for nothing.
    """
    AT_A_TIME: tl.constexpr = max(1, 64 // (BLOCK_M * len(starts)))
    num_splits = tl.num_programs(2)
    totals: tl.tuple = ()
    for _ in tl.static_range(len(starts)):
        totals = totals + (tl.zeros([BLOCK_M, BLOCK_N], tl.float32),)
    for other in range(0, num_splits, AT_A_TIME):
        for i in tl.static_range(AT_A_TIME):
            part = parts + tl.minimum(other + i, num_splits - 1) * size
            counts = (other + i < num_splits).to(tl.float32)
            sums: tl.tuple = ()
            for j in tl.static_range(len(starts)):
                place = (starts[j] + tl.arange(0, BLOCK_N))[None, :] * num_rows + rows[:, None]
                found = tl.load(part + place, mask=real, other=0.0, cache_modifier=".cg")
                sums = sums + (totals[j] + found * counts,)
            totals = sums
    return totals


@triton.jit
def _write(
    target: tl.tensor,
    real: tl.tensor,
    total: tl.tensor,
    up: tl.tensor,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
) -> None:
    """A tile [BLOCK_M, BLOCK_N], which may be a gate."""
    dtype: tl.constexpr = target.dtype.element_ty
    if GATED:
        total = gate(total, up, dtype, GELU)
    tl.store(target, total.to(dtype), mask=real)


@triton.jit(do_not_specialize=["first", "count"])
def _dequantize(
    codes: tl.tensor,
    high: tl.tensor,
    scale: tl.tensor,
    scale_over: tl.tensor,
    minimum: tl.tensor,
    minimum_over: tl.tensor,
    chosen: tl.tensor,  # which rows; None for those from `first` on
    output: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    codes_stride: tl.tensor,
    scale_stride: tl.tensor,
    minimum_stride: tl.tensor,
    over_stride: tl.tensor,
    packed_rows: tl.tensor,
    depth: tl.tensor,
    FORMAT: tl.constexpr,
) -> None:
    """One step of BLOCK_N rows of one weight, as floats."""
    expert = tl.program_id(2).to(tl.int64)
    all_weights = (codes, high, scale, scale_over, minimum, minimum_over)
    strides = (codes_stride, scale_stride, minimum_stride, over_stride)
    weight = pick_expert(all_weights, strides, expert, FORMAT)
    output += expert * count * depth
    places = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.program_id(1)
    planes: tl.constexpr = FORMAT.planes
    width: tl.constexpr = FORMAT.lanes
    lanes = tl.arange(0, width)
    real = places < count
    if chosen is None:
        rows = tl.where(real, first + places, 0)
    else:
        rows = tl.load(chosen + places, mask=real, other=0).to(tl.int32)
    place = (step * packed_rows + rows).to(tl.int64)[:, None] * width + lanes[None, :]
    tile = tl.load(weight[0] + place)
    numbers, over, lows, lows_over = load_numbers(weight, step, rows, packed_rows, FORMAT)
    for plane in tl.static_range(planes):
        values = plane_values(tile, plane, FORMAT).to(tl.float32) * FORMAT.gain
        if FORMAT.code == INT6:
            values += high_values(tl.load(weight[1] + place), plane, FORMAT).to(tl.float32)
        group = plane * FORMAT.groups_per_step // planes
        if FORMAT.steps_per_group == 0:
            factor = tl.load(weight[2] + rows)
        else:
            factor = pick_number(
                numbers, over, weight[2], step, rows, packed_rows, group, FORMAT.scale, FORMAT
            )
        values = values * factor[:, None]
        if FORMAT.minimum != NONE:
            low = pick_number(
                lows, lows_over, weight[4], step, rows, packed_rows, group, FORMAT.minimum, FORMAT
            )
            values = values - low[:, None]
        k = (step * planes + plane) * width + lanes
        target = output + places.to(tl.int64)[:, None] * depth + k[None, :]
        tl.store(
            target, values.to(output.dtype.element_ty), mask=real[:, None] & (k < depth)[None, :]
        )
