"""The terminal: where answers and notes go, the live line, and tokens coloured by who chose them.

Answers go to stdout, everything said about them to stderr. Colours, the live line and the taming of
control characters are for terminals alone; NO_COLOR and TERM=dumb are honoured.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from dataclasses import dataclass
from itertools import groupby
from typing import TextIO

from flashdraft.cli.statistics import Progress, describe_briefly
from flashdraft.core import TokenEvent
from flashdraft.models.stream_decoder import StreamDecoder
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.status_line import cell_width, fitted, is_terminal

REFRESH_S = 0.1  # of the live line
_RESET, _DIM, _DRAFTED, _TARGET = "\x1b[0m", "\x1b[2m", "\x1b[36m", "\x1b[33m"
# an answer must not move the cursor or rename the window: control characters show as pictures
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


@dataclass(frozen=True)
class Screen:
    """The two output streams, and what they can show."""

    out: TextIO
    err: TextIO
    out_is_terminal: bool = False
    err_is_terminal: bool = False
    has_colours: bool = False  # on stdout

    @classmethod
    def detect(cls) -> Screen:
        """The process's own streams."""
        out, err = is_terminal(sys.stdout), is_terminal(sys.stderr)
        has_colours = out and not os.environ.get("NO_COLOR")
        return cls(sys.stdout, sys.stderr, out, err, has_colours)

    def note(self, text: str) -> None:
        """Say something about the answer, not part of it."""
        self.out.flush()
        dim = self.err_is_terminal and self.has_colours
        print(f"{_DIM}{text}{_RESET}" if dim else text, file=self.err, flush=True)

    def write(self, text: str) -> None:
        """Show a piece of the answer at once."""
        self.out.write(text.translate(_VISIBLE) if self.out_is_terminal else text)
        self.out.flush()

    def write_coloured(self, spans: list[tuple[str, bool]]) -> None:
        """Show pieces in the colour of who chose them: (text, drafted)."""
        for text, drafted in spans:
            self.out.write((_DRAFTED if drafted else _TARGET) + text.translate(_VISIBLE) + _RESET)
        self.out.flush()

    def legend(self) -> str:
        """What the colours mean."""
        return f"{_DRAFTED}drafted and accepted{_RESET}, {_TARGET}chosen by the target{_RESET}"


class LiveLine:
    """One line of statistics on a terminal, redrawn in place.

    Where the answer streams to the same terminal the line stands below it: the cursor goes down and
    back by saving its place. After a character in the last column a terminal waits before it wraps,
    which moving the cursor would undo; nothing is drawn there.
    """

    def __init__(self, screen: Screen, below_answer: bool) -> None:
        self._err = screen.err
        self._below = below_answer and screen.out_is_terminal
        self._enabled = screen.err_is_terminal
        self._drawn_at = 0.0
        self._is_drawn = False
        self._column = 0

    def wrote(self, text: str) -> None:
        """Keep account of the column that the answer has reached."""
        last = text.rpartition("\n")
        column, terminal = 0 if last[1] else self._column, shutil.get_terminal_size().columns
        for width in map(cell_width, last[2]):
            if width == 2 and column % terminal == terminal - 1:
                column += 1  # a wide character is not cut in two: it starts the next line
            column += width
        self._column = column

    def show(self, text: str) -> None:
        """Draw the line, unless it was drawn a moment ago."""
        now = time.monotonic()
        width = shutil.get_terminal_size().columns
        at_edge = self._below and self._column > 0 and self._column % width == 0
        if not self._enabled or at_edge or now - self._drawn_at < REFRESH_S:
            return
        self._drawn_at = now
        self._is_drawn = True
        text = fitted("", text, width - 1)
        if self._below:  # index and up: makes room at the screen's end and keeps the column
            self._err.write(f"\x1bD\x1b[A\x1b7\x1b[B\r\x1b[K{_DIM}{text}{_RESET}\x1b8")
        else:
            self._err.write(f"\r\x1b[K{text}")
        self._err.flush()

    def clear(self) -> None:
        """Take the line away; the cursor is where the answer goes on."""
        if self._is_drawn:
            self._err.write("\x1b[J" if self._below else "\r\x1b[K")
            self._err.flush()
            self._is_drawn = False


class DraftColours:
    """Splits an answer's text by whether its tokens were drafted.

    The text is the event's own: it ends before stop tokens and stop strings. Decoding token by
    token says only which token each character came with; one that several tokens spell comes with
    the last of them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._flags: deque[bool] = deque()  # one per decoded character not yet shown
        self._last = False

    def split(self, event: TokenEvent) -> list[tuple[str, bool]]:
        """The event's text in pieces: (text, drafted)."""
        for token, drafted in zip(event.token_ids, event.drafted, strict=True):
            self._flags.extend([drafted] * len(self._decoder.push((token,))))
            self._last = drafted
        if event.generation is not None:
            self._flags.extend([self._last] * len(self._decoder.flush()))
        flagged = [(c, self._flags.popleft() if self._flags else self._last) for c in event.text]
        groups = groupby(flagged, key=lambda pair: pair[1])
        return [("".join(c for c, _ in pairs), drafted) for drafted, pairs in groups]


class AnswerView:
    """Shows one answer as it comes, with the live line."""

    def __init__(self, screen: Screen, echo: bool = True, colours: DraftColours | None = None):
        self.progress = Progress()
        self._screen = screen
        self._echo = echo
        self._colours = colours
        self._live = LiveLine(screen, below_answer=echo)
        self._ends_line = True

    def show(self, event: TokenEvent) -> None:
        """Show an event's text, and the statistics so far."""
        self.progress.add(event)
        spans = self._colours.split(event) if self._colours is not None else None
        if self._echo and event.text:
            self._live.clear()
            if spans is None:
                self._screen.write(event.text)
            else:
                self._screen.write_coloured(spans)
            self._live.wrote(event.text)
            self._ends_line = event.text.endswith("\n")
        self._live.show(describe_briefly(self.progress.num_tokens, self.progress.stats))

    def close(self) -> None:
        """Take the live line away and end the answer's last line."""
        self._live.clear()
        if self._echo and not self._ends_line:
            self._screen.write("\n")
            self._ends_line = True
