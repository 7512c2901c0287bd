"""What a load came to: every question's outcome, and the figures of a row. Pure functions.

Times are seconds after the load's start, from when a question was due: what waits in the client
waits as a user does. A gap is the time between two pieces of one answer, which is what a reader
sees. A question is good if its first token came within one limit, and 95 % of its gaps within the
other; one that failed is not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flashdraft.bench.results import percentile
from flashdraft.bench.run.stream import StreamedAnswer
from flashdraft.bench.traffic.load import OfferedLoad

PERCENTS = (50, 95, 99)
CURVE = (1, 10, 25, 50, 75, 90, 95, 99, 100)  # percents of the plotted percentiles
GOOD_GAPS = 95  # percent of an answer's gaps that must keep to the limit
NUM_BINS = 20  # of the time line
LATE_S = 0.01  # a client that is late by more, one time in a hundred, bends the figures
BUSY_SHARE = 0.9  # of a processor: a client in one thread has no more
MAX_ERRORS = 20  # different ones that are told
CACHED_SHARE = 0.1  # of prompt tokens, from which the results tell of the prefix cache


class TimedPiece(NamedTuple):
    """Part of an answer: when it came, and how many tokens it had."""

    at_s: float
    num_tokens: float  # in proportion to its characters where the server does not count along


@dataclass(frozen=True)
class Outcome:
    """How one question ended: answered, failed, or unfinished when the run was stopped."""

    due_s: float
    end_s: float
    pieces: Sequence[TimedPiece] = ()
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    is_finished: bool = True

    @property
    def is_answered(self) -> bool:
        return self.is_finished and self.error is None

    @property
    def ttft_s(self) -> float:
        return self.pieces[0].at_s - self.due_s

    @property
    def latency_s(self) -> float:
        return self.pieces[-1].at_s - self.due_s

    @property
    def gaps(self) -> list[float]:
        pairs = zip(self.pieces, self.pieces[1:], strict=False)
        return [later.at_s - earlier.at_s for earlier, later in pairs]


class Goal(NamedTuple):
    """What a user is content with, in seconds; None where anything will do."""

    ttft_s: float | None = None
    gap_s: float | None = None

    def is_met(self, outcome: Outcome) -> bool:
        """Whether a question went well."""
        if not outcome.is_answered:
            return False
        if self.ttft_s is not None and outcome.ttft_s > self.ttft_s:
            return False
        gap = percentile(outcome.gaps, GOOD_GAPS)
        return self.gap_s is None or gap is None or gap <= self.gap_s


@dataclass
class LoadRecord:
    """A load as it ran; valid at any moment, so that an interrupt loses nothing."""

    load: OfferedLoad
    outcomes: list[Outcome] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)  # by how much the client was late
    num_sent: int = 0
    num_in_flight: int = 0
    most_in_flight: int = 0
    window_s: float = 0.0  # while the load was on: its duration, or until the last answer
    wall_s: float = 0.0
    cpu_s: float = 0.0  # of this process
    stopped: str | None = None  # why it ended before its time


def answered(answer: StreamedAnswer, due_s: float, end_s: float, begin: float) -> Outcome:
    """The outcome of a whole answer; `begin` is the load's start on the answer's clock."""
    reply = answer.reply()
    chunks, tokens = answer.chunks, reply.output_tokens
    counts = [count for _, _, count in chunks]
    characters = sum(length for _, length, _ in chunks) or 1
    pieces, before = [], 0
    for at, length, count in chunks:
        if all(one is not None for one in counts):
            share = float((count or 0) - before)
            before = count or 0
        else:
            share = tokens * length / characters
        pieces.append(TimedPiece(at - begin, share))
    return Outcome(due_s, end_s, pieces, tokens, reply.prompt_tokens, reply.cached_tokens)


def describe_row(record: LoadRecord, goal: Goal) -> dict[str, Any]:
    """A load's figures, in the documented form."""
    load, outcomes = record.load, record.outcomes
    good_ones = [one for one in outcomes if one.is_answered]
    failed = [one for one in outcomes if one.error is not None]
    window_s = record.window_s
    has_goal = goal != Goal()
    num_good = sum(map(goal.is_met, outcomes))
    num_judged = len(good_ones) + len(failed)
    gaps = [gap for one in good_ones for gap in one.gaps]
    ttfts = [one.ttft_s for one in good_ones]
    tokens = sum(p.num_tokens for one in outcomes for p in one.pieces if p.at_s <= window_s)
    ended = [one for one in good_ones if one.end_s <= window_s]
    return {
        "load": load.label,
        "rate": load.rate,
        "clients": load.clients,
        "burstiness": load.burstiness if load.rate is not None else None,
        "window_s": window_s,
        "num_sent": record.num_sent,
        "num_answered": len(good_ones),
        "num_failed": len(failed),
        "num_unfinished": record.num_sent - num_judged,
        "errors": _errors(failed),
        "most_in_flight": record.most_in_flight,
        "requests_per_s": len(ended) / window_s if window_s else 0.0,
        "tokens_per_s": tokens / window_s if window_s else 0.0,
        "output_tokens": sum(one.output_tokens for one in good_ones),
        "prompt_tokens": sum(one.prompt_tokens for one in good_ones),
        "cached_tokens": sum(one.cached_tokens for one in good_ones),
        **_percentiles("ttft", ttfts),
        **_percentiles("gap", gaps),
        **_percentiles("latency", [one.latency_s for one in good_ones]),
        "goodput_share": num_good / num_judged if has_goal and num_judged else None,
        "goodput_per_s": (
            sum(map(goal.is_met, ended)) / window_s if has_goal and window_s else None
        ),
        "client_lag_p99_s": percentile(record.lags, 99),
        "client_lag_max_s": max(record.lags, default=None),
        "client_cpu_share": record.cpu_s / record.wall_s if record.wall_s else None,
        "curves": {"percent": list(CURVE), "ttft_s": _curve(ttfts), "gap_s": _curve(gaps)},
        "timeline": _timeline(good_ones, window_s),
        "requests": [
            [one.due_s, one.ttft_s, one.latency_s, one.output_tokens] for one in good_ones
        ],
    }


def tell_problems(row: dict[str, Any], stopped: str | None) -> list[str]:
    """What whoever reads a row must know."""
    name, found = row["load"], []
    if stopped is not None:
        found.append(f"{name}: {stopped}")
    if row["num_failed"]:
        most = max(row["errors"], key=row["errors"].__getitem__)
        found.append(
            f"{name}: {row['num_failed']} of {row['num_sent']} requests failed; most often: {most}."
        )
    lag, share = row["client_lag_p99_s"], row["client_cpu_share"]
    if (lag or 0.0) > LATE_S or (share or 0.0) > BUSY_SHARE:
        found.append(
            f"{name}: this client was itself the bottleneck (late by {1e3 * (lag or 0):.0f} ms one "
            f"time in a hundred, {100 * (share or 0):.0f} % of a processor): times are too long "
            "by about that. Run it on a machine of its own, or ask for less."
        )
    total = row["prompt_tokens"]
    if row["cached_tokens"] > CACHED_SHARE * total:
        found.append(
            f"{name}: the server found {100 * row['cached_tokens'] / total:.0f} % of the prompts' "
            "tokens in its prefix cache: first tokens come sooner than for new prompts."
        )
    return found


def _errors(failed: Iterable[Outcome]) -> dict[str, int]:
    return dict(Counter(one.error or "" for one in failed).most_common(MAX_ERRORS))


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    return {f"{name}_p{percent}_s": percentile(values, percent) for percent in PERCENTS}


def _curve(values: Sequence[float]) -> list[float | None]:
    ordered = sorted(values)
    return [percentile(ordered, percent) for percent in CURVE]


def _timeline(outcomes: Sequence[Outcome], window_s: float) -> list[dict[str, float | None]]:
    """The load in stretches of equal length: what came in each, and what was waited for."""
    if window_s <= 0:
        return []
    width = window_s / NUM_BINS
    ttfts: list[list[float]] = [[] for _ in range(NUM_BINS)]
    gaps: list[list[float]] = [[] for _ in range(NUM_BINS)]
    tokens = [0.0] * NUM_BINS

    def place(at_s: float) -> int | None:
        found = math.floor(at_s / width)
        return found if 0 <= found < NUM_BINS else None

    for one in outcomes:
        if (bin_ := place(one.due_s)) is not None:
            ttfts[bin_].append(one.ttft_s)
        for number, piece in enumerate(one.pieces):
            if (bin_ := place(piece.at_s)) is not None:
                tokens[bin_] += piece.num_tokens
                if number:
                    gaps[bin_].append(piece.at_s - one.pieces[number - 1].at_s)
    return [
        {
            "begin_s": number * width,
            "tokens_per_s": tokens[number] / width,
            "ttft_p50_s": percentile(ttfts[number], 50),
            "ttft_p95_s": percentile(ttfts[number], 95),
            "gap_p50_s": percentile(gaps[number], 50),
            "gap_p95_s": percentile(gaps[number], 95),
        }
        for number in range(NUM_BINS)
    ]
