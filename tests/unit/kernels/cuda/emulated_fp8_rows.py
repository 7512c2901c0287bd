"""cuda/quantized/fp8_rows.cu on a CPU."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from flashdraft.kernels.cuda.quantized.activations import CodedRows
from flashdraft.kernels.cuda.quantized.fp8_rows import Fp8Plan, make_flags, prepare
from flashdraft.kernels.cuda.quantized.layout import PackedWeight
from flashdraft.kernels.kinds import Activation
from tests.unit.kernels.cuda.emulated import build, emulated_map
from tests.unit.kernels.cuda.emulated_many_rows import GUARD, guarded


def multiply(
    x: CodedRows, weight: PackedWeight, plan: Fp8Plan, activation: Activation | None = None
) -> Tensor:
    """What `multiply_fp8` launches; with blocks in both orders, which must give the same bits."""
    arrivals = torch.zeros(1 << 10, dtype=torch.int32)
    settings = weight, plan, arrivals, torch.bfloat16, activation, emulated_map
    work, output, parts = prepare(x, *settings)
    library = build("fp8_rows", *make_flags(plan, activation).items())
    assert library.shared_bytes() == plan.shared_bytes
    assert library.argument_bytes() == ctypes.sizeof(work)
    found = []
    for backwards in (0, 1):
        memory = [guarded(tensor) for tensor in (output, parts)]
        work.output, work.parts = (room.data_ptr() for room in memory)
        library.run(ctypes.byref(work), plan.num_blocks, backwards)
        assert not arrivals.any()
        assert all(bool((room[-GUARD:] == 255).all()) for room in memory)
        found.append(memory[0][:-GUARD].view(torch.bfloat16).view(output.shape))
    assert torch.equal(*(one.view(torch.int16) for one in found))
    return found[0]
