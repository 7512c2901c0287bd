"""What each layer keeps of a token in the cache, and what that takes. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flashdraft.engine.config import CacheOptions
from flashdraft.models.config.layers import LayerConfig
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.config import DrafterConfig


class ValueType(Protocol):
    """How a key's or a value's numbers are stored: a dtype of torch, or what stands for one."""

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        ...


@dataclass(frozen=True)
class CacheLayer:
    """What one layer keeps per token."""

    num_kv_heads: int
    head_dim: int
    window: int | None
    has_keys: bool = True  # False: they are made of the values

    @classmethod
    def of(cls, layer: LayerConfig, kv_keys: str) -> CacheLayer:
        """A target's layer, with its keys stored or, where they can be, rebuilt."""
        is_rebuilt = layer.share_kv and kv_keys == "rebuilt"
        return cls(layer.num_kv_heads, layer.head_dim, layer.window, not is_rebuilt)

    @property
    def num_tensors(self) -> int:
        return 2 if self.has_keys else 1


def shares_keys(target: ModelConfig) -> bool:
    """Whether a target has layers whose keys can be made of their values."""
    return any(layer.share_kv for layer in target.layers)


def cache_layers(
    target: ModelConfig, drafter: DrafterConfig | None, kv_keys: str = CacheOptions.kv_keys
) -> list[CacheLayer]:
    """The target's layers that keep anything, then the drafter's."""
    layers = [CacheLayer.of(layer, kv_keys) for layer in target.cached_layers]
    if drafter is not None:
        layers += [CacheLayer(drafter.num_kv_heads, drafter.head_dim, w) for w in drafter.windows]
    return layers


def bytes_per_token(layers: Sequence[CacheLayer], dtype: ValueType) -> dict[int | None, int]:
    """Bytes one token takes in each pool, by window."""
    totals: dict[int | None, int] = {}
    for layer in layers:
        size = layer.num_tensors * layer.num_kv_heads * layer.head_dim * dtype.itemsize
        totals[layer.window] = totals.get(layer.window, 0) + size
    return totals
