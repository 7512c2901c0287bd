"""Runs code that a model wrote, with its tests, where it can do no harm.

Two processes of confined.py, in a session of their own, with no environment and an empty folder:
one runs the answer, one the tests. Both give up files, network, processes and signals before they
run anything, and have limits on time and memory; what they print is thrown away. Where the machine
offers no such confinement nothing is run. It knows no tasks: answers.py makes code and tests.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashdraft.bench.accuracy import confined
from flashdraft.errors import FlashdraftError

_CHILD = Path(confined.__file__)
_PASSED = b"passed"
_NO_SANDBOX = (
    "Code cannot be confined on this machine: it needs Linux on x86_64 or aarch64 with seccomp "
    "filters. The answers of code tasks are not run, so they have no accuracy."
)


@dataclass(frozen=True)
class CodeTest:
    """An answer's code and what it must satisfy."""

    code: Sequence[str]  # run one after the other in one namespace
    tests: str  # calls what the code defines; any exception is a failure
    setup: str = ""  # what the tests need beside that; the answer cannot change it
    names: Sequence[str] = ()  # the answer's, even if setup has them too


@dataclass(frozen=True)
class SandboxLimits:
    """What one answer may use; the same for its tests."""

    wall_s: float = 20.0
    cpu_s: int = 10
    memory_bytes: int = 1 << 30


class NoSandboxError(FlashdraftError):
    """Code cannot be confined on this machine, so none is run."""


def passes(test: CodeTest, limits: SandboxLimits | None = None) -> bool:
    """Whether the code passes its tests. It is run: see this module for how it is confined."""
    limits = limits or SandboxLimits()
    task = {"code": test.code, "tests": test.tests, "setup": test.setup, "names": test.names}
    content = json.dumps(task).encode()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="flashdraft-", ignore_cleanup_errors=True)
        )
        to_answer, from_answer = (_pipe(stack) for _ in range(2))

        def start(
            role: str, pipes: Sequence[int], stdin: int, stdout: int
        ) -> subprocess.Popen[bytes]:
            numbers = [str(one) for one in (limits.cpu_s, limits.memory_bytes, *pipes)]
            child = subprocess.Popen(
                # isolated, and without what was installed: an answer sees the standard library
                [sys.executable, "-I", "-S", "-B", str(_CHILD), role, *numbers],
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                env={},
                cwd=folder,
                pass_fds=pipes,
                start_new_session=True,
            )
            stack.callback(_end, child)
            return child

        start("answer", (), to_answer.source, from_answer.sink)
        judge_pipes = (from_answer.source, to_answer.sink)
        judge = start("judge", judge_pipes, subprocess.PIPE, subprocess.PIPE)
        # ours too would keep the pipes open when one of the two has gone
        for pipe in (to_answer, from_answer):
            pipe.close()
        try:
            verdict, _ = judge.communicate(content, timeout=limits.wall_s)
        except subprocess.TimeoutExpired:
            return False
        if judge.returncode == confined.EXIT_OPEN:
            raise NoSandboxError(_NO_SANDBOX)
        return verdict == _PASSED


@functools.cache
def sandbox_problem() -> str | None:
    """Why code cannot be run here; None where it can. Tries it once."""
    try:
        works = passes(CodeTest(["def one(): return 1"], "assert one() == 1"))
    except NoSandboxError as error:
        return str(error)
    except OSError as error:
        return f"Code cannot be run on this machine: {error.strerror}."
    return None if works else "Code cannot be run on this machine: a trial with right code failed."


class _Pipe:
    """Both ends of a pipe, closed once."""

    def __init__(self) -> None:
        self.source, self.sink = os.pipe()
        self._open = [self.source, self.sink]

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())


def _pipe(stack: contextlib.ExitStack) -> _Pipe:
    pipe = _Pipe()
    stack.callback(pipe.close)
    return pipe


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and whatever it has started."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    child.wait()
