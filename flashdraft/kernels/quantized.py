"""Weights in few bits: what they are, how they become floats again, and how floats become them.

Codes are kept one to an element here, so that any backend can pack them as its kernels read them.
This module knows no file format and no kernel; it runs on whatever device a weight lies on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from flashdraft.errors import CheckpointError, RequestError
from flashdraft.kernels.kinds import Scheme, fitting_group

SUPER_GROUP = 256  # values under one scale of scales
LARGEST_FP8 = 448.0  # of float8_e4m3fn
# Of rows in 8 bits, the largest value there is a code for: 1.75 * 2 ** 8 and 127. Here the fraction
# of a float32 like it, and its exponent.
LARGEST_CODES = {Scheme.FP8: (0x600000, 8), Scheme.INT8: (0x7E0000, 6)}
SMALLEST_EXPONENT = -100  # of their scales: smaller rows are coded as if they were so large
_INT4_ZERO = 8
_LARGEST_SCALE = 65504.0  # of float16
_INFINITE = 0x7F800000  # of float32; what is larger is no number
_PIECE = 1 << 22  # values worked on at a time: what is in between takes several floats for each
# Where the largest value of a group may come to lie on the grid -8 .. 7. Fewer bits for it leave
# finer steps to the many small ones.
_INT4_PEAKS = tuple(6.5 + 0.4 * step for step in range(7))


def code_dtype(scheme: Scheme) -> torch.dtype:
    """Of a code that lies alone in its element."""
    other = {Scheme.INT8: torch.int8, Scheme.FP8: torch.float8_e4m3fn}
    return other.get(scheme, torch.uint8)


@dataclass(frozen=True)
class Quantized:
    """A weight [..., out, in] in few bits: value = scale * (code - zero) - minimum, by groups.

    With `super_scale` the scales themselves are small integers and stand for super_scale * scale,
    as minimums do with `super_minimum`.
    """

    scheme: Scheme
    codes: Tensor  # [..., out, in] of code_dtype(scheme); int4 uses 0 .. 15, int6 0 .. 63
    scale: Tensor  # [..., out, in // group] float; with super_scale uint8 or int8
    group: int  # neighbours in a row that share a scale; in for one scale a row
    zero: int = 0
    minimum: Tensor | None = None  # [..., out, in // group] float; with super_minimum uint8
    super_scale: Tensor | None = None  # [..., out, in // 256] float16
    super_minimum: Tensor | None = None

    def __post_init__(self) -> None:
        *rows, depth = self.codes.shape
        if self.codes.dtype is not code_dtype(self.scheme) or not rows:
            raise ValueError(f"{self.codes.dtype} {list(self.codes.shape)} are no {self.scheme}.")
        if self.group < 1 or depth % self.group:
            raise ValueError(f"Rows of {depth} values do not divide into groups of {self.group}.")
        groups, super_groups = (*rows, depth // self.group), (*rows, depth // SUPER_GROUP)
        for name, shape in (
            ("scale", groups),
            ("minimum", groups),
            ("super_scale", super_groups),
            ("super_minimum", super_groups),
        ):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} is {list(tensor.shape)}; it must be {list(shape)}.")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight it stands for."""
        return tuple(self.codes.shape)

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.codes.device

    @property
    def num_bytes(self) -> int:
        """What it takes with its codes packed densely."""
        others = [tensor for name, tensor in self._tensors().items() if name != "codes"]
        codes = self.codes.numel() * self.scheme.bits // 8
        return codes + sum(tensor.numel() * tensor.itemsize for tensor in others)

    def to(self, device: torch.device | str) -> Quantized:
        """The same on another device."""
        return self._each(lambda tensor: tensor.to(device))

    def rows(self, index: Tensor) -> Quantized:
        """Some output rows, in the order of `index`."""
        index = index.to(self.device)

        def pick(tensor: Tensor) -> Tensor:
            if tensor.dtype is torch.float8_e4m3fn:  # not every device selects these
                return tensor.view(torch.uint8).index_select(-2, index).view(tensor.dtype)
            return tensor.index_select(-2, index)

        return self._each(pick)

    def expert(self, index: int) -> Quantized:
        """One matrix of a stack of them."""
        return self._each(itemgetter(index))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, computed in float32 and then rounded to `dtype`."""
        depth = self.shape[-1]
        result = torch.empty(self.shape, dtype=dtype, device=self.device)
        flat, rows = result.view(-1, depth), max(1, _PIECE // depth)
        matrix = self._each(lambda tensor: tensor.reshape(-1, tensor.shape[-1]))
        for start in range(0, len(flat), rows):
            part = slice(start, start + rows)
            flat[part] = matrix._each(itemgetter(part))._values()
        return result

    def _values(self) -> Tensor:
        """[rows, in] float32, in the one order of operations that file formats prescribe."""
        scale = _under(self.super_scale, self.scale)
        codes = self.codes.float().view(*self.scale.shape, self.group)
        values = (codes.sub_(self.zero) if self.zero else codes).mul_(scale.unsqueeze(-1))
        if self.minimum is not None:
            values.sub_(_under(self.super_minimum, self.minimum).unsqueeze(-1))
        return values.flatten(-2)

    def _tensors(self) -> dict[str, Tensor]:
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def _each(self, change: Callable[[Tensor], Tensor]) -> Quantized:
        changed: dict[str, Any] = {name: change(old) for name, old in self._tensors().items()}
        return replace(self, **changed)

    def _kind(self) -> tuple[object, ...]:
        """What two of them must share to be joined."""
        dtypes = {name: tensor.dtype for name, tensor in self._tensors().items()}
        return self.scheme, self.group, self.zero, self.shape[-1], dtypes


Matrix = Tensor | Quantized


def join_floats(parts: Sequence[Matrix], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Weights of the same inputs as one float matrix, stacked by output rows."""
    floats = [
        part.dequantize(dtype) if isinstance(part, Quantized) else part.detach() for part in parts
    ]
    moved = [part.to(device, dtype) for part in floats]
    return moved[0].contiguous() if len(moved) == 1 else torch.cat(moved)


def stack_rows(parts: Sequence[Quantized]) -> Quantized | None:
    """Weights of the same inputs as one, by output rows; None where their formats differ."""
    if any(part._kind() != parts[0]._kind() for part in parts):
        return None
    return _join(parts, lambda tensors: torch.cat(tensors, dim=-2))


def stack_experts(parts: Sequence[Quantized]) -> Quantized:
    """Weights of one shape and format behind a new leading dimension."""
    if any(part._kind() != parts[0]._kind() or part.shape != parts[0].shape for part in parts):
        raise CheckpointError("The experts of a layer are quantised in different formats.")
    return _join(parts, torch.stack)


def quantize(weight: Tensor, scheme: Scheme, group: int | None = None) -> Quantized:
    """A float weight [..., out, in] in few bits, as close as the scheme allows.

    int4 and int8 have float16 scales for groups of 32, fp8 a float32 scale for every row, unless
    `group` says otherwise; where a group does not divide a row the next smaller one is used.
    """
    if scheme is Scheme.INT6:
        raise RequestError("int6 is a format of files; quantise to int4, int8 or fp8.")
    depth = weight.shape[-1]
    group = fitting_group(depth, scheme, group)
    _check_range(weight, scheme)
    rows = weight.detach().reshape(-1, depth)
    number = rows.shape[0]
    codes = torch.empty(rows.shape, dtype=code_dtype(scheme), device=weight.device)
    scale_dtype = torch.float32 if scheme is Scheme.FP8 else torch.float16
    scale = torch.empty(number, depth // group, dtype=scale_dtype, device=weight.device)
    code = {Scheme.INT4: _code_int4, Scheme.INT8: _code_int8, Scheme.FP8: _code_fp8}[scheme]
    step = max(1, _PIECE // depth)
    for start in range(0, number, step):
        part = slice(start, start + step)
        grouped, found = code(rows[part].float().reshape(-1, depth // group, group))
        codes[part], scale[part] = grouped.flatten(-2), found
    outer = weight.shape[:-1]
    zero = _INT4_ZERO if scheme is Scheme.INT4 else 0
    return Quantized(scheme, codes.view(*outer, -1), scale.view(*outer, -1), group, zero)


def look_up(codes: Tensor, levels: Sequence[int]) -> Tensor:
    """What small codes stand for, by a table of signed integers of 8 bits."""
    table = torch.tensor(levels, dtype=torch.int8, device=codes.device)
    flat = codes.reshape(-1)
    found = torch.empty(flat.shape, dtype=torch.int8, device=codes.device)
    for start in range(0, flat.numel(), _PIECE):
        part = slice(start, start + _PIECE)
        found[part] = table[flat[part].int()]
    return found.view(codes.shape)


def code_rows(x: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Rows [num_rows, depth] in 8 bits: codes, and a scale [num_rows] float32 for each.

    A scale is the smallest power of two with which codes reach the row's largest value: so a code
    times its scale is exact in bfloat16, and any kernel for floats computes what one for codes
    does. It is no number where one of the row's values is none, or is infinite.
    """
    fraction, exponent = LARGEST_CODES[scheme]
    wide = x.float().contiguous()
    largest = (wide.view(torch.int32) & 0x7FFFFFFF).amax(-1)
    power = (largest >> 23) - 127 - exponent + ((largest & 0x7FFFFF) > fraction)
    power = power.clamp(SMALLEST_EXPONENT, 127)
    values = wide * _two_to_the(-power).unsqueeze(-1)
    codes = values if scheme is Scheme.FP8 else values.round()
    scale = _two_to_the(power).masked_fill(largest >= _INFINITE, torch.nan)
    return codes.to(code_dtype(scheme)), scale


def _two_to_the(power: Tensor) -> Tensor:
    """Powers of two from -126 to 127."""
    return (power + 127 << 23).int().view(torch.float32)


def round_rows(x: Tensor, scheme: Scheme) -> Tensor:
    """What the codes of rows stand for, in the dtype of x."""
    codes, scale = code_rows(x, scheme)
    return (codes.float() * scale.unsqueeze(-1)).to(x.dtype)


def _under(outer: Tensor | None, inner: Tensor) -> Tensor:
    """Scales (or minimums) as float32, each times the one of its super-group if there are any."""
    wide = inner.float()
    if outer is None:
        return wide
    per_super = wide.view(*outer.shape, -1)
    return per_super.mul_(outer.float().unsqueeze(-1)).flatten(-2)


def _join(parts: Sequence[Quantized], join: Callable[[list[Tensor]], Tensor]) -> Quantized:
    tensors = [part._tensors() for part in parts]
    joined: dict[str, Any] = {name: join([one[name] for one in tensors]) for name in tensors[0]}
    return replace(parts[0], **joined)


def _check_range(weight: Tensor, scheme: Scheme) -> None:
    """One pass that takes no memory: NaN and infinities survive it."""
    if weight.numel() == 0:
        return
    low, high = (bound.item() for bound in torch.aminmax(weight.detach()))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise CheckpointError("The weight holds values that are not finite.")
    limit = {Scheme.INT4: 7.0, Scheme.INT8: 127.0}.get(scheme, math.inf) * _LARGEST_SCALE
    if max(-low, high) > limit:
        raise CheckpointError(
            f"The weight holds values from {low:g} to {high:g}; {scheme} reaches {limit:g}."
        )


def _code_int4(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of [rows, groups, group]: of several scales the least squared error."""
    index = groups.abs().argmax(-1, keepdim=True)
    peak = groups.gather(-1, index).squeeze(-1)
    best_scale = torch.zeros_like(peak)
    best_error = torch.full_like(peak, torch.inf)
    for level in _INT4_PEAKS:
        codes = _round_int4(groups, -peak / level)  # the side of the peak has one code more
        # for these codes the least squares have an answer of their own
        refined = (groups * codes).sum(-1) / codes.square().sum(-1)
        scale = refined.nan_to_num(0.0, 0.0, 0.0).half().float()
        error = (_round_int4(groups, scale) * scale.unsqueeze(-1) - groups).square().sum(-1)
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        best_scale = torch.where(is_better, scale, best_scale)
    codes = _round_int4(groups, best_scale) + _INT4_ZERO
    return codes.to(torch.uint8), best_scale.half()


def _round_int4(groups: Tensor, scale: Tensor) -> Tensor:
    """The nearest of -8 .. 7 for every value; 0 where the scale is."""
    inverse = torch.where(scale == 0, 0.0, 1 / scale).unsqueeze(-1)
    return (groups * inverse).nan_to_num_(0.0).round_().clamp_(-8, 7)


def _code_int8(groups: Tensor) -> tuple[Tensor, Tensor]:
    scale = (groups.abs().amax(-1) / 127).half()
    wide = scale.float().unsqueeze(-1)
    codes = torch.where(wide == 0, 0.0, groups / wide)
    return codes.round_().clamp_(-127, 127).to(torch.int8), scale


def _code_fp8(groups: Tensor) -> tuple[Tensor, Tensor]:
    scale = groups.abs().amax(-1) / LARGEST_FP8
    scale = torch.where(scale == 0, 1.0, scale)
    codes = (groups / scale.unsqueeze(-1)).clamp_(-LARGEST_FP8, LARGEST_FP8)
    return codes.to(torch.float8_e4m3fn), scale
