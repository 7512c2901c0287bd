"""What other tools write, told by its marks: what it is, and what to do instead.

Every folder and GGUF file passes here before its tensors are looked at, so that a LoRA or a GPTQ
folder is called by its name and not by a tensor's shape. It reads no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from flashdraft.errors import UnsupportedModelError, quoted
from flashdraft.models.config.quantizers import FILES, from_file
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.config.weight_format import unsupported_weights
from flashdraft.models.files.opening import read_json
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.gguf.tower import is_tower_file


class _Mark(NamedTuple):
    """A file by which a folder is known."""

    file: str
    words: Callable[[Path], str]  # from that file
    beside_config: bool  # whether it says so also where the folder has a config.json


def _lora(file: Path) -> str:
    base = _said(read_json(file), "base_model_name_or_path")
    return (
        f"a LoRA adapter for {base}, not a model: name that model, and this folder by --lora (in "
        "Python: lora=…)"
    )


def _pipeline(file: Path) -> str:
    kind = _said(read_json(file), "_class_name")
    return f"a diffusers pipeline ({kind}), which writes no text: name a language model"


def _embedding(file: Path) -> str:
    return f"an embedding model ({file.name}), which writes no text: name a chat model"


def _makers_layout(file: Path) -> str:
    return (
        f"in its maker's own layout ({file.name}): name the model's folder in transformers' "
        "layout, with config.json, or a GGUF file"
    )


# in this order
_FOLDERS = (
    _Mark("adapter_config.json", _lora, False),
    _Mark("model_index.json", _pipeline, True),
    _Mark("config_sentence_transformers.json", _embedding, True),
    _Mark("modules.json", _embedding, True),
    _Mark("params.json", _makers_layout, False),
)
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
# names that end so, in files whose config says nothing of it
_TENSORS = (
    ((".qweight", ".qzeros"), "by GPTQ or AWQ without a config that says how"),
    ((".absmax", ".quant_map", ".SCB"), "by bitsandbytes"),
    ((".scales", ".biases"), "by MLX"),
    (("_proj_blocks", "_proj_scales"), "in MXFP4"),
)
_NO_TEXT = {  # endings of architectures
    "ForSequenceClassification": "a classifier",
    "ForTokenClassification": "a classifier",
    "ForQuestionAnswering": "a reader that marks answers",
    "ForRewardModel": "a reward model",
    "ForMaskedLM": "an encoder",
    "BertModel": "an encoder",
    "RobertaModel": "an encoder",
    "TextEncoder": "an encoder",
}
_GGUF_KINDS = {  # general.type
    "mmproj": "the vision or audio part of a model: name the language model's own file, and this "
    "one by --mmproj (in Python: mmproj=…) if it lies elsewhere",
    "adapter": "a LoRA adapter: merge it first (llama.cpp: `llama-export-lora`)",
    "imatrix": "an importance matrix and no model: name the model's own file",
}
_SHOWN = 3


def refuse_other_folder(folder: Path) -> None:
    """Raise if a folder is no model's at all, by the files that stand in it."""
    has_config = (folder / "config.json").is_file()
    for mark in _FOLDERS:
        file = folder / mark.file
        is_one = mark.beside_config or not has_config
        if mark.words is _lora:  # it may carry the config of the model that it was trained on
            is_one |= any((folder / name).is_file() for name in _ADAPTERS)
        if is_one and file.is_file():
            raise UnsupportedModelError(f"{folder} is {mark.words(file)}.")
    if has_config:
        return
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if files:
        shown = ", ".join(files[:_SHOWN]) + (", …" if len(files) > _SHOWN else "")
        raise UnsupportedModelError(
            f"{folder} holds GGUF files ({shown}): name the file itself, not its folder."
        )
    has_weights = any(folder.glob("*.safetensors"))
    if not has_weights and any((folder / name).is_file() for name in _TOKENIZERS):
        raise UnsupportedModelError(
            f"{folder} holds a tokenizer alone, without config.json and weights: fetch the whole "
            "model."
        )


_DRAFTERS_KEYS = ("dflash_config", "speculators_config")


def refuse_other_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise if a config is of a model that is not read."""
    names = config.get("architectures")
    if any(key in config for key in _DRAFTERS_KEYS):
        raise UnsupportedModelError(
            f"{folder} is a drafter: name its target as the model, and this one with --draft (in "
            "Python: draft=…)."
        )
    for name in names if isinstance(names, list) else ():
        kinds = (kind for ending, kind in _NO_TEXT.items() if str(name).endswith(ending))
        if kind := next(kinds, None):
            raise UnsupportedModelError(
                f"{folder} is {kind} ({quoted(name)}), which writes no text: name a chat model."
            )
    if config.get("is_encoder_decoder") is True:
        raise UnsupportedModelError(
            f"{folder} is an encoder-decoder ({quoted(config.get('model_type'))}); decoders alone "
            "are supported."
        )


def with_quantizer(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """A config with what a file beside it says of its weights, where it says nothing itself."""
    if config.get("quantization_config"):
        return config
    for file, method in FILES.items():
        said = from_file(method, read_json(folder / file)) if (folder / file).is_file() else None
        if said is not None:
            return {**config, "quantization_config": said}
    return config


def refuse_other_tensors(names: Iterable[str]) -> None:
    """Raise if tensors of a checkpoint that should be in floats are a quantiser's."""
    for name in names:
        for endings, maker in _TENSORS:
            if name.endswith(endings):
                raise unsupported_weights(f"{maker} (as the tensor {quoted(name)})")


def refuse_other_gguf(file: GGUFFile) -> None:
    """Raise if a GGUF file is no model."""
    kind = file.metadata.get("general.type")
    if is_tower_file(file):
        kind = "mmproj"
    if isinstance(kind, str) and kind in _GGUF_KINDS:
        raise UnsupportedModelError(f"{file.path} is {_GGUF_KINDS[kind]}.")


def refuse_other_tower(mmproj: Path, config: ModelConfig) -> None:
    """Raise if a model's config could not take the tower that was named for it."""
    if config.vision is None:
        raise UnsupportedModelError(
            f"{mmproj} holds no tower that can be run. {config.why_no_vision}"
        )


def refuse_tower_of_folder(folder: Path) -> NoReturn:
    """A folder has its own tower, or none."""
    raise UnsupportedModelError(
        f"{folder} is a folder, and mmproj files are for GGUF models: a folder has its tower for "
        "pictures in it. Leave --mmproj out (in Python: mmproj=…)."
    )


def _said(content: Mapping[str, Any], key: str) -> str:
    return quoted(content[key]) if content.get(key) else "an unnamed one"
