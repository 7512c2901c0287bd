"""What one decoder layer is, and what all layers of a model have: experts, inputs of their own."""

from __future__ import annotations

from dataclasses import dataclass

from flashdraft.models.config.rope import RopeConfig


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    intermediate_size: int  # of its dense MLP; 0: it has experts alone
    window: int | None = None  # None = full attention
    share_kv: bool = False  # the value is the raw key projection; there is no v_proj
    kv_source: int | None = None  # the layer whose keys and values it reads; None: its own


@dataclass(frozen=True)
class PerLayerConfig:
    """What a token brings to every layer: a row of a table, for each layer a part of it."""

    width: int  # of the part for one layer
    pad_token: int  # whose row a picture has, which is no token


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of experts that every layer of the model has, beside its MLP or for it."""

    num_experts: int
    num_chosen: int
    intermediate_size: int
