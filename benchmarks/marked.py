"""Text between two markers of a file that people write: tables that a benchmark writes into it."""

from __future__ import annotations

from flashdraft.errors import RequestError


def replace_between(text: str, new: str, begin: str, end: str, name: str) -> str:
    """A text with something new between its markers; `name` is what people call the file."""
    if [text.count(begin), text.count(end)] != [1, 1] or text.index(begin) > text.index(end):
        raise RequestError(
            f"{name} needs one line {begin!r} and after it one line {end!r}: the tables are "
            "written between them."
        )
    head, rest = text.split(begin)
    return f"{head}{begin}\n{new}{end}{rest.split(end)[1]}"
