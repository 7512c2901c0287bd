"""Checks of Triton kernels on the CPU, in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so a file's checks run in one other process,
which is the file itself as a script; each of its tests then looks at its own result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping

import pytest
import torch

# Triton 3.6's interpreter has no loops with run-time bounds under numpy 2.4 and later.
UNABLE = "only 0-dimensional arrays can be converted to Python scalars"


def report(checks: Mapping[str, Callable[[], None]]) -> None:
    """The script's part: every check's failure, or an empty string, as JSON on stdout."""
    failures = {}
    for number, (name, check) in enumerate(checks.items()):
        torch.manual_seed(number)
        try:
            check()
            failures[name] = ""
        except Exception:  # reported by the test of that name
            failures[name] = traceback.format_exc()
    json.dump(failures, sys.stdout)


def collect(file: str) -> dict[str, str]:
    """The test's part: run the file as a script and read its report."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    finished = subprocess.run(
        [sys.executable, file], env=environment, capture_output=True, text=True, timeout=280
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def judge(failure: str) -> None:
    """Pass, fail, or skip where this interpreter cannot run the kernel at all."""
    if UNABLE in failure:
        pytest.skip("this Triton's interpreter does not run with this numpy")
    assert not failure, failure
