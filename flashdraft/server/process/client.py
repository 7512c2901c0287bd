"""The front's end of the wire: requests go in, their events come out, whatever the engine does.

It holds the requests and counts what becomes of them; the engine's process is kept alive by
supervisor.py. It knows no HTTP. All of it runs in one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashdraft.core import Request, TokenEvent
from flashdraft.engine.sampling.grammar import GrammarTooComplexError
from flashdraft.errors import (
    CapacityError,
    CheckpointError,
    ContextLengthError,
    EngineLostError,
    FlashdraftError,
    ModelNotFoundError,
    QueueFullError,
    RequestError,
    UnsupportedModelError,
)
from flashdraft.killable.frames import Message, WireError
from flashdraft.server.process.life import WORKER_COMMAND
from flashdraft.server.process.queue_places import QueuePlaces, ReservedPlaces
from flashdraft.server.process.request_stream import RequestStream
from flashdraft.server.process.supervisor import EngineState, Supervisor
from flashdraft.server.process.wire import (
    Vision,
    event_from_dict,
    step_from_dict,
    submissions,
    vision_from_dict,
)
from flashdraft.server.settings import ServerSettings
from flashdraft.server.telemetry.logs import current_record
from flashdraft.server.telemetry.metrics import Metrics

__all__ = ["EngineClient", "EngineInfo", "EngineLostError", "EngineState", "QueueFullError"]

LAST_WORD_S = 2.0  # for responses to say that the server stops
FIRST_GUESS_S = 10.0  # of an answer's duration, before any was seen
MAX_RETRY_AFTER_S = 60.0
MAX_UNSENT_BYTES = 128 * 1024 * 1024  # on the way to the engine; then it gets no more pictures
RESTART_S = 5.0  # after which a client may try again when the engine was lost

_ERRORS = {
    kind.__name__: kind
    for kind in (
        RequestError,
        ContextLengthError,
        GrammarTooComplexError,
        CapacityError,
        ModelNotFoundError,
        UnsupportedModelError,
        CheckpointError,
    )
}


@dataclass(frozen=True)
class EngineInfo:
    """What the engine's process said of the model it loaded."""

    model: str
    drafter: str | None
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str
    generation_config: dict[str, Any]
    supports_grammar: bool
    max_batch: int = 1
    vision: Vision | None = None  # None: it takes no pictures


class EngineClient:
    """Requests for an engine in another process."""

    def __init__(
        self,
        llm_arguments: Mapping[str, Any],
        settings: ServerSettings,
        metrics: Metrics | None = None,
        *,
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        self.settings = settings
        self.metrics = metrics or Metrics()
        self._info: EngineInfo | None = None
        self._streams: dict[str, RequestStream] = {}
        self._places = QueuePlaces()
        self._idle = asyncio.Event()
        self._idle.set()
        self._last_step_at = 0.0
        self._mean_duration_s = FIRST_GUESS_S
        self._supervisor = Supervisor(
            command,
            llm_arguments,
            settings,
            self.metrics,
            hear=self._hear,
            on_end=self._lose,
            busy_since=self._busy_since,
        )

    # -- how it is -----------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        return self._supervisor.state

    @property
    def detail(self) -> str:
        """Why the state is what it is, for people."""
        return self._supervisor.detail

    @property
    def info(self) -> EngineInfo:
        """The loaded model; EngineLostError before it was loaded for the first time."""
        if self._info is None:
            raise EngineLostError(self.detail, RESTART_S)
        return self._info

    @property
    def num_open(self) -> int:
        """Requests whose consumers are not done with them."""
        return len(self._streams)

    @property
    def pid(self) -> int | None:
        """The engine's process, while there is one."""
        return self._supervisor.pid

    # -- requests ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reserve(self, count: int) -> Iterator[ReservedPlaces]:
        """Places for answers that are asked for together: all of them, or QueueFullError."""
        if self.state is not EngineState.READY:
            raise EngineLostError(self.detail, RESTART_S)
        taken, most = self._places.num_taken, self.settings.max_queue
        if taken + count > most + self.info.max_batch:
            more = f", and this one needs {count} places" if count > 1 else ""
            raise QueueFullError(
                f"{taken} requests are running or waiting{more}; no more than {most} may wait. "
                "Try again later.",
                self._retry_after(),
            )
        try:
            with self._places.reserve(count) as reserved:
                self._idle.clear()
                yield reserved
        finally:
            self._note_idle()

    async def generate(
        self, request: Request, reserved: ReservedPlaces | None = None
    ) -> AsyncGenerator[TokenEvent]:
        """A request's events; the last one carries its generation. Closing it cancels the request.

        The first `anext` submits the request. It or a later one raises RequestError,
        QueueFullError, CapacityError or EngineLostError. Whoever has reserved places passes them.
        """
        with self.reserve(1) if reserved is None else contextlib.nullcontext():
            async with contextlib.aclosing(self._events(request)) as events:
                async for event in events:
                    yield event

    async def _events(self, request: Request) -> AsyncGenerator[TokenEvent]:
        stream = self._open(request)
        try:
            while True:
                event = await stream.next()
                if event.generation is not None:
                    record = current_record()
                    if record is not None:
                        record.generations.append(event.generation)
                        record.ttft_s = record.ttft_s or event.generation.stats.ttft_s
                yield event
                if event.generation is not None:
                    return
        finally:
            self._close(stream)

    def _open(self, request: Request) -> RequestStream:
        if not self._supervisor.is_running:  # one with reserved places is answered in a drain too
            raise EngineLostError(self.detail, RESTART_S)
        if request.id in self._streams:
            raise RequestError(f"A request with id {request.id!r} is already running.")
        if len(request.prompt_ids) >= self.info.max_context:  # too long even to send
            raise ContextLengthError(
                f"The prompt has {len(request.prompt_ids)} tokens; the context holds "
                f"{self.info.max_context} with at least one for the answer. Shorten the prompt."
            )
        if request.pictures and self._supervisor.num_unsent > MAX_UNSENT_BYTES:
            raise CapacityError("The engine is behind with earlier pictures; try again later.")
        stream = RequestStream(request.id, self.settings.max_buffered_tokens)
        for message, data in submissions(request):
            self._supervisor.send(message, data)
        self._streams[request.id] = stream
        timeout = self.settings.request_timeout_s
        stream.timer = asyncio.get_running_loop().call_later(timeout, self._expire, stream)
        return stream

    def _close(self, stream: RequestStream) -> None:
        if self._streams.get(stream.id) is stream:
            del self._streams[stream.id]
        self._abandon(stream)
        if stream.timer is not None:
            stream.timer.cancel()
        self._note_idle()

    def _note_idle(self) -> None:
        """A request with reserved places may be between two of its answers."""
        if not self._streams and not self._places.num_taken:
            self._idle.set()

    def _abandon(self, stream: RequestStream) -> None:
        """Nobody wants the rest: the engine need not compute it."""
        if not stream.has_ended:
            self._supervisor.send({"type": "cancel", "id": stream.id})
        stream.has_ended = True

    def _expire(self, stream: RequestStream) -> None:
        if not stream.has_ended:
            limit = self.settings.request_timeout_s
            self._break_off(stream, CapacityError(f"The answer took longer than {limit:g} s."))

    def _break_off(self, stream: RequestStream, error: FlashdraftError) -> None:
        self._abandon(stream)
        stream.fail(error)

    def _retry_after(self) -> float:
        """Seconds until those that wait now have begun: answers take as long as earlier ones did,
        and as those that run have taken already."""
        batch, now = self.info.max_batch, time.monotonic()
        waiting = max(1, self._places.num_taken - batch)
        ages = sorted((now - one.opened_at for one in self._streams.values()), reverse=True)[:batch]
        duration = max(self._mean_duration_s, sum(ages) / max(1, len(ages)))
        return min(MAX_RETRY_AFTER_S, max(1.0, duration * waiting / batch))

    # -- what the engine says ------------------------------------------------------------------

    def _hear(self, message: Message) -> None:
        try:
            if message["type"] == "step":
                self._hear_step(message)
            elif message["type"] == "refused":
                stream = self._streams.get(message["id"])
                if stream is not None:
                    stream.has_ended = True
                    stream.fail(_error_of(message))
            elif message["type"] == "ready":
                self._hear_ready(message)
            elif message["type"] == "failed":
                self._supervisor.set_failed(_error_of(message))
            elif message["type"] not in ("loading", "alive"):
                raise WireError(f"The engine sends a message of type {message['type']!r}.")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WireError(f"A message cannot be read: {type(error).__name__}: {error}") from None

    def _hear_ready(self, message: Message) -> None:
        info = dict(message["info"])
        info["eos_token_ids"] = tuple(info["eos_token_ids"])
        if info.get("vision") is not None:
            info["vision"] = vision_from_dict(info["vision"])
        self._info = EngineInfo(**info)
        self.metrics.observe_gauges(message["gauges"])
        self._last_step_at = time.monotonic()
        self._supervisor.set_ready()

    def _hear_step(self, message: Message) -> None:
        now = self._last_step_at = time.monotonic()
        self.metrics.observe_step(step_from_dict(message["stats"]), message["gauges"])
        for request_id, seconds in message["started"]:
            if request_id in self._streams:
                self.metrics.queue_time.observe(float(seconds))
        for content in message["events"]:
            event = event_from_dict(content)
            self.metrics.observe_event(event)
            stream = self._streams.get(event.request_id)
            if stream is not None and not stream.has_ended:
                self._deliver(stream, event, now)

    def _deliver(self, stream: RequestStream, event: TokenEvent, now: float) -> None:
        if event.token_ids and stream.last_tokens_at is None:
            self.metrics.ttft.observe(now - stream.opened_at)
        elif event.token_ids and stream.last_tokens_at is not None:
            count = len(event.token_ids)
            self.metrics.inter_token.observe((now - stream.last_tokens_at) / count, count)
        if event.token_ids:
            stream.last_tokens_at = now
        if event.generation is not None:
            stream.has_ended = True
            self._supervisor.set_healthy()
            duration = now - stream.opened_at
            self.metrics.duration.observe(duration)
            self._mean_duration_s += 0.1 * (duration - self._mean_duration_s)
        if not stream.put(event):
            self._break_off(
                stream,
                CapacityError(
                    f"The client left {self.settings.max_buffered_tokens} tokens of the answer "
                    "unread; the request was cancelled."
                ),
            )

    def _busy_since(self) -> float | None:
        """Since when the engine owes a step; None while there is no work."""
        unfinished = [s.opened_at for s in self._streams.values() if not s.has_ended]
        return max(self._last_step_at, min(unfinished)) if unfinished else None

    def _lose(self, why: str) -> None:
        for stream in list(self._streams.values()):
            if not stream.has_ended:
                stream.has_ended = True
                stream.fail(EngineLostError(why, RESTART_S))

    # -- begin and end -------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine and wait until it is ready; raises why it cannot be."""
        await self._supervisor.start()

    async def wait_given_up(self) -> str:
        """Wait until the engine has died so often that it is not started again; say why."""
        await self._supervisor.given_up.wait()
        return self.detail

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests; let the running ones end, and cancel what is left at the end."""
        self._supervisor.set_draining()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        for stream in list(self._streams.values()):
            if not stream.has_ended:
                self._break_off(stream, EngineLostError(self.detail))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                await self._idle.wait()

    async def stop(self) -> None:
        """End the engine's process; open requests hear of it."""
        await self._supervisor.stop()
        self._lose(self.detail)

    def kill(self) -> None:
        """End the engine's process without waiting for anything."""
        self._supervisor.kill()


def _error_of(message: Mapping[str, Any]) -> FlashdraftError:
    """The error that the engine's process met, of the same class where clients care."""
    kind = _ERRORS.get(str(message["kind"]), FlashdraftError)
    return kind(str(message["message"]))
