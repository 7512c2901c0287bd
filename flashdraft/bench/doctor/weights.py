"""What a pair's weights are: in which format its files have them, and what the kernels hold.

It reads headers and configs, next to no weights, and words what it finds. What few bits do to the
accepted length is target.py's business.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flashdraft.bench.doctor.probe import Patient
from flashdraft.bench.plan.sizes import GPU_FORMATS
from flashdraft.engine.cache.storage import stored_dtype
from flashdraft.kernels.interface import Kernels
from flashdraft.kernels.kinds import Scheme, WeightOptions
from flashdraft.models.config.quantization import read_quantization
from flashdraft.models.config.weight_format import WeightFormat
from flashdraft.models.files.safetensors import open_safetensors
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.sources import resolve_source

AS_STORED = "as stored"
# bits of a value in the floats that files hold, by the formats' own names for them
_FLOATS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
_WORDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NAMES = {Scheme.INT4: "W4A16", Scheme.INT8: "W8A16", Scheme.FP8: "fp8"}
# of a head, and of the table that is one where there is no other; in safetensors and in GGUF
_HEADS = ("lm_head.weight", "output.weight", "embed_tokens.weight", "token_embd.weight")
_HEAD_SCHEME = Scheme.INT8  # what a head is quantised to beside a target of 4 bits


class _Matrix(NamedTuple):
    kind: str
    num_values: int
    bits: float  # of a value, scales included
    is_float: bool


@dataclass(frozen=True)
class StoredWeights:
    """The matrices of a checkpoint's files."""

    container: str  # GGUF, compressed-tensors, fp8 or safetensors
    kinds: Mapping[str, int]  # how many are in which format, the most frequent first
    bits: float  # of a value, scales included, on average
    is_float: bool  # all of them
    fewest_values: int  # of a matrix
    most_values: int
    float_head_values: int = 0  # of the head; 0 = it is in few bits, or there is none

    @property
    def name(self) -> str:
        """The format that most of them are in: GGUF Q4_1, bfloat16, …"""
        kind = next(iter(self.kinds))
        return kind if self.container in ("safetensors", "fp8") else f"{self.container} {kind}"

    def describe(self) -> str:
        """The format, and how far it goes."""
        first, total = next(iter(self.kinds.values())), sum(self.kinds.values())
        if len(self.kinds) > 1:
            return f"{self.name} ({first} of {total} matrices, {len(self.kinds)} kinds)"
        return self.name if self.is_float else f"{self.name} ({total} matrices)"


@dataclass(frozen=True)
class ModelWeights:
    """A model's weights on disk and on the device."""

    stored: StoredWeights
    kept_as: str  # a dtype or scheme, or "as stored"
    head_kept_as: str
    bits: float  # of a value as it is multiplied
    text: str

    @property
    def is_in_few_bits(self) -> bool:
        """Whether the target was rounded, by its file or as it was loaded."""
        return self.bits < min(_FLOATS.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "container": self.stored.container,
            "kinds": dict(self.stored.kinds),
            "stored_bits": round(self.stored.bits, 2),
            "kept_as": self.kept_as,
            "head_kept_as": self.head_kept_as,
            "bits": round(self.bits, 2),
            "text": self.text,
        }


@dataclass(frozen=True)
class PairWeights:
    """The weights of target and drafter, and what keys and values are stored as."""

    target: ModelWeights
    drafter: ModelWeights | None
    kv_dtype: str
    kv_keys: str

    @property
    def text(self) -> str:
        parts = [f"target {self.target.text}"]
        parts += [] if self.drafter is None else [f"drafter {self.drafter.text}"]
        parts.append(f"keys and values in {self.kv_dtype}")
        parts += ["shared keys rebuilt"] if self.kv_keys == "rebuilt" else []
        return " · ".join(parts)

    def to_json(self) -> dict[str, Any]:
        drafter = None if self.drafter is None else self.drafter.to_json()
        return {
            "target": self.target.to_json(),
            "drafter": drafter,
            "kv_dtype": self.kv_dtype,
            "kv_keys": self.kv_keys,
        }


def read_weights(patient: Patient) -> PairWeights:
    """What the pair that is loaded consists of."""
    kernels = patient.llm.kernels
    stored = stored_weights(resolve_source(patient.llm.model).path)
    # a drafter without a head of its own reads the target's
    reads = 2 if patient.drafter is not None and patient.drafter.lm_head is None else 1
    target = _kept(stored, kernels, kernels.quantize, kernels.quantize_head, reads)
    drafter = None
    if patient.folder is not None:
        scheme = kernels.quantize_drafter
        drafter = _kept(stored_weights(patient.folder), kernels, scheme, scheme)
    dtype = stored_dtype(kernels, patient.cache.kv_dtype)
    name = str(dtype).removeprefix("torch.")
    return PairWeights(target, drafter, name, patient.cache.kv_keys)


def schemes_in_use(kernels: Kernels, stored: StoredWeights) -> set[Scheme]:
    """The formats of few bits in which these kernels keep weights."""
    if not kernels.holds(stored.most_values):
        return set()
    asked = (kernels.quantize, kernels.quantize_head, kernels.quantize_drafter)
    found = {scheme for scheme in asked if scheme is not None}
    if stored.is_float:
        return found
    return found | ({Scheme.INT4} if stored.bits < Scheme.INT8.bits else {Scheme.INT8, Scheme.FP8})


def stored_weights(path: Path) -> StoredWeights:
    """What a GGUF file, a target's folder or a drafter's folder holds."""
    if path.suffix == ".gguf":
        return _summary("GGUF", _gguf_matrices(path))
    files = open_safetensors(path)
    shapes = {name: files.shape(name) for name in files.names()}
    # a drafter's config cannot be opened as a target's; its weights are floats in any case
    found = {
        name: _Matrix(_WORDS[dtype], math.prod(shape), _FLOATS[dtype], True)
        for name, shape in shapes.items()
        if len(shape) > 1 and (dtype := files.dtype(name)) in _FLOATS
    }
    if len(found) == sum(len(shape) > 1 for shape in shapes.values()):
        return _summary("safetensors", found)
    checkpoint = open_checkpoint(path)
    formats = read_quantization(checkpoint.raw_config)
    floats = Counter(one.kind for one in found.values()).most_common(1)
    word = floats[0][0] if floats else _WORDS["BF16"]
    matrices = {}
    for name in checkpoint.source.names():
        shape = checkpoint.source.shape(name)
        if len(shape) < 2:
            continue
        num_values, size = math.prod(shape), checkpoint.source.quantized_bytes(name)
        if size is None:
            matrices[name] = _Matrix(word, num_values, _FLOATS["BF16"], True)
        else:
            bits = 8 * size / num_values
            matrices[name] = _Matrix(_label(formats, bits), num_values, bits, False)
    method = _method(checkpoint.raw_config)
    return _summary(method, matrices)


def scheme_bits(scheme: Scheme) -> float:
    """Of a value that `--quantize` made, with its share of a scale."""
    wanted = ("--quantize", scheme.value)
    return next(form.bits for form in GPU_FORMATS if form.flags == wanted)


def recorded_formats(provenance: Mapping[str, Any]) -> WeightOptions:
    """What a drafter's target and its head were quantised to in training, where it is recorded."""
    target = provenance.get("target")
    found = target if isinstance(target, Mapping) else {}
    return WeightOptions(*(found.get(name) for name in WeightOptions._fields))


def describe_formats(formats: WeightOptions) -> str:
    """The same in words that follow a target's name; nothing where nothing was quantised."""
    quantize, head, activations = formats
    beside = "" if head in (None, quantize) else f" (head {head})"
    rounded = f", activations {activations}" if activations else ""
    return f" in {quantize or 'its own format'}{beside}{rounded}" if any(formats) else ""


def _gguf_matrices(path: Path) -> dict[str, _Matrix]:
    matrices = {}
    for tensor in GGUFFile(path).tensors.values():
        if len(tensor.shape) > 1:
            kind, num_values = tensor.format.name, math.prod(tensor.shape)
            bits = 8 * tensor.num_bytes / num_values
            matrices[tensor.name] = _Matrix(kind, num_values, bits, kind in _FLOATS)
    return matrices


def _summary(container: str, matrices: Mapping[str, _Matrix]) -> StoredWeights:
    found = list(matrices.values())
    heads = (
        matrix
        for ending in _HEADS
        for name, matrix in matrices.items()
        if f".{name}".endswith(f".{ending}")
    )
    head = next(heads, None)
    kinds = Counter(one.kind for one in found)
    sizes = [one.num_values for one in found]
    return StoredWeights(
        container=container,
        kinds=dict(kinds.most_common()),
        bits=sum(one.bits * one.num_values for one in found) / sum(sizes),
        is_float=all(one.is_float for one in found),
        fewest_values=min(sizes),
        most_values=max(sizes),
        float_head_values=head.num_values if head is not None and head.is_float else 0,
    )


def _method(raw_config: Mapping[str, Any]) -> str:
    text = raw_config.get("text_config") or {}
    found = raw_config.get("quantization_config") or text.get("quantization_config") or {}
    return str(found.get("quant_method"))


def _label(formats: tuple[WeightFormat, ...], bits: float) -> str:
    """The config's format of a weight: codes of 4 bits take less than 8 with any scales."""
    width = Scheme.INT4.bits if bits < Scheme.INT8.bits else Scheme.INT8.bits
    form = next(one for one in formats if one.scheme.bits == width)
    scales = {"channel": "a scale a row", "tensor": "one scale"}.get(form.strategy, "")
    if form.group is not None:
        scales = f"groups of {form.group}"
    elif form.block is not None:
        scales = f"blocks of {form.block[0]}×{form.block[1]}"
    zero_points = "" if form.symmetric else " with zero points"
    return f"{_NAMES[form.scheme]}, {scales}{zero_points}"


def _kept(
    stored: StoredWeights,
    kernels: Kernels,
    quantize: Scheme | None,
    head: Scheme | None,
    head_reads: int = 1,
) -> ModelWeights:
    """What the kernels make of weights: a CPU has one format, a GPU holds or makes few bits."""
    where = "this CPU" if kernels.device.type == "cpu" else "this GPU"
    dtype = kernels.weight_dtype
    float_bits = float(8 * kernels.dtype.itemsize)
    small = ""
    if kernels.holds(stored.most_values) and not kernels.holds(stored.fewest_values):
        small = f", small matrices as {dtype}"
    said = stored.describe()
    if not stored.is_float and kernels.holds(stored.most_values):
        head_kept, rest = _head(stored, kernels, head, head_reads)
        if quantize is not None:
            rest = f"; float matrices become {quantize} on load"
        text = f"{said}, kept so on {where}{small}{rest}"
        return ModelWeights(stored, AS_STORED, head_kept, stored.bits, text)
    if stored.is_float and kernels.holds(stored.most_values) and quantize is not None:
        beside = "" if head in (None, quantize) else f" (head {head})"
        text = f"{said}, quantised to {quantize} on load{beside}{small}"
        return ModelWeights(
            stored, quantize.value, (head or quantize).value, scheme_bits(quantize), text
        )
    bits = min(stored.bits, 8.0 if dtype == "int8" else float_bits)
    if stored.is_float and kernels.holds(stored.most_values) and head is not None:
        _, beside = _head(stored, kernels, head, head_reads)
        return ModelWeights(
            stored, dtype, head.value, bits, f"{said}, kept as {dtype} on {where}{beside}"
        )
    return ModelWeights(stored, dtype, dtype, bits, f"{said}, kept as {dtype} on {where}")


def _head(
    stored: StoredWeights, kernels: Kernels, scheme: Scheme | None, reads: int
) -> tuple[str, str]:
    """What a float head becomes by itself, and what few bits save or would save, in words."""
    num_values = stored.float_head_values
    if not num_values or not kernels.holds(num_values):
        return AS_STORED, ""
    bits = 8 * kernels.dtype.itemsize - scheme_bits(scheme or _HEAD_SCHEME)
    saved = int(num_values * bits / 8)
    sizes = f"{_size(saved)} of memory and {_size(reads * saved)} a step"
    if scheme is not None:
        return scheme.value, f", its head quantised to {scheme} on load, which saves {sizes}"
    dtype = kernels.weight_dtype
    return dtype, f", its head as {dtype}: --quantize-head {_HEAD_SCHEME} would save {sizes}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"
