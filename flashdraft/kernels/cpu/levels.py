"""Which build of the C kernels runs: there is one for each level of processors, named in setup.py.

It owns the choice and knows nothing of what the kernels do. Every level gives the same bits
(native/vectors.h says how); a higher one is faster. Without a compiler at install time there are
none.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

_PACKAGE = "flashdraft.kernels.cpu"
_forced: str | None = None


@functools.cache
def runnable() -> tuple[str, ...]:
    """The levels that were built and that this processor runs, the slowest first."""
    try:
        processor = importlib.import_module(f"{_PACKAGE}._processor")
    except ImportError:  # it is optional, as the kernels are
        return ()
    return tuple(name for name in processor.runnable() if importlib.util.find_spec(_module(name)))


def chosen() -> str | None:
    """The level of kernels that are constructed now: the fastest, unless `use` named another."""
    return _forced or (runnable()[-1] if runnable() else None)


def use(name: str | None) -> None:
    """Take this level from now on, None for the fastest: for tests, and to find one at fault."""
    global _forced
    if name is not None and name not in runnable():
        raise ValueError(f"The level {name!r} does not run here; {', '.join(runnable())} do.")
    _forced = name


def load(name: str) -> Any:
    """The extension module of a level; where it is built and broken this raises."""
    return importlib.import_module(_module(name))


def _module(name: str) -> str:
    return f"{_PACKAGE}._native_{name}"
