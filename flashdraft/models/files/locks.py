"""One process at a time at a model's files: the operating system's lock on a small file of its own.

A killed process leaves no lock behind. Where the file system has none, nobody is kept out; digests
then find what two writers made of one file.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def held(lock: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a lock; `on_wait` is called once where another process has it."""
    descriptor = _open(lock)
    try:
        if not _try(descriptor):
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def held_if_free(lock: Path) -> Iterator[bool]:
    """Hold a lock, or yield False where another process has it."""
    descriptor = _open(lock)
    try:
        yield _try(descriptor)
    finally:
        os.close(descriptor)


def is_held(lock: Path) -> bool:
    """Whether another process has it now."""
    with suppress(OSError), held_if_free(lock) as is_ours:
        return not is_ours
    return False


def _open(lock: Path) -> int:
    lock.parent.mkdir(parents=True, exist_ok=True)
    return os.open(lock, os.O_RDWR | os.O_CREAT, 0o664)


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks on this file system
        return True
    return True
