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
from typing import Any, NamedTuple

from flashdraft.children import module_command, python_environment
from flashdraft.errors import CapacityError, FlashdraftError
from flashdraft.killable.frames import HEADER, Message, WireError, frame_length, pack, unpack

log = logging.getLogger(__name__)

MIB = 1024 * 1024
_RECEIVE_BYTES = 1 << 18
_MIN_WALL_S = 20.0  # a busy machine may keep a process waiting
_WALL_PER_CPU = 5.0
_END_S = 1.0  # from the end of its socket to that of a process
# What a child needs of our environment. Keys and tokens are not among it.
_ENVIRONMENT = {
    *("PATH", "LANG", "LC_ALL", "LC_TIME", "TZ", "LD_LIBRARY_PATH"),
    *("PYTHONHOME", "PYTHONPATH", "PYTHONSAFEPATH"),
}


@dataclass(frozen=True)
class Limits:
    """What one question may use."""

    cpu_s: float
    memory_mib: int  # beyond what the process had before


class First(NamedTuple):
    """What every process is told first, and what that may use."""

    message: Mapping[str, Any]
    limits: Limits


class StoppedError(FlashdraftError):
    """A process was stopped, or ended, before it had answered. The message ends a sentence."""


class _KilledError(StoppedError):
    """The system, or a person, has killed a process."""


class RefusedError(FlashdraftError):
    """A process says that it cannot answer: `kind` is for the caller, the message for people."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Pool:
    """Processes that run a module with a descriptor; `first` gives the first message of each."""

    def __init__(self, module: str, first: Callable[[], First], size: int = 2) -> None:
        assert size >= 2, "a process that is killed must leave another one"
        self.size = size
        self._module = module
        self._first = first
        self._is_closed = False
        self._num_warm = 0
        self._all: set[_Process] = set()
        self._reset()
        _POOLS.add(self)
        weakref.finalize(self, _end_all, self._all)

    def _reset(self) -> None:
        self._free = threading.Condition()
        self._long = threading.BoundedSemaphore(self.size - 1)
        self._idle: list[_Process] = []
        self._num = 0  # processes that are there or being started

    def ask(self, message: Mapping[str, Any], limits: Limits, *, is_long: bool = False) -> Message:
        """The answer of a process that has nothing else to do. Long questions leave one free.

        Raises RefusedError where it says so itself, StoppedError where it went beyond its limits
        or crashed, CapacityError where none can be started or somebody else has stopped it.
        """
        frame = _with_limits(message, limits)
        with self._long if is_long else contextlib.nullcontext():
            try:
                return self._ask(frame, limits)
            except _KilledError:  # by somebody else, who may have meant another question
                pass
            try:
                return self._ask(frame, limits)
            except _KilledError:
                raise CapacityError(
                    "A process that tokenizes was killed twice, by the system (out of memory?) or "
                    "by hand. Try again later."
                ) from None

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

    def warm(self) -> None:
        """Start all processes now, and those that replace killed ones at once."""
        self._num_warm = self.size
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
                    raise StoppedError("the program is ending")
                self._forget_dead()
                if self._idle:
                    return self._idle.pop()
                if self._num < self.size:
                    self._num += 1
                    break
                self._free.wait()
        return self._start()

    def _start(self) -> _Process:
        """A process that has its first answer; a place for it is counted already."""
        process = None
        try:
            process = _Process(self._module)
            with self._free:
                self._all.add(process)
                if self._is_closed:
                    raise StoppedError("the program is ending")
            first = self._first()
            frame = _with_limits(first.message, first.limits)
            _checked(process.ask(frame, first.limits))
            return process
        except BaseException:
            with self._free:
                self._num -= 1
                if process is not None:
                    process.kill()
                    self._all.discard(process)
                self._free.notify()
            raise

    def start(self) -> None:
        """Start a process unless there is one: it shows that the first message is answered."""
        self._give(self._take())

    def _give(self, process: _Process) -> None:
        with self._free:
            self._idle.append(process)
            self._free.notify()

    def _lose(self, process: _Process) -> None:
        with self._free:
            self._forget(process)
            self._free.notify()
        if self._num_warm:
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
            if self._num_warm:
                self._restock_later()

    def _restock_later(self) -> None:
        threading.Thread(target=self._restock, daemon=True).start()

    def _restock(self) -> None:
        with self._free:
            if self._is_closed or self._num >= self._num_warm:
                return
            self._num += 1
        try:
            process = self._start()
        except FlashdraftError as error:
            log.warning("a process of %s could not be started: %s", self._module, error)
            return
        self._give(process)


class _Process:
    """One child and our end of its socket."""

    def __init__(self, module: str) -> None:
        ours, theirs = socket.socketpair()
        command = module_command(module, str(theirs.fileno()))
        try:
            self._child = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a library that panics prints there
                env=_environment(),
                cwd="/",
                process_group=0,  # Ctrl-C is ours to hear
            )
        except OSError as error:
            ours.close()
            raise CapacityError(
                f"A process for the model's tokenizer cannot be started: {error}. Free some memory "
                "or raise the limit on processes, and try again."
            ) from None
        finally:
            theirs.close()
        self._socket = ours

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None

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
                "A process that tokenizes did not answer in time: the machine is too busy, or the "
                "process was stopped. Try again later."
            ) from None
        except (OSError, WireError):  # it has ended; what it said last is no answer
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_END_S)
            was_killed = self._child.returncode == -signal.SIGKILL
            self.kill()
            kind = _KilledError if was_killed else StoppedError
            raise kind(self._how_it_ended(limits)) from None

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

    def _how_it_ended(self, limits: Limits) -> str:
        code = self._child.returncode
        if code == -signal.SIGPROF:
            return f"it ran for more than {limits.cpu_s:.2g} s"
        name = signal.Signals(-code).name if code is not None and code < 0 else f"code {code}"
        return f"it needed more than {limits.memory_mib} MiB of memory, or crashed ({name})"

    def kill(self) -> None:
        """End it now, whatever it is doing."""
        with contextlib.suppress(OSError):
            self._child.kill()  # one that has ended by itself keeps its own code
        self._child.wait()
        self._socket.close()

    def leave(self) -> None:
        """It belongs to the process that we were forked from."""
        self._socket.close()
        self._child.returncode = 0


def _checked(answer: Message) -> Message:
    if answer["type"] == "error":
        raise RefusedError(str(answer["kind"]), str(answer["message"]))
    return answer


def _with_limits(message: Mapping[str, Any], limits: Limits) -> bytes:
    return pack({**message, "cpu_s": limits.cpu_s, "memory_bytes": limits.memory_mib * MIB})


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in python_environment().items() if name in _ENVIRONMENT}
    # one thread and one arena: memory and processor time are then what the limits count
    return {**kept, "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}


def _end_all(processes: Iterable[_Process]) -> None:
    for process in list(processes):
        with contextlib.suppress(OSError):
            process.kill()


_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for pool in list(_POOLS):
        for process in pool._all:
            process.leave()
        pool._all.clear()
        pool._reset()


os.register_at_fork(after_in_child=_after_fork_in_child)
