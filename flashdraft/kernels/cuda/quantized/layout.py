"""How quantised weights lie in a GPU's memory: in the order in which tiles of a product read them.

A row is cut into steps of `planes * lanes` values. An int16 of a step holds one value of every
plane, value `plane * lanes + lane`: a plane is one shift and one mask away from a tensor core, and
all of it shares one scale. Steps come first, then rows: a tile is one piece of memory. Nothing is
rounded here. Torch only, on the weight's own device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from flashdraft.errors import CheckpointError
from flashdraft.kernels.kinds import FEW_BITS_STEP, Scheme, filled_depth
from flashdraft.kernels.quantized import SUPER_GROUP, Quantized

ROW_TILE = 128  # rows are filled up to a multiple of it: no tile of a product is larger
_LANES = (64, 32, 16)  # a tensor core takes 16 values at a time
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Code(IntEnum):
    """How a plane's values are coded, as the kernels know it."""

    INT4 = 0
    INT6 = 1
    INT8 = 2
    FP8 = 3


class Number(IntEnum):
    """How scales and minimums are stored, as the kernels know it."""

    NONE = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    FLOAT32 = 3
    UNSIGNED = 4  # eight bits, times a float16 for every 256 values
    SIGNED = 5


_CODES = {
    Scheme.INT4: Code.INT4,
    Scheme.INT6: Code.INT6,
    Scheme.INT8: Code.INT8,
    Scheme.FP8: Code.FP8,
}
_NUMBERS = {
    torch.float16: Number.FLOAT16,
    torch.bfloat16: Number.BFLOAT16,
    torch.float32: Number.FLOAT32,
    torch.uint8: Number.UNSIGNED,
    torch.int8: Number.SIGNED,
}


@dataclass(frozen=True)
class Scales:
    """Scales or minimums by group.

    [..., groups, rows], or, where a step holds several groups, [..., steps, rows] with those of a
    step side by side in one integer; float32 ones as [..., steps, groups of a step, rows].
    """

    values: Tensor
    kind: Number
    over: Tensor | None = None  # [..., groups of 256, rows] float16


@dataclass(frozen=True)
class PackedWeight:
    """A weight [..., out, in] as the kernels read it."""

    shape: tuple[int, ...]
    code: Code
    zero: int
    lanes: int
    groups_per_step: int  # at least one
    steps_per_group: int  # at least one; 0 where a whole row shares one float32 scale
    codes: Tensor  # [..., steps, rows, lanes] int16
    high: Tensor | None  # int6: the upper two bits of every plane, [..., steps, rows, lanes] uint8
    scale: Scales
    minimum: Scales | None
    activations: Scheme | None = None  # what rows become before they are multiplied

    @property
    def planes(self) -> int:
        """Values in an int16."""
        return _planes(self.code)

    @property
    def is_whole(self) -> bool:
        """Whether steps divide a row: nothing was filled up."""
        return self.shape[-1] % (self.planes * self.lanes) == 0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Codes and high bits, scales and what is over them, minimums and what is over them."""
        low = (None, None) if self.minimum is None else (self.minimum.values, self.minimum.over)
        return self.codes, self.high, self.scale.values, self.scale.over, *low

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        there = [tensor for tensor in self.tensors if tensor is not None]
        return sum(tensor.numel() * tensor.itemsize for tensor in there)

    @property
    def num_steps(self) -> int:
        """Steps in a row."""
        return self.codes.shape[-3]

    @property
    def packed_rows(self) -> int:
        """Rows of one weight, with those that fill it up."""
        return self.codes.shape[-2]

    @property
    def strides(self) -> tuple[int, ...]:
        """From expert to expert in codes, scales, minimums and what is over these; else 0."""
        is_stack = len(self.shape) == 3
        minimum = None if self.minimum is None else self.minimum.values
        tensors = (self.codes, self.scale.values, minimum, self.scale.over)
        return tuple(0 if one is None or not is_stack else one.stride(0) for one in tensors)


def pack_quantized(weight: Quantized) -> PackedWeight:
    """The same weight, laid out for the kernels."""
    depth = weight.shape[-1]
    code, per_row = _CODES[weight.scheme], weight.group == depth and weight.minimum is None
    planes, lanes = _planes(code), _choose_lanes(weight)
    step = planes * lanes
    num_steps = -(-depth // step)
    spare = (0, num_steps * step - depth, 0, -weight.shape[-2] % ROW_TILE)
    codes = F.pad(weight.codes.view(torch.uint8), spare, value=weight.zero)
    codes = codes.view(*codes.shape[:-1], num_steps, planes, lanes).transpose(-4, -3)
    high = None
    if code is Code.INT6:
        high = _join(codes >> 4, 2, torch.uint8)
        codes = codes & 15
    groups_per_step = 1 if per_row else max(1, step // weight.group)
    steps_per_group = 0 if per_row else max(1, -(-weight.group // step))
    num_groups = 1 if per_row else -(-num_steps // steps_per_group) * groups_per_step

    def scales(values: Tensor, over: Tensor | None) -> Scales:
        if per_row:
            values = values.float()
        return _pack_scales(values, over, num_groups, groups_per_step)

    minimum = None
    if weight.minimum is not None:
        minimum = scales(weight.minimum, weight.super_minimum)
    return PackedWeight(
        shape=weight.shape,
        code=code,
        zero=weight.zero,
        lanes=lanes,
        groups_per_step=groups_per_step,
        steps_per_group=steps_per_group,
        codes=_join(codes, 16 // planes, torch.int16),
        high=high,
        scale=scales(weight.scale, weight.super_scale),
        minimum=minimum,
    )


def round_activations(weight: PackedWeight, scheme: Scheme) -> PackedWeight:
    """The same weight, before which rows are rounded, if it has the same 8 bits and no minimums."""
    fits = weight.code is _CODES[scheme] and weight.minimum is None
    return replace(weight, activations=scheme) if fits else weight


def stack_packed(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Weights of one shape and format behind a new leading dimension."""

    def stack(tensors: list[Tensor | None]) -> Tensor | None:
        found = [tensor for tensor in tensors if tensor is not None]
        return torch.stack(found) if found else None

    def stack_scales(scales: list[Scales]) -> Scales:
        over = stack([one.over for one in scales])
        return replace(scales[0], values=torch.stack([one.values for one in scales]), over=over)

    first = weights[0]
    minimums = [one.minimum for one in weights if one.minimum is not None]
    return replace(
        first,
        shape=(len(weights), *first.shape),
        codes=torch.stack([one.codes for one in weights]),
        high=stack([one.high for one in weights]),
        scale=stack_scales([one.scale for one in weights]),
        minimum=stack_scales(minimums) if minimums else None,
    )


def _planes(code: Code) -> int:
    return 4 if code in (Code.INT4, Code.INT6) else 2


def _choose_lanes(weight: Quantized) -> int:
    """The widest planes that share a scale and divide a row, filled up where that is little."""
    depth, group = weight.shape[-1], weight.group
    planes = _planes(_CODES[weight.scheme])

    def suits(lanes: int) -> bool:
        step = planes * lanes
        whole = step % group == 0 or group % step == 0
        shared = (
            group % lanes == 0 and whole and (weight.super_scale is None or step <= SUPER_GROUP)
        )
        return (group == depth or shared) and (lanes < 64 or planes == 2)

    fitting = [lanes for lanes in _LANES if suits(lanes)]
    if not fitting:
        allowed = "16, 32 or a multiple of 64" if planes == 4 else "16 or a multiple of 32"
        raise CheckpointError(
            f"A weight has a scale for groups of {group} values; a GPU reads {weight.scheme} in "
            f"groups of {allowed}, or of a whole row. Use a checkpoint with such groups, or run "
            "this one on the CPU."
        )
    whole = next((lanes for lanes in fitting if depth % (planes * lanes) == 0), 0)
    if planes == 4 and 32 in fitting and filled_depth(depth) % FEW_BITS_STEP == 0:
        return 32
    return whole or fitting[-1]


def _join(values: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """[..., planes, lanes] of small numbers -> [..., lanes], `width` bits for each plane."""
    *shape, planes, lanes = values.shape
    joined = torch.zeros(*shape, lanes, dtype=dtype, device=values.device)
    for plane in range(planes):
        joined |= values[..., plane, :].to(dtype) << width * plane
    return joined


def _pack_scales(
    values: Tensor, over: Tensor | None, num_groups: int, groups_per_step: int
) -> Scales:
    rows = -values.shape[-2] % ROW_TILE
    kind = _NUMBERS[values.dtype]
    values = F.pad(values, (0, num_groups - values.shape[-1], 0, rows))
    if over is not None:
        over = F.pad(over, (0, 0, 0, rows)).transpose(-1, -2).contiguous()
    if groups_per_step == 1:
        values = values.transpose(-1, -2).contiguous()
    else:
        values = values.view(*values.shape[:-1], -1, groups_per_step).transpose(-3, -2)
        if kind is Number.FLOAT32:
            values = values.transpose(-1, -2).contiguous()
        else:
            joined = _INTEGERS[groups_per_step * values.itemsize]
            values = values.contiguous().view(joined).squeeze(-1)
    if kind in (Number.FLOAT16, Number.BFLOAT16) and groups_per_step == 1:
        values = values.view(torch.int16)
    return Scales(values, kind, over)
