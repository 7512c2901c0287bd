"""Tables of results, from committed files: traffic in the README, `flashdraft bench` in docs.

    python -m benchmarks.readme_tables           # write them
    python -m benchmarks.readme_tables --check   # 1 and a diff where one of them is out of date

Every benchmarks/results/bench_*.json becomes one table between two markers of docs/results.md, in
the order of their names, and h200_traffic.json one of the README; everything outside the markers is
left alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.marked import Section, run
from benchmarks.traffic.headline import headline
from flashdraft.bench.report.reading import read_document
from flashdraft.bench.report.table import (
    UNKNOWN,
    Line,
    accepted_length,
    describe_run,
    mean_speedups,
    partial_notice,
    precision,
    speed,
    table_lines,
    task_title,
)

ROOT = Path(__file__).parents[1]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
RESULTS = ROOT / "benchmarks" / "results"
PATTERN = "bench_*.json"
BEGIN = "<!-- bench results: written by python -m benchmarks.readme_tables -->"
END = "<!-- end of bench results -->"
TRAFFIC_BEGIN = "<!-- traffic results: written by python -m benchmarks.readme_tables -->"
TRAFFIC_END = "<!-- end of traffic results -->"
NOTHING = "\nNo results are committed yet.\n\n"
TRAFFIC, TRAFFIC_VLLM = "h200_traffic.json", "h200_traffic_vllm.json"
COLUMNS_NOTE = (
    "Tokens per second, plain → drafted, and the speedup, by requests in flight; accepted length is"
    " tokens per decode step, mean over requests, in the same order."
)

ROUNDED = ("bfloat16", "float16")
ROUNDING_NOTE = (
    "In 16 bits texts part where two tokens are within rounding of each other; `exact=True` keeps"
    " them equal."
)


def page_section(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """What belongs between the markers: a table for each results file by its name."""
    if not documents:
        return NOTHING
    parts = [COLUMNS_NOTE, ""]
    for name, document in documents.items():
        parts += [*_table(document), "", *_source(name, document), ""]
    return "\n".join(["", *parts, ""])


def read_documents(folder: Path) -> dict[str, Mapping[str, Any]]:
    """The committed results by file name; there may be none."""
    return {path.name: read_document(path) for path in sorted(folder.glob(PATTERN))}


def traffic_section(folder: Path) -> str:
    """What belongs between the other markers."""
    if not (folder / TRAFFIC).exists():
        return NOTHING
    ours, vllm = (json.loads((folder / name).read_text()) for name in (TRAFFIC, TRAFFIC_VLLM))
    return "\n".join(["", *headline(ours, vllm), "", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables, or say whether they are up to date."""
    return run(
        _sections,
        "python -m benchmarks.readme_tables",
        "Tables of results in the README and in docs.",
        arguments,
    )


def _sections() -> Iterator[Section]:
    yield Section(README, traffic_section(RESULTS), TRAFFIC_BEGIN, TRAFFIC_END)
    yield Section(PAGE, page_section(read_documents(RESULTS)), BEGIN, END)


def _table(document: Mapping[str, Any]) -> Iterator[str]:
    lines = table_lines(document)
    levels = sorted({line.concurrency for line in lines})
    heads = [f"{level} in flight" for level in levels]
    yield _row(["task", *heads, "accepted length", "identical texts"])
    yield _row(["---"] * (len(levels) + 3))
    for task in dict.fromkeys(line.task for line in lines):
        here = {line.concurrency: line for line in lines if line.task == task}
        speeds = [_speeds(here.get(level)) for level in levels]
        lengths = ", ".join(_length(here.get(level)) for level in levels)
        yield _row([task_title(task), *speeds, lengths, _identical(here.values())])
    means = mean_speedups(lines)
    if means:
        ratios = [f"{means[level]:.2f}×" if level in means else "" for level in levels]
        yield _row(["geometric mean", *ratios, "", ""])


def _speeds(line: Line | None) -> str:
    if line is None:
        return UNKNOWN
    ratio = "" if line.speedup is None else f" ({line.speedup:.2f}×)"
    return f"{speed(line.plain)} → {speed(line.drafted)}{ratio}"


def _length(line: Line | None) -> str:
    return UNKNOWN if line is None else accepted_length(line.drafted)


def _identical(lines: Iterable[Line]) -> str:
    known = [(line.same or 0, line.total) for line in lines if line.total]
    if not known:
        return UNKNOWN
    return f"{sum(same for same, _ in known)} of {sum(total or 0 for _, total in known)}"


def _source(name: str, document: Mapping[str, Any]) -> Iterator[str]:
    partial = "".join(f"**{notice}** " for notice in partial_notice(document))
    date = str(document["environment"].get("date") or "")[:10]
    dated = f" {date}," if date else ""
    walls = [row["wall_s"] for row in document["rows"]]
    repeats = document["settings"]["repeats"]
    times = f" Rows of {min(walls):.2g} to {max(walls):.2g} s" if walls else ""
    times += f", {'once' if repeats == 1 else f'{repeats} times'} each." if walls else ""
    file = f"[file](../benchmarks/results/{name})"
    yield f"{partial}{_cell(describe_run(document))}{times}{dated} {file}"
    if precision(document) in ROUNDED:
        yield ""
        yield ROUNDING_NOTE


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    """Text that cannot break out of its cell or become markup."""
    for character in "\\|<>[]`*_":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
