"""Opening a checkpoint to read it: stored.py's tables, with values.

What the tensors mean is for the model files; where checkpoints come from, for sources.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from re import Match
from typing import TypeAlias

import torch
from torch import Tensor

from flashdraft.errors import CheckpointError, quoted
from flashdraft.kernels.quantized import Matrix, Quantized, stack_experts, stack_rows
from flashdraft.models.adapters.merging import MergedTensors
from flashdraft.models.files.meter import ReadMeter
from flashdraft.models.files.safetensors import SafetensorsFiles
from flashdraft.models.gguf.reader import GGUFTensors, TowerTensors
from flashdraft.models.packed.reading import packed_tensors
from flashdraft.models.stored import Stored, TableKinds, open_stored
from flashdraft.models.tables import FusedTable, JoinedTable, RenamedTable, StackedTable
from flashdraft.models.weights import GuardedTensors, TensorSource

Checkpoint: TypeAlias = Stored[TensorSource]


class _Renamed(RenamedTable):
    """Some tensors of another source, under other names."""

    _source: TensorSource

    def __init__(self, source: TensorSource, stored: dict[str, str]) -> None:
        super().__init__(source, stored)

    def read(self, name: str) -> Tensor:
        return self._source.read(self._stored[name])

    def read_matrix(self, name: str, device: torch.device | None = None) -> Matrix:
        return self._source.read_matrix(self._stored[name], device)


class _Joined(JoinedTable):
    """All tensors of two sources."""

    _tables: Mapping[str, TensorSource]

    def __init__(self, first: TensorSource, second: TensorSource) -> None:
        super().__init__(first, second)

    def read(self, name: str) -> Tensor:
        return self._tables[name].read(name)

    def read_matrix(self, name: str, device: torch.device | None = None) -> Matrix:
        return self._tables[name].read_matrix(name, device)


class _FusedExperts(FusedTable):
    """The tensors of a layer's experts, read and joined."""

    _source: TensorSource

    def __init__(self, source: TensorSource, matches: Iterable[Match[str]]) -> None:
        super().__init__(source, matches)

    def read(self, name: str) -> Tensor:
        if name not in self._fused:
            return self._source.read(name)
        experts = self._fused[name]
        first = self._source.read(experts[0][0])
        fused = torch.empty(self.shape(name), dtype=first.dtype)
        for expert, parts in enumerate(experts):
            torch.cat([self._source.read(part) for part in parts], out=fused[expert])
        return fused

    def read_matrix(self, name: str, device: torch.device | None = None) -> Matrix:
        if name not in self._fused:
            return self._source.read_matrix(name, device)
        read, shape = self._source.read_matrix, self.shape(name)
        if isinstance(read(self._fused[name][0][0]), Tensor):
            return self.read(name).to(device)
        experts = []
        for parts in self._fused[name]:
            joined = _join_rows(parts, [read(part, device) for part in parts], shape)
            assert isinstance(joined, Quantized)
            experts.append(joined)
        return stack_experts(experts)


class _StackedExperts(StackedTable):
    """The gates and the ups of a layer's experts, read and joined."""

    _source: TensorSource

    def __init__(self, source: TensorSource) -> None:
        super().__init__(source)

    def read(self, name: str) -> Tensor:
        if name not in self._stacks:
            return self._source.read(name)
        return torch.cat([self._source.read(part) for part in self._stacks[name]], dim=-2)

    def read_matrix(self, name: str, device: torch.device | None = None) -> Matrix:
        if name not in self._stacks:
            return self._source.read_matrix(name, device)
        return _join_rows(
            self._stacks[name],
            [self._source.read_matrix(part, device) for part in self._stacks[name]],
            self.shape(name),
        )


def _join_rows(names: Sequence[str], parts: Sequence[Matrix], shape: Sequence[int]) -> Matrix:
    """Weights in few bits, by output rows."""
    quantized = [part for part in parts if isinstance(part, Quantized)]
    floats = [part for part in parts if isinstance(part, Tensor)]
    if not quantized:
        return torch.cat(floats, dim=-2)
    stacked = None if floats else stack_rows(quantized)
    if stacked is None:
        raise CheckpointError(
            f"Tensors {', '.join(map(quoted, names))} are stored in different formats, but make "
            f"one tensor of shape {list(shape)}."
        )
    return stacked


def _floats(files: SafetensorsFiles) -> TensorSource:
    return files


_READABLE: TableKinds[TensorSource] = TableKinds(
    gguf=GGUFTensors,
    tower=TowerTensors,
    floats=_floats,
    packed=packed_tensors,
    renamed=_Renamed,
    joined=_Joined,
    fused=_FusedExperts,
    stacked=_StackedExperts,
    guarded=GuardedTensors,
)


def open_checkpoint(
    path: Path, vision: bool = False, mmproj: Path | None = None, lora: Path | None = None
) -> Checkpoint:
    """Open a folder with config.json and safetensors, or a GGUF file: `open_stored`.

    With the folder of a LoRA its tensors are those that the adapter makes of them.
    """
    checkpoint = open_stored(path, _READABLE, vision, mmproj)
    if lora is None:
        return checkpoint
    merged = MergedTensors(checkpoint.source, lora, checkpoint.config.tie_embeddings)
    return replace(checkpoint, source=merged)


@contextmanager
def loading_progress(source: TensorSource, label: str) -> Iterator[Callable[[str], None]]:
    """A progress bar for `Weights(on_read=…)`, counted in values; silent off a terminal."""
    sizes = {name: math.prod(source.shape(name)) for name in source.names()}
    with closing(ReadMeter(label, sum(sizes.values()))) as meter:
        yield lambda name: meter.add(sizes[name])
