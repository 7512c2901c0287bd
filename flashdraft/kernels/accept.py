"""Acceptance: which nodes are the target's own samples. Pure functions over tensors.

A node is kept iff all before it are and it equals the token the target samples behind its parent,
so what is committed are the samples along one path, the last one being the bonus token. Nothing
here knows of caches, models or settings, and nothing waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashdraft.kernels.nodes import TreeNodes


class Walk(NamedTuple):
    """The way that the target goes through every tree."""

    num_accepted: Tensor  # [slots] int64
    path: Tensor  # [slots, 1 + depth] int64: the rows on it, the anchor's first; 0 behind its end


def find_agreed(samples: Tensor, starts: Tensor, nodes: TreeNodes) -> Tensor:
    """The rows that say what the target does [slots], a bit each: the anchor's is the lowest.

    Slot s owns the samples from starts[s] on, of its anchor and its nodes in order. Children of one
    parent are different tokens.
    """
    rows = (starts.unsqueeze(1) + nodes.parents).clamp(max=samples.shape[0] - 1)
    return pack_rows(samples[rows] == nodes.tokens)


def pack_rows(is_there: Tensor) -> Tensor:
    """Words of the anchor's row and of those nodes [slots, nodes]."""
    place = torch.arange(1, 1 + is_there.shape[1], device=is_there.device)
    return 1 + (is_there.to(torch.int64) << place).sum(1)


def walk(agreed: Tensor, nodes: TreeNodes, is_node: Tensor, max_depth: int) -> Walk:
    """Go from the anchor on as long as there is a child that the target agrees with.

    agreed [slots] has a bit for each such row; is_node [slots, nodes] says which are verified.
    """
    place = torch.arange(1, 1 + is_node.shape[1], device=agreed.device)
    is_kept = is_node & ((nodes.ancestors & ~agreed.unsqueeze(1)) == 0)
    steps = is_kept.to(torch.int64).cumsum(1)
    path = torch.zeros(len(agreed), 2 + max_depth, dtype=torch.int64, device=agreed.device)
    path.scatter_(1, torch.where(is_kept, steps, 1 + max_depth), place.expand_as(steps))
    return Walk(is_kept.sum(1), path[:, :-1])
