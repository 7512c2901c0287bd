"""How far a fetch or the reading of weights is, on stderr: one line redrawn on a terminal.

Elsewhere a fetch has a line now and then, and reading has none. Sizes and times in words, and how
much room a disk has. It knows no network; threads may share a meter.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from flashdraft.errors import CapacityError, printable
from flashdraft.status_line import STATUS, bar, is_terminal

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
    STATUS.clear()
    print(printable(text), file=sys.stderr, flush=True)


class FetchMeter:
    """Counts what comes of one fetch, and shows it until it is closed."""

    def __init__(self, label: str, num_bytes: int, num_here: int = 0) -> None:
        self.label, self.total = printable(label), num_bytes
        self.num_here = num_here  # of what came now and what an earlier fetch left
        self._start = self._shown_at = time.monotonic()
        self._at_start = num_here
        self._lock = threading.Lock()
        self._is_terminal = is_terminal(sys.stderr)

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
            STATUS.clear()

    def describe_time(self) -> str:
        """How long it took so far."""
        return time_in_words(time.monotonic() - self._start)

    def _show(self) -> None:
        text = f": {in_words(self.num_here)} of {in_words(self.total)}"
        text += f" ({100 * self.num_here // max(self.total, 1)}%)"
        rate = self.num_come / max(time.monotonic() - self._start, 1e-6)
        if rate > 0:
            left = max(self.total - self.num_here, 0) / rate
            text += f", {in_words(rate)}/s, {time_in_words(left)} left"
        if self._is_terminal:
            STATUS.show(self.label, text)
        else:
            say(self.label + text)


class ReadMeter:
    """How far the reading of weights is, by what was read and what there is in all."""

    def __init__(self, label: str, total: int) -> None:
        self._head, self._total, self._num_read = f"Loading {printable(label)} ", total, 0
        self._start = time.monotonic()
        self._shown_at: float | None = None

    def add(self, count: int) -> None:
        """Count what was read, and show it unless it was shown a moment ago."""
        self._num_read += count
        now, is_done = time.monotonic(), self._num_read >= self._total
        if self._shown_at is None or is_done or now - self._shown_at >= _REDRAWN_S:
            self._shown_at = now
            share = self._num_read / max(self._total, 1)
            left = (now - self._start) * (1 - share) / share if share else 0.0
            tail = f", {time_in_words(left)} left" if left >= 1 else ""
            STATUS.show(self._head, bar(share) + tail)

    def close(self) -> None:
        """Take the line away."""
        STATUS.clear()
