# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Which row goes to which expert, in Triton: the choice, and pairs sorted by expert. CUDA only.

`route_rows` makes the logits of few rows and chooses in one launch: programs share the experts, and
whichever comes last reads all logits and chooses. `choose_rows` chooses from logits that are there.

A pair is one choice of one row, numbered row * num_chosen + place. Nothing here waits for the host,
and all sizes are known before the launch, so a CUDA graph can hold it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.cuda.overlap import overlap, wait

ROUTE_EXPERTS = 1  # of one program
ROUTE_WARPS = {2: 1, 4: 4}  # likewise, by bytes of a value: one chooses without waiting
ROUTE_DEPTH = 4096  # read at a time
SORT_BLOCK = 1024  # pairs that a program looks at together
MIN_SORT_BLOCK = 128  # one for every thread: none may be counted twice


GATHER_PROGRAMS = 128  # or more, while each has whole rows
MAX_GATHER_ROWS = 8  # of one program
GATHER_BLOCK = 1024  # numbers of a row that a program copies


class GatheredRows(NamedTuple):
    """`SortedPairs`, and the rows of x in that order, one for every pair."""

    x: Tensor  # [num_pairs, depth]
    order: Tensor
    expert: Tensor
    first: Tensor
    last: Tensor
    num_tiles: Tensor


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


def route_rows(
    x: Tensor, router: Tensor, num_chosen: int, scale: Tensor, arrivals: Tensor
) -> tuple[Tensor, Tensor]:
    """`Kernels.route` for few rows: what `choose_rows` says of x @ router.T.

    `arrivals` as in dense.linear.multiply_rows; it needs one.
    """
    (num_rows, depth), num_experts = x.shape, router.shape[0]
    assert router.is_contiguous() and x.stride(1) == 1 and router.shape[1] == depth
    chosen = torch.empty(num_rows, num_chosen, device=x.device, dtype=torch.int64)
    weights = torch.empty(num_rows, num_chosen, device=x.device, dtype=torch.float32)
    if num_rows:
        _route[(triton.cdiv(num_experts, ROUTE_EXPERTS),)](
            x,
            router,
            scale,
            torch.empty(num_rows, num_experts, device=x.device, dtype=x.dtype),
            chosen,
            weights,
            arrivals,
            depth,
            x.stride(0),
            NUM_ROWS=num_rows,
            NUM_EXPERTS=num_experts,
            NUM_CHOSEN=num_chosen,
            BLOCK_R=triton.next_power_of_2(num_rows),
            BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK_C=triton.next_power_of_2(num_chosen),
            BLOCK_N=ROUTE_EXPERTS,
            BLOCK_K=min(ROUTE_DEPTH, triton.next_power_of_2(depth)),
            **overlap(x),
            num_warps=ROUTE_WARPS[x.itemsize],
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


def gather_rows(
    x: Tensor, chosen: Tensor, num_experts: int, tile_size: int, is_arranged: bool
) -> GatheredRows:
    """What `sort_pairs` says of chosen [num_rows, k], with its rows, in one launch.

    is_arranged: numbers are in the order in which codes of few bits are multiplied (few_bits.h).
    """
    (num_rows, num_chosen), depth = chosen.shape, x.shape[1]
    assert x.stride(1) == 1 and (depth % 32 == 0 or not is_arranged)
    num_pairs = num_rows * num_chosen
    max_tiles = min(num_pairs, num_pairs // tile_size + num_experts)
    gathered = torch.empty(num_pairs, depth, device=x.device, dtype=x.dtype)
    order = torch.empty(num_pairs, device=x.device, dtype=torch.int32)
    table = torch.empty(3, max_tiles, device=x.device, dtype=torch.int32)
    num_tiles = torch.empty(1, device=x.device, dtype=torch.int32)
    block_r = 1
    while block_r < MAX_GATHER_ROWS and num_rows > block_r * GATHER_PROGRAMS:
        block_r *= 2
    _gather[(triton.cdiv(num_rows, block_r), triton.cdiv(depth, GATHER_BLOCK))](
        x,
        chosen.contiguous(),
        gathered,
        order,
        table,
        num_tiles,
        num_pairs,
        max_tiles,
        x.stride(0),
        DEPTH=depth,
        NUM_EXPERTS=num_experts,
        NUM_CHOSEN=num_chosen,
        TILE=tile_size,
        ARRANGED=is_arranged,
        BLOCK_R=block_r,
        BLOCK_C=triton.next_power_of_2(num_chosen),
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_P=SORT_BLOCK,
        BLOCK_K=GATHER_BLOCK,
        **overlap(x),
        num_warps=4,
    )
    return GatheredRows(gathered, order, table[0], table[1], table[2], num_tiles)


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
    """One row."""
    wait(PDL)
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    _choose_from(
        logits, scale, chosen, weights, row, row >= 0, NUM_EXPERTS, NUM_CHOSEN, 1, BLOCK_E, BLOCK_C
    )


@triton.jit
def _route(
    x: tl.tensor,
    router: tl.tensor,
    scale: tl.tensor,
    logits: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    arrivals: tl.tensor,
    depth: tl.tensor,
    row_stride: tl.tensor,
    NUM_ROWS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The logits of BLOCK_N experts for all rows; the last program chooses from everybody's."""
    rows = tl.arange(0, BLOCK_R)
    mine = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    totals = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    for k in range(0, depth, BLOCK_K):
        real = k + lanes < depth
        there = (mine < NUM_EXPERTS)[:, None] & real[None, :]
        tile = tl.load(router + mine[:, None] * depth + k + lanes[None, :], mask=there, other=0.0)
        wait(PDL)  # the first time; the router is no other kernel's
        for row in tl.static_range(NUM_ROWS):
            values = tl.load(x + row * row_stride + k + lanes, mask=real, other=0.0)
            sums = tl.sum(tile.to(tl.float32) * values.to(tl.float32)[None, :], 1)
            totals += tl.where((rows == row)[:, None], sums[None, :], 0.0)
    is_real = (rows < NUM_ROWS)[:, None] & (mine < NUM_EXPERTS)[None, :]
    place = logits + rows[:, None] * NUM_EXPERTS + mine[None, :]
    tl.store(place, totals.to(logits.dtype.element_ty), mask=is_real, cache_modifier=".cg")
    tl.debug_barrier()  # all of this program's logits are written before it is counted
    if tl.atomic_add(arrivals, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        _choose_from(
            logits, scale, chosen, weights, rows, rows < NUM_ROWS, NUM_EXPERTS, NUM_CHOSEN,
            BLOCK_R, BLOCK_E, BLOCK_C,
        )  # fmt: skip
        tl.atomic_xchg(arrivals, 0)  # ready for the next call


@triton.jit
def _choose_from(
    logits: tl.tensor,
    scale: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Softmax over all experts, the largest one after another, divided by their sum."""
    experts = tl.arange(0, BLOCK_E)
    real = (experts < NUM_EXPERTS)[None, :]
    source = logits + rows[:, None] * NUM_EXPERTS + experts[None, :]
    # From L2: other programs may have written them a moment ago.
    scores = tl.load(source, mask=is_row[:, None] & real, other=0.0, cache_modifier=".cg")
    scores = tl.where(real, scores.to(tl.float32), float("-inf"))
    chances = tl.exp(scores - tl.max(scores, 1)[:, None])
    chances = chances / tl.sum(chances, 1)[:, None]
    # A row of NaN gets the first experts, each once, and weights that are NaN: 0 / 0.
    chances = tl.where(real, tl.where(chances == chances, chances, 0.0), -1.0)
    places = tl.arange(0, BLOCK_C)[None, :]
    picked = tl.zeros([BLOCK_R, BLOCK_C], tl.int32)
    values = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    for place in tl.static_range(NUM_CHOSEN):
        best, index = tl.max(chances, 1, return_indices=True, return_indices_tie_break_left=True)
        picked = tl.where(places == place, index[:, None], picked)
        values = tl.where(places == place, best[:, None], values)
        total += best
        chances = tl.where(experts[None, :] == index[:, None], -1.0, chances)
    factors = tl.load(scale + picked).to(tl.float32)
    target = rows[:, None] * NUM_CHOSEN + places
    is_real = is_row[:, None] & (places < NUM_CHOSEN)
    tl.store(chosen + target, picked.to(tl.int64), mask=is_real)
    tl.store(weights + target, values / total[:, None] * factors, mask=is_real)


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


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def _gather(
    x: tl.tensor,
    chosen: tl.tensor,
    gathered: tl.tensor,
    order: tl.tensor,
    table: tl.tensor,
    num_tiles: tl.tensor,
    num_pairs: tl.tensor,
    max_tiles: tl.tensor,
    row_stride: tl.tensor,
    DEPTH: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    TILE: tl.constexpr,
    ARRANGED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Some rows: count everybody's pairs, and those before; then copy the rows to their places."""
    wait(PDL)
    experts = tl.arange(0, BLOCK_E)
    lanes = tl.arange(0, BLOCK_P)
    first_row = tl.program_id(0) * BLOCK_R
    is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    counts = tl.zeros([BLOCK_E], tl.int32)
    before = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, num_pairs, BLOCK_P):
        there = start + lanes
        theirs = tl.load(chosen + there, mask=there < num_pairs, other=0).to(tl.int32)
        counts += tl.histogram(theirs, BLOCK_E, mask=there < num_pairs)
        before += tl.histogram(theirs, BLOCK_E, mask=there < first_row * NUM_CHOSEN)
    tiles = (counts + TILE - 1) // TILE
    starts = tl.cumsum(counts, 0) - counts
    if is_first:
        tl.store(num_tiles, tl.sum(tiles, 0))
        first_tiles = tl.cumsum(tiles, 0) - tiles
        for i in range(0, tl.max(tiles, 0)):
            tile = table + first_tiles + i
            begin = starts + i * TILE
            tl.store(tile, experts, mask=i < tiles)
            tl.store(tile + max_tiles, begin, mask=i < tiles)
            last = tl.minimum(begin + TILE, starts + counts)
            tl.store(tile + 2 * max_tiles, last, mask=i < tiles)
    rows = first_row + tl.arange(0, BLOCK_R)
    choices = tl.arange(0, BLOCK_C)
    pairs = rows[:, None] * NUM_CHOSEN + choices[None, :]
    is_pair = (pairs < num_pairs) & (choices < NUM_CHOSEN)[None, :]
    mine = tl.load(chosen + pairs, mask=is_pair, other=-1).to(tl.int32)
    mine = tl.reshape(mine, [BLOCK_R * BLOCK_C])
    numbers = tl.arange(0, BLOCK_R * BLOCK_C)
    are_before = (mine[:, None] == mine[None, :]) & (numbers[:, None] > numbers[None, :])
    bases = tl.where(mine[:, None] == experts[None, :], (starts + before)[None, :], 0)
    places = tl.sum(are_before.to(tl.int32), 1) + tl.sum(bases, 1)
    places = tl.reshape(places, [BLOCK_R, BLOCK_C])
    if tl.program_id(1) == 0:
        tl.store(order + places, pairs, mask=is_pair)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    sources = columns
    if ARRANGED:  # of 32 values four by four pairs, by columns
        sources = columns // 32 * 32 + columns % 8 // 2 * 8 + columns % 32 // 8 * 2 + columns % 2
    is_row = rows * NUM_CHOSEN < num_pairs
    is_real = is_row[:, None] & (columns < DEPTH)[None, :]
    from_rows = x + rows[:, None].to(tl.int64) * row_stride + sources[None, :]
    values = tl.load(from_rows, mask=is_real, other=0.0)
    for choice in tl.static_range(NUM_CHOSEN):
        place = tl.sum(tl.where(choices[None, :] == choice, places, 0), 1).to(tl.int64)
        tl.store(gathered + place[:, None] * DEPTH + columns[None, :], values, mask=is_real)
