"""Our end of the processes that decode pictures: what they may use, and what is said of a refusal.

Formats are read by programs with a long history of holes, so what people send is read where it can
be stopped, and nothing of it but resized pixels comes back.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

from flashdraft.errors import CapacityError, RequestError
from flashdraft.killable.frames import DATA, Message
from flashdraft.killable.pool import (
    First,
    FirstError,
    Limits,
    ProcessPool,
    ProcessStoppedError,
    RefusedError,
)
from flashdraft.media.limits import MAX_BYTES, MIB

_CHILD, _WORK = "flashdraft.media.child", "decodes pictures"
_LOAD = First({"type": "load"}, Limits(cpu_s=10.0, memory_mib=256))
_LIMITS = Limits(cpu_s=10.0, memory_mib=1280)  # a WebP of the most pixels is in memory four times
_LONG_BYTES = MIB  # larger files leave a process to smaller ones


class Decoded(NamedTuple):
    """Upright, opaque, resized."""

    pixels: bytes  # red, green, blue of every pixel, row after row from the top
    width: int
    height: int


def decode(data: bytes, budget: int, cell: int) -> Decoded:
    """A file's picture, in cells of `cell` pixels a side, `budget` of them at most.

    It waits for another process, so that threads and event loops go on. Raises RequestError.
    """
    _check_length(data)
    question = {"type": "decode", "budget": budget, "cell": cell}
    try:
        answer = _pool().ask(question, _LIMITS, is_long=len(data) > _LONG_BYTES, data=data)
    except FirstError as error:
        raise CapacityError(
            f"A process that {_WORK} was stopped when it began: {error}. Try again later."
        ) from None
    except ProcessStoppedError as error:
        raise _stopped(str(error)) from None
    except RefusedError as error:
        if error.kind != "picture":  # a limit, or a mistake of ours
            raise _stopped(str(error)) from None
        raise RequestError(f"A picture cannot be taken. {error}") from None
    return _checked(answer, budget, cell)


def rest() -> None:
    """End the processes that have nothing to do; the next picture starts one."""
    _pool().rest()


@functools.cache
def _pool() -> ProcessPool:
    size = max(2, min(4, (os.cpu_count() or 2) // 2))
    return ProcessPool(_CHILD, lambda: _LOAD, work=_WORK, size=size)


def _check_length(data: bytes) -> None:
    if not data:
        raise RequestError("A picture cannot be taken. It is empty: 0 bytes. Send the whole file.")
    if len(data) > MAX_BYTES:
        raise RequestError(
            f"A picture cannot be taken. It has {len(data) / MIB:.1f} MiB; at most "
            f"{MAX_BYTES // MIB} are taken. Make it smaller, or save it as JPEG."
        )


def _stopped(why: str) -> RequestError:
    return RequestError(
        f"A picture cannot be taken. Decoding it was stopped: {why}. Make it smaller, or save it "
        "anew as PNG or JPEG."
    )


def _checked(answer: Message, budget: int, cell: int) -> Decoded:
    """Whatever took over the process cannot make us believe in pixels that are not there."""
    pixels = answer.get(DATA, b"")
    width, height = int(answer["width"]), int(answer["height"])
    fits = width > 0 and height > 0 and width % cell == height % cell == 0
    if not fits or len(pixels) != 3 * width * height or width * height > budget * cell**2:
        raise _stopped("it made no picture of the right size")
    return Decoded(pixels, width, height)
