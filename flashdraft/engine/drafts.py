"""Drafts: what proposers hand to the policy and to the target. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

# the names of the proposers
BLOCK_SOURCE, NGRAM_SOURCE, FORCED_SOURCE = "block", "ngram", "grammar"
# whoever drafts: nodes of a tree that follow its chain without being of it, and all behind those
BRANCH_SOURCE, BEYOND_SOURCE = "branch", "beyond"
DEVICE_SOURCES = (BLOCK_SOURCE, NGRAM_SOURCE)  # those that draft on the device, by their numbers


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
    source: str = ""  # the proposer's name
    parents: list[int] | None = None  # of a tree, by rows: 0 = the anchor, i + 1 = token i

    def cut(self, length: int) -> Draft:
        parents = None if self.parents is None else self.parents[:length]
        return Draft(self.tokens[:length], self.confidence[:length], self.source, parents)

    @cached_property
    def sources(self) -> list[str]:
        """Of every token: the proposer's name on its chain, another for what is beside it."""
        if self.parents is None:
            return [self.source] * len(self.confidence)
        chain, found = set(chain_of(self.parents)), list[str]()
        for row, parent in enumerate(self.parents, start=1):
            if row in chain:
                found.append(self.source)
            else:
                found.append(BRANCH_SOURCE if parent in chain else BEYOND_SOURCE)
        return found

    @property
    def num_branches(self) -> int:
        """Tokens that are not of its chain."""
        return 0 if self.parents is None else self.num_off_chain(range(1, 1 + len(self.tokens)))

    def num_off_chain(self, rows: Sequence[int]) -> int:
        """How many of these rows are not of its chain; the anchor's is none of them."""
        if self.parents is None:
            return 0
        return sum(self.sources[row - 1] in (BRANCH_SOURCE, BEYOND_SOURCE) for row in rows)

    @property
    def depth(self) -> int:
        """The most tokens of it that can be accepted."""
        if self.parents is None:
            return len(self.tokens)
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return max(depths)
