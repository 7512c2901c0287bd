"""A checkpoint as it is stored: its configs and the table of its tensors. No torch.

It owns the differences between checkpoints of one model (multimodal prefixes, un-fused experts,
GGUF). The tables may be bare, or have values to read: `TableKinds` says, and loading.py has the
second kind. Where checkpoints come from is for sources.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from re import Match
from typing import Any, Generic, TypeVar

from flashdraft.models.config.quantization import Formats, read_quantization
from flashdraft.models.config.recommended import names_of, with_recommended
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.config.vision import NO_TOWER
from flashdraft.models.files.opening import check_model_files, read_json, reading
from flashdraft.models.files.safetensors import SafetensorsFiles, open_safetensors
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.gguf.names import GGUFTable, TowerTable
from flashdraft.models.gguf.opening import read_gguf
from flashdraft.models.other_formats import (
    refuse_other_config,
    refuse_other_folder,
    refuse_other_gguf,
    refuse_other_tensors,
    refuse_other_tower,
    refuse_tower_of_folder,
    with_quantizer,
)
from flashdraft.models.packed.opening import packed_table
from flashdraft.models.tables import (
    STACKED,
    FusedTable,
    GuardedTable,
    JoinedTable,
    RenamedTable,
    StackedTable,
    TensorTable,
    experts_among,
    has_tower,
    plain_names,
)

logger = logging.getLogger(__name__)

LEFT_OUT = "Its vision tower was left out as it was loaded."
_NO_TENSORS = "Its files hold none of its vision tower's tensors; fetch a checkpoint that has them."

Table = TypeVar("Table", bound=TensorTable)


@dataclass(frozen=True)
class TableKinds(Generic[Table]):
    """What tables are made: of a file's tensors, and over one another."""

    gguf: Callable[[GGUFFile], Table]
    tower: Callable[[GGUFFile], Table]
    floats: Callable[[SafetensorsFiles], Table]
    packed: Callable[[SafetensorsFiles, Formats], Table]
    renamed: Callable[[Table, dict[str, str]], Table]
    joined: Callable[[Table, Table], Table]
    fused: Callable[[Table, Iterable[Match[str]]], Table]
    stacked: Callable[[Table], Table]
    guarded: Callable[[Table, Path], Table]


@dataclass(frozen=True)
class Stored(Generic[Table]):
    """An opened model: what it is, and the table of its tensors."""

    path: Path
    config: ModelConfig
    raw_config: dict[str, Any]  # config.json, or a GGUF file's metadata in that form
    generation_config: dict[str, Any]  # with its makers' sampling where it has none (recommended)
    source: Table


def _bare(files: SafetensorsFiles) -> TensorTable:
    return files


BARE: TableKinds[TensorTable] = TableKinds(
    gguf=GGUFTable,
    tower=TowerTable,
    floats=_bare,
    packed=packed_table,
    renamed=RenamedTable,
    joined=JoinedTable,
    fused=FusedTable,
    stacked=StackedTable,
    guarded=GuardedTable,
)


def open_stored(
    path: Path, kinds: TableKinds[Table], vision: bool = False, mmproj: Path | None = None
) -> Stored[Table]:
    """Open a folder with config.json and safetensors, or a GGUF file.

    With `vision` the tower for pictures is a part of it, where there is one that can be run;
    without it the config has none either. A GGUF model's tower is `mmproj`, or lies beside it.
    """
    with reading(path):
        if path.suffix == ".gguf":
            return _open_gguf(path, kinds, vision, mmproj)
        if vision and mmproj is not None:
            refuse_tower_of_folder(path)
        return _open_folder(path, kinds, vision)


def _open_gguf(
    path: Path, kinds: TableKinds[Table], vision: bool, mmproj: Path | None
) -> Stored[Table]:
    file = GGUFFile(path)
    refuse_other_gguf(file)
    model = read_gguf(file, vision, mmproj)
    config = _parse_config(path, model.raw_config, model.generation_config)
    if mmproj is not None and model.tower is not None:
        refuse_other_tower(mmproj, config)
    if model.tower is None and model.why_none is not None:
        config = config.without_vision(model.why_none)
    _warn_of_blindness(config, vision)
    tensors = kinds.gguf(file)
    if any(name.endswith(STACKED) for name in tensors.names()):
        tensors = kinds.stacked(tensors)
    source = kinds.guarded(_without_copies(tensors, config, kinds), path)
    if config.vision is not None and model.tower is not None:
        logger.info("%s sees pictures with %s.", path, model.tower.path)
        source = kinds.joined(source, kinds.guarded(kinds.tower(model.tower), model.tower.path))
    names = names_of(path, [file.metadata.get(f"general.{key}") for key in ("name", "basename")])
    generation_config = with_recommended(model.generation_config, names)
    return Stored(path, config, model.raw_config, generation_config, source)


def _open_folder(path: Path, kinds: TableKinds[Table], vision: bool) -> Stored[Table]:
    raw_config = read_target_config(path)
    optional = path / "generation_config.json"
    generation_config = read_json(optional) if optional.is_file() else {}
    with reading(f"The config of {path}"):
        formats = read_quantization(raw_config)
    files = _open_tensors(path, formats, kinds)
    config = _parse_config(path, raw_config, generation_config)
    config = _with_tower(config, files, vision)
    source = _plain_tensors(files, kinds, config.vision is not None)
    source = kinds.guarded(_without_copies(source, config, kinds), path)
    names = names_of(path, [raw_config.get("_name_or_path")])
    generation_config = with_recommended(generation_config, names)
    return Stored(path, config, raw_config, generation_config, source)


def read_target_config(folder: Path) -> dict[str, Any]:
    """A model folder's config.json; what other tools make of a folder is refused by its name."""
    check_model_files(folder)
    refuse_other_folder(folder)
    config = with_quantizer(folder, read_json(folder / "config.json"))
    refuse_other_config(folder, config)
    return config


def _open_tensors(path: Path, formats: Formats, kinds: TableKinds[Table]) -> Table:
    files = open_safetensors(path)
    if formats:
        return kinds.packed(files, formats)
    refuse_other_tensors(files.names())
    return kinds.floats(files)


def _with_tower(config: ModelConfig, files: TensorTable, vision: bool) -> ModelConfig:
    """The config, with a tower only if it is asked for and there."""
    if not vision:
        return config if config.vision is None else config.without_vision(LEFT_OUT)
    if config.vision is not None and not has_tower(files.names()):
        config = config.without_vision(_NO_TENSORS)
    _warn_of_blindness(config, vision)
    return config


def _warn_of_blindness(config: ModelConfig, vision: bool) -> None:
    """Say why a model takes no pictures, if it was asked to and there is more to say than that."""
    if vision and config.why_no_vision not in (None, NO_TOWER):
        logger.warning("%s takes no pictures. %s", config.architecture, config.why_no_vision)


def _without_copies(source: Table, config: ModelConfig, kinds: TableKinds[Table]) -> Table:
    """Some files store the tied head again."""
    if not config.tie_embeddings:
        return source
    return kinds.renamed(source, {n: n for n in source.names() if n != "lm_head.weight"})


def _plain_tensors(source: Table, kinds: TableKinds[Table], with_tower: bool) -> Table:
    """The model's tensors under plain names, a layer's experts joined into one tensor."""
    stored = plain_names(source, with_tower)
    view = kinds.renamed(source, stored)
    experts = experts_among(stored)
    return kinds.fused(view, experts) if experts else view


def _parse_config(path: Path, raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    with reading(f"The config of {path}"):
        return ModelConfig.from_hf(raw).with_generation(generation)
