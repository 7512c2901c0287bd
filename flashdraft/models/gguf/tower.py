"""Gemma 4's tower for pictures in a file of its own, an mmproj: what it is, or why it is none.

llama.cpp writes such a file beside a model's, with keys that begin with "clip". As with the keys of
models (keys.py), one that nobody reads may change what is seen, so it must be known not to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flashdraft.errors import CheckpointError, UnsupportedModelError, quoted
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.gguf.names import PATCHES, PLACES, PROJECTION, TOWER_LIMIT, tower_names

_GEMMA4 = "gemma4v"
_KINDS = {"gemma4uv": "is Gemma 4 12B's"}
_VISION = "clip.vision."
_READ = """
    projector_type embedding_length feed_forward_length block_count attention.head_count
    attention.layer_norm_epsilon patch_size projector.scale_factor"""
_IRRELEVANT: Mapping[str, str] = {
    "pictures of every shape are seen; a side is written for towers that see squares": "image_size",
    "how many pixels llama.cpp makes of a picture; Gemma's own budgets are used": """
        image_min_pixels image_max_pixels""",
    "the projection's own shape tells it": "projection_dim",
}
_ONLY: Mapping[str, Any] = {
    "clip.use_silu": False,
    f"{_VISION}image_mean": [0.0, 0.0, 0.0],
    f"{_VISION}image_std": [1.0, 1.0, 1.0],
}
_LAYER = re.compile(r"v\.blk\.\d+\.(\w+)\.weight")
_OF_SOUND = ("a.", "mm.a.")
_OTHER = "Use the mmproj file of the Gemma 4 that the model is (31B, 26B-A4B, E4B or E2B)."
_REMEDY = "Fetch or convert it again."


def is_tower_file(file: GGUFFile) -> bool:
    """Whether a file holds a part of a model that sees or hears."""
    kind = file.metadata.get("general.type")
    return file.metadata.get("general.architecture") == "clip" or kind == "mmproj"


def tower_config(file: GGUFFile, target_width: int) -> dict[str, Any]:
    """What a tower's file says, in the form of a config.json's vision_config.

    It is refused where it is another tower, or none for a target of this width.
    """
    _check_kind(file)
    _check_keys(file)
    _check_tensors(file)

    heads, size = _whole(file, "attention.head_count"), _whole(file, "patch_size")
    num_places = _dims(file, PLACES, 3)[1]
    config = {
        "model_type": "gemma4_vision",
        "hidden_size": _whole(file, "embedding_length"),
        "intermediate_size": _whole(file, "feed_forward_length"),
        "num_hidden_layers": _whole(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": _dims(file, "v.blk.0.attn_q_norm.weight", 1)[0],
        "patch_size": size,
        "pooling_kernel_size": _whole(file, "projector.scale_factor", 3),
        "position_embedding_size": num_places,
        "rms_norm_eps": float(file.number(f"{_VISION}attention.layer_norm_epsilon", 0.0)),
        "standardize": "v.std_bias" in file.tensors,
        "use_clipped_linears": any(map(TOWER_LIMIT.fullmatch, file.tensors)),
    }
    width = _dims(file, PROJECTION, 2)[0]
    if width != target_width:
        raise UnsupportedModelError(
            f"{file.path} is made for a model whose rows have {width} values; this one's have "
            f"{target_width}. {_OTHER}"
        )
    _check_shapes(file, config, target_width)
    return config


def _dims(file: GGUFFile, name: str, count: int) -> tuple[int, ...]:
    """The shape of a tensor that must have so many dimensions."""
    shape = file.tensors[name].shape
    if len(shape) != count:
        raise CheckpointError(
            f"{file.path}: tensor {quoted(name)} has shape {list(shape)}; it must have {count} "
            f"dimensions. {_REMEDY}"
        )
    return shape


def _whole(file: GGUFFile, key: str, default: int | None = None) -> int:
    if default is not None and _VISION + key not in file.metadata:
        return default
    numbers = set(file.whole_numbers(_VISION + key))
    if len(numbers) > 1:
        raise CheckpointError(
            f"{file.path} is not valid: {_VISION + key} must be one number. {_REMEDY}"
        )
    return numbers.pop()


def _check_kind(file: GGUFFile) -> None:
    """Refuse what is no tower, and what is another one."""
    if not is_tower_file(file):
        raise UnsupportedModelError(
            f"{file.path} holds a model of architecture "
            f"{quoted(file.metadata.get('general.architecture'))} and no tower for pictures; name "
            "an mmproj file."
        )
    keys = (f"{_VISION}projector_type", "clip.projector_type")
    kind = next((file.metadata[key] for key in keys if key in file.metadata), None)
    hears = file.metadata.get("clip.has_audio_encoder", False)
    if not file.metadata.get("clip.has_vision_encoder", not hears):
        raise UnsupportedModelError(
            f"{file.path} holds no tower for pictures, only one for sounds, which are not taken. "
            f"{_OTHER}"
        )
    if kind != _GEMMA4:
        what = _KINDS.get(str(kind), "is another model's")
        raise UnsupportedModelError(
            f"{file.path} holds a tower of type {quoted(kind)}, which {what}; flashdraft runs only "
            f"{quoted(_GEMMA4)}. {_OTHER}"
        )


def _check_keys(file: GGUFFile) -> None:
    passing = set(f"{_READ} {' '.join(_IRRELEVANT.values())}".split())
    for key, value in file.metadata.items():
        if key in _ONLY and value != _ONLY[key]:
            raise UnsupportedModelError(
                f"{file.path} has {quoted(key)} = {quoted(value)}; only {quoted(_ONLY[key])} is "
                f"supported in Gemma 4's tower. {_OTHER}"
            )
        is_known = key in _ONLY or key.removeprefix(_VISION) in passing
        says = any(value) if isinstance(value, list) else bool(value)
        if key.startswith(_VISION) and says and not is_known:
            raise UnsupportedModelError(
                f"{file.path} has {quoted(key)} = {quoted(value)}; flashdraft does not know what "
                f"it changes about pictures. {_OTHER}"
            )


def _check_tensors(file: GGUFFile) -> None:
    """Refuse a file that lacks tensors, or has some that nobody would read."""
    count = _whole(file, "block_count")
    if count > len(file.tensors):  # before a name is made for every layer's
        raise CheckpointError(
            f"{file.path} is not valid: block_count is {count}, but the file has "
            f"{len(file.tensors)} tensors. {_REMEDY}"
        )
    wanted = tower_names(file)
    for name in file.tensors:
        if name in wanted or name.startswith(_OF_SOUND):
            continue
        raise CheckpointError(
            f"{file.path}: tensor {quoted(name)} has no place in Gemma 4's tower. {_REMEDY}"
        )
    missing = [name for name in wanted if name not in file.tensors]
    if missing:
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{file.path} lacks tensors of Gemma 4's tower: {quoted(missing[0])}{more}. {_REMEDY}"
        )


def _check_shapes(file: GGUFFile, config: Mapping[str, Any], target_width: int) -> None:
    """Refuse tensors of other shapes than the keys say, before anything else is loaded."""
    hidden, size, head_dim = config["hidden_size"], config["patch_size"], config["head_dim"]
    inner, wide = config["num_attention_heads"] * head_dim, config["intermediate_size"]
    outer = {
        PATCHES: (hidden, 3, size, size),
        PLACES: (2, config["position_embedding_size"], hidden),
        PROJECTION: (target_width, hidden),
    }
    layer: dict[str, tuple[int, ...]] = {f"attn_{one}": (inner, hidden) for one in "qkv"}
    layer |= {f"attn_{one}_norm": (head_dim,) for one in "qk"}
    layer |= {f"ffn_{one}": (wide, hidden) for one in ("gate", "up")}
    layer |= {"attn_out": (hidden, inner), "ffn_down": (hidden, wide)}
    for name in tower_names(file):
        part = _LAYER.fullmatch(name)
        expected = layer.get(part[1]) if part else outer.get(name)
        expected = expected or ((1,) if TOWER_LIMIT.fullmatch(name) else (hidden,))  # norms
        found = file.tensors[name].shape
        if found != expected:
            raise CheckpointError(
                f"{file.path}: tensor {quoted(name)} has shape {list(found)}, its keys ask for "
                f"{list(expected)}. {_REMEDY}"
            )
