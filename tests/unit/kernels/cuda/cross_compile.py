"""Compiling Triton kernels for cards that are not there, with their launchers' own arguments.

A *case* is any call that launches kernels, over tensors on torch's `meta` device. Every launch in
it is caught and compiled by Triton itself, which is told that the card is present: what is a
constant, what is aligned and what divides by 16 follows as in a real launch. Nothing is launched.

Triton may be in interpreter mode in the tests' own process, and holds one card at a time: every
card has a process of its own, which reports in JSON.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import flashdraft.kernels
from flashdraft.kernels.cuda.plan import DeviceLimits

Case = Callable[[], object]


class Card(NamedTuple):
    """One card of an architecture: what it is compiled for, and what its plans are made from."""

    capability: int
    limits: DeviceLimits


CARDS = {
    "sm_80": Card(80, DeviceLimits(108, 163 * 1024, generation=8)),  # A100
    "sm_89": Card(89, DeviceLimits(128, 99 * 1024, generation=8)),  # RTX 4090; sm_86 is as small
    "sm_90": Card(90, DeviceLimits(132, 227 * 1024, generation=9)),  # H100, H200
    "sm_120": Card(120, DeviceLimits(170, 99 * 1024, generation=12)),  # RTX 5090
}


@dataclass(frozen=True)
class Compiled:
    """One kernel as it was compiled for one launch."""

    kernel: str  # module.function
    shared_bytes: int
    spilled_bytes: int  # of a thread's registers
    starts_early: bool  # waits for its predecessor by itself
    copies_ahead: bool  # from global to shared memory while it computes
    is_half: bool  # numbers of 16 bits are among its arguments
    digest: str  # two launches of one digest compile once


@dataclass(frozen=True)
class Found:
    """What became of one case."""

    failure: str  # empty: everything compiled
    compiled: list[Compiled]


def launched_kernels() -> set[str]:
    """Every kernel that a launcher of the package starts, by the look of its source."""
    folder = Path(flashdraft.kernels.__file__).parent
    found = set()
    for path in (folder / "cuda").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kernels = {
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
            and any("triton.jit" in ast.unparse(mark) for mark in node.decorator_list)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = ast.unparse(node.func.value)
                where = f"{path.parent.name}.{path.stem}"
                found |= {f"{where}.{name}"} if name in kernels else set()
    return found


def compile_cases(file: str, card: str) -> dict[str, Found]:
    """The test's part: run the file as a script, which must call `report`, and read it."""
    # Triton's own cache is kept: a kernel is compiled again only when its source has changed.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    finished = subprocess.run(
        [sys.executable, file, card], env=environment, capture_output=True, text=True, timeout=900
    )
    assert finished.returncode == 0, finished.stderr
    return {
        name: Found(found["failure"], [Compiled(**each) for each in found["compiled"]])
        for name, found in json.loads(finished.stdout).items()
    }


def report(card: str, cases: Mapping[str, Case]) -> None:
    """The script's part: what became of every case, as JSON on stdout."""
    compiled = pretend(CARDS[card])
    found = {}
    for name, case in cases.items():
        compiled.clear()
        failure = ""
        try:
            case()
        except Exception:  # reported by the test of that name
            failure = traceback.format_exc()
        found[name] = asdict(Found(failure, list(compiled)))
    json.dump(found, sys.stdout)


def pretend(card: Card) -> list[Compiled]:
    """Make this process see the card; every later launch ends in the list instead."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    from flashdraft.kernels.cuda.card import tell

    target = GPUTarget("cuda", card.capability, 32)
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )
    triton.runtime.driver.set_active(driver)
    tell(divmod(card.capability, 10), card.limits)
    compiled: list[Compiled] = []

    def launch(function: Any, grid: tuple[int, ...], *values: Any, **named: Any) -> None:
        assert all(size > 0 for size in grid)
        kernel = function.warmup(*values, grid=grid, **named)
        module = ".".join(function.fn.__module__.split(".")[-2:])
        name = f"{module}.{function.fn.__name__}"
        compiled.append(_describe(name, kernel, (*values, *named.values())))

    JITFunction.__getitem__ = lambda self, grid: functools.partial(launch, self, grid)
    return compiled


def _describe(name: str, kernel: Any, values: tuple[Any, ...]) -> Compiled:
    ptx = kernel.asm["ptx"]
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return Compiled(
        kernel=name,
        shared_bytes=kernel.metadata.shared,
        spilled_bytes=count_spilled(kernel.asm["cubin"]),
        starts_early="griddepcontrol" in ptx,
        copies_ahead="cp.async" in ptx,
        is_half=any(each.dtype in (torch.bfloat16, torch.float16) for each in tensors),
        digest=kernel.hash,
    )


@functools.cache  # many launches have the same kernel
def count_spilled(binary: bytes) -> int:
    """Bytes of the stack, which holds what finds no register; read by Triton's own tool."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"STACK:(\d+)", usage)  # of every kernel
    assert found, usage
    return max(map(int, found))
