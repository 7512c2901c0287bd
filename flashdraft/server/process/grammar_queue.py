"""The queue of requests whose grammar is not compiled yet, in the engine's process.

Compiling may take a second, and the engine's steps do not wait for it: it is done in a thread. What
is ready is picked up between two steps; a socket tells the loop that there is something.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections import OrderedDict, deque
from typing import NamedTuple

from flashdraft.core import GrammarSpec, Request
from flashdraft.engine.sampling.grammar import TOO_COMPLEX, GrammarCompiler, GrammarTooComplexError
from flashdraft.errors import CapacityError, FlashdraftError

COMPILE_TIMEOUT_S = 10.0  # for one grammar; honest ones take a fraction of a second
NUM_THREADS = 2  # a grammar that takes long does not keep the others waiting
MAX_REMEMBERED = 16  # compiled grammars; fewer than the compiler keeps
MAX_STUCK = 2  # compilations that take longer and cannot be stopped

log = logging.getLogger(__name__)


class CompiledRequest(NamedTuple):
    """A request whose grammar is compiled, or why it cannot be."""

    request: Request
    arrived_at: float
    error: FlashdraftError | None


class GrammarQueue:
    """Requests whose grammars are compiled in threads, a few at a time."""

    def __init__(self, compiler: GrammarCompiler, timeout_s: float = COMPILE_TIMEOUT_S) -> None:
        self._compiler = compiler
        self._timeout_s = timeout_s
        self._stuck: list[threading.Thread] = []  # whose compilation took too long
        self._waiting: queue.SimpleQueue[tuple[Request, float] | None] = queue.SimpleQueue()
        self._ready: deque[CompiledRequest] = deque()
        self._cancelled: set[str] = set()  # ids, as long as they are in here
        self._request_ids: set[str] = set()  # of all that are in here
        self._readable, self._notifier = socket.socketpair()  # a byte for each that is ready
        self._readable.setblocking(False)
        self._lock = threading.Lock()  # of what the threads share: _stuck and _compiled
        self._compiled: OrderedDict[GrammarSpec, None] = OrderedDict()  # the last ones
        # daemon: a grammar that takes long must not keep the process from ending
        self._threads = [
            threading.Thread(target=self._work, daemon=True) for _ in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        """Readable when `take_ready` has something."""
        return self._readable.fileno()

    def has_compiled(self, spec: GrammarSpec) -> bool:
        """Whether the compiler still has a grammar, so that nobody need wait for it."""
        with self._lock:
            return spec in self._compiled

    def add(self, request: Request) -> None:
        """Take a request in; it comes out of `take_ready` when its grammar is compiled."""
        self._request_ids.add(request.id)
        self._waiting.put((request, time.monotonic()))

    def cancel(self, request_id: str) -> bool:
        """Forget a request; False if it is not in here."""
        if request_id not in self._request_ids:
            return False
        self._cancelled.add(request_id)
        return True

    def take_ready(self) -> list[CompiledRequest]:
        """The requests that are ready; those that were cancelled are not among them."""
        with contextlib.suppress(BlockingIOError):
            while self._readable.recv(4096):
                pass
        found = []
        while self._ready:
            one = self._ready.popleft()
            self._request_ids.discard(one.request.id)
            if one.request.id in self._cancelled:
                self._cancelled.discard(one.request.id)
            else:
                found.append(one)
        return found

    def close(self) -> None:
        """End the threads; what still waits is forgotten."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join(1.0)
        self._readable.close()
        self._notifier.close()

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            request, arrived_at = item
            error = None
            if request.grammar is not None and request.id not in self._cancelled:
                error = self._compile_in_time(request.grammar)
            self._ready.append(CompiledRequest(request, arrived_at, error))
            with contextlib.suppress(OSError):  # the loop has ended meanwhile
                self._notifier.send(b"!")

    def _compile_in_time(self, spec: GrammarSpec) -> FlashdraftError | None:
        """Compile a grammar, which the compiler keeps for the engine; why it cannot be, if so.

        Native code cannot be interrupted: what takes too long is left to itself, and few may be.
        """
        with self._lock:
            self._stuck = [thread for thread in self._stuck if thread.is_alive()]
            num_stuck = len(self._stuck)
        if num_stuck >= MAX_STUCK:
            return CapacityError("Grammars of earlier requests take very long; try again later.")
        errors: list[FlashdraftError] = []
        thread = threading.Thread(target=self._compile, args=(spec, errors), daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if not thread.is_alive():
            if not errors:
                self._remember(spec)
            return errors[0] if errors else None
        with self._lock:
            self._stuck.append(thread)
        return GrammarTooComplexError(
            f"{TOO_COMPLEX}: compiling it takes longer than {self._timeout_s:g} s."
        )

    def _remember(self, spec: GrammarSpec) -> None:
        with self._lock:
            self._compiled[spec] = None
            self._compiled.move_to_end(spec)
            if len(self._compiled) > MAX_REMEMBERED:
                self._compiled.popitem(last=False)

    def _compile(self, spec: GrammarSpec, errors: list[FlashdraftError]) -> None:
        try:
            self._compiler(spec)
        except FlashdraftError as refusal:
            errors.append(refusal)
        except Exception as mistake:  # of our own, yet this request's alone
            log.exception("a grammar could not be compiled")
            errors.append(
                FlashdraftError(
                    f"The grammar could not be compiled ({type(mistake).__name__}); the server's "
                    "log says how. Send it again, or make it simpler."
                )
            )
