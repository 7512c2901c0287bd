"""A GGUF file's metadata in the form of a Hugging Face config.json.

It knows llama.cpp's keys for Llama, Qwen3 and Gemma 4. No torch.
"""

from __future__ import annotations

import math
from typing import Any

from flashdraft.errors import CheckpointError, UnsupportedModelError, quoted
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.gguf.keys import check_keys
from flashdraft.models.gguf.names import ROPE_FACTORS, architecture_of

_GEMMA4_STOP_TOKENS = ("<eos>", "<turn|>", "<|tool_response>")
# a file does not say which of its tokens stand for media
MEDIA_TOKENS = {
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


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The file's metadata in the form of a Hugging Face config.json."""
    architecture = architecture_of(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} has no tensor 'token_embd.weight'.")
    config = {
        "vocab_size": embedding.shape[0],
        "hidden_size": whole_number(file, "embedding_length"),
        "num_hidden_layers": _num_layers(file),
        "num_attention_heads": whole_number(file, "attention.head_count"),
        "intermediate_size": whole_number(file, "feed_forward_length"),
        "rms_norm_eps": _real(file, "attention.layer_norm_rms_epsilon", least=0.0),
        "max_position_embeddings": whole_number(file, "context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": _stop_ids(file, architecture),
        "bos_token_id": next(iter(_token_ids(file, "bos")), None),
    }
    head_dim = whole_number(file, "embedding_length") // whole_number(file, "attention.head_count")
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


def _key(file: GGUFFile, key: str) -> str:
    """A key of the architecture's own section."""
    return f"{file.metadata['general.architecture']}.{key}"


def whole_number(file: GGUFFile, key: str, default: int | None = None, least: int = 1) -> int:
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
    count = whole_number(file, "block_count")
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
    return {key: places[name] for key, name in MEDIA_TOKENS.items() if name in places}


def _llama_config(file: GGUFFile, architecture: str) -> dict[str, Any]:
    if whole_number(file, "expert_count", 0, least=0):
        raise UnsupportedModelError(
            f"{file.path} is a mixture of experts; of these, only Gemma 4 is supported."
        )
    share = whole_number(file, "embedding_length") // whole_number(file, "attention.head_count")
    head_dim = whole_number(file, "attention.key_length", share)
    theta = _real(file, "rope.freq_base", 10000.0, least=1.0)
    return {
        "model_type": architecture,
        "architectures": ["LlamaForCausalLM" if architecture == "llama" else "Qwen3ForCausalLM"],
        "num_key_value_heads": whole_number(file, "attention.head_count_kv"),
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
    if ROPE_FACTORS not in file.tensors:
        return {"rope_type": "default"}
    divisors = file.floats(ROPE_FACTORS)
    scaling = {"rope_type": "llama3", "factor": max(divisors), **_LLAMA3_SCALING}
    expected = _llama3_divisors(theta, head_dim, scaling)
    if len(divisors) != len(expected) or not all(
        math.isclose(found, wanted, rel_tol=1e-3)
        for found, wanted in zip(divisors, expected, strict=True)
    ):
        raise UnsupportedModelError(
            f"{file.path}: {ROPE_FACTORS} is not the llama3 RoPE scaling, the only one supported."
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
    if ROPE_FACTORS not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor {ROPE_FACTORS!r}.")
    divisors = file.floats(ROPE_FACTORS)
    full = is_sliding.index(False)
    config = {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "layer_types": ["sliding_attention" if s else "full_attention" for s in is_sliding],
        "num_key_value_heads": kv_heads[is_sliding.index(True) if True in is_sliding else full],
        "num_global_key_value_heads": kv_heads[full],
        "head_dim": whole_number(file, "attention.key_length_swa"),
        "global_head_dim": whole_number(file, "attention.key_length"),
        **_media_ids(file),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "sliding_window": whole_number(file, "attention.sliding_window"),
        "num_kv_shared_layers": whole_number(file, "attention.shared_kv_layers", 0, least=0),
        "hidden_size_per_layer_input": whole_number(
            file, "embedding_length_per_layer_input", 0, least=0
        ),
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
                "partial_rotary_factor": sum(one < 1e6 for one in divisors) / len(divisors),
            },
        },
    }
    num_experts = whole_number(file, "expert_count", 0, least=0)
    if not num_experts:
        return config
    return config | {
        "enable_moe_block": True,
        "num_experts": num_experts,
        "top_k_experts": whole_number(file, "expert_used_count"),
        "moe_intermediate_size": whole_number(file, "expert_feed_forward_length"),
    }
