"""A proposer without a model: what followed the last time these tokens came up. No torch.

It looks for the longest recent suffix of the sequence earlier in prompt and answer. It costs
microseconds, needs no drafter, and shines where an answer repeats its prompt: edits, extraction,
code.
"""

from __future__ import annotations

from collections.abc import Sequence as TokenList

from flashdraft.engine.policy import Draft

MAX_MATCH = 8
MIN_MATCH = 2
MAX_DRAFTS = 15
SOURCE = "ngram"


class NgramIndex:
    """Where every short run of tokens of one sequence last ended."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # run -> index of the token after it
        self._num_indexed = 0

    def extend(self, tokens: TokenList[int]) -> None:
        """Index runs that end before the last token; tokens only ever grow."""
        for end in range(max(self._num_indexed, MIN_MATCH), len(tokens)):
            for length in range(MIN_MATCH, min(MAX_MATCH, end) + 1):
                self._ends[tuple(tokens[end - length : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens))

    def propose(self, tokens: TokenList[int], room: int) -> Draft | None:
        """Up to `room` tokens that followed the longest known suffix, or None."""
        self.extend(tokens)
        for length in range(min(MAX_MATCH, len(tokens)), MIN_MATCH - 1, -1):
            end = self._ends.get(tuple(tokens[len(tokens) - length :]))
            if end is None:
                continue
            following = list(tokens[end : end + room])
            while following and len(following) < room:  # a repeating run: let it go on repeating
                following.append(following[len(following) - (len(tokens) - end)])
            # a longer match is a surer one: the policy learns how sure
            confidence = 0.35 + 0.6 * (length - MIN_MATCH) / (MAX_MATCH - MIN_MATCH)
            return Draft(following, [confidence] * len(following), SOURCE) if following else None
        return None
