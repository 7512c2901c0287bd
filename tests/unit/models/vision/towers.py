"""Published configs with towers, and every tensor that such a tower has; a tiny one; pictures."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashdraft.core import Picture
from flashdraft.kernels.interface import Kernels
from flashdraft.models.vision.tower import Gemma4VisionTower
from flashdraft.models.weights import Weights
from tests import zoo
from tests.pictured import VISION

TOWER = {
    "model_type": "gemma4_vision",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "use_clipped_linears": False,
    "standardize": True,
    "rms_norm_eps": 1e-06,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "global_head_dim": 72,
    "default_output_length": 280,
}
PUBLISHED: dict[str, dict[str, Any]] = {  # what differs in their text
    "31B": {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    },
    "26B-A4B": {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
}


def published(name: str) -> dict[str, Any]:
    """The config.json of one of PUBLISHED."""
    text = {
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "max_position_embeddings": 262144,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "use_bidirectional_attention": "vision",
        "rms_norm_eps": 1e-06,
        "hidden_activation": "gelu_pytorch_tanh",
        **PUBLISHED[name],
    }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "audio_config": None,
        "text_config": text,
        "vision_config": dict(TOWER),
        "vision_soft_tokens_per_image": 280,
        "boi_token_id": 255999,
        "eoi_token_id": 258882,
        "image_token_id": 258880,
        "video_token_id": 258884,
        "boa_token_id": 256000,
        "eoa_token_id": 258883,
        "eoa_token_index": 258883,
        "audio_token_id": 258881,
        "eos_token_id": [1, 106],
        "tie_word_embeddings": True,
    }


def published_small() -> dict[str, Any]:
    """The config.json of E4B."""
    whole = published("31B")
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 42,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": None,
        "num_kv_shared_layers": 18,
        "attention_k_eq_v": False,
        "sliding_window": 512,
        "max_position_embeddings": 131072,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": False,
        "expert_intermediate_size": None,
        "pad_token_id": 0,
    }
    tower = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "global_head_dim": 64,
        "use_clipped_linears": True,
        "standardize": False,
    }
    whole["text_config"] |= text
    whole["vision_config"] |= tower
    return whole | {"audio_config": {"model_type": "gemma4_audio", "use_clipped_linears": True}}


def small_tower_shapes(target_width: int) -> dict[str, tuple[int, ...]]:
    """The tensors of the towers of E2B and E4B: no standards, and limits of every matrix."""
    sizes = {
        1152: 768,
        4304: 3072,
        72: 64,
        768: 768,
        10240: 10240,
        2: 2,
        target_width: target_width,
    }
    shapes = {
        name: tuple(sizes[size] for size in shape)
        for name, shape in tower_shapes(target_width).items()
        if "std_" not in name and not any(f".layers.{index}." in name for index in range(16, 27))
    }
    weights = [name for name in shapes if name.endswith(".linear.weight")]
    return shapes | {
        f"{name.removesuffix('linear.weight')}{side}_{end}": ()
        for name in weights
        for side in ("input", "output")
        for end in ("min", "max")
    }


def tower_shapes(target_width: int) -> dict[str, tuple[int, ...]]:
    """The tensors of the published towers, as their files list them."""
    hidden, wide = 1152, 4304
    shapes: dict[str, tuple[int, ...]] = {
        "std_bias": (hidden,),
        "std_scale": (hidden,),
        "patch_embedder.input_proj.weight": (hidden, 768),
        "patch_embedder.position_embedding_table": (2, 10240, hidden),
    }
    for index in range(27):
        layer = {f"self_attn.{one}_proj.linear.weight": (hidden, hidden) for one in "qkvo"}
        layer |= {f"self_attn.{one}_norm.weight": (72,) for one in "qk"}
        layer |= {f"mlp.{one}_proj.linear.weight": (wide, hidden) for one in ("gate", "up")}
        layer |= {"mlp.down_proj.linear.weight": (hidden, wide)}
        for one in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            layer |= {f"{one}_layernorm.weight": (hidden,)}
        shapes |= {f"encoder.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes = {f"model.vision_tower.{name}": shape for name, shape in shapes.items()}
    return shapes | {"model.embed_vision.embedding_projection.weight": (target_width, hidden)}


def tiny_tower(kernels: Kernels) -> Gemma4VisionTower:
    """A tower of pictured.VISION with random values."""
    sizes = {1152: 24, 4304: 40, 72: 12, 10240: 64, 768: 48}
    seeded = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn([sizes.get(size, size) for size in shape], generator=seeded)
        for name, shape in tower_shapes(target_width=16).items()
        if ".layers." not in name or ".layers.0." in name
    }
    return Gemma4VisionTower(VISION, 16, Weights(zoo.Tensors(tensors), lambda _: None), kernels)


def clipped_tower(kernels: Kernels, changes: Mapping[str, Tensor]) -> Gemma4VisionTower:
    """A small model's tower of pictured.VISION's sizes; some of its limits may be others."""
    config = replace(VISION, clipped=True, standardize=False)
    sizes = {768: 24, 3072: 40, 64: 12, 10240: 64}
    seeded = torch.Generator().manual_seed(3)
    tensors = {}
    for name, shape in small_tower_shapes(target_width=16).items():
        if ".layers." in name and ".layers.0." not in name:
            continue
        lengths = (24, 48) if "input_proj" in name else [sizes.get(size, size) for size in shape]
        tensors[name] = torch.randn(lengths, generator=seeded)
        if not shape:
            tensors[name] = torch.tensor(-1.0 if name.endswith("min") else 1.0)
    source = zoo.Tensors({**tensors, **changes})
    return Gemma4VisionTower(config, 16, Weights(source, lambda _: None), kernels)


def shown(rows: int, columns: int, seed: int = 0, cell: int = VISION.cell) -> Picture:
    """A picture of noise, of so many cells."""
    dice = random.Random(f"{rows} {columns} {seed}")
    width, height = columns * cell, rows * cell
    pixels = dice.randbytes(3 * width * height)
    return Picture(pixels, width, height, rows * columns, dice.randbytes(32))
