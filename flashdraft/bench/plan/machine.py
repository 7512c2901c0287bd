"""This machine as something to plan for: its GPU, or its CPU with what its kernels are timed at.

A CPU has no data sheet that says what a program gets of it, so the kernel that a step spends its
time in is timed for a moment: how fast one row reads weights, and how fast many are multiplied. No
torch and no model; the kernels are called as they are.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flashdraft.bench.plan.driver import current_device
from flashdraft.bench.plan.gpus import CPU_RUNTIME_BYTES, TERA, Card, Efficiency, recognise
from flashdraft.kernels.cpu import levels

# Fitted to the default pair's steps in benchmarks/results/plan_cpu.json: what kernels take that are
# started one by one from Python, and how much of a large weight's rate a model's own ones reach.
CPU_EFFICIENCY = Efficiency(1.0, 0.6, kernel_us=21.0, is_measured=False, unpacks=False)
_OUTPUTS, _INPUTS = 8192, 16384  # a weight of 128 MiB, more than nearly every cache holds
_ROWS, _REPEATS = 16, 4
# a container's memory by both versions of cgroups: its limit, what is used, and of that files that
# are only kept because there is room
_CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


class KernelSpeed(NamedTuple):
    """What the 8-bit kernel of this CPU does."""

    bytes_per_s: float  # of weights, for one row
    operations_per_s: float  # for many rows


def this_machine() -> Card:
    """The current GPU with the memory that is free on it now, or else the CPU."""
    found = current_device()
    if found is None:
        total, free = memory(Path("/"))
        free = max(0, free - CPU_RUNTIME_BYTES)
        return Card("this machine's CPU", total, free, efficiency=CPU_EFFICIENCY, is_cpu=True)
    return recognise(found.name, found.total_bytes, found.free_bytes)


def with_speed(card: Card) -> Card:
    """A CPU with the speed of its kernels, where they were built and there is room to time them."""
    if not card.is_cpu or levels.chosen() is None:
        return card
    if card.free_bytes < 2 * _OUTPUTS * _INPUTS:
        return card
    speed = time_kernels()
    return replace(
        card,
        bandwidth_tb_s=speed.bytes_per_s / TERA,
        tflops=speed.operations_per_s / TERA,
    )


def memory(root: Path) -> tuple[int, int]:
    """Bytes of memory in all and unused, as the system and this process's limits have them."""
    known = _table(root / "proc/meminfo")
    total = 1024 * known["MemTotal"] if known else _pages()
    free = 1024 * known["MemAvailable"] if "MemAvailable" in known else total
    for folder, limit, used, kept in _CGROUPS:
        most = _number(root / folder / limit)
        if most is not None and most < total:
            spare = _table(root / folder / "memory.stat").get(kept, 0)
            taken = (_number(root / folder / used) or 0) - spare
            total, free = most, min(free, max(0, most - taken))
    return total, free


def num_cores(root: Path) -> int:
    """Cores that this process may use, a core's second thread not counted: torch's default."""
    found = set()
    for number in os.sched_getaffinity(0):
        path = root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
        try:
            found.add(path.read_text(encoding="ascii"))
        except OSError:
            found.add(str(number))
    return len(found)


def time_kernels() -> KernelSpeed:
    """The best of a few calls over a weight that no cache holds; a third of a second or so."""
    native = levels.load(str(levels.chosen()))
    threads = num_cores(Path("/"))
    weight, scale, start = _room(_OUTPUTS * _INPUTS), _room(4 * _OUTPUTS), _room(4 * _OUTPUTS)
    x, y = _room(4 * _ROWS * _INPUTS), _room(4 * _ROWS * _OUTPUTS)
    ctypes.memset(weight, 1, len(weight))  # pages that were never written are all the same one
    ctypes.memset(x, 63, len(x))  # a float of about a half in every place
    fixed = [ctypes.addressof(one) for one in (weight, scale, start)]

    def multiply(rows: int) -> None:
        native.linear_int8(
            ctypes.addressof(x),
            ctypes.addressof(y),
            rows,
            threads,
            *fixed,
            _INPUTS,
            _OUTPUTS,
        )

    one, many = _best(multiply, 1), _best(multiply, _ROWS)
    # one row is reading with little to compute; many take √(reading² + arithmetic²), as in speed.py
    arithmetic = max(many**2 - one**2, (many / 2) ** 2) ** 0.5
    return KernelSpeed(len(weight) / one, 2.0 * len(weight) * _ROWS / arithmetic)


def _room(num_bytes: int) -> ctypes.Array[ctypes.c_byte]:
    """Memory of its own, at the start of a page."""
    return (ctypes.c_byte * num_bytes).from_buffer(mmap.mmap(-1, num_bytes))


def _best(work: Callable[[int], None], rows: int) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work(rows)
        times.append(time.perf_counter() - start)
    return min(times)


def _number(path: Path) -> int | None:
    """What a file of the system says, if it is there and says a number."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _table(path: Path) -> dict[str, int]:
    """The numbers of a file of the system, by name; empty where there is none."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    words = [line.replace(":", " ").split() for line in lines]
    return {one[0]: int(one[1]) for one in words if len(one) > 1 and one[1].isdigit()}


def _pages() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
