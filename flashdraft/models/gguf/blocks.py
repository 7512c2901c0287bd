"""The quantised block formats of GGUF files, taken apart without loss into `Quantized` weights.

Plain torch on the device where the blocks lie, so that a large file is unpacked by the GPU it is
meant for. Where the bytes come from is file.py's business.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashdraft.kernels.kinds import Scheme
from flashdraft.kernels.quantized import SUPER_GROUP, Quantized, look_up

_BLOCK = 32  # values of a simple block
_SCALE_BYTES = 12  # of 6 bits each: eight scales and eight minimums, or sixteen scales
# what the codes of IQ4_NL and IQ4_XS stand for: steps that grow towards the ends
_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def unpack_blocks(blocks: Tensor, name: str) -> Quantized:
    """A weight [..., out, in] from its raw rows [..., out, bytes] uint8 in the format `name`."""
    unpack, block_bytes = _FORMATS[name]
    return unpack(blocks.reshape(*blocks.shape[:-1], -1, block_bytes))


def _q4_0(blocks: Tensor) -> Quantized:
    codes = _nibbles(blocks[..., 2:], _BLOCK)
    return _simple(Scheme.INT4, codes, _halves(blocks, 0), zero=8)


def _q4_1(blocks: Tensor) -> Quantized:
    codes = _nibbles(blocks[..., 4:], _BLOCK)
    return _simple(Scheme.INT4, codes, _halves(blocks, 0), minimum=-_halves(blocks, 2))


def _q5_0(blocks: Tensor) -> Quantized:
    codes = _nibbles(blocks[..., 6:], _BLOCK) | _bits(blocks[..., 2:6]) << 4
    return _simple(Scheme.INT8, codes.view(torch.int8), _halves(blocks, 0), zero=16)


def _q5_1(blocks: Tensor) -> Quantized:
    codes = _nibbles(blocks[..., 8:], _BLOCK) | _bits(blocks[..., 4:8]) << 4
    minimum = -_halves(blocks, 2)
    return _simple(Scheme.INT8, codes.view(torch.int8), _halves(blocks, 0), minimum=minimum)


def _q8_0(blocks: Tensor) -> Quantized:
    codes = blocks[..., 2:].contiguous().view(torch.int8)
    return _simple(Scheme.INT8, codes, _halves(blocks, 0))


def _q4_k(blocks: Tensor) -> Quantized:
    codes = _nibbles(blocks[..., 4 + _SCALE_BYTES :], 2 * _BLOCK)
    return _with_minimums(Scheme.INT4, codes, blocks)


def _q5_k(blocks: Tensor) -> Quantized:
    start = 4 + _SCALE_BYTES
    high = blocks[..., start : start + _BLOCK]  # bit g of byte l belongs to value l of group g
    high = torch.cat([high >> group & 1 for group in range(SUPER_GROUP // _BLOCK)], dim=-1)
    codes = _nibbles(blocks[..., start + _BLOCK :], 2 * _BLOCK) | high << 4
    return _with_minimums(Scheme.INT8, codes.view(torch.int8), blocks)


def _q6_k(blocks: Tensor) -> Quantized:
    codes = []
    for half in range(2):  # each of 128 values: 64 bytes of low bits, 32 of high ones
        low = blocks[..., 64 * half : 64 * (half + 1)]
        high = blocks[..., 128 + 32 * half : 128 + 32 * (half + 1)]
        high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
        codes.append(torch.cat([low & 15, low >> 4], dim=-1) | high << 4)
    return Quantized(
        Scheme.INT6,
        torch.cat(codes, dim=-1).flatten(-2),
        blocks[..., 192:208].contiguous().view(torch.int8).flatten(-2),
        group=16,
        zero=32,
        super_scale=_halves(blocks, 208).flatten(-2),
    )


def _q2_k(blocks: Tensor) -> Quantized:
    """Sixteen scales and minimums of 4 bits in a byte each, 64 bytes of codes, two float16."""
    both = blocks[..., :16]
    return Quantized(
        Scheme.INT4,
        _pairs(blocks[..., 16:80]).flatten(-2),
        (both & 15).flatten(-2),
        group=16,
        minimum=(both >> 4).flatten(-2),
        super_scale=_halves(blocks, 80).flatten(-2),
        super_minimum=_halves(blocks, 82).flatten(-2),
    )


def _q3_k(blocks: Tensor) -> Quantized:
    """32 bytes of upper bits, 64 of lower ones, sixteen scales of 6 bits, a float16."""
    high = blocks[..., :32]  # bit g of byte l belongs to value l of 32 in run g
    high = torch.cat([high >> run & 1 for run in range(8)], dim=-1)
    low, upper = blocks[..., 96:104], blocks[..., 104:108]
    upper = torch.cat([upper >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    scale = torch.cat([low & 15, low >> 4], dim=-1) | upper << 4
    return Quantized(
        Scheme.INT4,
        (_pairs(blocks[..., 32:96]) | high << 2).flatten(-2),
        (scale.view(torch.int8) - 32).flatten(-2),
        group=16,
        zero=4,
        super_scale=_halves(blocks, 108).flatten(-2),
    )


def _iq4_nl(blocks: Tensor) -> Quantized:
    codes = look_up(_nibbles(blocks[..., 2:], _BLOCK), _LEVELS)
    return _simple(Scheme.INT8, codes, _halves(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Quantized:
    """A float16, the upper two bits of eight scales, their lower four, 128 bytes of codes."""
    upper, low = blocks[..., 2:4].unsqueeze(-1), blocks[..., 4:8].unsqueeze(-1)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    scale = (low >> shifts[::2] & 15).flatten(-2) | (upper >> shifts & 3).flatten(-2) << 4
    return Quantized(
        Scheme.INT8,
        look_up(_nibbles(blocks[..., 8:], _BLOCK), _LEVELS).flatten(-2),
        (scale.view(torch.int8) - 32).flatten(-2),
        _BLOCK,
        super_scale=_halves(blocks, 0).flatten(-2),
    )


def _simple(
    scheme: Scheme, codes: Tensor, scale: Tensor, zero: int = 0, minimum: Tensor | None = None
) -> Quantized:
    least = None if minimum is None else minimum.flatten(-2)
    return Quantized(scheme, codes.flatten(-2), scale.flatten(-2), _BLOCK, zero, least)


def _with_minimums(scheme: Scheme, codes: Tensor, blocks: Tensor) -> Quantized:
    """A super-block that begins with two float16, and eight scales and minimums of 6 bits each.

    The first four of either have a byte to themselves; its two upper bits belong to the last four.
    """
    first, second, third = (blocks[..., start : start + 4] for start in (4, 8, 12))
    scale = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=-1)
    minimum = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=-1)
    return Quantized(
        scheme,
        codes.flatten(-2),
        scale.flatten(-2),
        _BLOCK,
        minimum=minimum.flatten(-2),
        super_scale=_halves(blocks, 0).flatten(-2),
        super_minimum=_halves(blocks, 2).flatten(-2),
    )


def _halves(blocks: Tensor, start: int) -> Tensor:
    """The float16 at this byte of every block: [..., blocks, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor, span: int) -> Tensor:
    """Codes of 4 bits: of every `span` values the first half lies low, the second high."""
    runs = packed.reshape(*packed.shape[:-1], -1, span // 2)
    return torch.cat([runs & 15, runs >> 4], dim=-1).flatten(-2)


def _pairs(packed: Tensor) -> Tensor:
    """Codes of 2 bits: of every 128 values the first 32 lie lowest in 32 bytes, and so on."""
    runs = packed.reshape(*packed.shape[:-1], -1, 32)
    return torch.cat([runs >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(-2)


def _bits(packed: Tensor) -> Tensor:
    """Single bits, the lowest of the first byte first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts & 1).flatten(-2)


_FORMATS: dict[str, tuple[Callable[[Tensor], Quantized], int]] = {
    "Q4_0": (_q4_0, 18),
    "Q4_1": (_q4_1, 20),
    "Q5_0": (_q5_0, 22),
    "Q5_1": (_q5_1, 24),
    "Q8_0": (_q8_0, 34),
    "Q4_K": (_q4_k, 144),
    "Q5_K": (_q5_k, 176),
    "Q6_K": (_q6_k, 210),
    "Q2_K": (_q2_k, 84),
    "Q3_K": (_q3_k, 110),
    "IQ4_NL": (_iq4_nl, 18),
    "IQ4_XS": (_iq4_xs, 136),
}
