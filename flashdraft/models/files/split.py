"""A GGUF model in several files, by their names alone: NAME-00001-of-00003.gguf and so on.

llama.cpp writes big models so. The first is named, and stands for all. What is in them is
gguf/file.py's.
"""

from __future__ import annotations

import re

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def part_of(name: str) -> tuple[int, int] | None:
    """Which part a name says that a file is, from 1 on, and of how many; None if of none."""
    found = _PART.fullmatch(name)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        return None
    return int(found[2]), int(found[3])


def part_names(name: str) -> list[str]:
    """The names of all parts of the model that a part is of; of a whole file its own alone."""
    found, part = _PART.fullmatch(name), part_of(name)
    if found is None or part is None:
        return [name]
    return [f"{found[1]}-{number:05d}-of-{found[3]}.gguf" for number in range(1, part[1] + 1)]


def first_part(name: str) -> str | None:
    """The name to use instead, where one of a part is given that is not the first."""
    part = part_of(name)
    return None if part is None or part[0] == 1 else part_names(name)[0]
