"""Two bench results beside each other: ratios B / A with an interval, or a refusal in words.

The estimator. A row's throughput is its output tokens over its wall time. The interval comes from
a bootstrap over the row's requests: they are drawn anew, with repetition, and the row's throughput
is scaled by what that does to the requests' own pace, tokens over seconds summed over the drawn
ones: T* = T · (Σn* / Σs*) / (Σn / Σs), as if the wall time followed the requests' time. Where both
rows have as many requests they answer the same prompts in the same order, and the same draws are
taken from both, so that easy and hard prompts do not widen the interval. Turns of a conversation
count as requests of their own. The interval is the 2.5th to 97.5th percentile of the ratio over
the draws. It holds what the choice of prompts does to the ratio, and not what the machine does from
one run to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashdraft.bench.report.reading import read_document
from flashdraft.bench.report.table import (
    HTTP,
    UNKNOWN,
    Document,
    Row,
    aligned,
    describe_run,
    ordered_rows,
    precision,
    speed,
    task_title,
    wrapped,
)
from flashdraft.bench.results import DRAFT, PLAIN
from flashdraft.bench.run.counters import VLLM, kept_length
from flashdraft.errors import RequestError

NUM_RESAMPLES = 4000
PERCENTILES = (2.5, 97.5)
COUNTED = "mean_accepted_length_counted"  # which files have since its pooled length is another
MODE_WORDS = {PLAIN: "plain", DRAFT: "drafted"}
# What must be equal in both, and its name in a refusal; machine and dtype are in _machine.
SAME_SETTINGS = {
    "model": "model",
    "max_tokens": "limit of tokens",
    "thinking": "thinking",
    "sampling": "sampling",
    "temperature": "temperature",
    "top_p": "top-p",
    "top_k": "top-k",
}
# What may differ: perhaps it is what the comparison is about. It is told.
TOLD_SETTINGS = ("engine", "draft", "verify", "tree", "seed", "repeats", "warm_up_prompts")
TOLD_ENVIRONMENT = (
    "package",
    "commit",
    "python",
    "torch",
    "platform",
    "threads",
    "kernels",
    "server",
)
HEADINGS = ("task", "c", "mode", "A tok/s", "B tok/s", "B / A", "95 % interval")
LENGTH_HEADINGS = ("A accepted", "B accepted", "B / A", "first token B / A")


class Interval(NamedTuple):
    """Where the ratio lies in 95 % of the resamples."""

    low: float
    high: float

    @property
    def excludes_one(self) -> bool:
        return not self.low <= 1 <= self.high


class ComparedRow(NamedTuple):
    """One task at one concurrency in one mode, in both runs; None where it is unknown."""

    a: Row
    b: Row
    ratio: float | None
    interval: Interval | None
    accepted_a: float | None
    accepted_b: float | None
    first_token_ratio: float | None


@dataclass(frozen=True)
class Comparison:
    """Rows that both runs have, and what has to be known to read them."""

    rows: Sequence[ComparedRow]
    notes: Sequence[str]

    def render(self) -> str:
        """The comparison as a table for the terminal."""
        cells = [list(_cells(row)) for row in self.rows]
        named = [line[0] for line in cells]
        for above, line in zip(named, cells[1:], strict=False):
            line[0] = "" if line[0] == above else line[0]  # a task is named once
        table = aligned([[*HEADINGS, *LENGTH_HEADINGS], *cells])
        return "\n".join([*table, "", *wrapped(self.notes)]) + "\n"


def compare_files(a: Path, b: Path) -> str:
    """Two results files beside each other, as text."""
    first, second = read_document(a), read_document(b)
    comparison = compare(first, second)
    names = [f"{letter}: {path.name}: " for letter, path in (("A", a), ("B", b))]
    lines = [name + describe_run(one) for name, one in zip(names, (first, second), strict=True)]
    return "\n".join([*wrapped(lines), "", comparison.render()])


def compare(a: Document, b: Document, seed: int = 0) -> Comparison:
    """Ratios of what both have measured; refuses, with every reason, what cannot be compared."""
    rows_a, rows_b = _by_name(a), _by_name(b)
    shared = [name for name in rows_a if name in rows_b]
    reasons = [*_differing_prompts(a, b), *_differences(a, b)]
    if not shared:
        have = [_listed(rows) for rows in (rows_a, rows_b)]
        reasons.append(
            "nothing in common: no task was measured at the same concurrency in the same mode "
            f"(A: {have[0] or 'nothing'}; B: {have[1] or 'nothing'})"
        )
    if reasons:
        listed = "\n".join(f"- {reason}" for reason in reasons)
        raise RequestError(
            f"A and B cannot be compared:\n{listed}\n"
            "Run both with the same prompts, settings, model and machine."
        )
    generator = np.random.default_rng(seed)
    rows = [_compared(rows_a[name], rows_b[name], generator) for name in shared]
    left_out = len(rows_a) + len(rows_b) - 2 * len(shared)
    return Comparison(rows, list(_notes(a, b, rows, left_out)))


def bootstrap(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], generator: np.random.Generator
) -> Interval | None:
    """The interval of the ratio of both rows' paces, over their ratio as measured."""
    if min(len(a), len(b)) < 2:
        return None
    drawn_a = generator.integers(0, len(a), (NUM_RESAMPLES, len(a)))
    is_paired = len(a) == len(b)
    drawn_b = drawn_a if is_paired else generator.integers(0, len(b), (NUM_RESAMPLES, len(b)))
    paces = []
    for requests, drawn in ((a, drawn_a), (b, drawn_b)):
        seconds, tokens = (np.array([request[n] for request in requests]) for n in (0, 2))
        if not tokens.all():
            return None
        pace = tokens.sum() / seconds.sum()
        paces.append(tokens[drawn].sum(axis=1) / seconds[drawn].sum(axis=1) / pace)
    low, high = np.percentile(paces[1] / paces[0], PERCENTILES)
    return Interval(float(low), float(high))


def _compared(a: Row, b: Row, generator: np.random.Generator) -> ComparedRow:
    ratio = _ratio(a["tokens_per_s"], b["tokens_per_s"])
    around = bootstrap(a["requests"], b["requests"], generator)
    interval = None
    if ratio is not None and around is not None:
        interval = Interval(ratio * around.low, ratio * around.high)
    lengths = [None, None]
    if a["mode"] == DRAFT:
        # Pooled lengths are compared with pooled ones, where one side knows no others.
        for key in ("mean_accepted_length_pooled", "mean_accepted_length"):
            if a[key] is not None and b[key] is not None:
                lengths = [a[key], b[key]]
    first_token = _ratio(a["ttft_p50_s"], b["ttft_p50_s"])
    return ComparedRow(a, b, ratio, interval, lengths[0], lengths[1], first_token)


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if not a or b is None else b / a


def _by_name(document: Document) -> dict[tuple[str, int, str], Row]:
    rows = [_renewed(row, document) for row in ordered_rows(document)]
    return {(row["task"], row["concurrency"], row["mode"]): row for row in rows}


def _renewed(row: Row, document: Document) -> Row:
    """An older file's row of vLLM, pooled as it is now: by the answers, not by its counters."""
    drafts = sum(row["accepted_histogram"].values())
    is_old = document["environment"].get("server") == VLLM and COUNTED not in row
    if not is_old or not drafts or document["is_partial"]:
        return row
    counted = sum(int(n) * count for n, count in row["accepted_histogram"].items())
    longest = max(map(int, row["accepted_histogram"])) - 1
    answers = [tokens for _, _, tokens, _ in row["requests"]]
    pooled = kept_length(counted, drafts, longest, answers)
    return {**row, "mean_accepted_length_pooled": pooled}


def _listed(rows: Iterable[tuple[str, int, str]]) -> str:
    modes: dict[str, list[str]] = {}
    for task, concurrency, mode in rows:
        modes.setdefault(f"{task} at {concurrency}", []).append(MODE_WORDS[mode])
    return ", ".join(f"{cell} {' and '.join(words)}" for cell, words in modes.items())


def _differing_prompts(a: Document, b: Document) -> Iterator[str]:
    tasks = {row["task"] for row in a["rows"]} & {row["task"] for row in b["rows"]}
    hashes = [one["prompts_sha256"] for one in (a, b)]
    others = sorted(task for task in tasks if hashes[0].get(task) != hashes[1].get(task))
    if others:
        yield f"other prompts: those of {', '.join(others)} are not the same"


def _differences(a: Document, b: Document) -> Iterator[str]:
    """Every reason against the comparison but for the prompts; what is unknown is no reason."""
    facts_a, facts_b = (
        {name: one["settings"].get(key) for key, name in SAME_SETTINGS.items()} | _machine(one)
        for one in (a, b)
    )
    for name, fact in facts_a.items():
        other = facts_b[name]
        if fact is not None and other is not None and fact != other:
            yield f"other {name}: A {_shown(fact)}, B {_shown(other)}"


def _machine(document: Document) -> dict[str, Any]:
    """What the target ran on. Over HTTP the device is the asking side's and says nothing of it."""
    environment = document["environment"]
    is_here = document["settings"]["engine"] != HTTP
    return {
        "hardware": environment.get("device") if is_here else None,
        "number of CPU cores": environment.get("cpu_count"),
        "dtype": precision(document),
    }


def _notes(a: Document, b: Document, rows: Sequence[ComparedRow], left_out: int) -> Iterator[str]:
    for letter, document in (("A", a), ("B", b)):
        if document["is_partial"]:
            why = " ".join(map(str, document["problems"])) or "it does not say why."
            yield f"Note: {letter} is partial: {why}"
        unknown = [name for name, value in _machine(document).items() if value is None]
        if unknown:
            yield f"Note: {letter} does not say its {', '.join(unknown)}; that was not compared."
    if left_out:
        yield f"Note: rows that one file alone has were left out: {left_out}."
    if told := [
        *_told("settings", TOLD_SETTINGS, a, b),
        *_told("environment", TOLD_ENVIRONMENT, a, b),
    ]:
        yield "Differences: " + "; ".join(told) + "."
    yield (
        "tok/s: output tokens over wall time. Interval: bootstrap over requests"
        f" ({NUM_RESAMPLES} resamples); it does not hold what differs from run to run."
    )
    yield f"accepted: {_length_kind(rows)}. first token: ratio of the medians."
    if any(row.interval and row.interval.excludes_one for row in rows):
        yield "*: the interval excludes 1."


def _length_kind(rows: Sequence[ComparedRow]) -> str:
    drafted = [row for row in rows if row.accepted_a is not None]
    pooled = [row for row in drafted if row.accepted_a != row.a["mean_accepted_length"]]
    if not pooled:
        return "tokens per decode step, mean over requests"
    return "tokens per decode step, pooled" + ("" if len(pooled) == len(drafted) else " in part")


def _told(part: str, keys: Sequence[str], a: Document, b: Document) -> Iterator[str]:
    for key in keys:
        one, other = a[part].get(key), b[part].get(key)
        if one != other:
            yield f"{key.replace('_', ' ')} A {_shown(one)}, B {_shown(other)}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unknown" if value is None else str(value)


def _cells(row: ComparedRow) -> Iterator[str]:
    yield task_title(row.a["task"])
    yield str(row.a["concurrency"])
    yield MODE_WORDS[row.a["mode"]]
    yield speed(row.a)
    yield speed(row.b)
    marked = row.interval is not None and row.interval.excludes_one
    yield _number(row.ratio) + ("*" if marked else "")
    yield UNKNOWN if row.interval is None else f"{row.interval.low:.3f} to {row.interval.high:.3f}"
    yield _number(row.accepted_a, 2)
    yield _number(row.accepted_b, 2)
    yield _number(_ratio(row.accepted_a, row.accepted_b))
    yield _number(row.first_token_ratio)


def _number(value: float | None, digits: int = 3) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"
