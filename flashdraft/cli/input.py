"""What a command is asked: the prompt that was typed, what is piped in, or both.

What is piped in goes first and the typed prompt after it, as in `cat notes | flashdraft generate
"Summarise this."` Bytes that are no text, and more of them than any prompt has, are refused before
a model is loaded.
"""

from __future__ import annotations

import contextlib
import select
import sys
from typing import Any, TextIO

from flashdraft.errors import RequestError

MAX_BYTES = 8 * 2**20  # of what is piped in; several times the longest context in text
PATIENCE_S = 1.0  # with nothing on stdin, until it is said that something is waited for
WAITING = (
    "Waiting for what is piped in; Ctrl-C ends it. Where nothing will come, add </dev/null to the "
    "command."
)


def require_prompt(typed: str | None, usage: str) -> None:
    """Refuse to wait for a prompt that nobody was told to type."""
    if typed is None and is_terminal_input():
        raise RequestError(
            f'There is no prompt. Type one: {usage} "Why is the sky blue?", or pipe one in: '
            f"{usage} <question.txt."
        )


def read_prompt(typed: str | None, as_it_is: bool = False) -> str:
    """The prompt. "-" reads stdin alone; `as_it_is` keeps every character of what is piped in."""
    is_typed = typed not in (None, "-")
    piped = piped_text(is_needed=not is_typed)
    if not as_it_is:
        piped = piped.rstrip("\n")  # the newline that ends a piped line is not the user's word
    if typed is None or typed == "-":
        text = piped
    elif piped.strip():
        text = piped + typed if as_it_is else f"{piped}\n\n{typed}"
    else:
        text = typed
    if not text.strip():
        raise RequestError("The prompt is empty; write something to answer.")
    return checked_text(text, "The prompt")


def is_terminal_input() -> bool:
    """Whether somebody may type on stdin."""
    return sys.stdin is not None and sys.stdin.isatty()


def piped_text(is_needed: bool) -> str:
    """What is on stdin, to its end; nothing of a terminal, unless that is asked for by name."""
    stream = sys.stdin
    if stream is None or (stream.isatty() and not is_needed):
        return ""
    try:
        data = _read_all(stream)
    except OSError as error:  # as nohup leaves it: open, and not to be read
        if is_needed:
            reason = error.strerror or str(error)
            raise RequestError(f"stdin cannot be read: {reason}. Type the prompt.") from None
        return ""
    if len(data) > MAX_BYTES:
        raise RequestError(
            f"More than {MAX_BYTES:,} bytes are piped in, and no prompt can be that long; pipe in "
            "a part."
        )
    return decoded(data, "What is piped in")


def decoded(data: bytes, what: str) -> str:
    """Text of bytes from outside; RequestError where they are none."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{what} is not UTF-8 text: byte {error.start + 1} is 0x{data[error.start]:02x}. "
            "Convert it first (iconv does)."
        ) from None
    if "\0" in text:
        raise RequestError(f"{what} holds zero bytes: it is a binary file, or text in UTF-16.")
    return text


def checked_text(text: str, what: str) -> str:
    """Text that was typed; RequestError where the terminal's bytes were none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(f"{what} is not UTF-8 text; check the terminal's encoding.") from None
    return text


def _read_all(stream: TextIO) -> bytes:
    is_there = True
    with contextlib.suppress(OSError, ValueError):  # no file behind it, or one that always is ready
        is_there = bool(select.select([stream.fileno()], [], [], PATIENCE_S)[0])
    if not is_there:
        print(WAITING, file=sys.stderr, flush=True)
    source: Any = getattr(stream, "buffer", stream)
    data: str | bytes = source.read(MAX_BYTES + 1) or b""
    return data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
