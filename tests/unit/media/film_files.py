"""Films and PDF documents for the tests, whole ones and bad ones."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np

from flashdraft.media.resampling import Bytes

FORMATS = {  # of a file, and what its frames are coded with
    "mp4": ("mp4", "h264"),
    "mov": ("mov", "mjpeg"),
    "webm": ("webm", "libvpx-vp9"),
    "mkv": ("matroska", "mpeg4"),
    "hevc": ("mp4", "hevc"),
    "av1": ("mp4", "libsvtav1"),
    "vp8": ("webm", "libvpx"),
}


def grey(level: int, width: int = 96, height: int = 72) -> Bytes:
    return np.full((height, width, 3), level, np.uint8)


def film(
    frames: Sequence[Bytes] | int = 40,
    kind: str = "mp4",
    fps: int | Fraction = 10,
    *,
    with_sound: bool = False,
) -> bytes:
    """A film of these frames; of so many, each lighter than the one before, if it is a number."""
    if isinstance(frames, int):
        frames = [grey(int(250 * i / max(1, frames - 1))) for i in range(frames)]
    file = io.BytesIO()
    wrapper, codec = FORMATS[kind]
    with av.open(file, "w", format=wrapper) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width = frames[0].shape[:2]
        stream.bit_rate = 2_000_000
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        sound = container.add_stream("aac", rate=48_000) if with_sound else None
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
        if sound is not None:
            _add_silence(container, sound)
    return file.getvalue()


def noise_film(count: int = 6) -> bytes:
    chance = np.random.default_rng(count)
    return film(list(chance.integers(0, 256, (count, 72, 96, 3), np.uint8)))


def sound_alone() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        _add_silence(container, container.add_stream("aac", rate=48_000))
    return file.getvalue()


def _add_silence(container: Any, stream: Any) -> None:
    for _ in range(20):
        frame = av.AudioFrame.from_ndarray(np.zeros((2, 1024), np.float32), "fltp", "stereo")
        frame.sample_rate = 48_000
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


def pdf(
    sizes: Sequence[tuple[float, float]] = ((300, 400),),
    contents: Sequence[bytes] = (),
    more: bytes = b"",
    trailer: bytes = b"",
) -> bytes:
    """A document of one page for each size in points; what it draws, in PDF's own words."""
    pages, first = len(sizes), 3
    kids = b" ".join(b"%d 0 R" % (first + 2 * i) for i in range(pages))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R " + more + b">>",
        b"<< /Type /Pages /Count %d /Kids [" % pages + kids + b"] >>",
    ]
    for i, (width, height) in enumerate(sizes):
        drawn = contents[i] if i < len(contents) else b""
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 %s %s] /Contents %d 0 R >>"
            % (f"{width:.6f}".encode(), f"{height:.6f}".encode(), first + 2 * i + 1)
        )
        objects.append(b"<< /Length %d >>\nstream\n" % len(drawn) + drawn + b"\nendstream")
    file, places = bytearray(b"%PDF-1.7\n"), []
    for number, one in enumerate(objects, 1):
        places.append(len(file))
        file += b"%d 0 obj\n" % number + one + b"\nendobj\n"
    begin = len(file)
    file += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    file += b"".join(b"%010d 00000 n \n" % place for place in places)
    file += b"trailer\n<< /Size %d /Root 1 0 R " % (len(objects) + 1) + trailer + b">>\n"
    return bytes(file + b"startxref\n%d\n%%%%EOF\n" % begin)


def filled(red: float, green: float, blue: float, box: str = "0 0 5000 5000") -> bytes:
    """What draws a rectangle of a colour."""
    return f"{red} {green} {blue} rg {box} re f".encode()


# what says that a document opens with a password alone: no password gives these keys
ENCRYPTED = (
    b"/Encrypt << /Filter /Standard /V 2 /R 3 /Length 128 /P -44 /O <"
    + b"61" * 32
    + b"> /U <"
    + b"62" * 32
    + b"> >> /ID [<"
    + b"63" * 16
    + b"> <"
    + b"63" * 16
    + b">] "
)
