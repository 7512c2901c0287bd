"""Drafts: what proposers hand to the policy and to the target. No torch."""

from __future__ import annotations

from dataclasses import dataclass

# the names of the proposers
BLOCK_SOURCE, NGRAM_SOURCE, FORCED_SOURCE = "block", "ngram", "grammar"
DEVICE_SOURCES = (BLOCK_SOURCE, NGRAM_SOURCE)  # those that draft on the device, by their numbers
# nodes of a tree where one's chain leaves the other's: it is doubted there, and not behind
ASIDE_SOURCES = tuple(f"{source} aside" for source in DEVICE_SOURCES)
# whoever drafts: nodes that follow a chain without being of any, and all behind those
BRANCH_SOURCE, BEYOND_SOURCE = "branch", "beyond"
OFFERED_SOURCES = (BRANCH_SOURCE, BEYOND_SOURCE)
NODE_SOURCES = (*DEVICE_SOURCES, *ASIDE_SOURCES, *OFFERED_SOURCES)  # by their numbers


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
    def depth(self) -> int:
        """The most tokens of it that can be accepted."""
        if self.parents is None:
            return len(self.tokens)
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return max(depths)
