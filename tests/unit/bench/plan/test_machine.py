"""This machine's memory and cores, from files made up, and its kernels, as they are."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import plan_cpu
from flashdraft.bench.plan import machine
from flashdraft.bench.plan.gpus import GB, find_card
from flashdraft.bench.plan.machine import (
    CPU_EFFICIENCY,
    KernelSpeed,
    memory,
    num_cores,
    time_kernels,
    with_speed,
)
from flashdraft.kernels.cpu import levels
from flashdraft.kernels.cpu.backend import available

MEMINFO = "MemTotal:       16000000 kB\nMemFree:  100 kB\nMemAvailable:   12000000 kB\n"


def made(root: Path, **files: str) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_is_what_the_system_says(tmp_path: Path) -> None:
    assert memory(made(tmp_path)) == (16_384_000_000, 12_288_000_000)


def test_memory_is_known_where_the_system_says_little(tmp_path: Path) -> None:
    total, free = memory(tmp_path / "none")
    assert total == free > 0
    assert memory(made(tmp_path, **{"proc/meminfo": "MemTotal: 1000 kB\n"})) == (1024000, 1024000)


@pytest.mark.parametrize(
    ("folder", "limit", "used", "kept"),
    [
        ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        (
            "sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ],
)
def test_a_container_has_what_it_was_given(
    tmp_path: Path, folder: str, limit: str, used: str, kept: str
) -> None:
    limit, used = f"{folder}/{limit}", f"{folder}/{used}"
    files = {limit: f"{4 * GB}\n", used: f"{2 * GB}\n"}
    assert memory(made(tmp_path, **files)) == (4 * GB, 2 * GB)
    # files that were read and are still kept make room when it is needed
    assert memory(made(tmp_path, **{f"{folder}/memory.stat": f"anon 1\n{kept} {GB}\n"})) == (
        4 * GB,
        3 * GB,
    )
    assert memory(made(tmp_path, **{used: f"{9 * GB}"})) == (4 * GB, 0)
    for text in ("max", str(2**63)):  # no limit
        assert memory(made(tmp_path, **{limit: text})) == (16_384_000_000, 12_288_000_000)


def test_threads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert num_cores(tmp_path) == 4  # where the system does not say
    for number in range(4):
        path = f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
        made(tmp_path, **{path: f"{number % 2},{number % 2 + 2}\n"})
    assert num_cores(tmp_path) == 2
    assert num_cores(Path("/")) >= 1


@pytest.mark.skipif(not available(), reason="the native kernels were not built")
def test_the_kernel_is_timed() -> None:
    speed = time_kernels()
    assert 1e8 < speed.bytes_per_s < 1e13
    assert speed.bytes_per_s < speed.operations_per_s < 1e16  # it multiplies more than it reads


def test_a_cpu_gets_its_speed_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "time_kernels", lambda: KernelSpeed(2e10, 5e11))
    monkeypatch.setattr(levels, "chosen", lambda: "any")
    card = replace(find_card("h200"), is_cpu=True, efficiency=CPU_EFFICIENCY)
    found = with_speed(card)
    assert (found.bandwidth_tb_s, found.tflops) == (0.02, 0.5)
    assert with_speed(replace(card, is_cpu=False)).bandwidth_tb_s == 4.8
    bare = replace(card, bandwidth_tb_s=None)
    assert with_speed(replace(bare, free_bytes=10**6)).bandwidth_tb_s is None  # no room to time
    monkeypatch.setattr(levels, "chosen", lambda: None)
    assert with_speed(bare).bandwidth_tb_s is None


def test_steps_on_a_cpu_are_near_what_was_measured() -> None:
    document = json.loads(plan_cpu.RESULTS.read_text(encoding="utf-8"))
    rows = list(plan_cpu.checks(document))
    errors = [abs(found / row["step_ms"] - 1) for row, found in rows]
    assert len(rows) == 8 and max(errors) < 0.35 and sum(errors) / len(errors) < 0.2
    # the larger model's plain step, which nothing was fitted to
    ((large, found),) = ((r, f) for r, f in rows if "Qwen3" in r["model"] and r["requests"] == 1)
    assert found == pytest.approx(large["step_ms"], rel=0.15)
    assert "| predicted |" in "\n".join(plan_cpu.table(document))
