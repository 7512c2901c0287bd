"""The one line on a terminal's stderr that is redrawn in place: what is being loaded or fetched.

Whoever has something else to say there takes it away first. In a pipe, and where TERM is "dumb",
nothing is drawn. How wide text is on a terminal is known here too. No torch.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

BAR_CELLS = 10
_TAB_CELLS = 8  # at most; where the line ends is all that matters, and only roughly


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream can be redrawn in place."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def cell_width(character: str) -> int:
    """How many columns a terminal takes for a character."""
    if character == "\t":
        return _TAB_CELLS
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fitted(head: str, tail: str, columns: int) -> str:
    """Both on one line: where they are too long the head loses its end, and then the tail."""
    room = columns - sum(map(cell_width, tail))
    if sum(map(cell_width, head)) > room:
        head = _begin(head, room - 1) + "…" if room > 1 else ""
    return _begin(head + tail, columns)


def bar(share: float) -> str:
    """How far it is, drawn and as a number."""
    share = min(max(share, 0.0), 1.0)
    full = int(BAR_CELLS * share)
    return f"[{'#' * full}{'-' * (BAR_CELLS - full)}] {int(100 * share)}%"


class StatusLine:
    """The line of this process; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_drawn = False

    def show(self, head: str, tail: str = "") -> None:
        """Draw it, in place of what it showed; nothing off a terminal."""
        with self._lock:
            if not is_terminal(sys.stderr):
                return
            # the last column stays free: what is written there moves the cursor on some terminals
            text = fitted(head, tail, shutil.get_terminal_size().columns - 1)
            self._is_drawn = True
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    def clear(self) -> None:
        """Take it away; the cursor is where it began."""
        with self._lock:
            if self._is_drawn:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
                self._is_drawn = False

    @contextmanager
    def during(self, head: str) -> Iterator[None]:
        """Show it for as long as something lasts, until somebody shows another."""
        self.show(head)
        try:
            yield
        finally:
            self.clear()


STATUS = StatusLine()  # a process has one stderr


def _begin(text: str, columns: int) -> str:
    """As much of a text as has room."""
    width = 0
    for place, character in enumerate(text):
        width += cell_width(character)
        if width > columns:
            return text[:place]
    return text
