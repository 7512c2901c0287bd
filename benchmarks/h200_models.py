"""Gemma 4 and its drafters at full size with random weights, made on the device. For h200.py.

The configurations are the published ones. Every tensor is drawn where it is used, from a seeded
generator, so that no more than the model and one layer is ever in memory. The text is noise; what a
step costs is not. The router's scale is zero: all rows choose the same experts (h200_inject.py
spreads them).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashdraft.bench.plan.pairs import DRAFTERS, TARGETS
from flashdraft.kernels.interface import Kernels
from flashdraft.models.config.layers import LayerConfig
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.config.vision import VisionConfig
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.model import Drafter, PackedDrafter
from flashdraft.models.layers import Target
from flashdraft.models.registry import build_target

LEAST_VOCABULARY = 262_144  # in which pictures' own marks are tokens
SPREAD = 0.02  # standard deviation of every matrix: sandwich norms keep activations finite

# what a published config says beside the sizes
_TARGET: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_DRAFTER: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-6,
}


def _layer_types(num_groups: int) -> list[str]:
    return (["sliding_attention"] * 5 + ["full_attention"]) * num_groups


@dataclass(frozen=True)
class RandomModel:
    """A target and its drafter as their config.json, and the acceptance prescribed for the pair."""

    name: str
    target: dict[str, Any]  # its text model
    drafter: dict[str, Any]
    alpha: float  # chance that a draft slot is accepted, once all before it were
    tower: dict[str, Any] | None = None  # None: it takes no pictures

    def target_config(self) -> ModelConfig:
        if self.tower is None:
            return ModelConfig.from_hf(self.target)
        whole = {"model_type": "gemma4", "text_config": self.target, "vision_config": self.tower}
        ends = {name: self.target[name] for name in ("architectures", "eos_token_id")}
        marks = _TINY_MARKS if self.target["vocab_size"] < LEAST_VOCABULARY else {}
        return ModelConfig.from_hf({**whole, **ends, **marks})

    def drafter_config(self) -> DrafterConfig:
        return DrafterConfig.from_hf(self.drafter)


def _published(name: str, target: str, drafter: str, alpha: float) -> RandomModel:
    sizes = TARGETS[target]["text_config"]
    more = _DRAFTER | {"num_target_layers": len(sizes["layer_types"])}
    return RandomModel(name, {**sizes, **_TARGET}, {**DRAFTERS[drafter], **more}, alpha)


MODELS = {
    "31b": _published(
        "Gemma 4 31B", "google/gemma-4-31B-it", "z-lab/gemma-4-31B-it-DFlash", alpha=0.909
    ),
    "26b": _published(
        "Gemma 4 26B-A4B",
        "google/gemma-4-26B-A4B-it",
        "z-lab/gemma-4-26B-A4B-it-DFlash",
        alpha=0.893,
    ),
}


def tiny(model: RandomModel) -> RandomModel:
    """The same structure in miniature, to try the benchmark out without a GPU."""
    sizes = {
        "vocab_size": 20000,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    target: dict[str, Any] = {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
    }
    target |= {"num_hidden_layers": 6, "layer_types": _layer_types(1), "sliding_window": 32}
    if model.target.get("enable_moe_block"):
        target |= {"num_experts": 16, "top_k_experts": 4, "moe_intermediate_size": 24}
    drafter: dict[str, Any] = {"head_dim": 16, "sliding_window": 48, "num_target_layers": 6}
    drafter |= {"dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 4]}}
    return RandomModel(
        f"{model.name} in miniature",
        model.target | sizes | target,
        model.drafter | sizes | drafter,
        model.alpha,
    )


def seeing(model: RandomModel) -> RandomModel:
    """The model with its tower for pictures: the published one, or one in miniature beside it."""
    tower = TARGETS["google/gemma-4-31B-it"]["vision_config"]
    is_tiny = model.target["hidden_size"] < tower["hidden_size"]
    return replace(model, tower={**tower, **_TINY_TOWER} if is_tiny else tower)


_TINY_TOWER = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "global_head_dim": 24,
    "patch_size": 4,
    "position_embedding_size": 512,
}
_TINY_MARKS = {"boi_token_id": 505, "image_token_id": 506, "eoi_token_id": 507}


def first_layers(model: RandomModel, num_layers: int) -> RandomModel:
    """The model cut short; its drafter reads as many layers as before, spread over those left."""
    types = model.target["layer_types"]
    pattern = len(_layer_types(1))
    if num_layers % pattern or not 0 < num_layers <= len(types):
        raise ValueError(
            f"--layers is {num_layers}; {model.name} can be cut to a multiple of {pattern} layers, "
            f"at most {len(types)}"
        )
    options = model.drafter["dflash_config"]
    taps = [tap * num_layers // len(types) for tap in options["target_layer_ids"]]
    return replace(
        model,
        target=model.target | {"layer_types": types[:num_layers]},
        drafter=model.drafter
        | {
            "num_target_layers": num_layers,
            "dflash_config": options | {"target_layer_ids": taps},
        },
    )


class RandomSource:
    """A checkpoint whose tensors are drawn as they are read."""

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        self._shapes = shapes
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def names(self) -> Iterable[str]:
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        """Matrices at random, norms and scalars one, the router's scale zero."""
        empty = torch.empty(self._shapes[name], device=self._device, dtype=self._dtype)
        if name.endswith("router.scale"):
            return empty.zero_()
        if empty.dim() == 1:
            return empty.fill_(1.0)
        return empty.normal_(0.0, SPREAD, generator=self._generator)

    def read_matrix(self, name: str, device: torch.device | None = None) -> Tensor:
        return self.read(name).to(device)

    def quantized_bytes(self, name: str) -> None:
        return None


def target_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a Gemma 4 target asks a checkpoint for."""
    hidden, shapes = config.hidden_size, dict[str, tuple[int, ...]]()
    shapes["model.embed_tokens.weight"] = (config.vocab_size, hidden)
    shapes["model.norm.weight"] = (hidden,)
    if config.vision is not None:
        shapes |= tower_shapes(config.vision, hidden)
    for index, layer in enumerate(config.layers):
        prefix = f"model.layers.{index}"
        shapes |= _attention_shapes(f"{prefix}.self_attn", layer, hidden)
        for name, shape in _mlp_shapes(hidden, config.intermediate_size).items():
            shapes[f"{prefix}.mlp.{name}"] = shape
        norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
        suffixes = [f"{name}_layernorm" for name in norms]
        if config.experts is not None:
            count, inner = config.experts.num_experts, config.experts.intermediate_size
            suffixes += [f"post_feedforward_layernorm_{place}" for place in (1, 2)]
            suffixes += ["pre_feedforward_layernorm_2"]
            shapes[f"{prefix}.router.proj.weight"] = (count, hidden)
            shapes[f"{prefix}.router.scale"] = (hidden,)
            shapes[f"{prefix}.router.per_expert_scale"] = (count,)
            shapes[f"{prefix}.experts.gate_up_proj"] = (count, 2 * inner, hidden)
            shapes[f"{prefix}.experts.down_proj"] = (count, hidden, inner)
        for suffix in suffixes:
            shapes[f"{prefix}.{suffix}.weight"] = (hidden,)
        shapes[f"{prefix}.layer_scalar"] = (1,)
    return shapes


def tower_shapes(vision: VisionConfig, target_width: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of a tower for pictures, and of its projection."""
    hidden, inner = vision.hidden_size, vision.num_heads * vision.head_dim
    prefix, patch = "model.vision_tower", 3 * vision.patch_size**2
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.patch_embedder.input_proj.weight": (hidden, patch),
        f"{prefix}.patch_embedder.position_embedding_table": (2, vision.num_positions, hidden),
        "model.embed_vision.embedding_projection.weight": (target_width, hidden),
    }
    if vision.standardize:
        shapes |= {f"{prefix}.std_{what}": (hidden,) for what in ("bias", "scale")}
    for index in range(vision.num_layers):
        layer = f"{prefix}.encoder.layers.{index}"
        for name in "qkv":
            shapes[f"{layer}.self_attn.{name}_proj.linear.weight"] = (inner, hidden)
        shapes[f"{layer}.self_attn.o_proj.linear.weight"] = (hidden, inner)
        shapes |= {f"{layer}.self_attn.{name}_norm.weight": (vision.head_dim,) for name in "qk"}
        wide = vision.intermediate_size
        shapes |= {f"{layer}.mlp.{n}_proj.linear.weight": (wide, hidden) for n in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.linear.weight"] = (hidden, wide)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{layer}.{name}_layernorm.weight"] = (hidden,)
    return shapes


def _attention_shapes(prefix: str, layer: LayerConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    query, key = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.q_proj.weight": (query, hidden),
        f"{prefix}.k_proj.weight": (key, hidden),
        f"{prefix}.o_proj.weight": (hidden, query),
        f"{prefix}.q_norm.weight": (layer.head_dim,),
        f"{prefix}.k_norm.weight": (layer.head_dim,),
    }
    if not layer.share_kv:
        shapes[f"{prefix}.v_proj.weight"] = (key, hidden)
    return shapes


def _mlp_shapes(hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    wide = {f"{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    return {**wide, "down_proj.weight": (hidden, inner)}


@dataclass(frozen=True)
class RandomPair:
    """A built target and drafter, and what building them took."""

    model: RandomModel
    target: Target
    drafter: PackedDrafter
    facts: dict[str, Any]

    @property
    def plain_target(self) -> Target:
        """The same weights without taps: plain decoding hands nothing to a drafter."""
        plain = copy.copy(self.target)
        plain.tap_layers = ()
        return plain


def build_pair(model: RandomModel, kernels: Kernels, seed: int) -> RandomPair:
    """Draw a target and its drafter on the kernels' device."""
    device, dtype = kernels.device, kernels.dtype
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    begin, before = time.perf_counter(), _allocated(device)
    config, draft_config = model.target_config(), model.drafter_config()
    shapes = target_shapes(config)
    source = RandomSource(shapes, device, dtype, seed)
    target = build_target(config, source, kernels, draft_config.tap_layers)
    between = _allocated(device)
    with torch.device("meta"):
        parameters = Drafter(draft_config)
    draft_shapes = {name: tuple(one.shape) for name, one in parameters.state_dict().items()}
    draft_source = RandomSource(draft_shapes, device, dtype, seed + 1)
    tensors = {name: draft_source.read(name) for name in draft_shapes}
    parameters.load_state_dict(tensors, assign=True)
    drafter = PackedDrafter(parameters, kernels)
    del parameters, tensors
    facts: dict[str, Any] = {
        "model": model.name,
        "weights": f"random, standard deviation {SPREAD}, {str(dtype).removeprefix('torch.')}",
        "target_parameters": count_elements(shapes),
        "drafter_parameters": count_elements(draft_shapes),
        "reading_s": round(_seconds_since(begin, device), 2),
    }
    if on_gpu:
        facts["target_gb"] = round((between - before) / 1e9, 2)
        facts["drafter_gb"] = round((_allocated(device) - between) / 1e9, 2)
        facts["peak_gb"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 2)
    return RandomPair(model, target, drafter, facts)


def count_elements(shapes: dict[str, tuple[int, ...]]) -> int:
    """Numbers in all these tensors."""
    return sum(math.prod(shape) for shape in shapes.values())


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _seconds_since(begin: float, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
