"""The engine's settings. A default is written here and nowhere else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flashdraft.errors import RequestError

MAX_VERIFY = 15  # draft tokens one after another, per request and step
MAX_NODES = 63  # draft tokens of a tree, likewise
NODE_SIZES = (0, 15, 31, MAX_NODES)
MAX_BUFFERED = 256  # rows of taps a sequence may hold back before they are folded
OUT_OF_MEMORY = "The device ran out of memory; lower max_context, max_batch or cache_gb."
KV_DTYPES = ("auto", "fp8")
KV_KEYS = ("stored", "rebuilt")
_GPU_SIZES = {"max_batch": 32, "max_step_tokens": 4096, "prefill_chunk": 2048}

OFF = "off"  # what stands for no trees where they are named in a word
MAX_BATCH = 65536
MAX_CACHE_GB = 10**9


@dataclass(frozen=True)
class CacheOptions:
    """How large the cache of keys and values is, and what is stored in it."""

    cache_gb: float | None = None  # None = 1 GB on a CPU, most of a GPU's rest
    kv_dtype: str = "auto"  # of keys and values: the kernels' own, or 8-bit floats
    kv_keys: str = "stored"  # or made of the values as they are read, where a layer shares the two

    def __post_init__(self) -> None:
        size = self.cache_gb
        if size is not None and (type(size) not in (int, float) or not 0 < size <= MAX_CACHE_GB):
            limit = f"None or a number above 0, at most {MAX_CACHE_GB}"
            raise RequestError(f"cache_gb is {size!r}; it must be {limit}.")
        for name, known in (("kv_dtype", KV_DTYPES), ("kv_keys", KV_KEYS)):
            value = getattr(self, name)
            if value not in known:
                choices = " or ".join(map(repr, known))
                raise RequestError(f"{name} is {value!r}; it must be {choices}.")


DEFAULT_CACHE = CacheOptions()


def tree_settings(tree: str | int | None, drafter: str | None) -> dict[str, Any]:
    """EngineConfig's, for what users say of trees: None is nothing, and leaves it to the default.

    Refuses trees that nobody offers branches for.
    """
    if tree is None:
        return {}
    if tree != OFF and drafter is None:
        raise RequestError(
            f"tree is {tree!r}, but no drafter goes with this: lookups draft chains. Name "
            "one with draft, or leave out tree."
        )
    return {"tree": None if tree == OFF else tree}


@dataclass(frozen=True)
class EngineConfig:
    """How much runs at once and how drafting is decided; the sizes suit a CPU."""

    max_batch: int = 8  # sequences running at once; more of them wait
    max_context: int | None = None  # tokens; None = what the model and the cache allow
    cache: CacheOptions = DEFAULT_CACHE
    page_size: int = 16
    max_step_tokens: int = 512
    prefill_chunk: int = 256  # of one prompt in a step
    prefix_cache: bool = True
    verify: int | None = None  # a fixed verify length; None = chosen from measured costs
    tree: int | str | None = None  # draft tokens of a tree; "auto" = as many as pay; None = chains
    ngram: bool = True  # propose what followed earlier, with or without a block drafter
    run_ahead: bool = False  # launch steps before the last is read; on a GPU always

    @classmethod
    def for_device(cls, device: str, **settings: Any) -> EngineConfig:
        """These settings, and for the others what suits a "cpu" or a "cuda" device."""
        if device == "cuda":  # thousands of rows take as long as reading the weights does
            settings = {**_GPU_SIZES, **settings}
        elif settings.get("tree") == "auto":  # every row takes its time: chains bring more for it
            settings = {**settings, "tree": None}
        return cls(**settings)

    def runs_ahead_on(self, device: str) -> bool:
        """Whether steps are launched before the last one is read; only these grow trees."""
        return device == "cuda" or self.run_ahead or self.tree is not None

    def __post_init__(self) -> None:
        self._require("max_batch", 1, MAX_BATCH, f"an integer of at least 1, at most {MAX_BATCH}")
        for name in ("page_size", "max_step_tokens", "prefill_chunk"):
            self._require(name, 1, math.inf, "an integer of at least 1")
        if self.max_context is not None:
            self._require("max_context", 2, math.inf, "None or an integer of at least 2")
        if self.verify is not None:
            limit = f"None ('auto') or an integer from 0 to {MAX_VERIFY}"
            self._require("verify", 0, MAX_VERIFY, limit)
        if self.tree is not None:
            if self.tree != "auto":
                limit = f"None ('off') or 'auto' or an integer from 1 to {MAX_NODES}"
                self._require("tree", 1, MAX_NODES, limit)
            if self.verify is not None:
                raise RequestError(
                    f"tree is {self.tree!r}, but a fixed verify length ({self.verify}) is a chain; "
                    "give one of them."
                )

    @property
    def fixed(self) -> int | None:
        """Draft tokens that everybody verifies in a step; None = the policy's choice."""
        return self.tree if isinstance(self.tree, int) else self.verify

    @property
    def most_nodes(self) -> int:
        """Columns for the nodes of a tree, which with the anchor fill tiles; 0 = chains."""
        wanted = MAX_NODES if self.tree == "auto" else int(self.tree or 0)
        return next(size for size in NODE_SIZES if size >= wanted)

    def _require(self, name: str, low: int, high: float, limit: str) -> None:
        value = getattr(self, name)
        if type(value) is not int or not low <= value <= high:
            raise RequestError(f"{name} is {value!r}; it must be {limit}.")
