"""What the configs of all families have in common: read once, for the readers of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flashdraft.errors import UnsupportedModelError, quoted
from flashdraft.models.config.keys import Reasons
from flashdraft.models.config.rope import FULL, SLIDING
from flashdraft.models.config.values import (
    LAYERS,
    VOCABULARY,
    WIDTH,
    ConfigObject,
    Range,
    is_whole,
    require,
    token_ids,
)

Fields = dict[str, Any]  # of a ModelConfig

_EPSILON = Range(0, 1)
SEES_LATER = (
    "its tokens see later ones, so it cannot write an answer token by token. Use a model for "
    "generation."
)
# what stands for pictures, sounds and films in a prompt; an answer has none of them
_MEDIA_TOKEN = re.compile(
    r"(image|video|audio|vision|boi|eoi|boa|eoa|vision_start|vision_end)_token_(id|index)"
)


class Common(NamedTuple):
    """What is read alike in every family."""

    model_type: str
    architecture: str
    num_layers: int
    intermediate_size: int
    fields: Fields


class Reader(NamedTuple):
    """How the configs of one model type are read, and which of their keys change nothing."""

    read: Callable[[ConfigObject, Common], Fields]
    irrelevant: Reasons
    defaults: Mapping[str, Any] = {}  # of keys that files of this type leave out


def read_common(
    whole: ConfigObject, text: ConfigObject, architecture: str, model_type: str
) -> Common:
    """The part of a config that no family reads in its own way."""
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
        "norm_eps": text.real("rms_norm_eps", _EPSILON, 1e-6),
        "tie_embeddings": ties.pop() if ties else None,
        "eos_token_ids": stops,
        "bos_token_id": bos[0] if bos else None,
        "forbidden_token_ids": _media_tokens(whole, text, vocab_size, stops),
    }
    if not text.flag("is_causal", True):
        raise UnsupportedModelError(f"{architecture} has is_causal = false: {SEES_LATER}")
    kinds = text.words("layer_types") or []
    num_layers = text.whole("num_hidden_layers", LAYERS, len(kinds) or None)
    require(num_layers <= LAYERS.most, "the number of layers", num_layers, str(LAYERS))
    inner = text.whole("intermediate_size", WIDTH)
    return Common(model_type, architecture, num_layers, inner, fields)


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


def layer_kinds(text: ConfigObject, num_layers: int, architecture: str) -> list[str] | None:
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


def expect_word(text: ConfigObject, architecture: str, key: str, only: str) -> None:
    """Refuse a word other than the only one that is done."""
    found = text.word(key, only)
    if found != only:
        raise UnsupportedModelError(
            f"{architecture} uses {key} {quoted(found)}; only {only} is supported."
        )
