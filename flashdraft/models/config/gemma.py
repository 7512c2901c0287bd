"""Configs of Gemma 3 and 4: two kinds of layers, in Gemma 4 with sizes of their own."""

from __future__ import annotations

import dataclasses

from flashdraft.errors import UnsupportedModelError, quoted
from flashdraft.kernels.kinds import Activation
from flashdraft.models.config.common import (
    SEES_LATER,
    Common,
    Fields,
    Reader,
    expect_word,
    layer_kinds,
)
from flashdraft.models.config.keys import GEMMA3, GEMMA4, irrelevant
from flashdraft.models.config.layers import ExpertsConfig, LayerConfig, PerLayerConfig
from flashdraft.models.config.rope import FULL, SLIDING, read_gemma3_rope, read_gemma4_rope
from flashdraft.models.config.values import (
    EXPERTS,
    HEADS,
    LAYERS,
    POSITIONS,
    POSITIVE,
    VOCABULARY,
    WIDTH,
    ConfigObject,
    Range,
    require,
)


def _gemma4_layer(
    text: ConfigObject, common: Common, kind: str, override: ConfigObject | None
) -> LayerConfig:
    """One Gemma 4 layer, from the Hub's config form or from the one transformers >= 5.15 saves."""
    full, architecture = kind == FULL, common.architecture
    head_dim = text.whole("head_dim", WIDTH)
    kv_heads = text.whole("num_key_value_heads", HEADS)
    share_kv = text.flag("attention_k_eq_v") and full
    global_dim = text.maybe_whole("global_head_dim", WIDTH)
    global_heads = text.maybe_whole("num_global_key_value_heads", HEADS)
    head_dim = global_dim if full and global_dim is not None else head_dim
    kv_heads = global_heads if share_kv and global_heads is not None else kv_heads
    if override is not None:
        head_dim = override.whole("head_dim", WIDTH, head_dim)
        kv_heads = override.whole("num_key_value_heads", HEADS, kv_heads)
        override.finish(architecture, irrelevant(), "config.json")
    return LayerConfig(
        num_heads=text.whole("num_attention_heads", HEADS),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=read_gemma4_rope(text, architecture, kind, head_dim),
        intermediate_size=common.intermediate_size,
        window=None if full else text.whole("sliding_window", POSITIONS),
        share_kv=share_kv,
    )


def _kinds(text: ConfigObject, common: Common, pattern: int) -> list[str]:
    """The kind of every layer; without a list every so many-th is full."""
    found = layer_kinds(text, common.num_layers, common.architecture)
    if found is None:
        found = [SLIDING if (i + 1) % pattern else FULL for i in range(common.num_layers)]
    return found


def _layer_overrides(text: ConfigObject, num_layers: int) -> dict[int, ConfigObject]:
    """What differs in single layers, by their index; the keys are zero-padded numbers."""
    section = text.section("per_layer_config")
    found: dict[int, ConfigObject] = {}
    if section is None:
        return found
    for key in section.names():
        is_index = key.isascii() and key.isdigit() and len(key) < 10 and int(key) < num_layers
        require(is_index, "a key of per_layer_config", key, f"a number below {num_layers}")
        override = section.section(key)
        if override is not None:
            found[int(key)] = override
    return found


def _read_gemma4(text: ConfigObject, common: Common) -> Fields:
    architecture, fields = common.architecture, common.fields
    if text.flag("attention_bias"):
        raise UnsupportedModelError(
            f"{architecture} has attention_bias = true, which no published Gemma 4 uses."
        )
    seen = text.raw("use_bidirectional_attention")
    if seen not in (None, False, "vision"):  # of pictures alone: text is causal all the same
        raise UnsupportedModelError(
            f"{architecture} has use_bidirectional_attention = {quoted(seen)}: {SEES_LATER}"
        )
    for key in ("hidden_activation", "hidden_act"):
        expect_word(text, architecture, key, "gelu_pytorch_tanh")
    kinds = _kinds(text, common, 6)
    kinds[-1] = FULL  # always, whatever the pattern says
    overrides = _layer_overrides(text, common.num_layers)
    experts = None
    if text.flag("enable_moe_block"):
        experts = ExpertsConfig(
            num_experts=text.whole("num_experts", EXPERTS),
            num_chosen=text.whole("top_k_experts", EXPERTS),
            intermediate_size=text.whole("moe_intermediate_size", WIDTH),
        )
    tied = fields["tie_embeddings"]
    return {
        **fields,
        "tie_embeddings": True if tied is None else tied,
        "family": "gemma",
        "layers": _with_sources(
            text,
            kinds,
            [
                _gemma4_layer(text, common, kind, overrides.get(index))
                for index, kind in enumerate(kinds)
            ],
        ),
        "per_layer": _read_per_layer(text, common),
        "activation": Activation.GELU_TANH,
        "max_position": text.whole("max_position_embeddings", POSITIONS, 131072),
        "attention_scale": 1.0,
        "qk_norm": True,
        "v_norm": True,
        "layer_scalars": True,
        "embed_scale": fields["hidden_size"] ** 0.5,
        "logit_softcap": text.maybe_real("final_logit_softcapping", POSITIVE),
        "experts": experts,
        "sees_pictures_whole": seen == "vision",
    }


def _with_sources(
    text: ConfigObject, kinds: list[str], layers: list[LayerConfig]
) -> tuple[LayerConfig, ...]:
    """The last num_kv_shared_layers read what the last layer of their kind before them keeps."""
    num_shared = text.whole("num_kv_shared_layers", Range(0, LAYERS.most), 0)
    wide = 2 if text.flag("use_double_wide_mlp") else 1
    first = len(layers) - num_shared
    for index in range(max(first, 0), len(layers)):
        before = [place for place in range(first) if kinds[place] == kinds[index]]
        rule = f"less than the {len(layers)} layers, with one of every kind before those that share"
        require(bool(before), "num_kv_shared_layers", num_shared, rule)
        own, source = layers[index], layers[before[-1]]
        layers[index] = dataclasses.replace(
            own, kv_source=before[-1], intermediate_size=wide * own.intermediate_size
        )
        sizes = own.num_kv_heads, own.head_dim
        rule = f"those of layer {before[-1]}, whose keys it reads"
        fits = sizes == (source.num_kv_heads, source.head_dim)
        require(fits, f"the key heads of layer {index} and their size", sizes, rule)
    return tuple(layers)


def _read_per_layer(text: ConfigObject, common: Common) -> PerLayerConfig | None:
    """A missing width is none: transformers' default is that of the small models, whose files
    have it."""
    width = text.whole("hidden_size_per_layer_input", Range(0, WIDTH.most), 0)
    if not width:
        return None
    vocab_size = common.fields["vocab_size"]
    rows = text.whole("vocab_size_per_layer_input", VOCABULARY, 262144)
    require(rows == vocab_size, "vocab_size_per_layer_input", rows, f"vocab_size, {vocab_size}")
    return PerLayerConfig(width, text.whole("pad_token_id", Range(0, vocab_size - 1), 0))


def _read_gemma3(text: ConfigObject, common: Common) -> Fields:
    architecture, fields = common.architecture, common.fields
    if text.flag("use_bidirectional_attention"):
        raise UnsupportedModelError(
            f"{architecture} has use_bidirectional_attention = true: {SEES_LATER}"
        )
    expect_word(text, architecture, "hidden_activation", "gelu_pytorch_tanh")
    kinds = _kinds(text, common, text.whole("sliding_window_pattern", POSITIONS, 6))
    head_dim = text.whole("head_dim", WIDTH)
    layers = {
        kind: LayerConfig(
            num_heads=text.whole("num_attention_heads", HEADS),
            num_kv_heads=text.whole("num_key_value_heads", HEADS),
            head_dim=head_dim,
            rope=read_gemma3_rope(text, architecture, kind, head_dim),
            intermediate_size=common.intermediate_size,
            window=None if kind == FULL else text.whole("sliding_window", POSITIONS),
        )
        for kind in (FULL, SLIDING)
    }
    tied, has_biases = fields["tie_embeddings"], text.flag("attention_bias")
    return {
        **fields,
        "tie_embeddings": True if tied is None else tied,
        "family": "gemma",
        "layers": tuple(layers[kind] for kind in kinds),
        "activation": Activation.GELU_TANH,
        "max_position": text.whole("max_position_embeddings", POSITIONS, 131072),
        "attention_scale": text.real("query_pre_attn_scalar", POSITIVE, 256.0) ** -0.5,
        "qk_norm": True,
        "qkv_bias": has_biases,
        "output_bias": has_biases,
        "norm_offset": 1.0,
        "embed_scale": fields["hidden_size"] ** 0.5,
        "logit_softcap": text.maybe_real("final_logit_softcapping", POSITIVE),
    }


# as in transformers; the text part of a published file may have half a dozen keys
_GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}
_GEMMA3 = Reader(_read_gemma3, GEMMA3, _GEMMA3_DEFAULTS)
_GEMMA4 = Reader(_read_gemma4, GEMMA4)
READERS = {
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "gemma4_unified": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
}
