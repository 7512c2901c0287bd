"""How a child Python is started: its first words, its environment, its end, what it may use.

What lies in the current folder was put there by anyone (a download, a checkpoint, a repository), so
no child of ours imports from it. What the child is asked to do is its caller's business.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

_FOLDER = str(Path(__file__).resolve().parents[1])  # of the package
_SET_PARENT_DEATH_SIGNAL = 1
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # Linux; looked up here, not after a fork
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of so many, or "max"
_RUN_MODULE = (
    "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); import flashdraft; del sys.path[0]; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def python_command(*arguments: str) -> list[str]:
    """Our own interpreter, which looks for modules where it is installed and nowhere else."""
    return [sys.executable, "-P", *arguments]


def module_command(module: str, *arguments: str) -> list[str]:
    """Our own interpreter that runs a module of the flashdraft that runs here.

    It may have been imported from a folder that is not installed, where a child would not look, and
    another one may be installed. The folder is searched for this package and for nothing else.
    """
    return python_command("-c", _RUN_MODULE, _FOLDER, module, *arguments)


def python_environment() -> dict[str, str]:
    """Our environment for any Python, of which only absolute entries of PYTHONPATH are kept.

    An empty entry, as `$PYTHONPATH:…` leaves one, means the current folder. PYTHONSAFEPATH is what
    -P is for the Pythons that a child starts, and for interpreters that may be too old to know -P.
    """
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    entries = environment.pop("PYTHONPATH", "").split(os.pathsep)
    if kept := [entry for entry in entries if os.path.isabs(entry)]:
        environment["PYTHONPATH"] = os.pathsep.join(kept)
    return environment


def end_with_parent() -> None:
    """In a child: even if the parent is killed outright, it hears of it."""
    prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def prctl(option: int, value: int) -> None:
    """Linux's, where it is one."""
    if _PRCTL is not None:
        _PRCTL(option, value, 0, 0, 0)


def num_processors() -> int:
    """Processors that this process may use: those that taskset and a container leave to it."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        count = min(count, max(1, int(quota) // int(period)))  # no number: there is no limit
    return count
