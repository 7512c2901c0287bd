"""Text between two markers of a file that people write: tables that a benchmark writes into it."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from flashdraft.errors import FlashdraftError, RequestError
from flashdraft.files import write_whole


class Section(NamedTuple):
    """What belongs between two markers of a file."""

    path: Path
    text: str
    begin: str
    end: str


def replace_between(text: str, new: str, begin: str, end: str, name: str) -> str:
    """A text with something new between its markers; `name` is what people call the file."""
    if [text.count(begin), text.count(end)] != [1, 1] or text.index(begin) > text.index(end):
        raise RequestError(
            f"{name} needs one line {begin!r} and after it one line {end!r}: the tables are "
            "written between them."
        )
    head, rest = text.split(begin)
    return f"{head}{begin}\n{new}{end}{rest.split(end)[1]}"


def run(
    sections: Callable[[], Iterable[Section]],
    command: str,
    description: str,
    arguments: Sequence[str] | None,
) -> int:
    """A command that writes sections of files of their own, or says whether they are up to date."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if out of date")
    options = parser.parse_args(arguments)
    try:
        texts: dict[Path, tuple[str, str]] = {}
        for path, text, begin, end in sections():
            old = path.read_text(encoding="utf-8")
            _, before = texts.get(path, (old, old))  # a file may have several sections
            texts[path] = old, replace_between(before, text, begin, end, path.name)
        for path, (old, new) in texts.items():
            if options.check:
                names = path.name, f"{path.name} as it should be"
                lines = old.splitlines(True), new.splitlines(True)
                sys.stdout.writelines(difflib.unified_diff(*lines, *names))
            else:
                write_whole(path, new)
    except (FlashdraftError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.check and any(old != new for old, new in texts.values()):
        print(f"Out of date: run {command}", file=sys.stderr)
        return 1
    return 0
