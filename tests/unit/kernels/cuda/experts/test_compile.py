"""The kernels of a mixture of experts compile for a Hopper GPU and fit it, at Gemma 4's sizes.

As in ../test_compile.py, every launch is caught and compiled instead, in another process.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashdraft.kernels.cuda.experts.plan import (
    ALL_ROWS,
    FEW_ROWS,
    FLOAT32,
    MANY_ROWS,
    ONE_ROW,
    SOME_ROWS,
    ExpertsPlan,
)
from flashdraft.kernels.interface import Residual
from flashdraft.kernels.kinds import Activation
from tests.unit.kernels.cuda.test_compile import HOPPER, Catcher

KERNELS = {"_up_one", "_down_one", "_up_few", "_down_few", "_sort", "_up", "_down", "_mix"}
KERNELS |= {"_choose", "_route", "_residual_norms"}
HIDDEN, INNER, NUM_EXPERTS, NUM_CHOSEN = 2816, 704, 128, 8
PLANS: list[tuple[int, torch.dtype, ExpertsPlan]] = [
    (1, torch.bfloat16, ONE_ROW),
    (16, torch.bfloat16, ALL_ROWS),
    (32, torch.bfloat16, ALL_ROWS._replace(block_m=32)),
    (16, torch.bfloat16, FEW_ROWS),
    (64, torch.bfloat16, SOME_ROWS),
    (4096, torch.bfloat16, MANY_ROWS),
    (2, torch.float32, FLOAT32),
]


def compile_mixture(num_rows: int, dtype: torch.dtype, plan: ExpertsPlan) -> None:
    from flashdraft.kernels.cuda.experts.few_rows import mix_few_rows
    from flashdraft.kernels.cuda.experts.grouped import mix_rows
    from flashdraft.kernels.cuda.experts.one_row import mix_one_row

    x = torch.empty(num_rows, HIDDEN, dtype=dtype)
    gate_up = torch.empty(1, dtype=dtype).expand(NUM_EXPERTS, 2 * INNER, HIDDEN)
    down = torch.empty(1, dtype=dtype).expand(NUM_EXPERTS, HIDDEN, INNER)
    chosen = torch.zeros(num_rows, NUM_CHOSEN, dtype=torch.int64)
    inputs = (x, gate_up, down, chosen, torch.empty(chosen.shape), Activation.GELU_TANH, plan)
    if plan.splits:
        mix_few_rows(*inputs, HOPPER.num_processors)
    elif plan.block_m:
        mix_rows(*inputs, HOPPER.num_processors)
    else:
        mix_one_row(*inputs)


def compile_rows() -> None:
    from flashdraft.kernels.cuda.dense.residual import residual_norm_rows
    from flashdraft.kernels.cuda.experts.routing import choose_rows, route_rows

    scale = torch.empty(NUM_EXPERTS)
    choose_rows(torch.empty(2, NUM_EXPERTS, dtype=torch.bfloat16), NUM_CHOSEN, scale)
    router, arrivals = torch.empty(NUM_EXPERTS, HIDDEN).bfloat16(), torch.zeros(1).int()
    for num_rows in (1, 4):
        route_rows(torch.empty(num_rows, HIDDEN).bfloat16(), router, NUM_CHOSEN, scale, arrivals)
    for hidden, num_deltas, num_outputs in ((5376, 1, 1), (HIDDEN, 2, 3)):
        x, weight = torch.empty(2, hidden, dtype=torch.bfloat16), torch.empty(hidden)
        post = weight if num_deltas == 2 else None
        outputs = [weight] * num_outputs
        residual = Residual(x, [(x, weight)] * num_deltas, post, weight[:1])
        residual_norm_rows(residual, outputs, 1e-6)


def compile_everything() -> list[tuple[str, int]]:
    """(kernel, bytes of shared memory) of every launch."""
    from flashdraft.kernels.cuda import overlap
    from flashdraft.kernels.cuda.dense import residual as triton_residual
    from flashdraft.kernels.cuda.experts import few_rows, one_row, routing
    from flashdraft.kernels.cuda.experts import grouped as triton_grouped

    overlap.can_overlap = functools.cache(lambda device: True)
    overlap.MAX_ROWS = overlap.MAX_SMALL_ROWS = 1 << 30  # of any number of rows
    compiled: list[tuple[str, int]] = []
    few, grouped = few_rows, triton_grouped
    for module in (one_row, few, grouped, triton_residual, routing):
        for name in KERNELS & vars(module).keys():
            setattr(module, name, Catcher(getattr(module, name), compiled))
    for plan in PLANS:
        compile_mixture(*plan)
    compile_rows()
    return compiled


def test_every_kernel_compiles_and_fits_a_hopper_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    finished = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=280
    )
    assert finished.returncode == 0, finished.stderr
    compiled = json.loads(finished.stdout)
    assert {name for name, _ in compiled} == KERNELS
    assert [launch for launch in compiled if launch[1] > HOPPER.shared_bytes] == []


if __name__ == "__main__":
    json.dump(compile_everything(), sys.stdout)
