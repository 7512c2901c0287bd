"""Nodes of draft trees: which tokens are verified, and which of them follow which.

A slot's rows are its anchor and then its nodes, parents before children: node i is row i + 1. A
chain is a tree in which every node follows the one before it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

MAX_NODES = 63  # of a slot: bits of a word, but for the anchor's


class TreeNodes(NamedTuple):
    """The nodes of every slot, [slots, nodes] each; those that are none stand behind the others."""

    tokens: Tensor  # int64
    parents: Tensor  # int64: the row that a node follows
    ancestors: Tensor  # int64 words: bit j = row j is on the way to the node, or the node itself
    depths: Tensor  # int32: rows on the way, without itself
    confidence: Tensor  # float32: the proposer's, once all before were accepted; 0 = no node
    survival: Tensor  # float64: the chance that it is accepted; 0 = no node
    sources: Tensor  # int32: by whose word it is, as tree.py counts them; of chains, nothing

    @classmethod
    def allocate(cls, num_slots: int, num_nodes: int, device: torch.device) -> TreeNodes:
        """Chains of nothing."""
        tokens = torch.zeros(num_slots, num_nodes, dtype=torch.int64, device=device)
        none = torch.zeros(num_slots, num_nodes, device=device)
        return make_chain(tokens, none, none.double())

    def first(self, count: int) -> TreeNodes:
        """Those of the first slots."""
        return TreeNodes(*(one[:count] for one in self))


def make_chain(tokens: Tensor, confidence: Tensor, survival: Tensor) -> TreeNodes:
    """Tokens [slots, width] that follow one another."""
    parents, ancestors, depths, sources = (
        one.repeat(len(tokens), 1) for one in _in_order(tokens.shape[1], tokens.device)
    )
    return TreeNodes(tokens, parents, ancestors, depths, confidence, survival, sources)


@cache
def _in_order(width: int, device: torch.device) -> tuple[Tensor, ...]:
    """Of a chain all but its tokens. Made once: a captured step goes on reading them."""
    rows = torch.arange(1, width + 1, device=device)
    depths = rows.to(torch.int32)
    return rows - 1, (2 << rows) - 1, depths, torch.zeros_like(depths)
