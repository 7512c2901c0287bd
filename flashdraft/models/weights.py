"""Handing tensors to a model by name: a missing, misshapen or left-over one is an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from flashdraft.errors import CheckpointError, quoted
from flashdraft.kernels.quantized import Matrix
from flashdraft.models.files.opening import reading
from flashdraft.models.tables import GuardedTable, TensorTable, has_tower


class TensorSource(TensorTable, Protocol):
    """A checkpoint: names, shapes, and tensors read one at a time."""

    def read(self, name: str) -> Tensor: ...

    def read_matrix(self, name: str, device: torch.device | None = None) -> Matrix:
        """A weight on `device`, in few bits where it is stored so; what `read` gives otherwise."""
        ...


def stays_float(name: str) -> bool:
    """Whether a weight is never packed in few bits: a router, and all of a vision tower."""
    return name.endswith(".router.proj.weight") or has_tower([name])


class GuardedTensors(GuardedTable):
    """A checkpoint's tensors; what goes wrong as they are read names the file and the tensor."""

    _source: TensorSource

    def __init__(self, source: TensorSource, path: Path) -> None:
        super().__init__(source, path)

    def read(self, name: str) -> Tensor:
        with reading(self._described(name)):
            return self._source.read(name)

    def read_matrix(self, name: str, device: torch.device | None = None) -> Matrix:
        with reading(self._described(name)):
            return self._source.read_matrix(name, device)


class Weights:
    """Reads each tensor of a checkpoint once and notices what was never asked for.

    As text it says which tensor was the last.
    """

    def __init__(self, source: TensorSource, on_read: Callable[[str], None] | None = None) -> None:
        self._source = source
        self._left = set(source.names())
        self._on_read = on_read
        self._last = ""

    def __str__(self) -> str:
        return f"The checkpoint{self._last}"

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """Read `name`, which must be there and have this shape."""
        self._claim(name, shape)
        return self._source.read(name)

    def take_matrix(self, name: str, shape: Sequence[int], device: torch.device) -> Matrix:
        """The same for a weight that a backend packs: on its device, as it is stored."""
        self._claim(name, shape)
        return self._source.read_matrix(name, device)

    def _claim(self, name: str, shape: Sequence[int]) -> None:
        if name not in self._left:
            near = ", ".join(map(quoted, sorted(self._left)[:3])) or "none"
            raise CheckpointError(
                f"The checkpoint has no tensor {quoted(name)} (or it was read twice); left are: "
                f"{near}, …"
            )
        actual = self._source.shape(name)
        if actual != tuple(shape):
            raise CheckpointError(
                f"Tensor {quoted(name)} has shape {list(actual)}, the config asks for "
                f"{list(shape)}."
            )
        self._last = f", at tensor {quoted(name)} of shape {list(actual)},"
        self._left.discard(name)
        if self._on_read is not None:
            self._on_read(name)

    def drop(self, *prefixes: str) -> None:
        """Leave out tensors on purpose, by name or prefix."""
        self._left = {name for name in self._left if not name.startswith(prefixes)}

    def finish(self) -> None:
        """Raise if the checkpoint holds tensors that the model never asked for."""
        if self._left:
            some = ", ".join(map(quoted, sorted(self._left)[:5]))
            raise CheckpointError(
                f"{len(self._left)} tensors of the checkpoint have no place in the model: {some}."
            )
