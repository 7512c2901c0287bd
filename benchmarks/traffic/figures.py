"""From a record to figures: windows, percentiles, gaps, shares of time. Pure functions.

A figure is of a window: from the moment when enough requests have warmed the engine up to the end.
A gap is the time between two pieces of one answer, which is what a reader sees.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.traffic.record import MIXED, STEP_KINDS, Piece, Record, StepMark
from benchmarks.traffic.sources import Turn
from flashdraft.bench.results import percentile

PERCENTS = (50, 95, 99)
ROWS_TOGETHER = 64


class Window(NamedTuple):
    """A stretch of time."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def holds(self, at: float) -> bool:
        return self.begin < at <= self.end


def steady_window(record: Record, num_warm_ups: int, limit_s: float) -> Window | None:
    """From the end of the n-th request, or the limit, to the last step; None if nothing is left."""
    begin = warm_up_end(record, num_warm_ups, limit_s)
    return None if begin is None or begin >= record.last else Window(begin, record.last)


def warm_up_end(record: Record, num_warm_ups: int, limit_s: float) -> float | None:
    """When the engine counts as warm; None if it does not yet."""
    if num_warm_ups == 0:
        return record.begin
    limit = record.begin + limit_s
    if len(record.ends) >= num_warm_ups and record.ends[num_warm_ups - 1].at <= limit:
        return record.ends[num_warm_ups - 1].at
    return limit if record.last >= limit else None


def num_ended(record: Record, begin: float) -> int:
    """Requests that a window from there on has; not those that ended with the warm-up's last."""
    return sum(end.at > begin for end in record.ends)


def milliseconds(values: Sequence[float]) -> dict[str, float | None]:
    """Percentiles, the highest value, and how many there were."""
    found: dict[str, float | None] = {
        f"p{percent}_ms": _rounded(percentile(values, percent)) for percent in PERCENTS
    }
    return found | {"max_ms": _rounded(max(values, default=None)), "count": len(values)}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 2)


def gaps_in(
    pieces: Sequence[Piece], window: Window, without: frozenset[str] = frozenset()
) -> list[float]:
    """Seconds between two pieces of one answer, by when the later one came."""
    last: dict[str, float] = {}
    found = []
    for piece in pieces:
        before = last.get(piece.request_id)
        if before is not None and window.holds(piece.at) and piece.request_id not in without:
            found.append(piece.at - before)
        last[piece.request_id] = piece.at
    return found


def first_times(record: Record) -> dict[str, float]:
    """When every request got its first tokens."""
    found: dict[str, float] = {}
    for piece in record.pieces:
        found.setdefault(piece.request_id, piece.at)
    return found


def ttfts_in(record: Record, window: Window) -> list[float]:
    """Seconds to the first token of those who arrived, and got it, in the window."""
    return [
        at - record.arrivals[name]
        for name, at in first_times(record).items()
        if window.holds(at) and record.arrivals[name] >= window.begin
    ]


def tokens_in(
    pieces: Sequence[Piece], window: Window, without: frozenset[str] = frozenset()
) -> int:
    return sum(
        one.num_tokens for one in pieces if window.holds(one.at) and one.request_id not in without
    )


def describe_steps(steps: Sequence[StepMark], window: Window) -> dict[str, Any]:
    """Steps by kind: how many, how long, what share of the window; and what they held."""
    inside = [step for step in steps if window.holds(step.end)]
    kinds = {}
    for kind in STEP_KINDS:
        seconds = [step.seconds for step in inside if step.kind == kind]
        device = [step.device_s for step in inside if step.kind == kind]
        if seconds:
            kinds[kind] = {
                "count": len(seconds),
                "mean_ms": round(1e3 * statistics.fmean(seconds), 3),
                "device_ms": round(1e3 * statistics.fmean(device), 3),
                "share": round(sum(seconds) / window.seconds, 4),
            }
    lengths = [length for step in inside for length in step.verify_lengths]
    prompts = [step.num_prompt_tokens for step in inside if step.num_prompt_tokens]
    accepted = sum(step.num_accepted for step in inside)
    busy = sum(step.seconds for step in inside)
    return {
        "kinds": kinds,
        "by_rows": _by_rows(inside),
        "count": len(inside),
        "outside_share": round(max(0.0, 1.0 - busy / window.seconds), 4),
        "mean_verify_length": round(statistics.fmean(lengths), 3) if lengths else None,
        "mean_accepted_length": round(1 + accepted / len(lengths), 3) if lengths else None,
        "mean_decoding": round(
            len(lengths) / max(1, sum(bool(s.verify_lengths) for s in inside)), 2
        ),
        "prompt_tokens_a_step": round(statistics.fmean(prompts), 1) if prompts else None,
        "steps_with_prompts": len(prompts),
    }


def _by_rows(steps: Sequence[StepMark]) -> dict[str, dict[str, float]]:
    """Passes with prompts beside those who decode, by all their rows up to a multiple of some."""
    found: dict[int, list[StepMark]] = {}
    for step in steps:
        if step.kind == MIXED:
            found.setdefault(-(-step.num_rows // ROWS_TOGETHER) * ROWS_TOGETHER, []).append(step)
    return {
        str(rows): {
            "count": len(some),
            "device_ms": round(1e3 * statistics.median(step.device_s for step in some), 2),
            "prompt_tokens": round(statistics.fmean(step.num_prompt_tokens for step in some), 1),
        }
        for rows, some in sorted(found.items())
    }


def stalls(record: Record, until: float) -> dict[str, float | None]:
    """The longest that anybody waited while the engine warmed up: for a piece, and for a step."""
    window = Window(record.begin, until)
    return {
        "seconds": round(window.seconds, 2),
        "longest_gap_ms": _rounded(max(gaps_in(record.pieces, window), default=None)),
        "longest_step_ms": _rounded(
            max((step.seconds for step in record.steps if window.holds(step.end)), default=None)
        ),
        "longest_ttft_ms": _rounded(
            max(
                (
                    at - record.arrivals[name]
                    for name, at in first_times(record).items()
                    if window.holds(at)
                ),
                default=None,
            )
        ),
    }


def describe_load(record: Record, window: Window) -> dict[str, Any]:
    """The figures of a window."""
    ended = [end for end in record.ends if window.holds(end.at)]
    firsts = first_times(record)
    tokens = tokens_in(record.pieces, window)
    return {
        "tokens_per_s": round(tokens / window.seconds, 1),
        "seconds": round(window.seconds, 2),
        "tokens": tokens,
        "requests": len(ended),
        "waiting_at_end": sum(name not in firsts for name in record.arrivals),
        "preemptions": sum(end.generation.stats.preemptions for end in ended),
        "ttft": milliseconds(ttfts_in(record, window)),
        "gap": milliseconds(gaps_in(record.pieces, window)),
        "steps": describe_steps(record.steps, window),
        "warm_up": stalls(record, window.begin),
    }


def describe_long(record: Record, name: str) -> dict[str, Any]:
    """What a long prompt waited for, and what the others saw of it until its first token."""
    first = first_times(record).get(name)
    begin = record.arrivals.get(name)
    if begin is None:
        return {"status": "the long prompt never arrived"}
    window, others = Window(begin, first or record.last), frozenset([name])
    before = Window(record.begin, begin)
    if window.seconds <= 0:
        return {"status": "nothing ran after the long prompt's arrival"}
    return {
        "ttft_s": None if first is None else round(first - begin, 3),
        "others_gap": milliseconds(gaps_in(record.pieces, window, others)),
        "others_gap_before": milliseconds(gaps_in(record.pieces, before, others)),
        "others_tokens_per_s": round(tokens_in(record.pieces, window, others) / window.seconds, 1),
        "steps": describe_steps(record.steps, window),
    }


def describe_turns(turns: Mapping[str, Turn], page_size: int) -> dict[str, Any]:
    """Prefix hits as a share of what could hit, and what followed them."""
    every = list(turns.values())
    could = sum(turn.could_hit(page_size) for turn in every)
    found = sum(min(turn.cached_tokens, turn.could_hit(page_size)) for turn in every)
    hits = [turn for turn in every if turn.cached_tokens]
    told = [turn.first_step_drafted for turn in hits if turn.first_step_drafted is not None]
    missed = [
        {"client": turn.client, "turn": turn.number + 1, "tokens": lost}
        for turn in every
        if (lost := turn.could_hit(page_size) - turn.cached_tokens) > 0
    ]
    return {
        "turns": len(every),
        "prompt_tokens": sum(turn.prompt_tokens for turn in every),
        "could_hit_tokens": could,
        "hit_tokens": found,
        "hit_share": round(found / could, 4) if could else None,
        "turns_with_a_hit": len(hits),
        "first_step_drafted": sum(told),
        "first_step_not_drafted": len(told) - sum(told),
        "first_step_unknown": len(hits) - len(told),
        "missed": missed,
    }
