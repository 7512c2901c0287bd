"""Weights as the native CPU kernels read them: packing, and the product with rows.

It owns the two packed formats (native/panels.h has the reasons) and loads the extension module;
it knows nothing of the other kernels. Without the extension `native` is None.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _load() -> Any:
    try:
        return importlib.import_module("flashdraft.kernels.cpu._native")
    except ImportError:
        return None


native: Any = _load()

_ROTATED = 64  # inputs that are mixed with each other; ROTATED in native/rotate.h
_LARGEST = 127
_MOST_INPUTS = 65536  # a longer sum of 8-bit products could overflow 32 bits


@dataclass(frozen=True)
class FloatWeight:
    """A weight in panels of 8 or 16 outputs: [panels, in, panel] float32, padded with zeros."""

    panels: Tensor
    in_features: int
    out_features: int
    arguments: tuple[int, ...]  # as linear_float takes them

    @classmethod
    def pack(cls, weight: Tensor) -> FloatWeight:
        """From [out, in] float32."""
        out_features, in_features = weight.shape
        panels = _in_panels(weight).transpose(1, 2).contiguous()
        arguments = (panels.data_ptr(), in_features, out_features)
        return cls(panels, in_features, out_features, arguments)

    def multiply(self, x: int, y: int, rows: int, threads: int) -> None:
        """y = x @ weight.T, for the addresses of dense rows."""
        native.linear_float(x, y, rows, threads, *self.arguments)


@dataclass(frozen=True)
class Int8Weight:
    """A rotated weight in 8 bits with one scale per output.

    panels [panels, padded_in / 4, panel, 4] int8; scale and start [panels * panel]: start is
    -128 * (the output's sum of weights), for processors that multiply unsigned activations.
    """

    panels: Tensor
    scale: Tensor
    start: Tensor
    in_features: int
    out_features: int
    arguments: tuple[int, ...]  # as linear_int8 takes them

    @classmethod
    def pack(cls, weight: Tensor) -> Int8Weight:
        """From [out, in] float32."""
        out_features, in_features = weight.shape
        if in_features > _MOST_INPUTS:
            raise ValueError(
                f"8-bit weights have at most {_MOST_INPUTS} inputs, not {in_features}; use float32."
            )
        rotated = rotate(weight)
        scale = rotated.abs().amax(-1) / _LARGEST
        rounded = rotated.div_(scale.clamp(min=1e-30).unsqueeze(-1)).round_()
        rounded = rounded.clamp_(-_LARGEST, _LARGEST)
        start = rounded.sum(-1).mul_(-128).to(torch.int32)
        values = _in_panels(rounded.to(torch.int8))
        panels = values.view(len(values), native.PANEL, -1, 4).transpose(1, 2).contiguous()
        padding = len(panels) * native.PANEL - out_features
        scale, start = F.pad(scale, (0, padding)), F.pad(start, (0, padding))
        addresses = (panels.data_ptr(), scale.data_ptr(), start.data_ptr())
        arguments = (*addresses, in_features, out_features)
        return cls(panels, scale, start, in_features, out_features, arguments)

    def multiply(self, x: int, y: int, rows: int, threads: int) -> None:
        """y = x @ weight.T, for the addresses of dense rows."""
        native.linear_int8(x, y, rows, threads, *self.arguments)


def _in_panels(weight: Tensor) -> Tensor:
    """[out, in] -> [panels, panel, in]: an even number of panels, padded with zeros."""
    padding = -weight.shape[0] % (2 * native.PANEL)
    return F.pad(weight, (0, 0, 0, padding)).view(-1, native.PANEL, weight.shape[1])


def rotate(x: Tensor) -> Tensor:
    """Rows padded to a multiple of 64 and turned as native/rotate.h turns activations."""
    mix = torch.ones(1, 1)
    while len(mix) < _ROTATED:
        mix = torch.cat([torch.cat([mix, mix], 1), torch.cat([mix, -mix], 1)])
    padded = F.pad(x, (0, -x.shape[1] % _ROTATED))
    return (padded.view(-1, _ROTATED) @ (mix / 8)).view(padded.shape)
