"""Float weights as GGUF blocks: the quantisers that make test files of other formats.

Q4_0, Q5_0 and Q8_0 let the largest value of a block set its scale, as llama.cpp does it and bit for
bit as the `gguf` package does. The k-quants search scale and minimum of every group for the least
squared error. It knows no files and no models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_SUPER_BLOCK = 256  # values under one scale of scales in a k-quant
_PIECE = 1 << 22  # values quantised at a time
# Into how many steps a group's span is cut before least squares place them anew: fewer than the
# codes allow leave room at the ends, more cut the extremes off for finer steps in the middle.
_AFFINE_STEPS = tuple(13.5 + 0.5 * step for step in range(9))
_SYMMETRIC_STEPS = tuple(29.0 + step for step in range(7))


class Kind(NamedTuple):
    """How a tensor is stored."""

    type_id: int  # of the tensor, in the file
    file_type: int  # general.file_type of a file that is mostly this
    block_size: int  # values
    block_bytes: int
    encode: Callable[[Tensor], Tensor]  # float32 [blocks, block_size] -> uint8 [blocks, bytes]


def encode(values: Tensor, kind: str) -> Tensor:
    """A tensor's bytes, uint8 [bytes], in the format `kind`."""
    block_size, code = KINDS[kind].block_size, KINDS[kind].encode
    blocks = values.float().reshape(-1, block_size)
    step = _PIECE // block_size
    pieces = [blocks[start : start + step] for start in range(0, len(blocks), step)]
    return torch.cat([code(piece).flatten() for piece in pieces])


def _f32(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.uint8)


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.bfloat16().view(torch.uint8)


def _q4_0(blocks: Tensor) -> Tensor:
    scale, codes = _by_peak(blocks, 8)
    return torch.cat([_halves(scale), _pair(codes)], dim=-1)


def _q5_0(blocks: Tensor) -> Tensor:
    scale, codes = _by_peak(blocks, 16)
    shifts = torch.arange(8, dtype=torch.uint8)
    high = ((codes >> 4).view(-1, 4, 8) << shifts).sum(-1, dtype=torch.uint8)
    return torch.cat([_halves(scale), high, _pair(codes & 15)], dim=-1)


def _q8_0(blocks: Tensor) -> Tensor:
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    scaled = blocks * _inverse(scale)
    codes = (scaled.abs() + 0.5).floor() * scaled.sign()  # halves away from zero, unlike torch's
    return torch.cat([_halves(scale), codes.to(torch.int8).view(torch.uint8)], dim=-1)


def _q4_k(blocks: Tensor) -> Tensor:
    groups = blocks.view(-1, 8, 32)
    scale, minimum = search_affine(groups, 15)
    outer_scale = (scale.amax(-1, keepdim=True) / 63).half()
    outer_minimum = (minimum.amax(-1, keepdim=True) / 63).half()
    scale_codes = _nearest(scale, outer_scale.float(), 0, 63)
    minimum_codes = _nearest(minimum, outer_minimum.float(), 0, 63)
    # the codes make good for what the scales and minimums lost by becoming 6 bits
    scale = (scale_codes * outer_scale.float()).unsqueeze(-1)
    minimum = (minimum_codes * outer_minimum.float()).unsqueeze(-1)
    codes = _nearest(groups + minimum, scale, 0, 15).to(torch.uint8)
    packed = _six_bits(scale_codes.to(torch.uint8), minimum_codes.to(torch.uint8))
    pairs = _pair(codes.view(-1, 4, 64)).flatten(-2)
    return torch.cat([_halves(outer_scale), _halves(outer_minimum), packed, pairs], dim=-1)


def _q6_k(blocks: Tensor) -> Tensor:
    groups = blocks.view(-1, 16, 16)
    scale = search_symmetric(groups, 32)
    outer = (_peak(scale) / -128).half()
    scale_codes = _nearest(scale, outer.float(), -128, 127)
    codes = _nearest(groups, (scale_codes * outer.float()).unsqueeze(-1), -32, 31) + 32
    halves = codes.to(torch.uint8).view(-1, 2, 128)
    low = _pair(halves & 15).flatten(-2)
    first, second, third, fourth = (halves >> 4).chunk(4, dim=-1)
    high = (first | second << 2 | third << 4 | fourth << 6).flatten(-2)
    inner = scale_codes.to(torch.int8).view(torch.uint8)
    return torch.cat([low, high, inner, _halves(outer)], dim=-1)


def search_affine(groups: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Scale and minimum, neither negative, of groups [..., values] ≈ scale * code - minimum.

    Codes run from 0 to `largest`. Of several scales, each with the codes it leads to and then the
    least squares for these codes, the one with the smallest squared error.
    """
    low = groups.amin(-1).clamp(max=0.0)
    span = groups.amax(-1) - low
    scale, minimum = span / largest, -low
    best_error = _affine_error(groups, scale, minimum, largest)
    for steps in _AFFINE_STEPS:
        codes = _nearest(groups - low.unsqueeze(-1), (span / steps).unsqueeze(-1), 0, largest)
        found = _least_squares(groups, codes)
        error = _affine_error(groups, *found, largest)
        is_better = error < best_error
        scale = torch.where(is_better, found[0], scale)
        minimum = torch.where(is_better, found[1], minimum)
        best_error = torch.where(is_better, error, best_error)
    return scale, minimum


def search_symmetric(groups: Tensor, largest: int) -> Tensor:
    """The signed scale of groups [..., values] ≈ scale * code, codes -largest .. largest - 1."""
    peak = _peak(groups)
    best = peak / -largest
    best_error = (_rounded(groups, best, largest) - groups).square().sum(-1, keepdim=True)
    for steps in _SYMMETRIC_STEPS:
        codes = _nearest(groups, peak / -steps, -largest, largest - 1)
        scale = _ratio((groups * codes).sum(-1), codes.square().sum(-1)).unsqueeze(-1)
        error = (_rounded(groups, scale, largest) - groups).square().sum(-1, keepdim=True)
        is_better = error < best_error
        best = torch.where(is_better, scale, best)
        best_error = torch.where(is_better, error, best_error)
    return best.squeeze(-1)


def _least_squares(groups: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the minimum that fit given codes best; a minimum below 0 becomes 0."""
    count = groups.shape[-1]
    total, square = codes.sum(-1), codes.square().sum(-1)
    mixed, values = (groups * codes).sum(-1), groups.sum(-1)
    scale = _ratio(count * mixed - total * values, count * square - total.square())
    minimum = (scale * total - values) / count
    scale = torch.where(minimum < 0, _ratio(mixed, square), scale)
    return scale.clamp(min=0.0), minimum.clamp(min=0.0)


def _affine_error(groups: Tensor, scale: Tensor, minimum: Tensor, largest: int) -> Tensor:
    scale, minimum = scale.unsqueeze(-1), minimum.unsqueeze(-1)
    codes = _nearest(groups + minimum, scale, 0, largest)
    return (codes * scale - minimum - groups).square().sum(-1)


def _rounded(groups: Tensor, scale: Tensor, largest: int) -> Tensor:
    return _nearest(groups, scale, -largest, largest - 1) * scale


def _by_peak(blocks: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """The scale at which the largest value has the code 0, and all codes 0 .. 2 * largest - 1."""
    scale = _peak(blocks) / -largest
    codes = (blocks * _inverse(scale) + (largest + 0.5)).trunc()
    return scale, codes.clamp(0, 2 * largest - 1).to(torch.uint8)


def _peak(groups: Tensor) -> Tensor:
    """The value of the largest magnitude, with its sign: [..., 1]."""
    return groups.gather(-1, groups.abs().argmax(-1, keepdim=True))


def _nearest(values: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    return (values * _inverse(scale)).round().clamp(low, high)


def _inverse(scale: Tensor) -> Tensor:
    return _ratio(torch.ones_like(scale), scale)


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """0 where there is nothing to divide by."""
    return torch.where(below == 0, 0.0, above / below)


def _halves(scale: Tensor) -> Tensor:
    return scale.half().view(torch.uint8)


def _pair(codes: Tensor) -> Tensor:
    """Codes of 4 bits two to a byte: the first half of the last dimension low, the second high."""
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4


def _six_bits(scale: Tensor, minimum: Tensor) -> Tensor:
    """Eight scales and eight minimums in twelve bytes, as gguf/blocks.py takes them apart."""
    first = scale[:, :4] | scale[:, 4:] >> 4 << 6
    second = minimum[:, :4] | minimum[:, 4:] >> 4 << 6
    third = scale[:, 4:] & 15 | (minimum[:, 4:] & 15) << 4
    return torch.cat([first, second, third], dim=-1)


KINDS = {
    "F32": Kind(0, 0, 1, 4, _f32),
    "BF16": Kind(30, 32, 1, 2, _bf16),
    "Q4_0": Kind(2, 2, 32, 18, _q4_0),
    "Q5_0": Kind(6, 8, 32, 22, _q5_0),
    "Q8_0": Kind(8, 7, 32, 34, _q8_0),
    "Q4_K": Kind(12, 14, _SUPER_BLOCK, 144, _q4_k),
    "Q6_K": Kind(14, 18, _SUPER_BLOCK, 210, _q6_k),
}
