"""A run's log, JSON lines, and its picture: loss and held-out accepted length as one SVG file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from flashdraft.files import write_whole
from flashdraft.svg import ticks

LOG_NAME, PLOT_NAME = "log.jsonl", "plot.svg"
WIDTH, PANEL_HEIGHT = 760, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 34, 40
_COLOURS = ("#1668b8", "#c2410c")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.title{font-weight:600}"
    ".grid{stroke:#ddd}.curve{fill:none;stroke-width:1.6}"
)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's log."""
    path = folder / LOG_NAME
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    whole = text[: text.rfind("\n") + 1]  # a last line may have been cut short
    return [json.loads(line) for line in whole.splitlines()]


def keep_rows(folder: Path, step: int) -> list[dict[str, Any]]:
    """Drop the rows of steps that a resumed run makes again; return the others."""
    rows = [row for row in read_log(folder) if row["step"] <= step]
    log = folder / LOG_NAME
    write_whole(log, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


def draw_plot(folder: Path) -> None:
    """Draw the run's curves from its log."""
    write_whole(folder / PLOT_NAME, draw_svg(read_log(folder), folder.parent.name or "run"))


class Point(NamedTuple):
    """One value of a curve."""

    step: float
    value: float


def curve(rows: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    """The finite values of one key of the log."""
    points = (Point(float(row["step"]), float(row[key])) for row in rows if key in row)
    return [point for point in points if math.isfinite(point.value)]


def draw_svg(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """The run's picture: one panel for each of the two curves."""
    panels = [
        _panel(0, f"{title}: loss", curve(rows, "loss"), _COLOURS[0]),
        _panel(1, "held-out accepted length", curve(rows, "accepted_length"), _COLOURS[1]),
    ]
    height = PANEL_HEIGHT * len(panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}"><style>{_STYLE}</style>'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(panels)}</svg>\n'
    )


def _panel(index: int, title: str, points: Sequence[Point], colour: str) -> str:
    top = index * PANEL_HEIGHT + _TOP
    bottom = (index + 1) * PANEL_HEIGHT - _BOTTOM
    parts = [f'<text class="title" x="{_LEFT}" y="{top - 12}">{escape(title)}</text>']
    if not points:
        parts.append(f'<text x="{_LEFT}" y="{(top + bottom) / 2}">nothing measured yet</text>')
        return "".join(parts)
    steps, values = _range([p.step for p in points]), _range([p.value for p in points])

    def across(step: float) -> float:
        return _LEFT + (step - steps[0]) / (steps[1] - steps[0]) * (WIDTH - _LEFT - _RIGHT)

    def up(value: float) -> float:
        return bottom - (value - values[0]) / (values[1] - values[0]) * (bottom - top)

    for value in ticks(*values):
        y = f"{up(value):.1f}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y}" dy="4" text-anchor="end">{value:g}</text>')
    for step in ticks(*steps):
        parts.append(
            f'<text x="{across(step):.1f}" y="{bottom + 18}" text-anchor="middle">{step:g}</text>'
        )
    path = " ".join(f"{across(p.step):.1f},{up(p.value):.1f}" for p in points)
    parts.append(f'<polyline class="curve" stroke="{colour}" points="{path}"/>')
    last = points[-1]
    parts.append(f'<circle cx="{across(last.step):.1f}" cy="{up(last.value):.1f}" r="3" ')
    parts.append(f'fill="{colour}"><title>{last.value:.3f}</title></circle>')
    return "".join(parts)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and highest value, apart by something that can be divided by."""
    low, high = min(values), max(values)
    if high - low > 1e-9 * max(1.0, abs(high)):
        return low, high
    margin = max(abs(high) * 0.1, 0.5)
    return low - margin, high + margin
