"""Checkpoints whose safetensors hold weights in few bits, with values to read.

Every weight is joined with its scales here, and nothing is rounded: which tensors there are and how
they are stored is for the tables of each layout.
"""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from flashdraft.errors import CheckpointError, quoted
from flashdraft.kernels.kinds import Scheme
from flashdraft.kernels.quantized import Matrix, Quantized, look_up
from flashdraft.models.config.weight_format import Layout, WeightFormat
from flashdraft.models.files.safetensors import SafetensorsFiles
from flashdraft.models.packed.compressed import CompressedTable
from flashdraft.models.packed.gptq import GPTQTable
from flashdraft.models.packed.nvfp4 import GROUP, NVFP4Table
from flashdraft.models.packed.table import PackedTable, StoredWeight

logger = logging.getLogger(__name__)

# where AWQ's words of eight codes have the rows 0, 1, 2, … of a weight
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
_ADD_ONE = {Scheme.INT4: 0x11111111, Scheme.INT8: 0x01010101}  # to all zero points of a word
# NVFP4's values (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and the same below zero), doubled
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# times any difference of codes (fp8's reach 448) it is finite in float32
_LARGEST_SCALE = 2.0**118


class PackedTensors(PackedTable):
    """A TensorSource that joins every weight's tensors."""

    def join(self, weight: StoredWeight, device: torch.device | None) -> Matrix:
        """The weight, in few bits where it can stay so."""
        raise NotImplementedError

    def read(self, name: str) -> Tensor:
        matrix = self.read_matrix(name)
        return matrix.dequantize() if isinstance(matrix, Quantized) else matrix

    def read_matrix(self, name: str, device: torch.device | None = None) -> Matrix:
        if name not in self.weights:
            return self.source.read_matrix(name, device)
        self.matrix_shape(name)  # which is checked now
        return self.join(self.weights[name], device)

    def read_scale(self, name: str) -> Tensor:
        """Scales that no code makes infinite."""
        scale = self.source.read_codes(name)
        if scale.dtype is torch.float8_e4m3fn:  # this type's NaN is all that is not finite
            is_finite = bool((scale.view(torch.uint8) & 127 != 127).all())
        else:
            is_finite = _is_bounded(scale)
        if not is_finite:
            raise _unbounded(f"Tensor {quoted(name)} holds")
        return scale


class CompressedTensors(CompressedTable, PackedTensors):
    """In compressed-tensors' layout, and in that of plain fp8."""

    def join(self, weight: StoredWeight, device: torch.device | None) -> Quantized:
        rows, depth = self.matrix_shape(weight.name)
        form = self.format_of(weight, rows, depth)
        shape = form.scale_shape(rows, depth)
        assert shape is not None
        scale = self.read_scale(weight.scale).reshape(shape).to(device)
        scale, group = _spread(form, scale, rows, depth)
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
        rows, groups = scale.shape
        words = -(-rows * form.scheme.bits // 32) if weight.is_packed else rows
        self.expect(weight.zero_point, ("I32",) if weight.is_packed else ("I8",), (words, groups))
        stored = self.source.read_codes(weight.zero_point).to(device)
        if not weight.is_packed:
            return stored.float()
        # packed along the rows, as many of them as there are scales
        points = _unpack(_turned(stored), form.scheme)[:, :rows].T.float()
        return points - 8 if form.scheme is Scheme.INT4 else points


class GPTQTensors(GPTQTable, PackedTensors):
    """GPTQ's and AWQ's."""

    def __init__(self, source: SafetensorsFiles, formats: tuple[WeightFormat, ...]) -> None:
        super().__init__(source, formats)
        self._has_warned = False

    def join(self, weight: StoredWeight, device: torch.device | None) -> Matrix:
        rows, depth = self.matrix_shape(weight.name)
        form, zero = self.formats[0], 8 if self.formats[0].scheme is Scheme.INT4 else 0
        assert weight.zero_point is not None
        words = self.source.read_codes(weight.codes).to(device)
        points = self.source.read_codes(weight.zero_point).to(device)
        scale = self.read_scale(weight.scale).to(device).T.contiguous()  # [out, groups]
        if form.layout is Layout.AWQ:
            codes, points = _turned(_unpack_awq(words)), _unpack_awq(points)
        else:
            if form.layout is Layout.GPTQ:  # the packer took one from every word's zero points
                points = points + _ADD_ONE[form.scheme]
            codes, points = _unpack(_turned(words), form.scheme), _unpack(points, form.scheme)
        points = points[:, :rows].T  # [out, groups]
        if self.is_ordered(weight, depth):
            return self._floats(weight, codes, scale, points)
        if (points == zero).all():
            return Quantized(form.scheme, codes, scale, form.group or depth, zero)
        # Both products have few enough bits to be exact, and so has their difference.
        minimum = scale.float() * points.float()
        return Quantized(form.scheme, codes, scale, form.group or depth, 0, minimum)

    def _floats(self, weight: StoredWeight, codes: Tensor, scale: Tensor, points: Tensor) -> Tensor:
        """The values of a weight whose groups no kernel could follow."""
        assert weight.order is not None
        order = self.source.read_codes(weight.order).to(codes.device, torch.int64)
        if order.min() < 0 or order.max() >= scale.shape[1]:
            raise CheckpointError(
                f"Tensor {quoted(weight.order)} names groups from {int(order.min())} to "
                f"{int(order.max())}; the weight has {scale.shape[1]}. Fetch the checkpoint again."
            )
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Its weights are in an activation order (desc_act), which no kernel here follows: "
                "they become floats, bfloat16 on a GPU, and take as much memory. A checkpoint "
                "without desc_act stays in few bits."
            )
        return (codes.float() - points.float()[:, order]).mul_(scale.float()[:, order])


class NVFP4Tensors(NVFP4Table, PackedTensors):
    """NVFP4 in integers: twice a value is a whole number, and half its scale makes up for it."""

    def join(self, weight: StoredWeight, device: torch.device | None) -> Quantized:
        assert weight.over is not None
        over = self.read_scale(weight.over).reshape(()).to(device)
        scale = self.read_scale(weight.scale).to(device).float()
        divides = weight.over.endswith("global_scale")
        if divides and over == 0:
            raise CheckpointError(f"Tensor {quoted(weight.over)} is 0; scales are divided by it.")
        scale = scale / over if divides else scale * over
        if not _is_bounded(scale):
            raise _unbounded(f"Tensors {quoted(weight.scale)} and {quoted(weight.over)} make")
        packed = self.source.read_codes(weight.codes).to(device)
        codes = look_up(_nibbles(packed), _E2M1_DOUBLED)
        return Quantized(Scheme.INT8, codes, scale / 2, GROUP)


_SOURCES: dict[Layout, type[PackedTensors]] = {
    Layout.COMPRESSED: CompressedTensors,
    Layout.GPTQ: GPTQTensors,
    Layout.GPTQ_V2: GPTQTensors,
    Layout.AWQ: GPTQTensors,
    Layout.NVFP4: NVFP4Tensors,
}


def packed_tensors(files: SafetensorsFiles, formats: tuple[WeightFormat, ...]) -> PackedTensors:
    """The weights and other tensors of a checkpoint, with values to read."""
    return _SOURCES[formats[0].layout](files, formats)


def _is_bounded(scale: Tensor) -> bool:
    return bool((scale.abs() <= _LARGEST_SCALE).all())  # which NaN is not


def _unbounded(found: str) -> CheckpointError:
    return CheckpointError(
        f"{found} scales that are not finite or above {_LARGEST_SCALE:.3g}, beyond which weights "
        "are not finite. Fetch the checkpoint again."
    )


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


def _turned(matrix: Tensor) -> Tensor:
    """A matrix's transpose in its own order in memory."""
    # contiguous() would leave a single word's strides as they are, which no view() takes
    return matrix.T.clone(memory_format=torch.contiguous_format)


def _unpack(words: Tensor, scheme: Scheme) -> Tensor:
    """Codes from [rows, words] int32, the lowest bits of a word first; 8 bits become signed."""
    raw = words.contiguous().view(torch.uint8)
    return (raw ^ 128).view(torch.int8) if scheme is Scheme.INT8 else _nibbles(raw)


def _unpack_awq(words: Tensor) -> Tensor:
    """Codes from [rows, words] int32, in AWQ's order of the eight of a word."""
    codes = _nibbles(words.contiguous().view(torch.uint8))
    return codes.view(len(codes), -1, len(_AWQ_PLACES))[..., _AWQ_PLACES].flatten(-2)


def _nibbles(packed: Tensor) -> Tensor:
    """Codes of 4 bits, the lower of a byte first."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
