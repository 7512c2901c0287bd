"""Keeps an engine's process alive: starts it, watches it, starts it again when it dies or hangs.

A process that takes requests says something every second, whatever it computes. One that does not
is stopped, or hangs as a whole: that is told at once, but only after a long time is it killed, for
it may go on, and its requests with it.

It knows the lives of the process and nothing of requests: what the process says goes to `hear`, and
that a life has ended to `on_end`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from flashdraft.errors import EngineLostError, FlashdraftError
from flashdraft.killable.frames import Message, WireError
from flashdraft.server.process.life import EngineProcess
from flashdraft.server.process.wire import BEAT_S
from flashdraft.server.settings import ServerSettings
from flashdraft.server.telemetry.metrics import Metrics

SILENT_S = 3.0  # without a sign of life; one is missed where a call keeps the interpreter to itself
STOP_GRACE_S = 3.0  # for a process to end by itself
MAX_BACKOFF_S = 30.0

log = logging.getLogger(__name__)


class EngineState(StrEnum):
    """How the engine is, as /health says it."""

    STARTING = "starting"
    READY = "ready"
    UNRESPONSIVE = "unresponsive"
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"


class Supervisor:
    """The lives of one engine, one after the other."""

    def __init__(
        self,
        command: Sequence[str],
        arguments: Mapping[str, Any],
        settings: ServerSettings,
        metrics: Metrics,
        *,
        hear: Callable[[Message], None],
        on_end: Callable[[str], None],
        busy_since: Callable[[], float | None],
    ) -> None:
        self.detail = "The model is being loaded."  # why the state is what it is, for people
        self._command = tuple(command)
        self._arguments = dict(arguments)
        self._settings = settings
        self._metrics = metrics
        self._hear = hear
        self._on_end = on_end
        self._busy_since = busy_since  # when the engine last had a reason to make no step
        self._state = EngineState.STARTING
        self._is_draining = False
        self._process: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._was_ready = False
        self._heard_at = 0.0  # when the process last said anything
        self._end_reason: str | None = None  # where it is known better than from the exit code
        self._restarts_in_a_row = 0
        self.given_up = asyncio.Event()  # it has died too often

    @property
    def is_running(self) -> bool:
        """Whether requests may be sent to the process: in a drain too, and while it is silent."""
        return self._state in (EngineState.READY, EngineState.UNRESPONSIVE)

    @property
    def state(self) -> EngineState:
        return EngineState.DRAINING if self._is_draining else self._state

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return None if self._process is None else self._process.pid

    @property
    def num_unsent(self) -> int:
        """Bytes on their way to the process."""
        return 0 if self._process is None else self._process.num_unsent

    def send(self, message: Message, data: bytes | None = None) -> None:
        """Send to the process that lives now, if one does."""
        if self._process is not None:
            self._process.send(message, data)

    async def start(self) -> None:
        """Start the process and wait until it is ready; raises why it cannot be."""
        assert self._task is None, "started already"
        self._ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._supervise())
        await asyncio.shield(self._ready)

    def set_ready(self) -> None:
        """The process says that it takes requests."""
        self._was_ready = True
        self._metrics.engine_up.set(1)
        self._set_state(EngineState.READY, "The engine takes requests.")
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def set_failed(self, error: FlashdraftError) -> None:
        """The process says why it cannot load."""
        self._end_reason = str(error).rstrip(".")
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)

    def set_healthy(self) -> None:
        """The engine has done its work: its earlier ends no longer count against it."""
        self._restarts_in_a_row = 0

    def set_draining(self) -> None:
        """No life follows this one."""
        self._is_draining = True
        self.detail = "The server is shutting down and takes no more requests."

    async def stop(self) -> None:
        """End the process, gently if it lets itself."""
        self.set_draining()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineLostError(self.detail))
            self._ready.exception()  # nobody may be waiting for it any more

    def kill(self) -> None:
        """End the process without waiting for anything."""
        if self._process is not None:
            self._process.kill()

    async def _supervise(self) -> None:
        assert self._ready is not None
        while True:
            reason = await self._live()
            self._metrics.engine_up.set(0)
            may_restart = self._restarts_in_a_row < self._settings.max_restarts
            if self._is_draining or not self._was_ready or not may_restart:
                self._give_up(reason)
                return
            self._restarts_in_a_row += 1
            self._metrics.restarts.add(1)
            log.warning("the engine ended (%s); it is started again", reason)
            detail = f"The engine has ended ({reason}) and is being started again."
            self._set_state(EngineState.RESTARTING, detail)
            self._on_end(detail)
            await asyncio.sleep(min(MAX_BACKOFF_S, 0.25 * 2**self._restarts_in_a_row - 0.5))

    def _give_up(self, reason: str) -> None:
        """No life follows: say so to whoever waits, and where that was not wanted, in the log."""
        assert self._ready is not None
        detail = f"The engine has ended: {reason}."
        if self._was_ready and not self._is_draining:
            lives = self._restarts_in_a_row + 1
            detail = f"The engine has ended {lives} times in a row and is given up: {reason}."
            log.error("the engine has ended %d times in a row and is given up: %s", lives, reason)
            self.given_up.set()
        self._set_state(EngineState.FAILED, detail)
        if not self._ready.done():
            self._ready.set_exception(EngineLostError(self.detail))
        self._on_end(self.detail)

    async def _live(self) -> str:
        """One life of the process, from start to end; how it ended."""
        self._end_reason = None
        try:
            process = await EngineProcess.spawn(self._command, self._arguments)
        except OSError as error:
            return f"it cannot be started: {error}"
        self._process = process
        watchdog = asyncio.create_task(self._watch(process))
        grace_s = STOP_GRACE_S
        try:
            async for message in process.messages():
                self._note_sign_of_life()
                self._hear(message)
        except asyncio.CancelledError:
            if self._state is not EngineState.READY:
                grace_s = 0.0  # one that loads does not look at its socket for a long time
            raise
        except WireError as error:
            self._end_reason, grace_s = str(error).rstrip("."), 0.0
        except Exception as error:  # a mistake of ours must not leave a process behind
            log.exception("a message of the engine could not be handled")
            self._end_reason, grace_s = f"{type(error).__name__}: {error}", 0.0
        finally:
            watchdog.cancel()
            self._process = None
            how = await process.end(grace_s)
        return self._end_reason or how

    async def _watch(self, process: EngineProcess) -> None:
        """Tell of a process that is silent; kill one that is, or that makes no step, for too long.

        Silence is counted in pauses of ours, not by the clock: where the front itself is held up,
        what the process said meanwhile is read before the next one ends.
        """
        timeout = self._settings.engine_timeout_s
        pause, silent_s, heard_at = min(BEAT_S, timeout / 4), 0.0, 0.0
        while True:
            await asyncio.sleep(pause)
            if not self.is_running:
                continue
            silent_s = silent_s + pause if self._heard_at == heard_at else 0.0
            heard_at = self._heard_at
            if silent_s >= SILENT_S:
                self._set_silent(time.monotonic() - heard_at)
            since = self._busy_since()
            if silent_s >= max(timeout, SILENT_S):
                self._end_reason = f"it has not answered for {timeout:g} s"
            elif since is not None and time.monotonic() - since > timeout:
                self._end_reason = f"it made no step for {timeout:g} s"
            else:
                continue
            process.kill()
            return

    def _set_silent(self, seconds: float) -> None:
        detail = (
            f"The engine has not answered for {seconds:.0f} s: its process is stopped or hangs. "
            "Requests that are open go on when it does; after "
            f"{self._settings.engine_timeout_s:g} s it is started again."
        )
        if self._state is not EngineState.UNRESPONSIVE:
            self._metrics.engine_up.set(0)
            log.warning("the engine has not answered for %.0f s", seconds)
        self._set_state(EngineState.UNRESPONSIVE, detail)

    def _note_sign_of_life(self) -> None:
        self._heard_at = time.monotonic()
        if self._state is EngineState.UNRESPONSIVE:
            log.warning("the engine answers again")
            self.set_ready()

    def _set_state(self, state: EngineState, detail: str) -> None:
        self._state = state
        if not self._is_draining:
            self.detail = detail
