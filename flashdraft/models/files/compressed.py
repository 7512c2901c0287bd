"""Which weights a compressed-tensors checkpoint holds, by their plain names, and in which format.

Only the weights are taken from such a file: activations stay in the kernels' own dtype, also where
the config would round them, and a scale for the key/value cache is left aside. Which of a config's
formats a weight is in is told by its own tensors; what the config says is config/quantization.py's.
Headers are read here, and no values; compressed_tensors.py reads those.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass

from flashdraft.errors import CheckpointError, quoted
from flashdraft.kernels.kinds import Scheme
from flashdraft.models.config.quantization import WeightFormat, unsupported_weights
from flashdraft.models.files.safetensors import SafetensorsFiles

_PACKED, _SCALES, _SHAPE = ".weight_packed", (".weight_scale", ".weight_scale_inv"), ".weight_shape"
_ZERO_POINT, _GROUP_INDEX = ".weight_zero_point", ".weight_g_idx"
# of activations and of the key/value cache, which are not rounded here
_UNUSED = (".input_scale", ".input_zero_point", ".self_attn.k_scale", ".self_attn.v_scale")
_SCALE_DTYPES = ("F16", "BF16", "F32")
_CODES = {"F8_E4M3": Scheme.FP8, "I8": Scheme.INT8}


class CompressedTable:
    """The weights and other tensors of such a checkpoint."""

    def __init__(self, source: SafetensorsFiles, formats: tuple[WeightFormat, ...]) -> None:
        self.source = source
        self._formats = formats
        names = dict.fromkeys(source.names())
        for name in names:
            if name.endswith(_GROUP_INDEX):
                raise unsupported_weights(
                    f"in an order of its own (activation order, {quoted(name)})"
                )
        self.weights: dict[str, StoredWeight] = {}
        hidden: set[str] = {name for name in names if name.endswith(_UNUSED)}
        for name in names:
            weight = _find_weight(name, names)
            if weight is None:
                continue
            if weight.name in self.weights:
                both = f"{quoted(self.weights[weight.name].codes)} and {quoted(name)}"
                raise CheckpointError(f"Tensors {both} are the same weight.")
            self.weights[weight.name] = weight
            hidden |= {weight.codes, weight.scale, weight.shape or name, weight.zero_point or name}
        self._plain = [name for name in names if name not in hidden]
        self._shapes: dict[str, tuple[int, ...]] = {}

    def names(self) -> Iterable[str]:
        return [*self._plain, *self.weights]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.weights:
            return self.source.shape(name)
        if name not in self._shapes:
            self._shapes[name] = self._read_shape(self.weights[name])
        return self._shapes[name]

    def quantized_bytes(self, name: str) -> int | None:
        if name not in self.weights:
            return None
        weight, (rows, depth) = self.weights[name], self.shape(name)
        form = self.format_of(weight, rows, depth)
        each = self.source.item_bytes(weight.scale) + (4 if weight.zero_point else 0)
        return rows * depth * form.scheme.bits // 8 + rows * form.groups(depth) * each

    def _read_shape(self, weight: StoredWeight) -> tuple[int, ...]:
        stored = self.source.shape(weight.codes)
        if weight.shape is None:
            shape = stored
        else:
            self.expect(weight.shape, ("I64", "I32"))
            if self.source.shape(weight.shape) != (2,):
                raise CheckpointError(f"Tensor {quoted(weight.shape)} must hold two numbers.")
            shape = self.source.whole_numbers(weight.shape)
        if len(shape) != 2 or min(shape) < 1:
            raise CheckpointError(
                f"Tensor {quoted(weight.name)} has shape {list(shape)}, no matrix's."
            )
        self.format_of(weight, *shape)
        return shape

    def format_of(self, weight: StoredWeight, rows: int, depth: int) -> WeightFormat:
        """The one of the config's formats that the weight's tensors are in."""
        self.expect(weight.codes, ("I32",) if weight.is_packed else tuple(_CODES))
        self.expect(weight.scale, _SCALE_DTYPES)
        stored, scales = self.source.shape(weight.codes), self.source.shape(weight.scale)
        lacks_zero_points = False
        for form in self._formats:
            is_float = form.scheme is Scheme.FP8
            if weight.is_packed:
                words = (rows, -(-depth * form.scheme.bits // 32))
                fits = not is_float and stored == words
            else:
                # whole bytes: a 4-bit weight that was not packed is in a byte of its own
                fits = is_float == (_CODES[self.source.dtype(weight.codes)] is Scheme.FP8)
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

    def expect(self, name: str, dtypes: tuple[str, ...]) -> None:
        """Raise unless a tensor is stored in one of these."""
        if self.source.dtype(name) not in dtypes:
            raise CheckpointError(
                f"Tensor {quoted(name)} is stored as {self.source.dtype(name)}; it must be "
                f"{' or '.join(dtypes)}."
            )


@dataclass(frozen=True)
class StoredWeight:
    """The names of one weight's tensors."""

    name: str  # the plain one
    codes: str
    scale: str
    shape: str | None
    zero_point: str | None

    @property
    def is_packed(self) -> bool:
        return self.shape is not None


def _find_weight(name: str, names: Container[str]) -> StoredWeight | None:
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
    return StoredWeight(
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
