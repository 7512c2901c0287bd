"""Charts as SVG text: panels of grouped bars or lines, and pictures made of several panels.

Owns scales, axes, colours and escaping; knows nothing of what the figures mean. A panel is a
fragment of fixed size, narrow enough for a phone. A picture is a file of its own with its style; a
page that takes panels inline puts STYLE in its head, under an element of class "chart".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

PANEL_WIDTH, PANEL_HEIGHT = 360, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 10, 38, 42
_COLUMNS, _MARGIN, _LETTER = 2, 16, 6.6  # panels beside each other; width of a 12 px letter
_DASHES = ("none", "6 3", "2 3", "8 3 2 3", "4 2", "1 3")

# Grey for the baseline, blue for what is compared with it; then Okabe and Ito's colours, told apart
# by eyes that confuse red and green. The dark set is the same hues, lighter.
_LIGHT = {"plain": "#8b9099", "drafted": "#0b62b8"}
_DARK = {"plain": "#868d98", "drafted": "#6cb2f5"}
_LIGHT_TONES = ("#0072b2", "#d55e00", "#009e73", "#b8578d", "#b07a00", "#3a9bd6")
_DARK_TONES = ("#56b4e9", "#f08a3c", "#2fc195", "#e397c1", "#e6c229", "#a9b4c4")


def _style() -> str:
    def colours(named: dict[str, str], tones: Sequence[str]) -> str:
        every = {**named, **{f"tone{place}": colour for place, colour in enumerate(tones)}}
        return "".join(f".chart .{name}{{color:{colour}}}" for name, colour in every.items())

    def inks(ink: str, soft: str, grid: str, paper: str) -> str:
        return (
            f".chart text{{fill:{ink}}}.chart .soft{{fill:{soft}}}"
            f".chart .grid{{stroke:{grid}}}.chart .paper{{fill:{paper}}}"
        )

    return (
        ".chart text{font:12px system-ui,sans-serif}.chart .title{font-weight:600;font-size:13px}"
        ".chart .headline{font-weight:600;font-size:16px}.chart .small{font-size:11px}"
        ".chart .bar{fill:currentColor}.chart .mark{stroke:currentColor;stroke-width:1.8;fill:none}"
        + inks("#1d2026", "#5d626c", "#e1e2e5", "#ffffff")
        + colours(_LIGHT, _LIGHT_TONES)
        + "@media (prefers-color-scheme:dark){"
        + inks("#e6e7ea", "#a0a5af", "#343840", "#16181c")
        + colours(_DARK, _DARK_TONES)
        + "}"
    )


STYLE = _style()


class Series(NamedTuple):
    """Values of one colour, one for each category; None leaves a gap."""

    name: str
    tone: str
    values: Sequence[float | None]
    labels: Sequence[str] = ()  # over the bars
    whiskers: Sequence[float | None] = ()  # a thin line from the bar's top to here


class Axes(NamedTuple):
    """What a panel's two directions mean; `top` is where the upward one ends at least."""

    across: str
    unit: str
    top: float = 0.0


def tone(place: int) -> str:
    """The class of the n-th colour."""
    return f"tone{place % len(_LIGHT_TONES)}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between two values, about `count` of them."""
    rough = (high - low) / count
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(m * scale for m in (1, 2, 5, 10) if m * scale >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def bar_panel(title: str, categories: Sequence[str], series: Sequence[Series], axes: Axes) -> str:
    """Bars from zero, side by side in each category."""
    frame = _Frame(title, categories, series, axes)
    width = frame.step * 0.8 / max(1, len(series))
    for place, one in enumerate(series):
        parts = []
        for category, value in enumerate(one.values):
            if value is None:
                continue
            x, y = frame.x(category) - frame.step * 0.4 + place * width, frame.y(value)
            tip = escape(f"{one.name}, {categories[category]}: {value:.4g} {axes.unit}")
            parts.append(
                f'<rect class="bar" x="{x + width * 0.04:.1f}" y="{y:.1f}" '
                f'width="{width * 0.92:.1f}" height="{frame.bottom - y:.1f}">'
                f"<title>{tip}</title></rect>"
            )
            top = one.whiskers[category] if one.whiskers else None
            if top is not None:
                y = frame.y(top)
                parts.append(_whisker(x + width / 2, width * 0.25, frame.y(value), y))
            label = one.labels[category] if one.labels else ""
            if label and len(label) * _LETTER <= width + 8:
                parts.append(_text(x + width / 2, y - 5, label, "small", "middle"))
        frame.parts.append(f'<g class="{one.tone}">{"".join(parts)}</g>')
    return frame.drawn()


def line_panel(title: str, categories: Sequence[str], series: Sequence[Series], axes: Axes) -> str:
    """Lines with a mark at every value, told apart by colour and dashes."""
    frame = _Frame(title, categories, series, axes)
    for place, one in enumerate(series):
        points = [(frame.x(i), frame.y(v)) for i, v in enumerate(one.values) if v is not None]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        marks = "".join(
            f'<circle class="bar" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in points
        )
        frame.parts.append(
            f'<g class="{one.tone}"><polyline class="mark" stroke-dasharray="{_dashes(place)}" '
            f'points="{line}"><title>{escape(one.name)}</title></polyline>{marks}</g>'
        )
    return frame.drawn()


def inline_panel(panel: str, label: str) -> str:
    """One panel as an element of a page."""
    return (
        f'<svg viewBox="0 0 {PANEL_WIDTH} {PANEL_HEIGHT}" role="img" '
        f"aria-label={quoteattr(label)}>{panel}</svg>"
    )


def key_mark(series: Series, place: int, as_line: bool) -> str:
    """What stands before a colour's name, 24 by 12."""
    shape = '<rect class="bar" x="6" width="12" height="12"/>'
    if as_line:
        shape = f'<path class="mark" stroke-dasharray="{_dashes(place)}" d="M0 6h24"/>'
    return f'<g class="{series.tone}">{shape}</g>'


def picture(
    title: str, caption: str, keys: Sequence[Series], as_lines: bool, panels: Sequence[str]
) -> str:
    """Several panels in one file, with title, caption and the colours' names."""
    columns = min(_COLUMNS, max(1, len(panels)))
    width = max(2 * _MARGIN + columns * PANEL_WIDTH, round(len(caption) * _LETTER) + 2 * _MARGIN)
    head = 84
    parts = [_text(_MARGIN, 28, title, "headline"), _text(_MARGIN, 48, caption, "soft")]
    x = float(_MARGIN)
    for place, key in enumerate(keys):
        mark = key_mark(key, place, as_lines)
        parts.append(f'<g transform="translate({x:.0f},61)">{mark}</g>')
        parts.append(_text(x + 30, 71, key.name))
        x += 30 + len(key.name) * _LETTER + 20
    for place, panel in enumerate(panels):
        row, column = divmod(place, columns)
        at = f"translate({_MARGIN + column * PANEL_WIDTH},{head + row * PANEL_HEIGHT})"
        parts.append(f'<g transform="{at}">{panel}</g>')
    height = head + math.ceil(len(panels) / columns) * PANEL_HEIGHT + _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label={quoteattr(title)}>'
        f'<style>{STYLE}</style><rect class="paper" width="100%" height="100%"/>'
        f"{''.join(parts)}</svg>\n"
    )


class _Frame:
    """A panel's scales, its grid and the names on its axes."""

    def __init__(
        self, title: str, categories: Sequence[str], series: Sequence[Series], axes: Axes
    ) -> None:
        found = [v for one in series for v in (*one.values, *one.whiskers) if v is not None]
        self.bottom = PANEL_HEIGHT - _BOTTOM
        self.step = (PANEL_WIDTH - _LEFT - _RIGHT) / max(1, len(categories))
        marks = ticks(0.0, max([axes.top, *found]) or 1.0)
        if max([axes.top, *found]) > marks[-1]:
            marks.append(2 * marks[-1] - marks[-2])  # the grid ends above the highest value
        self._top = marks[-1]
        right, middle = PANEL_WIDTH - _RIGHT, (PANEL_WIDTH + _LEFT - _RIGHT) / 2
        self.parts = [
            _text(_LEFT, 16, title, "title"),
            _text(right, 16, axes.unit, "soft small", "end"),
            _text(middle, PANEL_HEIGHT - 6, axes.across, "soft small", "middle"),
        ]
        for value in marks:
            y = self.y(value)
            line = f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            self.parts += [line, _text(_LEFT - 6, y + 4, f"{value:g}", "soft small", "end")]
        every = math.ceil(max(map(len, categories), default=1) * (_LETTER + 1) / self.step)
        for place in range(0, len(categories), every):
            name = categories[place]
            self.parts.append(_text(self.x(place), self.bottom + 16, name, "small", "middle"))
        if not found:
            self.parts.append(_text(middle, self.bottom / 2, "not measured", "soft", "middle"))

    def x(self, category: int) -> float:
        """The middle of a category."""
        return _LEFT + (category + 0.5) * self.step

    def y(self, value: float) -> float:
        """The height of a value; zero is the bottom."""
        return self.bottom - value / self._top * (self.bottom - _TOP)

    def drawn(self) -> str:
        """The whole panel."""
        return "".join(self.parts)


def _dashes(place: int) -> str:
    return _DASHES[place % len(_DASHES)]


def _whisker(x: float, half: float, low: float, high: float) -> str:
    path = f"M{x:.1f} {low:.1f}V{high:.1f}M{x - half:.1f} {high:.1f}h{2 * half:.1f}"
    return f'<path class="mark" d="{path}"/>'


def _text(x: float, y: float, text: str, classes: str = "", anchor: str = "start") -> str:
    return (
        f'<text class="{classes}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
