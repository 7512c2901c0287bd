"""What both ends of the text process agree on: limits, a file's identity, and ids on their way.

Token ids cross as 4 bytes each, in text that JSON can carry: a list of a million numbers in JSON
takes a reader a tenth of a second that no other thread gets.
"""

from __future__ import annotations

import base64
import os
from array import array
from collections.abc import Sequence

MAX_CHARS = 8_000_000  # of what a template writes
_KIND = "I"


def identity(path: str) -> list[int]:
    """What changes when a file is written or replaced."""
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def pack_ids(ids: Sequence[int]) -> str:
    """Token ids as text."""
    return base64.b64encode(array(_KIND, ids).tobytes()).decode("ascii")


def unpack_ids(text: str) -> list[int]:
    """The token ids of such a text."""
    return array(_KIND, base64.b64decode(text)).tolist()
