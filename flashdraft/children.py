"""How a child Python is started: its first words, and the environment it is given.

What lies in the current folder was put there by anyone (a download, a checkpoint, a repository), so
no child of ours imports from it. What the child is asked to do is its caller's business.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_FOLDER = str(Path(__file__).resolve().parents[1])  # of the package
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
