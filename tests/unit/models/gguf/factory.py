"""Tiny GGUF files, written with the `gguf` package as llama.cpp's converter would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray[Any, Any]
Types = gguf.GGMLQuantizationType

LLAMA = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}
GEMMA4 = {
    **LLAMA,
    "attention.head_count_kv": [2, 1],
    "attention.sliding_window_pattern": [True, False],
    "attention.sliding_window": 8,
    "attention.key_length": 32,
    "attention.key_length_swa": 16,
    "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "final_logit_softcapping": 30.0,
}
_BIASES = {"q": 64, "k": 32, "v": 32}
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Array],
    formats: Mapping[str, Types] | None = None,
    general: Mapping[str, Any] | None = None,
) -> Path:
    """Write a file; `metadata` keys get the architecture's prefix, `general` ones do not."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**{f"{architecture}.{k}": v for k, v in metadata.items()}}.items():
        _add(writer, key, value)
    for key, value in (general or {}).items():
        _add(writer, key, value)
    for name, values in tensors.items():
        kind = (formats or {}).get(name)
        if kind is None:
            writer.add_tensor(name, values)
        elif values.dtype == np.uint8:  # blocks made by hand
            writer.add_tensor(name, values, raw_dtype=kind)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def random_values(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def llama_tensors(architecture: str = "llama") -> dict[str, Array]:
    """A tiny Llama or Qwen3 under Hugging Face names (head size 16)."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (32, 64),
        "model.norm.weight": (64,),
    }
    for i in range(2):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (64,),
            f"{layer}.post_attention_layernorm.weight": (64,),
            f"{layer}.self_attn.q_proj.weight": (64, 64),
            f"{layer}.self_attn.k_proj.weight": (32, 64),
            f"{layer}.self_attn.v_proj.weight": (32, 64),
            f"{layer}.self_attn.o_proj.weight": (64, 64),
            f"{layer}.mlp.gate_proj.weight": (96, 64),
            f"{layer}.mlp.up_proj.weight": (96, 64),
            f"{layer}.mlp.down_proj.weight": (64, 96),
        }
        if architecture == "qwen2":
            shapes |= {f"{layer}.self_attn.{one}_proj.bias": (n,) for one, n in _BIASES.items()}
        if architecture == "qwen3moe":
            for one in ("gate", "up", "down"):
                del shapes[f"{layer}.mlp.{one}_proj.weight"]
            shapes |= {
                f"{layer}.router.proj.weight": (4, 64),
                f"{layer}.experts.gate_up_proj": (4, 48, 64),
                f"{layer}.experts.down_proj": (4, 64, 24),
            }
        if architecture.startswith("qwen3"):
            shapes[f"{layer}.self_attn.q_norm.weight"] = (16,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (16,)
    return {name: random_values(*s, seed=i) for i, (name, s) in enumerate(shapes.items())}


def gemma3_tensors() -> dict[str, Array]:
    """A tiny Gemma 3 under Hugging Face names."""
    tensors = llama_tensors("qwen3")
    for i in range(2):
        for name in ("pre", "post"):
            key = f"model.layers.{i}.{name}_feedforward_layernorm.weight"
            tensors[key] = random_values(64, seed=50 + i)
    return tensors


def small_gemma4_tensors() -> dict[str, Array]:
    """A tiny E2B under Hugging Face names: layers 2 and 3 read what 0 and 1 keep."""
    width, tensors = 8, gemma4_tensors(False)
    for part in ("k", "v"):  # of two heads, as in sliding layers
        tensors[f"model.layers.1.self_attn.{part}_proj.weight"] = random_values(64, 64, seed=1)
    for i in (2, 3):
        tensors |= {
            name.replace(f"layers.{i - 2}.", f"layers.{i}."): values + 1
            for name, values in tensors.items()
            if f"layers.{i - 2}." in name
        }
        for part in ("k_proj", "v_proj", "k_norm"):
            del tensors[f"model.layers.{i}.self_attn.{part}.weight"]
        for part, shape in (("gate", (192, 64)), ("up", (192, 64)), ("down", (64, 192))):
            tensors[f"model.layers.{i}.mlp.{part}_proj.weight"] = random_values(*shape, seed=i)
    for i in range(4):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.per_layer_input_gate.weight": random_values(width, 64, seed=i),
            f"{layer}.per_layer_projection.weight": random_values(64, width, seed=i),
            f"{layer}.post_per_layer_input_norm.weight": random_values(64, seed=i),
        }
    return tensors | {
        "model.embed_tokens_per_layer.weight": random_values(32, 4 * width),
        "model.per_layer_model_projection.weight": random_values(4 * width, 64),
        "model.per_layer_projection_norm.weight": random_values(width),
    }


def gemma4_tensors(experts: bool) -> dict[str, Array]:
    """A tiny Gemma 4 under Hugging Face names: layer 1 is full and has no v_proj."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (32, 64),
        "model.norm.weight": (64,),
    }
    for i, (head_dim, kv_heads) in enumerate(((16, 2), (32, 1))):
        layer = f"model.layers.{i}"
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        shapes |= {f"{layer}.{name}_layernorm.weight": (64,) for name in names}
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (4 * head_dim, 64),
            f"{layer}.self_attn.k_proj.weight": (kv_heads * head_dim, 64),
            f"{layer}.self_attn.o_proj.weight": (64, 4 * head_dim),
            f"{layer}.self_attn.q_norm.weight": (head_dim,),
            f"{layer}.self_attn.k_norm.weight": (head_dim,),
            f"{layer}.mlp.gate_proj.weight": (96, 64),
            f"{layer}.mlp.up_proj.weight": (96, 64),
            f"{layer}.mlp.down_proj.weight": (64, 96),
            f"{layer}.layer_scalar": (1,),
        }
        if i == 0:
            shapes[f"{layer}.self_attn.v_proj.weight"] = (kv_heads * head_dim, 64)
        if experts:
            shapes |= {
                f"{layer}.router.proj.weight": (4, 64),
                f"{layer}.router.scale": (64,),
                f"{layer}.router.per_expert_scale": (4,),
                f"{layer}.experts.gate_up_proj": (4, 48, 64),
                f"{layer}.experts.down_proj": (4, 64, 24),
                f"{layer}.post_feedforward_layernorm_1.weight": (64,),
                f"{layer}.post_feedforward_layernorm_2.weight": (64,),
                f"{layer}.pre_feedforward_layernorm_2.weight": (64,),
            }
    return {name: random_values(*s, seed=i) for i, (name, s) in enumerate(shapes.items())}


def write_wide_qwen3(path: Path) -> Path:
    """A Qwen3 in float32 whose rows mostly have 256 values, as llama.cpp's quantiser wants them."""
    sizes = {
        **LLAMA,
        "block_count": 1,
        "embedding_length": 256,
        "feed_forward_length": 32,
        "attention.head_count": 1,
        "attention.head_count_kv": 1,
        "attention.key_length": 32,
        "attention.value_length": 32,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (32, 256),
        "output.weight": (32, 256),
        "output_norm.weight": (256,),
        "blk.0.attn_norm.weight": (256,),
        "blk.0.ffn_norm.weight": (256,),
        "blk.0.attn_q_norm.weight": (32,),
        "blk.0.attn_k_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 256),
        "blk.0.attn_k.weight": (32, 256),
        "blk.0.attn_v.weight": (32, 256),
        "blk.0.attn_output.weight": (256, 32),
        "blk.0.ffn_gate.weight": (32, 256),
        "blk.0.ffn_up.weight": (32, 256),
        "blk.0.ffn_down.weight": (256, 32),
    }
    tensors = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        values = random_values(*shape, seed=seed)
        tensors[name] = values / 5 if len(shape) == 2 else 1 + values / 5
    general = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [chr(ord("!") + index) for index in range(32)],
        "tokenizer.ggml.token_type": [1] * 32,
        "tokenizer.ggml.merges": ["! !"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    return write_gguf(path, "qwen3", sizes, tensors, general=general)
