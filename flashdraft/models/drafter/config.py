"""What a block drafter is, read from either published layout of config.json. Frozen.

z-lab's layout is the native one (`from_hf`, `to_hf`); speculators' layout is read as well, and
DeepSpec's of DSpark. Every key that changes the forward pass is named here, in head_config.py or in
ModelConfig, which reads the decoder's part: a drafter's layers are Qwen3 layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashdraft.errors import CheckpointError, UnsupportedModelError, quoted
from flashdraft.models.config.keys import DRAFTER, SPECULATORS, irrelevant
from flashdraft.models.config.rope import FULL, SLIDING, RopeConfig
from flashdraft.models.config.target import Json, ModelConfig
from flashdraft.models.config.values import (
    LAYERS,
    POSITIONS,
    POSITIVE,
    VOCABULARY,
    WIDTH,
    ConfigObject,
    Range,
)
from flashdraft.models.drafter.head_config import (
    CONVOLUTION_KEYS,
    MARKOV_KEYS,
    SELECTOR,
    SELECTOR_KEYS,
    ConvolutionConfig,
    HeadConfig,
    Holder,
    head_shapes,
    read_convolution,
    read_markov,
    read_selector,
)

ARCHITECTURE = "DFlashDraftModel"
SECOND_ARCHITECTURE = "DFlash2DraftModel"  # with convolutions and a selector
DSPARK_ARCHITECTURE = "Qwen3DSparkModel"  # DeepSpec's own; speculators has the same in its layout
LAYOUTS = ("zlab", "speculators")  # that a drafter can be written in
SPECULATORS_TYPES = ("dflash", "dflash2", "dspark")
_BLOCK, _TAP, _TOKEN = Range(0, 4096), Range(-1, LAYERS.most), Range(0, VOCABULARY.most)
# speculators stores only what differs from these defaults of transformers' Qwen3Config
_QWEN3_DEFAULTS: Json = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


@dataclass(frozen=True)
class DrafterConfig:
    """A block drafter. Its embedding table and (unless reduced) its head are the target's."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]  # per layer; None = full attention
    causal: tuple[bool, ...]  # per layer: may a row see only earlier rows of its own block?
    block_size: int  # the anchor and the masked slots
    mask_token_id: int
    tap_layers: tuple[int, ...]  # 0-based target layers whose outputs are the context
    num_target_layers: int | None = None  # None = not recorded
    embed_scale: float | None = None  # times the raw embedding; None = the target's own scale
    output_multiplier: float = 1.0
    logit_softcap: float | None = None
    draft_vocab_size: int | None = None  # a reduced vocabulary, with a head of its own
    any_width: bool = False  # trained on shorter blocks too, so a cut one drafts as well
    from_anchor: bool = False  # every row predicts the token after its own, the anchor's too
    convolution: ConvolutionConfig | None = None
    head: HeadConfig | None = None  # chooses among slots' candidates; None = each slot by itself

    @property
    def num_slots(self) -> int:
        """Draft tokens of a block."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def first_row(self) -> int:
        """The first of a block's rows that drafts a token."""
        return 0 if self.from_anchor else 1

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"The drafter has {self.num_heads} query heads and {self.num_kv_heads} key heads; "
                "the first must be a multiple of the second."
            )
        if self.block_size < 2:
            raise CheckpointError(
                f"The drafter's block_size is {self.block_size}; it must be at least 2: the anchor "
                "and one masked slot."
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise CheckpointError(
                f"The drafter's mask_token_id {self.mask_token_id} lies outside its vocabulary of "
                f"{self.vocab_size}."
            )
        if not self.tap_layers or min(self.tap_layers) < 0:
            raise CheckpointError(
                f"The drafter's target layers are {list(self.tap_layers)}; it must name at least "
                "one, counted from 0."
            )

    @classmethod
    def from_hf(cls, config: Json) -> DrafterConfig:
        """Read z-lab's layout."""
        settings = ConfigObject(config)
        architectures = settings.words("architectures") or []
        nested = settings.section("dflash_config")
        options = ConfigObject({}) if nested is None else nested
        known = {ARCHITECTURE, SECOND_ARCHITECTURE, DSPARK_ARCHITECTURE}
        if not known & set(architectures) and not options.names():
            raise UnsupportedModelError(
                f"{', '.join(architectures) or 'The model'} is not a block drafter: its "
                f"config.json has no dflash_config and its architecture is not {ARCHITECTURE}."
            )

        def holder(key: str) -> ConfigObject:
            """dflash_config, or the top level where older files keep the key."""
            settings.raw(key)
            return options if key in options else settings

        is_dspark = DSPARK_ARCHITECTURE in architectures
        head = _read_head(architectures, holder)
        kinds = _layer_kinds(settings)
        taps, scale = "target_layer_ids", "input_embedding_scale"
        multiplier, softcap = "output_multiplier", "final_logit_softcapping"
        own: dict[str, Any] = {
            "causal": _causality(settings, options, kinds),
            "block_size": holder("block_size").whole("block_size", _BLOCK),
            "mask_token_id": holder("mask_token_id").whole("mask_token_id", _TOKEN),
            "tap_layers": tuple(holder(taps).wholes(taps, _TAP)),
            "num_target_layers": settings.maybe_whole("num_target_layers", LAYERS),
            "embed_scale": holder(scale).maybe_real(scale, POSITIVE),
            "output_multiplier": holder(multiplier).real(multiplier, POSITIVE, 1.0),
            "logit_softcap": holder(softcap).real(softcap, Range(0, math.inf), 0.0) or None,
            "any_width": options.flag("any_width"),
            "from_anchor": options.flag("sample_from_anchor", default=is_dspark),
            "head": head,
        }
        fields = _decoder_fields(settings, kinds)
        if head is not None and head.kind == SELECTOR:
            own["convolution"] = read_convolution(holder, fields["hidden_size"])
        options.finish(ARCHITECTURE, irrelevant(DRAFTER), "config.json")
        return cls(**fields, **own)

    @classmethod
    def from_speculators(cls, config: Json) -> DrafterConfig:
        """Read speculators' layout."""
        settings = ConfigObject(config)
        kind = settings.word("speculators_model_type")
        if kind not in SPECULATORS_TYPES:
            raise UnsupportedModelError(
                f"The drafter is of speculators' type {quoted(kind)}; "
                f"{', '.join(map(repr, SPECULATORS_TYPES))} are supported."
            )
        stored = ConfigObject(settings.raw("transformer_layer_config"), "transformer_layer_config")
        decoder = {**_QWEN3_DEFAULTS, **stored.unasked()}
        rope = stored.section("rope_parameters")
        if rope is not None and SLIDING in rope:  # one for each kind: speculators uses this one
            decoder["rope_parameters"] = rope.raw(SLIDING)
        layers = ConfigObject(decoder)
        fields = _decoder_fields(layers, _layer_kinds(layers))
        target_hidden = settings.whole("target_hidden_size", WIDTH, fields["hidden_size"])
        if target_hidden != fields["hidden_size"]:
            raise UnsupportedModelError(
                f"The drafter's hidden size is {fields['hidden_size']}, its target's "
                f"{target_hidden}; drafters of another width than their target are not supported."
            )
        draft_vocab = settings.whole("draft_vocab_size", VOCABULARY)
        non_causal = settings.flag("sliding_window_non_causal", default=kind == "dflash2")
        taps = "aux_hidden_state_layer_ids"
        own: dict[str, Any] = {
            "causal": tuple(w is not None and not non_causal for w in fields["windows"]),
            "block_size": settings.whole("block_size", _BLOCK),
            "mask_token_id": settings.whole("mask_token_id", _TOKEN),
            # there 0 is the embedding's output and i + 1 the output of layer i
            "tap_layers": tuple(tap - 1 for tap in settings.wholes(taps, _TAP)),
            "embed_scale": 1.0,  # trained on raw embeddings, whatever the target multiplies
            "draft_vocab_size": None if draft_vocab == fields["vocab_size"] else draft_vocab,
            "any_width": settings.flag("any_width"),  # a key of our own
            "from_anchor": settings.flag("sample_from_anchor", default=kind == "dspark"),
        }
        if kind == "dspark":
            own["head"] = read_markov(lambda key: settings)
        if kind == "dflash2":
            own["head"] = read_selector(lambda key: settings)
            own["convolution"] = read_convolution(lambda key: settings, fields["hidden_size"])
        for key in ("architectures", "model_type"):
            settings.raw(key)
        settings.finish("The drafter", irrelevant(DRAFTER, SPECULATORS), "config.json")
        return cls(**fields, **own)

    def to_hf(self) -> dict[str, Any]:
        """z-lab's config.json."""
        if self.draft_vocab_size is not None:
            raise UnsupportedModelError(
                f"A reduced vocabulary (here of {self.draft_vocab_size}) has no place in z-lab's "
                "layout; export a drafter with the target's whole vocabulary."
            )
        options: dict[str, Any] = {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.tap_layers),
        }
        if self.embed_scale is not None:
            options["input_embedding_scale"] = self.embed_scale
        if self.output_multiplier != 1.0:
            options["output_multiplier"] = self.output_multiplier
        if self.any_width:
            options["any_width"] = True  # a key of our own; other readers pass over it
        if self.from_anchor:
            options["sample_from_anchor"] = True  # likewise, as is what says of a Markov head
        options |= self.added_keys()
        is_second = self.head is not None and self.head.kind == SELECTOR
        config = {
            "architectures": [SECOND_ARCHITECTURE if is_second else ARCHITECTURE],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "block_size": self.block_size,  # older readers look here, newer ones in dflash_config
            "dflash_config": options,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope.theta,
            "rope_scaling": _rope_scaling(self.rope),
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": self.vocab_size,
            **self._attention_keys(),
        }
        if self.num_target_layers is not None:
            config["num_target_layers"] = self.num_target_layers
        if self.logit_softcap is not None:
            config["final_logit_softcapping"] = self.logit_softcap
        return config

    def added_keys(self) -> dict[str, Any]:
        """What the published layouts say of a head and of convolutions."""
        parts = self.convolution, self.head
        return {
            key: value for one in parts if one is not None for key, value in one.to_hf().items()
        }

    def _attention_keys(self) -> dict[str, Any]:
        windows = {window for window in self.windows if window is not None}
        if len(windows) > 1:
            raise UnsupportedModelError(
                f"The drafter's layers have windows of {sorted(windows)}; the layout has one key "
                "for all, sliding_window."
            )
        keys: dict[str, Any] = {
            "layer_types": [FULL if window is None else SLIDING for window in self.windows],
            "max_window_layers": self.num_layers,
            "use_sliding_window": bool(windows),
            "sliding_window": max(windows, default=None),
        }
        if self.causal != tuple(window is not None for window in self.windows):
            if len(set(self.causal)) > 1:
                raise UnsupportedModelError(
                    f"The drafter's layers are causal within a block as {list(self.causal)}; the "
                    "layout knows one answer for all layers, or 'the sliding ones'."
                )
            keys["is_causal"] = self.causal[0]
        return keys


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of a drafter of this config, by its name in z-lab's checkpoints."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.tap_layers) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layer = {f"{name}.weight": shape for name, shape in layer.items()}
    if (mixed := config.convolution) is not None:
        kernels = 2 * mixed.num_taps * (hidden // mixed.group_size)
        for name in ("attention_conv", "mlp_conv"):
            layer[f"{name}.base_kernel"] = 2, mixed.num_taps, hidden
            layer[f"{name}.kernel_projection.weight"] = kernels, hidden
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    if config.draft_vocab_size is not None:
        shapes["lm_head.weight"] = (config.draft_vocab_size, hidden)
    if config.head is not None:
        draft_vocab = config.draft_vocab_size or config.vocab_size
        shapes |= head_shapes(config.head, hidden, config.vocab_size, draft_vocab)
    return shapes


def _read_head(architectures: Sequence[str], holder: Holder) -> HeadConfig | None:
    """The head that z-lab's or DeepSpec's config names, if any."""
    second, markov = (
        [key for key in keys if holder(key).raw(key) is not None]
        for keys in ((*CONVOLUTION_KEYS, *SELECTOR_KEYS), MARKOV_KEYS)
    )
    if second and markov:
        raise UnsupportedModelError(
            f"The drafter has {second[0]} and {markov[0]}: two heads. One is supported."
        )
    if markov or DSPARK_ARCHITECTURE in architectures:
        return read_markov(holder)
    return read_selector(holder) if second or SECOND_ARCHITECTURE in architectures else None


def _layer_kinds(settings: ConfigObject) -> list[str]:
    count = settings.whole("num_hidden_layers", LAYERS)
    first_sliding = settings.whole("max_window_layers", Range(0, LAYERS.most), 0)
    uses_window = settings.flag("use_sliding_window") and bool(settings.raw("sliding_window"))
    kinds = settings.words("layer_types") or [
        SLIDING if uses_window and index >= first_sliding else FULL for index in range(count)
    ]
    if len(kinds) != count:
        raise CheckpointError(
            f"The drafter's layer_types has {len(kinds)} entries for {count} layers."
        )
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise UnsupportedModelError(
                f"The drafter has a layer of type {quoted(kind)}; {FULL} and {SLIDING} are "
                "supported."
            )
    return kinds


def _causality(
    settings: ConfigObject, options: ConfigObject, kinds: Sequence[str]
) -> tuple[bool, ...]:
    """A key for all layers decides; without one sliding layers are causal and full ones are not."""
    for value in (settings.maybe_flag("is_causal"), options.maybe_flag("causal")):
        if value is not None:
            return (value,) * len(kinds)
    return tuple(kind == SLIDING for kind in kinds)


def _decoder_fields(settings: ConfigObject, kinds: Sequence[str]) -> dict[str, Any]:
    """The decoder's part of the config, read as a Qwen3 model's."""
    model_type = settings.word("model_type", "qwen3")
    if model_type != "qwen3":
        raise UnsupportedModelError(
            f"The drafter's layers are of type {quoted(model_type)}; only 'qwen3' is supported."
        )
    # sliding_window says nothing where use_sliding_window is false, whatever the layers' kinds are
    window = None
    if SLIDING in kinds and settings.flag("use_sliding_window", default=True):
        window = settings.whole("sliding_window", POSITIONS)
    is_spare = irrelevant(DRAFTER)
    rest = {key: value for key, value in settings.unasked().items() if not is_spare(key)}
    decoder = ModelConfig.from_hf(
        {
            **rest,
            "architectures": [ARCHITECTURE],
            "model_type": model_type,
            "num_hidden_layers": len(kinds),
            "layer_types": [FULL] * len(kinds) if window is None else list(kinds),
            "use_sliding_window": window is not None,
            "sliding_window": window,
        }
    )
    if decoder.qkv_bias:
        raise UnsupportedModelError("The drafter has attention_bias, which is not supported.")
    layer = decoder.layers[0]
    return {
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_heads": layer.num_heads,
        "num_kv_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "num_layers": len(decoder.layers),
        "vocab_size": decoder.vocab_size,
        "max_position": decoder.max_position,
        "norm_eps": decoder.norm_eps,
        "rope": layer.rope,
        "windows": tuple(layer.window for layer in decoder.layers),
    }


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if not rope.scaling:
        return None
    values: dict[str, Any] = dict(rope.scaling)
    if "original_max_position_embeddings" not in values:
        return {"rope_type": "linear", **values}
    values["original_max_position_embeddings"] = int(values["original_max_position_embeddings"])
    if "low_freq_factor" in values:
        return {"rope_type": "llama3", **values}
    return {"rope_type": "yarn", **values, "truncate": bool(values["truncate"])}
