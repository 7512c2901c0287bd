"""The loss kernel on the CPU: in Triton's interpreter against the reference, and compiled.

Triton reads TRITON_INTERPRET when it is imported, so both run in another process, this file as a
script. bfloat16 is left to the GPU tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch

from flashdraft.train.fit.batches import NO_LABEL
from flashdraft.train.fit.loss import Head, loss_rows
from tests.interpreted import judge

HEADS = {"plain": (1.0, None), "capped": (0.7, 5.0)}
SHARED_BYTES = 227 * 1024


def check(case: str, vocab_size: int = 133) -> None:
    """A vocabulary of several tiles, the last one partly filled; rows with ties and no label."""
    from flashdraft.kernels.cuda import loss as triton_loss

    triton_loss.MAX_BLOCK = 32
    head = Head(torch.empty(0), *HEADS[case])
    torch.manual_seed(0)
    logits = 3 * torch.randn(6, vocab_size)
    logits[1, [40, 100]] = logits[1].max() + 1  # the first of equals is the likeliest
    labels = torch.tensor([5, 40, NO_LABEL, 132, 0, 77])
    results = []
    for fused in (False, True):
        rows = logits.clone()
        out = torch.full((6,), 9.0), torch.full((6,), 9.0), torch.full((6,), 9)
        if fused:
            triton_loss.loss_rows(rows, labels, head.multiplier, head.softcap, *out)
        else:
            loss_rows(rows, labels, head, *out)
        results.append((rows, *out))
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert results[1][3][1] == 40


def interpret() -> dict[str, str]:
    """Every case's failure, or an empty string."""
    failures = {}
    for case in HEADS:
        try:
            check(case)
            failures[case] = ""
        except Exception:  # reported by the test of that name
            failures[case] = traceback.format_exc()
    return failures


def compile_for_hopper() -> list[tuple[str, int]]:
    """(kernel, bytes of shared memory) of launches at the default target's and Gemma's sizes."""
    from flashdraft.kernels.cuda import loss as triton_loss
    from tests.unit.kernels.cuda.test_compile import Catcher

    compiled: list[tuple[str, int]] = []
    triton_loss._loss_row = Catcher(triton_loss._loss_row, compiled)
    for vocab_size, softcap in ((49152, None), (262144, 30.0)):
        logits = torch.empty(2, vocab_size, dtype=torch.bfloat16)
        labels, best = torch.zeros(2, 2, dtype=torch.int64)
        loss, chance = torch.empty(2, 2)
        triton_loss.loss_rows(logits, labels, 1.0, softcap, loss, chance, best)
    return compiled


def run_script(what: str, environment: dict[str, str]) -> object:
    pytest.importorskip("triton", reason="Triton is not installed")
    base = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, __file__, what],
        env=base | path | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.fixture(scope="module")
def failures() -> object:
    return run_script("interpret", {"TRITON_INTERPRET": "1"})


@pytest.mark.parametrize("case", HEADS)
def test_interpreted(case: str, failures: dict[str, str]) -> None:
    judge(failures[case])


def test_compiles_and_fits_a_hopper_gpu(tmp_path: Path) -> None:
    compiled = run_script("compile", {"TRITON_CACHE_DIR": str(tmp_path)})
    assert isinstance(compiled, list) and len(compiled) == 2
    assert all(name == "_loss_row" and shared <= SHARED_BYTES for name, shared in compiled)


if __name__ == "__main__":
    work = interpret if sys.argv[1] == "interpret" else compile_for_hopper
    json.dump(work(), sys.stdout)
