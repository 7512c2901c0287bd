"""safetensors files, single or sharded, as a TensorSource. Memory-mapped; it knows no model.

Headers are checked here, so that a broken file is named together with the tensor; the safetensors
library then maps the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flashdraft.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_ELEMENT_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


class _Entry(NamedTuple):
    file: Path
    shape: tuple[int, ...]
    dtype: str  # as the format names it


class SafetensorsFiles:
    """The tensors of one or several safetensors files; no name may appear twice."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._entries: dict[str, _Entry] = {}
        self._open: dict[Path, Any] = {}
        for file in files:
            for name, entry in _read_header(file).items():
                if name in self._entries:
                    raise CheckpointError(
                        f"Tensor {name!r} is in both {self._entries[name].file} and {file}."
                    )
                self._entries[name] = entry

    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """How the tensor's values are stored, in the format's own words: BF16, F8_E4M3, I32, …"""
        return self._entries[name].dtype

    def read(self, name: str) -> Tensor:
        file = self._entries[name].file
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            return self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: tensor {name!r} cannot be read: {error}.") from None

    def read_matrix(self, name: str, device: torch.device | None = None) -> Tensor:
        return self.read(name).to(device)

    def quantized_bytes(self, name: str) -> None:
        return None


def open_safetensors(folder: Path) -> SafetensorsFiles:
    """Open a folder's safetensors, by its index where it has one."""
    index = folder / INDEX_NAME
    if index.is_file():
        return _open_sharded(index)
    files = sorted(folder.glob("*.safetensors"))
    if folder / _SINGLE_NAME in files:
        return SafetensorsFiles([folder / _SINGLE_NAME])
    if len(files) == 1:
        return SafetensorsFiles(files)
    if files:
        raise CheckpointError(
            f"{folder} has {len(files)} safetensors files but neither {INDEX_NAME} nor "
            f"{_SINGLE_NAME}; fetch the missing index."
        )
    pickles = sorted(path.name for path in folder.glob("*.bin")) or sorted(
        path.name for path in folder.glob("*.pt*")
    )
    if pickles:
        raise CheckpointError(
            f"{folder} holds only pickled weights ({pickles[0]}), which can run code when read; "
            "convert them to safetensors or GGUF."
        )
    raise CheckpointError(
        f"{folder} has no weights: expected {_SINGLE_NAME} or {INDEX_NAME}. To use a GGUF file, "
        "name the file itself."
    )


def _open_sharded(index: Path) -> SafetensorsFiles:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        pairs = [(str(name), str(shard)) for name, shard in weight_map.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a valid index: {error!r}.") from None
    shards = sorted({shard for _, shard in pairs})
    for shard in shards:
        if Path(shard).name != shard:
            raise CheckpointError(f"{index} names {shard!r}, which is outside the folder.")
        if not (index.parent / shard).is_file():
            raise CheckpointError(f"{index} names {shard}, which is missing; fetch it again.")
    source = SafetensorsFiles(index.parent / shard for shard in shards)
    found = source._entries
    for name, shard in pairs:
        if name not in found or found[name].file.name != shard:
            raise CheckpointError(f"{index} places tensor {name!r} in {shard}, which lacks it.")
    return source


def _read_header(file: Path) -> dict[str, _Entry]:
    """What the file holds, after checking that every tensor lies inside it."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{file} is truncated or not a safetensors file: its header claims {length} "
                    f"bytes, the file has {size}. Fetch it again."
                )
            header = json.loads(stream.read(length), object_pairs_hook=_unique_keys(file))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from None
    except ValueError as error:
        raise CheckpointError(f"{file} has a damaged header: {error}.") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a damaged header: it is not a JSON object.")
    header.pop("__metadata__", None)
    return {name: _check(file, name, info, size - 8 - length) for name, info in header.items()}


def _check(file: Path, name: str, info: Any, data_bytes: int) -> _Entry:
    try:
        shape = tuple(int(dimension) for dimension in info["shape"])
        begin, end = (int(offset) for offset in info["data_offsets"])
        element_bytes = _ELEMENT_BYTES[info["dtype"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: the entry of tensor {name!r} is bad: {error!r}.") from None
    if end > data_bytes:
        raise CheckpointError(
            f"{file} is truncated: tensor {name!r} ends at data byte {end}, the file has "
            f"{data_bytes}. Fetch it again."
        )
    if begin < 0 or end - begin != math.prod(shape) * element_bytes:
        raise CheckpointError(
            f"{file}: tensor {name!r} of shape {list(shape)} and type {info['dtype']} does not "
            f"fit its {end - begin} bytes."
        )
    return _Entry(file, shape, info["dtype"])


def _unique_keys(file: Path) -> Any:
    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise CheckpointError(f"{file} holds the tensor {key!r} twice.")
            found[key] = value
        return found

    return hook
