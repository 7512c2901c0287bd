"""How well a server drafted, from its metrics page: flashdraft's, vLLM's and SGLang's counters.

A row's share is the difference of two looks. SGLang has a gauge alone, which is looked at now and
again. Pages are Prometheus text; nothing here sends a question.
"""

from __future__ import annotations

import math
import re
import statistics
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from flashdraft.bench.results import RowAcceptance
from flashdraft.bench.run.stream import Endpoint
from flashdraft.errors import EngineLostError, FlashdraftError

MAX_POSITION = 64  # of a draft: no drafter drafts that far, and a page may say anything
SAMPLE_S = 0.5  # between two looks at a gauge
OURS, VLLM, SGLANG, OTHER = "flashdraft", "vllm", "sglang", "other"
SGLANG_GAUGE = "sglang:spec_accept_length"
_VLLM = "vllm:spec_decode_num_"
_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Page: TypeAlias = dict[str, list[tuple[dict[str, str], float]]]  # by name: labels and value


class CountersError(FlashdraftError):
    """A page's counters make no sense: what they count is not known."""


def read_page(text: str) -> Page:
    """The samples of a metrics page, counters by their name without _total."""
    page: Page = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        labels = dict(_LABEL.findall(match[2] or ""))
        page.setdefault(match[1].removesuffix("_total"), []).append((labels, value))
    return page


def look(endpoint: Endpoint) -> Page | None:
    """The endpoint's metrics; None if it has none."""
    try:
        status, text = endpoint.get("/metrics")
    except EngineLostError:  # whether the server lives is for its answers to show
        return None
    page = read_page(text) if status == 200 else {}
    return page or None


def acceptance_between(
    kind: str, before: Page, after: Page, answers: Sequence[int] | None = None
) -> RowAcceptance | None:
    """What was drafted and accepted between two looks; None if the pages do not say.

    `answers` are the output tokens of every answer in between, where there are all of them.
    CountersError where they cannot be right: the server was started anew in between, most likely.
    """
    if kind == OURS:
        return _ours(before, after)
    if f"{_VLLM}drafts" in after:
        return _vllm(before, after, answers)
    return None


def kept_length(
    counted: float, drafts: float, longest: int, answers: Sequence[int] | None
) -> float:
    """Tokens that the answers have per draft, of which vLLM counts those beyond their ends too.

    An answer's first token is the prefill's. Where answers and counters are apart by more than
    that, steps went without a draft or others asked as well: the counters' own figure is left.
    """
    if answers is not None:
        kept = sum(answers) - len(answers)
        if drafts <= kept <= counted <= kept + longest * len(answers):
            return kept / drafts
    return counted / drafts


def _ours(before: Page, after: Page) -> RowAcceptance:
    """Slots alone: every answer brings its own histogram."""
    hits = _by_label("flashdraft_accepted_tokens_by_position", "position", before, after)
    lengths = _by_label("flashdraft_draft_depths", "depth", before, after)
    longest = max((length for length, count in lengths.items() if count), default=0)
    tries = [sum(n for length, n in lengths.items() if length > slot) for slot in range(longest)]
    return RowAcceptance({}, tries, [hits[slot + 1] for slot in range(longest)])


def _vllm(before: Page, after: Page, answers: Sequence[int] | None) -> RowAcceptance | None:
    drafts = _total(f"{_VLLM}drafts", before, after)
    accepted = f"{_VLLM}accepted_tokens"
    if drafts <= 0:
        return None
    hits = _by_label(f"{accepted}_per_pos", "position", before, after)
    if not hits:
        counted = drafts + _total(accepted, before, after)
        pooled = kept_length(counted, drafts, MAX_POSITION, answers)
        return RowAcceptance(pooled=pooled, counted=counted / drafts)
    reached = [drafts, *(hits[slot] for slot in range(max(hits) + 1)), 0]
    pairs = zip(reached, reached[1:], strict=False)
    histogram = {n: round(here - further) for n, (here, further) in enumerate(pairs, 1)}
    if min(histogram.values()) < 0:
        raise CountersError(f"{accepted}_per_pos and {_VLLM}drafts do not add up")
    slots = [round(count) for count in reached[1:-1]]
    pooled = kept_length(sum(reached), drafts, len(slots), answers)
    return RowAcceptance(
        histogram, [round(drafts)] * len(slots), slots, pooled, sum(reached) / drafts
    )


def _total(name: str, before: Page, after: Page) -> float:
    """How far a counter has gone, whatever its labels."""
    begin, end = (sum(value for _, value in page.get(name, [])) for page in (before, after))
    return _growth(name, begin, end)


def _by_label(name: str, label: str, before: Page, after: Page) -> Counter[int]:
    """How far a counter has gone, by the number in one of its labels."""
    totals: dict[int, list[float]] = {}
    for side, page in enumerate((before, after)):
        for labels, value in page.get(name, []):
            number = labels.get(label, "")
            if not number.isdecimal():
                continue
            if len(number) > len(str(MAX_POSITION)) or int(number) > MAX_POSITION:
                raise CountersError(
                    f"{name} has the {label} {number[:20]!r}; the highest that is read is "
                    f"{MAX_POSITION}"
                )
            totals.setdefault(int(number), [0.0, 0.0])[side] += value
    return Counter(
        {
            number: round(_growth(f"{name} at {label} {number}", *both))
            for number, both in totals.items()
        }
    )


def _growth(name: str, begin: float, end: float) -> float:
    """The difference of two looks at a counter, which only grows while its server lives."""
    if not math.isfinite(end - begin) or end < begin:
        raise CountersError(f"{name} went from {begin:g} to {end:g}")
    return end - begin


class GaugeWatch:
    """Looks at a gauge now and again while a row runs; `mean` is of what it showed."""

    def __init__(self, endpoint: Endpoint, name: str = SGLANG_GAUGE) -> None:
        self._endpoint, self._name = endpoint, name
        self._values: list[float] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def mean(self) -> float | None:
        """The gauge's mean over the row; ends the watch."""
        self._end.set()
        self._thread.join()
        self._look()
        return statistics.fmean(self._values) if self._values else None

    def _watch(self) -> None:
        while not self._end.wait(SAMPLE_S):
            self._look()

    def _look(self) -> None:
        shown: Sequence[tuple[Mapping[str, str], float]] = (look(self._endpoint) or {}).get(
            self._name, []
        )
        # 0 while it has nothing to say
        self._values += [value for _, value in shown if 0 < value < math.inf]
