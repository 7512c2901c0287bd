"""Rotary embeddings as a config.json states them: one for all layers, or one for each kind.

It refuses every scaling that rope.py does not make.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashdraft.errors import UnsupportedModelError, quoted
from flashdraft.models.config.keys import irrelevant
from flashdraft.models.config.values import POSITIVE, ConfigObject, Range, require

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
    "yarn": ("factor", _TRAINED_LENGTH),
}
_THETA = Range(1, math.inf)
_FACTOR = Range(1e-6, 1e9)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one layer kind."""

    theta: float
    head_dim: int
    rotary_dims: int  # dims beyond these do not rotate (Gemma 4's proportional RoPE)
    # llama3, yarn or linear, as (name, value) pairs; angles are the same for equal ones
    scaling: tuple[tuple[str, float], ...] = ()


def read_plain_rope(text: ConfigObject, head_dim: int, architecture: str) -> RopeConfig:
    """One rotary embedding for all layers, from either generation of config.json."""
    sections = [text.section(key) for key in ("rope_parameters", "rope_scaling")]
    theta = text.real("rope_theta", _THETA, 10000.0)
    trained = text.maybe_real(_TRAINED_LENGTH, POSITIVE)  # outside a section it has priority
    longest = text.maybe_real("max_position_embeddings", POSITIVE)
    _expect_whole_heads(text, architecture)
    found = [
        _rope(section, theta, head_dim, architecture, (trained, longest))
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
    section: ConfigObject,
    theta: float,
    head_dim: int,
    architecture: str,
    lengths: tuple[float | None, float | None] = (None, None),
) -> RopeConfig:
    """`lengths` are those that the whole config has: before scaling, and after it."""
    kind = section.word("rope_type", section.word("type", "default"))
    if kind not in _ROPE_VALUES:
        raise UnsupportedModelError(
            f"{architecture} uses RoPE scaling {quoted(kind)}; {', '.join(_ROPE_VALUES)} are "
            "supported."
        )
    _expect_whole_heads(section, architecture)
    trained, longest = lengths
    if kind == "yarn" and _TRAINED_LENGTH not in section and trained is None:
        trained = longest
    if trained is not None:
        section.raw(_TRAINED_LENGTH)
    values = {
        name: trained
        if name == _TRAINED_LENGTH and trained is not None
        else section.real(name, POSITIVE)
        for name in _ROPE_VALUES[kind]
    }
    if kind == "yarn":
        values |= _yarn_values(section, values["factor"])
    theta = section.real("rope_theta", _THETA, theta)
    if kind == "yarn":  # whose places between frequencies are logarithms to this base
        require(theta > 1, "rope_theta", theta, "above 1 where RoPE is scaled by yarn")
    section.finish(architecture, lambda key: key in _LLAMA3_VALUES, "config.json")
    return RopeConfig(theta, head_dim, head_dim, tuple(values.items()))


def _yarn_values(section: ConfigObject, factor: float) -> dict[str, float]:
    """What yarn (arXiv 2309.00071) has beside its factor; 0 is the same as nothing."""
    given = section.maybe_real("attention_factor", _FACTOR)
    scales = [section.real(key, Range(0, 1e9), 0.0) for key in ("mscale", "mscale_all_dim")]
    if given is None:
        given = _sharpness(factor, 1.0)
        if all(scales):
            given = _sharpness(factor, scales[0]) / _sharpness(factor, scales[1])
    return {
        "beta_fast": _beta(section, "beta_fast", 32.0),
        "beta_slow": _beta(section, "beta_slow", 1.0),
        "attention_factor": given,
        "truncate": float(section.flag("truncate", True)),
    }


def _beta(section: ConfigObject, key: str, default: float) -> float:
    """How often a pair of dimensions turns within the trained context, at one end of the blend."""
    return section.real(key, _FACTOR, default) if section.raw(key) else default


def _sharpness(factor: float, scale: float) -> float:
    """By how much queries and keys grow in a context that is so many times longer."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _expect_whole_heads(settings: ConfigObject, architecture: str) -> None:
    share = settings.real("partial_rotary_factor", Range(0, 1), 1.0)
    if share != 1.0:
        raise UnsupportedModelError(
            f"{architecture} rotates {share:g} of every head (partial_rotary_factor); only whole "
            "heads are supported."
        )


def read_gemma3_rope(text: ConfigObject, architecture: str, kind: str, head_dim: int) -> RopeConfig:
    """Gemma 3's rotary embedding of one kind of layers, from either generation of config.json."""
    key, usual = ("rope_theta", 1e6) if kind == FULL else ("rope_local_base_freq", 1e4)
    theta = text.real(key, _THETA, usual)
    every = text.section("rope_parameters")
    if every is None:
        section = text.section("rope_scaling") if kind == FULL else None
    else:
        section = every.section(kind)
        every.finish(architecture, lambda key: key in (FULL, SLIDING), "config.json")
    if section is None:
        return RopeConfig(theta, head_dim, head_dim)
    return _rope(section, theta, head_dim, architecture)


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
