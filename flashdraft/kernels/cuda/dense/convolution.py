# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Short convolutions over a block's rows (kernels/convolution.py), as one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.convolution import Convolution

COLUMNS = 1024  # of a program


def convolve(x: Tensor, convolution: Convolution) -> Tensor:
    """`Kernels.convolve`, whose sums are float32."""
    base, changes, places = convolution
    (num_rows, features), taps = x.shape, base.shape[0]
    assert x.is_contiguous() and base.is_contiguous() and changes.stride(1) == 1
    groups = changes.shape[1] // taps
    total = torch.empty_like(x)
    if num_rows == 0:
        return total
    columns = min(COLUMNS, triton.next_power_of_2(features))
    _convolve[(num_rows, triton.cdiv(features, columns))](
        x,
        base,
        changes,
        places,
        total,
        changes.stride(0),
        FEATURES=features,
        GROUPS=groups,
        TAPS=taps,
        COLUMNS=columns,
        num_warps=4,
    )
    return total


@triton.jit
def _convolve(
    x: tl.tensor,
    base: tl.tensor,
    changes: tl.tensor,
    places: tl.tensor,
    total: tl.tensor,
    stride: tl.tensor,
    FEATURES: tl.constexpr,
    GROUPS: tl.constexpr,
    TAPS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < FEATURES
    group = column // (FEATURES // GROUPS)
    place = tl.load(places + row) + column * 0
    found = tl.zeros([COLUMNS], tl.float32)
    for tap in range(TAPS):
        is_there = real & (place >= tap)
        value = tl.load(x + (row - tap) * FEATURES + column, mask=is_there, other=0.0)
        kernel = tl.load(base + tap * FEATURES + column, mask=real, other=0.0).to(tl.float32)
        change = tl.load(changes + row * stride + tap * GROUPS + group, mask=real, other=0.0)
        found += value.to(tl.float32) * (kernel + change.to(tl.float32))
    tl.store(total + row * FEATURES + column, found.to(total.dtype.element_ty), mask=real)
