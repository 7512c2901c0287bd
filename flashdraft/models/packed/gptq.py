"""Weights that GPTQ or AWQ packed into words of 32 bits, with scales and zero points by group.

A weight [out, in] lies turned around: GPTQ's `qweight` is [in / codes of a word, out], AWQ's
[in, out / 8]. Which group a column belongs to is told by `g_idx`; where groups are no runs of
neighbours (an activation order) nothing here could keep the weight in few bits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from flashdraft.errors import CheckpointError, quoted
from flashdraft.models.config.weight_format import Layout
from flashdraft.models.packed.table import SCALE_DTYPES, PackedTable, StoredWeight

_CODES, _BIAS, _PARTS = ".qweight", ".bias", (".scales", ".qzeros")
_ORDER = ".g_idx"


class GPTQTable(PackedTable):
    """The weights of GPTQ or AWQ and other tensors."""

    def find_weight(self, name: str, names: Mapping[str, None]) -> StoredWeight | None:
        if not name.endswith(_CODES):
            return None
        module = name.removesuffix(_CODES)
        found = [module + part for part in _PARTS if module + part in names]
        if len(found) < len(_PARTS):
            raise CheckpointError(
                f"Tensor {quoted(name)} needs scales and qzeros; of these the checkpoint has "
                f"{', '.join(map(quoted, found)) or 'none'}. Fetch it again."
            )
        order = module + _ORDER if module + _ORDER in names else None
        if order is None and self.formats[0].is_ordered:
            raise CheckpointError(
                f"Tensor {quoted(name)} needs {quoted(module + _ORDER)}, which the checkpoint "
                "lacks: its weights are in an activation order (desc_act). Fetch it again."
            )
        scale, zero_point = found
        return StoredWeight(module + ".weight", name, scale, zero_point=zero_point, order=order)

    def find_shape(self, weight: StoredWeight) -> tuple[int, int]:
        form = self.formats[0]
        per_word = 32 // form.scheme.bits
        self.expect(weight.codes, ("I32",))
        self.expect(weight.scale, SCALE_DTYPES)
        stored = self.source.shape(weight.codes)
        if len(stored) != 2 or min(stored) < 1:
            raise CheckpointError(
                f"Tensor {quoted(weight.codes)} has shape {list(stored)}, no matrix's."
            )
        if form.layout is Layout.AWQ:
            rows, depth = stored[1] * per_word, stored[0]
        else:
            rows, depth = stored[1], stored[0] * per_word
        group = form.group or depth
        if depth % group:
            raise CheckpointError(
                f"Tensor {quoted(weight.name)} has rows of {depth} values; groups of {group}, as "
                "the config says, do not divide them. Fetch the checkpoint again."
            )
        groups = depth // group
        self.expect(weight.scale, SCALE_DTYPES, (groups, rows))
        assert weight.zero_point is not None
        self.expect(weight.zero_point, ("I32",), (groups, -(-rows // per_word)))
        if weight.order is not None:
            self.expect(weight.order, ("I32",), (depth,))
        return rows, depth

    def count_bytes(self, weight: StoredWeight, rows: int, depth: int) -> int | None:
        if self.is_ordered(weight, depth):
            return None
        form = self.formats[0]
        each = self.source.item_bytes(weight.scale) + (0 if form.symmetric else 4)
        return rows * depth * form.scheme.bits // 8 + rows * form.groups(depth) * each

    def is_ordered(self, weight: StoredWeight, depth: int) -> bool:
        """Whether its groups are no runs of neighbouring columns."""
        if weight.order is None:
            return False
        group = self.formats[0].group or depth
        return self.source.stored(weight.order) != _runs(depth, group)

    def leaves_out(self, name: str, names: Mapping[str, None]) -> bool:
        """A bias of zeros, which some packers write where the model has none."""
        is_bias = name.endswith(_BIAS) and name.removesuffix(_BIAS) + _CODES in names
        return is_bias and not any(self.source.stored(name))


@functools.cache
def _runs(depth: int, group: int) -> bytes:
    """A `g_idx` of neighbours."""
    places = (index.to_bytes(4, "little") * group for index in range(depth // group))
    return b"".join(places)
