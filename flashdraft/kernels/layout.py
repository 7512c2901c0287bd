"""Which rows a pass has: who verifies how many draft tokens, and every row's token and place.

One rule, told here in tensors; a device may have it as kernels of its own (`Kernels.share_rows`,
`Kernels.lay_out`). Nothing here waits for the device, and shapes depend on nothing but the
arguments' own: all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# What a row is worth, where that is not the chance of its draft token.
ANCHOR, FIXED, NOBODY, UNWANTED = 3.0, 2.0, -1.0, -2.0


class DraftedSlots(NamedTuple):
    """What slots have to verify, and how likely the target agrees with it."""

    confidence: Tensor  # [slots, width] float32; 0 = there is no draft token
    sources: Tensor  # [slots] int64: of the draft tokens
    chances: Tensor  # [sources, buckets] float32: that the target agrees, at a token's turn
    edges: Tensor  # [buckets - 1] float32, ascending: of confidences
    limits: Tensor  # [slots] int64: draft tokens that it verifies at most; -1 = its share
    alive: Tensor  # [slots] int32: 1 = it decodes


class SlotTables(NamedTuple):
    """Where sequences stand, and where their keys and values lie."""

    anchors: Tensor  # [slots] int64
    lengths: Tensor  # [slots] int32: tokens that the cache holds
    alive: Tensor  # [slots] int32
    ends: Tensor  # [slots] int64: tokens at which a sequence ends
    tables: Tensor  # [pools, slots, pages] int32
    nowhere: Tensor  # [pools] int64: the page that rows of nobody are written to
    page_size: int

    def first(self, count: int) -> SlotTables:
        """Those of the first slots."""
        anchors, lengths, alive, ends = (one[:count] for one in self[:4])
        tables = self.tables[:, :count]
        return self._replace(
            anchors=anchors, lengths=lengths, alive=alive, ends=ends, tables=tables
        )


class PassRows(NamedTuple):
    """The rows of a pass: a sequence's anchor first, then its draft tokens, one after another."""

    tokens: Tensor  # [rows] int64
    owner: Tensor  # [rows] int64: every row's slot
    positions: Tensor  # [rows] int64
    behind: Tensor  # [rows] int64: draft tokens of its slot that a row follows
    places: Tensor  # [pools, rows] int64: where its keys and values go
    query_start: Tensor  # [slots + 1] int32: slots that take no part begin behind all others

    @classmethod
    def allocate(
        cls, num_rows: int, num_slots: int, num_pools: int, device: torch.device
    ) -> PassRows:
        """Rows of nobody."""
        tokens, owner, positions, behind = torch.zeros(
            4, num_rows, dtype=torch.int64, device=device
        ).unbind()
        places = torch.zeros(num_pools, num_rows, dtype=torch.int64, device=device)
        starts = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        return cls(tokens, owner, positions, behind, places, starts)


def survival(confidence: Tensor, sources: Tensor, chances: Tensor, edges: Tensor) -> Tensor:
    """The chance that every draft token [slots, width] up to each one is accepted, in float64.

    A confidence of 0 says that there is none.
    """
    return chances_of(confidence, sources.unsqueeze(1), chances, edges).cumprod(1)


def chances_of(confidence: Tensor, sources: Tensor | int, chances: Tensor, edges: Tensor) -> Tensor:
    """The chance of each draft token at its turn, in float64: of a source each, or all of one."""
    buckets = torch.bucketize(confidence.contiguous(), edges, right=True)
    return torch.where(confidence > 0, chances[sources, buckets].double(), 0.0)


def share_rows(drafted: DraftedSlots, num_rows: int) -> Tensor:
    """How many rows each slot has, its anchor among them, of `num_rows` for all together.

    Who is alive has an anchor; then the likeliest draft tokens of all win, and so every slot gets a
    prefix of its own; of equals those that follow fewer, then those of the first slots. Limits fix
    how many a slot gets, before all others, where they are not negative. What is left goes to
    nobody: to slots that are not alive, and then to what was not drafted. Returns [slots] int64.
    """
    likely = survival(drafted.confidence, drafted.sources, drafted.chances, drafted.edges)
    num_slots, width = likely.shape
    place, limits = count_up(width, likely.device), drafted.limits.unsqueeze(1)
    is_alive = drafted.alive.unsqueeze(1) > 0
    worth = torch.where(limits < 0, likely, torch.where(place < limits, FIXED, UNWANTED))
    worth = torch.where((likely > 0) & is_alive, worth, UNWANTED)
    anchors = torch.where(is_alive, ANCHOR, NOBODY).to(worth.dtype)
    by_place = torch.cat([anchors, worth], dim=1).t().flatten()
    winners = by_place.sort(descending=True, stable=True).indices[:num_rows] % num_slots
    counts = torch.zeros(num_slots, dtype=torch.int64, device=likely.device)
    return counts.index_add_(0, winners, torch.ones_like(winners))


def lay_out(
    slots: SlotTables, drafts: Tensor, counts: Tensor | None, num_rows: int, rows: PassRows
) -> None:
    """Fill in the first rows: of every slot its anchor, then the first of its draft tokens.

    drafts [slots, width]; counts [slots] int64 are of rows and make up num_rows together; without
    them everybody has all of its draft tokens.
    """
    num_slots, width = drafts.shape
    device = drafts.device
    if counts is None:
        counts = _alike(num_slots, 1 + width, device)
    ends = counts.cumsum(0)
    rows.query_start.fill_(num_rows)
    rows.query_start[0] = 0
    rows.query_start[1 : num_slots + 1] = ends
    place = count_up(num_rows, device)
    owner = torch.searchsorted(ends, place, right=True)
    behind = place - rows.query_start[owner]
    positions = slots.lengths[owner] + behind
    blocks = torch.cat([slots.anchors.unsqueeze(1), drafts], dim=1)
    rows.tokens[:num_rows] = blocks.flatten()[owner * (1 + width) + behind]
    rows.owner[:num_rows], rows.behind[:num_rows] = owner, behind
    rows.positions[:num_rows] = positions
    rows.places[:, :num_rows] = _places_of(slots, owner, positions)


def _places_of(slots: SlotTables, owner: Tensor, positions: Tensor) -> Tensor:
    """Where keys and values go: to the page of nobody where no page need be.

    That is behind a sequence's end, and in slots that do not decode.
    """
    size = slots.page_size
    pages = slots.tables[:, owner, positions // size].to(torch.int64)
    is_kept = (slots.alive[owner] > 0) & (positions < slots.ends[owner])
    pages = torch.where(is_kept, pages, slots.nowhere.unsqueeze(1))
    return pages * size + positions % size


# Constants are made once and kept for good: in a captured step they would be made anew every time,
# and a graph goes on reading them. A step's first run makes them, which is never the captured one.


@cache
def count_up(count: int, device: torch.device) -> Tensor:
    """0, 1, 2, …"""
    return torch.arange(count, device=device)


@cache
def _alike(count: int, value: int, device: torch.device) -> Tensor:
    return torch.full((count,), value, device=device)
