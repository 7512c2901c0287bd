"""Tables of what can be read, from flashdraft/models/readable.py, in docs/models.md.

python -m benchmarks.readable_tables           # write them
python -m benchmarks.readable_tables --check   # 1 and a diff where one of them is out of date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.marked import Section, run
from flashdraft.cli.commands.models import short_names
from flashdraft.models.readable import (
    ADAPTERS,
    FAMILIES,
    FORMATS,
    REFUSED_ADAPTERS,
    REFUSED_FAMILIES,
    REFUSED_FORMATS,
)

Results = Mapping[str, Any]

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
RESULTS = Path(__file__).parent / "results" / "families.json"
COMMAND = "python -m benchmarks.readable_tables"
NOTHING = "–"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables, or say whether they are up to date."""
    return run(sections, COMMAND, "Tables of what can be read, in docs.", arguments)


def sections() -> Iterator[Section]:
    """What belongs between the markers of the page."""
    tables = {
        "families": families(),
        "parity": parity(json.loads(RESULTS.read_text(encoding="utf-8"))),
        "formats": formats(),
        "values": values(json.loads(RESULTS.read_text(encoding="utf-8"))),
        "adapters": adapters(),
    }
    for name, lines in tables.items():
        begin, end = f"<!-- {name}: written by {COMMAND} -->", f"<!-- end of {name} -->"
        yield Section(PAGE, "\n".join(["", *lines, "", ""]), begin, end)


def families() -> Iterator[str]:
    """The table of families, and which are refused by name."""
    yield from _head("family", "`model_type`", "GGUF", "drafters known for", "left out", "notes")
    for one in FAMILIES:
        gguf = f"`{one.gguf}`" if one.gguf else NOTHING
        types = ", ".join(f"`{name}`" for name in one.shown_types.split(", "))
        told = short_names(one.names) or NOTHING, one.unread or NOTHING, one.note
        yield _row([one.names, types, gguf, *told])
    yield ""
    yield f"Refused by name: {', '.join(f'`{one}`' for one in REFUSED_FAMILIES)} and every other."


def parity(results: Results) -> Iterator[str]:
    """How far every family's logits are from transformers', and how many tokens kept the law."""
    yield from _head("tiny random model", "largest difference: torch", "float32", "texts")
    for row in results["parity"]:
        logits = [_largest(row[backend]) for backend in ("torch", "float32")]
        same = [row[drafts]["tokens"] for drafts in ("plain", "ngram", "drafter")]
        yield _row([f"`{row['family']}`", *logits, f"{' + '.join(map(str, same))} tokens, alike"])
    yield ""
    yield from _head("the law: drafted beside plain", "torch", "float32", "int8")
    for row in results["law"]:
        yield _row(
            [f"`{row['family']}`", *map(_tokens, (row["torch"], row["float32"], row["int8"]))]
        )
    yield ""
    yield from _origin(results)


def values(results: Results) -> Iterator[str]:
    """How many values of every format were compared with its tool's."""
    yield from _head("format", "tool", "values compared", "differing")
    for row in results["formats"]:
        tool = f"{row['tool']} {row['version']}"
        yield _row([row["format"], tool, f"{row['values']:,}", str(row["differing"])])
    yield ""
    yield from _head("a model in", "law: torch", "float32")
    for row in results["formats_law"]:
        yield _row([row["format"], *map(_tokens, (row["torch"], row["float32"]))])
    yield ""
    yield from _origin(results)


def _largest(found: Mapping[str, float]) -> str:
    """Of logits; what is tapped is tested with a tolerance of its own."""
    return f"{max(found[what] for what in ('prefill', 'verify', 'rollback')):.1e}"


def _tokens(found: Mapping[str, int]) -> str:
    return f"{found['tokens']} tokens, {found['differing']} differ"


def _origin(results: Results) -> Iterator[str]:
    told = results["environment"]
    where = f"{told['device']}, torch {told['torch']}, transformers {told['transformers']}"
    link = f"[file](../benchmarks/results/{RESULTS.name})"
    yield f"{where}, {told['date'][:10]}: `{told['command'].partition(' --')[0]}`, {link}."


def formats() -> Iterator[str]:
    """The table of formats, and what is refused."""
    yield from _head("from", "kept on a GPU as", "bits a weight", "")
    yield from map(_row, FORMATS)
    yield ""
    yield f"Refused by name: {', '.join(REFUSED_FORMATS)} and every other."


def adapters() -> Iterator[str]:
    """The table of adapters, and what is refused."""
    yield from _head("of a LoRA adapter", "merged")
    yield from map(_row, ADAPTERS)
    yield ""
    yield f"Refused by name: {', '.join(REFUSED_ADAPTERS)} and every other."


def _head(*names: str) -> Iterator[str]:
    yield _row(names)
    yield "|" + "---|" * len(names)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
