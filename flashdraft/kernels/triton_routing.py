# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Which row goes to which expert, in Triton: the choice, and pairs sorted by expert. CUDA only.

A pair is one choice of one row, numbered row * num_chosen + place. Nothing here waits for the host,
and all sizes are known before the launch, so a CUDA graph can hold it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.triton_launch import overlap, wait

SORT_BLOCK = 1024  # pairs that a program looks at together
MIN_SORT_BLOCK = 128  # one for every thread: none may be counted twice


class SortedPairs(NamedTuple):
    """Pairs in the order of their experts, cut into tiles of one expert each. All int32."""

    order: Tensor  # [num_pairs]
    expert: Tensor  # [max_tiles] of every tile
    first: Tensor  # [max_tiles] where a tile starts in `order`
    last: Tensor  # [max_tiles] one past its end
    num_tiles: Tensor  # [1]: later tiles hold nothing

    @property
    def max_tiles(self) -> int:
        """Tiles there are room for: no routing makes more."""
        return self.expert.shape[0]


def choose_rows(logits: Tensor, num_chosen: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    """`Kernels.choose_experts`; of equals the first."""
    num_rows, num_experts = logits.shape
    chosen = torch.empty(num_rows, num_chosen, device=logits.device, dtype=torch.int64)
    weights = torch.empty(num_rows, num_chosen, device=logits.device, dtype=torch.float32)
    if num_rows:
        _choose[(num_rows,)](
            logits.contiguous(),
            scale,
            chosen,
            weights,
            NUM_EXPERTS=num_experts,
            NUM_CHOSEN=num_chosen,
            BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK_C=triton.next_power_of_2(num_chosen),
            **overlap(logits),
            num_warps=1,
        )
    return chosen, weights


def sort_pairs(chosen: Tensor, num_experts: int, tile_size: int) -> SortedPairs:
    """Sort the pairs of chosen [num_rows, k] by expert, stably, in one launch."""
    num_pairs = chosen.numel()
    max_tiles = min(num_pairs, num_pairs // tile_size + num_experts)
    order = torch.empty(num_pairs, device=chosen.device, dtype=torch.int32)
    table = torch.empty(3, max_tiles, device=chosen.device, dtype=torch.int32)
    num_tiles = torch.empty(1, device=chosen.device, dtype=torch.int32)
    _sort[(num_experts,)](
        chosen.contiguous(),
        order,
        table,
        num_tiles,
        num_pairs,
        max_tiles,
        NUM_EXPERTS=num_experts,
        TILE=tile_size,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_P=min(SORT_BLOCK, max(MIN_SORT_BLOCK, triton.next_power_of_2(num_pairs))),
        **overlap(chosen),
        num_warps=4,
    )
    return SortedPairs(order, table[0], table[1], table[2], num_tiles)


@triton.jit
def _choose(
    logits: tl.tensor,
    scale: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One row: softmax over all, the largest one after another, divided by their sum."""
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    real = experts < NUM_EXPERTS
    scores = tl.load(logits + row * NUM_EXPERTS + experts, mask=real, other=float("-inf"))
    scores = scores.to(tl.float32)
    chances = tl.exp(scores - tl.max(scores, 0))
    chances = tl.where(real, chances / tl.sum(chances, 0), -1.0)
    places = tl.arange(0, BLOCK_C)
    picked = tl.zeros([BLOCK_C], tl.int32)
    values = tl.zeros([BLOCK_C], tl.float32)
    total = 0.0
    for place in tl.static_range(NUM_CHOSEN):
        best, index = tl.max(chances, 0, return_indices=True, return_indices_tie_break_left=True)
        picked = tl.where(places == place, index, picked)
        values = tl.where(places == place, best, values)
        total += best
        chances = tl.where(experts == index, -1.0, chances)
    picked = tl.minimum(picked, NUM_EXPERTS - 1)  # a row of NaN must not point outside
    factors = tl.load(scale + picked).to(tl.float32)
    target = row * NUM_CHOSEN + places
    tl.store(chosen + target, picked.to(tl.int64), mask=places < NUM_CHOSEN)
    tl.store(weights + target, values / total * factors, mask=places < NUM_CHOSEN)


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def _sort(
    chosen: tl.tensor,
    order: tl.tensor,
    table: tl.tensor,
    num_tiles: tl.tensor,
    num_pairs: tl.tensor,
    max_tiles: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One expert: count everybody's pairs, then write its own pairs and tiles in their places."""
    wait(PDL)
    expert = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    lanes = tl.arange(0, BLOCK_P)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, num_pairs, BLOCK_P):
        real = start + lanes < num_pairs
        theirs = tl.load(chosen + start + lanes, mask=real, other=0).to(tl.int32)
        counts += tl.histogram(theirs, BLOCK_E, mask=real)
    tiles = (counts + TILE - 1) // TILE
    first = tl.sum(tl.where(experts < expert, counts, 0), 0)
    last = first + tl.sum(tl.where(experts == expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(experts < expert, tiles, 0), 0)
    if expert == 0:
        tl.store(num_tiles, tl.sum(tiles, 0))
    for begin in range(first, last, TILE):
        tile = table + first_tile + (begin - first) // TILE
        tl.store(tile, expert)
        tl.store(tile + max_tiles, begin)
        tl.store(tile + 2 * max_tiles, tl.minimum(begin + TILE, last))
    place = first
    if first < last:
        for start in range(0, num_pairs, BLOCK_P):
            real = start + lanes < num_pairs
            theirs = tl.load(chosen + start + lanes, mask=real, other=-1).to(tl.int32)
            mine = (theirs == expert).to(tl.int32)
            rank = tl.cumsum(mine, 0) - 1
            tl.store(order + place + rank, start + lanes, mask=theirs == expert)
            place += tl.sum(mine, 0)
