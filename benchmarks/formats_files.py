"""The formats that are compared, and a model's checkpoint in each of them, written to disk.

GGUF files are whole: all metadata of the original, matrices in the wanted format, vectors float32.
Where only a GPU would quantise as it loads, the values that this gives are written as float32. It
knows nothing of measuring.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.formats_blocks import KINDS, encode
from flashdraft.kernels.kinds import Scheme, quantized_bytes
from flashdraft.kernels.quantized import quantize
from flashdraft.models.drafter.loading import load_drafter, save_drafter
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.gguf.values import read_tensor

FALLBACKS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # llama.cpp's, for rows that 256 does not divide
_ALIGNMENT = 32
_VERSION = 3
# GGUF's numbers for the types of metadata
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True)
class Format:
    """How weights are held: as a GGUF file has them, or as `quantize` or `dtype` makes them."""

    name: str
    kind: str = "BF16"  # of the file's matrices
    scheme: Scheme | None = None  # what they become
    dtype: str | None = None  # of the kernels, if not the device's own
    activations: Scheme | None = None  # what rows become before the target's linears


REFERENCE = Format("bf16")
FORMATS = (
    REFERENCE,
    Format("GGUF Q8_0", "Q8_0"),
    Format("GGUF Q6_K", "Q6_K"),
    Format("GGUF Q4_K", "Q4_K"),
    Format("GGUF Q4_0", "Q4_0"),
    Format("int8", scheme=Scheme.INT8),
    Format("fp8", scheme=Scheme.FP8),
    Format("int4", scheme=Scheme.INT4),
    Format("dtype int8", dtype="int8"),
)
ROUNDED = (  # weights in 8 bits, alone and with activations
    REFERENCE,
    *(
        Format(f"{scheme}{name}", scheme=scheme, activations=activations)
        for scheme in (Scheme.FP8, Scheme.INT8)
        for name, activations in (("", None), (", activations too", scheme))
    ),
)


@dataclass(frozen=True)
class Checkpoint:
    """A pair on disk in one format."""

    target: Path
    drafter: Path
    bits: float  # a weight, over all matrices of the target
    held_as: dict[str, float]  # shares of these weights


def make_checkpoint(
    form: Format, source: GGUFFile, drafter: Path, folder: Path, on_gpu: bool
) -> Checkpoint:
    """Write the target, and where `quantize` would change it the drafter, in a format."""
    is_tied = "output.weight" not in source.tensors
    shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
    is_float = form.scheme is not None and not on_gpu
    kind = "F32" if is_float else form.kind
    kinds = {name: stored_kind(kind, name, shape, is_tied) for name, shape in shapes.items()}

    def read(name: str) -> Tensor:
        values = read_tensor(source, name).float()
        if values.dim() < 2:
            return values
        values = values.bfloat16().float()
        scheme = _scheme_of(form, name, is_tied) if is_float else None
        return values if scheme is None else quantize(values, scheme).dequantize()

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{form.name.replace(' ', '-')}.gguf"
    write_gguf(path, source, kinds, kind, read)
    if is_float:
        scheme = _scheme_of(form, "drafter", is_tied)
        drafter = _write_drafter(drafter, scheme, folder / f"drafter-{form.scheme}")
    matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1}
    number = sum(math.prod(shape) for shape in matrices.values())
    num_bytes, held = 0.0, Counter[str]()
    for name, shape in matrices.items():
        label, size = _held(form, name, shape, kinds[name], is_tied)
        num_bytes += size
        held[label] += math.prod(shape)
    shares = {label: round(count / number, 4) for label, count in held.most_common()}
    return Checkpoint(path, drafter, round(8 * num_bytes / number, 3), shares)


def _scheme_of(form: Format, name: str, is_tied: bool) -> Scheme | None:
    """What `quantize` makes of a weight: beside int4 the head and the drafter get 8 bits."""
    is_head = name == "output.weight" or (is_tied and name == "token_embd.weight")
    if form.scheme is Scheme.INT4 and (is_head or name == "drafter"):
        return Scheme.INT8
    return form.scheme


def _held(
    form: Format, name: str, shape: tuple[int, ...], kind: str, is_tied: bool
) -> tuple[str, float]:
    """How a weight is held, and its bytes."""
    scheme = _scheme_of(form, name, is_tied)
    if scheme is not None:
        return scheme.value, quantized_bytes(shape, scheme)
    if form.dtype is not None:  # a code a value; a scale and a sum, both float32, an output
        return form.name, math.prod(shape) * (1 + 8 / shape[-1])
    return ("bf16" if kind == "BF16" else kind), stored_bytes(shape, kind)


def _write_drafter(drafter: Path, scheme: Scheme | None, folder: Path) -> Path:
    """A drafter with the values its matrices have after quantisation."""
    model = load_drafter(drafter, None).float()
    for parameter in model.parameters():
        if scheme is not None and parameter.dim() == 2:
            parameter.data = quantize(parameter.data, scheme).dequantize()
    save_drafter(model, folder, torch.float32)
    return folder


# -- files -----------------------------------------------------------------------------------------


def stored_kind(named: str, name: str, shape: tuple[int, ...], is_tied: bool) -> str:
    """What llama.cpp stores a tensor as in a file that is called `named` after its main format.

    Vectors stay float32. A head, and a table tied to it, get Q6_K or better. Rows that super-blocks
    do not divide get the next larger simple format.
    """
    if len(shape) < 2:
        return "F32"
    is_head = name == "output.weight" or (is_tied and name == "token_embd.weight")
    wanted = "Q6_K" if is_head and named in ("Q4_0", "Q4_K") else named
    return wanted if shape[-1] % KINDS[wanted].block_size == 0 else FALLBACKS[wanted]


def write_gguf(
    path: Path,
    source: GGUFFile,
    kinds: Mapping[str, str],
    named: str,
    read: Callable[[str], Tensor],
) -> None:
    """All metadata of `source`, and its tensors with the values of `read` in these formats."""
    metadata = {**source.metadata, "general.file_type": KINDS[named].file_type}
    metadata.pop("general.alignment", None)
    header = [b"GGUF", struct.pack("<IQQ", _VERSION, len(kinds), len(metadata))]
    header += [_string(key) + _typed(value) for key, value in metadata.items()]
    offset = 0
    for name, kind in kinds.items():
        shape = source.tensors[name].shape
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        header.append(_string(name) + sizes + struct.pack("<IQ", KINDS[kind].type_id, offset))
        offset += _aligned(stored_bytes(shape, kind))
    with path.open("wb") as file:
        start = file.write(b"".join(header))
        file.write(bytes(_aligned(start) - start))
        for name, kind in kinds.items():
            written = file.write(encode(read(name), kind).numpy().tobytes())
            file.write(bytes(_aligned(written) - written))


def stored_bytes(shape: Iterable[int], kind: str) -> int:
    """What a tensor takes in a file."""
    return math.prod(shape) // KINDS[kind].block_size * KINDS[kind].block_bytes


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


# -- metadata --------------------------------------------------------------------------------------


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Any) -> bytes:
    """A value after its type, as llama.cpp's converters write them."""
    if isinstance(value, list):
        one_type = _type_of(value[0], _INT32) if value else _INT32
        items = b"".join(_plain(item, one_type) for item in value)
        return struct.pack("<IIQ", _ARRAY, one_type, len(value)) + items
    one_type = _type_of(value, _UINT32)
    return struct.pack("<I", one_type) + _plain(value, one_type)


def _type_of(value: Any, integer: int) -> int:
    if isinstance(value, bool):  # before int, which it is too
        return _BOOL
    return {int: integer, float: _FLOAT32, str: _STRING}[type(value)]


def _plain(value: Any, one_type: int) -> bytes:
    if one_type == _STRING:
        return _string(value)
    return struct.pack({_INT32: "<i", _UINT32: "<I", _FLOAT32: "<f", _BOOL: "<?"}[one_type], value)
