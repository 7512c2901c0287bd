"""The running state of one request. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flashdraft.core import (
    GenerationStats,
    PlacedPicture,
    Request,
    SamplingParams,
    TokenLogprob,
)
from flashdraft.media.sizes import MOST_TOKENS

MAX_CHUNK_PICTURES = MOST_TOKENS  # tokens: one of the largest pictures, or some smaller ones


@dataclass(eq=False)
class Sequence:
    """A request on its way: its tokens so far and how many of them the caches hold.

    The last token is the anchor: committed, not yet in the target's cache. `num_cached` counts
    tokens in the target's cache, `num_folded` those whose drafter context is written too.
    """

    request: Request
    stop_ids: frozenset[int]
    max_length: int  # tokens, prompt included, at which the answer must end
    tokens: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_folded: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = (
        None  # of the prompt's first tokens, if asked
    )
    drafted: list[bool] = field(default_factory=list)
    stats: GenerationStats = field(default_factory=GenerationStats)
    arrived_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    # seconds of each writing of the prompt's drafter context, asked for once the device is done
    prompt_folds: list[Callable[[], float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        self.stats.prompt_tokens = len(self.tokens)
        self.stats.picture_tokens = self.num_picture_tokens(0, len(self.tokens))
        if self.request.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    @classmethod
    def scratch(cls, max_length: int = 2) -> Sequence:
        """Of one token, for measurements; nobody waits for it."""
        return cls(Request("measure", [0], SamplingParams(), 0), frozenset(), max_length)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.request.prompt_ids) :]

    @property
    def is_decoding(self) -> bool:
        """Only the anchor is left to compute, and it is not the prompt's."""
        return self.num_cached == len(self.tokens) - 1 and self.num_output > 0

    @property
    def most_cached(self) -> int | None:
        """Leading tokens that a prefix hit may spare the target; None = any number."""
        if self.prompt_logprobs is None or len(self.prompt_logprobs) >= self.num_prompt:
            return None
        return len(self.prompt_logprobs) - 1  # a token's logprob comes from the row before it

    def cut(self, start: int, most: int) -> int:
        """How many tokens a chunk from `start` on has, of which there should be at most so many.

        It ends outside of pictures. Where the first one begins at `start`, all of it is in the
        chunk, however large: else it would wait for ever.
        """
        end, num_left = min(start + most, len(self.tokens)), MAX_CHUNK_PICTURES
        for placed in self.request.pictures:
            if placed.end <= start:
                continue
            if placed.start >= end:
                break
            assert start <= placed.start, "a chunk begins inside a picture"
            num_left -= placed.picture.num_tokens
            if placed.end > end or num_left < 0:
                end = placed.end if placed.start == start else placed.start
                break
        return end - start

    def pictures_in(self, start: int, count: int) -> list[PlacedPicture]:
        """The pictures of a chunk, placed in it."""
        end = start + count
        return [
            placed._replace(start=placed.start - start)
            for placed in self.request.pictures
            if start <= placed.start < end
        ]

    def num_picture_tokens(self, start: int, count: int) -> int:
        """Tokens of a chunk that stand for pictures."""
        return sum(placed.picture.num_tokens for placed in self.pictures_in(start, count))

    def score(self, logprobs: Iterable[TokenLogprob]) -> None:
        """Take in the logprobs of the prompt's next tokens."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += logprobs

    def clock(self) -> None:
        """Note that tokens are committed now; all earlier work for them is done."""
        now, stats = time.perf_counter(), self.stats
        while self.prompt_folds:
            stats.drafter_prefill_s += self.prompt_folds.pop()()
        if self.first_token_at is None:
            self.first_token_at = now
            stats.ttft_s = now - self.arrived_at
            stats.prefill_s = stats.ttft_s - stats.queue_s - stats.drafter_prefill_s
        stats.decode_s = now - self.first_token_at

    @property
    def num_left(self) -> int:
        """Tokens the answer may still grow by."""
        return self.max_length - len(self.tokens)
