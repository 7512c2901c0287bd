"""GGUF files as Hugging Face checkpoints: tensor names, row order, and the config.json form.

It knows llama.cpp's names and keys for Llama, Qwen3 and Gemma 4; bytes and block formats are
gguf_file.py's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashdraft.errors import CheckpointError, UnsupportedModelError
from flashdraft.kernels.quantized import Matrix, Quantized
from flashdraft.models.gguf_file import GGUFFile

_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(.+)")
_ROPE_FACTORS = "rope_freqs.weight"  # per-frequency divisors; they end up in the config

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
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
_GEMMA4_NAMES = {
    **_COMMON_NAMES,
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
}
_NAMES = {"llama": _LLAMA_NAMES, "qwen3": _LLAMA_NAMES, "gemma4": _GEMMA4_NAMES}
_GEMMA4_STOP_TOKENS = ("<eos>", "<turn|>", "<|tool_response>")
# the llama3 RoPE scaling of every published model; a file keeps only the divisors it results in
_LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class GGUFTensors:
    """A TensorSource over a GGUF file, under Hugging Face names and in Hugging Face row order."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._architecture = _architecture(file)
        self._stored = {
            _hub_name(file, self._architecture, name): name
            for name in file.tensors
            if name != _ROPE_FACTORS
        }

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._stored[name]].shape

    def read(self, name: str) -> Tensor:
        tensor, order = self._file.read(self._stored[name]), self._row_order(name)
        return tensor if order is None else tensor[order]

    def read_matrix(self, name: str, device: torch.device | None = None) -> Matrix:
        matrix, order = self._file.read_matrix(self._stored[name], device), self._row_order(name)
        if order is None:
            return matrix
        return matrix.rows(order) if isinstance(matrix, Quantized) else matrix[order]

    def quantized_bytes(self, name: str) -> int | None:
        return self._file.quantized_bytes(self._stored[name])

    def _row_order(self, name: str) -> Tensor | None:
        """llama.cpp pairs a head's rotary rows as (0, 1), (2, 3), …; the Hub's form has halves."""
        if self._architecture != "llama" or ".self_attn." not in name:
            return None
        key = {"q": "attention.head_count", "k": "attention.head_count_kv"}.get(
            name.partition("_proj.")[0][-1:]
        )
        if key is None:
            return None
        num_heads = _number(self._file, key)
        return torch.arange(self.shape(name)[0]).view(num_heads, -1, 2).transpose(1, 2).flatten()


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The file's metadata in the form of a Hugging Face config.json."""
    architecture = _architecture(file)
    if file.metadata.get("split.count", 0) > 1:
        raise UnsupportedModelError(
            f"{file.path} is one of {file.metadata['split.count']} parts; join them with "
            "llama.cpp's `llama-gguf-split --merge` first."
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} has no tensor 'token_embd.weight'.")
    config = {
        "vocab_size": embedding.shape[0],
        "hidden_size": _number(file, "embedding_length"),
        "num_hidden_layers": _number(file, "block_count"),
        "num_attention_heads": _number(file, "attention.head_count"),
        "intermediate_size": _number(file, "feed_forward_length"),
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": _number(file, "context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": _stop_ids(file, architecture),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
    }
    if architecture == "gemma4":
        return config | _gemma4_config(file)
    return config | _llama_config(file, architecture)


def gguf_generation_config(file: GGUFFile) -> dict[str, Any]:
    """The sampling the file recommends, in the form of a generation_config.json."""
    keys = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
    found = {
        name: file.metadata[f"general.sampling.{key}"]
        for key, name in keys.items()
        if f"general.sampling.{key}" in file.metadata
    }
    return found | {"do_sample": True} if found else {}


def _architecture(file: GGUFFile) -> str:
    name = file.metadata.get("general.architecture")
    if name not in _NAMES:
        raise UnsupportedModelError(
            f"{file.path} holds a model of architecture {name!r}; "
            f"supported GGUF architectures are {', '.join(_NAMES)}."
        )
    return str(name)


def _hub_name(file: GGUFFile, architecture: str, name: str) -> str:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    match = _BLOCK_NAME.fullmatch(name)
    inner = _NAMES[architecture].get(match[2]) if match else None
    if match is None or inner is None:
        raise CheckpointError(
            f"{file.path}: tensor {name!r} has no place in a {architecture} model."
        )
    return f"model.layers.{match[1]}.{inner}"


def _value(file: GGUFFile, key: str, default: Any = None) -> Any:
    """A value of the architecture's own section; without a default it must be there."""
    full_key = f"{file.metadata['general.architecture']}.{key}"
    value = file.metadata.get(full_key, default)
    if value is None:
        raise CheckpointError(f"{file.path} has no metadata key {full_key!r}.")
    return value


def _number(file: GGUFFile, key: str) -> Any:
    """A number that must be the same in every layer where the file lists it per layer."""
    value = _value(file, key)
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise UnsupportedModelError(f"{file.path}: {key} differs between layers: {value}.")
    return value[0]


def _stop_ids(file: GGUFFile, architecture: str) -> list[int]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = [file.metadata[key] for key in keys if key in file.metadata]
    if architecture == "gemma4":  # the file names one of the three
        tokens: Sequence[str] = file.metadata.get("tokenizer.ggml.tokens", ())
        ids += [tokens.index(token) for token in _GEMMA4_STOP_TOKENS if token in tokens]
    return list(dict.fromkeys(ids))


def _llama_config(file: GGUFFile, architecture: str) -> dict[str, Any]:
    if _value(file, "expert_count", 0):
        raise UnsupportedModelError(
            f"{file.path} is a mixture of experts; of these, only Gemma 4 is supported."
        )
    heads = _number(file, "attention.head_count")
    head_dim = _value(file, "attention.key_length", _number(file, "embedding_length") // heads)
    theta = float(_value(file, "rope.freq_base", 10000.0))
    return {
        "model_type": architecture,
        "architectures": ["LlamaForCausalLM" if architecture == "llama" else "Qwen3ForCausalLM"],
        "num_key_value_heads": _number(file, "attention.head_count_kv"),
        "head_dim": head_dim,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "rope_parameters": {"rope_theta": theta, **_rope_scaling(file, theta, head_dim)},
    }


def _rope_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    kind = _value(file, "rope.scaling.type", "none")
    if kind != "none":
        return {"rope_type": kind, "factor": float(_value(file, "rope.scaling.factor"))}
    if _ROPE_FACTORS not in file.tensors:
        return {"rope_type": "default"}
    divisors = file.read(_ROPE_FACTORS).tolist()
    scaling = {"rope_type": "llama3", "factor": max(divisors), **_LLAMA3_SCALING}
    expected = _llama3_divisors(theta, head_dim, scaling)
    if len(divisors) != len(expected) or not all(
        math.isclose(found, wanted, rel_tol=1e-3)
        for found, wanted in zip(divisors, expected, strict=True)
    ):
        raise UnsupportedModelError(
            f"{file.path}: {_ROPE_FACTORS} is not the llama3 RoPE scaling, the only one supported."
        )
    return scaling


def _llama3_divisors(theta: float, head_dim: int, scaling: dict[str, Any]) -> list[float]:
    """What llama3 scaling divides each rotary frequency by."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        turns = scaling["original_max_position_embeddings"] / wavelength
        share = min(max((turns - low) / (high - low), 0.0), 1.0)  # 1 = keep the frequency
        divisors.append(1 / ((1 - share) / scaling["factor"] + share))
    return divisors


def _gemma4_config(file: GGUFFile) -> dict[str, Any]:
    is_sliding = list(_value(file, "attention.sliding_window_pattern"))
    num_layers = _number(file, "block_count")
    kv_heads = _value(file, "attention.head_count_kv")
    kv_heads = kv_heads if isinstance(kv_heads, list) else [kv_heads] * num_layers
    if not len(is_sliding) == len(kv_heads) == num_layers or all(is_sliding):
        raise CheckpointError(
            f"{file.path}: the layer pattern has {len(is_sliding)} entries with "
            f"{len(is_sliding) - sum(is_sliding)} full layers, head_count_kv has {len(kv_heads)}; "
            f"{num_layers} layers are expected, at least one of them full."
        )
    if _ROPE_FACTORS not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor {_ROPE_FACTORS!r}.")
    divisors = file.read(_ROPE_FACTORS)
    full = is_sliding.index(False)
    config = {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "layer_types": ["sliding_attention" if s else "full_attention" for s in is_sliding],
        "num_key_value_heads": kv_heads[is_sliding.index(True) if True in is_sliding else full],
        "num_global_key_value_heads": kv_heads[full],
        "head_dim": _value(file, "attention.key_length_swa"),
        "global_head_dim": _value(file, "attention.key_length"),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "sliding_window": _value(file, "attention.sliding_window"),
        "num_kv_shared_layers": _value(file, "attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": _value(file, "embedding_length_per_layer_input", 0),
        "final_logit_softcapping": _value(file, "final_logit_softcapping"),
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": float(_value(file, "rope.freq_base_swa", 10000.0)),
            },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": float(_value(file, "rope.freq_base")),
                # an unrotated frequency is stored as one with a divisor of 1e30
                "partial_rotary_factor": (divisors < 1e6).sum().item() / divisors.numel(),
            },
        },
    }
    if not _value(file, "expert_count", 0):
        return config
    return config | {
        "enable_moe_block": True,
        "num_experts": _value(file, "expert_count"),
        "top_k_experts": _value(file, "expert_used_count"),
        "moe_intermediate_size": _value(file, "expert_feed_forward_length"),
    }
