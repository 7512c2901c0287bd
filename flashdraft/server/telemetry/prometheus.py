"""Counters, gauges and histograms in Prometheus's text format. One thread, so no locks.

A metric knows its labels' names; what to count is for metrics.py. A metric holds at most MAX_SERIES
combinations of label values, and whatever comes after them is counted together as "other": no
client can make it grow.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

MAX_SERIES = 200
OTHER = "other"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metric:
    """What counters, gauges and histograms share: a name, a help text, labels."""

    kind = "untyped"

    def __init__(self, name: str, help_text: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self.help_text = help_text
        self.labels = tuple(labels)

    def render(self) -> Iterator[str]:
        """The metric's lines."""
        yield f"# HELP {self.name} {_escape_help(self.help_text)}"
        yield f"# TYPE {self.name} {self.kind}"
        yield from self._samples()

    def _samples(self) -> Iterator[str]:
        raise NotImplementedError

    def _sample(self, suffix: str, labels: Sequence[tuple[str, str]], value: float) -> str:
        shown = ",".join(f'{name}="{_escape(text)}"' for name, text in labels)
        return (
            f"{self.name}{suffix}{{{shown}}} {_number(value)}"
            if shown
            else (f"{self.name}{suffix} {_number(value)}")
        )

    def _bounded(
        self, values: Sequence[str], known: Mapping[tuple[str, ...], object]
    ) -> tuple[str, ...]:
        key = tuple(values)
        assert len(key) == len(self.labels)
        if key in known or len(known) < MAX_SERIES:
            return key
        return (OTHER,) * len(key)


class Value(Metric):
    """A number for each combination of label values."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, help_text, labels)
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def get(self, *values: str) -> float:
        """The number; 0 for one that was never counted."""
        return self._values.get(values, 0.0)

    def _samples(self) -> Iterator[str]:
        for key, value in sorted(self._values.items()):
            yield self._sample("", list(zip(self.labels, key, strict=True)), value)


class Counter(Value):
    """A number that only grows."""

    kind = "counter"

    def add(self, amount: float, *values: str) -> None:
        """Count something."""
        assert amount >= 0
        if amount:
            key = self._bounded(values, self._values)
            self._values[key] = self._values.get(key, 0.0) + amount


class Gauge(Value):
    """A number that goes up and down."""

    kind = "gauge"

    def set(self, value: float, *values: str) -> None:
        """Say how it stands."""
        self._values[self._bounded(values, self._values)] = value


class Histogram(Metric):
    """How many observations were at most this large, for a few sizes."""

    kind = "histogram"

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        super().__init__(name, help_text)
        self._bounds = sorted(bounds)
        self._counts = [0] * (len(self._bounds) + 1)  # the last is for what is larger than all
        self._sum = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def mean(self) -> float | None:
        return self._sum / self.count if self.count else None

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, or the same one several times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def _samples(self) -> Iterator[str]:
        total = 0
        for bound, count in zip([*self._bounds, math.inf], self._counts, strict=True):
            total += count
            yield self._sample("_bucket", [("le", _number(bound))], total)
        yield self._sample("_sum", [], self._sum)
        yield self._sample("_count", [], total)


def render(metrics: Sequence[Metric]) -> str:
    """All of them as one page."""
    return "\n".join(line for metric in metrics for line in metric.render()) + "\n"


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
