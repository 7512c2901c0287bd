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

# Of the same steps with values and without, what Triton and NVRTC would compile for a Hopper.
# Nothing is compiled.
SCRIPT = """
import sys
import torch
from flashdraft.kernels.cuda import card

card.capability_of = lambda device: card.Capability(9, 0)  # before anybody has it by name

from flashdraft.kernels.cuda import driver

driver._bind, driver._encode_map = lambda device: None, lambda *sizes: bytes(128)

from triton.runtime.jit import JITFunction
from flashdraft.engine.ahead import rehearse
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.engine.twin import describe, imagine
from flashdraft.kernels.cuda import ahead
from flashdraft.kernels.cuda.backend import TritonKernels
from flashdraft.kernels.cuda.plan import DeviceLimits
from tests import zoo


def emptied(make):
    # what no launch has written is an index all the same
    def made(*values, **named):
        found = make(*values, **named)
        return found if found.is_meta else found.zero_()

    return made


wanted, functions = set(), set()


def want(function, key, *rest, **named):
    wanted.add((function.fn.__name__, key))
    functions.add(function)


JITFunction._do_compile = want
ahead.compile_once = lambda file, flags, device: wanted.add((file, str(sorted(flags.items()))))
torch.empty, torch.empty_like = emptied(torch.empty), emptied(torch.empty_like)
zoo.CONFIGS["wide"] = zoo.CONFIGS["gemma4"] | {"head_dim": 256, "global_head_dim": 512}
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
    driver.can_compile.cache_clear()
    with ahead.compiling_only((9, 0), 1), torch.no_grad():
        failures = rehearse(one, 256)
    assert not failures, failures
    found.append(frozenset(wanted))
    wanted.clear()
    for function in functions:
        function.device_caches.clear()
twin, real = found
cuda = sorted({name for name, _ in real if name.endswith(".cu")})
early = sum("launch_pdl" in key for _, key in real)
print(len(real), len(twin ^ real), early, *cuda)
for one in sorted(twin ^ real):
    print("twin" if one in twin else "steps", *one)
"""


@pytest.mark.parametrize("family", ["gemma4", "qwen3_moe", "gemma4 tree", "wide"])
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
    count, differing, early, *cuda = first.split()
    assert int(count) > 20 and int(differing) == 0, others
    assert int(early) > 0, "kernels that start early were to be among them"
    if family == "wide":
        assert "attention/attend_few.cu" in cuda


# -- the child, and who started it ---------------------------------------------------------------

KERNELS: Any = SimpleNamespace(compiles_for=(9, 0))


class Captured(list[object]):
    """Graphs, as far as it matters here: what is captured."""

    captures = True


def steps_with(*captured: object, **parts: object) -> Any:
    return SimpleNamespace(graphs=Captured(captured), **parts)


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
words = len(sys.stdin.buffer.read()), os.environ["CUDA_VISIBLE_DEVICES"], os.environ["TMPDIR"]
open({str(told)!r}, "w").write(repr(words))
time.sleep(600)
"""
    started = children_run(monkeypatch, script)
    with ahead.compiling_ahead(steps_with(), KERNELS, 100):
        words = ahead.describe((steps_with(), 100, (9, 0), os.getpid()))
        size, devices, folder = eval(wait_for(told))
        assert (size, devices) == (len(words), "") and Path(folder).is_dir()
        assert started[0].poll() is None
    assert len(started) == 1 and started[0].poll() is not None
    assert not Path(folder).exists()


def test_work_that_fails_ends_the_child_too(monkeypatch: pytest.MonkeyPatch) -> None:
    started = children_run(monkeypatch, "import time; time.sleep(600)")
    with pytest.raises(ValueError), ahead.compiling_ahead(steps_with(), KERNELS, 100):
        raise ValueError
    assert started[0].poll() is not None


def test_a_child_that_fails_is_told_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = children_run(monkeypatch, "import sys; sys.exit(3)")
    with caplog.at_level(logging.INFO), ahead.compiling_ahead(steps_with(), KERNELS, 100):
        started[0].wait(60)
    assert "ended with 3" in caplog.text


def test_what_cannot_be_described_is_told_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = children_run(monkeypatch, "")
    steps = steps_with(words=(word for word in ()))
    with caplog.at_level(logging.INFO), ahead.compiling_ahead(steps, KERNELS, 100):
        assert started == []
    assert "nothing is compiled ahead" in caplog.text


def test_a_child_that_does_not_go_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started = children_run(monkeypatch, "import time; time.sleep(600)")

    def wait(timeout: float) -> None:
        raise subprocess.TimeoutExpired("child", timeout)

    with monkeypatch.context() as stuck, ahead.compiling_ahead(steps_with(), KERNELS, 100):
        stuck.setattr(started[0], "wait", wait)
    assert started[0].wait(60) != 0


def test_a_child_does_not_outlive_one_that_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "told"
    child = f"""
import os, time
from flashdraft.children import end_with_parent
end_with_parent()
open({str(told)!r}, "w").write(str(os.getpid()))
time.sleep(600)
"""
    parent = f"""
import time
from flashdraft.children import python_command
from flashdraft.engine import ahead
from tests.unit.engine.test_ahead import KERNELS, steps_with
ahead.module_command = lambda module: python_command("-c", {child!r})
with ahead.compiling_ahead(steps_with(), KERNELS, 100):
    time.sleep(600)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, "-c", parent], env=environment)
    try:
        pid = int(wait_for(told))
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:  # one that nobody has buried runs no more
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


NOTHING: Any = SimpleNamespace(compiles_for=None)


@pytest.mark.parametrize(
    "captures, captured, kernels, num_processors",
    [(False, (), KERNELS, 8), (True, ("draw",), KERNELS, 8), (True, (), NOTHING, 8)]
    + [(True, (), KERNELS, 1)],
)
def test_where_nothing_is_to_be_gained_there_is_no_child(
    monkeypatch: pytest.MonkeyPatch,
    captures: bool,
    captured: tuple[str, ...],
    kernels: Any,
    num_processors: int,
) -> None:
    started = children_run(monkeypatch, "")
    monkeypatch.setattr(ahead, "num_processors", lambda: num_processors)
    steps = steps_with(*captured)
    steps.graphs.captures = captures
    with ahead.compiling_ahead(steps, kernels, 100):
        assert started == []
