"""The child that compiles ahead: it launches what steps launch, and nobody depends on it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashdraft.children import python_command
from flashdraft.engine import ahead

# Of the same steps with values and without, what Triton would compile. Nothing is compiled.
SCRIPT = """
import sys
import torch
from triton.runtime.jit import JITFunction
from flashdraft.engine.ahead import rehearse
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.engine.twin import describe, imagine
from flashdraft.kernels.cuda import ahead, card
from flashdraft.kernels.cuda.backend import TritonKernels
from flashdraft.kernels.cuda.plan import DeviceLimits
from tests import zoo

def emptied(make):
    # what no launch has written is an index all the same
    def made(*values, **named):
        found = make(*values, **named)
        return found if found.is_meta else found.zero_()

    return made


wanted = []
JITFunction._do_compile = lambda self, key, *rest, **named: wanted.append((self, key))
card.tell = lambda capability: None  # the CPU is no card either
torch.empty, torch.empty_like = emptied(torch.empty), emptied(torch.empty_like)
settings = {"tree": 15} if "tree" in sys.argv else {"verify": 7}
kernels = TritonKernels(torch.device("cpu"), torch.bfloat16)
kernels._limits = DeviceLimits(132, 227 * 1024, 9)
target = zoo.tiny_target(sys.argv[1], kernels, taps=(0, 2))
config = EngineConfig(
    run_ahead=True, ngram=True, max_batch=2, cache=CacheOptions(cache_gb=0.01), **settings
)
Engine._measure_costs = lambda self, steps: None
engine = Engine(target, zoo.tiny_drafter(kernels), config)
steps = engine.steps
steps.graphs.captures = steps.pieces._captured = True
target.prepare_positions(2000)
steps.pieces._proposer.drafter.rope.table(2000)
found = []
for one in (imagine(describe(steps)), steps):
    with ahead.compiling_only((9, 0), 1), torch.no_grad():
        failures = rehearse(one, 256)
    assert not failures, failures
    found.append({(function.fn.__name__, key) for function, key in wanted})
    for function, _ in wanted:
        function.device_caches.clear()
    wanted.clear()
twin, real = found
print(len(real), len(twin ^ real))
for one in sorted(twin ^ real):
    print("twin" if one in twin else "steps", *one)
"""


@pytest.mark.parametrize("family", ["gemma4", "qwen3_moe", "gemma4 tree"])
def test_a_twin_launches_what_its_steps_launch(family: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT, *family.split()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    first, *others = finished.stdout.splitlines()
    count, differing = map(int, first.split())
    assert count > 20 and differing == 0, others


# -- the child, and who started it ---------------------------------------------------------------

STEPS: Any = SimpleNamespace(graphs=SimpleNamespace(captures=True))
KERNELS: Any = SimpleNamespace(compiles_for=(9, 0))


def children_run(monkeypatch: pytest.MonkeyPatch, script: str) -> list[subprocess.Popen[bytes]]:
    """Have every child run a script of ours; those that were started."""
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def record(*values: Any, **named: Any) -> subprocess.Popen[bytes]:
        started.append(start(*values, **named))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", record)
    monkeypatch.setattr(ahead, "module_command", lambda module: python_command("-c", script))
    return started


def wait_for(path: Path) -> str:
    for _ in range(3000):
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.01)
    raise AssertionError(f"no child has written {path}")


def test_nobody_waits_for_a_child_and_it_ends_with_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    script = f"""
import os, sys, time
words = len(sys.stdin.buffer.read()), os.environ["CUDA_VISIBLE_DEVICES"]
open({str(told)!r}, "w").write(repr(words))
time.sleep(600)
"""
    started = children_run(monkeypatch, script)
    with ahead.compiling_ahead(STEPS, KERNELS, 100):
        assert eval(wait_for(told)) == (len(ahead.describe((STEPS, 100, (9, 0)))), "")
        assert started[0].poll() is None
    assert len(started) == 1 and started[0].poll() is not None


def test_work_that_fails_ends_the_child_too(monkeypatch: pytest.MonkeyPatch) -> None:
    started = children_run(monkeypatch, "import time; time.sleep(600)")
    with pytest.raises(ValueError), ahead.compiling_ahead(STEPS, KERNELS, 100):
        raise ValueError
    assert started[0].poll() is not None


def test_a_child_that_fails_is_told_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = children_run(monkeypatch, "import sys; sys.exit(3)")
    with caplog.at_level(logging.INFO), ahead.compiling_ahead(STEPS, KERNELS, 100):
        started[0].wait(60)
    assert "ended with 3" in caplog.text


def test_what_cannot_be_described_is_told_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = children_run(monkeypatch, "")
    steps: Any = SimpleNamespace(graphs=STEPS.graphs, words=(word for word in ()))
    with caplog.at_level(logging.INFO), ahead.compiling_ahead(steps, KERNELS, 100):
        assert started == []
    assert "nothing is compiled ahead" in caplog.text


@pytest.mark.parametrize("captures, compiles_for", [(False, (9, 0)), (True, None)])
def test_where_nothing_is_compiled_there_is_no_child(
    monkeypatch: pytest.MonkeyPatch, captures: bool, compiles_for: Any
) -> None:
    started = children_run(monkeypatch, "")
    steps: Any = SimpleNamespace(graphs=SimpleNamespace(captures=captures))
    kernels: Any = SimpleNamespace(compiles_for=compiles_for)
    with ahead.compiling_ahead(steps, kernels, 100):
        assert started == []
