"""A bench results document as the published table: task by concurrency, plain beside drafted.

Owns which figures stand beside each other and how they are worded; the terminal's table, the report
and the README show the same cells. Knows nothing of how the figures were measured.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flashdraft.bench.results import DRAFT, PLAIN
from flashdraft.bench.tasks import count_of

Document = Mapping[str, Any]
Row = Mapping[str, Any]

TASK_TITLES = {
    "gsm8k": "GSM8K",
    "math500": "MATH-500",
    "humaneval": "HumanEval",
    "mbpp": "MBPP",
    "mt_bench": "MT-Bench",
}
UNKNOWN = "–"
HEADINGS = (
    "task",
    "c",
    "plain tok/s",
    "drafted tok/s",
    "speedup",
    "accepted length",
    "identical texts",
)
TABLE_NOTES = (
    "c: requests in flight. tok/s: output tokens over wall time, prefill included.",
    "accepted length: tokens committed per decode step, mean over requests (pooled: over steps).",
)
TREES_NOTE = "off the chain: of the accepted draft tokens, those on branches of trees."
TEXT_WIDTH = 100
HTTP = "http"  # the engine of a run against a server


class Line(NamedTuple):
    """One line of the table: a task at one concurrency; None where it was not measured."""

    task: str
    concurrency: int
    plain: Row | None
    drafted: Row | None
    speedup: float | None
    same: int | None
    total: int | None


def task_title(task: str) -> str:
    """The task's name as it is published."""
    return TASK_TITLES.get(task, task)


def table_lines(document: Document) -> list[Line]:
    """The document's rows in pairs, tasks in the order of the run, concurrency rising."""
    pairs: dict[tuple[str, int], dict[str, Row]] = {}
    for row in document["rows"]:
        pairs.setdefault((row["task"], row["concurrency"]), {})[row["mode"]] = row
    order = {task: place for place, task in enumerate(dict.fromkeys(task for task, _ in pairs))}
    lines = []
    for task, concurrency in sorted(pairs, key=lambda key: (order[key[0]], key[1])):
        pair = pairs[task, concurrency]
        found = document["identical"].get(task, {}).get(str(concurrency)) or {}
        line = Line(
            task,
            concurrency,
            pair.get(PLAIN),
            pair.get(DRAFT),
            document["speedup"].get(task, {}).get(str(concurrency)),
            found.get("same"),
            found.get("total"),
        )
        lines.append(line)
    return lines


def ordered_rows(document: Document) -> list[Row]:
    """Every row in the order of the lines, plain before drafted; a run measures them in turns."""
    pairs = ((line.plain, line.drafted) for line in table_lines(document))
    return [row for pair in pairs for row in pair if row is not None]


class Column(NamedTuple):
    """A column that only some documents have."""

    heading: str
    cell: Callable[[Line], str]


def more_columns(document: Document) -> list[Column]:
    """Those of a document with trees, and of one whose answers were checked for being right."""
    columns = []
    if any(row.get("trees") for row in document["rows"]):
        columns.append(Column("off the chain", lambda line: _off_the_chain(line.drafted)))
    if any(row["accuracy"] for row in document["rows"]):
        columns.append(Column("plain right", lambda line: _accuracy(line.plain)))
        columns.append(Column("drafted right", lambda line: _accuracy(line.drafted)))
    return columns


def line_cells(line: Line, more: Sequence[Column]) -> list[str]:
    """A line in words, one cell for each heading."""
    cells = [
        task_title(line.task),
        str(line.concurrency),
        speed(line.plain),
        speed(line.drafted),
        UNKNOWN if line.speedup is None else f"{line.speedup:.2f}×",
        accepted_length(line.drafted),
        UNKNOWN if line.total is None else f"{line.same} of {line.total}",
    ]
    return cells + [column.cell(line) for column in more]


def table_headings(more: Sequence[Column]) -> list[str]:
    """What stands over the cells."""
    return [*HEADINGS, *(column.heading for column in more)]


def table_notes(document: Document) -> list[str]:
    """What has to be known to read the columns."""
    has_trees = any(row.get("trees") for row in document["rows"])
    return [*TABLE_NOTES, *[TREES_NOTE] * has_trees]


def mean_speedups(lines: Sequence[Line]) -> dict[int, float]:
    """The geometric mean of the tasks' speedups at each concurrency that every task has."""
    tasks = {line.task for line in lines}
    means = {}
    for concurrency in sorted({line.concurrency for line in lines}):
        here = [line.speedup for line in lines if line.concurrency == concurrency and line.speedup]
        if len(here) == len(tasks) > 1:
            means[concurrency] = math.exp(sum(map(math.log, here)) / len(here))
    return means


def render_table(document: Document) -> str:
    """The document as the terminal's table, with what has to be known to read it."""
    lines = table_lines(document)
    more = more_columns(document)
    cells = [line_cells(line, more) for line in lines]
    blank = [""] * (len(table_headings(more)) - 5)
    for concurrency, mean in mean_speedups(lines).items():
        cells.append(["geometric mean", str(concurrency), "", "", f"{mean:.2f}×", *blank])
    named = [cell[0] for cell in cells]
    for above, line in zip(named, cells[1:], strict=False):
        line[0] = "" if line[0] == above else line[0]  # a task is named once
    text = [*partial_notice(document), *wrapped([describe_run(document)]), ""]
    text += aligned([table_headings(more), *cells]) if cells else ["Nothing was measured."]
    return "\n".join([*text, "", *table_notes(document), *wrapped(_problems(document))]) + "\n"


def describe_run(document: Document) -> str:
    """Model, drafter, machine and settings in one sentence."""
    settings, environment = document["settings"], document["environment"]
    where = environment.get("device") or environment.get("platform") or "unknown device"
    if settings["engine"] == HTTP:
        where = f"{environment.get('server') or 'server'} at {settings['url']}, asked from {where}"
    numbers, drawn = precision(document), settings["prompts_per_task"]
    parts = [
        f"{settings['model']}, drafter: {settings['draft'] or 'none'}, {where}",
        *([numbers] if numbers else []),
        _sampling(settings),
        f"thinking {'on' if settings['thinking'] else 'off'}",
        f"{count_of(drawn, 'prompt') if drawn else 'all prompts'} a task",
        f"at most {settings['max_tokens']} tokens",
        f"{count_of(settings['warm_up_prompts'], 'prompt')} to warm up",
    ]
    return ", ".join(parts) + "."


def precision(document: Document) -> str | None:
    """The numbers that the target was computed in, where they are known."""
    environment = document["environment"]
    if "int8" in (environment.get("kernels") or ""):
        return "int8"  # such kernels take and give float32
    return environment.get("dtype")


def partial_notice(document: Document) -> list[str]:
    """The line that marks a run which did not measure all it was asked to."""
    return ["PARTIAL: not everything was measured; see the problems."] * document["is_partial"]


def aligned(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of cells under each other: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        first = cells[0].ljust(widths[0])
        rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        yield "  ".join([first, *rest]).rstrip()


def wrapped(lines: Iterable[str]) -> Iterator[str]:
    """Sentences in lines that a terminal holds."""
    for line in lines:
        yield from textwrap.wrap(line, TEXT_WIDTH, break_on_hyphens=False) or [""]


def speed(row: Row | None) -> str:
    """Tokens per second, to a tenth where they are few."""
    if row is None or row["tokens_per_s"] is None:
        return UNKNOWN
    value = row["tokens_per_s"]
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def accepted_length(row: Row | None) -> str:
    """The mean over requests; else the pooled one, named as such."""
    if row is not None and row["mean_accepted_length"] is not None:
        return f"{row['mean_accepted_length']:.2f}"
    if row is not None and row["mean_accepted_length_pooled"] is not None:
        return f"{row['mean_accepted_length_pooled']:.2f} pooled"
    return UNKNOWN


def _off_the_chain(row: Row | None) -> str:
    found = None if row is None else row.get("trees")
    if not found or not found["accepted"]:
        return UNKNOWN
    return f"{found['branches_accepted'] / found['accepted']:.0%}"


def _accuracy(row: Row | None) -> str:
    found = None if row is None else row["accuracy"]
    return UNKNOWN if not found else f"{found['correct']} of {found['total']}"


def _sampling(settings: Mapping[str, Any]) -> str:
    if settings["sampling"] == "greedy":
        return "greedy"
    names = {"temperature": "temperature", "top_p": "top-p", "top_k": "top-k"}
    chosen = [f"{text} {settings[key]:g}" for key, text in names.items() if settings.get(key)]
    return ", ".join([f"{settings['sampling']} sampling", *chosen])


def _problems(document: Document) -> list[str]:
    problems = document["problems"]
    return ["", "Problems:", *(f"- {problem}" for problem in problems)] if problems else []
