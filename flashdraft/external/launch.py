"""An outside engine's process, from its start to the end of its last child.

The engine runs in a process group of its own. Its output passes through, signals are handed on, and
whatever is left of the group when it or we end is ended: asked first, then forced. Which engine it
is and what its flags mean is not known here.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO

from flashdraft.errors import FlashdraftError
from flashdraft.external.command import EngineCommand

POLL_S = 0.25
REPORT_EVERY_S = 15.0
DRAIN_S = 60.0  # for the engine to end after a signal
TERMINATE_S = 10.0  # for what it leaves behind
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # Linux; looked up here, not after a fork
# the last is how pydantic words what it refuses, under a headline that says nothing
_REASON = re.compile(r"\b(?:(?:[\w.]*(?:Error|Exception|Exit)|error): |Value error, )\S.*")
_CONSEQUENCE = "initialization failed"  # the error that only says there was one before it


@dataclass(frozen=True)
class Health:
    """Where an engine says that it is ready."""

    url: str
    api_key: str | None = None

    def is_good(self) -> bool:
        """Whether it says so now."""
        request = urllib.request.Request(self.url)
        if self.api_key is not None:
            request.add_header("Authorization", f"Bearer {self.api_key}")
        # no proxy stands between this machine and itself
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=2) as response:
                return 200 <= response.status < 300
        except (OSError, urllib.error.URLError, ValueError):
            return False


def run_engine(
    command: EngineCommand,
    health: Health | None,
    title: str,
    on_ready: Callable[[], None],
    report: Callable[[str], None],
) -> int:
    """Run the engine to its end; return its exit status, 128 + n where signal n ended it.

    Without `health` it answers nobody (a further node) and counts as ready at once.
    """
    with _adopted_orphans(), _noted_signals() as received:
        process = _start(command, title)
        output = _Output(process)
        is_ready = False
        try:
            is_ready = _wait_until_ready(process, health, title, received, report)
            if is_ready:
                on_ready()
            status = _wait_for_end(process, title, received, report)
        finally:
            _end_group(process)
            output.close()
    code = 128 - status if status < 0 else status
    if not is_ready and not received:
        report(_explain_early_end(title, code, output.reason))
        return code or 1
    if is_ready and not received and code:
        report(f"{title} ended by itself with status {code}: {output.reason or 'see its log'}")
    return code


def _start(command: EngineCommand, title: str) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command.arguments,
            env={**os.environ, **command.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    except OSError as error:
        raise FlashdraftError(
            f"{title} cannot be started: {command.arguments[0]}: {error.strerror or error}."
        ) from None


def _wait_until_ready(
    process: subprocess.Popen[bytes],
    health: Health | None,
    title: str,
    received: list[int],
    report: Callable[[str], None],
) -> bool:
    """Wait for health, for as long as weights take to load; False if the end came first."""
    began = said = time.monotonic()
    while process.poll() is None and not received:
        if health is None or health.is_good():
            return process.poll() is None
        if time.monotonic() - said >= REPORT_EVERY_S:
            said = time.monotonic()
            report(f"{title} is still loading, after {said - began:.0f} s …")
        time.sleep(POLL_S)
    return False


def _wait_for_end(
    process: subprocess.Popen[bytes],
    title: str,
    received: list[int],
    report: Callable[[str], None],
) -> int:
    """Wait, and hand the first signal on; a second one, or too long a wait, ends at once."""
    deadline = None
    while True:
        status = process.poll()
        if status is not None:
            return status
        if received and deadline is None:
            deadline = time.monotonic() + DRAIN_S
            report(f"Ending {title}; the same signal again ends it at once.")
            with suppress(ProcessLookupError):
                process.send_signal(received[0])
        if len(received) > 1 or (deadline is not None and time.monotonic() > deadline):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return process.wait()
        time.sleep(POLL_S)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the engine and all it started; asked first, then forced."""
    group = process.pid
    for number, patience in ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, TERMINATE_S)):
        if not _is_group_alive(process):
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
        deadline = time.monotonic() + patience
        while _is_group_alive(process) and time.monotonic() < deadline:
            time.sleep(POLL_S / 5)


def _is_group_alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    with suppress(ChildProcessError):  # the group's orphans are ours to bury
        while os.waitpid(-process.pid, os.WNOHANG)[0]:
            pass
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class _Output:
    """Passes the engine's output on, and remembers the last error it told of."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.reason: str | None = None
        self._stream: IO[bytes] = process.stdout
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the last lines; a process that left the group may hold the pipe open."""
        self._thread.join(timeout=2)

    def _copy(self) -> None:
        out = sys.stderr
        with self._stream:
            for line in self._stream:
                text = line.decode("utf-8", errors="replace")
                found = _REASON.search(text)
                if found and _CONSEQUENCE not in text:
                    self.reason = found[0].strip()[:300]
                with suppress(ValueError, OSError):  # ours is closed; the engine's must drain
                    out.write(text)
                    out.flush()


def _explain_early_end(title: str, code: int, reason: str | None) -> str:
    why = f": {reason}" if reason else "; its own words are above."
    return f"{title} ended with status {code} before it was ready{why}"


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Collect the signals that ask for the end, in place of ending here and now."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    # what was ignored stays so, as SIGHUP under nohup
    wanted = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in wanted}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _adopted_orphans() -> Iterator[None]:
    """Become the parent of what the engine leaves behind: in a container no one else may be."""
    _prctl(_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_SET_CHILD_SUBREAPER, 0)


def _end_with_parent() -> None:
    """In the child: even if we are killed outright, the engine hears of it."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if _PRCTL is not None:
        _PRCTL(option, value, 0, 0, 0)
