"""What an answer cost and how it was drafted: usage, and the `flashdraft` extension field."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from flashdraft.core import Generation, ShownTree
from flashdraft.errors import RequestError
from flashdraft.models.stream_decoder import StreamDecoder
from flashdraft.server.answering.answers import AnswerPart
from flashdraft.server.answering.blocks import CollectedAnswer
from flashdraft.server.answering.serving import Serving

log = logging.getLogger(__name__)


def openai_usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int
) -> dict[str, Any]:
    """`usage` of chat completions and completions."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


async def reasoning_tokens(serving: Serving, answers: Sequence[CollectedAnswer]) -> int:
    """How many tokens the reasoning has, counted anew from its text."""
    count = 0
    for text in filter(None, (answer.text("reasoning") for answer in answers)):
        try:
            count += len(await serving.tokenize(text))
        except RequestError as error:  # the answer is there: it does not fail for this number
            log.warning("the tokens of an answer's reasoning cannot be counted: %s", error)
    return count


def statistics(generations: Sequence[Generation]) -> dict[str, Any]:
    """The extension field of a finished request; several answers are taken together."""
    every = [generation.stats for generation in generations]
    steps = sum(stats.steps for stats in every)
    decoded = sum(stats.decode_tokens for stats in every)
    decode_s = max((stats.decode_s for stats in every), default=0.0)
    histogram = Counter[int]()
    for stats in every:
        histogram.update(stats.histogram)
    return {
        "steps": steps,
        "drafted": sum(stats.drafted for stats in every),
        "accepted": sum(stats.accepted for stats in every),
        "branches": sum(stats.branches for stats in every),
        "branches_accepted": sum(stats.branches_accepted for stats in every),
        "mean_accepted_length": decoded / steps if steps else 0.0,
        "histogram": {str(length): histogram[length] for length in sorted(histogram)},
        "ttft_s": min((stats.ttft_s for stats in every), default=0.0),
        "decode_s": decode_s,
        "tokens_per_s": decoded / decode_s if decode_s > 0 else 0.0,
        "cached_tokens": max((stats.cached_tokens for stats in every), default=0),
    }


class TokenView:
    """The extension field of stream chunks: every token's text, and whether it was drafted.

    A character that several tokens make up belongs to the last of them; special tokens are "".
    Where the question asks, the trees that were verified too: their tokens stand by themselves.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._decoder = StreamDecoder(serving.tokenizer)

    def show(self, part: AnswerPart) -> dict[str, Any] | None:
        """The tokens of one part; None where it has none to show."""
        tokens = [
            {"text": self._decoder.push((token.id,)), "drafted": token.drafted}
            for token in part.tokens
            if not token.is_stop
        ]
        if not tokens:
            return None
        shown = {"tokens": tokens, "step": part.step}
        return shown | {"trees": [self._tree(one) for one in part.trees]} if part.trees else shown

    def _tree(self, tree: ShownTree) -> dict[str, Any]:
        text = self._serving.token_texts.text
        shown = {"at": tree.at, "texts": [text(token) for token in tree.tokens]}
        return {**shown, "parents": tree.parents, "path": tree.path}
