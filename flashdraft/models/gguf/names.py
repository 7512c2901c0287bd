"""The tensors of a GGUF file by their Hugging Face names, for every family and Gemma 4's tower.

Gemma 4's tower for pictures has a file of its own (tower.py), with names of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from flashdraft.errors import CheckpointError, UnsupportedModelError, quoted
from flashdraft.models.config.vision import LIMITS
from flashdraft.models.gguf.file import GGUFFile

_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(.+)")
ROPE_FACTORS = "rope_freqs.weight"  # per-frequency divisors; they end up in the config

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_COMMON_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_LLAMA_NAMES = {
    **_COMMON_NAMES,
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.bias": "self_attn.o_proj.bias",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_GEMMA3_NAMES = {
    **_COMMON_NAMES,
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_GEMMA4_NAMES = {
    **_GEMMA3_NAMES,
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
}
_QWEN3_MOE_NAMES = {
    **_LLAMA_NAMES,
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_exps.weight": "experts.gate_proj",
    "ffn_up_exps.weight": "experts.up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
}
ARCHITECTURES = {
    "llama": _LLAMA_NAMES,
    "qwen2": _LLAMA_NAMES,
    "qwen3": _LLAMA_NAMES,
    "qwen3moe": _QWEN3_MOE_NAMES,
    "gemma3": _GEMMA3_NAMES,
    "gemma4": _GEMMA4_NAMES,
}

NORM_OFFSETS = {"gemma3": 1.0}  # what llama.cpp adds to the weights of norms

_TOWER = "model.vision_tower"
PATCHES, PLACES = "v.patch_embd.weight", "v.position_embd.weight"
PROJECTION = "mm.input_projection.weight"
_TOWER_NAMES = {
    PATCHES: f"{_TOWER}.patch_embedder.input_proj.weight",
    PLACES: f"{_TOWER}.patch_embedder.position_embedding_table",
    PROJECTION: "model.embed_vision.embedding_projection.weight",
}
_TOWER_STANDARDS = {f"v.std_{one}": f"{_TOWER}.std_{one}" for one in ("bias", "scale")}
_TOWER_LAYER_NAMES = {
    "ln1.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.linear.weight",
    "attn_k.weight": "self_attn.k_proj.linear.weight",
    "attn_v.weight": "self_attn.v_proj.linear.weight",
    "attn_out.weight": "self_attn.o_proj.linear.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_post_norm.weight": "post_attention_layernorm.weight",
    "ln2.weight": "pre_feedforward_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.linear.weight",
    "ffn_up.weight": "mlp.up_proj.linear.weight",
    "ffn_down.weight": "mlp.down_proj.linear.weight",
    "ffn_post_norm.weight": "post_feedforward_layernorm.weight",
}
_TOWER_LIMIT_NAMES = {
    f"{name.removesuffix('weight')}{limit}": f"{hub.removesuffix('linear.weight')}{limit}"
    for name, hub in _TOWER_LAYER_NAMES.items()
    if hub.endswith("linear.weight")
    for limit in LIMITS
}
TOWER_LIMIT = re.compile(rf"v\.blk\.\d+\.\w+\.({'|'.join(LIMITS)})")


class GGUFTable:
    """The tensors of a GGUF file under Hugging Face names."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = architecture_of(file)
        self.stored = {
            _hub_name(file, self.architecture, name): name
            for name in file.tensors
            if name != ROPE_FACTORS
        }

    def names(self) -> Iterable[str]:
        return self.stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.tensors[self.stored[name]].shape

    def quantized_bytes(self, name: str) -> int | None:
        return self.file.quantized_bytes(self.stored[name])


class TowerTable:
    """The tensors of a tower's file under Hugging Face names; those of sounds are left out."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.stored = {hub: name for name, hub in tower_names(file).items() if name in file.tensors}

    def names(self) -> Iterable[str]:
        return self.stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self.stored[name]
        shape = self.file.tensors[stored].shape
        if TOWER_LIMIT.fullmatch(stored):
            return ()  # in such a file every tensor has a dimension
        return (shape[0], math.prod(shape[1:])) if stored == PATCHES else shape

    def quantized_bytes(self, name: str) -> None:
        """A tower is kept in floats, however its file has it."""
        return None


def tower_names(file: GGUFFile) -> dict[str, str]:
    """Every tensor that a file of Gemma 4's tower must have, with its Hugging Face name."""
    num_layers = file.whole_numbers("clip.vision.block_count")[0]
    names = dict(_TOWER_NAMES)
    if any(name in file.tensors for name in _TOWER_STANDARDS):
        names |= _TOWER_STANDARDS
    of_layer = dict(_TOWER_LAYER_NAMES)
    if any(map(TOWER_LIMIT.fullmatch, file.tensors)):
        of_layer |= _TOWER_LIMIT_NAMES
    for index in range(num_layers):
        prefix = f"{_TOWER}.encoder.layers.{index}"
        names |= {f"v.blk.{index}.{name}": f"{prefix}.{hub}" for name, hub in of_layer.items()}
    return names


def architecture_of(file: GGUFFile) -> str:
    """The model's family, as llama.cpp names it."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path} holds a model of architecture {quoted(name)}; "
            f"supported GGUF architectures are {', '.join(ARCHITECTURES)}."
        )
    return name


def _hub_name(file: GGUFFile, architecture: str, name: str) -> str:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    match = _BLOCK_NAME.fullmatch(name)
    inner = ARCHITECTURES[architecture].get(match[2]) if match else None
    if match is None or inner is None:
        raise CheckpointError(
            f"{file.path}: tensor {quoted(name)} has no place in a {architecture} model."
        )
    return f"model.layers.{match[1]}.{inner}"
