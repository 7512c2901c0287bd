"""The tiny Gemma 4 with a vision tower (seeing_checkpoint.py) as llama.cpp's converter writes it.

A GGUF file has the text model, an mmproj file beside it the tower. Names are the `gguf` package's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from flashdraft.models.config.vision import LIMITS
from tests.unit.models.gguf.factory import Array, Types, write_gguf

NUM_LAYERS, TOWER_LAYERS, PATCH = 12, 3, 4
_WIDTH = 64
_TEXT = {
    "block_count": NUM_LAYERS,
    "context_length": 4096,
    "embedding_length": _WIDTH,
    "feed_forward_length": 160,
    "attention.head_count": 4,
    "attention.head_count_kv": [2, 2, 2, 2, 2, 1] * 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.sliding_window_pattern": [True, True, True, True, True, False] * 2,
    "attention.sliding_window": 96,
    "attention.key_length": 32,
    "attention.key_length_swa": 16,
    "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "final_logit_softcapping": 30.0,
}
_SMALL = {
    "attention.head_count_kv": 2,
    "attention.shared_kv_layers": 4,
    "embedding_length_per_layer_input": 8,
    "feed_forward_length": [160] * 8 + [320] * 4,
}
TOWER_KEYS: dict[str, Any] = {
    "general.type": "mmproj",
    "clip.has_vision_encoder": True,
    "clip.vision.projector_type": "gemma4v",
    "clip.vision.projection_dim": _WIDTH,
    "clip.vision.image_size": 224,
    "clip.vision.patch_size": PATCH,
    "clip.vision.embedding_length": 48,
    "clip.vision.feed_forward_length": 80,
    "clip.vision.block_count": TOWER_LAYERS,
    "clip.vision.attention.head_count": 2,
    "clip.vision.attention.layer_norm_epsilon": 1e-6,
    "clip.vision.image_mean": [0.0, 0.0, 0.0],
    "clip.vision.image_std": [1.0, 1.0, 1.0],
}


def write_text(folder: Path, path: Path, **general: Any) -> Path:
    """The text model of a folder, with its tokenizer and chat template."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, NUM_LAYERS)
    is_small = any("per_layer" in name for name in _stored(folder))
    tensors = {"rope_freqs.weight": np.array([1.0] * 4 + [1e30] * 12, dtype=np.float32)}
    for name, values in _stored(folder).items():
        if "language_model." in name:
            plain = name.replace("model.language_model.", "model.")
            whole = plain if plain.endswith(".weight") else f"{plain}.weight"
            tensors[_named(table, whole)] = values
    said = {**_TEXT, **(_SMALL if is_small else {})}
    return write_gguf(path, "gemma4", said, tensors, general={**_tokenizer(folder), **general})


def tower_tensors(folder: Path) -> dict[str, Array]:
    """The tower of a folder under llama.cpp's names, its patches by colour, row and column."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, TOWER_LAYERS)
    tensors = {}
    for name, values in _stored(folder).items():
        if "vision" not in name:
            continue
        plain = name.replace("model.vision_tower.encoder.", "vision_model.model.")
        plain, values = plain.replace(".linear.weight", ".weight"), np.atleast_1d(values)
        if plain.endswith("position_embedding_table"):
            plain += ".weight"
        if plain.endswith("input_proj.weight"):
            values = values.reshape(len(values), PATCH, PATCH, 3).transpose(0, 3, 1, 2)
        tensors[_named(table, plain)] = np.ascontiguousarray(values)
    return tensors


def write_tower(
    folder: Path,
    path: Path,
    kind: Types = Types.F32,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Array | None] | None = None,
) -> Path:
    """The tower of a folder, its matrices in a format; keys and tensors that are None are left out.

    As the converter does it, vectors and the table of positions stay in float32, and so does what
    has no rows of whole blocks.
    """
    given = {**tower_tensors(folder), **(tensors or {})}
    kept = {name: values for name, values in given.items() if values is not None}
    block = gguf.GGML_QUANT_SIZES[kind][0]
    formats = {
        name: kind
        for name, values in kept.items()
        if values.ndim == 2 and values.shape[1] % block == 0 and kind != Types.F32
    }
    said = {**TOWER_KEYS, **(keys or {})}
    general = {key: value for key, value in said.items() if value is not None}
    return write_gguf(path, "clip", {}, kept, formats, general)


def make_seeing_gguf(folder: Path, into: Path) -> Path:
    """Both files of the model of a folder; the path of the text's."""
    into.mkdir(parents=True, exist_ok=True)
    write_tower(folder, into / "mmproj-tiny-f32.gguf")
    return write_text(folder, into / "tiny.gguf")


def _stored(folder: Path) -> dict[str, Array]:
    tensors = load_file(folder / "model.safetensors")
    return {name: values.float().numpy() for name, values in tensors.items()}


def _named(table: gguf.TensorNameMap, name: str) -> str:
    found = table.get_name(name, try_suffixes=(".weight", *(f".{one}" for one in LIMITS)))
    assert found is not None, name
    return str(found)


def _tokenizer(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "tokenizer.json").read_text())
    special = {one["id"]: one["content"] for one in content["added_tokens"]}
    by_id = {index: token for token, index in content["model"]["vocab"].items()} | special
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [by_id[index] for index in range(len(by_id))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "tokenizer.ggml.token_type": [3 if i in special else 1 for i in range(len(by_id))],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": settings["chat_template"],
    }
