"""safetensors files, single or sharded, as a TensorSource. Memory-mapped; it knows no model.

Headers are checked here, so that a broken file is named together with the tensor; the safetensors
library then maps the data, and loads torch when the first tensor is read.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from flashdraft.errors import CheckpointError, quoted, shortened
from flashdraft.models.files.opening import MAX_JSON_BYTES, open_model_file, parse_json, read_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_ELEMENT_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip

_CODES = ("F8_E4M3", "F8_E5M2", "I8", "U8")  # one byte a value: numbers only together with scales


class _Entry(NamedTuple):
    file: Path
    shape: tuple[int, ...]
    dtype: str  # as the format names it
    start: int  # of its bytes in the file


class SafetensorsFiles:
    """The tensors of one or several safetensors files; no name may appear twice."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._entries: dict[str, _Entry] = {}
        self._open: dict[Path, Any] = {}
        self._mapped: dict[Path, mmap.mmap] = {}
        for file in files:
            for name, entry in _read_header(file).items():
                if name in self._entries:
                    raise CheckpointError(
                        f"Tensor {quoted(name)} is in both {self._entries[name].file} and {file}."
                    )
                self._entries[name] = entry

    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """How the tensor's values are stored, in the format's own words: BF16, F8_E4M3, I32, …"""
        return self._entries[name].dtype

    def item_bytes(self, name: str) -> int:
        """What one of the tensor's values takes."""
        return _ELEMENT_BYTES[self._entries[name].dtype]

    def whole_numbers(self, name: str) -> tuple[int, ...]:
        """The values of a small tensor of integers, one after another."""
        size, data = self.item_bytes(name), self.stored(name)
        is_signed = self.dtype(name).startswith("I")
        return tuple(
            int.from_bytes(data[place : place + size], "little", signed=is_signed)
            for place in range(0, len(data), size)
        )

    def stored(self, name: str) -> bytes:
        """A copy of a tensor's bytes, without torch."""
        entry = self._entries[name]
        if entry.file not in self._mapped:
            with open_model_file(entry.file) as stream:
                self._mapped[entry.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        end = entry.start + math.prod(entry.shape) * self.item_bytes(name)
        return self._mapped[entry.file][entry.start : end]

    def read(self, name: str) -> Tensor:
        """A tensor of numbers; codes of a quantised weight are none, and are refused."""
        file, dtype = self._entries[name].file, self._entries[name].dtype
        if dtype in _CODES:
            module = name.removesuffix(".weight")
            raise CheckpointError(
                f"{file}: tensor {name!r} is stored as {dtype}, codes that mean nothing without "
                f"their scales. There is no '{module}.weight_scale' or "
                f"'{module}.weight_scale_inv', or config.json has no quantization_config. Use the "
                "model in bf16, or one whose quantiser wrote scales and quantization_config."
            )
        return self.read_codes(name)

    def read_codes(self, name: str) -> Tensor:
        """A tensor as it is stored, for whoever knows its scales."""
        file = self._entries[name].file
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            return self._open[file].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{file}: tensor {quoted(name)} cannot be read: {shortened(error)}."
            ) from None

    def read_matrix(self, name: str, device: torch.device | None = None) -> Tensor:
        return self.read(name).to(device)

    def quantized_bytes(self, name: str) -> None:
        return None


def open_safetensors(folder: Path) -> SafetensorsFiles:
    """Open a folder's safetensors, by its index where it has one."""
    index = folder / INDEX_NAME
    if os.path.lexists(index):
        return _open_sharded(index)
    files = sorted(folder.glob("*.safetensors"))
    if folder / SINGLE_NAME in files:
        files = [folder / SINGLE_NAME]
    if len(files) == 1:
        return SafetensorsFiles(files)
    if files:
        raise CheckpointError(
            f"{folder} has {len(files)} safetensors files but neither {INDEX_NAME} nor "
            f"{SINGLE_NAME}; fetch the missing index."
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
        f"{folder} has no weights: expected {SINGLE_NAME} or {INDEX_NAME}. To use a GGUF file, "
        "name the file itself."
    )


def _open_sharded(index: Path) -> SafetensorsFiles:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} is not a valid index: it has no weight_map.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} is not a valid index: it places tensor {quoted(name)} in "
                f"{quoted(shard)}, which is no safetensors file."
            )
        if Path(shard).name != shard:
            raise CheckpointError(f"{index} names {quoted(shard)}, which is outside the folder.")
    shards = sorted(set(weight_map.values()))
    try:
        source = SafetensorsFiles(index.parent / shard for shard in shards)
    except FileNotFoundError as error:
        missing = quoted(Path(error.filename).name)
        raise CheckpointError(
            f"{index} names {missing}, which is missing; fetch it again."
        ) from None
    found = source._entries
    for name, shard in weight_map.items():
        if name not in found or found[name].file.name != shard:
            raise CheckpointError(
                f"{index} places tensor {quoted(name)} in {quoted(shard)}, which lacks it."
            )
    return source


def _read_header(file: Path) -> dict[str, _Entry]:
    """What the file holds, after checking that every tensor lies inside it."""
    with open_model_file(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= min(MAX_JSON_BYTES, size - 8):
            raise CheckpointError(
                f"{file} is truncated or not a safetensors file: its header claims {length} "
                f"bytes, the file has {size}. Fetch it again."
            )
        header = parse_json(stream.read(length), f"The header of {file}")
    if not isinstance(header, dict):
        raise CheckpointError(f"The header of {file} is not a JSON object. Fetch it again.")
    header.pop("__metadata__", None)
    return {name: _check(file, name, info, size, 8 + length) for name, info in header.items()}


def _check(file: Path, name: str, info: Any, file_bytes: int, data_start: int) -> _Entry:
    data_bytes = file_bytes - data_start
    try:
        shape, (begin, end), dtype = tuple(info["shape"]), info["data_offsets"], info["dtype"]
        are_sizes = all(type(one) is int and 0 <= one < 2**63 for one in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file}: the entry of tensor {quoted(name)} is bad: {shortened(repr(error))}."
        ) from None
    if not are_sizes or not isinstance(dtype, str):
        raise CheckpointError(
            f"{file}: the entry of tensor {quoted(name)} is bad: its shape is {quoted(shape)}, its "
            f"bytes are {quoted((begin, end))} and its type is {quoted(dtype)}."
        )
    if dtype not in _ELEMENT_BYTES:
        raise CheckpointError(
            f"{file}: the entry of tensor {quoted(name)} has the type {quoted(dtype)}; "
            f"{', '.join(_ELEMENT_BYTES)} are read."
        )
    if end > data_bytes:
        raise CheckpointError(
            f"{file} is truncated: tensor {quoted(name)} ends at data byte {end}, the file has "
            f"{data_bytes}. Fetch it again."
        )
    if end - begin != math.prod(shape) * _ELEMENT_BYTES[dtype]:
        raise CheckpointError(
            f"{file}: tensor {quoted(name)} of shape {quoted(list(shape))} and type {dtype} does "
            f"not fit its {end - begin} bytes."
        )
    return _Entry(file, shape, dtype, data_start + begin)
