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


class Acceptance(NamedTuple):
    """The outcome of one verify step for every sequence of a batch."""

    num_accepted: Tensor  # [num_seqs] int64
    bonus: Tensor  # [num_seqs]: the target's token after the last accepted draft token


class Walk(NamedTuple):
    """The way that the target goes through every tree."""

    num_accepted: Tensor  # [slots] int64
    path: Tensor  # [slots, 1 + depth] int64: the rows on it, the anchor's first; 0 behind its end


def walk(
    samples: Tensor, starts: Tensor, nodes: TreeNodes, is_node: Tensor, max_depth: int
) -> Walk:
    """Go from the anchor on as long as the target's own token is a child.

    Slot s owns the samples from starts[s] on, of its anchor and its nodes in order. Children of one
    parent are different tokens; is_node [slots, nodes] says which are verified at all.
    """
    rows = (starts.unsqueeze(1) + nodes.parents).clamp(max=samples.shape[0] - 1)
    place = torch.arange(1, 1 + is_node.shape[1], device=samples.device)
    agreed = is_node & (samples[rows] == nodes.tokens)
    word = 1 + (agreed.to(torch.int64) << place).sum(1, keepdim=True)
    is_kept = is_node & ((nodes.ancestors & ~word) == 0)
    steps = is_kept.to(torch.int64).cumsum(1)
    path = torch.zeros(len(starts), 2 + max_depth, dtype=torch.int64, device=samples.device)
    path.scatter_(1, torch.where(is_kept, steps, 1 + max_depth), place.expand_as(steps))
    return Walk(is_kept.sum(1), path[:, :-1])
