"""Writing files so that a reader sees the old one or the new one, whole, after a crash too."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file through one beside it. Raises OSError as writing does."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)
        with part.open("x", encoding="utf-8", newline="\n") as file:  # x: through no link
            file.write(text)
        put_in_place(part, path)
    finally:
        part.unlink(missing_ok=True)


def put_in_place(part: Path, path: Path) -> None:
    """Give a finished file or folder its name, in place of what had it, on one file system.

    A rename may reach the disk before the content does, and then a power cut leaves an empty file
    under a good name. So the content goes first; the folder last, so that the name stays too.
    """
    for written in _contents(part):
        _flush(written)
    if part.is_dir():
        shutil.rmtree(path, ignore_errors=True)  # a folder replaces no folder that holds something
    os.replace(part, path)
    with suppress(OSError):  # some file systems cannot flush a folder; the content is safe
        _flush(path.parent)


def _contents(part: Path) -> Iterator[Path]:
    """A file; or a folder's files, and then the folder itself."""
    if part.is_dir():
        for inner in sorted(part.iterdir()):
            yield from _contents(inner)
    yield part


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
