"""What a target model is, read from a Hugging Face config.json. Frozen; unknown features raise.

Every key that changes the forward pass is named here, once; the others are in keys.py with
the reason why they change nothing, or are refused. GGUF metadata is first turned into the same JSON
form (loading.py), so this is the only reader. Where a key is missing, transformers' default holds.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flashdraft.errors import UnsupportedModelError, quoted
from flashdraft.kernels.kinds import Activation
from flashdraft.models.config.keys import (
    GEMMA4,
    GENERATION,
    GENERATION_OFF,
    LLAMA,
    OTHER_MODALITIES,
    QWEN3,
    Reasons,
    irrelevant,
)
from flashdraft.models.config.quantization import read_quantization
from flashdraft.models.config.rope import (
    FULL,
    SLIDING,
    RopeConfig,
    read_gemma4_rope,
    read_plain_rope,
)
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
    is_whole,
    require,
    token_ids,
)
from flashdraft.models.config.vision import NO_TOWER, VisionConfig, read_vision

logger = logging.getLogger(__name__)

Json = Mapping[str, Any]
_EPSILON = Range(0, 1)
# what stands for pictures, sounds and films in a prompt; an answer has none of them
_SEES_LATER = (
    "its tokens see later ones, so it cannot write an answer token by token. Use a model for "
    "generation."
)
_MEDIA_TOKEN = re.compile(
    r"(image|video|audio|vision|boi|eoi|boa|eoa|vision_start|vision_end)_token_(id|index)"
)


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
    forbidden_token_ids: tuple[int, ...] = ()  # never in an answer: placeholders of media
    vision: VisionConfig | None = None  # None: it takes no pictures, for the reason that follows
    why_no_vision: str | None = NO_TOWER  # in sentences; None where there is a tower
    sees_pictures_whole: bool = False  # sliding layers: a picture's rows see all of it

    @classmethod
    def from_hf(cls, config: Json) -> ModelConfig:
        """Read a config.json of a supported family; of multimodal ones the text and the pictures.

        Where the tower for pictures is none that can be run, the text is read without it.
        """
        whole = ConfigObject(config)
        architecture = (whole.words("architectures") or ["(none)"])[0]
        section = whole.section("text_config")
        text = section if section is not None and section.names() else whole
        outer_type = whole.raw("model_type")
        model_type = text.raw("model_type") or outer_type
        reader = _READERS.get(model_type) if isinstance(model_type, str) else None
        if reader is None:
            raise UnsupportedModelError(
                f"The model type {quoted(model_type)} ({quoted(architecture)}) is not supported; "
                f"supported types are {', '.join(sorted(_READERS))}."
            )
        read_quantization(config)  # refuses what cannot be read
        common = _read_common(whole, text, architecture, model_type)
        model = reader.read(text, common)
        vision = read_vision(whole, architecture, model.vocab_size)
        model = dataclasses.replace(model, vision=vision.config, why_no_vision=vision.why_none)
        tables = (reader.irrelevant, OTHER_MODALITIES)
        if text is not whole:
            whole.forget(text)  # what both say is the text model's
            whole.finish(architecture, irrelevant(*tables, multimodal=True), "config.json")
        text.finish(architecture, irrelevant(*tables), "config.json")
        _check(model)
        return model

    def without_vision(self, reason: str) -> ModelConfig:
        """The same model for text alone."""
        return dataclasses.replace(self, vision=None, why_no_vision=reason)

    def with_generation(self, generation: Json) -> ModelConfig:
        """What a generation_config.json adds: further stop tokens, and tokens never to be said.

        It may name more stop tokens than config.json (Gemma 4: 3 instead of 2). Ways to decode that
        are not done here are left out with a warning.
        """
        settings = ConfigObject(generation)
        stops = token_ids(settings.raw("eos_token_id"), "eos_token_id", self.vocab_size)
        banned = token_ids(settings.raw("suppress_tokens"), "suppress_tokens", self.vocab_size)
        every = tuple(dict.fromkeys((*self.eos_token_ids, *stops)))
        wanted = {
            key: value
            for key, off in GENERATION_OFF.items()
            if (value := settings.raw(key)) not in (None, off)
        }
        # advice on how to decode, not what the model is: it is left out aloud
        for key, value in {**wanted, **settings.left_over(irrelevant(GENERATION))}.items():
            logger.warning(
                "The generation_config.json of %s asks for %s = %s, which flashdraft does not do; "
                "it is left out.",
                self.architecture,
                quoted(key),
                quoted(value),
            )
        forbidden = set(self.forbidden_token_ids) | set(banned)
        return dataclasses.replace(
            self, eos_token_ids=every, forbidden_token_ids=tuple(sorted(forbidden - set(every)))
        )


class _Common(NamedTuple):
    """What is read alike in every family."""

    model_type: str
    architecture: str
    num_layers: int
    fields: dict[str, Any]  # of a ModelConfig


def _read_common(
    whole: ConfigObject, text: ConfigObject, architecture: str, model_type: str
) -> _Common:
    vocab_size = text.whole("vocab_size", VOCABULARY)

    def ids(key: str) -> tuple[int, ...]:
        """A multimodal config's own word goes before its text part's."""
        outer, inner = (token_ids(one.raw(key), key, vocab_size) for one in (whole, text))
        return outer or inner

    stops, bos = ids("eos_token_id"), ids("bos_token_id")
    require(len(bos) < 2, "bos_token_id", bos, "one token id")
    ties = {
        one.flag("tie_word_embeddings") for one in (whole, text) if "tie_word_embeddings" in one
    }
    if len(ties) > 1:
        raise UnsupportedModelError(
            f"{architecture} says both that its head is tied to its embeddings and that it is not "
            "(tie_word_embeddings, in its config.json and in the text_config there). Make them "
            "agree."
        )
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": text.whole("hidden_size", WIDTH),
        "intermediate_size": text.whole("intermediate_size", WIDTH),
        "norm_eps": text.real("rms_norm_eps", _EPSILON, 1e-6),
        "tie_embeddings": ties.pop() if ties else None,
        "eos_token_ids": stops,
        "bos_token_id": bos[0] if bos else None,
        "forbidden_token_ids": _media_tokens(whole, text, vocab_size, stops),
    }
    if not text.flag("is_causal", True):
        raise UnsupportedModelError(f"{architecture} has is_causal = false: {_SEES_LATER}")
    kinds = text.words("layer_types") or []
    num_layers = text.whole("num_hidden_layers", LAYERS, len(kinds) or None)
    require(num_layers <= LAYERS.most, "the number of layers", num_layers, str(LAYERS))
    return _Common(model_type, architecture, num_layers, fields)


def _media_tokens(
    whole: ConfigObject, text: ConfigObject, vocab_size: int, stops: Sequence[int]
) -> tuple[int, ...]:
    found = set()
    for settings in (whole, text):
        for key in filter(_MEDIA_TOKEN.fullmatch, settings.names()):
            token = settings.raw(key)
            require(is_whole(token), key, token, "a token id")
            if 0 <= token < vocab_size:  # what is beyond cannot be said anyway
                found.add(int(token))
    return tuple(sorted(found - set(stops)))


def _check(model: ModelConfig) -> None:
    """Refuse sizes that would fail, or give NaN, only once the model runs."""
    if model.experts is not None:
        count, chosen = model.experts.num_experts, model.experts.num_chosen
        require(1 <= chosen <= count, "top_k_experts", chosen, f"1 to {count}, the experts")
    for layer in dict.fromkeys(model.layers):
        dim, kv_heads = layer.head_dim, layer.num_kv_heads
        require(dim >= 2 and dim % 2 == 0, "head_dim", dim, "even and at least 2")
        heads, multiple = layer.num_heads, f"a multiple of the {kv_heads} key/value heads"
        require(heads % kv_heads == 0, "num_attention_heads", heads, multiple)


def _layer_kinds(text: ConfigObject, num_layers: int, architecture: str) -> list[str] | None:
    """The kind of every layer, where the config lists them."""
    kinds = text.words("layer_types")
    if not kinds:
        return None
    rule = f"one for each of the {num_layers} layers"
    require(len(kinds) == num_layers, "the number of layer_types", len(kinds), rule)
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise UnsupportedModelError(
                f"{architecture} has a layer of type {quoted(kind)} (layer_types); {FULL} and "
                f"{SLIDING} are supported."
            )
    return kinds


def _read_llama(text: ConfigObject, common: _Common) -> ModelConfig:
    architecture, num_layers = common.architecture, common.num_layers
    if text.flag("mlp_bias"):
        raise UnsupportedModelError(f"{architecture} has mlp_bias, which is not supported.")
    _expect_word(text, architecture, "hidden_act", "silu")
    is_qwen3 = common.model_type == "qwen3"
    heads = text.whole("num_attention_heads", HEADS)
    share = max(1, common.fields["hidden_size"] // heads)
    head_dim = text.whole("head_dim", WIDTH, 128 if is_qwen3 else share)
    kinds = _layer_kinds(text, num_layers, architecture)
    windows = _qwen3_windows(text, kinds, common) if is_qwen3 else _no_windows(kinds, common)
    layer = LayerConfig(
        num_heads=heads,
        num_kv_heads=text.whole("num_key_value_heads", HEADS, heads),
        head_dim=head_dim,
        rope=read_plain_rope(text, head_dim, architecture),
    )
    fields = common.fields
    return ModelConfig(
        **{**fields, "tie_embeddings": bool(fields["tie_embeddings"])},
        family="llama",
        architecture=architecture,
        layers=tuple(dataclasses.replace(layer, window=window) for window in windows),
        activation=Activation.SILU,
        max_position=text.whole("max_position_embeddings", POSITIONS, 32768 if is_qwen3 else 2048),
        qk_norm=is_qwen3,
        attention_bias=text.flag("attention_bias"),
    )


def _expect_word(text: ConfigObject, architecture: str, key: str, only: str) -> None:
    found = text.word(key, only)
    if found != only:
        raise UnsupportedModelError(
            f"{architecture} uses {key} {quoted(found)}; only {only} is supported."
        )


def _qwen3_windows(
    text: ConfigObject, kinds: list[str] | None, common: _Common
) -> list[int | None]:
    """Every layer's window; without a list of kinds the layers from max_window_layers on slide."""
    uses_window = text.flag("use_sliding_window")
    first = text.whole("max_window_layers", Range(0, LAYERS.most), 28)
    window = None
    if uses_window:
        window = text.maybe_whole("sliding_window", POSITIONS)
        window = window if text.says("sliding_window") else 4096
    if kinds is None:
        indices = range(common.num_layers)
        kinds = [FULL if window is None or index < first else SLIDING for index in indices]
    if SLIDING in kinds and window is None:
        raise UnsupportedModelError(
            f"{common.architecture} has sliding layers (layer_types), but use_sliding_window is "
            f"{str(uses_window).lower()} and sliding_window "
            f"{quoted(text.raw('sliding_window'))}: it does not say how far they see. Set both."
        )
    return [window if kind == SLIDING else None for kind in kinds]


def _no_windows(kinds: list[str] | None, common: _Common) -> list[int | None]:
    if SLIDING in (kinds or []):
        raise UnsupportedModelError(
            f"{common.architecture} has sliding layers (layer_types), which a model of type "
            "'llama' does not have. Use another conversion of the model."
        )
    return [None] * common.num_layers


def _gemma4_layer(
    text: ConfigObject, architecture: str, kind: str, override: ConfigObject | None
) -> LayerConfig:
    """One Gemma 4 layer, from the Hub's config form or from the one transformers >= 5.15 saves."""
    full = kind == FULL
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
        window=None if full else text.whole("sliding_window", POSITIONS),
        share_kv=share_kv,
    )


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


def _read_gemma4(text: ConfigObject, common: _Common) -> ModelConfig:
    architecture, fields = common.architecture, common.fields
    # transformers' class defaults are the E2B model's; for these keys the Hub always says 0 or None
    for key in (
        "hidden_size_per_layer_input",
        "num_kv_shared_layers",
        "use_double_wide_mlp",
        "attention_bias",
    ):
        if text.raw(key):
            raise UnsupportedModelError(
                f"{architecture} has {key} = {quoted(text.raw(key))}; flashdraft supports Gemma 4 "
                "31B and 26B-A4B, which do not use it."
            )
    seen = text.raw("use_bidirectional_attention")
    if seen not in (None, False, "vision"):  # of pictures alone: text is causal all the same
        raise UnsupportedModelError(
            f"{architecture} has use_bidirectional_attention = {quoted(seen)}: {_SEES_LATER}"
        )
    for key in ("hidden_activation", "hidden_act"):
        _expect_word(text, architecture, key, "gelu_pytorch_tanh")
    kinds = _layer_kinds(text, common.num_layers, architecture)
    if kinds is None:  # every sixth is full
        kinds = [SLIDING if (index + 1) % 6 else FULL for index in range(common.num_layers)]
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
    return ModelConfig(
        **{**fields, "tie_embeddings": True if tied is None else tied},
        family="gemma4",
        architecture=architecture,
        layers=tuple(
            _gemma4_layer(text, architecture, kind, overrides.get(index))
            for index, kind in enumerate(kinds)
        ),
        activation=Activation.GELU_TANH,
        max_position=text.whole("max_position_embeddings", POSITIONS, 131072),
        attention_scale=1.0,
        qk_norm=True,
        embed_scale=fields["hidden_size"] ** 0.5,
        logit_softcap=text.maybe_real("final_logit_softcapping", POSITIVE),
        experts=experts,
        sees_pictures_whole=seen == "vision",
    )


class _Reader(NamedTuple):
    """How the configs of one model type are read, and which of their keys change nothing."""

    read: Callable[[ConfigObject, _Common], ModelConfig]
    irrelevant: Reasons


_READERS = {
    "llama": _Reader(_read_llama, LLAMA),
    "qwen3": _Reader(_read_llama, QWEN3),
    "gemma4": _Reader(_read_gemma4, GEMMA4),
    "gemma4_text": _Reader(_read_gemma4, GEMMA4),
}
