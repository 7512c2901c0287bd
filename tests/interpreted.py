"""Checks of Triton kernels on the CPU, in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so a file's checks run in other processes, one
for every processor, which are the file itself as a script; each of its tests then looks at its own
result.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

SHARE = "INTERPRETED_SHARE"  # which checks a process runs: from which on, and every how many
# Triton 3.6's interpreter has no loops with run-time bounds under numpy 2.4 and later.
UNABLE = "only 0-dimensional arrays can be converted to Python scalars"


def report(checks: Mapping[str, Callable[[], None]]) -> None:
    """The script's part: its checks' failures, or empty strings, as JSON on stdout."""
    _patch_the_language_once()
    failures = {}
    first, step = map(int, os.environ[SHARE].split("/"))
    for number, (name, check) in list(enumerate(checks.items()))[first::step]:
        torch.manual_seed(number)
        try:
            check()
            failures[name] = ""
        except Exception:  # reported by the test of that name
            failures[name] = traceback.format_exc()
    json.dump(failures, sys.stdout)


def _patch_the_language_once() -> None:
    """Half of a check's time is the interpreter's replacing of its language's functions by its own,
    at every call of every function; here it is done once for a process, which interprets only.
    """
    from triton.runtime import interpreter

    patch, done = interpreter._patch_lang, set()

    def patch_once(function: Callable[..., object]) -> object:
        modules = {id(value) for value in function.__globals__.values() if inspect.ismodule(value)}
        languages = frozenset(modules & {id(interpreter.tl), id(interpreter.tl.core)})
        if not languages or languages not in done:
            patch(function)
            done.add(languages)
        return interpreter._LangPatchScope()  # nothing to restore

    interpreter._patch_lang = patch_once


def collect(file: str) -> dict[str, str]:
    """The test's part: run the file as a script and read its report."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    count = min(8, os.cpu_count() or 1)

    def run(first: int) -> dict[str, str]:
        finished = subprocess.run(
            [sys.executable, file],
            env={**environment, SHARE: f"{first}/{count}"},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert finished.returncode == 0, finished.stderr
        failures: dict[str, str] = json.loads(finished.stdout)
        return failures

    with ThreadPoolExecutor(count) as pool:
        return {
            name: failure for part in pool.map(run, range(count)) for name, failure in part.items()
        }


def judge(failure: str) -> None:
    """Pass, fail, or skip where this interpreter cannot run the kernel at all."""
    if UNABLE in failure:
        pytest.skip("this Triton's interpreter does not run with this numpy")
    assert not failure, failure
