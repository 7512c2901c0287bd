"""Drafts: what proposers hand to the policy and to the target. No torch."""

from __future__ import annotations

from dataclasses import dataclass

# the names of the proposers
BLOCK_SOURCE, NGRAM_SOURCE, FORCED_SOURCE = "block", "ngram", "grammar"
DEVICE_SOURCES = (BLOCK_SOURCE, NGRAM_SOURCE)  # those that draft on the device, by their numbers


@dataclass
class Draft:
    """Draft tokens for one sequence, with the proposer's confidence in each."""

    tokens: list[int]
    confidence: list[float]  # per slot: the proposer's own probability, given the slots before it
    source: str = ""  # the proposer's name

    def cut(self, length: int) -> Draft:
        return Draft(self.tokens[:length], self.confidence[:length], self.source)
