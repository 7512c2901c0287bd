"""Digests of a model's files: what a file has, what it should have, and which were checked before.

A digest that should be is known for files that the Hub's client fetched: it names them by it. What
was checked is remembered beside the file by its size, time and inode, so that a model of 100 MB is
read once and not at every start. It knows no models and fetches nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from flashdraft.files import write_whole

SHA256, GIT = "sha256", "git"
_BLOCK_BYTES = 1 << 20
_MAX_NOTE_BYTES = 4096
_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")


class Digest(NamedTuple):
    """A digest and how it is made: "sha256", or "git", the sha1 that git gives a small file."""

    kind: str
    value: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.value}"


def read_digest(path: Path, kind: str = SHA256) -> Digest:
    """Read a file for its digest. Raises OSError as reading does."""
    with path.open("rb") as file:
        digest = new_hash(kind, os.fstat(file.fileno()).st_size)
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return Digest(kind, digest.hexdigest())


def new_hash(kind: str, num_bytes: int) -> hashlib._Hash:
    """What a file's content goes into for its digest; git puts the size before it."""
    if kind == GIT:
        return hashlib.sha1(f"blob {num_bytes}\0".encode(), usedforsecurity=False)
    return hashlib.sha256()


def parse_digest(text: str) -> Digest | None:
    """A digest as the Hub writes it; None for what is none."""
    if not _DIGEST.fullmatch(text):
        return None
    return Digest(SHA256 if len(text) == 64 else GIT, text)


def published_digest(path: Path) -> Digest | None:
    """The digest of a file as the Hub has it, by the Hub's client: in its cache, or a folder.

    In the cache a file is a link to a blob of that name; beside a folder that was fetched with
    --local-dir lies a note of three lines for each file, commit, digest and time.
    """
    target = path.resolve()
    if target.parent.name == "blobs":
        return parse_digest(target.name)
    note = path.parent / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
    lines = (_read_note(note) or "").splitlines()
    return parse_digest(lines[1].strip()) if len(lines) > 1 else None


def is_sound(path: Path, sha256: str, num_bytes: int) -> bool:
    """Whether a file is what it should be; read only where this very file was not checked yet."""
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode) or state.st_size != num_bytes:
            return False
        note = _note(state, sha256)  # of before the reading: what is written meanwhile is not in it
        if _read_note(_note_path(path)) == note:
            return True
        if read_digest(path).value != sha256:
            return False
    except OSError:
        return False
    _write_note(path, note)
    return True


def remember_sound(path: Path, sha256: str) -> None:
    """Note that a file was checked as it was written."""
    with suppress(OSError):
        _write_note(path, _note(path.stat(), sha256))


def forget(path: Path) -> None:
    """Have a file read again at its next use."""
    with suppress(OSError):
        _note_path(path).unlink(missing_ok=True)


def _note_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.checked.json")


def _note(state: os.stat_result, sha256: str) -> str:
    identity = {"bytes": state.st_size, "mtime_ns": state.st_mtime_ns, "inode": state.st_ino}
    return json.dumps({"sha256": sha256, **identity}) + "\n"


def _write_note(path: Path, note: str) -> None:
    with suppress(OSError):  # a cache that is read-only is read anew each time
        write_whole(_note_path(path), note)


def _read_note(path: Path) -> str | None:
    """A small text file; None for whatever else has that name, a pipe or an endless device too."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            content = file.read(_MAX_NOTE_BYTES + 1)
        return content.decode() if len(content) <= _MAX_NOTE_BYTES else None
    except (OSError, UnicodeDecodeError):
        return None
