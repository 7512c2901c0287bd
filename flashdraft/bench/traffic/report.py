"""The results of offered loads: the document, its table for the terminal, and its picture.

The document is plain JSON (`FORMAT`); table and picture are made from it alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flashdraft.bench.report.table import UNKNOWN, aligned, partial_notice, wrapped
from flashdraft.svg import Axes, Series, line_panel, picture, tone

FORMAT = "flashdraft-load/1"
HEADINGS = (
    "load",
    "requests/s",
    "tok/s",
    "TTFT p50/p95/p99 ms",
    "gap p50/p95/p99 ms",
    "latency p50/p95/p99 s",
    "goodput",
    "answered",
    "failed",
)
NOTES = (
    "TTFT: from when a request was due to its first piece. gap: between two pieces of an answer.",
    "latency: to the last piece. goodput: requests within the limits, and a second.",
)
Document = Mapping[str, Any]
Row = Mapping[str, Any]


def make_document(
    rows: Sequence[Row],
    problems: Sequence[str],
    is_partial: bool,
    settings: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that was found, in the documented form."""
    return {
        "format": FORMAT,
        "is_partial": is_partial,
        "problems": list(problems),
        "environment": dict(environment),
        "settings": dict(settings),
        "rows": list(rows),
    }


def render_loads(document: Document) -> str:
    """The document as the terminal's table."""
    text = [*partial_notice(document), *wrapped([_describe(document)]), ""]
    text += aligned([HEADINGS, *map(_cells, document["rows"])])
    text += ["", *NOTES]
    for row in document["rows"]:
        text += [f"{row['load']}: {count} × {error}" for error, count in row["errors"].items()]
    if document["problems"]:
        text += ["", "Problems:", *wrapped(f"- {one}" for one in document["problems"])]
    return "\n".join(text) + "\n"


def _describe(document: Document) -> str:
    settings, environment = document["settings"], document["environment"]
    lengths = [
        f"prompts of {settings['prompt_tokens']} tokens"
        if settings["prompt_tokens"] is not None
        else f"prompts of {', '.join(settings['tasks'])}",
        f"answers of {settings['output_tokens']} tokens"
        if settings["output_tokens"] is not None
        else f"at most {settings['max_tokens']} tokens",
    ]
    parts = [
        f"{settings['model']} on {environment['server']} at {settings['url']}",
        "greedy" if settings["sampling"] == "greedy" else f"{settings['sampling']} sampling",
        *lengths,
        f"{settings['warm_up_requests']} requests to warm up",
    ]
    return ", ".join(parts) + "."


def _cells(row: Row) -> list[str]:
    goodput = UNKNOWN
    if row["goodput_share"] is not None:
        goodput = f"{100 * row['goodput_share']:.0f} %, {row['goodput_per_s']:.2f}/s"
    return [
        row["load"],
        f"{row['requests_per_s']:.2f}",
        f"{row['tokens_per_s']:.0f}"
        if row["tokens_per_s"] >= 100
        else f"{row['tokens_per_s']:.1f}",
        _three(row, "ttft", 1e3),
        _three(row, "gap", 1e3),
        _three(row, "latency", 1.0),
        goodput,
        str(row["num_answered"]),
        str(row["num_failed"]),
    ]


def _three(row: Row, name: str, factor: float) -> str:
    values = [row[f"{name}_p{percent}_s"] for percent in (50, 95, 99)]
    digits = 0 if factor > 1 else 2
    return "/".join(UNKNOWN if v is None else f"{v * factor:.{digits}f}" for v in values)


# -- the picture -----------------------------------------------------------------------------------


def draw_loads(document: Document) -> str:
    """First tokens and gaps over time and by percentile, as one SVG file."""
    rows = document["rows"]
    keys = [Series(row["load"], tone(place), ()) for place, row in enumerate(rows)]
    panels = [
        _over_time("First token over time, p95", rows, "ttft_p95_s"),
        _over_time("Gap over time, p95", rows, "gap_p95_s"),
        _by_percent("First token by percentile", rows, "ttft_s"),
        _by_percent("Gap by percentile", rows, "gap_s"),
    ]
    settings = document["settings"]
    title = f"{settings['model']} at {settings['url']}"
    caption = "First token: from when a request was due. Gap: between two pieces of an answer."
    return picture(title, caption, keys, True, panels)


def draw_page(document: Document) -> str:
    """The picture in a page of its own."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<title>flashdraft bench</title>\n<style>body{margin:0}svg{max-width:100%;height:auto}"
        f"</style>\n</head>\n<body>\n{draw_loads(document)}</body>\n</html>\n"
    )


def _over_time(title: str, rows: Sequence[Row], key: str) -> str:
    """One line a load; loads of different lengths share the longest one's axis."""
    longest = max(rows, key=lambda row: row["window_s"], default=None)
    begins = [] if longest is None else [one["begin_s"] for one in longest["timeline"]]
    series = []
    for place, row in enumerate(rows):
        values: list[float | None] = [None] * len(begins)
        for one in row["timeline"]:
            # where two fall on one place the higher one counts
            bin_ = max(n for n, begin in enumerate(begins) if begin <= one["begin_s"] + 1e-9)
            found = [v for v in (values[bin_], _milliseconds(one[key])) if v is not None]
            values[bin_] = max(found, default=None)
        series.append(Series(row["load"], tone(place), values))
    names = [f"{begin:.0f}" if begins[-1] >= 20 else f"{begin:.1f}" for begin in begins]
    return line_panel(title, names, series, Axes("seconds", "ms"))


def _by_percent(title: str, rows: Sequence[Row], key: str) -> str:
    percents = rows[0]["curves"]["percent"] if rows else []
    series = [
        Series(row["load"], tone(place), [_milliseconds(v) for v in row["curves"][key]])
        for place, row in enumerate(rows)
    ]
    return line_panel(title, [f"p{one}" for one in percents], series, Axes("percentile", "ms"))


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None or not math.isfinite(seconds) else 1e3 * seconds
