"""What can be wrong with a checkpoint's files, as seeded edits: the same seed, the same damage.

An edit takes a whole checkpoint's folder and damages one file of it: its bytes, its JSON, the
header of its weights, or what kind of file it is.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.corrupted_bases import DRAFTER, INDEX, TARGET, Base, copy_base

_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 98362432\n"
)
_DEEP = 100_000  # levels
_WORDS = (0, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63, 2**64 - 1)
_HOSTILE = (
    "\x1b[31mred\x1b[0m\x07",
    "\u202eback\u2066wards\u200b",
    "line\nbreak\r\ttab",
    "\ud800",
    "../../../../etc/passwd",
    "/dev/zero",
    "a" * 100_000,
    "9" * 5000,
    "",
    "{% for a in range(9) %}{{ a }}{% endfor %}",
    "{{ 1/0 }}{% if %}",
)
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 0.5, -0.0, 1e-300, 1e300, float("nan"), float("inf"),
    2**31, 2**32, 2**53 + 1, 2**63, 2**64, 10**7, 10**9, 10**30, 10**400, [], {}, [[]], [None], "x",
    "2", [1, 2, 3], {"content": 3}, {"a": {"b": []}}, *_HOSTILE,
)  # fmt: skip
_RAW = "\0raw\0"  # stands for text that json.dumps would not write
_RAW_VALUES = (
    "1e999",
    "-1e999",
    "1" * 5000,
    "[" * _DEEP + "]" * _DEEP,
    '{"a":' * 2000 + "0",
    "'x'",
)
_TENSOR_NAMES = (
    "model.layers.0.experts.{}.gate_proj.weight",
    "model.layers.{}.mlp.down_proj.weight",
    "model.{}.weight",
    "{}",
)


@dataclass(frozen=True)
class Case:
    """One damaged checkpoint, ready to be loaded."""

    base: str
    edits: tuple[str, ...]  # "file: kind", as they were done
    model: Path
    draft: Path | None

    @property
    def kind(self) -> str:
        return self.edits[0].rpartition(": ")[2]


def make_case(seed: int, bases: dict[str, Base], folder: Path) -> Case:
    """Damage a copy of one of the checkpoints below `folder` (which must not exist)."""
    rng = random.Random(seed)
    base = copy_base(bases[rng.choice(sorted(bases))], folder)
    edits = []
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        found = (path for path in base.folder.iterdir() if path.is_file() and not path.is_symlink())
        files = sorted(path for path in found if path.stat().st_size < 2**24)  # no hole
        if not files:
            break
        file = rng.choice(files)
        kind, edit = rng.choice(_edits_of(file))
        edit(rng, file)
        edits.append(f"{file.name}: {kind}")
    model = base.folder / "model.gguf" if base.name.startswith("gguf") else base.folder
    if base.name == DRAFTER:
        return Case(base.name, tuple(edits), bases[TARGET].model, base.folder)
    return Case(base.name, tuple(edits), model, None)


Edit = Callable[[random.Random, Path], None]


def _edits_of(file: Path) -> list[tuple[str, Edit]]:
    general = [("bytes", edit_bytes), ("kind of file", swap_kind)]
    if file.suffix == ".json":
        return [*general, *[("JSON", edit_json)] * 6]
    if file.suffix == ".safetensors":
        return [*general, *[("safetensors header", edit_safetensors)] * 4]
    if file.suffix == ".gguf":
        return [*general, *[("GGUF header", edit_gguf)] * 8]
    return general


def edit_bytes(rng: random.Random, file: Path) -> None:
    """Flipped, missing, added or repeated bytes; most of them near the beginning."""
    data = bytearray(file.read_bytes())
    size = max(1, len(data))
    place = rng.randrange(size) if rng.random() < 0.5 else rng.randrange(min(size, 4096))
    span = rng.choice((1, 2, 8, 100, 5000))
    way = rng.randrange(7)
    if way == 0:
        for _ in range(rng.choice((1, 3, 30))):
            if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif way == 1:
        del data[place:]
    elif way == 2:
        data[place:place] = rng.randbytes(span)
    elif way == 3:
        del data[place : place + span]
    elif way == 4:
        data[place : place + span] = rng.choice((b"\0", b"\xff", b"[", b"\n")) * span
    elif way == 5:
        data[place:place] = data[place : place + span]
    else:
        data[:0] = rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"<!doctype html>", b"\0" * 64))
    file.write_bytes(data)


def swap_kind(rng: random.Random, file: Path) -> None:
    """Something else in the file's place, or nothing."""
    way = rng.randrange(10)
    content = file.read_bytes()
    file.unlink()
    if way == 0:
        os.mkfifo(file)
    elif way == 1:
        file.mkdir()
    elif way == 2:
        file.symlink_to(file.name)
    elif way == 3:
        file.symlink_to("nowhere")
    elif way == 4:
        file.symlink_to(rng.choice(("/dev/zero", "/dev/null", "/dev/tty", "/proc/self/mem")))
    elif way == 5:
        file.write_bytes(b"")
    elif way == 6:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(file))
    elif way == 7:
        file.write_bytes(_POINTER)
    elif way == 8:
        file.write_bytes(content)
        os.truncate(file, rng.choice((2**31, 2**36)))  # a hole, which takes no room
    # and 9: nothing


def edit_json(rng: random.Random, file: Path) -> None:
    """Another value, type, key or depth somewhere in a JSON document."""
    try:
        document = json.loads(file.read_bytes())
    except (ValueError, RecursionError):  # damaged already
        return edit_bytes(rng, file)
    text = _edited_json(rng, document)
    file.write_text(text, encoding="utf-8", errors="surrogatepass")


def _edited_json(rng: random.Random, document: Any) -> str:
    places = [(document, key) for key in _keys(document)]
    places += [(node, key) for node in _containers(document) for key in _keys(node)[:40]]
    if not places:
        return rng.choice(_RAW_VALUES)
    node, key = rng.choice(places)
    way, raw = rng.randrange(12), ""
    if way == 0:
        del node[key]
    elif way == 1:
        node[key], raw = _RAW, rng.choice(_RAW_VALUES)
    elif way == 2 and isinstance(node, dict):
        node[rng.choice((*_HOSTILE, key.upper(), f"{key}_"))] = node.pop(key)
    elif way == 3 and isinstance(node, dict):  # the same key again
        node[key] = _RAW
        raw = f"{json.dumps(rng.choice(_VALUES))}, {json.dumps(key)}: {json.dumps(3)}"
    elif way == 4:
        node[key] = [node[key]] * rng.choice((0, 1, 2, 1000))
    elif way == 5 and isinstance(node[key], int | float):
        node[key] = rng.choice((node[key] * 2, -node[key], node[key] + 1, str(node[key])))
    elif way == 6:
        other, other_key = rng.choice(places)
        node[key] = json.loads(json.dumps(other[other_key])) if _has(other, other_key) else None
    else:
        node[key] = rng.choice(_VALUES)
    return json.dumps(document).replace(json.dumps(_RAW), raw)


def _keys(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node)
    return list(range(len(node))) if isinstance(node, list) else []


def _has(node: Any, key: Any) -> bool:
    return key in node if isinstance(node, dict) else key < len(node)


def _containers(node: Any) -> Iterator[Any]:
    for key in _keys(node):
        if isinstance(node[key], dict | list):
            yield node[key]
            yield from _containers(node[key])


def edit_safetensors(rng: random.Random, file: Path) -> None:
    """Another length, name, shape, type or place of a tensor; or values that are no numbers."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):
        return edit_bytes(rng, file)
    values = bytearray(data[8 + length :])
    way = rng.randrange(6)
    if way == 0:
        return _overwrite(file, 0, "<Q", rng.choice((*_WORDS, length + 1, length - 1)))
    names = [name for name in header if name != "__metadata__"]
    if way == 1 and names:  # numbers and characters in names
        name = rng.choice(_TENSOR_NAMES).format(
            rng.choice(("9" * 5000, str(10**9), "-1", "007", "²", *_HOSTILE))
        )
        header[name] = header.pop(rng.choice(names))
        text = json.dumps(header)
    elif way == 2:  # NaN, infinities or zeros in place of weights
        place, span = rng.randrange(max(1, len(values))) // 4 * 4, rng.choice((4, 64, 4096))
        pattern = rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\xff" * 4))
        values[place : place + span] = (pattern * span)[: len(values[place : place + span])]
        text = json.dumps(header)
    elif way == 3 and len(names) > 1:  # two tensors change places or share one
        first, second = rng.sample(names, 2)
        header[first] = (
            header[second]
            if rng.random() < 0.5
            else header[first] | {"data_offsets": header[second]["data_offsets"]}
        )
        text = json.dumps(header)
    else:
        text = _edited_json(rng, header)
    encoded = text.encode("utf-8", errors="surrogatepass")
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + values)


def edit_gguf(rng: random.Random, file: Path) -> None:
    """Another count, length, type, value, shape or offset in the header."""
    data = file.read_bytes()
    try:
        fields = list(_gguf_fields(data))
    except (struct.error, KeyError, OverflowError):  # damaged already
        return edit_bytes(rng, file)
    name, place, code = rng.choice([one for one in fields if rng.random() < 0.2] or fields)
    if name == "text":
        text = rng.choice(_HOSTILE[:4]).encode(errors="surrogatepass")
        file.write_bytes(data[:place] + text + data[place + len(text) :])
    elif code in "fd":
        value = rng.choice((float("nan"), float("inf"), 0.0, -1.0, 1e30))
        _overwrite(file, place, f"<{code}", value)
    else:
        size = struct.calcsize(f"<{code}")
        most = 2 ** (8 * size)
        number = int.from_bytes(data[place : place + size], "little")
        choices = (*(word for word in _WORDS if word < most), number + 1, number * 2, 8, 9, 13)
        value = rng.choice(choices) % most
        file.write_bytes(data[:place] + value.to_bytes(size, "little") + data[place + size :])


def _gguf_fields(data: bytes) -> Iterator[tuple[str, int, str]]:
    """Every number of a GGUF file's header, and every string: what, where, how it is packed."""
    place = 0

    def number(code: str) -> int:
        nonlocal place
        (found,) = struct.unpack_from(f"<{code}", data, place)
        place += struct.calcsize(f"<{code}")
        return int(found) if code not in "fd" else 0

    def string() -> Iterator[tuple[str, int, str]]:
        nonlocal place
        yield "length", place, "Q"
        size = number("Q")
        yield "text", place, "s"
        place += size

    codes = {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "B",
        10: "Q",
        11: "q",
        12: "d",
    }
    yield "magic", 0, "I"
    yield "version", 4, "I"
    place = 8
    yield "tensors", 8, "Q"
    yield "keys", 16, "Q"
    num_tensors, num_keys = number("Q"), number("Q")
    for _ in range(min(num_keys, 1000)):
        yield from string()
        yield "type", place, "I"
        kind, count = number("I"), 1
        if kind == 9:
            yield "type", place, "I"
            kind = number("I")
            yield "count", place, "Q"
            count = number("Q")
        for _ in range(min(count, 1000)):
            if kind == 8:
                yield from string()
            else:
                yield "value", place, codes[kind]
                number(codes[kind])
    for _ in range(min(num_tensors, 1000)):
        yield from string()
        yield "dimensions", place, "I"
        for _ in range(min(number("I"), 8)):
            yield "size", place, "Q"
            number("Q")
        yield "type", place, "I"
        number("I")
        yield "offset", place, "Q"
        number("Q")


def _overwrite(file: Path, place: int, code: str, value: Any) -> None:
    with file.open("r+b") as stream:
        stream.seek(place)
        stream.write(struct.pack(code, value))


__all__ = ["INDEX", "Case", "make_case"]
