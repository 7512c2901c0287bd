"""The processes that an engine starts, found and ended, wherever they have gone.

The engine leads a process group of its own, which takes signals as one. What leaves the group
becomes ours when its parent ends, on Linux, and is known by not having been there before. So a
process that runs an engine must start nothing else meanwhile.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from flashdraft.children import prctl

_POLL_S = 0.05
_STEPS = (signal.SIGTERM, signal.SIGKILL)
_SET_CHILD_SUBREAPER = 36


class Descendants:
    """All that is started inside of the `with`; `end` leaves none of it behind."""

    def __enter__(self) -> Descendants:
        self._before = set(_children())
        # in a container no one else may be there to bury orphans
        prctl(_SET_CHILD_SUBREAPER, 1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        prctl(_SET_CHILD_SUBREAPER, 0)

    def end(self, leader: subprocess.Popen[bytes], patience_s: float) -> None:
        """End the leader's group, then what had left it: asked first, forced after a while."""

        def signal_group(number: int) -> None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(leader.pid, number)

        def signal_strays(number: int) -> None:
            for pid in self._strays():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

        _end(lambda: _is_group_alive(leader), signal_group, patience_s)
        _end(lambda: bool(self._strays()), signal_strays, patience_s)

    def _strays(self) -> list[int]:
        """Children that came to us since; those that have ended are buried."""
        left = []
        for pid in set(_children()) - self._before:
            try:
                is_buried = os.waitpid(pid, os.WNOHANG)[0] != 0
            except ChildProcessError:
                is_buried = True
            left += [] if is_buried else [pid]
        return left


def _end(is_alive: Callable[[], bool], send: Callable[[int], None], patience_s: float) -> None:
    for number in _STEPS:
        if not is_alive():
            return
        send(number)
        deadline = time.monotonic() + patience_s
        while is_alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            if number == signal.SIGKILL:
                send(number)  # those whose parent has just been ended are new to us


def _is_group_alive(leader: subprocess.Popen[bytes]) -> bool:
    leader.poll()
    with suppress(ChildProcessError):  # the group's orphans are ours to bury
        while os.waitpid(-leader.pid, os.WNOHANG)[0]:
            pass
    try:
        os.killpg(leader.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _children() -> Iterator[int]:
    """Our child processes, zombies among them; none where there is no /proc to read."""
    own = str(os.getpid())
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):  # it has ended meanwhile
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields[1] == own:
                yield int(folder.name)
