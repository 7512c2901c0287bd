"""A GGUF file's header and raw tensor bytes, bounds-checked. It knows no model and no tensor names.

The header is parsed here rather than by the `gguf` package: a vocabulary of a few hundred thousand
strings then loads in well under a second, and a damaged file is reported with its offset. What is
inside the quantised blocks is blocks.py's; values.py reads them. No torch here.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flashdraft.errors import CheckpointError, UnsupportedModelError, quoted
from flashdraft.models.files.opening import map_model_file, reading
from flashdraft.models.files.split import first_part, part_names

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


class _Format(NamedTuple):
    name: str  # as in gguf.GGMLQuantizationType
    block_size: int  # values in a block
    block_bytes: int
    unpacked_bytes: int = 0  # of a block as blocks.py takes it apart; some formats grow

    @property
    def is_float(self) -> bool:
        return self.block_size == 1


FORMATS = {
    0: _Format("F32", 1, 4),
    1: _Format("F16", 1, 2),
    2: _Format("Q4_0", 32, 18, 18),
    3: _Format("Q4_1", 32, 20, 20),
    6: _Format("Q5_0", 32, 22, 34),
    7: _Format("Q5_1", 32, 24, 36),
    8: _Format("Q8_0", 32, 34, 34),
    10: _Format("Q2_K", 256, 84, 164),
    11: _Format("Q3_K", 256, 110, 146),
    12: _Format("Q4_K", 256, 144, 148),
    13: _Format("Q5_K", 256, 176, 276),
    14: _Format("Q6_K", 256, 210, 210),
    20: _Format("IQ4_NL", 32, 18, 34),
    23: _Format("IQ4_XS", 256, 136, 266),
    30: _Format("BF16", 1, 2),
}
_UNREAD = {  # what else files are stored in
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
_LARGEST = 2**32 - 1  # sizes, counts and token ids are stored in 32 bits
_MAX_ENTRIES = 2**16  # metadata keys, and tensors; published files have some thousands
_MAX_VALUES = 2**22  # in all arrays together; published files have 1.3 million
_MAX_STRING_BYTES = 2**24  # templates are the longest
_MAX_FLOATS = 2**16  # of a tensor that is read here; divisors of frequencies are some hundred
_LENGTH = struct.Struct("<Q")
_BFLOAT16 = "bfloat16"
_FLOAT_CODES = {"F32": "f", "F16": "e", "BF16": _BFLOAT16}  # of struct, which lacks one
_REMEDY = "Fetch it again, or name another file."


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is in torch's order, the fastest dimension last."""

    name: str
    shape: tuple[int, ...]
    format: _Format
    data: mmap.mmap  # of the file, or the part of it, that it is in
    start: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file: `metadata` by key, `tensors` by name, with the bytes that they lie in.

    Of a model in several files the first is opened, and has the tensors of all.
    A key may hold a value of any type: what must be a number is asked for as one.
    """

    def __init__(self, path: Path, joins: bool = True) -> None:
        self.path = path
        with reading(path):
            self._data = map_model_file(path)
        cursor = _Cursor(path, self._data)
        if cursor.take(4) != _MAGIC:
            raise CheckpointError(
                f"{path} is not a GGUF file: it does not start with 'GGUF'. {_REMEDY}"
            )
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{path} is GGUF version {version}; versions {_VERSIONS} in little-endian order "
                "are read. Convert it with a current llama.cpp."
            )
        num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
        if max(num_tensors, num_keys) > _MAX_ENTRIES:
            raise CheckpointError(
                f"{path} is damaged: it claims {num_tensors} tensors and {num_keys} metadata keys; "
                f"at most {_MAX_ENTRIES} are allowed. {_REMEDY}"
            )
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            if key in self.metadata:
                raise CheckpointError(f"{path} has the metadata key {quoted(key)} twice. {_REMEDY}")
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        self.tensors = self._read_table(cursor, num_tensors)
        if joins and "split.count" in self.metadata:
            self._join_parts()

    def _join_parts(self) -> None:
        """Take in the tensors of the other parts, which lie beside this file."""
        count = self._split_number("split.count")
        if count < 2:
            return
        names = part_names(self.path.name)
        if first := first_part(self.path.name):
            raise UnsupportedModelError(
                f"{self.path} is a part of a split GGUF; name its first one, {first}: the others "
                "are found beside it."
            )
        if len(names) != count or self._split_number("split.no") != 0:
            raise CheckpointError(
                f"{self.path} is part {self._split_number('split.no') + 1} of {count} of a split "
                "GGUF, but is not named so. Give every part its own name back, "
                f"NAME-00001-of-{count:05d}.gguf and so on, and name the first."
            )
        for number, name in enumerate(names[1:], 1):
            path = self.path.with_name(name)
            if not path.is_file():
                raise CheckpointError(
                    f"{self.path} is the first of {count} parts, and {name} is missing. Fetch it "
                    "into the same folder."
                )
            part = GGUFFile(path, joins=False)
            found = part._split_number("split.no"), part._split_number("split.count")
            if found != (number, count):
                raise CheckpointError(
                    f"{path} says that it is part {found[0] + 1} of {found[1]}; it must be part "
                    f"{number + 1} of {count}, as its name is. {_REMEDY}"
                )
            if both := self.tensors.keys() & part.tensors.keys():
                raise CheckpointError(
                    f"{path} holds the tensor {quoted(min(both))}, which an earlier part holds "
                    f"too. {_REMEDY}"
                )
            self.tensors |= part.tensors
        total = self._split_number("split.tensors.count")
        if total != len(self.tensors):
            raise CheckpointError(
                f"{self.path} and its other parts hold {len(self.tensors)} tensors; they must hold "
                f"{total}. Fetch all parts again."
            )

    def _split_number(self, key: str) -> int:
        numbers = self.whole_numbers(key, 0)
        if len(numbers) != 1:
            raise self._invalid(key, "it must be one number")
        return numbers[0]

    def _read_table(self, cursor: _Cursor, num_tensors: int) -> dict[str, GGUFTensor]:
        rows = []
        for _ in range(num_tensors):
            name = cursor.string()
            num_dims = cursor.scalar("I")
            if num_dims > _MAX_DIMS:
                raise CheckpointError(
                    f"{self.path}: tensor {quoted(name)} has {num_dims} dimensions, the format "
                    f"allows {_MAX_DIMS}; the file is damaged."
                )
            shape = tuple(reversed([cursor.scalar("Q") for _ in range(num_dims)]))
            rows.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 8 or alignment % 8:
            raise self._invalid("general.alignment", "it must be a multiple of 8")
        base = -(-cursor.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_id, offset in rows:
            if name in tensors:
                raise CheckpointError(f"{self.path} holds the tensor {quoted(name)} twice.")
            if offset % alignment:
                raise CheckpointError(
                    f"{self.path} is damaged: tensor {quoted(name)} begins at {offset}, which is "
                    f"no multiple of {alignment}. {_REMEDY}"
                )
            tensors[name] = self._locate(name, shape, type_id, base + offset)
        return tensors

    def _locate(self, name: str, shape: tuple[int, ...], type_id: int, start: int) -> GGUFTensor:
        layout = FORMATS.get(type_id)
        if layout is None:
            kind = _UNREAD.get(type_id, f"GGML type {type_id}")
            raise CheckpointError(
                f"{self.path}: tensor {quoted(name)} is stored as {kind}, which is not "
                f"supported; use a file in {', '.join(row.name for row in FORMATS.values())}."
            )
        if not shape or 0 in shape or shape[-1] % layout.block_size:
            raise CheckpointError(
                f"{self.path}: tensor {quoted(name)} of shape {list(shape)} does not divide "
                f"into the {layout.block_size}-value blocks of {layout.name}."
            )
        count = 1
        for size in shape:
            count *= size
        num_bytes = count // layout.block_size * layout.block_bytes
        if start + num_bytes > len(self._data):
            raise CheckpointError(
                f"{self.path} is truncated: tensor {quoted(name)} ends at byte "
                f"{start + num_bytes}, the file has {len(self._data)}. Fetch it again."
            )
        return GGUFTensor(name, shape, layout, self._data, start, num_bytes)

    def whole_numbers(self, key: str, least: int = 1) -> list[int]:
        """The whole numbers that `key` lists, or the one that it is."""
        value = self._value(key)
        numbers = value if isinstance(value, list) else [value]
        fit = [isinstance(n, int) and least <= n <= _LARGEST for n in numbers]
        if not numbers or not all(fit) or any(isinstance(n, bool) for n in numbers):
            raise self._invalid(
                key, f"it must be a whole number from {least} to {_LARGEST}, or a list of them"
            )
        return numbers

    def number(self, key: str, least: float | None = None) -> float:
        """The finite number of `key`; an integer stays one."""
        value = self._value(key)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not math.isfinite(value)
            or (least is not None and value < least)
        ):
            limit = "" if least is None else f" of at least {least:g}"
            raise self._invalid(key, f"it must be a finite number{limit}")
        return value

    def _invalid(self, key: str, rule: str) -> CheckpointError:
        """An error about what the file says under `key`."""
        return CheckpointError(
            f"{self.path} is not valid: {key} is {quoted(self.metadata[key])}; {rule}. Fetch or "
            "convert it again."
        )

    def _value(self, key: str) -> Any:
        if key not in self.metadata:
            raise CheckpointError(f"{self.path} has no metadata key {key!r}.")
        return self.metadata[key]

    def quantized_bytes(self, name: str) -> int | None:
        """What a weight takes once it is taken apart, packed; None for what becomes floats."""
        tensor = self.tensors[name]
        if tensor.format.is_float or len(tensor.shape) < 2:
            return None
        return tensor.num_bytes // tensor.format.block_bytes * tensor.format.unpacked_bytes

    def floats(self, name: str) -> list[float]:
        """The values of a small tensor of floats."""
        tensor = self.tensors[name]
        code = _FLOAT_CODES.get(tensor.format.name)
        if code is None or math.prod(tensor.shape) > _MAX_FLOATS:
            raise CheckpointError(
                f"{self.path}: tensor {quoted(name)} has shape {list(tensor.shape)} and is stored "
                f"as {tensor.format.name}; it must hold at most {_MAX_FLOATS} values in "
                f"{' or '.join(_FLOAT_CODES)}. {_REMEDY}"
            )
        data = self.stored(name)
        if code == _BFLOAT16:  # the upper half of a float32
            data = b"".join(b"\0\0" + data[place : place + 2] for place in range(0, len(data), 2))
            code = "f"
        return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))

    def stored(self, name: str) -> bytes:
        """A copy of the tensor's bytes, as they are stored."""
        tensor = self.tensors[name]
        return tensor.data[tensor.start : tensor.start + tensor.num_bytes]


class _Cursor:
    """Reads the header front to back; running off the file's end is a CheckpointError."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._room = _MAX_VALUES
        self.position = 0

    def take(self, count: int) -> bytes:
        start, self.position = self.position, self.position + count
        if self.position > len(self._data):
            raise CheckpointError(
                f"{self._path} is truncated or damaged: its header asks for {count} bytes at "
                f"{start}, the file has {len(self._data)}. {_REMEDY}"
            )
        return self._data[start : self.position]

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack("<" + code, self.take(size))[0]

    def count(self, most: int) -> int:
        """A number of things to come; one that no file has is refused before they are read."""
        start, found = self.position, self.scalar("Q")
        if found > most:
            raise CheckpointError(
                f"{self._path} is damaged: the count at byte {start} is {found}, at most {most} is "
                f"allowed. {_REMEDY}"
            )
        return int(found)

    def string(self) -> str:
        start = self.position
        try:
            return self.take(self.count(_MAX_STRING_BYTES)).decode()
        except UnicodeDecodeError:
            raise CheckpointError(
                f"{self._path} is damaged: the string at byte {start} is not UTF-8. {_REMEDY}"
            ) from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.scalar(self._code(kind))

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.count(self._room)
        self._room -= count
        if kind == _STRING:
            return self._strings(count)
        code = self._code(kind)  # arrays of arrays are in no model file and are refused here
        size = struct.calcsize("<" + code)
        return list(struct.unpack(f"<{count}{code}", self.take(count * size)))

    def _strings(self, count: int) -> list[str]:
        """As `string` gives them, one by one; a vocabulary has hundreds of thousands."""
        data, end, found = self._data, len(self._data) - _LENGTH.size, []
        for _ in range(count):
            start = self.position
            size = _LENGTH.unpack_from(data, start)[0] if start <= end else 0
            stop = start + _LENGTH.size + size
            if size > _MAX_STRING_BYTES or stop > len(data):
                self.string()  # which says what is wrong
            try:
                found.append(data[start + _LENGTH.size : stop].decode())
            except UnicodeDecodeError:
                self.string()
            self.position = stop
        return found

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise CheckpointError(
                f"{self._path} is damaged: metadata type {kind} at byte {self.position} is "
                f"unknown. {_REMEDY}"
            )
        return _SCALARS[kind]
