"""Checkpoints whose safetensors hold weights in few bits: compressed-tensors, and plain fp8 blocks.

It gives every quantised weight under its plain name. Only the weights are taken from such a file:
activations stay in the kernels' own dtype, also where the config would round them, and a scale for
the key/value cache is left aside. Which of a config's formats a weight is in is told by its own
tensors; what the config says is config/quantization.py's.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashdraft.errors import CheckpointError, quoted
from flashdraft.kernels.quantized import Matrix, Quantized
from flashdraft.kernels.schemes import Scheme
from flashdraft.models.config.quantization import WeightFormat, unsupported_weights
from flashdraft.models.files.safetensors import SafetensorsFiles

_PACKED, _SCALES, _SHAPE = ".weight_packed", (".weight_scale", ".weight_scale_inv"), ".weight_shape"
_ZERO_POINT, _GROUP_INDEX = ".weight_zero_point", ".weight_g_idx"
# of activations and of the key/value cache, which are not rounded here
_UNUSED = (".input_scale", ".input_zero_point", ".self_attn.k_scale", ".self_attn.v_scale")
_SCALE_DTYPES = ("F16", "BF16", "F32")
_CODES = {"F8_E4M3": Scheme.FP8, "I8": Scheme.INT8}


class CompressedTensors:
    """A TensorSource that joins every quantised weight with its scales."""

    def __init__(self, source: SafetensorsFiles, formats: tuple[WeightFormat, ...]) -> None:
        self._source = source
        self._formats = formats
        names = dict.fromkeys(source.names())
        for name in names:
            if name.endswith(_GROUP_INDEX):
                raise unsupported_weights(
                    f"in an order of its own (activation order, {quoted(name)})"
                )
        self._weights: dict[str, _Weight] = {}
        hidden: set[str] = {name for name in names if name.endswith(_UNUSED)}
        for name in names:
            weight = _find_weight(name, names)
            if weight is None:
                continue
            if weight.name in self._weights:
                both = f"{quoted(self._weights[weight.name].codes)} and {quoted(name)}"
                raise CheckpointError(f"Tensors {both} are the same weight.")
            self._weights[weight.name] = weight
            hidden |= {weight.codes, weight.scale, weight.shape or name, weight.zero_point or name}
        self._plain = [name for name in names if name not in hidden]
        self._shapes: dict[str, tuple[int, ...]] = {}

    def names(self) -> Iterable[str]:
        return [*self._plain, *self._weights]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._weights:
            return self._source.shape(name)
        if name not in self._shapes:
            self._shapes[name] = self._read_shape(self._weights[name])
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        matrix = self.read_matrix(name)
        return matrix.dequantize() if isinstance(matrix, Quantized) else matrix

    def read_matrix(self, name: str, device: torch.device | None = None) -> Matrix:
        if name not in self._weights:
            return self._source.read_matrix(name, device)
        weight, (rows, depth) = self._weights[name], self.shape(name)
        form = self._format(weight, rows, depth)
        scale = self._source.read(weight.scale)
        if not scale.isfinite().all():
            raise CheckpointError(
                f"Tensor {quoted(weight.scale)} holds values that are not finite."
            )
        shape = form.scale_shape(rows, depth)
        assert shape is not None
        scale, group = form.spread(scale.reshape(shape).to(device), rows, depth)
        codes = self._source.read_codes(weight.codes).to(device)
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

    def quantized_bytes(self, name: str) -> int | None:
        if name not in self._weights:
            return None
        weight, (rows, depth) = self._weights[name], self.shape(name)
        form = self._format(weight, rows, depth)
        each = self._source.read(weight.scale).itemsize + (4 if weight.zero_point else 0)
        return rows * depth * form.scheme.bits // 8 + rows * form.groups(depth) * each

    def _read_shape(self, weight: _Weight) -> tuple[int, ...]:
        stored = self._source.shape(weight.codes)
        if weight.shape is None:
            shape = stored
        else:
            self._expect(weight.shape, ("I64", "I32"))
            if self._source.shape(weight.shape) != (2,):
                raise CheckpointError(f"Tensor {quoted(weight.shape)} must hold two numbers.")
            shape = tuple(self._source.read(weight.shape).tolist())
        if len(shape) != 2 or min(shape) < 1:
            raise CheckpointError(
                f"Tensor {quoted(weight.name)} has shape {list(shape)}, no matrix's."
            )
        self._format(weight, *shape)
        return shape

    def _format(self, weight: _Weight, rows: int, depth: int) -> WeightFormat:
        """The one of the config's formats that the weight's tensors are in."""
        self._expect(weight.codes, ("I32",) if weight.is_packed else tuple(_CODES))
        self._expect(weight.scale, _SCALE_DTYPES)
        stored, scales = self._source.shape(weight.codes), self._source.shape(weight.scale)
        lacks_zero_points = False
        for form in self._formats:
            is_float = form.scheme is Scheme.FP8
            if weight.is_packed:
                words = (rows, -(-depth * form.scheme.bits // 32))
                fits = not is_float and stored == words
            else:
                # whole bytes: a 4-bit weight that was not packed is in a byte of its own
                fits = is_float == (_CODES[self._source.dtype(weight.codes)] is Scheme.FP8)
                fits &= form.scheme is not Scheme.INT4
            expected = form.scale_shape(rows, depth)
            if fits and expected is not None and _same_scales(scales, expected):
                if form.symmetric or weight.zero_point is not None:
                    return form
                lacks_zero_points = True
        if lacks_zero_points:
            zero_point = weight.name.removesuffix(".weight") + _ZERO_POINT
            raise CheckpointError(
                f"The checkpoint has no tensor {quoted(zero_point)}, though its config says that "
                f"{quoted(weight.name)} is asymmetric ('symmetric': false). Fetch the "
                "checkpoint again."
            )
        known = ", ".join(f"{form.scheme} by {form.strategy}" for form in self._formats)
        raise CheckpointError(
            f"Tensor {quoted(weight.name)} of shape [{rows}, {depth}] is stored as {list(stored)} "
            f"with scales {list(scales)}, which is not what the config says ({known})."
        )

    def _zero_points(
        self, weight: _Weight, form: WeightFormat, scale: Tensor, device: torch.device | None
    ) -> Tensor:
        """Signed zero points, one for every scale, float32."""
        assert weight.zero_point is not None
        name = weight.zero_point
        rows, groups = scale.shape
        self._expect(name, ("I32",) if weight.is_packed else ("I8",))
        words = -(-rows * form.scheme.bits // 32) if weight.is_packed else rows
        if self._source.shape(name) != (words, groups):
            raise CheckpointError(
                f"Tensor {quoted(name)} has shape {list(self._source.shape(name))}; "
                f"{[words, groups]} fits its weight."
            )
        stored = self._source.read_codes(name).to(device)
        if not weight.is_packed:
            return stored.float()
        # packed along the rows, as many of them as there are scales
        # contiguous() would leave a single word's strides as they are, which no view() takes
        turned = stored.T.clone(memory_format=torch.contiguous_format)
        points = _unpack(turned, form.scheme)[:, :rows].T.float()
        return points - 8 if form.scheme is Scheme.INT4 else points

    def _expect(self, name: str, dtypes: tuple[str, ...]) -> None:
        if self._source.dtype(name) not in dtypes:
            raise CheckpointError(
                f"Tensor {quoted(name)} is stored as {self._source.dtype(name)}; it must be "
                f"{' or '.join(dtypes)}."
            )


@dataclass(frozen=True)
class _Weight:
    """The names of one weight's tensors."""

    name: str  # the plain one
    codes: str
    scale: str
    shape: str | None
    zero_point: str | None

    @property
    def is_packed(self) -> bool:
        return self.shape is not None


def _find_weight(name: str, names: Container[str]) -> _Weight | None:
    """The weight that this tensor holds the codes of, if it holds any."""
    is_packed = name.endswith(_PACKED)
    if not is_packed and not name.endswith(".weight"):
        return None
    module = name.removesuffix(_PACKED if is_packed else ".weight")
    scales = [module + suffix for suffix in _SCALES if module + suffix in names]
    if not is_packed and not scales:
        return None
    if len(scales) != 1 or (is_packed and module + _SHAPE not in names):
        found = ", ".join(quoted(one) for one in (*scales, module + _SHAPE) if one in names)
        raise CheckpointError(
            f"Tensor {quoted(name)} needs one scale and, packed, its shape; of these the "
            f"checkpoint has {found or 'none'}."
        )
    zero_point = module + _ZERO_POINT
    return _Weight(
        module + ".weight",
        name,
        scales[0],
        module + _SHAPE if is_packed else None,
        zero_point if zero_point in names else None,
    )


def _same_scales(found: tuple[int, ...], expected: tuple[int, int]) -> bool:
    """Scales of a whole row or tensor may lack dimensions of size one."""
    if 1 in expected and len(found) < 2:
        return math.prod(found) == math.prod(expected)
    return found == expected


def _unpack(words: Matrix, scheme: Scheme) -> Tensor:
    """Codes from [rows, words] int32, the lowest bits of a word first; 8 bits become signed."""
    assert isinstance(words, Tensor)
    raw = words.contiguous().view(torch.uint8)
    if scheme is Scheme.INT8:
        return (raw ^ 128).view(torch.int8)
    return torch.stack([raw & 15, raw >> 4], dim=-1).flatten(-2)
