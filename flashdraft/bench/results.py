"""What a benchmark found: answers become measurements, measurements rows, rows one document.

The document is plain JSON (`FORMAT`). Everything that is read later (the table, the report, the
comparison) is in it; nothing here knows how an answer was had.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

from flashdraft.bench.tasks import Task
from flashdraft.errors import RequestError
from flashdraft.files import write_whole

FORMAT = "flashdraft-bench/1"
UNENDED = "The run has not ended."
PLAIN, DRAFT = "plain", "draft"
DRAFTS = ("drafted", "accepted", "branches", "branches_accepted")  # of a row with trees
BUCKETS = ("queue_s", "prefill_s", "drafter_prefill_s", "decode_s")
CACHED_SHARE = 0.1  # of prompt tokens; chat templates alone begin alike
Document: TypeAlias = dict[str, Any]
Check: TypeAlias = Callable[[str, Mapping[str, Any], str], "bool | None"]
Cell: TypeAlias = tuple[str, int, str]  # task, concurrency, mode


@dataclass(frozen=True)
class Reply:
    """One answered request. None where the engine does not say."""

    text: str  # all of it, thoughts too: what must be equal drafted and plain
    content: str  # without thoughts
    seconds: float  # from arrival to the last token
    ttft_s: float
    prompt_tokens: int
    output_tokens: int
    token_gaps: Sequence[float] = ()  # seconds before each later token, a step's shared by its own
    cached_tokens: int = 0
    steps: int | None = None
    histogram: Mapping[int, int] | None = None  # decode steps by tokens committed
    buckets: Mapping[str, float] | None = None
    drafts: Mapping[str, int] | None = None  # DRAFTS


@dataclass(frozen=True)
class RowAcceptance:
    """How drafting went in a whole row, where it is counted at all."""

    histogram: Mapping[int, int] = field(default_factory=dict)
    verified: Sequence[int] = ()  # how often each draft slot was sent to the target
    accepted: Sequence[int] = ()  # and how often it was accepted
    pooled: float | None = None  # tokens per decode step, where they are not the histogram's
    counted: float | None = None  # the same by a server's counters, past the answers' ends too

    @property
    def length(self) -> float | None:
        """Tokens per decode step, from whatever tells of them."""
        if self.pooled is not None or not self.num_steps:
            return self.pooled
        return sum(n * count for n, count in self.histogram.items()) / self.num_steps

    @property
    def num_steps(self) -> int:
        return sum(self.histogram.values())


@dataclass(frozen=True)
class Measurement:
    """A task at one concurrency in one mode: every prompt's replies, one a turn."""

    replies: Mapping[int, Sequence[Reply]]  # by the prompt's place; failed prompts are not in it
    wall_s: float
    acceptance: RowAcceptance
    problems: Sequence[str] = ()  # what the results must say
    num_failed: int = 0  # prompts without an answer

    @property
    def every(self) -> list[Reply]:
        return [reply for replies in self.replies.values() for reply in replies]


def acceptance_of(
    replies: Iterable[Reply], verified: Sequence[int] = (), accepted: Sequence[int] = ()
) -> RowAcceptance:
    """What requests that count their own steps say, with counts of every draft slot."""
    histogram = Counter[int]()
    for reply in replies:
        histogram.update(reply.histogram or {})
    return RowAcceptance(histogram, verified, accepted)


class Results:
    """A run's results as they come; `document` is valid at any moment."""

    def __init__(
        self,
        tasks: Sequence[Task],
        environment: Mapping[str, Any],
        settings: Mapping[str, Any],
        check: Check | None = None,
    ) -> None:
        self._tasks = {task.name: task for task in tasks}
        self._environment, self._settings, self._check = environment, settings, check
        self._cells: dict[Cell, list[Measurement]] = {}
        self._verdicts: dict[Cell, list[bool]] = {}
        self.problems: list[str] = [problem for task in tasks for problem in task.problems]
        self.is_partial = False
        self.is_running = False  # whoever saves a document then may be stopped before the end

    def add(self, cell: Cell, measured: Measurement) -> None:
        """Take in a row, or one more repeat of it."""
        self.problems += [one for one in measured.problems if one not in self.problems]
        self.is_partial |= measured.num_failed > 0
        if measured.replies:
            verdicts = self._judge(cell[0], measured)
            self._cells.setdefault(cell, []).append(measured)
            self._verdicts.setdefault(cell, []).extend(verdicts)

    def stop(self, why: str) -> None:
        """The run ends before its time; what is here stays."""
        self.is_partial = True
        self.problems.append(why)

    def document(self) -> Document:
        """Everything so far, in the documented form."""
        rows = [self._row(cell, measured) for cell, measured in self._cells.items()]
        return {
            "format": FORMAT,
            "is_partial": self.is_partial or self.is_running,
            "problems": [*self.problems, *self._cached(), *[UNENDED] * self.is_running],
            "environment": dict(self._environment),
            "settings": dict(self._settings),
            "prompts_sha256": {name: task.digest() for name, task in self._tasks.items()},
            "rows": rows,
            "speedup": _speedups(rows),
            "identical": self._identical(),
        }

    def _row(self, cell: Cell, repeats: Sequence[Measurement]) -> dict[str, Any]:
        task, concurrency, mode = cell
        replies = [reply for one in repeats for reply in one.every]
        wall_s = sum(one.wall_s for one in repeats)
        output_tokens = sum(reply.output_tokens for reply in replies)
        verdicts = self._verdicts[cell]
        gaps = [gap for reply in replies for gap in reply.token_gaps]
        return {
            "task": task,
            "concurrency": concurrency,
            "mode": mode,
            "tokens_per_s": output_tokens / wall_s if wall_s > 0 else 0.0,
            "wall_s": wall_s,
            "num_prompts": sum(len(one.replies) for one in repeats),
            "output_tokens": output_tokens,
            "prompt_tokens": sum(reply.prompt_tokens for reply in replies),
            "cached_tokens": sum(reply.cached_tokens for reply in replies),
            "ttft_p50_s": percentile([reply.ttft_s for reply in replies], 50),
            "ttft_p95_s": percentile([reply.ttft_s for reply in replies], 95),
            "itl_p50_s": percentile(gaps, 50),
            "itl_p95_s": percentile(gaps, 95),
            **_accepted(replies, [one.acceptance for one in repeats]),
            "trees": _trees(replies),
            "buckets": _buckets(replies),
            "accuracy": {"correct": sum(verdicts), "total": len(verdicts)} if verdicts else None,
            "requests": [[r.seconds, r.ttft_s, r.output_tokens, r.steps] for r in replies],
        }

    def _judge(self, name: str, measured: Measurement) -> list[bool]:
        """Whether each answer is right, where that can be told."""
        task, verdicts = self._tasks[name], list[bool]()
        if self._check is None:
            return verdicts
        for place, replies in measured.replies.items():
            row = task.prompts[place].row
            if row is not None:
                verdict = self._check(task.checked_as, row, replies[-1].content)
                verdicts += [] if verdict is None else [verdict]
        return verdicts

    def _cached(self) -> list[str]:
        """Whether a server had seen the prompts; in this process nobody has."""
        every = [r for cell in self._cells.values() for one in cell for r in one.every]
        cached = sum(reply.cached_tokens for reply in every)
        total = sum(reply.prompt_tokens for reply in every)
        if self._settings.get("engine") != "http" or cached <= CACHED_SHARE * total:
            return []
        return [
            f"The server found {100 * cached / total:.0f} % of the prompts' tokens in its prefix "
            "cache (cached_tokens of each row): first tokens come sooner than for new prompts."
        ]

    def _identical(self) -> dict[str, dict[str, dict[str, int]]]:
        """Prompts whose plain and drafted answers, all turns of them, are the same text."""
        found: dict[str, dict[str, dict[str, int]]] = {}
        for (task, concurrency, mode), drafted in self._cells.items():
            plain = self._cells.get((task, concurrency, PLAIN), [])
            if mode != DRAFT or not plain:
                continue
            pairs = [
                [[reply.text for reply in side.replies[place]] for side in (one, other)]
                for one, other in zip(plain, drafted, strict=False)  # the last may be missing yet
                for place in one.replies.keys() & other.replies.keys()
            ]
            same = sum(one == other for one, other in pairs)
            found.setdefault(task, {})[str(concurrency)] = {"same": same, "total": len(pairs)}
        return found


def _accepted(replies: Sequence[Reply], found: Sequence[RowAcceptance]) -> dict[str, Any]:
    means = [
        sum(n * count for n, count in reply.histogram.items()) / reply.steps
        for reply in replies
        if reply.histogram is not None and reply.steps
    ]
    histogram = Counter[int]()
    for one in found:
        histogram.update(one.histogram)
    verified, accepted = (
        [sum(slot) for slot in zip_longest(*counts, fillvalue=0)]
        for counts in ([one.verified for one in found], [one.accepted for one in found])
    )
    return {
        "mean_accepted_length": statistics.fmean(means) if means else None,
        "mean_accepted_length_pooled": _over_steps([(one, one.length) for one in found]),
        "mean_accepted_length_counted": _over_steps([(one, one.counted) for one in found]),
        "accepted_histogram": {str(n): histogram[n] for n in sorted(histogram) if histogram[n]},
        "accepted_by_position": [
            hits / tries for hits, tries in zip(accepted, verified, strict=True) if tries
        ],
    }


def _over_steps(lengths: Sequence[tuple[RowAcceptance, float | None]]) -> float | None:
    """The mean of what is known, by decode steps; a gauge knows none of them."""
    known = [(length, one.num_steps or 1) for one, length in lengths if length is not None]
    if not known:
        return None
    return sum(length * steps for length, steps in known) / sum(steps for _, steps in known)


def _buckets(replies: Sequence[Reply]) -> dict[str, float | None]:
    told = [reply.buckets for reply in replies if reply.buckets is not None]
    return {name: sum(one[name] for one in told) if told else None for name in BUCKETS}


def _trees(replies: Sequence[Reply]) -> dict[str, int] | None:
    """Draft tokens of a row, and those of branches; None where there were chains alone."""
    told = [reply.drafts for reply in replies if reply.drafts is not None]
    found = {name: sum(one[name] for one in told) for name in DRAFTS}
    return found if found["branches"] else None


def _speedups(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    rates = {(r["task"], r["concurrency"], r["mode"]): r["tokens_per_s"] for r in rows}
    found: dict[str, dict[str, float]] = {}
    for (task, concurrency, mode), rate in rates.items():
        plain = rates.get((task, concurrency, PLAIN))
        if mode == DRAFT and plain:
            found.setdefault(task, {})[str(concurrency)] = rate / plain
    return found


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value below which `percent` of them lie, between neighbours in proportion."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


# -- files -----------------------------------------------------------------------------------------

# a line break is never within a string
_FLAT_LIST = re.compile(r"\[\n\s*([^\[\]{}\"]*?)\n\s*\]")


def to_json(document: Mapping[str, Any]) -> str:
    """The document as text: indented, with lists of numbers on one line."""
    text = json.dumps(document, indent=1)
    return _FLAT_LIST.sub(lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text) + "\n"


def save_results(path: Path, document: Mapping[str, Any]) -> None:
    """Write the document, whole or not at all."""
    try:
        write_whole(path, to_json(document))
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror or error}.") from None


def load_results(path: Path) -> Document:
    """A document that was saved; anything else is refused."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is no JSON file: {error}.") from None
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise RequestError(
            f"{path} is no results file of flashdraft bench: its format is {found!r}, expected "
            f"{FORMAT!r}."
        )
    return dict(document)
