"""How far a fetch is, on stderr: one line redrawn on a terminal, elsewhere a line now and then.

Sizes and times in words, and how much room a disk has. It knows no network; threads may share a
meter.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from flashdraft.errors import CapacityError, printable

_REDRAWN_S, _REPEATED_S = 0.2, 30.0  # on a terminal, and where lines stay
_UNITS = ((10**9, "GB", 1), (10**6, "MB", 0), (10**3, "kB", 0), (1, "bytes", 0))


def in_words(num_bytes: float) -> str:
    """A size for people."""
    size, name, digits = next((one for one in _UNITS if num_bytes >= one[0]), _UNITS[-1])
    return f"{num_bytes / size:.{digits}f} {name}"


def time_in_words(seconds: float) -> str:
    """A time for people, as short as it may be."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def free_bytes(folder: Path) -> int | None:
    """What the disk of a folder, which need not be there yet, has room for."""
    for place in (folder, *folder.parents):
        with suppress(OSError):
            return shutil.disk_usage(place).free
    return None


def check_room(names: str, needed: int, folder: Path, variable: str) -> None:
    """Refuse what the disk of a folder, which an environment variable names, has no room for."""
    free = free_bytes(folder)
    if free is not None and free < needed:
        raise CapacityError(
            f"The disk has no room for {names}: fetching takes {in_words(needed)}, "
            f"{in_words(free)} are free in {folder}, so {in_words(needed - free)} are missing. "
            "Remove a model (`flashdraft list` shows what they take, `flashdraft rm` removes one), "
            f"or set {variable} to a folder on a larger disk."
        )


def say(text: str) -> None:
    """A line about a fetch."""
    print(printable(text), file=sys.stderr, flush=True)


class FetchMeter:
    """Counts what comes of one fetch, and shows it until it is closed."""

    def __init__(self, label: str, num_bytes: int, num_here: int = 0) -> None:
        self.label, self.total = printable(label), num_bytes
        self.num_here = num_here  # of what came now and what an earlier fetch left
        self._start = self._shown_at = time.monotonic()
        self._at_start = num_here
        self._is_drawn = False
        self._lock = threading.Lock()
        self._is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    @property
    def num_come(self) -> int:
        """What came over the network."""
        return max(self.num_here - self._at_start, 0)

    def add(self, num_bytes: int) -> None:
        """Count what came; less than nothing for what has to come again."""
        with self._lock:
            self.num_here += num_bytes
            now = time.monotonic()
            if now - self._shown_at >= (_REDRAWN_S if self._is_terminal else _REPEATED_S):
                self._shown_at = now
                self._show()

    def close(self) -> None:
        """Take the line away."""
        with self._lock:
            if self._is_drawn:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
                self._is_drawn = False

    def describe_time(self) -> str:
        """How long it took so far."""
        return time_in_words(time.monotonic() - self._start)

    def _show(self) -> None:
        text = f"{self.label}: {in_words(self.num_here)} of {in_words(self.total)}"
        text += f" ({100 * self.num_here // max(self.total, 1)}%)"
        rate = self.num_come / max(time.monotonic() - self._start, 1e-6)
        if rate > 0:
            left = max(self.total - self.num_here, 0) / rate
            text += f", {in_words(rate)}/s, {time_in_words(left)} left"
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K" + text[: shutil.get_terminal_size().columns - 1])
            sys.stderr.flush()
            self._is_drawn = True
        else:
            say(text)
