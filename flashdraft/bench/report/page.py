"""A bench run as one self-contained page, report.html, with its plots beside it as SVG files.

Owns the page's words and looks; the cells are table.py's and the plots plots.py's. The page loads
nothing from anywhere, has no script, and follows the reader's dark or light setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from flashdraft.bench.report.plots import Plot, make_plots
from flashdraft.bench.report.table import (
    UNKNOWN,
    Document,
    Line,
    Row,
    describe_run,
    line_cells,
    mean_speedups,
    more_columns,
    ordered_rows,
    partial_notice,
    table_headings,
    table_lines,
    table_notes,
    task_title,
)
from flashdraft.bench.results import DRAFT
from flashdraft.errors import RequestError
from flashdraft.files import write_whole
from flashdraft.svg import STYLE, inline_panel, key_mark

REPORT_NAME = "report.html"
BUCKETS = {
    "queue_s": "queue",
    "prefill_s": "prefill",
    "drafter_prefill_s": "drafter's prefill",
    "decode_s": "decoding",
}
_PAGE_STYLE = """
:root{color-scheme:light dark;--paper:#fcfcfa;--sheet:#fff;--ink:#17191d;--soft:#5d626c;
--line:#e1e2e5;--warn:#fff3d6;--accent:#0b62b8}
@media (prefers-color-scheme:dark){:root{--paper:#131417;--sheet:#16181c;--ink:#e6e7ea;
--soft:#a0a5af;--line:#343840;--warn:#3a2f12;--accent:#6cb2f5}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,sans-serif;
-webkit-text-size-adjust:100%;overflow-wrap:anywhere}
main{max-width:1180px;margin:0 auto;padding:1.5rem clamp(1rem,4vw,2rem) 4rem}
h1{font-size:clamp(1.5rem,5vw,2rem);line-height:1.2;margin:.5rem 0}
h2{font-size:1.2rem;margin:2.5rem 0 .25rem}
p{margin:.25rem 0 .75rem}.soft{color:var(--soft)}
.lead{font-size:1.1rem}
.notice{background:var(--warn);border-radius:8px;padding:.75rem 1rem}
.notice ul{margin:.25rem 0;padding-left:1.2rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}
th,td{padding:.25rem .75rem;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:0}
thead th{color:var(--soft);font-weight:500;white-space:normal;vertical-align:bottom;
min-width:4.5em;overflow-wrap:normal}
thead th:nth-child(2){min-width:0}
tr.first>*,.facts tr>*{border-top:1px solid var(--line)}
td.strong{font-weight:600;color:var(--accent)}
.facts td{text-align:left;white-space:normal}
.facts th{text-align:left;font-weight:500;color:var(--soft);vertical-align:top}
.pair{display:grid;gap:0 3rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr))}
.panels{display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,320px),1fr))}
.panels svg{display:block;width:100%;height:auto;background:var(--sheet);
border:1px solid var(--line);border-radius:8px;padding:8px}
.legend{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;font-size:.9rem}
.legend svg{width:24px;height:12px;margin-right:.4rem}
@media (max-width:600px){table{font-size:.8rem}th,td{padding:.25rem .35rem}thead th{min-width:0}}
"""


def write_report(document: Document, folder: Path) -> Path:
    """Write report.html and its plots into a folder, made if need be; the page's path."""
    plots = make_plots(document)
    path = folder / REPORT_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for plot in plots:
            write_whole(folder / f"{plot.name}.svg", plot.to_svg())
        write_whole(path, render_report(document, plots))
    except OSError as error:
        reason = error.strerror or error
        raise RequestError(
            f"The report cannot be written to {folder}: {reason}. Name another folder."
        ) from None
    return path


def render_report(document: Document, plots: Sequence[Plot]) -> str:
    """The whole page."""
    title = f"flashdraft bench: {document['settings']['model']}"
    lines = table_lines(document)
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(summarize(lines))}</p>',
        f'<p class="soft">{escape(describe_run(document))}</p>',
        _notice(document),
        _results(document, lines),
        *map(_figure, plots),
        _waiting(ordered_rows(document)),
        _buckets(ordered_rows(document)),
        '<div class="pair">',
        _facts("Settings", document["settings"]),
        _facts("Environment", document["environment"]),
        "</div>",
        _facts("Prompts (SHA-256 of the messages sent)", document["prompts_sha256"]),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{_PAGE_STYLE}{STYLE}</style>\n</head>\n"
        "<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def summarize(lines: Sequence[Line]) -> str:
    """The run in one sentence."""
    parts = []
    speedups = [line.speedup for line in lines if line.speedup is not None]
    if speedups:
        means = ", ".join(
            f"{mean:.2f}× with {level} in flight" for level, mean in mean_speedups(lines).items()
        )
        ranged = _between(speedups, "×")
        means = means and f" (geometric mean of the tasks: {means})"
        parts.append(f"drafted decoding is {ranged} as fast as plain{means}")
    drafted = [line.drafted["mean_accepted_length"] for line in lines if line.drafted]
    lengths = [length for length in drafted if length is not None]
    if lengths:
        parts.append(f"the accepted length is {_between(lengths, '')}")
    total = sum(line.total or 0 for line in lines)
    if total:
        same = sum(line.same or 0 for line in lines)
        parts.append(f"{same} of {total} texts are identical")
    if not parts:
        return "Plain and drafted decoding cannot be compared in this run."
    sentence = ", ".join(parts)
    return sentence[0].upper() + sentence[1:] + "."


def _between(values: Sequence[float], unit: str) -> str:
    low, high = f"{min(values):.2f}{unit}", f"{max(values):.2f}{unit}"
    return low if low == high else f"{low} to {high}"


def _notice(document: Document) -> str:
    problems = "".join(f"<li>{escape(str(problem))}</li>" for problem in document["problems"])
    notice = "".join(f"<strong>{escape(line)}</strong>" for line in partial_notice(document))
    if not notice and not problems:
        return ""
    listed = f"<ul>{problems}</ul>" if problems else ""
    return f'<div class="notice" role="note">{notice or "Problems"}{listed}</div>'


def _results(document: Document, lines: Sequence[Line]) -> str:
    if not lines:
        return "<p>Nothing was measured.</p>"
    more = more_columns(document)
    rows = [line_cells(line, more) for line in lines]
    notes = "".join(f'<p class="soft">{escape(note)}</p>' for note in table_notes(document))
    return "<h2>Results</h2>" + _table(table_headings(more), rows, strong=4) + notes


def _waiting(rows: Iterable[Row]) -> str:
    headings = ["task", "c", "mode", "first token, median", "first token, p95"]
    headings += ["between tokens, median", "between tokens, p95", "prompts", "prompt tokens"]
    headings += ["output tokens", "accepted length, pooled"]
    cells = []
    for row in rows:
        pooled = row["mean_accepted_length_pooled"]
        cells.append(
            [
                *_row_name(row),
                *(_time(row[key]) for key in ("ttft_p50_s", "ttft_p95_s")),
                *(_time(row[key]) for key in ("itl_p50_s", "itl_p95_s")),
                *(_shown(row[key]) for key in ("num_prompts", "prompt_tokens", "output_tokens")),
                UNKNOWN if pooled is None else f"{pooled:.2f}",
            ]
        )
    return "<h2>Waiting times and counts</h2>" + _table(headings, cells) if cells else ""


def _buckets(rows: Iterable[Row]) -> str:
    """Where the requests' time went; left out where an endpoint does not tell."""
    cells = []
    for row in rows:
        seconds = [(row["buckets"] or {}).get(key) for key in BUCKETS]
        total = sum(value or 0.0 for value in seconds)
        if total > 0:
            shares = [UNKNOWN if value is None else f"{value / total:.1%}" for value in seconds]
            cells.append([*_row_name(row), *shares, f"{total:.1f} s"])
    if not cells:
        return ""
    note = "From arrival to the last token, over all requests; every millisecond in one column."
    headings = ["task", "c", "mode", *BUCKETS.values(), "in all"]
    return (
        f'<h2>Where the time went</h2><p class="soft">{escape(note)}</p>{_table(headings, cells)}'
    )


def _row_name(row: Row) -> list[str]:
    mode = "drafted" if row["mode"] == DRAFT else "plain"
    return [task_title(row["task"]), str(row["concurrency"]), mode]


def _figure(plot: Plot) -> str:
    keys = "".join(
        f'<span><svg viewBox="0 0 24 12" aria-hidden="true">'
        f"{key_mark(key, place, plot.has_lines)}</svg>{escape(key.name)}</span>"
        for place, key in enumerate(plot.keys)
    )
    panels = "".join(
        inline_panel(panel.drawing, f"{plot.title}, {panel.title}") for panel in plot.panels
    )
    return (
        f'<section class="chart"><h2>{escape(plot.title)}</h2>'
        f'<p class="soft">{escape(plot.caption)}</p><p class="legend">{keys}</p>'
        f'<div class="panels">{panels}</div></section>'
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], strong: int = -1) -> str:
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    lines, last = [], ""
    for row in rows:
        starts = row[0] != last  # a task is named once
        cells = [escape(row[0]) if starts else "", *map(escape, row[1:])]
        marked = (f"<td{' class=strong' * (n == strong)}>{c}</td>" for n, c in enumerate(cells))
        lines.append(f"<tr{' class=first' * starts}>{''.join(marked)}</tr>")
        last = row[0]
    return (
        '<div class="scroll" role="region" aria-label="table" tabindex="0">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _facts(title: str, facts: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(str(name).replace("_", " "))}</th>'
        f"<td>{escape(_shown(value))}</td></tr>"
        for name, value in facts.items()
    )
    if not rows:
        return ""
    table = f'<table class="facts"><tbody>{rows}</tbody></table>'
    return f"<section><h2>{escape(title)}</h2>{table}</section>"


def _shown(value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_shown(item)}" for name, item in value.items())
    return str(value)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
