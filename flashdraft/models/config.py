"""What a target model is, read from a Hugging Face config.json. Frozen; unknown features raise.

Every key that changes the forward pass is named here, once. GGUF metadata is first turned into the
same JSON form (loading.py), so this is the only reader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashdraft.errors import CheckpointError, UnsupportedModelError
from flashdraft.kernels.interface import Activation
from flashdraft.models.quantization_config import read_quantization

Json = Mapping[str, Any]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one layer kind."""

    theta: float
    head_dim: int
    rotary_dims: int  # dims beyond these do not rotate (Gemma 4's proportional RoPE)
    scaling: tuple[tuple[str, float], ...] = ()  # llama3 or linear, as (name, value) pairs


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    window: int | None = None  # None = full attention
    share_kv: bool = False  # the value is the raw key projection; there is no v_proj


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture-of-experts branch that every layer of the model has."""

    num_experts: int
    num_chosen: int
    intermediate_size: int


@dataclass(frozen=True)
class ModelConfig:
    """A target model. `family` picks the module that builds it."""

    family: str  # "llama" (Llama, SmolLM2, Qwen3) or "gemma4"
    architecture: str  # as named by the checkpoint, for messages
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    activation: Activation
    tie_embeddings: bool
    max_position: int
    attention_scale: float | None = None  # None = head_dim ** -0.5
    qk_norm: bool = False
    attention_bias: bool = False
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    experts: ExpertsConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @classmethod
    def from_hf(cls, config: Json) -> ModelConfig:
        """Read a config.json of a supported family; multimodal ones yield their text model."""
        architecture = (config.get("architectures") or ["(none)"])[0]
        text = config.get("text_config") or config
        model_type = text.get("model_type", config.get("model_type"))
        reader = _READERS.get(model_type)
        if reader is None:
            raise UnsupportedModelError(
                f"The model type {model_type!r} ({architecture}) is not supported; "
                f"supported types are {', '.join(sorted(_READERS))}."
            )
        read_quantization(config)  # refuses what cannot be read
        # eos ids may sit at the top level of a multimodal config only
        merged = {**text, "eos_token_id": config.get("eos_token_id", text.get("eos_token_id"))}
        model = reader(merged, architecture)
        _check(model)
        return model


def _check(model: ModelConfig) -> None:
    """Refuse sizes that would fail, or give NaN, only once the model runs."""
    sizes = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": len(model.layers),
        "max_position_embeddings": model.max_position,
    }
    for name, size in sizes.items():
        _require(size >= 1, name, size, "at least 1")
    _require(
        0 <= model.norm_eps < math.inf, "rms_norm_eps", model.norm_eps, "finite and not below 0"
    )
    cap = model.logit_softcap
    _require(cap is None or 0 < cap < math.inf, "final_logit_softcapping", cap, "finite, above 0")
    if model.experts is not None:
        count, chosen = model.experts.num_experts, model.experts.num_chosen
        _require(1 <= chosen <= count, "top_k_experts", chosen, f"1 to {count}, the experts")
    for layer in dict.fromkeys(model.layers):
        dim, theta, kv_heads = layer.head_dim, layer.rope.theta, layer.num_kv_heads
        _require(dim >= 2 and dim % 2 == 0, "head_dim", dim, "even and at least 2")
        _require(1 <= theta < math.inf, "rope_theta", theta, "finite and at least 1")
        _require(kv_heads >= 1, "num_key_value_heads", kv_heads, "at least 1")
        heads, multiple = layer.num_heads, f"a multiple of the {kv_heads} key/value heads"
        is_multiple = heads >= 1 and heads % kv_heads == 0
        _require(is_multiple, "num_attention_heads", heads, multiple)
        rotary, window = layer.rope.rotary_dims, layer.window
        _require(0 <= rotary <= dim, "the number of rotary dimensions", rotary, f"0 to {dim}")
        _require(window is None or window >= 1, "sliding_window", window, "at least 1")
        for name, value in layer.rope.scaling:
            _require(0 < value < math.inf, f"RoPE's {name}", value, "finite and above 0")


def _require(holds: bool, name: str, value: Any, rule: str) -> None:
    if not holds:
        raise CheckpointError(
            f"The config is not valid: {name} is {value}; it must be {rule}. "
            "Fetch the checkpoint, or convert it, again."
        )


def _ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for one in ids:
        is_id = isinstance(one, int) and not isinstance(one, bool)
        _require(is_id, "eos_token_id", repr(value), "a whole number or a list of them")
    return tuple(ids)


def _rope_settings(config: Json) -> tuple[float, dict[str, Any]]:
    """theta and the scaling entry, from either generation of config.json."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None)
    theta = config.get("rope_theta") if theta is None else theta
    return 10000.0 if theta is None else float(theta), scaling


def _plain_rope(config: Json, head_dim: int, architecture: str) -> RopeConfig:
    theta, scaling = _rope_settings(config)
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    if kind not in ("default", "llama3", "linear"):
        raise UnsupportedModelError(
            f"{architecture} uses RoPE scaling {kind!r}; default, linear and llama3 are supported."
        )
    values = tuple(
        sorted((key, float(value)) for key, value in scaling.items() if value is not None)
    )
    return RopeConfig(theta, head_dim, head_dim, () if kind == "default" else values)


def _read_llama(config: Json, architecture: str) -> ModelConfig:
    is_qwen3 = config["model_type"] == "qwen3"
    if config.get("mlp_bias"):
        raise UnsupportedModelError(f"{architecture} has mlp_bias, which is not supported.")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(
            f"{architecture} uses hidden_act {config['hidden_act']!r}; only silu is supported."
        )
    num_layers = int(config["num_hidden_layers"])
    hidden = int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    rope = _plain_rope(config, head_dim, architecture)
    kinds = config.get("layer_types") or ["full_attention"] * num_layers
    use_window = config.get("use_sliding_window", True)
    layers = tuple(
        LayerConfig(
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            rope=rope,
            window=int(config["sliding_window"])
            if kind == "sliding_attention" and use_window
            else None,
        )
        for kind in kinds
    )
    return ModelConfig(
        family="llama",
        architecture=architecture,
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        layers=layers,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=Activation.SILU,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position=int(config.get("max_position_embeddings", 2048)),
        qk_norm=is_qwen3,
        attention_bias=bool(config.get("attention_bias", False)),
        eos_token_ids=_ids(config.get("eos_token_id")),
        bos_token_id=config.get("bos_token_id"),
    )


def _gemma4_layer(config: Json, index: int, kind: str) -> LayerConfig:
    """One Gemma 4 layer, from the Hub's config form or from the one transformers >= 5.15 saves."""
    full = kind == "full_attention"
    head_dim = int(config["head_dim"])
    kv_heads = int(config["num_key_value_heads"])
    share_kv = full and bool(config.get("attention_k_eq_v", False))
    if full and config.get("global_head_dim"):
        head_dim = int(config["global_head_dim"])
    if share_kv and config.get("num_global_key_value_heads"):
        kv_heads = int(config["num_global_key_value_heads"])
    for key, override in (config.get("per_layer_config") or {}).items():  # keys are zero-padded
        if int(key) == index:
            head_dim = int(override.get("head_dim", head_dim))
            kv_heads = int(override.get("num_key_value_heads", kv_heads))
    parameters = config["rope_parameters"][kind]
    share = float(parameters.get("partial_rotary_factor") or 1.0)
    rope = RopeConfig(float(parameters["rope_theta"]), head_dim, int(share * head_dim))
    return LayerConfig(
        num_heads=int(config["num_attention_heads"]),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        window=None if full else int(config["sliding_window"]),
        share_kv=share_kv,
    )


def _read_gemma4(config: Json, architecture: str) -> ModelConfig:
    # transformers' class defaults are the E2B model's; for these keys the Hub always says 0 or None
    unsupported = {
        "hidden_size_per_layer_input": config.get("hidden_size_per_layer_input") or 0,
        "num_kv_shared_layers": config.get("num_kv_shared_layers") or 0,
        "use_double_wide_mlp": config.get("use_double_wide_mlp") or False,
        "attention_bias": config.get("attention_bias") or False,
    }
    for key, value in unsupported.items():
        if value:
            raise UnsupportedModelError(
                f"{architecture} has {key} = {value!r}; flashdraft supports Gemma 4 31B and "
                "26B-A4B, which do not use it."
            )
    kinds = list(config["layer_types"])
    kinds[-1] = "full_attention"  # always, whatever the pattern says
    hidden = int(config["hidden_size"])
    experts = None
    if config.get("enable_moe_block"):
        experts = ExpertsConfig(
            num_experts=int(config["num_experts"]),
            num_chosen=int(config["top_k_experts"]),
            intermediate_size=int(config["moe_intermediate_size"]),
        )
    return ModelConfig(
        family="gemma4",
        architecture=architecture,
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        layers=tuple(_gemma4_layer(config, i, kind) for i, kind in enumerate(kinds)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=Activation.GELU_TANH,
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        max_position=int(config.get("max_position_embeddings", 131072)),
        attention_scale=1.0,
        qk_norm=True,
        embed_scale=hidden**0.5,
        logit_softcap=config.get("final_logit_softcapping"),
        experts=experts,
        eos_token_ids=_ids(config.get("eos_token_id")),
        bos_token_id=config.get("bos_token_id"),
    )


_READERS = {
    "llama": _read_llama,
    "qwen3": _read_llama,
    "gemma4": _read_gemma4,
    "gemma4_text": _read_gemma4,
}
