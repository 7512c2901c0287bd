"""Our end of the processes that decode: what they may use, and what is said of a refusal.

Formats are read by programs with a long history of holes, so what people send is read where it can
be stopped, and nothing of it but resized pixels comes back. Each kind of file has processes of its
own, which load what reads it and nothing else.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

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
from flashdraft.media.kinds import FILM, PDF, PICTURE, Kind, require_library
from flashdraft.media.limits import FRAME_BUDGET, MAX_BYTES, MIB, NUM_FRAMES

_TIME = re.compile(r"\d\d:\d\d", re.ASCII)
_LOAD = First({"type": "load"}, Limits(cpu_s=10.0, memory_mib=256))
_LIMITS = Limits(cpu_s=10.0, memory_mib=1280)  # a WebP of the most pixels is in memory four times
_FILM_LIMITS = Limits(cpu_s=40.0, memory_mib=1280)
_LONG_BYTES = MIB  # larger files leave a process to smaller ones


class _Child(NamedTuple):
    """Who reads a kind of file."""

    module: str
    work: str


_CHILDREN = {
    PICTURE: _Child("flashdraft.media.child", "decodes pictures"),
    FILM: _Child("flashdraft.media.film_child", "decodes films"),
    PDF: _Child("flashdraft.media.page_child", "draws pages"),
}


class Decoded(NamedTuple):
    """Upright, opaque, resized."""

    pixels: bytes  # red, green, blue of every pixel, row after row from the top
    width: int
    height: int


class DecodedFrame(NamedTuple):
    """A frame of a film, and when it is shown."""

    time: str  # minutes and seconds, mm:ss
    picture: Decoded


class DecodedPage(NamedTuple):
    """A page of a document, and how many that has."""

    picture: Decoded
    num_pages: int


def decode(data: bytes, budget: int, cell: int) -> Decoded:
    """A file's picture, in cells of `cell` pixels a side, `budget` of them at most.

    It waits for another process, so that threads and event loops go on. Raises RequestError.
    """
    question = {"type": "decode", "budget": budget, "cell": cell}
    answer = _ask(PICTURE, question, _LIMITS, data)
    return _checked(PICTURE, answer, answer.get(DATA, b""), budget, cell)


def decode_film(data: bytes, cell: int) -> list[DecodedFrame]:
    """Frames from all of a film, in its order; like `decode`."""
    question = {"type": "film", "budget": FRAME_BUDGET, "cell": cell}
    answer = _ask(FILM, question, _FILM_LIMITS, data)
    pixels, frames = memoryview(answer.get(DATA, b"")), list[DecodedFrame]()
    for time, width, height in answer["frames"]:
        size = {"width": width, "height": height}
        count = 3 * int(width) * int(height)
        one = _checked(FILM, size, bytes(pixels[:count]), FRAME_BUDGET, cell)
        frames.append(DecodedFrame(_checked_time(time), one))
        pixels = pixels[count:]
    if not 0 < len(frames) <= NUM_FRAMES or len(pixels) > 0:
        raise _stopped(FILM, "it made no frames of the right number")
    return frames


def decode_page(data: bytes, page: int, max_pages: int, budget: int, cell: int) -> DecodedPage:
    """A page of a PDF document, counted from 0; like `decode`.

    A document of more than `max_pages` is refused.
    """
    question = {"type": "page", "page": page, "max_pages": max_pages}
    answer = _ask(PDF, {**question, "budget": budget, "cell": cell}, _LIMITS, data)
    picture = _checked(PDF, answer, answer.get(DATA, b""), budget, cell)
    num_pages = int(answer["pages"])
    if not page < num_pages <= max_pages:
        raise _stopped(PDF, "it counted pages that cannot be")
    return DecodedPage(picture, num_pages)


def rest() -> None:
    """End the processes that have nothing to do; the next file starts one."""
    for kind in _CHILDREN:
        _pool(kind).rest()


@functools.cache
def _pool(kind: Kind) -> ProcessPool:
    """No process runs before the first question."""
    child = _CHILDREN[kind]
    size = max(2, min(4, (os.cpu_count() or 2) // 2)) if kind is PICTURE else 2
    return ProcessPool(child.module, lambda: _LOAD, work=child.work, size=size)


def _ask(kind: Kind, question: Mapping[str, Any], limits: Limits, data: bytes) -> Message:
    _check_length(kind, data)
    require_library(kind)
    try:
        return _pool(kind).ask(question, limits, is_long=len(data) > _LONG_BYTES, data=data)
    except FirstError as error:
        raise CapacityError(
            f"A process that {_CHILDREN[kind].work} was stopped when it began: {error}. Try again "
            "later."
        ) from None
    except ProcessStoppedError as error:
        raise _stopped(kind, str(error)) from None
    except RefusedError as error:
        if error.kind != kind.noun:  # a limit, or a mistake of ours
            raise _stopped(kind, str(error)) from None
        raise RequestError(f"A {kind.noun} cannot be taken. {error}") from None


def _check_length(kind: Kind, data: bytes) -> None:
    what = f"A {kind.noun} cannot be taken."
    if not data:
        raise RequestError(f"{what} It is empty: 0 bytes. Send the whole file.")
    if len(data) > MAX_BYTES:
        raise RequestError(
            f"{what} It has {len(data) / MIB:.1f} MiB; at most {MAX_BYTES // MIB} are taken. "
            f"{kind.smaller}"
        )


def _stopped(kind: Kind, why: str) -> RequestError:
    return RequestError(
        f"A {kind.noun} cannot be taken. Decoding it was stopped: {why}. {kind.stopped}"
    )


def _checked(kind: Kind, size: Message, pixels: bytes, budget: int, cell: int) -> Decoded:
    """Whatever took over the process cannot make us believe in pixels that are not there."""
    width, height = int(size["width"]), int(size["height"])
    fits = width > 0 and height > 0 and width % cell == height % cell == 0
    if not fits or len(pixels) != 3 * width * height or width * height > budget * cell**2:
        raise _stopped(kind, "it made no picture of the right size")
    return Decoded(pixels, width, height)


def _checked_time(time: object) -> str:
    """It becomes text of the prompt."""
    if not isinstance(time, str) or not _TIME.fullmatch(time):
        raise _stopped(FILM, "it gave a time that is none")
    return time
