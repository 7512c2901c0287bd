"""Length-prefixed frames of plain JSON, as our processes exchange them.

A frame is 4 bytes of big-endian length and that many bytes of JSON, one object with a "type". Bytes
that are no text (the pixels of pictures) follow the JSON in the same frame as they are: it begins
with a zero then, which no JSON does, and with the length of the JSON. What the messages mean is for
those who send them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from flashdraft.errors import FlashdraftError

MAX_FRAME_BYTES = 64 * 1024 * 1024
HEADER = struct.Struct(">I")
DATA = "data"  # the key under which a message that was read has the bytes sent with it
_WITH_DATA = b"\0"

Message = dict[str, Any]


class WireError(FlashdraftError):
    """Bytes that no end of the wire would send: it is broken, or somebody else is at the end."""


def pack(message: Mapping[str, Any], data: bytes | None = None) -> bytes:
    """A message as a frame, with the bytes that it is about."""
    # ASCII escapes carry any string, lone surrogates too
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode("ascii")
    if data is not None:
        body = b"".join((_WITH_DATA, HEADER.pack(len(body)), body, data))
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"A message has {len(body)} bytes; a frame holds {MAX_FRAME_BYTES}.")
    return HEADER.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """The length that a frame's header announces."""
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise WireError(f"A frame announces {length} bytes; the most is {MAX_FRAME_BYTES}.")
    return int(length)


def unpack(body: bytes) -> Message:
    """The message in a frame's body."""
    begin = len(_WITH_DATA) + HEADER.size
    if body.startswith(_WITH_DATA) and len(body) >= begin:
        end = begin + frame_length(body[len(_WITH_DATA) : begin])
        return {**_read(body[begin:end]), DATA: body[end:]}
    return _read(body)


def _read(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"A frame of {len(body)} bytes holds no JSON: {error}.") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise WireError("A frame holds no object with a type.")
    return message


class FrameReader:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Take more bytes; yield every message that is complete now."""
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            end = HEADER.size + frame_length(bytes(self._buffer[: HEADER.size]))
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            yield unpack(body)
