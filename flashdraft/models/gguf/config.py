"""A GGUF file's metadata in the form of a Hugging Face config.json.

It knows llama.cpp's keys for all families. No torch.
"""

from __future__ import annotations

import math
from typing import Any

from flashdraft.errors import CheckpointError, UnsupportedModelError, quoted
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.gguf.keys import check_keys
from flashdraft.models.gguf.names import ROPE_FACTORS, architecture_of

_STOP_TOKENS = {  # of these a file names one
    "gemma3": ("<eos>", "<end_of_turn>"),
    "gemma4": ("<eos>", "<turn|>", "<|tool_response>"),
}
_GEMMA3_27B_LAYERS = 62  # whose scale of attention is another, which no file says
# what a Hub's config calls those that differ from Llama by a row of a table
_LLAMAS = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
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
_TRAINED_LENGTH = "original_max_position_embeddings"
# the llama3 RoPE scaling of every published model; a file keeps only the divisors it results in
_LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    _TRAINED_LENGTH: 8192,
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
        "intermediate_size": min(_inner_sizes(file, architecture)),
        "rms_norm_eps": _real(file, "attention.layer_norm_rms_epsilon", least=0.0),
        "max_position_embeddings": whole_number(file, "context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": _stop_ids(file, architecture),
        "bos_token_id": next(iter(_token_ids(file, "bos")), None),
    }
    head_dim = whole_number(file, "embedding_length") // whole_number(file, "attention.head_count")
    check_keys(file, architecture, head_dim)
    if architecture == "gemma3":
        return config | _gemma3_config(file)
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
    if isinstance(tokens, list):
        ids += [tokens.index(one) for one in _STOP_TOKENS.get(architecture, ()) if one in tokens]
    return list(dict.fromkeys(ids))


def _media_ids(file: GGUFFile) -> dict[str, int]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    named = tokens if isinstance(tokens, list) else []
    places = {name: place for place, name in enumerate(named) if isinstance(name, str)}
    return {key: places[name] for key, name in MEDIA_TOKENS.items() if name in places}


def _llama_config(file: GGUFFile, architecture: str) -> dict[str, Any]:
    num_experts = whole_number(file, "expert_count", 0, least=0)
    if bool(num_experts) is not (architecture == "qwen3moe"):
        raise UnsupportedModelError(
            f"{file.path} is a {architecture} with {num_experts} experts; of those with experts "
            "only Gemma 4 and Qwen3 (qwen3moe) are supported."
        )
    experts = {}
    if num_experts:
        experts = {
            "num_experts": num_experts,
            "num_experts_per_tok": whole_number(file, "expert_used_count"),
            "moe_intermediate_size": whole_number(file, "expert_feed_forward_length"),
            "norm_topk_prob": True,  # as llama.cpp does
        }
    model_type, name = _LLAMAS[architecture]
    share = whole_number(file, "embedding_length") // whole_number(file, "attention.head_count")
    head_dim = whole_number(file, "attention.key_length", share)
    theta = _real(file, "rope.freq_base", 10000.0, least=1.0)
    return {
        "model_type": model_type,
        "architectures": [name],
        **experts,
        "num_key_value_heads": whole_number(file, "attention.head_count_kv"),
        "head_dim": head_dim,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "rope_parameters": {"rope_theta": theta, **_rope_scaling(file, theta, head_dim)},
    }


def _rope_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    # as llama.cpp reads it, a factor without a type is linear
    scales = _real(file, "rope.scaling.factor", 1.0, least=0.0) not in (0.0, 1.0)
    kind = file.metadata.get(_key(file, "rope.scaling.type"), "linear" if scales else "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path} uses RoPE scaling {quoted(kind)}; none, linear, yarn and llama3's are "
            "supported."
        )
    if kind == "linear":
        return {"rope_type": kind, "factor": _real(file, "rope.scaling.factor", least=1e-6)}
    if kind == "yarn":
        whole = whole_number(file, "context_length")
        return {
            "rope_type": kind,
            "factor": _real(file, "rope.scaling.factor", least=1e-6),
            _TRAINED_LENGTH: whole_number(file, "rope.scaling.original_context_length", whole),
            "beta_fast": _real(file, "rope.scaling.yarn_beta_fast", 32.0, least=1e-6),
            "beta_slow": _real(file, "rope.scaling.yarn_beta_slow", 1.0, least=1e-6),
        }
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
        turns = scaling[_TRAINED_LENGTH] / wavelength
        share = min(max((turns - low) / (high - low), 0.0), 1.0)  # 1 = keep the frequency
        divisors.append(1 / ((1 - share) / scaling["factor"] + share))
    return divisors


def _inner_sizes(file: GGUFFile, architecture: str) -> list[int]:
    """Of every layer's MLP; only Gemma 4's may differ."""
    if architecture != "gemma4":
        return [whole_number(file, "feed_forward_length")]
    return file.whole_numbers(_key(file, "feed_forward_length"))


def _gemma4_sharing(file: GGUFFile, num_layers: int) -> dict[str, Any]:
    """How many layers read another's keys and values, and whether their MLPs are twice as wide."""
    num_shared = whole_number(file, "attention.shared_kv_layers", 0, least=0)
    sizes = _inner_sizes(file, "gemma4")
    narrow, is_wide = min(sizes), len(set(sizes)) > 1
    expected = [narrow] * (num_layers - num_shared) + [(1 + is_wide) * narrow] * num_shared
    if len(sizes) > 1 and sizes != expected:
        raise UnsupportedModelError(
            f"{file.path}: feed_forward_length is {quoted(sizes)}; one size for all layers, or "
            f"twice as much for the last {num_shared}, which read another's keys, is supported."
        )
    width = whole_number(file, "embedding_length_per_layer_input", 0, least=0)
    return {
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": is_wide,
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": file.tensors["token_embd.weight"].shape[0],
    }


def _gemma3_config(file: GGUFFile) -> dict[str, Any]:
    heads, head_dim = (
        whole_number(file, f"attention.{key}") for key in ("head_count", "key_length")
    )
    is_largest = _num_layers(file) == _GEMMA3_27B_LAYERS
    theta = _real(file, "rope.freq_base", 1e6, least=1.0)
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "num_key_value_heads": whole_number(file, "attention.head_count_kv"),
        "head_dim": head_dim,
        "query_pre_attn_scalar": (
            whole_number(file, "embedding_length") // heads if is_largest else head_dim
        ),
        "sliding_window": whole_number(file, "attention.sliding_window"),
        "rope_theta": theta,
        "rope_local_base_freq": _real(file, "rope.freq_base_swa", 10000.0, least=1.0),
        "rope_scaling": _rope_scaling(file, theta, head_dim),
    }


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
        **_gemma4_sharing(file, num_layers),
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
