"""Checkpoints whose safetensors hold weights in few bits: compressed-tensors, and plain fp8 blocks.

Every weight is joined with its scales here; which there are and how they are stored is
files/compressed.py's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashdraft.errors import CheckpointError, quoted
from flashdraft.kernels.kinds import Scheme
from flashdraft.kernels.quantized import Matrix, Quantized
from flashdraft.models.config.quantization import WeightFormat
from flashdraft.models.files.compressed import CompressedTable, StoredWeight


class CompressedTensors(CompressedTable):
    """A TensorSource that joins every quantised weight with its scales."""

    def read(self, name: str) -> Tensor:
        matrix = self.read_matrix(name)
        return matrix.dequantize() if isinstance(matrix, Quantized) else matrix

    def read_matrix(self, name: str, device: torch.device | None = None) -> Matrix:
        if name not in self.weights:
            return self.source.read_matrix(name, device)
        weight, (rows, depth) = self.weights[name], self.shape(name)
        form = self.format_of(weight, rows, depth)
        scale = self.source.read(weight.scale)
        if not scale.isfinite().all():
            raise CheckpointError(
                f"Tensor {quoted(weight.scale)} holds values that are not finite."
            )
        shape = form.scale_shape(rows, depth)
        assert shape is not None
        scale, group = _spread(form, scale.reshape(shape).to(device), rows, depth)
        codes = self.source.read_codes(weight.codes).to(device)
        if form.scheme is Scheme.FP8 and (codes.view(torch.uint8) & 127 == 127).any():
            raise CheckpointError(
                f"Tensor {quoted(weight.codes)} holds NaN among its fp8 codes; every one must be a "
                "number. Fetch the checkpoint again."
            )
        zero = 0
        if weight.is_packed:
            codes = _unpack(codes, form.scheme)[:, :depth]
            zero = 8 if form.scheme is Scheme.INT4 else 0
        minimum = None
        if weight.zero_point is not None:
            minimum = scale.float() * self._zero_points(weight, form, scale, device)
        return Quantized(form.scheme, codes.contiguous(), scale, group, zero, minimum)

    def _zero_points(
        self, weight: StoredWeight, form: WeightFormat, scale: Tensor, device: torch.device | None
    ) -> Tensor:
        """Signed zero points, one for every scale, float32."""
        assert weight.zero_point is not None
        name = weight.zero_point
        rows, groups = scale.shape
        self.expect(name, ("I32",) if weight.is_packed else ("I8",))
        words = -(-rows * form.scheme.bits // 32) if weight.is_packed else rows
        if self.source.shape(name) != (words, groups):
            raise CheckpointError(
                f"Tensor {quoted(name)} has shape {list(self.source.shape(name))}; "
                f"{[words, groups]} fits its weight."
            )
        stored = self.source.read_codes(name).to(device)
        if not weight.is_packed:
            return stored.float()
        # packed along the rows, as many of them as there are scales
        # contiguous() would leave a single word's strides as they are, which no view() takes
        turned = stored.T.clone(memory_format=torch.contiguous_format)
        points = _unpack(turned, form.scheme)[:, :rows].T.float()
        return points - 8 if form.scheme is Scheme.INT4 else points


def _spread(form: WeightFormat, scale: Tensor, rows: int, depth: int) -> tuple[Tensor, int]:
    """Scales for every row, and how many values of it share one."""
    if form.block is None:
        scale = scale.expand(rows, -1).contiguous()
        return scale, depth // scale.shape[1]
    # the last block may stick out: its columns are cut where a smaller group divides the row
    height, width = form.block
    group = math.gcd(width, depth)
    height, width = min(height, rows), min(width, depth)  # of a block that is all there is
    scale = scale.repeat_interleave(height, 0)[:rows]
    scale = scale.repeat_interleave(-(-width // group), 1)
    return scale[:, : depth // group].contiguous(), group


def _unpack(words: Matrix, scheme: Scheme) -> Tensor:
    """Codes from [rows, words] int32, the lowest bits of a word first; 8 bits become signed."""
    assert isinstance(words, Tensor)
    raw = words.contiguous().view(torch.uint8)
    if scheme is Scheme.INT8:
        return (raw ^ 128).view(torch.int8)
    return torch.stack([raw & 15, raw >> 4], dim=-1).flatten(-2)
