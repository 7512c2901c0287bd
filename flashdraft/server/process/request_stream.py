"""One request's events on their way from the engine's reader to whoever waits for them.

A step's event stays by itself while its reader keeps up. Once several wait they are joined, so that
a reader that is late, because its client is slow or because the front is busy, catches up with one
large piece instead of falling further behind.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from flashdraft.core import TokenEvent
from flashdraft.errors import FlashdraftError
from flashdraft.server.process.wire import History

MAX_SEPARATE = 8  # events that wait; later ones are joined to the last


class RequestStream:
    """A bounded mailbox with an end."""

    def __init__(self, request_id: str, max_tokens: int) -> None:
        self.id = request_id
        self.opened_at = time.monotonic()
        self.last_tokens_at: float | None = None
        self.has_ended = False  # the engine has nothing more to say
        self.timer: asyncio.TimerHandle | None = None
        self._max_tokens = max_tokens
        self._num_tokens = 0  # that wait
        self._history = History()
        self._events: deque[TokenEvent] = deque()
        self._failure: FlashdraftError | None = None
        self._news = asyncio.Event()

    def put(self, event: TokenEvent) -> bool:
        """Add an event; False, and everything that waits is dropped, if that is too much."""
        self._num_tokens += len(event.token_ids)
        if self._num_tokens > self._max_tokens:
            self._events.clear()
            return False
        event = self._history.complete(event)
        if len(self._events) < MAX_SEPARATE:
            self._events.append(event)
        else:
            self._events[-1] = joined(self._events[-1], event)
        self._news.set()
        return True

    def fail(self, error: FlashdraftError) -> None:
        """End with an error, after what has come already."""
        self._failure = error
        self._news.set()

    async def next(self) -> TokenEvent:
        """The next event, or the error."""
        while True:
            if self._events:
                event = self._events.popleft()
                self._num_tokens -= len(event.token_ids)
                return event
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            await self._news.wait()


def joined(first: TokenEvent, second: TokenEvent) -> TokenEvent:
    """Two events of one request, one after the other, as one."""
    logprobs, count = first.logprobs, len(first.token_ids)
    if logprobs is not None and second.logprobs is not None:
        logprobs += second.logprobs
    return TokenEvent(
        request_id=first.request_id,
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        drafted=first.drafted + second.drafted,
        logprobs=logprobs,
        generation=second.generation,
        pieces=first.pieces + second.pieces,
        trees=first.trees + tuple(one._replace(at=one.at + count) for one in second.trees),
    )
