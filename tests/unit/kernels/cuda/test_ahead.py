"""What is only compiled: found on disk by whoever launches it, and launched by nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from flashdraft.kernels.cuda import ahead, card
from flashdraft.kernels.cuda.dense.rows import norm_rows
from flashdraft.kernels.cuda.driver import Kernel, can_compile, make_map

meta = torch.device("meta")
assert card.capability_of(meta) is None
rows = torch.empty(4, 256, dtype=torch.bfloat16, device=meta)
with ahead.compiling_only((9, 0), 2):
    assert card.capability_of(meta) == (9, 0)
    for _ in range(3):
        norm_rows(rows, rows[0], 1e-6)
    assert can_compile(meta)
    make_map(rows.unsqueeze(1), (4, 1, 64))
    Kernel.load("probe.cu", "probe", meta).launch(1, 32, 0, None, False)
    norm_rows(rows.float(), None, 1e-6)
try:
    Kernel.load("no such file.cu", "probe", torch.device("cpu"))
except Exception:
    print("as before")
"""


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("cache")
    finished = run(folder, SCRIPT)
    assert finished.returncode == 0, finished.stderr
    return folder, finished.stdout


def test_every_kernel_lies_on_disk_once(cache: tuple[Path, str]) -> None:
    names = sorted(path.stem for path in cache[0].rglob("*.cubin"))
    assert names == ["_norm", "_norm", "probe"]


def test_afterwards_kernels_are_loaded_again(cache: tuple[Path, str]) -> None:
    assert cache[1] == "as before\n"


def test_a_kernel_that_does_not_compile_keeps_no_other_from_it(tmp_path: Path) -> None:
    script = SCRIPT.replace(
        'Kernel.load("probe.cu", "probe", meta)', 'Kernel.load("absent.cu", "probe", meta)'
    )
    finished = run(tmp_path, script)
    assert finished.returncode == 0, finished.stderr
    assert sorted(path.stem for path in tmp_path.rglob("*.cubin")).count("_norm") == 2
