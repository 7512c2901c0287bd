"""Weights in compressed-tensors' layout, and in that of plain fp8.

Which of a config's formats a weight is in is told by its own tensors; what the config says is
config/quantization.py's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from flashdraft.errors import CheckpointError, quoted
from flashdraft.kernels.kinds import Scheme
from flashdraft.models.config.weight_format import WeightFormat, unsupported_weights
from flashdraft.models.packed.table import SCALE_DTYPES, PackedTable, StoredWeight

_PACKED, _SCALES, _SHAPE = ".weight_packed", (".weight_scale", ".weight_scale_inv"), ".weight_shape"
_ZERO_POINT, _GROUP_INDEX = ".weight_zero_point", ".weight_g_idx"
_CODES = {"F8_E4M3": Scheme.FP8, "I8": Scheme.INT8}


class CompressedTable(PackedTable):
    """The weights and other tensors of such a checkpoint."""

    def find_weight(self, name: str, names: Mapping[str, None]) -> StoredWeight | None:
        if name.endswith(_GROUP_INDEX):
            raise unsupported_weights(f"in an order of its own (activation order, {quoted(name)})")
        return _find_weight(name, names)

    def count_bytes(self, weight: StoredWeight, rows: int, depth: int) -> int:
        form = self.format_of(weight, rows, depth)
        each = self.source.item_bytes(weight.scale) + (4 if weight.zero_point else 0)
        return rows * depth * form.scheme.bits // 8 + rows * form.groups(depth) * each

    def find_shape(self, weight: StoredWeight) -> tuple[int, int]:
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
        rows, depth = shape
        self.format_of(weight, rows, depth)
        return rows, depth

    def format_of(self, weight: StoredWeight, rows: int, depth: int) -> WeightFormat:
        """The one of the config's formats that the weight's tensors are in."""
        self.expect(weight.codes, ("I32",) if weight.is_packed else tuple(_CODES))
        self.expect(weight.scale, SCALE_DTYPES)
        stored, scales = self.source.shape(weight.codes), self.source.shape(weight.scale)
        lacks_zero_points = False
        for form in self.formats:
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
        known = ", ".join(f"{form.scheme} by {form.strategy}" for form in self.formats)
        raise CheckpointError(
            f"Tensor {quoted(weight.name)} of shape [{rows}, {depth}] is stored as {list(stored)} "
            f"with scales {list(scales)}, which is not what the config says ({known})."
        )


def _find_weight(name: str, names: Mapping[str, None]) -> StoredWeight | None:
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
