"""A few processes, each with one question at a time, killed when they use more than they may.

Our end. What is asked and answered is the caller's; the other end keeps its own limits (child.py)
and this one the clock on the wall. Threads share a pool; a fork starts with processes of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, TypeVar

from flashdraft.children import module_command, python_environment
from flashdraft.errors import CapacityError, FlashdraftError, shortened
from flashdraft.killable.frames import HEADER, Message, WireError, frame_length, pack, unpack

log = logging.getLogger(__name__)

MIB = 1024 * 1024
_RECEIVE_BYTES = 1 << 18
_WORDS_BYTES = 1 << 16  # what a pipe holds
_MIN_WALL_S = 20.0  # a busy machine may keep a process waiting
_WALL_PER_CPU = 5.0
_END_S = 1.0  # from the end of its socket to that of a process
# What a child needs of our environment. Keys and tokens are not among it.
_ENVIRONMENT = {
    *("PATH", "LANG", "LC_ALL", "LC_TIME", "TZ", "LD_LIBRARY_PATH"),
    *("PYTHONHOME", "PYTHONPATH", "PYTHONSAFEPATH"),
    *("HOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE"),  # what is installed for one user alone
}
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Limits:
    """What one question may use."""

    cpu_s: float
    memory_mib: int  # beyond what the process had before


class First(NamedTuple):
    """What every process is told first, and what that may use."""

    message: Mapping[str, Any]
    limits: Limits


class ProcessStoppedError(FlashdraftError):
    """A process was stopped, or ended, before it had answered. The message ends a sentence."""


class _KilledError(ProcessStoppedError):
    """The system, or a person, has killed a process."""


class RefusedError(FlashdraftError):
    """A process says that it cannot answer: `kind` is for the caller, the message for people."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class FirstError(FlashdraftError):
    """A process did not take its first message: no question is at fault.

    `kind` is that of its refusal, "limit" where it was stopped. The message ends a sentence.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class StartError(FlashdraftError):
    """A process ended by itself before it had taken anything: it cannot run here."""


class ProcessPool:
    """Processes that run a module with a descriptor; `first` gives the first message of each.

    `work` is what they do, for messages: "tokenizes".
    """

    def __init__(
        self, module: str, first: Callable[[], First], *, work: str, size: int = 2
    ) -> None:
        assert size >= 2, "a process that is killed must leave another one"
        self.size = size
        self._module = module
        self._first = first
        self._work = work
        self._is_closed = False
        self._is_warm = False
        self._all: set[_Process] = set()
        self._reset()
        _POOLS.add(self)
        weakref.finalize(self, _end_all, self._all)

    def _reset(self) -> None:
        self._free = threading.Condition()
        self._long = threading.BoundedSemaphore(self.size - 1)
        self._idle: list[_Process] = []
        self._num = 0  # processes that are there or being started

    def ask(
        self,
        message: Mapping[str, Any],
        limits: Limits,
        *,
        is_long: bool = False,
        data: bytes | None = None,
    ) -> Message:
        """The answer of a process that has nothing else to do. Long questions leave one free.

        Data go with the message as they are: as JSON they would keep all threads waiting.

        Raises RefusedError where it says so itself, ProcessStoppedError where it went beyond its
        limits or crashed, CapacityError where none can be started or somebody else has stopped it.
        Where a new one is needed: FirstError, StartError, and what `first` raises.
        """
        frame = _with_limits(message, limits, data)
        with self._long if is_long else contextlib.nullcontext():
            return self._twice(lambda: self._ask(frame, limits))

    def _twice(self, act: Callable[[], _Found]) -> _Found:
        """Once more where somebody else has killed a process: it may have been for another."""
        for _ in range(2):
            with contextlib.suppress(_KilledError):
                return act()
        raise CapacityError(
            f"A process that {self._work} was killed twice, by the system (out of memory?) or by "
            "hand. Try again later."
        )

    def _ask(self, frame: bytes, limits: Limits) -> Message:
        process = self._take()
        try:
            answer = process.ask(frame, limits)
        except BaseException:  # an interrupt too: half an answer may be on its way
            self._lose(process)
            raise
        if answer.pop("retire", False):
            self._lose(process)
        else:
            self._give(process)
        return _checked(answer)

    def start(self) -> None:
        """Start a process unless there is one: it shows that the first message is answered."""
        self._twice(lambda: self._give(self._take()))

    def warm(self) -> None:
        """Start all processes now, and those that replace killed ones at once."""
        self._is_warm = True
        for _ in range(self.size):
            self._restock_later()

    def close(self) -> None:
        """End all processes, whatever they are doing; whoever waits for one hears of it."""
        with self._free:
            self._is_closed = True
            _end_all(self._all)
            self._free.notify_all()

    def rest(self) -> None:
        """End the processes that have nothing to do; the next question starts one."""
        with self._free:
            while self._idle:
                self._forget(self._idle.pop())

    # -- processes come and go -----------------------------------------------------------------

    def _take(self) -> _Process:
        with self._free:
            while True:
                if self._is_closed:
                    raise _ending()
                self._forget_dead()
                if self._idle:
                    process = self._idle.pop()
                    if self._is_warm and self._num < self.size:
                        self._restock_later()  # one that should replace another did not start
                    return process
                if self._num < self.size:
                    self._num += 1
                    break
                self._free.wait()
        return self._start()

    def _start(self) -> _Process:
        """A process that has its first answer; a place for it is counted already."""
        process = None
        try:
            process = _Process(self._module, self._work)
            with self._free:
                self._all.add(process)
                if self._is_closed:
                    raise _ending()
            process.tell(self._first())
            return process
        except BaseException:
            with self._free:
                self._num -= 1
                if process is not None:
                    process.kill()
                    self._all.discard(process)
                self._free.notify()
            raise

    def _give(self, process: _Process) -> None:
        with self._free:
            self._idle.append(process)
            self._free.notify()

    def _lose(self, process: _Process) -> None:
        with self._free:
            self._forget(process)
            self._free.notify()
        if self._is_warm:
            self._restock_later()

    def _forget(self, process: _Process) -> None:
        process.kill()
        self._all.discard(process)
        self._num -= 1

    def _forget_dead(self) -> None:
        """Of those that have nothing to do, the system may have ended some."""
        for process in [one for one in self._idle if not one.is_alive]:
            self._idle.remove(process)
            self._forget(process)
            if self._is_warm:
                self._restock_later()

    def _restock_later(self) -> None:
        threading.Thread(target=self._restock, daemon=True).start()

    def _restock(self) -> None:
        with self._free:
            if self._is_closed or self._num >= self.size:
                return
            self._num += 1
        try:
            process = self._start()
        except FlashdraftError as error:
            log.warning("a process of %s could not be started: %s", self._module, error)
            return
        self._give(process)


class _Process:
    """One child, our end of its socket, and until its first answer what it writes to stderr."""

    def __init__(self, module: str, work: str) -> None:
        self._work = work
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            try:
                self._socket, end = socket.socketpair()
                ours.enter_context(self._socket)
                theirs.enter_context(end)
                self._words, stderr = _pipe()
                ours.enter_context(self._words)
                theirs.enter_context(stderr)
                self._child = subprocess.Popen(
                    module_command(module, str(end.fileno())),
                    pass_fds=(end.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    env=_environment(),
                    cwd="/",
                    process_group=0,  # Ctrl-C is ours to hear
                )
            except OSError as error:
                raise CapacityError(
                    f"A process that {work} cannot be started: {error}. Free some memory or raise "
                    "the limits on processes and files, and try again."
                ) from None
            ours.pop_all()  # they stay open

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None

    def tell(self, first: First) -> None:
        """Have the first message taken."""
        try:
            _checked(self.ask(_with_limits(first.message, first.limits), first.limits))
        except _KilledError:
            raise
        except ProcessStoppedError as error:
            raise FirstError("limit", str(error)) from None
        except RefusedError as error:
            raise FirstError(error.kind, str(error)) from None
        self._words.close()

    def ask(self, frame: bytes, limits: Limits) -> Message:
        deadline = time.monotonic() + max(_MIN_WALL_S, _WALL_PER_CPU * limits.cpu_s)
        try:
            self._wait_until(deadline)
            self._socket.sendall(frame)
            length = frame_length(self._receive(HEADER.size, deadline))
            return unpack(self._receive(length, deadline))
        except TimeoutError:
            self.kill()
            raise CapacityError(
                f"A process that {self._work} did not answer in time: the machine is too busy, or "
                "the process was stopped. Try again later."
            ) from None
        except (OSError, WireError):  # it has ended; what it said last is no answer
            error = self._how_it_ended(limits)
            self.kill()
            raise error from None

    def _wait_until(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def _receive(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._wait_until(deadline)
            piece = self._socket.recv(min(count - len(data), _RECEIVE_BYTES))
            if not piece:
                raise ConnectionError
            data += piece
        return bytes(data)

    def _how_it_ended(self, limits: Limits) -> FlashdraftError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_END_S)
        code = self._child.returncode
        if code is not None and code >= 0 and not self._words.closed:
            return StartError(
                f"A process that {self._work} cannot be started: it ended with code {code}"
                f"{self._last_words()}. Check how flashdraft and its dependencies are installed."
            )
        if code == -signal.SIGPROF:
            return ProcessStoppedError(f"it ran for more than {limits.cpu_s:.2g} s")
        name = signal.Signals(-code).name if code is not None and code < 0 else f"code {code}"
        kind = _KilledError if code == -signal.SIGKILL else ProcessStoppedError
        return kind(f"it needed more than {limits.memory_mib} MiB of memory, or crashed ({name})")

    def _last_words(self) -> str:
        """The last line that it wrote to stderr, where there is one."""
        lines = (self._words.read(_WORDS_BYTES) or b"").decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return f" ({shortened(said[-1])})" if said else ""

    def kill(self) -> None:
        """End it now, whatever it is doing."""
        with contextlib.suppress(OSError):
            self._child.kill()  # one that has ended by itself keeps its own code
        self._child.wait()
        self._close()

    def leave(self) -> None:
        """It belongs to the process that we were forked from."""
        self._close()
        self._child.returncode = 0

    def _close(self) -> None:
        self._socket.close()
        self._words.close()


def _pipe() -> tuple[BinaryIO, BinaryIO]:
    """A pipe that nobody waits at: what it has no room for is lost."""
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    os.set_blocking(theirs, False)
    return os.fdopen(ours, "rb", 0), os.fdopen(theirs, "wb", 0)


def _ending() -> CapacityError:
    return CapacityError("The program is ending and answers no more.")


def _checked(answer: Message) -> Message:
    if answer["type"] == "error":
        raise RefusedError(str(answer["kind"]), str(answer["message"]))
    return answer


def _with_limits(message: Mapping[str, Any], limits: Limits, data: bytes | None = None) -> bytes:
    allowed = {"cpu_s": limits.cpu_s, "memory_bytes": limits.memory_mib * MIB}
    return pack({**message, **allowed}, data)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in python_environment().items() if name in _ENVIRONMENT}
    # one thread and one arena: memory and processor time are then what the limits count
    single = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
    return {**kept, **single, "MALLOC_ARENA_MAX": "1"}


def _end_all(processes: Iterable[_Process]) -> None:
    for process in list(processes):
        with contextlib.suppress(OSError):
            process.kill()


_POOLS: weakref.WeakSet[ProcessPool] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for pool in list(_POOLS):
        for process in pool._all:
            process.leave()
        pool._all.clear()
        pool._reset()


os.register_at_fork(after_in_child=_after_fork_in_child)
