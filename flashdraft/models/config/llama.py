"""Configs of Llama and of those that differ from it by a row of a table.

Qwen2, Qwen3 with and without experts, Mistral: pre-norm layers of attention and a gated MLP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from flashdraft.errors import UnsupportedModelError, quoted
from flashdraft.kernels.kinds import Activation
from flashdraft.models.config.common import Common, Fields, Reader, expect_word, layer_kinds
from flashdraft.models.config.keys import LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, Reasons
from flashdraft.models.config.layers import ExpertsConfig, LayerConfig
from flashdraft.models.config.rope import FULL, SLIDING, read_plain_rope
from flashdraft.models.config.values import EXPERTS, HEADS, LAYERS, POSITIONS, WIDTH, Range, require
from flashdraft.models.config.values import ConfigObject as Text

Windows = list[int | None]  # of every layer; None = full attention


def _no_windows(text: Text, kinds: list[str] | None, common: Common) -> Windows:
    if SLIDING in (kinds or []):
        raise UnsupportedModelError(
            f"{common.architecture} has sliding layers (layer_types), which a model of type "
            f"{quoted(common.model_type)} does not have. Use another conversion of the model."
        )
    return [None] * common.num_layers


def _late_windows(text: Text, kinds: list[str] | None, common: Common) -> Windows:
    """Without a list of kinds the layers from max_window_layers on slide."""
    first = text.whole("max_window_layers", Range(0, LAYERS.most), 28)
    window = _asked_window(text)
    if kinds is None:
        indices = range(common.num_layers)
        kinds = [FULL if window is None or index < first else SLIDING for index in indices]
    if SLIDING in kinds and window is None:
        raise UnsupportedModelError(
            f"{common.architecture} has sliding layers (layer_types), but use_sliding_window is "
            f"{str(text.flag('use_sliding_window')).lower()} and sliding_window "
            f"{quoted(text.raw('sliding_window'))}: it does not say how far they see. Set both."
        )
    return [window if kind == SLIDING else None for kind in kinds]


def _asked_window(text: Text) -> int | None:
    """sliding_window, where use_sliding_window says that it holds."""
    if not text.flag("use_sliding_window"):
        return None
    window = text.maybe_whole("sliding_window", POSITIONS)
    return window if text.says("sliding_window") else 4096


def _one_asked_window(text: Text, kinds: list[str] | None, common: Common) -> Windows:
    """All layers slide if any does."""
    return [_asked_window(text)] * len(_no_windows(text, kinds, common))


def _one_window(text: Text, kinds: list[str] | None, common: Common) -> Windows:
    """The same without a key that asks for it."""
    window = text.maybe_whole("sliding_window", POSITIONS)
    window = window if text.says("sliding_window") else 4096
    return [window] * len(_no_windows(text, kinds, common))


class _Row(NamedTuple):
    """What tells one of these model types from the others."""

    irrelevant: Reasons
    max_position: int  # where the config does not say
    head_dim: int | None = None  # likewise; None: the heads share the width
    windows: Callable[[Text, list[str] | None, Common], Windows] = _no_windows
    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: attention_bias says it, of the output's too
    has_experts: bool = False


_ROWS = {
    "llama": _Row(LLAMA, 2048),
    "mistral": _Row(MISTRAL, 131072, windows=_one_window, qkv_bias=False),
    "qwen2": _Row(QWEN2, 32768, windows=_late_windows, qkv_bias=True),
    "qwen3": _Row(QWEN3, 32768, 128, windows=_late_windows, qk_norm=True),
    "qwen3_moe": _Row(QWEN3_MOE, 32768, windows=_one_asked_window, qk_norm=True, has_experts=True),
}


def _read(text: Text, common: Common) -> Fields:
    architecture, row = common.architecture, _ROWS[common.model_type]
    if text.flag("mlp_bias"):
        raise UnsupportedModelError(f"{architecture} has mlp_bias, which is not supported.")
    expect_word(text, architecture, "hidden_act", "silu")
    heads = text.whole("num_attention_heads", HEADS)
    share = max(1, common.fields["hidden_size"] // heads)
    head_dim = text.whole("head_dim", WIDTH, row.head_dim or share)
    windows = row.windows(text, layer_kinds(text, common.num_layers, architecture), common)
    layer = LayerConfig(
        num_heads=heads,
        num_kv_heads=text.whole("num_key_value_heads", HEADS, heads),
        head_dim=head_dim,
        rope=read_plain_rope(text, head_dim, architecture),
        intermediate_size=0 if row.has_experts else common.intermediate_size,
    )
    has_biases = row.qkv_bias is None and text.flag("attention_bias")
    return {
        **common.fields,
        "tie_embeddings": bool(common.fields["tie_embeddings"]),
        "family": "llama",
        "layers": tuple(dataclasses.replace(layer, window=window) for window in windows),
        "activation": Activation.SILU,
        "max_position": text.whole("max_position_embeddings", POSITIONS, row.max_position),
        "qk_norm": row.qk_norm,
        "qkv_bias": has_biases or bool(row.qkv_bias),
        "output_bias": has_biases,
        "experts": _read_experts(text, architecture) if row.has_experts else None,
    }


def _read_experts(text: Text, architecture: str) -> ExpertsConfig:
    """Qwen3's: every layer has them, for its MLP, and shares add up to one."""
    only = {
        "decoder_sparse_step": (text.whole("decoder_sparse_step", LAYERS, 1), 1),
        "mlp_only_layers": (text.wholes("mlp_only_layers", Range(0, LAYERS.most), []), []),
        "norm_topk_prob": (text.flag("norm_topk_prob"), True),
        "use_qk_norm": (text.flag("use_qk_norm", True), True),
    }
    for key, (found, wanted) in only.items():
        if found != wanted:
            raise UnsupportedModelError(
                f"{architecture} has {key} = {quoted(found)}; of Qwen3 with experts only models "
                f"with {quoted(wanted)} are supported, as all published ones are."
            )
    written = text.maybe_whole("num_local_experts", EXPERTS)  # as transformers 5 saves it
    num_experts = text.whole("num_experts", EXPERTS, written or 128)
    rule = f"as many as num_experts, {num_experts}, where both are there"
    require(written in (None, num_experts), "num_local_experts", written, rule)
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=text.whole("num_experts_per_tok", EXPERTS, 8),
        intermediate_size=text.whole("moe_intermediate_size", WIDTH, 768),
    )


READERS = {model_type: Reader(_read, row.irrelevant) for model_type, row in _ROWS.items()}
