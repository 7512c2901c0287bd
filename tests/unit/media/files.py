"""Pictures' files for the tests: whole ones and bad ones."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

from flashdraft.media.resampling import Bytes


def noise(width: int = 96, height: int = 72, bands: int = 3) -> Bytes:
    found = np.random.default_rng(width).integers(0, 256, (height, width, bands), np.uint8)
    return found


def encoded(image: Image.Image | Bytes, kind: str = "PNG", **settings: Any) -> bytes:
    if not isinstance(image, Image.Image):
        image = Image.fromarray(image)
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def png(width: int, height: int, depth: int, colour: int, lines: bytes) -> bytes:
    """A PNG whose header says what it is told to."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = {b"IHDR": header, b"IDAT": zlib.compress(lines, 9), b"IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts.items())


def bomb(width: int, height: int) -> bytes:
    """Black in one bit a pixel: next to nothing as a file."""
    return png(width, height, 1, 0, bytes((1 + (width + 7) // 8) * height))
