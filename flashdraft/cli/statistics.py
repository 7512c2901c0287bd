"""What an answer cost and what drafting won: counted from events as they come, and put in words."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from flashdraft.core import GenerationStats, TokenEvent


@dataclass
class Progress:
    """An answer so far. Serves the live line, and an answer that is interrupted."""

    num_tokens: int = 0
    stats: GenerationStats = field(default_factory=GenerationStats)
    _begin: float = field(default_factory=time.perf_counter)
    _first_at: float | None = None

    def add(self, event: TokenEvent) -> None:
        """Count an event: the first one is the prefill's, each later one a decode step's."""
        count = len(event.token_ids)
        if count == 0:
            return
        now = time.perf_counter()
        self.num_tokens += count
        if self._first_at is None:
            self._first_at = now
            self.stats.ttft_s = now - self._begin
        else:
            self.stats.steps += 1
            self.stats.decode_tokens += count
            self.stats.accepted += sum(event.drafted)
            self.stats.histogram[count] = self.stats.histogram.get(count, 0) + 1
            self.stats.decode_s = now - self._first_at


@dataclass
class Totals:
    """A session's answers, finished or interrupted."""

    num_answers: int = 0
    num_interrupted: int = 0
    num_tokens: int = 0
    stats: GenerationStats = field(default_factory=GenerationStats)

    def add(self, num_tokens: int, stats: GenerationStats, interrupted: bool) -> None:
        self.num_answers += 1
        self.num_interrupted += interrupted
        self.num_tokens += num_tokens
        self.stats.steps += stats.steps
        self.stats.decode_tokens += stats.decode_tokens
        self.stats.decode_s += stats.decode_s
        for length, count in stats.histogram.items():
            self.stats.histogram[length] = self.stats.histogram.get(length, 0) + count

    def describe(self) -> str:
        answers = f"{self.num_answers} answer{'' if self.num_answers == 1 else 's'}"
        if self.num_interrupted:
            answers += f" ({self.num_interrupted} interrupted)"
        return f"{answers} · {describe_briefly(self.num_tokens, self.stats)}"


def describe_briefly(num_tokens: int, stats: GenerationStats) -> str:
    """Tokens, speed and accepted length: what the live line and a chat's summary show."""
    parts = [f"{num_tokens} token{'' if num_tokens == 1 else 's'}"]
    if stats.steps:
        parts += [
            f"{stats.tokens_per_s:.1f} tok/s",
            f"accepted length {stats.mean_accepted_length:.2f}",
        ]
    return " · ".join(parts)


def describe_fully(num_tokens: int, stats: GenerationStats) -> str:
    """Every figure of a finished answer, on two lines."""
    off = f", {stats.branches_accepted} of them off the chain" if stats.branches else ""
    return (
        f"{num_tokens} token{'' if num_tokens == 1 else 's'} · {stats.tokens_per_s:.1f} tok/s · "
        f"time to first token {stats.ttft_s:.3f} s · prompt {stats.prompt_tokens} tokens "
        f"({stats.cached_tokens} cached)\n"
        f"{stats.steps} steps · {stats.drafted} drafted · {stats.accepted} accepted{off} · "
        f"mean accepted length {stats.mean_accepted_length:.2f}"
    )


def describe_histogram(stats: GenerationStats) -> str:
    """How many steps committed how many tokens."""
    steps = " · ".join(f"{length}: {count}" for length, count in sorted(stats.histogram.items()))
    return f"steps by accepted length  {steps or 'none'}"
