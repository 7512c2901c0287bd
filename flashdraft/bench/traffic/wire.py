"""One streamed question over asyncio: many are in flight in one thread, each with its own clock.

HTTP/1.1 by hand, one connection a question: nothing to install, and little between the clock and
the wire. Whatever a server sends, a question ends within its time limit.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from flashdraft.bench.run.stream import (
    ALIVE_S,
    AnswerError,
    Endpoint,
    StreamedAnswer,
    events_of,
    refusal,
)
from flashdraft.errors import EngineLostError

PATH = "/v1/chat/completions"
MAX_LINE = 1 << 20  # bytes of one event, or of a head's line
MAX_HEAD_LINES = 200
MAX_REFUSAL = 1 << 16  # bytes that are read of an answer other than 200
_READ = 1 << 16


@dataclass(frozen=True)
class Door:
    """Where a server's socket is: its address is looked up once, not for every question."""

    endpoint: Endpoint
    host: str  # as the URL names it
    address: str
    port: int
    path: str
    context: ssl.SSLContext | None

    @classmethod
    def find(cls, endpoint: Endpoint) -> Door:
        """Look the address up, and take the first one that answers."""
        parts = urlsplit(endpoint.url)
        host, is_secure = parts.hostname or "", parts.scheme == "https"
        port = parts.port or (443 if is_secure else 80)
        context = ssl.create_default_context() if is_secure else None
        reason = "it has no address"
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            found, reason = [], error.strerror or str(error)
        for address in (str(one[4][0]) for one in found):
            try:
                socket.create_connection((address, port), timeout=ALIVE_S).close()
            except OSError as error:
                reason = error.strerror or str(error)
                continue
            return cls(endpoint, host, address, port, parts.path + PATH, context)
        raise EngineLostError(
            f"{endpoint.url} cannot be reached ({reason}); is the server running there?"
        )

    async def ask(self, body: Mapping[str, Any], limit_s: float) -> StreamedAnswer:
        """One streamed answer to its end. AnswerError, BusyError or RequestError if none comes."""
        answer = StreamedAnswer()
        try:
            async with asyncio.timeout(limit_s):
                await self._exchange(json.dumps(body).encode(), answer)
        except TimeoutError:
            raise AnswerError(f"no whole answer within {limit_s:g} s") from None
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise AnswerError(f"the connection broke ({reason})") from None
        if not answer.is_complete:
            raise AnswerError("the stream stopped before its end")
        return answer

    async def _exchange(self, payload: bytes, answer: StreamedAnswer) -> None:
        reader, writer = await asyncio.open_connection(
            self.address,
            self.port,
            ssl=self.context,
            server_hostname=self.host if self.context is not None else None,
            limit=MAX_LINE,
        )
        try:
            writer.write(self._head(len(payload)) + payload)
            await writer.drain()
            status, headers = await _read_head(reader)
            body = _Body(reader, headers)
            if status != 200:
                raise refusal(status, await body.beginning(), headers.get("retry-after"))

            def take(line: bytes) -> bool:
                for event in events_of(line):
                    answer.add(event)
                return answer.is_complete

            await body.lines(take)
        finally:
            writer.transport.abort()  # a server that does not close must not be waited for

    def _head(self, length: int) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Accept: text/event-stream, application/json",
            "Content-Type: application/json",
            f"Content-Length: {length}",
            "Connection: close",
        ]
        if self.endpoint.api_key is not None:
            lines.append(f"Authorization: Bearer {self.endpoint.api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "replace")


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """The status, and the headers by their names in small letters."""
    first = (await _line(reader)).split(maxsplit=2)
    if len(first) < 2 or not first[0].startswith(b"HTTP/") or not first[1].isdigit():
        raise AnswerError(f"the answer is no HTTP: {b' '.join(first)[:80]!r}")
    headers: dict[str, str] = {}
    for _ in range(MAX_HEAD_LINES):
        line = (await _line(reader)).strip()
        if not line:
            return int(first[1]), headers
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    raise AnswerError(f"the answer's head has more than {MAX_HEAD_LINES} lines")


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        line = await reader.readline()
    except ValueError:
        raise AnswerError(f"the answer has a line of more than {MAX_LINE} bytes") from None
    if not line:
        raise AnswerError("the connection ended before the answer")
    return line


class _Body:
    """An answer's body as it comes, without the marks of its transfer."""

    def __init__(self, reader: asyncio.StreamReader, headers: Mapping[str, str]) -> None:
        self._reader = reader
        self._is_chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length", "")
        self._left = int(length) if length.isdecimal() else None  # of the body, or of a chunk
        self._left = 0 if self._is_chunked else self._left
        self._is_first = True

    async def piece(self) -> bytes:
        """What has come since; empty at the end."""
        if self._is_chunked and self._left == 0:
            self._left = await self._next_size()
        if self._left == 0:
            return b""
        data = await self._reader.read(_READ if self._left is None else min(_READ, self._left))
        self._left = None if self._left is None else self._left - len(data)
        return data

    async def _next_size(self) -> int:
        if not self._is_first:
            await _line(self._reader)  # the end of the chunk before
        self._is_first = False
        size = (await _line(self._reader)).partition(b";")[0].strip()
        try:
            return max(0, int(size, 16))
        except ValueError:
            raise AnswerError(f"the answer has a chunk of size {size[:20]!r}") from None

    async def lines(self, take: Callable[[bytes], bool]) -> None:
        """Hand over every line as soon as it is whole, until one is the last."""
        rest = b""
        while piece := await self.piece():
            *whole, rest = (rest + piece).split(b"\n")
            if any(map(take, whole)):
                return
            if len(rest) > MAX_LINE:
                raise AnswerError(f"the answer has a line of more than {MAX_LINE} bytes")
        take(rest)

    async def beginning(self) -> str:
        """As much of the body as a message needs."""
        found = b""
        while len(found) < MAX_REFUSAL and (piece := await self.piece()):
            found += piece
        return found.decode("utf-8", "replace")
