"""Short causal convolutions over a block's rows, whose kernels depend on the rows (DFlash 2).

One rule, told here in tensors; a device may have it as a kernel of its own (`Kernels.convolve`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Convolution(NamedTuple):
    """What rows are convolved by.

    Row t becomes the sum over taps k of (base[k] + change[t, k]) * row t - k, where that row is of
    the same block. A group of channels that follow one another shares its change.
    """

    base: Tensor  # [taps, features]
    changes: Tensor  # [rows, taps * groups]; rows may lie apart
    places: Tensor  # [rows] int64: a row's place in its block


def convolve(x: Tensor, convolution: Convolution) -> Tensor:
    """`Kernels.convolve`, differentiable."""
    base, changes, places = convolution
    num_rows, features = x.shape
    taps = base.shape[0]
    changes = changes.reshape(num_rows, taps, -1, 1)
    groups = changes.shape[2]
    total = torch.zeros_like(x)
    for tap in range(taps):
        rows = x if tap == 0 else torch.cat([x[:tap] * 0, x[:-tap]])[:num_rows]
        kernel = base[tap].to(x.dtype).view(1, groups, -1) + changes[:, tap].to(x.dtype)
        is_there = (places >= tap).unsqueeze(1)
        total = total + torch.where(is_there, rows * kernel.view(num_rows, features), 0.0)
    return total
