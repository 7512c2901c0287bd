"""Pictures of `core`, from a file's bytes; and the bytes of what people call a picture in Python.

A film becomes some of its frames and a PDF document its pages: all of them are pictures. Neither
Pillow nor torch is imported here: files are decoded in processes of their own.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import struct
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from flashdraft.core import Picture
from flashdraft.errors import RequestError, quoted, shortened
from flashdraft.media.decoding import Decoded, decode, decode_film, decode_page
from flashdraft.media.kinds import PICTURE, Kind
from flashdraft.media.limits import FRAME_BUDGET, MAX_BYTES, MIB
from flashdraft.media.sizes import BUDGETS
from flashdraft.media.sources import read_data_url

if TYPE_CHECKING:
    from PIL.Image import Image

_VERSION = b"flashdraft picture 1"  # another one wherever the same file gives other pixels
_AS_PNG = {"1", "L", "LA", "P", "RGB", "RGBA", "I;16"}  # modes of Pillow that PNG keeps
_WRITABLE = {  # by which of them the others are written
    **dict.fromkeys(("CMYK", "YCbCr", "HSV", "LAB", "RGBX"), "RGB"),
    **{"PA": "RGBA", "RGBa": "RGBA", "La": "LA"},
}
_ORIENTATION = 0x0112  # in EXIF
_EXIF = struct.Struct(">2sHIHHHIHHI")  # with one field, a short number


class PictureRules(NamedTuple):
    """What a model takes: the side of its cells in pixels, and how many a picture may have."""

    cell: int
    budget: int


class Frame(NamedTuple):
    """A frame of a film."""

    time: str  # minutes and seconds from the beginning, mm:ss
    picture: Picture


class Page(NamedTuple):
    """A page of a PDF document, and how many that has."""

    picture: Picture
    num_pages: int


def open_picture(data: bytes, rules: PictureRules) -> Picture:
    """The picture of a PNG, JPEG, WebP or GIF file. Raises RequestError where there is none."""
    cell, budget = rules
    _check_budget(budget)
    return _keyed(decode(data, budget, cell), rules)


def open_film(data: bytes, cell: int) -> tuple[Frame, ...]:
    """Frames from all of an MP4, MOV, WebM or MKV file; like `open_picture`."""
    rules = PictureRules(cell, FRAME_BUDGET)
    return tuple(Frame(time, _keyed(one, rules)) for time, one in decode_film(data, cell))


def open_page(data: bytes, page: int, max_pages: int, rules: PictureRules) -> Page:
    """A page, counted from 0, of a PDF document of at most `max_pages`; like `open_picture`."""
    cell, budget = rules
    _check_budget(budget)
    decoded, num_pages = decode_page(data, page, max_pages, budget, cell)
    return Page(_keyed(decoded, rules), num_pages)


def _check_budget(budget: int) -> None:
    if budget not in BUDGETS:
        raise RequestError(
            f"A picture cannot take {quoted(budget)} tokens; it can take "
            f"{', '.join(map(str, BUDGETS))} at most. Choose one of them."
        )


def _keyed(decoded: Decoded, rules: PictureRules) -> Picture:
    (pixels, width, height), (cell, budget) = decoded, rules
    key = hashlib.sha256(_VERSION + struct.pack(">4Q", width, height, cell, budget))
    key.update(pixels)
    num_tokens = (width // cell) * (height // cell)
    return Picture(pixels, width, height, num_tokens, key.digest())


def picture_bytes(value: Any) -> bytes:
    """The file of a picture: its bytes, a path, a data: URL, or an image of Pillow's.

    Text is never a path: it may have come from anyone.
    """
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(value, pillow.Image):
        return _as_file(value)
    return file_bytes(value, PICTURE)


def file_bytes(value: Any, kind: Kind) -> bytes:
    """The file of a film or a PDF document: its bytes, a path, or a data: URL."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        return read_data_url(value, kind)
    if isinstance(value, os.PathLike):
        return _read(os.fspath(value), kind)
    images = ", or an image of Pillow's" if kind is PICTURE else ""
    raise RequestError(
        f"A {kind.noun} is {quoted(value)}; it must be the bytes of a file, a pathlib.Path, a "
        f"data: URL{images}."
    )


def _read(path: str | bytes, kind: Kind) -> bytes:
    shown = quoted(os.fsdecode(path))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not keep us waiting
        with open(descriptor, "rb") as file:
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            data = file.read(MAX_BYTES + 1) if is_file else None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise RequestError(
            f"{shown} cannot be read: {why}. Check the {kind.noun}'s path."
        ) from None
    if data is None:
        raise RequestError(f"{shown} is no file. Give the path of a {kind.noun}'s file.")
    if len(data) > MAX_BYTES:
        raise RequestError(
            f"{shown} has more than {MAX_BYTES // MIB} MiB, which is the most that a {kind.noun} "
            f"may have. {kind.smaller}"
        )
    return data


def _as_file(image: Image) -> bytes:
    """Every pixel, and which side is up."""
    width, height = image.size
    if width * height == 0:
        raise RequestError(f"An image of {width}x{height} pixels has none. Give one that has.")
    file = io.BytesIO()
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
        if mode := _WRITABLE.get(image.mode):
            image = image.convert(mode)
        if image.mode not in _AS_PNG:
            raise RequestError(
                f"An image of Pillow's has the mode {quoted(image.mode)}, whose numbers are no "
                "colours by themselves. Convert it to 'RGB' as it should look."
            )
        turned = orientation in range(2, 9)
        exif = _EXIF.pack(b"MM", 42, 8, 1, _ORIENTATION, 3, 1, orientation, 0, 0)
        image.save(file, "PNG", compress_level=1, exif=exif if turned else None, icc_profile=None)
    except (OSError, ValueError, SyntaxError) as error:  # its file is read only now
        raise RequestError(
            f"An image of Pillow's cannot be read: {shortened(error)}. Check its file."
        ) from None
    if file.tell() > MAX_BYTES:
        raise RequestError(
            f"An image of Pillow's has {file.tell() / MIB:.1f} MiB as PNG; at most "
            f"{MAX_BYTES // MIB} are taken. Give the path of its file, or make it smaller."
        )
    return file.getvalue()
