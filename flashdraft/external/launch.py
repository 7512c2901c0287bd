"""An outside engine's process, from its start to the end of its last child.

Its output passes through, signals are handed on, and whatever it leaves behind is ended
(processes.py). Which engine it is and what its flags mean is not known here.
"""

from __future__ import annotations

import codecs
import io
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

from flashdraft.children import end_with_parent, python_environment
from flashdraft.errors import FlashdraftError
from flashdraft.external.command import EngineCommand
from flashdraft.external.processes import Descendants

POLL_S = 0.25
HEALTH_S = 2.0  # for an answer to whether it is ready
REPORT_EVERY_S = 15.0
DRAIN_S = 60.0  # for the engine to end after a signal
TERMINATE_S = 10.0  # for what it leaves behind
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CHUNK_BYTES = 65536
_LINE_END = re.compile(r"[\r\n]")
_LINE_CHARACTERS = 4096  # of a line without end, what is searched for a reason
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
            with opener.open(request, timeout=HEALTH_S) as response:
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
    with Descendants() as descendants, _noted_signals() as received:
        process = _start(command, title)
        output = _Output(process)
        is_ready = False
        try:
            is_ready = _wait_until_ready(process, health, title, received, report)
            if is_ready:
                on_ready()
            status = _wait_for_end(process, title, received, report)
        finally:
            descendants.end(process, TERMINATE_S)
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
            env={**python_environment(), **command.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
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


class _Output:
    """Passes the engine's output on, and remembers the last error it told of."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert isinstance(process.stdout, io.BufferedReader)
        self.reason: str | None = None
        self._stream = process.stdout
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the last lines; a process that left the group may hold the pipe open."""
        self._thread.join(timeout=2)

    def _copy(self) -> None:
        """Pass on what comes as it comes: a progress bar may not end its line for minutes."""
        out, line = sys.stderr, ""
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        with self._stream:
            while chunk := self._stream.read1(_CHUNK_BYTES):
                text = decode(chunk)
                with suppress(ValueError, OSError):  # ours is closed; the engine's must drain
                    out.write(text)
                    out.flush()
                *ended, line = _LINE_END.split(line + text)
                for one in ended:
                    self._search(one[:_LINE_CHARACTERS])
                line = line[:_LINE_CHARACTERS]
            self._search(line)

    def _search(self, line: str) -> None:
        found = _REASON.search(line)
        if found and _CONSEQUENCE not in line:
            self.reason = found[0].strip()[:300]


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
