"""Weights as the native CPU kernels read them: packing, and the product with rows.

It owns the two packed formats (native/panels.h has the reasons); it knows nothing of the other
kernels. The formats differ from level to level (levels.py), so a weight stays with the extension
module that it was packed for, here called `native`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ROTATED = 64  # inputs that are mixed with each other; ROTATED in native/rotate.h
_LARGEST = 127
_MOST_INPUTS = 65536  # a longer sum of 8-bit products could overflow 32 bits


@dataclass(frozen=True)
class FloatWeight:
    """A weight in panels of 8 or 16 outputs: [panels, in, panel] float32, padded with zeros."""

    native: Any
    panels: Tensor
    in_features: int
    out_features: int
    arguments: tuple[int, ...]  # as linear_float takes them

    @classmethod
    def pack(cls, native: Any, weight: Tensor) -> FloatWeight:
        """From [out, in] float32."""
        out_features, in_features = weight.shape
        panels = _in_panels(weight, native.PANEL).transpose(1, 2).contiguous()
        arguments = (panels.data_ptr(), in_features, out_features)
        return cls(native, panels, in_features, out_features, arguments)

    def multiply(self, x: int, y: int, rows: int, threads: int) -> None:
        """y = x @ weight.T, for the addresses of dense rows."""
        self.native.linear_float(x, y, rows, threads, *self.arguments)


@dataclass(frozen=True)
class Int8Weight:
    """A rotated weight in 8 bits with one scale per output.

    panels [panels, padded_in / group, panel, group] int8, with groups of 4 or 8 inputs; scale and
    start [panels * panel]: start is -128 * (the output's sum of weights), for processors that
    multiply unsigned activations.
    """

    native: Any
    panels: Tensor
    scale: Tensor
    start: Tensor
    in_features: int
    out_features: int
    arguments: tuple[int, ...]  # as linear_int8 takes them

    @classmethod
    def pack(cls, native: Any, weight: Tensor, threads: int) -> Int8Weight:
        """From [out, in] float32."""
        out_features, in_features = weight.shape
        if in_features > _MOST_INPUTS:
            raise ValueError(
                f"8-bit weights have at most {_MOST_INPUTS} inputs, not {in_features}; use float32."
            )
        rotated = rotate(native, weight, threads)
        scale = rotated.abs().amax(-1) / _LARGEST
        rounded = rotated.div_(scale.clamp(min=1e-30).unsqueeze(-1)).round_()
        rounded = rounded.clamp_(-_LARGEST, _LARGEST)
        start = rounded.sum(-1).mul_(-128).to(torch.int32)
        panel, group = native.PANEL, native.GROUP
        values = _in_panels(rounded.to(torch.int8), panel)
        panels = values.view(len(values), panel, -1, group).transpose(1, 2).contiguous()
        padding = len(panels) * panel - out_features
        scale, start = F.pad(scale, (0, padding)), F.pad(start, (0, padding))
        addresses = (panels.data_ptr(), scale.data_ptr(), start.data_ptr())
        arguments = (*addresses, in_features, out_features)
        return cls(native, panels, scale, start, in_features, out_features, arguments)

    def multiply(self, x: int, y: int, rows: int, threads: int) -> None:
        """y = x @ weight.T, for the addresses of dense rows."""
        self.native.linear_int8(x, y, rows, threads, *self.arguments)


def _in_panels(weight: Tensor, panel: int) -> Tensor:
    """[out, in] -> [panels, panel, in]: an even number of panels, padded with zeros."""
    padding = -weight.shape[0] % (2 * panel)
    return F.pad(weight, (0, 0, 0, padding)).view(-1, panel, weight.shape[1])


def rotate(native: Any, x: Tensor, threads: int) -> Tensor:
    """Rows of float32 padded to a multiple of 64 and turned as native/rotate.h turns activations.

    Not by torch's matrix product, whose bits differ from processor to processor.
    """
    x = x.contiguous()
    rows, columns = x.shape
    out = torch.empty(rows, columns + -columns % _ROTATED)
    native.rotate_rows(x.data_ptr(), out.data_ptr(), rows, columns, threads)
    return out
