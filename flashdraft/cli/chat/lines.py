"""What is typed or piped into a chat, line by line: put together where it takes several lines.

A text between two \"\"\" may have several lines and is never a command, except after one's name; a
line that ends with a backslash goes on in the next. What is typed in a terminal is remembered in
FLASHDRAFT_HOME, in a file that only its owner can read.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from flashdraft.cli.input import decoded
from flashdraft.errors import RequestError
from flashdraft.models.files.packaged import home_folder

QUOTES = '"""'
MAX_LINE_BYTES = 2**20
MAX_REMEMBERED = 1000  # lines
MAX_HISTORY_BYTES = 2**20  # a longer file is not ours, and is left alone
_QUOTED_FROM = re.compile(r'((?:/[a-z]+\s+)?)"""(.*)', re.DOTALL)


class Typed(NamedTuple):
    """Something whole that was typed: a question, or a command if it is not `is_question`."""

    text: str
    is_question: bool = False


class LineJoiner:
    """Puts together what takes several lines."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._command = ""  # what stands before the quotes
        self._in_quotes = False

    @property
    def is_waiting(self) -> bool:
        """Whether what was typed goes on in the next line."""
        return self._in_quotes or bool(self._lines)

    def push(self, line: str) -> Typed | None:
        """A further line; what was typed if that ends it."""
        if not self.is_waiting and (begun := _QUOTED_FROM.fullmatch(line.strip())):
            self._command, line, self._in_quotes = begun[1], begun[2], True
        if self._in_quotes:
            text = line.rstrip()
            if not text.endswith(QUOTES):
                self._lines.append(line)
                return None
            self._lines.append(text.removesuffix(QUOTES))
        elif _goes_on(line):
            self._lines.append(line[:-1])
            return None
        else:
            self._lines.append(line)
        return self.end()

    def end(self) -> Typed | None:
        """What there is, whole or not; None if there is nothing."""
        text, is_question = "\n".join(self._lines), self._in_quotes and not self._command
        typed = Typed(self._command + text.strip(), is_question)
        has_any = self.is_waiting
        self.drop()
        return typed if has_any else None

    def drop(self) -> None:
        """Forget what was begun."""
        self._lines, self._command, self._in_quotes = [], "", False


def piped_lines() -> Iterator[str]:
    """The lines of stdin; RequestError for one that is no text, or as long as no question is."""
    source = getattr(sys.stdin, "buffer", sys.stdin)
    number = 0
    while line := source.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise RequestError(
                f"Line {number} on stdin has more than {MAX_LINE_BYTES:,} bytes; split it."
            )
        text = line if isinstance(line, str) else decoded(line, f"Line {number} on stdin")
        yield text.rstrip("\r\n")


@contextlib.contextmanager
def line_editing() -> Iterator[None]:
    """Editing of what is typed, and a history over several chats; neither off a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield
        return
    try:
        readline = importlib.import_module("readline")
    except ImportError:  # not on every system
        yield
        return
    path = home_folder() / "chat_history"
    readline.set_auto_history(True)
    num_before = _recall(readline, path)
    try:
        yield
    finally:
        _remember(readline, path, num_before)


def _recall(readline: ModuleType, path: Path) -> int:
    readline.clear_history()
    with contextlib.suppress(OSError):  # there is none yet, or it cannot be read: none, then
        if path.is_file() and path.stat().st_size <= MAX_HISTORY_BYTES:
            readline.read_history_file(path)
    return int(readline.get_current_history_length())


def _remember(readline: ModuleType, path: Path, num_before: int) -> None:
    """Add what was typed since to the file, with no moment in which others could read it."""
    num_new = readline.get_current_history_length() - num_before
    if num_new <= 0:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
        if not path.is_file():
            return
        readline.set_history_length(MAX_REMEMBERED)
        if hasattr(readline, "append_history_file"):  # other chats may have written meanwhile
            readline.append_history_file(num_new, path)
        else:
            readline.write_history_file(path)
        path.chmod(0o600)
    except OSError as error:
        reason = error.strerror or error
        print(f"flashdraft: {path} cannot be written ({reason}): no history.", file=sys.stderr)


def _goes_on(line: str) -> bool:
    """Whether a line ends with a backslash that stands for going on; two of them are one."""
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1
