"""GGUF files as Hugging Face checkpoints: tensor names, row order, and the config.json form.

It knows llama.cpp's names and keys for Llama, Qwen3 and Gemma 4; bytes and block formats are
file.py's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flashdraft.errors import CheckpointError, UnsupportedModelError, quoted
from flashdraft.kernels.quantized import Matrix, Quantized
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.gguf.keys import check_keys

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
# a file does not say which of its tokens stand for media
_GEMMA4_MEDIA_TOKENS = {
    "boi_token_id": "<|image>",
    "image_token_id": "<|image|>",
    "eoi_token_id": "<image|>",
    "video_token_id": "<|video|>",
    "boa_token_id": "<|audio>",
    "audio_token_id": "<|audio|>",
    "eoa_token_id": "<audio|>",
}
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
        num_heads = _whole(self._file, key)
        return torch.arange(self.shape(name)[0]).view(num_heads, -1, 2).transpose(1, 2).flatten()


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The file's metadata in the form of a Hugging Face config.json."""
    architecture = _architecture(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} has no tensor 'token_embd.weight'.")
    config = {
        "vocab_size": embedding.shape[0],
        "hidden_size": _whole(file, "embedding_length"),
        "num_hidden_layers": _num_layers(file),
        "num_attention_heads": _whole(file, "attention.head_count"),
        "intermediate_size": _whole(file, "feed_forward_length"),
        "rms_norm_eps": _real(file, "attention.layer_norm_rms_epsilon", least=0.0),
        "max_position_embeddings": _whole(file, "context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": _stop_ids(file, architecture),
        "bos_token_id": next(iter(_token_ids(file, "bos")), None),
    }
    head_dim = _whole(file, "embedding_length") // _whole(file, "attention.head_count")
    check_keys(file, architecture, head_dim)
    if architecture == "gemma4":
        return config | _gemma4_config(file)
    return config | _llama_config(file, architecture)


def gguf_generation_config(file: GGUFFile) -> dict[str, Any]:
    """The sampling the file recommends, in the form of a generation_config.json."""
    keys = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
    found = {
        name: file.number(f"general.sampling.{key}")
        for key, name in keys.items()
        if f"general.sampling.{key}" in file.metadata
    }
    return found | {"do_sample": True} if found else {}


def _architecture(file: GGUFFile) -> str:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _NAMES:
        raise UnsupportedModelError(
            f"{file.path} holds a model of architecture {quoted(name)}; "
            f"supported GGUF architectures are {', '.join(_NAMES)}."
        )
    return name


def _hub_name(file: GGUFFile, architecture: str, name: str) -> str:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    match = _BLOCK_NAME.fullmatch(name)
    inner = _NAMES[architecture].get(match[2]) if match else None
    if match is None or inner is None:
        raise CheckpointError(
            f"{file.path}: tensor {quoted(name)} has no place in a {architecture} model."
        )
    return f"model.layers.{match[1]}.{inner}"


def _key(file: GGUFFile, key: str) -> str:
    """A key of the architecture's own section."""
    return f"{file.metadata['general.architecture']}.{key}"


def _whole(file: GGUFFile, key: str, default: int | None = None, least: int = 1) -> int:
    """A number that must be the same in every layer where the file lists it per layer."""
    full_key = _key(file, key)
    if default is not None and full_key not in file.metadata:
        return default
    numbers = file.whole_numbers(full_key, least)
    if len(set(numbers)) != 1:
        raise UnsupportedModelError(
            f"{file.path}: {key} differs between layers: {quoted(numbers)}."
        )
    return numbers[0]


def _real(
    file: GGUFFile, key: str, default: float | None = None, least: float | None = None
) -> float:
    full_key = _key(file, key)
    if default is not None and full_key not in file.metadata:
        return default
    return float(file.number(full_key, least))


def _num_layers(file: GGUFFile) -> int:
    count = _whole(file, "block_count")
    if count > len(file.tensors):  # before anything is made for every layer
        raise CheckpointError(
            f"{file.path} is not valid: block_count is {count}, but the file has "
            f"{len(file.tensors)} tensors. Fetch or convert it again."
        )
    return count


def _token_ids(file: GGUFFile, kind: str) -> list[int]:
    key = f"tokenizer.ggml.{kind}_token_id"
    return file.whole_numbers(key, 0) if key in file.metadata else []


def _stop_ids(file: GGUFFile, architecture: str) -> list[int]:
    ids = _token_ids(file, "eos") + _token_ids(file, "eot")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if architecture == "gemma4" and isinstance(tokens, list):  # the file names one of the three
        ids += [tokens.index(token) for token in _GEMMA4_STOP_TOKENS if token in tokens]
    return list(dict.fromkeys(ids))


def _media_ids(file: GGUFFile) -> dict[str, int]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    named = tokens if isinstance(tokens, list) else []
    places = {name: place for place, name in enumerate(named) if isinstance(name, str)}
    return {key: places[name] for key, name in _GEMMA4_MEDIA_TOKENS.items() if name in places}


def _llama_config(file: GGUFFile, architecture: str) -> dict[str, Any]:
    if _whole(file, "expert_count", 0, least=0):
        raise UnsupportedModelError(
            f"{file.path} is a mixture of experts; of these, only Gemma 4 is supported."
        )
    share = _whole(file, "embedding_length") // _whole(file, "attention.head_count")
    head_dim = _whole(file, "attention.key_length", share)
    theta = _real(file, "rope.freq_base", 10000.0, least=1.0)
    return {
        "model_type": architecture,
        "architectures": ["LlamaForCausalLM" if architecture == "llama" else "Qwen3ForCausalLM"],
        "num_key_value_heads": _whole(file, "attention.head_count_kv"),
        "head_dim": head_dim,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "rope_parameters": {"rope_theta": theta, **_rope_scaling(file, theta, head_dim)},
    }


def _rope_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    # as llama.cpp reads it, a factor without a type is linear
    scales = _real(file, "rope.scaling.factor", 1.0, least=0.0) not in (0.0, 1.0)
    kind = file.metadata.get(_key(file, "rope.scaling.type"), "linear" if scales else "none")
    if kind not in ("none", "linear"):
        raise UnsupportedModelError(
            f"{file.path} uses RoPE scaling {quoted(kind)}; none, linear and llama3's are "
            "supported."
        )
    if kind == "linear":
        return {"rope_type": kind, "factor": _real(file, "rope.scaling.factor", least=1e-6)}
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
    scaling = file.metadata.get(_key(file, "rope.scaling.type"), "none")
    factor = _real(file, "rope.scaling.factor", 1.0, least=0.0)
    if scaling != "none" or factor not in (0.0, 1.0):
        raise UnsupportedModelError(
            f"{file.path} uses RoPE scaling {quoted(scaling)} by {factor:g}; in Gemma 4 none is "
            "supported."
        )
    num_layers = _num_layers(file)
    pattern = _key(file, "attention.sliding_window_pattern")
    is_sliding = file.metadata.get(pattern)
    if not isinstance(is_sliding, list) or not all(isinstance(one, bool) for one in is_sliding):
        raise CheckpointError(
            f"{file.path} is not valid: {pattern} must list true or false for every layer. "
            "Fetch or convert it again."
        )
    kv_heads = file.whole_numbers(_key(file, "attention.head_count_kv"))
    kv_heads = kv_heads * num_layers if len(kv_heads) == 1 else kv_heads
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
        "head_dim": _whole(file, "attention.key_length_swa"),
        "global_head_dim": _whole(file, "attention.key_length"),
        **_media_ids(file),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "sliding_window": _whole(file, "attention.sliding_window"),
        "num_kv_shared_layers": _whole(file, "attention.shared_kv_layers", 0, least=0),
        "hidden_size_per_layer_input": _whole(file, "embedding_length_per_layer_input", 0, least=0),
        "final_logit_softcapping": _real(file, "final_logit_softcapping", least=1e-6),
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": _real(file, "rope.freq_base_swa", 10000.0, least=1.0),
            },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": _real(file, "rope.freq_base", least=1.0),
                # an unrotated frequency is stored as one with a divisor of 1e30
                "partial_rotary_factor": (divisors < 1e6).sum().item() / divisors.numel(),
            },
        },
    }
    num_experts = _whole(file, "expert_count", 0, least=0)
    if not num_experts:
        return config
    return config | {
        "enable_moe_block": True,
        "num_experts": num_experts,
        "top_k_experts": _whole(file, "expert_used_count"),
        "moe_intermediate_size": _whole(file, "expert_feed_forward_length"),
    }
