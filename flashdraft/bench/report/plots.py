"""The pictures of a bench run: one panel a task, for speed, accepted lengths and waiting times.

Owns which figures of the results document are drawn and what they are called; svg.py draws them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flashdraft.bench.report.table import Line, Row, table_lines, task_title
from flashdraft.svg import Axes, Series, bar_panel, line_panel, picture, tone

IN_FLIGHT = "requests in flight"
MILLISECONDS_BELOW = 2.0  # seconds; longer times are shown in seconds


class Panel(NamedTuple):
    """One task's part of a plot."""

    title: str
    drawing: str


class Plot(NamedTuple):
    """One picture: its file's name, what it shows, and a panel a task."""

    name: str
    title: str
    caption: str
    keys: Sequence[Series]
    panels: Sequence[Panel]
    has_lines: bool = False

    def to_svg(self) -> str:
        """The whole picture as a file of its own."""
        drawings = [panel.drawing for panel in self.panels]
        return picture(self.title, self.caption, self.keys, self.has_lines, drawings)


def make_plots(document: Mapping[str, Any]) -> list[Plot]:
    """Every picture that the document has figures for."""
    tasks: dict[str, list[Line]] = {}
    for line in table_lines(document):
        tasks.setdefault(line.task, []).append(line)
    plots = [
        throughput_plot(tasks),
        histogram_plot(tasks),
        position_plot(tasks),
        waiting_plot(tasks, "first_token", "Time to the first token", "ttft"),
        waiting_plot(tasks, "between_tokens", "Time between tokens", "itl"),
    ]
    return [plot for plot in plots if plot.panels]


def throughput_plot(tasks: Mapping[str, Sequence[Line]]) -> Plot:
    """Tokens per second, plain beside drafted, one scale for all tasks."""
    fastest = max(
        (row["tokens_per_s"] or 0.0 for lines in tasks.values() for row in _rows(lines)),
        default=0.0,
    )
    panels, series = [], list[Series]()
    for task, lines in tasks.items():
        ratios = ["" if line.speedup is None else f"{line.speedup:.2f}×" for line in lines]
        series = [
            Series("plain", "plain", [_value(line.plain, "tokens_per_s") for line in lines]),
            Series(
                "drafted",
                "drafted",
                [_value(line.drafted, "tokens_per_s") for line in lines],
                ratios,
            ),
        ]
        axes = Axes(IN_FLIGHT, "tokens/s", fastest)
        panels.append(_bars(task, [str(line.concurrency) for line in lines], series, axes))
    caption = "Output tokens over wall time. The figure over a drafted bar is its speedup."
    return Plot("throughput", "Tokens per second", caption, series, panels)


def histogram_plot(tasks: Mapping[str, Sequence[Line]]) -> Plot:
    """How many tokens a drafted step commits, as a share of the steps, one scale for all tasks."""
    levels = _levels(tasks, "accepted_histogram")
    every = [h for lines in tasks.values() for h in _drafted(lines, "accepted_histogram").values()]
    highest = max((share for one in every for share in _shares(one, list(one))), default=0.0)
    panels = []
    for task, lines in tasks.items():
        found = _drafted(lines, "accepted_histogram")
        if not found:
            continue
        longest = max(int(length) for histogram in found.values() for length in histogram)
        lengths = [str(length) for length in range(1, longest + 1)]
        series = [
            _level_series(levels, level, _shares(histogram, lengths))
            for level, histogram in found.items()
        ]
        axes = Axes("tokens committed in a step", "% of steps", highest)
        panels.append(_bars(task, lengths, series, axes))
    caption = "Tokens that one drafted step commits, the bonus token included, by how often."
    return Plot("accepted_lengths", "Accepted lengths", caption, _keys(levels), panels)


def position_plot(tasks: Mapping[str, Sequence[Line]]) -> Plot:
    """How often the target accepts each slot of the block that it verified."""
    levels = _levels(tasks, "accepted_by_position")
    panels = []
    for task, lines in tasks.items():
        found = _drafted(lines, "accepted_by_position")
        if not found:
            continue
        slots = [str(slot + 1) for slot in range(max(map(len, found.values())))]
        series = [
            _level_series(levels, level, [None if s is None else 100 * s for s in shares])
            for level, shares in found.items()
        ]
        drawing = line_panel(task_title(task), slots, series, Axes("draft slot", "% accepted", 100))
        panels.append(Panel(task_title(task), drawing))
    caption = "Share of the verified draft tokens that were accepted, by their slot in the block."
    title = "Acceptance by draft slot"
    return Plot("acceptance_by_slot", title, caption, _keys(levels), panels, has_lines=True)


def waiting_plot(tasks: Mapping[str, Sequence[Line]], name: str, title: str, quantity: str) -> Plot:
    """The median of a waiting time as a bar, its 95th percentile as a thin line."""
    median, high = f"{quantity}_p50_s", f"{quantity}_p95_s"
    times = [row[high] or 0.0 for lines in tasks.values() for row in _rows(lines)]
    longest = max(times, default=0.0)
    unit, factor = ("ms", 1000.0) if longest < MILLISECONDS_BELOW else ("s", 1.0)
    panels, keys = [], list[Series]()
    for task, lines in tasks.items():
        series = []
        modes = {
            "plain": [line.plain for line in lines],
            "drafted": [line.drafted for line in lines],
        }
        for label, rows in modes.items():
            middles = [_value(row, median, factor) for row in rows]
            series.append(
                Series(label, label, middles, (), [_value(row, high, factor) for row in rows])
            )
        keys = series
        if any(value is not None for one in series for value in one.values):
            levels = [str(line.concurrency) for line in lines]
            panels.append(_bars(task, levels, series, Axes(IN_FLIGHT, unit, longest * factor)))
    caption = "Bar: median. Thin line: 95th percentile."
    return Plot(name, title, caption, keys, panels)


def _bars(task: str, categories: Sequence[str], series: Sequence[Series], axes: Axes) -> Panel:
    title = task_title(task)
    return Panel(title, bar_panel(title, categories, series, axes))


def _rows(lines: Sequence[Line]) -> list[Row]:
    return [row for line in lines for row in (line.plain, line.drafted) if row is not None]


def _value(row: Row | None, key: str, factor: float = 1.0) -> float | None:
    return None if row is None or row[key] is None else float(row[key]) * factor


def _drafted(lines: Sequence[Line], key: str) -> dict[int, Any]:
    """One figure of the drafted rows by concurrency, where it is known."""
    rows = {line.concurrency: line.drafted for line in lines if line.drafted is not None}
    return {level: row[key] for level, row in rows.items() if row[key]}


def _shares(histogram: Mapping[str, int], lengths: Sequence[str]) -> list[float]:
    steps = sum(histogram.values()) or 1
    return [100 * histogram.get(length, 0) / steps for length in lengths]


def _levels(tasks: Mapping[str, Sequence[Line]], key: str) -> list[int]:
    """Every concurrency that some task knows the figure at; a colour each, the same everywhere."""
    return sorted({level for lines in tasks.values() for level in _drafted(lines, key)})


def _level_series(levels: list[int], level: int, values: Sequence[float | None]) -> Series:
    return Series(f"{level} in flight", tone(levels.index(level)), values)


def _keys(levels: list[int]) -> list[Series]:
    return [_level_series(levels, level, ()) for level in levels]
