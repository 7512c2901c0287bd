"""Which of many files is the one that a GGUF model sees with, by their names alone.

llama.cpp keeps a model's tower in a file of its own, whose name has "mmproj" in it. It often lies
there in several formats, which the end of its name tells. What is in them is gguf/tower.py's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import NamedTuple

_MARK = "mmproj"
ARCHITECTURES = ("gemma4",)  # of the models in GGUF that see here
_PREFERRED = ("bf16", "f16", "f32")  # then the others: a tower is kept in floats
_FORMAT = re.compile(r"[-_.](bf16|fp?16|fp?32|i?q\d\w*)(?=[-.]|$)")


class _Name(NamedTuple):
    """A file's name without what tells its format, and how welcome that format is."""

    stem: str
    rank: int


def mmproj_names(names: Iterable[str]) -> list[str]:
    """Those of the names that are of mmproj files."""
    return sorted(name for name in names if _is_mmproj(name))


def one_of_each(names: Iterable[str]) -> list[str]:
    """Of every tower one file, in the best of the formats that it is there in."""
    best: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (_parsed(name).rank, name)):
        best.setdefault(_parsed(name).stem, name)
    return sorted(best.values())


def beside(model: str, names: Iterable[str]) -> list[str]:
    """The mmproj files in the folder of a GGUF model; none for a file that is one itself."""
    if _is_mmproj(model) or not model.endswith(".gguf"):
        return []
    folder = PurePosixPath(model).parent
    return [name for name in mmproj_names(names) if PurePosixPath(name).parent == folder]


def _is_mmproj(name: str) -> bool:
    plain = PurePosixPath(name).name.lower()
    return _MARK in plain and plain.endswith(".gguf")


def _parsed(name: str) -> _Name:
    plain = PurePosixPath(name).name.lower().removesuffix(".gguf")
    found = [match.replace("fp", "f") for match in _FORMAT.findall(plain)]
    rank = _PREFERRED.index(found[-1]) if found and found[-1] in _PREFERRED else len(_PREFERRED)
    return _Name(_FORMAT.sub("", plain), rank)
