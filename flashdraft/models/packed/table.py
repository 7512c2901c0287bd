"""Which weights a checkpoint of few bits holds, by their plain names. Headers are read, no values.

Every weight is made of several tensors, which the tables of each layout tell by their names. Only
weights are taken from such files: activations stay in the kernels' own dtype, also where the config
would round them, and a scale for the key/value cache is left aside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flashdraft.errors import CheckpointError, quoted
from flashdraft.models.config.weight_format import WeightFormat
from flashdraft.models.files.safetensors import SafetensorsFiles

# of activations and of the key/value cache, which are not rounded here
_UNUSED = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".self_attn.k_scale",
    ".self_attn.v_scale",
    ".self_attn.k_proj.k_scale",
    ".self_attn.v_proj.v_scale",
)
SCALE_DTYPES = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class StoredWeight:
    """The names of one weight's tensors."""

    name: str  # the plain one
    codes: str
    scale: str
    shape: str | None = None
    zero_point: str | None = None
    order: str | None = None  # which group each column belongs to
    over: str | None = None  # a scale for all scales

    @property
    def is_packed(self) -> bool:
        return self.shape is not None

    @property
    def tensors(self) -> set[str]:
        """All that it is made of."""
        parts = (self.codes, self.scale, self.shape, self.zero_point, self.order, self.over)
        return {one for one in parts if one is not None}


class PackedTable:
    """The weights and other tensors of such a checkpoint; each layout has a table of its own."""

    def __init__(self, source: SafetensorsFiles, formats: tuple[WeightFormat, ...]) -> None:
        self.source = source
        self.formats = formats
        names = dict.fromkeys(source.names())
        self.weights: dict[str, StoredWeight] = {}
        hidden = {name for name in names if name.endswith(_UNUSED) or self.leaves_out(name, names)}
        for name in names:
            weight = self.find_weight(name, names)
            if weight is None:
                continue
            other = self.weights[weight.name].codes if weight.name in self.weights else weight.name
            if other in names and other not in weight.tensors:
                raise CheckpointError(
                    f"Tensors {quoted(other)} and {quoted(name)} are the same weight."
                )
            self.weights[weight.name] = weight
            hidden |= weight.tensors
        self._plain = [name for name in names if name not in hidden]
        self._shapes: dict[str, tuple[int, int]] = {}

    def leaves_out(self, name: str, names: Mapping[str, None]) -> bool:
        """Whether a tensor is of no use to any model."""
        return False

    def find_weight(self, name: str, names: Mapping[str, None]) -> StoredWeight | None:
        """The weight that this tensor holds the codes of, if it holds any."""
        raise NotImplementedError

    def find_shape(self, weight: StoredWeight) -> tuple[int, int]:
        """A weight's rows and columns, after a look at all of its tensors' shapes and types."""
        raise NotImplementedError

    def count_bytes(self, weight: StoredWeight, rows: int, depth: int) -> int | None:
        """What a weight takes as it is kept; None where it becomes floats."""
        raise NotImplementedError

    def names(self) -> Iterable[str]:
        return [*self._plain, *self.weights]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.matrix_shape(name) if name in self.weights else self.source.shape(name)

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """The rows and columns of a weight in few bits."""
        if name not in self._shapes:
            self._shapes[name] = self.find_shape(self.weights[name])
        return self._shapes[name]

    def quantized_bytes(self, name: str) -> int | None:
        if name not in self.weights:
            return None
        return self.count_bytes(self.weights[name], *self.matrix_shape(name))

    def expect(
        self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None
    ) -> None:
        """Raise unless a tensor is stored in one of these types, and has this shape."""
        if self.source.dtype(name) not in dtypes:
            raise CheckpointError(
                f"Tensor {quoted(name)} is stored as {self.source.dtype(name)}; it must be "
                f"{' or '.join(dtypes)}."
            )
        if shape is not None and self.source.shape(name) != shape:
            raise CheckpointError(
                f"Tensor {quoted(name)} has shape {list(self.source.shape(name))}; {list(shape)} "
                "fits its weight."
            )
