"""Drafts: what proposers hand to the policy and to the target. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

# the names of the proposers
BLOCK_SOURCE, NGRAM_SOURCE, FORCED_SOURCE = "block", "ngram", "grammar"
DEVICE_SOURCES = (BLOCK_SOURCE, NGRAM_SOURCE)  # those that draft on the device, by their numbers
# nodes of a tree where one's chain leaves the other's: it is doubted there, and not behind
ASIDE_SOURCES = tuple(f"{source} aside" for source in DEVICE_SOURCES)
# whoever drafts: nodes that follow a chain without being of any, and all behind those
BRANCH_SOURCE, BEYOND_SOURCE = "branch", "beyond"
OFFERED_SOURCES = (BRANCH_SOURCE, BEYOND_SOURCE)
NODE_SOURCES = (*DEVICE_SOURCES, *ASIDE_SOURCES, *OFFERED_SOURCES)  # by their numbers


def chain_of(parents: Sequence[int]) -> list[int]:
    """The rows of a tree's chain, the anchor's first: every one is the first child of the last."""
    chain = [0]
    for row, parent in enumerate(parents, start=1):
        if parent == chain[-1]:
            chain.append(row)
    return chain


@dataclass
class Draft:
    """Draft tokens for one sequence, with the proposer's confidence in each."""

    tokens: list[int]
    confidence: list[float]  # per slot: the proposer's own probability, given the slots before it
    source: str = ""  # the proposer's name; of a tree, that of its chain's
    parents: list[int] | None = None  # of a tree, by rows: 0 = the anchor, i + 1 = token i
    node_sources: list[str] | None = None  # likewise: by whose word each of its tokens is there

    def cut(self, length: int) -> Draft:
        parents = None if self.parents is None else self.parents[:length]
        sources = None if self.node_sources is None else self.node_sources[:length]
        tokens, confidence = self.tokens[:length], self.confidence[:length]
        return Draft(tokens, confidence, self.source, parents, sources)

    @property
    def sources(self) -> list[str]:
        """Of every token: by whose word it is there."""
        return self.node_sources or [self.source] * len(self.confidence)

    @property
    def num_branches(self) -> int:
        """Tokens that are not of its chain."""
        return 0 if self.parents is None else self.num_off_chain(range(1, 1 + len(self.tokens)))

    def num_off_chain(self, rows: Sequence[int]) -> int:
        """How many of these rows are not of its chain; the anchor's is none of them."""
        if self.parents is None:
            return 0
        return sum(row not in self._chain for row in rows)

    @cached_property
    def _chain(self) -> frozenset[int]:
        return frozenset(chain_of(self.parents or ()))

    @property
    def depth(self) -> int:
        """The most tokens of it that can be accepted."""
        if self.parents is None:
            return len(self.tokens)
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return max(depths)
