# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""A mixture of experts over several rows in Triton: grouped products over sorted rows. CUDA only.

Four launches: sort (routing.py), up with the activation, down, and the weighted sum. A tile
of a product is one expert, some of its rows and some of its columns. How many tiles there are only
the device knows: a fixed number of programs takes them in turns, so that nothing waits for the host
and experts that nobody chose cost nothing. Every sum has a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.cuda.dense.rows import gate
from flashdraft.kernels.cuda.experts.one_row import load_tile
from flashdraft.kernels.cuda.experts.plan import ExpertsPlan, TilePlan
from flashdraft.kernels.cuda.experts.routing import SortedPairs, sort_pairs
from flashdraft.kernels.cuda.overlap import overlap, wait
from flashdraft.kernels.kinds import Activation

MIX_BLOCK = 1024


def mix_rows(
    x: Tensor,
    gate_up: Any,
    down: Any,
    chosen: Tensor,
    weights: Tensor,
    activation: Activation,
    plan: ExpertsPlan,
    num_processors: int,
    as_floats: Callable[[Any], Tensor] = lambda weight: weight,
) -> Tensor:
    """`Kernels.experts` with all experts in one weight each.

    gate_up [num_experts, 2 * inner, hidden], down [num_experts, hidden, inner]. What `as_floats`
    makes of a weight is gone before the next one is made.
    """
    num_rows, hidden = x.shape
    if num_rows == 0:
        return torch.empty_like(x)
    pairs = sort_pairs(chosen, gate_up.shape[0], plan.block_m)
    between = multiply_up(x, as_floats(gate_up), pairs, activation, plan, num_processors)
    parts = multiply_down(between, as_floats(down), pairs, plan, num_processors)
    return mix_parts(parts, weights)


def multiply_up(
    x: Tensor,
    gate_up: Tensor,
    pairs: SortedPairs,
    activation: Activation,
    plan: ExpertsPlan,
    num_processors: int,
) -> Tensor:
    """activation(gate(x)) * up(x) of every pair, in the order of their experts."""
    num_pairs, inner = pairs.order.shape[0], gate_up.shape[1] // 2
    between = torch.empty(num_pairs, inner, device=x.device, dtype=x.dtype)
    num_blocks = triton.cdiv(inner, plan.up.block_n)
    _up[_grid(pairs, num_blocks, plan.up, num_processors)](
        x,
        gate_up,
        *pairs,
        between,
        INNER=inner,
        HIDDEN=x.shape[1],
        NUM_CHOSEN=num_pairs // x.shape[0],
        GELU=activation is Activation.GELU_TANH,
        **_tile(plan.up, plan.block_m),
        **overlap(x),
    )
    return between


def multiply_down(
    between: Tensor, down: Tensor, pairs: SortedPairs, plan: ExpertsPlan, num_processors: int
) -> Tensor:
    """What every pair's expert makes of it, in the order of the pairs themselves."""
    hidden, inner = down.shape[1:]
    parts = torch.empty(between.shape[0], hidden, device=between.device, dtype=between.dtype)
    num_blocks = triton.cdiv(hidden, plan.down.block_n)
    _down[_grid(pairs, num_blocks, plan.down, num_processors)](
        between,
        down,
        *pairs,
        parts,
        INNER=inner,
        HIDDEN=hidden,
        **_tile(plan.down, plan.block_m),
        **overlap(between),
    )
    return parts


def mix_parts(parts: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum over every row's choices, in their order."""
    (num_rows, num_chosen), hidden = weights.shape, parts.shape[1]
    output = torch.empty(num_rows, hidden, device=parts.device, dtype=parts.dtype)
    _mix[(num_rows, triton.cdiv(hidden, MIX_BLOCK))](
        parts,
        weights,
        output,
        HIDDEN=hidden,
        NUM_CHOSEN=num_chosen,
        BLOCK=MIX_BLOCK,
        **overlap(weights),
        num_warps=4,
    )
    return output


def _grid(pairs: SortedPairs, num_blocks: int, tile: TilePlan, num_processors: int) -> tuple[int]:
    return (min(pairs.max_tiles * num_blocks, num_processors * tile.resident),)


def _tile(tile: TilePlan, block_m: int) -> dict[str, Any]:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


@triton.jit
def multiply_tile(
    left: tl.tensor,  # [BLOCK_M, BLOCK_K] pointers
    right: tl.tensor,  # [columns, BLOCK_K] pointers
    real_column: tl.tensor,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tl.tensor:
    """left @ right.T over the whole depth, in float32."""
    lanes = tl.arange(0, BLOCK_K)
    every_row = tl.full([BLOCK_M], True, tl.int1)
    total = tl.zeros([BLOCK_M, NUM_COLUMNS], tl.float32)
    for k in range(0, DEPTH, BLOCK_K):
        real_lane = k + lanes < DEPTH
        a = load_tile(left + k, every_row, real_lane, DEPTH % BLOCK_K == 0)
        b = load_tile(right + k, real_column, real_lane, WHOLE)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize_on_alignment=["tile_first", "tile_last"])
def _up(
    x: tl.tensor,
    gate_up: tl.tensor,
    order: tl.tensor,
    tile_expert: tl.tensor,
    tile_first: tl.tensor,
    tile_last: tl.tensor,
    num_tiles: tl.tensor,
    between: tl.tensor,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
    num_blocks: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    whole: tl.constexpr = INNER % BLOCK_N == 0 and HIDDEN % BLOCK_K == 0
    dtype: tl.constexpr = between.dtype.element_ty
    lanes = tl.arange(0, BLOCK_K)
    # Gate and up rows take turns, so that a thread holds both results of a column.
    sides = tl.arange(0, 2 * BLOCK_N)
    total_work = tl.load(num_tiles) * num_blocks
    for work in range(tl.program_id(0), total_work, tl.num_programs(0)):
        tile = work // num_blocks
        start = work % num_blocks * BLOCK_N
        last = tl.load(tile_last + tile)
        places = tl.load(tile_first + tile) + tl.arange(0, BLOCK_M)
        rows = tl.load(order + tl.minimum(places, last - 1)) // NUM_CHOSEN
        left = x + rows[:, None].to(tl.int64) * HIDDEN + lanes[None, :]
        expert = tl.load(tile_expert + tile).to(tl.int64)
        weight = gate_up + expert * (2 * INNER * HIDDEN)
        sources = start + sides // 2
        right = weight + (sources + sides % 2 * INNER)[:, None] * HIDDEN + lanes[None, :]
        both = multiply_tile(
            left, right, sources < INNER, HIDDEN, BLOCK_M, 2 * BLOCK_N, BLOCK_K, whole
        )
        gates, ups = tl.split(tl.reshape(both, [BLOCK_M, BLOCK_N, 2]))
        columns = start + tl.arange(0, BLOCK_N)
        tl.store(
            between + places[:, None].to(tl.int64) * INNER + columns[None, :],
            gate(gates, ups, dtype, GELU).to(dtype),
            mask=(places < last)[:, None] & (columns < INNER)[None, :],
        )


@triton.jit(do_not_specialize_on_alignment=["tile_first", "tile_last"])
def _down(
    between: tl.tensor,
    down: tl.tensor,
    order: tl.tensor,
    tile_expert: tl.tensor,
    tile_first: tl.tensor,
    tile_last: tl.tensor,
    num_tiles: tl.tensor,
    parts: tl.tensor,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
    num_blocks: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    whole: tl.constexpr = HIDDEN % BLOCK_N == 0 and INNER % BLOCK_K == 0
    lanes = tl.arange(0, BLOCK_K)
    total_work = tl.load(num_tiles) * num_blocks
    for work in range(tl.program_id(0), total_work, tl.num_programs(0)):
        tile = work // num_blocks
        columns = work % num_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        last = tl.load(tile_last + tile)
        places = tl.load(tile_first + tile) + tl.arange(0, BLOCK_M)
        sources = tl.minimum(places, last - 1)
        left = between + sources[:, None].to(tl.int64) * INNER + lanes[None, :]
        expert = tl.load(tile_expert + tile).to(tl.int64)
        right = down + (expert * HIDDEN + columns[:, None]) * INNER + lanes[None, :]
        total = multiply_tile(
            left, right, columns < HIDDEN, INNER, BLOCK_M, BLOCK_N, BLOCK_K, whole
        )
        pairs = tl.load(order + sources).to(tl.int64)
        tl.store(
            parts + pairs[:, None] * HIDDEN + columns[None, :],
            total.to(parts.dtype.element_ty),
            mask=(places < last)[:, None] & (columns < HIDDEN)[None, :],
        )


@triton.jit
def _mix(
    parts: tl.tensor,
    weights: tl.tensor,
    output: tl.tensor,
    HIDDEN: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(NUM_CHOSEN):
        pair = row * NUM_CHOSEN + place
        part = tl.load(parts + pair * HIDDEN + columns, mask=real, other=0.0)
        total += part.to(tl.float32) * tl.load(weights + pair)
    tl.store(output + row * HIDDEN + columns, total.to(output.dtype.element_ty), mask=real)
