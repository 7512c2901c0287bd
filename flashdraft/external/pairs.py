"""Which target and drafter an engine is told to serve, read from configs alone.

A Hub id stays one: the engine fetches it. A GGUF file, such as the default target, is written as a
folder that the engines read. No weights are read to describe a pair.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from safetensors.torch import save_file

from flashdraft.errors import (
    FlashdraftError,
    ModelNotFoundError,
    RequestError,
    UnsupportedModelError,
)
from flashdraft.files import put_in_place, write_whole
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.opening import check_fit, read_drafter_config
from flashdraft.models.files.opening import read_json, reading
from flashdraft.models.files.packaged import cache_folder
from flashdraft.models.loading import loading_progress, open_checkpoint
from flashdraft.models.sources import DEFAULT_MODEL, default_drafter, resolve_source
from flashdraft.models.tokenizer import Tokenizer

Published = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class EnginePair:
    """A target and its drafter as an engine is told of them."""

    model: str  # a Hub id or a folder
    drafter: str | None  # the same; None decodes plainly
    is_gemma4: bool
    is_exported: bool  # `model` is a folder that we write from a GGUF file
    target: ModelConfig | None  # None = a model that only the engine can read
    drafter_config: DrafterConfig | None
    weight_bytes: float | None = None  # None = not known

    @property
    def sees_pictures(self) -> bool:
        return self.target is not None and self.target.vision is not None

    @property
    def is_mixed(self) -> bool:
        """Whether the drafter has sliding layers beside full ones."""
        config = self.drafter_config
        return config is not None and len({window is None for window in config.windows}) > 1

    def check_split(self, num_gpus: int) -> None:
        """Refuse a number of GPUs that the target's heads cannot be shared out among."""
        heads = None if self.target is None else self.target.layers[0].num_heads
        if heads is not None and heads % num_gpus:
            raise RequestError(
                f"--tensor-parallel is {num_gpus}; the target has {heads} attention heads, and it "
                "must divide them."
            )


def read_pair(model: str, draft: str, targets: Published, drafters: Published) -> EnginePair:
    """The pair that `model` and `draft` name; the tables hold published configs by Hub id."""
    if draft == "ngram":
        raise RequestError(
            "--draft ngram is the native engine's lookup; with an outside engine use auto, none, "
            "or a drafter's folder or Hub id."
        )
    name = default_drafter(model) if draft == "auto" else None if draft == "none" else draft
    is_exported = model == DEFAULT_MODEL or model.endswith(".gguf")
    raw, size = _target_config(model, targets)
    target = None
    try:
        if raw is not None:
            with reading(f"The config of {model}"):
                target = ModelConfig.from_hf(raw)
    except UnsupportedModelError:  # the engine may know it all the same
        target = None
    config, drafter_size = (None, 0.0) if name is None else _drafter_config(name, drafters)
    if config is not None and target is not None:
        check_fit(config, target)
    return EnginePair(
        model=str(exported_folder(model)) if is_exported else _as_engine_sees(model),
        drafter=None if name is None else _as_engine_sees(name),
        is_gemma4=raw is not None and "gemma4" in str(_text(raw).get("model_type")),
        is_exported=is_exported,
        target=target,
        drafter_config=config,
        weight_bytes=None if size is None else size + drafter_size,
    )


def exported_folder(model: str) -> Path:
    """Where a GGUF target is kept as a folder that engines read."""
    return cache_folder() / "exported" / f"{Path(model).name.removesuffix('.gguf')}-float32"


def export_target(model: str, folder: Path) -> None:
    """Write a GGUF target as a float32 folder, unless it is there already."""
    path = resolve_source(model).path
    state = path.stat()
    origin = {"name": path.name, "bytes": state.st_size, "time": state.st_mtime_ns}
    marker = folder / "exported_from.json"  # written last: a folder that has it is whole
    if marker.is_file() and read_json(marker) == origin:
        return
    tokenizer = Tokenizer.from_checkpoint(path)
    if tokenizer is None:
        raise RequestError(f"{model} has no tokenizer; a server needs one.")
    checkpoint = open_checkpoint(path)
    with loading_progress(checkpoint.source, path.name) as on_read:
        tensors = {}
        for name in checkpoint.source.names():
            tensors[name] = checkpoint.source.read(name).float().contiguous()
            on_read(name)
    settings = {
        "config.json": {"hidden_act": "silu", **checkpoint.raw_config, "torch_dtype": "float32"},
        "generation_config.json": checkpoint.generation_config,
        "tokenizer_config.json": {
            **tokenizer.special_tokens,
            "chat_template": tokenizer.chat_template,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker.unlink(missing_ok=True)
        part = folder / f".model.{os.getpid()}.part"
        save_file(tensors, part, metadata={"format": "pt"})
        put_in_place(part, folder / "model.safetensors")
        for file, content in settings.items():
            write_whole(folder / file, json.dumps(content, indent=1) + "\n")
        write_whole(folder / "tokenizer.json", tokenizer.to_json() + "\n")
        write_whole(marker, json.dumps(origin) + "\n")
    except OSError as error:
        raise FlashdraftError(
            f"{folder} cannot be written: {error.strerror or error}. Free some space, or set "
            "FLASHDRAFT_HOME to another folder."
        ) from None


def _target_config(model: str, published: Published) -> tuple[Mapping[str, Any] | None, Any]:
    """A target's config and the bytes of its weights, as far as they are known."""
    if model in published:
        return published[model], None
    if model.endswith(".gguf"):
        return open_checkpoint(resolve_source(model).path).raw_config, None
    path = Path(model).expanduser()
    if path.is_dir():
        return read_json(path / "config.json"), _stored_bytes(path)
    return read_json(_hub_config(model)), None


def _drafter_config(name: str, published: Published) -> tuple[DrafterConfig, float]:
    if name in published:
        return DrafterConfig.from_hf(dict(published[name])), 0.0
    path = Path(name).expanduser()
    if path.is_dir():
        return read_drafter_config(path), _stored_bytes(path)
    return read_drafter_config(_hub_config(name).parent), 0.0


def _hub_config(name: str) -> Path:
    """A Hub model's config.json alone; the weights are for the engine to fetch."""
    try:
        return Path(huggingface_hub.hf_hub_download(name, "config.json"))
    except Exception as error:  # the client's network errors have no common base of its own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelNotFoundError(
            f"{name[:200]!r} is no folder here, and its config.json cannot be fetched from the "
            f"Hugging Face Hub: {reason[0][:200]} Check the name and the network, or name a folder."
        ) from None


def _stored_bytes(folder: Path) -> float:
    return float(sum(file.stat().st_size for file in folder.glob("*.safetensors")))


def _as_engine_sees(name: str) -> str:
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_dir() else name


def _text(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return raw.get("text_config") or raw
