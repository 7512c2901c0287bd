"""Rotary embeddings as a config.json states them: one for all layers, or one for each kind.

It refuses every scaling that rope.py does not make.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashdraft.errors import UnsupportedModelError, quoted
from flashdraft.models.config.keys import irrelevant
from flashdraft.models.config.values import POSITIVE, ConfigObject, Range

FULL, SLIDING = "full_attention", "sliding_attention"
_TRAINED_LENGTH = "original_max_position_embeddings"
_LLAMA3_VALUES = (
    "factor",
    "high_freq_factor",
    "low_freq_factor",
    _TRAINED_LENGTH,
)
_ROPE_VALUES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": _LLAMA3_VALUES,
}
_THETA = Range(1, math.inf)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one layer kind."""

    theta: float
    head_dim: int
    rotary_dims: int  # dims beyond these do not rotate (Gemma 4's proportional RoPE)
    scaling: tuple[tuple[str, float], ...] = ()  # llama3 or linear, as (name, value) pairs


def read_plain_rope(text: ConfigObject, head_dim: int, architecture: str) -> RopeConfig:
    """One rotary embedding for all layers, from either generation of config.json."""
    sections = [text.section(key) for key in ("rope_parameters", "rope_scaling")]
    theta = text.real("rope_theta", _THETA, 10000.0)
    trained = text.maybe_real(_TRAINED_LENGTH, POSITIVE)  # outside a section it has priority
    _expect_whole_heads(text, architecture)
    found = [
        _rope(section, theta, head_dim, architecture, trained)
        for section in sections
        if section is not None and section.names()
    ]
    if len(set(found)) > 1:
        raise UnsupportedModelError(
            f"{architecture} has both rope_parameters and rope_scaling, and they differ. Keep the "
            "one that holds."
        )
    return found[0] if found else RopeConfig(theta, head_dim, head_dim)


def _rope(
    section: ConfigObject, theta: float, head_dim: int, architecture: str, trained: float | None
) -> RopeConfig:
    kind = section.word("rope_type", section.word("type", "default"))
    if kind not in _ROPE_VALUES:
        raise UnsupportedModelError(
            f"{architecture} uses RoPE scaling {quoted(kind)}; {', '.join(_ROPE_VALUES)} are "
            "supported."
        )
    _expect_whole_heads(section, architecture)
    values = {name: section.real(name, POSITIVE) for name in _ROPE_VALUES[kind]}
    if trained is not None and _TRAINED_LENGTH in values:
        values[_TRAINED_LENGTH] = trained
    theta = section.real("rope_theta", _THETA, theta)
    section.finish(architecture, lambda key: key in _LLAMA3_VALUES, "config.json")
    return RopeConfig(theta, head_dim, head_dim, tuple(values.items()))


def _expect_whole_heads(settings: ConfigObject, architecture: str) -> None:
    share = settings.real("partial_rotary_factor", Range(0, 1), 1.0)
    if share != 1.0:
        raise UnsupportedModelError(
            f"{architecture} rotates {share:g} of every head (partial_rotary_factor); only whole "
            "heads are supported."
        )


def read_gemma4_rope(text: ConfigObject, architecture: str, kind: str, head_dim: int) -> RopeConfig:
    """Gemma 4's rotary embedding of one kind of layers."""
    every = text.section("rope_parameters") or ConfigObject({}, "rope_parameters")
    section = every.section(kind) or ConfigObject({}, f"rope_parameters.{kind}")
    every.finish(architecture, lambda key: key in (FULL, SLIDING), "config.json")
    theta = section.real("rope_theta", _THETA)
    rope_type = section.word("rope_type", "default")
    if rope_type == "default":
        _expect_whole_heads(section, architecture)
    elif rope_type != "proportional":
        raise UnsupportedModelError(
            f"{architecture} uses RoPE scaling {quoted(rope_type)}; default and proportional are "
            "supported in Gemma 4."
        )
    share = section.real("partial_rotary_factor", Range(0, 1), 1.0)
    factor = section.real("factor", POSITIVE, 1.0)
    section.finish(architecture, irrelevant(), "config.json")
    scaling = (("factor", factor),) if rope_type == "proportional" and factor != 1.0 else ()
    return RopeConfig(theta, head_dim, 2 * int(share * head_dim // 2), scaling)
