# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Linears whose weights stay in few bits, in Triton. CUDA only.

`multiply_quantized` is x @ weight.T for few rows, `dequantize` the weight itself, for many rows and
for embeddings. How a tile is multiplied is triton_quantized_tiles.py's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.triton_launch import overlap, wait
from flashdraft.kernels.triton_quantized_layout import ROW_TILE, PackedWeight
from flashdraft.kernels.triton_quantized_tiles import (
    HALF,
    INT6,
    NONE,
    describe,
    high_values,
    load_numbers,
    pick_number,
    plane_values,
    two_halves,
)

MAX_ROWS = 64  # more of them are multiplied faster by torch
MAX_SPLITS = 16


class QuantizedPlan(NamedTuple):
    """Launch settings of one product."""

    block_m: int
    num_splits: int
    num_stages: int = 3


def plan_quantized(
    num_rows: int, weight: PackedWeight, num_processors: int, exact: bool = False
) -> QuantizedPlan:
    """Parts of the depth: as many as fill the card evenly; each of them costs a sum at the end.

    In steps, by what plans took on an H200 for the linears of Gemma 4: three to begin a program,
    three to add a part; fewer than four programs on a processor leave it waiting.
    """
    if exact:
        num_rows = MAX_ROWS
    block_m = max(8, triton.next_power_of_2(min(num_rows, MAX_ROWS)))
    num_steps, num_tiles = weight.codes.shape[-3], weight.codes.shape[-2] // ROW_TILE

    def cost(splits: int) -> int:
        rounds = -(-num_tiles * splits // num_processors)
        return max(rounds, 4) * (-(-num_steps // splits) + 3) + (splits > 1) * 3 * splits

    choices = [
        splits
        for splits in range(1, MAX_SPLITS + 1)
        if -(-num_steps // -(-num_steps // splits)) == splits and num_steps // splits >= 3
    ]
    return QuantizedPlan(block_m, min(choices, key=cost, default=1))


def multiply_quantized(
    x: Tensor, weight: PackedWeight, plan: QuantizedPlan, arrivals: Tensor
) -> Tensor:
    """x [num_rows, depth] bfloat16 @ weight.T; `arrivals` as in triton_linear.multiply_rows."""
    num_rows, depth = x.shape
    num_columns = weight.shape[0]
    output = torch.empty(num_rows, num_columns, device=x.device, dtype=x.dtype)
    if output.numel() == 0:
        return output
    assert x.stride(1) == 1 and weight.shape[1] == depth
    num_steps, packed_rows, _ = weight.codes.shape
    tiles = (triton.cdiv(num_rows, plan.block_m), packed_rows // ROW_TILE)
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
        FORMAT=describe(weight),
        **overlap(x),
        num_warps=2 if plan.block_m < 64 else 4,  # so many sums need more registers
        num_stages=plan.num_stages,
    )
    return output


def dequantize(
    weight: PackedWeight,
    dtype: torch.dtype,
    rows: Tensor | None = None,
    first: int = 0,
    count: int | None = None,
) -> Tensor:
    """Some rows of a weight [out, in] as floats: those named in `rows`, or `count` from `first`."""
    depth = weight.shape[-1]
    if rows is not None:
        count = rows.numel()
    elif count is None:
        count = weight.shape[0] - first
    output = torch.empty(count, depth, device=weight.codes.device, dtype=dtype)
    if output.numel() == 0:
        return output
    num_steps, packed_rows, _ = weight.codes.shape
    _dequantize[(triton.cdiv(count, ROW_TILE // 2), num_steps)](
        *weight.tensors,
        rows,
        output,
        first,
        count,
        packed_rows,
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
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One tile of the product, or one part of its depth."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * (2 * HALF) + tl.arange(0, HALF)
    first = tl.program_id(2) * split_steps
    end = tl.minimum(first + split_steps, num_steps)
    wait(PDL)
    total, total_other = two_halves(
        x, row_stride, rows, (rows < num_rows)[:, None], codes, high, scale, scale_over, minimum,
        minimum_over, columns, columns + HALF, packed_rows, depth, first, end, BLOCK_M, FORMAT,
    )  # fmt: skip
    _finish(
        total, total_other, rows, columns, num_rows, num_columns, packed_rows, output, parts,
        arrivals + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), BLOCK_M,
    )  # fmt: skip


@triton.jit
def _finish(
    total: tl.tensor,
    total_other: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    packed_rows: tl.tensor,
    output: tl.tensor,
    parts: tl.tensor,
    counter: tl.tensor,
    BLOCK_M: tl.constexpr,
) -> None:
    """Write both halves; where the depth is cut, their parts, and the sums if none is missing.

    Parts [splits, weight rows, rows of x] lie as the tensor cores hold them. They are added in
    their order, whichever program comes last.
    """
    if parts is None:
        _write(tl.trans(total), rows, columns, num_rows, num_columns, output)
        _write(tl.trans(total_other), rows, columns + HALF, num_rows, num_columns, output)
    else:
        num_splits = tl.num_programs(2)
        place = columns[:, None].to(tl.int64) * num_rows + rows[None, :]
        size = packed_rows.to(tl.int64) * num_rows
        half = HALF * num_rows
        real = (rows < num_rows)[None, :]
        mine = parts + tl.program_id(2) * size + place
        tl.store(mine, total, mask=real, cache_modifier=".cg")
        tl.store(mine + half, total_other, mask=real, cache_modifier=".cg")
        tl.debug_barrier()  # all of this program's part is written before it is counted
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
            first = tl.zeros([BLOCK_M, HALF], tl.float32)
            second = tl.zeros([BLOCK_M, HALF], tl.float32)
            turned = columns[None, :].to(tl.int64) * num_rows + rows[:, None]
            there = (rows < num_rows)[:, None]
            for other in range(0, num_splits, 8):
                for i in tl.static_range(8):  # in order, eight loads at a time; the last one may
                    counts = (other + i < num_splits).to(tl.float32)  # be loaded again, for nothing
                    part = parts + tl.minimum(other + i, num_splits - 1) * size + turned
                    first += tl.load(part, mask=there, other=0.0, cache_modifier=".cg") * counts
                    part += half
                    second += tl.load(part, mask=there, other=0.0, cache_modifier=".cg") * counts
            _write(first, rows, columns, num_rows, num_columns, output)
            _write(second, rows, columns + HALF, num_rows, num_columns, output)
            tl.atomic_xchg(counter, 0)  # ready for the next call


@triton.jit
def _write(
    total: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    output: tl.tensor,
) -> None:
    real = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    target = output + rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    tl.store(target, total.to(output.dtype.element_ty), mask=real)


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
    packed_rows: tl.tensor,
    depth: tl.tensor,
    FORMAT: tl.constexpr,
) -> None:
    """One step of HALF rows, as floats."""
    places = tl.program_id(0) * HALF + tl.arange(0, HALF)
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
    tile = tl.load(codes + place)
    numbers, over, lows, lows_over = load_numbers(
        scale, scale_over, minimum, minimum_over, step, rows, packed_rows, FORMAT
    )
    for plane in tl.static_range(planes):
        values = plane_values(tile, plane, FORMAT).to(tl.float32)
        if FORMAT.code == INT6:
            values += high_values(tl.load(high + place), plane, FORMAT).to(tl.float32)
        group = plane * FORMAT.groups_per_step // planes
        if FORMAT.steps_per_group == 0:
            factor = tl.load(scale + rows)
        else:
            factor = pick_number(
                numbers, over, scale, step, rows, packed_rows, group, FORMAT.scale, FORMAT
            )
        values = values * factor[:, None]
        if FORMAT.minimum != NONE:
            low = pick_number(
                lows, lows_over, minimum, step, rows, packed_rows, group, FORMAT.minimum, FORMAT
            )
            values = values - low[:, None]
        k = (step * planes + plane) * width + lanes
        target = output + places.to(tl.int64)[:, None] * depth + k[None, :]
        tl.store(
            target, values.to(output.dtype.element_ty), mask=real[:, None] & (k < depth)[None, :]
        )
