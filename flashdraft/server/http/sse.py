"""Streams of events, or of lines: when they begin, how they fail, and that they always end.

A stream waits a moment for its first part before it answers at all, so that what the engine refuses
at once (a full queue, a prompt that is too long) still gets its own status. Later failures become
an event of the stream. Whatever ends the response, the requests behind it are closed with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import anyio
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from flashdraft.server.http.disconnect import run_until_disconnect
from flashdraft.server.http.errors import ApiError, as_api_error, json_text
from flashdraft.server.telemetry.logs import current_record

PATIENCE_S = 2.0  # for the first part, before the status line is sent
KEEP_ALIVE_S = 15.0  # of silence; proxies close idle connections after a minute or less
KEEP_ALIVE = ": keep-alive\n\n"
SSE = "text/event-stream"
DONE = "data: [DONE]\n\n"

T = TypeVar("T")


def sse(data: Any, event: str | None = None) -> str:
    """One server-sent event."""
    text = json_text(data)
    return f"data: {text}\n\n" if event is None else f"event: {event}\ndata: {text}\n\n"


class ReadAhead(Generic[T]):
    """An async generator read one item ahead; None stands for a long silence."""

    def __init__(self, source: AsyncGenerator[T]) -> None:
        self._source = source
        self._next: asyncio.Task[T] | None = None

    async def first(self) -> None:
        """Wait for the first item, but not for ever; raises what the source raises."""
        task = self._pending()
        try:
            await asyncio.wait({task}, timeout=PATIENCE_S)
            if task.done() and task.exception() is not None:
                task.result()
        except BaseException:
            await self.aclose()
            raise

    def __aiter__(self) -> AsyncIterator[T | None]:
        return self

    async def __anext__(self) -> T | None:
        task = self._pending()
        done, _ = await asyncio.wait({task}, timeout=KEEP_ALIVE_S)
        if not done:
            return None
        self._next = None
        return task.result()

    async def aclose(self) -> None:
        """Close the source, also in the middle of an item."""
        if self._next is not None:
            self._next.cancel()
            with contextlib.suppress(BaseException):
                await self._next
        await self._source.aclose()

    def _pending(self) -> asyncio.Task[T]:
        if self._next is None:
            self._next = asyncio.ensure_future(self._pull())
        return self._next

    async def _pull(self) -> T:
        return await anext(self._source)


class EventStream(StreamingResponse):
    """A response of events; closes what feeds it however it ends."""

    def __init__(self, events: AsyncIterator[str], source: ReadAhead[Any], media_type: str) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type=media_type, headers=headers)
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await self._source.aclose()


async def open_stream(
    request: Request,
    parts: AsyncGenerator[T],
    write: Callable[[AsyncIterator[T | None]], AsyncIterator[str]],
    failure: Callable[[ApiError], str],
    media_type: str = SSE,
) -> EventStream:
    """The streamed answer: `write` makes events of parts, `failure` makes the last one of an error.

    Raises what is refused before the stream has begun.
    """
    source = ReadAhead(parts)
    await run_until_disconnect(request, source.first())
    return EventStream(_guarded(write(source), failure), source, media_type)


async def _guarded(
    events: AsyncIterator[str], failure: Callable[[ApiError], str]
) -> AsyncGenerator[str]:
    try:
        async for event in events:
            yield event
    except Exception as error:
        told = as_api_error(error)
        record = current_record()
        if record is not None:  # the status that was sent says nothing of it
            record.is_broken, record.error = True, told.code or f"status {told.status}"
        yield failure(told)
