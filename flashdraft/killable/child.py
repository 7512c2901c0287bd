"""The end of a killable process: one message at a time, each within its limits.

The kernel keeps the limits: a timer of processor time whose signal ends the process, and a limit on
memory. No code of the process need run for it, so that one long call of a library is no way out.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
from collections.abc import Callable

from flashdraft.killable.frames import (
    DATA,
    HEADER,
    Message,
    WireError,
    frame_length,
    pack,
    unpack,
)

_MAX_FILES = 64
_PAGE_BYTES = resource.getpagesize()
_MAX_KEPT = 64 * 1024 * 1024  # bytes; a process that keeps more behind an answer is replaced
_MAX_MESSAGE = 1000
_NICENESS = 5  # whoever is to answer others goes first


class RefusalError(Exception):
    """A question that cannot be answered: `kind` is for the other end, the rest for people."""

    def __init__(self, kind: str, message: str, *, retire: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.retire = retire  # whether this process should answer no more


def serve(descriptor: int, answer: Callable[[Message], Message]) -> None:
    """Answer until the other end goes. What is written to stderr from here on is lost."""
    for what, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(what, (value, value))
    _limit(resource.RLIMIT_NOFILE, _MAX_FILES)
    os.nice(_NICENESS)
    with open(os.devnull, "wb") as nowhere:  # a library that panics prints there
        os.dup2(nowhere.fileno(), 2)
    base = _memory_bytes()
    with socket.socket(fileno=descriptor) as connection:
        is_first = True
        while (header := _receive(connection, HEADER.size)) is not None:
            body = _receive(connection, frame_length(header))
            if body is None:
                return
            connection.sendall(_answer(unpack(body), answer, base, is_first))
            if is_first:  # what it loaded belongs to it
                is_first, base = False, _memory_bytes()


def _answer(
    message: Message, answer: Callable[[Message], Message], base: int, is_first: bool
) -> bytes:
    allowed = int(message["memory_bytes"])
    signal.setitimer(signal.ITIMER_PROF, float(message["cpu_s"]))  # its signal ends the process
    _limit(resource.RLIMIT_AS, base + allowed)
    try:
        frame = _packed({"type": "answer", **answer(message)})
    except RefusalError as refusal:
        frame = _error(refusal.kind, str(refusal), refusal.retire)
    except WireError as error:
        frame = _error("limit", f"it makes too much: {error}", retire=True)
    except MemoryError:
        used = allowed // (1024 * 1024)
        frame = _error("limit", f"it needed more than {used} MiB of memory", retire=True)
    except Exception as error:  # a mistake of ours, or something that nobody thought of
        frame = _error("bug", f"{type(error).__name__}: {error}"[:_MAX_MESSAGE], retire=True)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _limit(resource.RLIMIT_AS, None)
    most = base + _MAX_KEPT
    if not is_first and _memory_bytes() > most:
        _trim()
        if _memory_bytes() > most:
            return _retired(frame)
    return frame


def _error(kind: str, message: str, retire: bool) -> bytes:
    return pack({"type": "error", "kind": kind, "message": message, "retire": retire})


def _retired(frame: bytes) -> bytes:
    return _packed({**unpack(frame[HEADER.size :]), "retire": True})


def _packed(answer: Message) -> bytes:
    data = answer.pop(DATA, None)
    return pack(answer, data)


def _receive(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(count - len(data), 1 << 18))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _limit(what: int, value: int | None) -> None:
    hard = resource.getrlimit(what)[1]
    if value is None or (hard != resource.RLIM_INFINITY and value > hard):
        value = hard
    resource.setrlimit(what, (value, hard))


def _memory_bytes() -> int:
    """What the limit on memory counts."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * _PAGE_BYTES
    except OSError:  # another system
        return 0


def _trim() -> None:
    """Give back to the system what the C library keeps."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
