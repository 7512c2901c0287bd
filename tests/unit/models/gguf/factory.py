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
        if architecture == "qwen3":
            shapes[f"{layer}.self_attn.q_norm.weight"] = (16,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (16,)
    return {name: random_values(*s, seed=i) for i, (name, s) in enumerate(shapes.items())}


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
