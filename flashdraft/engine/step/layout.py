"""The rows of a step, laid out on the device: which tokens, where, for whom. Pure tensor functions.

Nothing here waits for the device, and shapes depend on nothing but the arguments' own: all of it
can be captured in a CUDA graph.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class RowLayout(NamedTuple):
    """Rows of all sequences one after another; a sequence's anchor first, then its draft tokens."""

    tokens: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int64
    query_start: Tensor  # [num_seqs + 1] int32
    owner: Tensor  # [num_rows] int64: every row's sequence


def lay_out_rows(
    blocks: Tensor, lengths: Tensor, counts: Tensor | None, num_rows: int
) -> RowLayout:
    """The first `counts` rows of every sequence: its anchor, then draft tokens.

    blocks [num_seqs, width] hold an anchor and draft tokens each, lengths [num_seqs] int32 are the
    anchors' positions. Without `counts` all blocks are taken whole; num_rows = the counts' sum.
    """
    num_seqs, width = blocks.shape
    device = blocks.device
    if counts is None:
        query_start, owner, place = _whole_blocks(num_seqs, width, device)
        tokens = blocks.flatten()
        positions = (lengths.unsqueeze(1) + place.view(num_seqs, width)).flatten()
    else:
        rows = count_up(num_rows, device)
        ends = counts.cumsum(0)
        query_start = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
        owner = torch.searchsorted(ends, rows, right=True)
        place = rows - query_start[owner]
        tokens = blocks.flatten()[owner * width + place]
        positions = lengths[owner] + place
    return RowLayout(tokens, positions, query_start, owner)


# Constants are made once and kept for good: in a captured step they would be made anew every time,
# and a graph goes on reading them. A step's first run makes them, which is never the captured one.


@cache
def count_up(count: int, device: torch.device) -> Tensor:
    """0, 1, 2, …"""
    return torch.arange(count, device=device)


@cache
def _whole_blocks(num_seqs: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Where blocks begin, and every row's sequence and place in it."""
    num_rows = num_seqs * width
    rows = torch.arange(num_rows, device=device)
    starts = torch.arange(0, num_rows + 1, width, device=device, dtype=torch.int32)
    return starts, rows // width, rows % width
