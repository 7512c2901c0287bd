"""Opening a checkpoint: its config, and its tensors under the text model's plain names.

It owns the differences between checkpoints of one model (multimodal prefixes, un-fused experts,
GGUF). What the tensors mean is for the model files; where checkpoints come from, for sources.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from flashdraft.errors import CheckpointError, quoted
from flashdraft.kernels.quantized import Matrix, Quantized, stack_experts, stack_rows
from flashdraft.models.compressed_tensors import CompressedTensors
from flashdraft.models.config.quantization import read_quantization
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.files.opening import check_model_files, read_json, reading
from flashdraft.models.files.safetensors import open_safetensors
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.gguf.reader import GGUFTensors, gguf_config, gguf_generation_config
from flashdraft.models.other_formats import (
    refuse_other_config,
    refuse_other_folder,
    refuse_other_gguf,
    refuse_other_tensors,
)
from flashdraft.models.weights import GuardedTensors, TensorSource

_TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_OTHER_MODALITIES = re.compile(
    r"(model\.)?(vision_tower|vision_model|audio_tower|multi_modal_projector|embed_vision|embed_audio)\."
)
_EXPERT = re.compile(r"(.+\.experts)\.([0-9]+)\.(gate|up|down)_proj\.weight")
_MAX_DIGITS = 9  # of an expert's number


@dataclass(frozen=True)
class Checkpoint:
    """An opened model: what it is, and where its tensors are read from."""

    path: Path
    config: ModelConfig
    raw_config: dict[str, Any]  # config.json, or a GGUF file's metadata in that form
    generation_config: dict[str, Any]  # generation_config.json, {} where there is none
    source: TensorSource


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder with config.json and safetensors, or a GGUF file."""
    with reading(path):
        if path.suffix == ".gguf":
            file = GGUFFile(path)
            refuse_other_gguf(file)
            raw_config = gguf_config(file)
            generation_config = gguf_generation_config(file)
            source: TensorSource = GGUFTensors(file)
        else:
            raw_config = read_target_config(path)
            optional = path / "generation_config.json"
            generation_config = read_json(optional) if optional.is_file() else {}
            with reading(f"The config of {path}"):
                formats = read_quantization(raw_config)
            files = open_safetensors(path)
            if formats:
                source = text_tensors(CompressedTensors(files, formats))
            else:
                refuse_other_tensors(files.names())
                source = text_tensors(files)
        config = _parse_config(path, raw_config, generation_config)
        if config.tie_embeddings:  # some files store the tied head again
            source = _View(source, {n: n for n in source.names() if n != "lm_head.weight"})
    return Checkpoint(path, config, raw_config, generation_config, GuardedTensors(source, path))


def read_target_config(folder: Path) -> dict[str, Any]:
    """A model folder's config.json; what other tools make of a folder is refused by its name."""
    check_model_files(folder)
    refuse_other_folder(folder)
    config = read_json(folder / "config.json")
    refuse_other_config(folder, config)
    return config


def text_tensors(source: TensorSource) -> TensorSource:
    """The text model's tensors under plain names, a layer's experts joined into one tensor."""
    stored: dict[str, str] = {}
    for name in source.names():
        plain = _plain_name(name)
        if plain is None:
            continue
        if plain in stored:
            raise CheckpointError(
                f"Tensors {quoted(stored[plain])} and {quoted(name)} are the same one."
            )
        stored[plain] = name
    view = _View(source, stored)
    experts = [match for name in stored if (match := _EXPERT.fullmatch(name))]
    return _FusedExperts(view, experts) if experts else view


@contextmanager
def loading_progress(source: TensorSource, label: str) -> Iterator[Callable[[str], None]]:
    """A progress bar for `Weights(on_read=…)`, counted in values; silent off a terminal."""
    sizes = {name: math.prod(source.shape(name)) for name in source.names()}
    with tqdm(
        total=sum(sizes.values()),
        desc=f"Loading {label}",
        unit=" values",
        unit_scale=True,
        disable=None,  # off where stderr is no terminal
        leave=False,
    ) as bar:
        yield lambda name: bar.update(sizes[name])


def _parse_config(path: Path, raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    with reading(f"The config of {path}"):
        return ModelConfig.from_hf(raw).with_generation(generation)


def _plain_name(name: str) -> str | None:
    """The text model's name for a stored tensor; None for one that is not part of it."""
    if _OTHER_MODALITIES.match(name) or name.endswith(".rotary_emb.inv_freq"):
        return None
    for prefix, plain in _TEXT_PREFIXES:
        if name.startswith(prefix):
            name = plain + name.removeprefix(prefix)
    return name.replace(".moe.experts.", ".experts.")


class _View:
    """Some tensors of another source, under other names."""

    def __init__(self, source: TensorSource, stored: dict[str, str]) -> None:
        self._source = source
        self._stored = stored

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._stored[name])

    def read(self, name: str) -> Tensor:
        return self._source.read(self._stored[name])

    def read_matrix(self, name: str, device: torch.device | None = None) -> Matrix:
        return self._source.read_matrix(self._stored[name], device)

    def quantized_bytes(self, name: str) -> int | None:
        return self._source.quantized_bytes(self._stored[name])


class _FusedExperts:
    """Joins `experts.<id>.{gate,up,down}_proj.weight` into `gate_up_proj` and `down_proj`.

    gate_up_proj is [experts, 2 * intermediate, hidden], gate first; down_proj [experts, hidden,
    intermediate].
    """

    def __init__(self, source: TensorSource, matches: Iterable[re.Match[str]]) -> None:
        self._source = source
        parts: dict[str, dict[tuple[int, str], str]] = {}
        for match in matches:
            if len(match[2]) > _MAX_DIGITS:
                raise CheckpointError(
                    f"Tensor {quoted(match[0])} is of an expert whose number has {len(match[2])} "
                    "digits. Fetch the checkpoint again."
                )
            parts.setdefault(match[1], {})[int(match[2]), match[3]] = match[0]
        self._fused: dict[str, list[list[str]]] = {}  # fused name -> per expert, the parts to stack
        for prefix, found in parts.items():
            # of so few parts some are missing if a number is larger, and the first is named
            count = min(max(expert for expert, _ in found), len(found)) + 1
            for fused, kinds in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
                self._fused[f"{prefix}.{fused}"] = [
                    [_expert_part(prefix, found, expert, kind) for kind in kinds]
                    for expert in range(count)
                ]
        joined = {part for rows in self._fused.values() for row in rows for part in row}
        self._plain = [name for name in source.names() if name not in joined]

    def names(self) -> Iterable[str]:
        return [*self._plain, *self._fused]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._fused:
            return self._source.shape(name)
        experts = self._fused[name]
        first = self._source.shape(experts[0][0])
        for part in (part for parts in experts for part in parts):
            if self._source.shape(part) != first:
                raise CheckpointError(
                    f"Tensor {quoted(part)} has shape {list(self._source.shape(part))}, "
                    f"{quoted(experts[0][0])} has {list(first)}; the experts of a layer must agree."
                )
        return (len(experts), first[0] * len(experts[0]), *first[1:])

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
            matrices = [read(part, device) for part in parts]
            quantized = [one for one in matrices if isinstance(one, Quantized)]
            stacked = stack_rows(quantized) if len(quantized) == len(parts) else None
            if stacked is None:
                raise CheckpointError(
                    f"Tensors {', '.join(map(quoted, parts))} are stored in different formats, but "
                    f"make one tensor of shape {list(shape)}."
                )
            experts.append(stacked)
        return stack_experts(experts)

    def quantized_bytes(self, name: str) -> int | None:
        parts = [part for parts in self._fused.get(name, [[name]]) for part in parts]
        sizes = [self._source.quantized_bytes(part) for part in parts]
        found = [size for size in sizes if size is not None]
        return sum(found) if len(found) == len(sizes) else None


def _expert_part(prefix: str, found: dict[tuple[int, str], str], expert: int, kind: str) -> str:
    if (expert, kind) not in found:
        raise CheckpointError(
            f"The checkpoint has no tensor {quoted(f'{prefix}.{expert}.{kind}_proj.weight')}, "
            "though it has those of a later expert or of another projection."
        )
    return found[expert, kind]
