"""The engine's settings. A default is written here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

from flashdraft.errors import RequestError


@dataclass(frozen=True)
class EngineConfig:
    """How much runs at once and how drafting is decided."""

    max_batch: int = 8  # sequences running at once; more of them wait
    max_context: int | None = None  # tokens; None = what the model and the cache allow
    cache_gb: float | None = None  # of keys and values; None = 1 GB on a CPU, most of a GPU's rest
    page_size: int = 16
    max_step_tokens: int = 512
    prefill_chunk: int = 256
    prefix_cache: bool = True
    verify: int | None = None  # a fixed verify length; None = chosen from measured costs
    ngram: bool = True  # propose what followed earlier, with or without a block drafter

    def __post_init__(self) -> None:
        for name in ("max_batch", "page_size", "max_step_tokens", "prefill_chunk"):
            value = getattr(self, name)
            if value < 1:
                raise RequestError(f"{name} is {value}; it must be at least 1.")
        if self.max_context is not None and self.max_context < 2:
            raise RequestError(f"max_context is {self.max_context}; it must be at least 2.")
        if self.cache_gb is not None and not self.cache_gb > 0:
            raise RequestError(f"cache_gb is {self.cache_gb}; it must be above 0.")
        if self.verify is not None and not 0 <= self.verify <= 63:
            raise RequestError(f"verify is {self.verify}; it must be 'auto' or 0 to 63.")
