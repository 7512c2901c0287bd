"""Weights in NVFP4: values of 4 bits, a scale of 8 bits for every 16 of them, one for these.

compressed-tensors and ModelOpt name the tensors differently, and the first divides by its scale of
scales where the other multiplies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from flashdraft.errors import CheckpointError, quoted
from flashdraft.models.packed.table import PackedTable, StoredWeight

GROUP = 16
_SCALE = ".weight_scale"
_FLOAT32 = 4  # bytes of a scale as it is kept


class _Names(NamedTuple):
    codes: str
    over: str


_NAMES = (
    _Names(".weight_packed", ".weight_global_scale"),
    _Names(".weight", ".weight_scale_2"),
)


class NVFP4Table(PackedTable):
    """The weights of NVFP4 and other tensors."""

    def find_weight(self, name: str, names: Mapping[str, None]) -> StoredWeight | None:
        for kind in _NAMES:
            module = name.removesuffix(kind.codes)
            scale, over = module + _SCALE, module + kind.over
            is_plain = kind.codes == ".weight" and scale not in names and over not in names
            if not name.endswith(kind.codes) or is_plain:
                continue
            if scale not in names or over not in names:
                found = [quoted(one) for one in (scale, over) if one in names]
                raise CheckpointError(
                    f"Tensor {quoted(name)} needs {quoted(scale)} and {quoted(over)}; of these the "
                    f"checkpoint has {' and '.join(found) or 'none'}. Fetch it again."
                )
            return StoredWeight(module + ".weight", name, scale, over=over)
        return None

    def find_shape(self, weight: StoredWeight) -> tuple[int, int]:
        self.expect(weight.codes, ("U8",))
        stored = self.source.shape(weight.codes)
        if len(stored) != 2 or min(stored) < 1 or 2 * stored[1] % GROUP:
            raise CheckpointError(
                f"Tensor {quoted(weight.codes)} has shape {list(stored)}; it must be a matrix "
                f"whose rows are whole groups of {GROUP // 2} bytes. Fetch the checkpoint again."
            )
        rows, depth = stored[0], 2 * stored[1]
        self.expect(weight.scale, ("F8_E4M3",), (rows, depth // GROUP))
        assert weight.over is not None
        self.expect(weight.over, ("F32",))
        if math.prod(self.source.shape(weight.over)) != 1:
            raise CheckpointError(f"Tensor {quoted(weight.over)} must hold one number.")
        return rows, depth

    def count_bytes(self, weight: StoredWeight, rows: int, depth: int) -> int:
        return rows * depth + rows * depth // GROUP * _FLOAT32
