"""cuda/quantized/many_rows.cu on a CPU."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from flashdraft.kernels.cuda.quantized.few_rows_plan import describe_product
from flashdraft.kernels.cuda.quantized.layout import PackedWeight
from flashdraft.kernels.cuda.quantized.many_rows import ManyPlan, make_flags, prepare
from flashdraft.kernels.kinds import Activation
from tests.unit.kernels.cuda.emulated import build, emulated_map

GUARD = 4096  # bytes behind what the kernels write


class Fenced:
    """A copy of memory that ends where nothing may be read."""

    def __init__(self, address: int, num_bytes: int) -> None:
        room = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, room + mmap.PAGESIZE)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.address = begin + room - num_bytes
        ctypes.memmove(self.address, address, num_bytes)
        fence = ctypes.c_void_p(begin + room)
        assert ctypes.CDLL(None).mprotect(fence, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0


def guarded(tensor: Tensor) -> Tensor:
    """Room for a tensor's bytes, and what must stay as it is behind it; none of it is a number."""
    return torch.full((tensor.nbytes + GUARD,), 255, dtype=torch.uint8)


def multiply(
    x: Tensor, weight: PackedWeight, plan: ManyPlan, activation: Activation | None = None
) -> Tensor:
    """What `launch` launches, one block after the other."""
    product = describe_product(weight, activation is not None)
    assert product is not None
    arrivals = torch.zeros(1 << 10, dtype=torch.int32)
    work, output, parts = prepare(x, weight, product, plan, arrivals, emulated_map)
    last = (x.shape[0] - 1) * x.stride(0) + x.shape[1]
    codes, scale = weight.codes, weight.scale.values
    inputs = Fenced(x.data_ptr(), 2 * last), Fenced(codes.data_ptr(), codes.nbytes)
    scales = Fenced(scale.data_ptr(), scale.nbytes)
    work.x.words[0], work.codes.words[0] = (one.address for one in inputs)
    work.scale = scales.address
    library = build("many_rows", *make_flags(product, plan, activation).items())
    assert library.shared_bytes() == plan.shared_bytes(product)
    memory = [guarded(tensor) for tensor in (output, parts)]
    work.output, work.parts = (room.data_ptr() for room in memory)
    library.run(ctypes.byref(work), plan.num_blocks)
    assert not arrivals.any()
    assert all(bool((room[-GUARD:] == 255).all()) for room in memory)
    return memory[0][:-GUARD].view(torch.bfloat16).view(output.shape)
