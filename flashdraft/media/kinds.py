"""What may be sent besides text: pictures, films and PDF documents, and what is said of each."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

from flashdraft.errors import RequestError
from flashdraft.media.limits import FILM_FORMATS, FORMATS

_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")  # what an MP4 or MOV begins with
_BRANDS_OF_PICTURES = (b"avif", b"avis", b"heic", b"heix", b"hevc", b"mif1", b"msf1")
_MATROSKA = b"\x1a\x45\xdf\xa3"
PDF_HEAD_BYTES = 1024  # among them a PDF says that it is one


class Kind(NamedTuple):
    """One of them. It goes by its content where it is read; all else is for what people read."""

    noun: str
    part: str  # our own name of its part in a message, and of what that holds
    formats: str
    media_types: str  # a pattern of what its data: URL may begin with
    example: str  # the beginning of such a URL
    accepted: str  # the types that a host is asked for
    smaller: str  # what helps where it is too large
    stopped: str  # what helps where it took too much to read
    library: str  # what reads it, and must be there
    extra: str = ""  # of flashdraft, which brings the library


PICTURE = Kind(
    "picture",
    "image",
    FORMATS,
    r"image/[\w.+-]+",
    "data:image/png;base64,",
    "image/png, image/jpeg, image/webp, image/gif",
    "Make it smaller, or save it as JPEG.",
    "Make it smaller, or save it anew as PNG or JPEG.",
    "PIL",
)
FILM = Kind(
    "film",
    "video",
    FILM_FORMATS,
    r"video/[\w.+-]+",
    "data:video/mp4;base64,",
    "video/mp4, video/webm, video/quicktime, video/x-matroska",
    "Cut it shorter, or save it with fewer pixels.",
    "Cut it shorter, or save it with fewer pixels.",
    "av",
    "video",
)
PDF = Kind(
    "PDF",
    "pdf",
    "PDF",
    r"application/(?:x-)?pdf",
    "data:application/pdf;base64,",
    "application/pdf",
    "Split it, or send single pages as pictures.",
    "Send fewer pages, or the pages as pictures.",
    "pypdfium2",
    "pdf",
)


KINDS = (PICTURE, FILM, PDF)


def kind_of(data: bytes) -> Kind:
    """What a file is, by its first bytes; what is neither a film nor a PDF may be a picture."""
    if b"%PDF-" in data[:PDF_HEAD_BYTES]:
        return PDF
    return FILM if film_format(data) else PICTURE


def film_format(data: bytes) -> str | None:
    """The name that PyAV has for a film's format; None where it is none."""
    if data[4:8] in _BOXES and data[8:12] not in _BRANDS_OF_PICTURES:
        return "mov"
    return "matroska" if data.startswith(_MATROSKA) else None


def is_readable(kind: Kind) -> bool:
    """Whether its library is installed. It is not loaded here, nor anywhere in this process."""
    return importlib.util.find_spec(kind.library) is not None


def require_library(kind: Kind) -> None:
    """Raise RequestError where a kind's library is missing."""
    if kind.extra and not is_readable(kind):
        raise RequestError(
            f"A {kind.noun} cannot be read here: {kind.library} is not installed. Install "
            f"'flashdraft[{kind.extra}]', or send pictures instead."
        )
