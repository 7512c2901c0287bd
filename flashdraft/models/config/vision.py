"""What a vision tower is, read from the vision_config of a Hugging Face config.json.

A tower that cannot be run takes nothing from the text: its model is read without it, and keeps the
reason for those who send pictures. Where a key is missing, transformers' default holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from flashdraft.errors import UnsupportedModelError, quoted
from flashdraft.models.config.keys import VISION, irrelevant
from flashdraft.models.config.values import (
    HEADS,
    LAYERS,
    WIDTH,
    ConfigObject,
    InvalidConfigError,
    Range,
    require,
)

NO_TOWER = (
    "It has no vision tower (its config has no vision_config; a GGUF model's is an mmproj file "
    "beside it)."
)
LIMITS = ("input_min", "input_max", "output_min", "output_max")  # beside a clipped tower's matrix
_TYPE = "gemma4_vision"
_ACTIVATION = "gelu_pytorch_tanh"
_ROPES = ("default", "axial")  # two names of one thing
_SIZE = Range(1, 65_536)
_BUDGET = Range(1, 65_536)
# of the whole config; others ask for the ids of media tokens
_OUTER = re.compile(r"(vision|image|video|mm|multimodal|projector|media)_\w+")


@dataclass(frozen=True)
class VisionTokens:
    """What stands for a picture in a prompt: begin, a placeholder for every feature, end."""

    begin: int
    picture: int
    end: int
    video: int | None = None  # the placeholder in frames of films


@dataclass(frozen=True)
class VisionConfig:
    """A tower of transformer layers over patches, whose output is pooled and projected."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    patch_size: int  # pixels
    pooling: int  # patches of a cell, along each side; a cell is one token of the prompt
    num_positions: int  # along each side
    rope_theta: float
    norm_eps: float
    standardize: bool
    clipped: bool  # what goes into a layer's matrices, and comes out, has limits
    default_budget: int  # of tokens for a picture
    tokens: VisionTokens

    @property
    def cell(self) -> int:
        """Pixels along each side of what becomes one token."""
        return self.patch_size * self.pooling


class FoundTower(NamedTuple):
    """A tower, or why there is none, in sentences."""

    config: VisionConfig | None
    why_none: str | None


def read_vision(whole: ConfigObject, architecture: str, vocab_size: int) -> FoundTower:
    """The tower of a config.json, once its text model is read."""
    try:
        section = whole.section("vision_config")
        if section is None:
            return FoundTower(None, NO_TOWER)
        return FoundTower(_read_tower(whole, section, architecture, vocab_size), None)
    except (UnsupportedModelError, InvalidConfigError) as error:
        return FoundTower(None, str(error))


def _read_tower(
    whole: ConfigObject, section: ConfigObject, architecture: str, vocab_size: int
) -> VisionConfig:
    kind = section.raw("model_type")
    if whole.raw("model_type") != "gemma4" or kind not in (_TYPE, None):
        raise UnsupportedModelError(
            f"{architecture} has a vision tower of type {quoted(kind)}; flashdraft runs only "
            f"Gemma 4's ({_TYPE}, in a model of type gemma4)."
        )
    heads = section.whole("num_attention_heads", HEADS, 12)
    head_dim = section.whole("head_dim", WIDTH, 64)
    require(head_dim % 4 == 0, "vision_config.head_dim", head_dim, "a multiple of 4")
    _refuse_others(section, architecture, heads, head_dim)
    tower = VisionConfig(
        hidden_size=section.whole("hidden_size", WIDTH, 768),
        intermediate_size=section.whole("intermediate_size", WIDTH, 3072),
        num_layers=section.whole("num_hidden_layers", LAYERS, 16),
        num_heads=heads,
        head_dim=head_dim,
        patch_size=section.whole("patch_size", _SIZE, 16),
        pooling=section.whole("pooling_kernel_size", _SIZE, 3),
        num_positions=section.whole("position_embedding_size", WIDTH, 10_240),
        rope_theta=_read_theta(section, architecture),
        norm_eps=section.real("rms_norm_eps", Range(0, 1), 1e-6),
        standardize=section.flag("standardize"),
        clipped=section.flag("use_clipped_linears"),
        default_budget=_read_budget(whole, section),
        tokens=_read_tokens(whole, vocab_size),
    )
    section.finish(architecture, irrelevant(VISION), "config.json")
    for key, value in whole.unasked().items():
        if value and _OUTER.fullmatch(key) and key != "video_config":
            raise UnsupportedModelError(
                f"{architecture} has {quoted(key)} = {quoted(value)} in its config.json; "
                "flashdraft does not know what it changes about pictures."
            )
    return tower


def _refuse_others(section: ConfigObject, architecture: str, num_heads: int, head_dim: int) -> None:
    """Raise for what other towers do."""
    only = {
        "num_key_value_heads": (section.whole("num_key_value_heads", HEADS, 12), num_heads),
        "global_head_dim": (section.whole("global_head_dim", WIDTH, head_dim), head_dim),
        "hidden_activation": (section.word("hidden_activation", _ACTIVATION), _ACTIVATION),
        "attention_bias": (section.flag("attention_bias"), False),
    }
    for key, (found, wanted) in only.items():
        if found != wanted:
            raise UnsupportedModelError(
                f"The vision tower of {architecture} has {key} = {quoted(found)}; flashdraft runs "
                f"only towers with {quoted(wanted)}."
            )


def _read_theta(section: ConfigObject, architecture: str) -> float:
    rope = section.section("rope_parameters") or ConfigObject({}, "vision_config.rope_parameters")
    kind = rope.word("rope_type", "default")
    if kind not in _ROPES:
        raise UnsupportedModelError(
            f"The vision tower of {architecture} uses RoPE of type {quoted(kind)}; "
            f"{' and '.join(_ROPES)} are supported."
        )
    theta = rope.real("rope_theta", Range(1, 1e12), 100.0)
    rope.finish(architecture, irrelevant(), "config.json")
    return theta


def _read_budget(whole: ConfigObject, section: ConfigObject) -> int:
    """The whole config's word goes before the tower's own."""
    own = section.whole("default_output_length", _BUDGET, 280)
    return whole.whole("vision_soft_tokens_per_image", _BUDGET, own)


def _read_tokens(whole: ConfigObject, vocab_size: int) -> VisionTokens:
    ids = {
        key: whole.whole(key, Range(0, WIDTH.most), default)
        for key, default in (
            ("boi_token_id", 255_999),
            ("image_token_id", 258_880),
            ("eoi_token_id", 258_882),
        )
    }
    for key, token in ids.items():
        require(token < vocab_size, key, token, f"below the vocabulary's size of {vocab_size}")
    begin, picture, end = ids.values()
    is_apart = len({begin, picture, end}) == 3
    require(is_apart, ", ".join(ids), list(ids.values()), "three different tokens")
    video = whole.maybe_whole("video_token_id", Range(0, vocab_size - 1))
    return VisionTokens(begin, picture, end, video)
