# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Which rows a pass has (kernels/layout.py), as two launches: who verifies how much, and the rows.

In torch they are some fifty launches of a few numbers each, which a small model's step feels; and
where they cannot be captured, the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels import layout as rule
from flashdraft.kernels.layout import DraftedSlots, PassRows, SlotTables
from flashdraft.kernels.nodes import TreeNodes

ANCHOR = tl.constexpr(rule.ANCHOR)
FIXED = tl.constexpr(rule.FIXED)
NOBODY = tl.constexpr(rule.NOBODY)
UNWANTED = tl.constexpr(rule.UNWANTED)
LEAST_SLOTS = 8  # fewer take as long, and would be compiled apart


def share_rows(drafted: DraftedSlots, num_rows: int) -> Tensor:
    """`Kernels.share_rows`: a program for each slot ranks its rows among those of all."""
    num_slots, width = drafted.survival.shape
    assert all(one.is_contiguous() for one in drafted)
    counts = torch.empty(num_slots, dtype=torch.int64, device=drafted.alive.device)
    _share_rows[(num_slots,)](
        drafted,
        counts,
        num_rows,
        num_slots,
        width,
        PLACES=triton.next_power_of_2(1 + width),
        SLOTS=max(LEAST_SLOTS, triton.next_power_of_2(num_slots)),
        num_warps=4,
    )
    return counts


# Numbers that change from step to step compile nothing anew, and loops stay loops: unrolled, this
# takes seconds to compile.
@triton.jit(do_not_specialize=["num_rows", "num_slots", "width"])
def _share_rows(
    drafted: DraftedSlots,
    counts: tl.tensor,
    num_rows: tl.tensor,
    num_slots: tl.tensor,
    width: tl.tensor,
    PLACES: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    own = tl.program_id(0)
    slots, place = tl.arange(0, SLOTS)[:, None], tl.arange(0, PLACES)[None, :]
    worth = _worth(drafted, slots, place, num_slots, width)
    order = place * SLOTS + slots  # of equals, those that follow fewer come first
    is_own = slots == own
    count = tl.full((), 0, tl.int64)
    for mine in range(width + 1):
        is_this = is_own & (place == mine)
        value = tl.sum(tl.sum(tl.where(is_this, worth, 0.0), 1), 0)
        is_before = (worth > value) | ((worth == value) & (order < mine * SLOTS + own))
        is_before &= (slots < num_slots) & (place <= width)
        rank = tl.sum(tl.sum(is_before.to(tl.int32), 1), 0)
        count += (rank < num_rows).to(tl.int64)
    tl.store(counts + own, count)


@triton.jit
def _worth(
    drafted: DraftedSlots,
    slots: tl.tensor,
    place: tl.tensor,
    num_slots: tl.tensor,
    width: tl.tensor,
) -> tl.tensor:
    """What every row is worth [slots, places]: anchors, and nodes behind them."""
    there = slots < num_slots
    column = place - 1
    is_node = there & (column >= 0) & (column < width)
    likely = tl.load(drafted.survival + slots * width + column, mask=is_node, other=0.0)
    limit = tl.load(drafted.limits + slots, mask=there, other=-1)
    is_alive = tl.load(drafted.alive + slots, mask=there, other=0) > 0
    worth = tl.where(limit < 0, likely, tl.where(column < limit, FIXED, UNWANTED))
    worth = tl.where((likely > 0) & is_alive, worth, UNWANTED)
    return tl.where(place == 0, tl.where(is_alive, ANCHOR, NOBODY).to(tl.float64), worth)


def lay_out(
    slots: SlotTables, nodes: TreeNodes, counts: Tensor | None, num_rows: int, rows: PassRows
) -> None:
    """`Kernels.lay_out`: a program for each slot writes its rows."""
    num_slots, width = nodes.tokens.shape
    num_starts = rows.query_start.shape[0]
    assert all(one.is_contiguous() for one in (*slots[:4], *nodes[:4], *rows[:6]))
    _lay_out[(num_slots,)](
        slots,
        nodes,
        nodes.tokens if counts is None else counts,  # unread without
        rows,
        num_rows,
        num_slots,
        num_starts,
        slots.tables.stride(0),
        slots.tables.stride(1),
        rows.places.stride(0),
        WIDTH=width,
        PLACES=triton.next_power_of_2(1 + width),
        SLOTS=triton.next_power_of_2(num_slots),
        STARTS=triton.next_power_of_2(num_starts),
        POOLS=slots.tables.shape[0],
        HAS_COUNTS=counts is not None,
        num_warps=1,
    )


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_slots",
        "num_starts",
        "pool_stride",
        "slot_stride",
        "place_stride",
    ]
)
def _lay_out(
    slots: SlotTables,
    nodes: TreeNodes,
    counts: tl.tensor,
    rows: PassRows,
    num_rows: tl.tensor,
    num_slots: tl.tensor,
    num_starts: tl.tensor,
    pool_stride: tl.tensor,
    slot_stride: tl.tensor,
    place_stride: tl.tensor,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    SLOTS: tl.constexpr,
    STARTS: tl.constexpr,
    POOLS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
) -> None:
    slot = tl.program_id(0)
    place = tl.arange(0, PLACES)
    start, count = slot.to(tl.int64) * (1 + WIDTH), 1 + WIDTH
    if HAS_COUNTS:
        before = tl.arange(0, SLOTS)
        start = tl.sum(tl.load(counts + before, mask=before < slot, other=0), 0)
        count = tl.load(counts + slot)
    tl.store(rows.query_start + slot, start.to(tl.int32))
    after = tl.arange(0, STARTS)
    if slot == num_slots - 1:  # who takes no part begins behind all others
        is_left = (after >= num_slots) & (after < num_starts)
        tl.store(rows.query_start + after, num_rows, mask=is_left)
    is_row = place < count
    node, is_node = slot * WIDTH + place - 1, is_row & (place > 0)
    tokens = tl.load(nodes.tokens + node, mask=is_node, other=0)
    tokens = tl.where(place == 0, tl.load(slots.anchors + slot), tokens)
    depths = tl.load(nodes.depths + node, mask=is_node, other=0)
    length, row = tl.load(slots.lengths + slot).to(tl.int64), start + place
    tl.store(rows.tokens + row, tokens, mask=is_row)
    tl.store(rows.owner + row, slot.to(tl.int64), mask=is_row)
    tl.store(rows.positions + row, length + depths, mask=is_row)
    tl.store(rows.behind + row, place.to(tl.int64), mask=is_row)
    ancestors = tl.load(nodes.ancestors + node, mask=is_node, other=1)
    tl.store(rows.ancestors + row, ancestors, mask=is_row)
    tl.store(rows.depths + row, depths, mask=is_row)
    index = length + place
    # to the page of nobody behind a sequence's end, and in slots that do not decode
    end = tl.where(tl.load(slots.alive + slot) > 0, tl.load(slots.ends + slot), 0)
    is_kept = index < end
    page, offset = index // slots.page_size, index % slots.page_size
    for pool in tl.static_range(POOLS):
        table = slots.tables + pool * pool_stride + slot * slot_stride
        pages = tl.load(table + page, mask=is_row & is_kept, other=0).to(tl.int64)
        pages = tl.where(is_kept, pages, tl.load(slots.nowhere + pool))
        where = rows.places + pool * place_stride + row
        tl.store(where, pages * slots.page_size + offset, mask=is_row)
