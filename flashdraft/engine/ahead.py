"""A process that compiles ahead what the first steps will launch, by a twin of them (twin.py).

Where nothing is compiled yet, kernels take a start most of its time, one after the other. The child
puts the twin through every step that is prepared here, launches nothing, and compiles with many
processors; this process finds in the cache on disk what it has not come to itself. The child has no
say in what is computed: where it fails, or is slower, a start takes as long as without it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from flashdraft.children import (
    end_with_parent,
    module_command,
    num_processors,
    python_environment,
)
from flashdraft.engine.step.device import DeviceSteps
from flashdraft.engine.step.prepare import planned_steps
from flashdraft.engine.streams import Graphs
from flashdraft.engine.twin import describe, imagine
from flashdraft.kernels.interface import Kernels
from flashdraft.kernels.select import compiling_only

NICENESS = 5  # whoever serves meanwhile comes first
END_S = 5.0  # for a child to go
MOST_COMPILERS = 16  # each takes some hundred megabytes

log = logging.getLogger(__name__)


@contextmanager
def compiling_ahead(steps: DeviceSteps, kernels: Kernels, max_rows: int) -> Iterator[None]:
    """Meanwhile a child compiles for what `prepare_steps` runs, where there are compilers."""
    can_compile = steps.graphs.captures and kernels.compiles_for is not None
    with ExitStack() as until_prepared:
        # where graphs are there already, everything was compiled for them
        if can_compile and len(steps.graphs) == 0 and num_processors() > 1:
            _start(until_prepared, (steps, max_rows, kernels.compiles_for, os.getpid()))
        yield


def _start(until_prepared: ExitStack, told: object) -> None:
    """Start a child, which ends with the stack."""
    try:
        # compilers that are ended leave files behind
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # what has no values needs no GPU
        own = {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": until_prepared.enter_context(folder)}
        with tempfile.TemporaryFile() as words:  # unlike a pipe it is never full
            words.write(describe(told))
            words.seek(0)
            child = subprocess.Popen(
                module_command(__name__),
                env=python_environment() | own,
                stdin=words,
                stdout=subprocess.DEVNULL,
                stderr=None if log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
            )
    except Exception as error:  # whatever it is, a start takes no longer than it did without
        log.info("nothing is compiled ahead: %s", error)
        return
    until_prepared.callback(_end, child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """What it has not compiled by now nobody waits for."""
    failed = child.poll()
    if failed is None:
        child.kill()
        with suppress(subprocess.TimeoutExpired):  # a disk may hold it up
            child.wait(END_S)
    elif failed:
        log.info("what compiles ahead ended with %d", failed)


class _EachOnce(Graphs[tuple[object, ...]]):
    """Functions by key, each run at its first call: a second one would launch the same."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))
        self.captures = True
        self._seen: set[object] = set()

    def is_ready(self, key: tuple[object, ...]) -> bool:
        return key in self._seen

    def call(self, key: tuple[object, ...], function: Callable[[], Any]) -> Any:
        if key not in self._seen:
            self._seen.add(key)
            function()


def rehearse(steps: DeviceSteps, max_rows: int) -> list[str]:
    """Put a twin through all steps that are prepared; what went wrong, in words."""
    steps.graphs = _EachOnce()
    failures = []
    for shape, chunks in planned_steps(steps, max_rows):
        longest = max((len(chunk.tokens) for chunk in chunks), default=None)
        try:
            steps.launch(shape, chunks, longest=longest)
        except Exception as error:  # others may have something to compile all the same
            failures.append(f"{shape}: {type(error).__name__}: {error}")
    return failures


def main() -> None:
    """Compile for what stdin describes."""
    end_with_parent()
    with suppress(AttributeError, OSError):  # no such thing everywhere
        os.nice(NICENESS)
    steps, max_rows, capability, parent = imagine(sys.stdin.buffer.read())
    if os.getppid() != parent:  # it went before we could hear of it
        return
    with compiling_only(capability, min(MOST_COMPILERS, num_processors() - 1)):
        failures = rehearse(steps, max_rows)
    for failure in failures:
        print(failure, file=sys.stderr)
    sys.exit(len(failures) > 0)


if __name__ == "__main__":
    main()
