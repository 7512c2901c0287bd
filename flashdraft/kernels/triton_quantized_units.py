# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Units of a mixture of quantised experts, inside a Triton kernel: rows of one expert, in one tile.

A *pair* is a row and one of its choices: row * number of choices + choice. Who launches what is
triton_quantized_experts.py's; how a tile is multiplied, triton_quantized_tiles.py's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashdraft.kernels.triton_quantized_tiles import INT6, NONE, UNSIGNED, two_halves


@triton.jit
def multiply_expert(
    x: tl.tensor,
    row_stride: tl.tensor,
    rows: tl.tensor,
    real_row: tl.tensor,
    expert: tl.tensor,
    codes: tl.tensor,
    high: tl.tensor,
    scale: tl.tensor,
    scale_over: tl.tensor,
    minimum: tl.tensor,
    minimum_over: tl.tensor,
    codes_stride: tl.tensor,
    scale_stride: tl.tensor,
    minimum_stride: tl.tensor,
    over_stride: tl.tensor,
    columns: tl.tensor,
    other: tl.tensor,
    packed_rows: tl.tensor,
    depth: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    BLOCK_M: tl.constexpr,
    FORMAT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`two_halves` with the weight of one expert of many."""
    codes += expert * codes_stride
    scale += expert * scale_stride
    if FORMAT.code == INT6:
        high += expert * codes_stride
    if FORMAT.scale >= UNSIGNED:
        scale_over += expert * over_stride
    if FORMAT.minimum != NONE:
        minimum += expert * minimum_stride
    if FORMAT.minimum >= UNSIGNED:
        minimum_over += expert * over_stride
    return two_halves(
        x, row_stride, rows, real_row, codes, high, scale, scale_over, minimum, minimum_over,
        columns, other, packed_rows, depth, first, end, BLOCK_M, FORMAT,
    )  # fmt: skip


@triton.jit
def single_unit(
    chosen: tl.tensor, unit: tl.tensor, BLOCK_M: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The expert and the pairs of a unit where there is one row: a unit is one of its choices."""
    expert = tl.load(chosen + unit, cache_modifier=".cg").to(tl.int64)
    return expert, tl.where(tl.arange(0, BLOCK_M) == 0, unit, -1)


@triton.jit
def gather_unit(
    theirs: tl.tensor,
    tiles: tl.tensor,
    ends: tl.tensor,
    unit: tl.tensor,
    NUM_CHOSEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The expert of a unit, and its pairs; -1 where it has fewer than BLOCK_M."""
    before = unit - (ends - tiles)  # units of the same expert
    is_here = (before >= 0) & (unit < ends)
    expert = tl.sum(tl.where(is_here, tl.arange(0, BLOCK_E), 0), 0)
    skipped = tl.sum(tl.where(is_here, before, 0), 0) * BLOCK_M
    is_mine = theirs == expert
    asks = tl.sum(is_mine.to(tl.int32), 1)
    choice = tl.sum(tl.where(is_mine, tl.arange(0, BLOCK_C)[None, :], 0), 1)
    pairs = tl.arange(0, BLOCK_R) * NUM_CHOSEN + choice
    rank = tl.where(asks > 0, tl.cumsum(asks, 0) - 1 - skipped, -1)
    is_there = rank[:, None] == tl.arange(0, BLOCK_M)[None, :]
    return expert.to(tl.int64), tl.sum(tl.where(is_there, pairs[:, None] + 1, 0), 0) - 1
