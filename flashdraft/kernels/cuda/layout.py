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

ANCHOR = tl.constexpr(rule.ANCHOR)
FIXED = tl.constexpr(rule.FIXED)
NOBODY = tl.constexpr(rule.NOBODY)
UNWANTED = tl.constexpr(rule.UNWANTED)


def share_rows(drafted: DraftedSlots, num_rows: int) -> Tensor:
    """`Kernels.share_rows`: a program for each slot ranks its rows among those of all."""
    num_slots, width = drafted.confidence.shape
    assert all(one.is_contiguous() for one in drafted)
    counts = torch.empty(num_slots, dtype=torch.int64, device=drafted.alive.device)
    num_edges = drafted.edges.shape[0]
    _share_rows[(num_slots,)](
        drafted,
        counts,
        num_rows,
        num_slots,
        WIDTH=width,
        PLACES=triton.next_power_of_2(1 + width),
        SLOTS=triton.next_power_of_2(num_slots),
        NUM_EDGES=num_edges,
        EDGES=triton.next_power_of_2(num_edges),
        num_warps=4,
    )
    return counts


@triton.jit
def _share_rows(
    drafted: DraftedSlots,
    counts: tl.tensor,
    num_rows: tl.tensor,
    num_slots: tl.tensor,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    SLOTS: tl.constexpr,
    NUM_EDGES: tl.constexpr,
    EDGES: tl.constexpr,
) -> None:
    own = tl.program_id(0)
    place, slots, edge = tl.arange(0, PLACES), tl.arange(0, SLOTS), tl.arange(0, EDGES)
    there = slots < num_slots
    edges = tl.load(drafted.edges + edge, mask=edge < NUM_EDGES, other=float("inf"))
    # what the rows of this slot are worth
    ours = own + tl.arange(0, 1)
    is_ours = ours >= 0
    alive = tl.full((1,), 1.0, tl.float64)
    worth = tl.where(place == 0, _worth_of_anchor(drafted, ours, is_ours), UNWANTED)
    for column in tl.static_range(WIDTH):
        alive *= _chance(drafted, edges, ours, is_ours, column, WIDTH, NUM_EDGES)
        one = _worth(drafted, ours, is_ours, column, alive)
        worth = tl.where(place == 1 + column, one, worth)
    # how many rows come before each of them
    anchors = _worth_of_anchor(drafted, slots, there)
    rank = _count_before(anchors, 0, slots, there, worth, place, own)
    alive = tl.full((SLOTS,), 1.0, tl.float64)
    for column in tl.static_range(WIDTH):
        alive *= _chance(drafted, edges, slots, there, column, WIDTH, NUM_EDGES)
        others = _worth(drafted, slots, there, column, alive)
        rank += _count_before(others, 1 + column, slots, there, worth, place, own)
    wins = (rank < num_rows) & (place <= WIDTH)
    tl.store(counts + own, tl.sum(wins.to(tl.int64), 0))


@triton.jit
def _chance(
    drafted: DraftedSlots,
    edges: tl.tensor,
    slots: tl.tensor,
    there: tl.tensor,
    column: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_EDGES: tl.constexpr,
) -> tl.tensor:
    """That the target agrees with the slots' draft tokens in a column, at their turn."""
    sure = tl.load(drafted.confidence + slots * WIDTH + column, mask=there, other=0.0)
    bucket = tl.sum((sure[:, None] >= edges[None, :]).to(tl.int32), 1)
    source = tl.load(drafted.sources + slots, mask=there, other=0)
    where = drafted.chances + source * (1 + NUM_EDGES) + bucket
    chance = tl.load(where, mask=there, other=0.0)
    return tl.where(sure > 0, chance, 0.0).to(tl.float64)


@triton.jit
def _worth(
    drafted: DraftedSlots,
    slots: tl.tensor,
    there: tl.tensor,
    column: tl.constexpr,
    likely: tl.tensor,
) -> tl.tensor:
    """Of draft tokens that survive with these chances."""
    limit = tl.load(drafted.limits + slots, mask=there, other=-1)
    is_alive = tl.load(drafted.alive + slots, mask=there, other=0) > 0
    worth = tl.where(limit < 0, likely, tl.where(column < limit, FIXED, UNWANTED))
    return tl.where((likely > 0) & is_alive, worth, UNWANTED)


@triton.jit
def _worth_of_anchor(drafted: DraftedSlots, slots: tl.tensor, there: tl.tensor) -> tl.tensor:
    is_alive = tl.load(drafted.alive + slots, mask=there, other=0) > 0
    return tl.where(is_alive, ANCHOR, NOBODY).to(tl.float64)


@triton.jit
def _count_before(
    others: tl.tensor,
    other_place: tl.constexpr,
    slots: tl.tensor,
    there: tl.tensor,
    worth: tl.tensor,
    place: tl.tensor,
    own: tl.tensor,
) -> tl.tensor:
    """How many of the slots' rows in one place come before each row of our own."""
    is_more = others[None, :] > worth[:, None]
    is_earlier = (other_place < place[:, None]) | (
        (other_place == place[:, None]) & (slots[None, :] < own)
    )
    is_before = is_more | ((others[None, :] == worth[:, None]) & is_earlier)
    return tl.sum((is_before & there[None, :]).to(tl.int32), 1)


def lay_out(
    slots: SlotTables, drafts: Tensor, counts: Tensor | None, num_rows: int, rows: PassRows
) -> None:
    """`Kernels.lay_out`: a program for each slot writes its rows."""
    num_slots, width = drafts.shape
    num_starts = rows.query_start.shape[0]
    assert all(one.is_contiguous() for one in (*slots[:4], drafts, *rows[:4]))
    _lay_out[(num_slots,)](
        slots,
        drafts,
        drafts if counts is None else counts,  # unread without
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


@triton.jit
def _lay_out(
    slots: SlotTables,
    drafts: tl.tensor,
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
    drafted = tl.load(drafts + slot * WIDTH + place - 1, mask=is_row & (place > 0), other=0)
    tokens = tl.where(place == 0, tl.load(slots.anchors + slot), drafted)
    positions = tl.load(slots.lengths + slot).to(tl.int64) + place
    row = start + place
    tl.store(rows.tokens + row, tokens, mask=is_row)
    tl.store(rows.owner + row, slot.to(tl.int64), mask=is_row)
    tl.store(rows.positions + row, positions, mask=is_row)
    tl.store(rows.behind + row, place.to(tl.int64), mask=is_row)
    # to the page of nobody behind a sequence's end, and in slots that do not decode
    end = tl.where(tl.load(slots.alive + slot) > 0, tl.load(slots.ends + slot), 0)
    is_kept = positions < end
    page, offset = positions // slots.page_size, positions % slots.page_size
    for pool in tl.static_range(POOLS):
        table = slots.tables + pool * pool_stride + slot * slot_stride
        pages = tl.load(table + page, mask=is_row & is_kept, other=0).to(tl.int64)
        pages = tl.where(is_kept, pages, tl.load(slots.nowhere + pool))
        where = rows.places + pool * place_stride + row
        tl.store(where, pages * slots.page_size + offset, mask=is_row)
