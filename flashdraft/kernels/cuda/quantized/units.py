# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Units of a mixture of quantised experts, inside a Triton kernel: rows of one expert, in one tile.

A *pair* is a row and one of its choices: row * number of choices + choice. Who launches what is
linear.py's and experts/quantized.py's; how a tile is multiplied, tiles.py's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashdraft.kernels.cuda.quantized.tiles import INT6, NONE, UNSIGNED


@triton.jit
def pick_expert(
    weight: tl.tuple, strides: tl.tuple, expert: tl.tensor, FORMAT: tl.constexpr
) -> tl.tuple:
    """The tensors of one expert (an int64); `strides` as PackedWeight.strides has them."""
    codes = weight[0] + expert * strides[0]
    scale = weight[2] + expert * strides[1]
    # What a format has not is never read, but a function must return something.
    high, scale_over, minimum, minimum_over = codes, codes, codes, codes
    if FORMAT.code == INT6:
        high = weight[1] + expert * strides[0]
    if FORMAT.scale >= UNSIGNED:
        scale_over = weight[3] + expert * strides[3]
    if FORMAT.minimum != NONE:
        minimum = weight[4] + expert * strides[2]
    if FORMAT.minimum >= UNSIGNED:
        minimum_over = weight[5] + expert * strides[3]
    return codes, high, scale, scale_over, minimum, minimum_over


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
    choice = tl.min(tl.where(is_mine, tl.arange(0, BLOCK_C)[None, :], BLOCK_C), 1)
    asks = (choice < BLOCK_C).to(tl.int32)
    pairs = tl.arange(0, BLOCK_R) * NUM_CHOSEN + choice
    rank = tl.where(asks > 0, tl.cumsum(asks, 0) - 1 - skipped, -1)
    is_there = rank[:, None] == tl.arange(0, BLOCK_M)[None, :]
    return expert.to(tl.int64), tl.sum(tl.where(is_there, pairs[:, None] + 1, 0), 0) - 1
