"""Rotary position embeddings: the cos/sin tables that the kernels read. It knows no model.

Angles are float32 products of position and inverse frequency, as in transformers. The table grows
in blocks of one fixed shape, so that a position's values never depend on how far it has grown.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashdraft.kernels.interface import RopeTable
from flashdraft.models.config.rope import RopeConfig

BLOCK_POSITIONS = 1024


class Rope:
    """The growing table of one rotary embedding."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self._inverse_frequencies = inverse_frequencies(config)
        self._length = dict(config.scaling).get("attention_factor", 1.0)  # of rotated vectors
        empty = torch.empty(0, config.head_dim // 2, dtype=torch.float32, device=device)
        self._table = RopeTable(empty, empty)

    def table(self, length: int) -> RopeTable:
        """The table of at least the positions 0 .. length - 1."""
        num_positions = self._table.cos.shape[0]
        if length > num_positions:
            starts = range(num_positions, length, BLOCK_POSITIONS)
            angles = [self._block_angles(start) for start in starts]
            self._table = RopeTable(
                cos=_append(self._table.cos, [torch.cos(block) * self._length for block in angles]),
                sin=_append(self._table.sin, [torch.sin(block) * self._length for block in angles]),
            )
        return self._table

    def _block_angles(self, start: int) -> Tensor:
        positions = torch.arange(start, start + BLOCK_POSITIONS, dtype=torch.float32)
        return (
            positions.unsqueeze(1) * self._inverse_frequencies
        )  # [BLOCK_POSITIONS, head_dim // 2]


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """[head_dim // 2] float32 on the CPU; 0 where a pair of dimensions does not rotate."""
    # The exponent's denominator is the whole head even where only a part of it rotates.
    exponents = torch.arange(0, config.rotary_dims, 2, dtype=torch.float32) / config.head_dim
    rotating = _scale(config.theta**exponents, config)
    still = torch.zeros(config.head_dim // 2 - rotating.shape[0])
    return torch.cat([rotating, still])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [num_rows, heads, head_dim] by angles whose cos, sin are [num_rows, dim // 2].

    Differentiable: for training. Inference rotates inside `Kernels.prepare_qkv`.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    left, right = x.float().chunk(2, dim=-1)
    rotated = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
    return rotated.to(x.dtype)


def _append(table: Tensor, blocks: list[Tensor]) -> Tensor:
    return torch.cat([table, *(block.to(table.device) for block in blocks)])


def _scale(wavelengths: Tensor, config: RopeConfig) -> Tensor:
    """Frequencies of these wavelengths, over 2 pi, as the config scales them."""
    scaling = dict(config.scaling)
    if "beta_fast" in scaling:
        return _scale_yarn(wavelengths, config, scaling)
    if "low_freq_factor" in scaling:
        return _scale_llama3(1.0 / wavelengths, scaling)
    return 1.0 / wavelengths / scaling.get("factor", 1.0)  # "linear" scaling, or none


def _scale_yarn(wavelengths: Tensor, config: RopeConfig, scaling: dict[str, float]) -> Tensor:
    """Divide by `factor` what turns seldom in the trained context, keep what turns often."""
    pairs = wavelengths.shape[0]

    def place(num_turns: float) -> float:
        """Of the pair of dimensions that turns so often within the trained context."""
        period = scaling["original_max_position_embeddings"] / (num_turns * 2 * math.pi)
        return config.head_dim * math.log(period) / (2 * math.log(config.theta))

    low, high = place(scaling["beta_fast"]), place(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    width = high - low or 0.001
    keep = 1 - ((torch.arange(pairs, dtype=torch.float32) - low) / width).clamp(0, 1)
    slowed = 1.0 / (scaling["factor"] * wavelengths)
    return slowed * (1 - keep) + 1.0 / wavelengths * keep


def _scale_llama3(frequencies: Tensor, scaling: dict[str, float]) -> Tensor:
    """Divide long wavelengths by `factor`, keep short ones, and blend in between."""
    factor, context = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    weight = (context / wavelengths - low) / (high - low)
    blended = (1 - weight) * frequencies / factor + weight * frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / factor, blended)
    return torch.where(wavelengths < context / high, frequencies, scaled)
