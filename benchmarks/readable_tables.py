"""Tables of what can be read, from flashdraft/models/readable.py, in docs/models.md.

python -m benchmarks.readable_tables           # write them
python -m benchmarks.readable_tables --check   # 1 and a diff where one of them is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

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

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
COMMAND = "python -m benchmarks.readable_tables"
NOTHING = "–"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables, or say whether they are up to date."""
    return run(sections, COMMAND, "Tables of what can be read, in docs.", arguments)


def sections() -> Iterator[Section]:
    """What belongs between the markers of the page."""
    for name, lines in (("families", families()), ("formats", formats()), ("adapters", adapters())):
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
