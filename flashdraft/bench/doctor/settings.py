"""What doctor is asked: which pair, in which mode, and for how long. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from flashdraft.engine.config import DEFAULT_CACHE, CacheOptions, EngineConfig
from flashdraft.kernels.kinds import AS_STORED, WeightOptions


@dataclass(frozen=True)
class Mode:
    """How the pair is asked: what a user can get wrong without touching a file."""

    thinking: bool = False
    temperature: float = 0.0
    template: str | None = None  # its text; None = the checkpoint's own


@dataclass(frozen=True)
class Settings:
    """Which pair is examined, how it is asked, and for how long."""

    model: str
    draft: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    mode: Mode = Mode()
    seconds: float = 30.0  # once the pair is loaded; what is under way is not cut
    weights: WeightOptions = AS_STORED
    cache: CacheOptions = DEFAULT_CACHE
    tree: str | int | None = EngineConfig.tree
