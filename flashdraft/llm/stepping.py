"""A thread that steps an engine for tasks of any event loops, and what it hands them.

Tasks put commands into a queue that is safe to use from anywhere, also from the garbage collector;
the thread puts events into their mailboxes. Nobody ever waits for a lock here. Whatever ends the
thread, everybody who waits is told.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from flashdraft.core import Request, TokenEvent
from flashdraft.engine.engine import Engine
from flashdraft.errors import EngineLostError, FlashdraftError

log = logging.getLogger(__name__)


class Mailbox:
    """Events for one task, in order. Holds no more than the answers themselves are long."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[TokenEvent | Exception] = deque()
        self._arrived = asyncio.Event()
        self._is_called = False  # the loop has been told, and has not looked yet

    def put(self, item: TokenEvent | Exception) -> bool:
        """Leave something, from any thread; False if the loop is closed, and nobody will come."""
        if self._loop.is_closed():
            return False
        self._items.append(item)
        if self._is_called:
            return True
        self._is_called = True
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:
            return False
        return True

    async def get(self) -> TokenEvent:
        """The next event, once it is there. Raises what was put for an error."""
        while not self._items:
            self._arrived.clear()
            self._is_called = False
            if not self._items:  # what came before that has set nothing
                await self._arrived.wait()
        item = self._items.popleft()
        if isinstance(item, Exception):
            raise item
        return item


class _Submit(NamedTuple):
    requests: Sequence[Request]
    mailbox: Mailbox


class _Cancel(NamedTuple):
    request_ids: Sequence[str]


class _Close(NamedTuple):
    pass


class EngineThread:
    """The thread, started with the first request."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._commands: queue.SimpleQueue[_Submit | _Cancel | _Close] = queue.SimpleQueue()
        self._mailboxes: dict[str, Mailbox] = {}  # the thread's own
        self._thread = threading.Thread(target=self._run, name="flashdraft-engine", daemon=True)
        self._starting = threading.Lock()
        self._ended: EngineLostError | None = None  # why no more requests are taken

    def submit(self, requests: Sequence[Request], mailbox: Mailbox) -> None:
        """Ask; what comes of it, also a refusal, comes into the mailbox."""
        with self._starting:
            if self._thread.ident is None and self._ended is None:
                self._thread.start()
        self._commands.put(_Submit(requests, mailbox))
        if self._ended is not None:  # who ends it looks once more, but maybe before this came
            self._refuse_all(self._ended)

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Let go of requests; those that have ended are no matter. Safe wherever it is called."""
        self._commands.put(_Cancel(request_ids))

    def close(self) -> None:
        """End everything; return when the thread has ended."""
        self._commands.put(_Close())
        with self._starting:
            if self._thread.ident is None:
                self._end(EngineLostError("The AsyncLLM is closed; make a new one."))
                return
        if self._thread is not threading.current_thread():
            self._thread.join()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        why = "The AsyncLLM is closed; make a new one."
        try:
            while self._obey():
                self._step()
        except BaseException as error:
            log.exception("the engine's thread has failed")
            why = f"The engine has failed ({type(error).__name__}: {error}); make a new AsyncLLM."
        finally:
            self._end(EngineLostError(why))

    def _end(self, why: EngineLostError) -> None:
        self._ended = why
        self._engine = None
        for mailbox in set(self._mailboxes.values()):
            mailbox.put(why)
        self._mailboxes.clear()
        self._refuse_all(why)

    def _refuse_all(self, why: EngineLostError) -> None:
        """Tell everybody whose requests were not taken any more."""
        while (command := self._next_command(is_waiting=False)) is not None:
            if isinstance(command, _Submit):
                command.mailbox.put(why)

    def _obey(self) -> bool:
        """Take all commands; while there is no work, wait for one. False at the end."""
        assert self._engine is not None
        while (command := self._next_command(not self._engine.has_work)) is not None:
            match command:
                case _Submit():
                    self._submit(command)
                case _Cancel():
                    for request_id in command.request_ids:
                        if self._mailboxes.pop(request_id, None) is not None:
                            self._engine.cancel(request_id)
                case _Close():
                    return False
        return True

    def _next_command(self, is_waiting: bool) -> _Submit | _Cancel | _Close | None:
        try:
            return self._commands.get(block=is_waiting)
        except queue.Empty:
            return None

    def _submit(self, command: _Submit) -> None:
        assert self._engine is not None
        for request in command.requests:
            try:
                self._engine.submit(request)
            except Exception as error:  # this task's alone; it cancels the rest of its requests
                command.mailbox.put(error)
                return
            self._mailboxes[request.id] = command.mailbox

    def _step(self) -> None:
        assert self._engine is not None
        try:
            events = self._engine.step()
        except Exception as error:  # the engine could not go on by itself: begin with nobody
            log.exception("a step failed, and the engine could not go on by itself")
            why = FlashdraftError(f"The engine failed: {type(error).__name__}: {error}; ask again.")
            for mailbox in set(self._mailboxes.values()):
                mailbox.put(why)
            self._mailboxes.clear()
            self._engine.cancel_all()
            return
        for event in events:
            self._deliver(event)

    def _deliver(self, event: TokenEvent) -> None:
        assert self._engine is not None
        mailbox = self._mailboxes.get(event.request_id)
        if mailbox is None:  # it was let go of
            return
        if event.generation is not None:
            del self._mailboxes[event.request_id]
        if not mailbox.put(event) and event.generation is None:
            del self._mailboxes[event.request_id]
            self._engine.cancel(event.request_id)
