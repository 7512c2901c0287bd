"""A proposer without a model: what followed the last time these tokens came up. No torch.

It looks for the longest recent suffix of the sequence earlier in prompt and answer. It costs
microseconds, needs no drafter, and shines where an answer repeats its prompt: edits, extraction,
code.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from collections.abc import Sequence as TokenList
from itertools import takewhile

from flashdraft.engine.drafts import NGRAM_SOURCE, Draft

MAX_MATCH = 8
MIN_MATCH = 2
MAX_LOOKS = 64  # earlier places to compare: bounds the time where a pair is very common


class NgramIndex:
    """Where every pair of tokens of one sequence came up, the latest place first."""

    def __init__(self, forbidden: Collection[int] = ()) -> None:
        self._forbidden = frozenset(forbidden)  # a prompt may hold them, an answer never does
        self._latest: dict[tuple[int, int], int] = {}  # pair -> index of the token after it
        self._earlier = array("i", (0, 0))  # at such an index: the one before it, 0 = none

    def extend(self, tokens: TokenList[int]) -> None:
        """Index pairs that end before the last token; tokens only ever grow."""
        latest, earlier = self._latest, self._earlier
        first = len(earlier)
        pairs = zip(tokens[first - 2 : -2], tokens[first - 1 : -1], strict=True)
        for end, pair in enumerate(pairs, first):
            earlier.append(latest.get(pair, 0))
            latest[pair] = end

    def propose(self, tokens: TokenList[int], room: int) -> Draft | None:
        """Up to `room` tokens that followed the longest known suffix, or None."""
        if room <= 0 or len(tokens) <= MIN_MATCH:
            return None
        self.extend(tokens)
        end, length = self._longest_match(tokens)
        if length < MIN_MATCH:
            return None
        following = list(tokens[end : end + room])
        while len(following) < room:  # a repeating run: let it go on repeating
            following.append(following[len(following) - (len(tokens) - end)])
        if self._forbidden:
            following = list(takewhile(lambda token: token not in self._forbidden, following))
            if not following:
                return None
        return Draft(following, [confidence_of(length)] * len(following), NGRAM_SOURCE)

    def _longest_match(self, tokens: TokenList[int]) -> tuple[int, int]:
        """Where the longest match of the suffix ends, the latest of equals, and its length."""
        best_end = best_length = 0
        end = self._latest.get((tokens[-2], tokens[-1]), 0)
        for _ in range(MAX_LOOKS):
            if end == 0 or best_length == MAX_MATCH:
                break
            length = MIN_MATCH
            most = min(MAX_MATCH, end)
            while length < most and tokens[end - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > best_length:
                best_end, best_length = end, length
            end = self._earlier[end]
        return best_end, best_length


def confidence_of(length: int) -> float:
    """A longer match is a surer one: the policy learns how sure."""
    return 0.35 + 0.6 * (length - MIN_MATCH) / (MAX_MATCH - MIN_MATCH)
