"""One writer at a time: a run keeps others out of the folder or the file that it writes.

The lock is the operating system's, on a small file that holds the process's id, so a killed run
leaves none behind. It knows nothing of what is written.
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flashdraft.errors import TrainingError

log = logging.getLogger(__name__)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, where they are not there yet."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"{folder} cannot be made: {error.strerror}.") from None


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Keep a folder, or a file that need not be there yet, from every other process's writing.

    Where another process has it, TrainingError. Where the file system has no locks, a warning.
    """
    lock = path / "lock" if path.is_dir() else path.with_name(path.name + ".lock")
    descriptor = _acquire(lock, path)
    try:
        yield
    finally:
        with suppress(OSError):
            if _is_at(lock, descriptor):
                lock.unlink()  # before the lock is given up, or it might be the next one's
        os.close(descriptor)


def _acquire(lock: Path, path: Path) -> int:
    """The descriptor of the lock's file, which holds the lock as long as it is open."""
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise TrainingError(f"{lock} cannot be written: {error.strerror}.") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode("utf-8", errors="replace")
            os.close(descriptor)
            raise TrainingError(
                f"{path} is being written by {holder or 'another process'}; wait until it has "
                "ended, or name another --out."
            ) from None
        except OSError as error:
            log.warning(
                "%s cannot be locked (%s); see to it yourself that no second run writes there",
                path,
                error.strerror,
            )
            return descriptor
        if _is_at(lock, descriptor):
            with suppress(OSError):  # a full disk: the id is only for the other's message
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)
            return descriptor
        os.close(descriptor)  # its holder ended, and removed it, between our two calls


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file is still the one at that path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
