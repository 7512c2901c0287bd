"""The key/value cache's storage: pools of pages for the target's and the drafter's layers.

Layers with the same window share one pool, so one page table serves them all, and a page holds the
target's and the drafter's keys and values of the same tokens. Who holds which page is pages.py's
business and how many there are planning.py's; this module owns the tensors and builds the views
that kernels read.

With kv_dtype "fp8" both models' keys and values are stored as float8_e4m3fn: half the bytes of
bfloat16, three bits of mantissa, +-448 for anything beyond. There are no scales. Gemma 4 needs
none: its keys and values are normed per head, so that the weights of the norms bound them, whatever
the text. Other families norm no values (nor Llama its keys): what they project beyond 448 is cut
off and what is below 2^-10 is lost. Every row is attended through what was stored of it, the step's
own rows too, so drafted and plain text are equal as ever: both are that of the target with this
cache, which is not that of the target with another.

With kv_keys "rebuilt" the layers of a target that share one projection for key and value (Gemma 4's
full layers) keep the value alone: half the bytes there. Attention makes the keys as it reads, as
RoPE(k_norm's weight * value). In float32 on a CPU they are the very keys that would have been
stored; in bfloat16 the value was rounded once before, and in fp8 the key is made of the rounded
value and not itself rounded to 8 bits. Again drafted and plain text are equal, and are that of the
target with this cache. The drafter's layers share nothing and keep both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashdraft.engine.cache.layers import CacheLayer, bytes_per_token, shares_keys
from flashdraft.engine.cache.pages import PageBook, Pool
from flashdraft.engine.sequence import Sequence as RunningSequence
from flashdraft.errors import CapacityError, RequestError
from flashdraft.kernels.interface import Kernels, PageView
from flashdraft.kernels.settle import PagedTensor
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.layers import LayerCache


@dataclass(frozen=True)
class Span:
    """Rows of one sequence in a forward pass: positions start .. start + count - 1."""

    sequence: RunningSequence
    start: int
    count: int


@dataclass(frozen=True)
class Rows:
    """A forward pass's rows: their positions, and one view per pool."""

    positions: Tensor
    end_position: int
    views: list[PageView]
    offsets: list[int]  # where each span's rows begin; one more entry than spans


class KVCache:
    """Pages of keys and values for a list of layers."""

    def __init__(
        self,
        layers: Sequence[CacheLayer],
        pages: dict[int | None, int],
        page_size: int,
        kernels: Kernels,
        dtype: torch.dtype | None = None,  # the kernels' own
    ) -> None:
        self.page_size = page_size
        self.windows = list(pages)  # one pool each, in this order
        self._pool_of = [self.windows.index(layer.window) for layer in layers]
        self._device = kernels.device
        self._storage: list[tuple[Tensor | None, Tensor]] = []  # keys and values
        try:
            for layer in layers:
                # one more: the page that rows of nobody are written to
                heads = (pages[layer.window] + 1, page_size, layer.num_kv_heads, layer.head_dim)
                shape = (layer.num_tensors, *heads)
                # zeros, not empty: a masked key must never be NaN
                one = torch.zeros(shape, device=kernels.device, dtype=dtype or kernels.dtype)
                self._storage.append((one[0] if layer.has_keys else None, one[-1]))
        except (RuntimeError, MemoryError) as error:
            counts = bytes_per_token(layers, dtype or kernels.dtype)
            size = sum(count * page_size * counts[window] for window, count in pages.items())
            raise CapacityError(
                f"The key/value cache does not fit in memory (it takes {size / 10**9:.3f} GB); "
                "lower cache_gb, max_context or max_batch."
            ) from error
        self.book_pools = [Pool(pages[window], window) for window in self.windows]
        self.scratch_pages = [pages[window] for window in self.windows]

    @property
    def stored(self) -> list[PagedTensor]:
        """All keys and values there are."""
        pairs = zip(self._storage, self._pool_of, strict=True)
        return [PagedTensor(one, pool) for both, pool in pairs for one in both if one is not None]

    def rows(self, book: PageBook, spans: Sequence[Span]) -> Rows:
        """Positions and views for the rows of these spans, in order."""
        counts = [span.count for span in spans]
        starts = np.asarray([span.start for span in spans])
        ranges = [np.arange(s.start, s.start + s.count, dtype=np.int64) for s in spans]
        positions = np.concatenate(ranges)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        owner = np.repeat(np.arange(len(spans)), counts)
        tables, slots = [], []
        for pool in range(len(self.windows)):
            each = [np.frombuffer(book.table(s.sequence, pool), dtype=np.int32) for s in spans]
            merged = np.zeros((len(spans), max(len(table) for table in each)), dtype=np.int32)
            for row, table in zip(merged, each, strict=True):
                row[: len(table)] = table
            page = merged[owner, positions // self.page_size].astype(np.int64)
            tables.append(self._int32(merged))
            place = page * self.page_size + positions % self.page_size
            slots.append(torch.from_numpy(place).to(self._device))
        end = int((starts + counts).max())
        views = self.views(
            self._int32(offsets), self._int32(starts), tables, slots, max(counts), end
        )
        placed = torch.from_numpy(positions).to(self._device)
        return Rows(placed, end, views, offsets.tolist())

    def views(
        self,
        query_start: Tensor,
        context_lens: Tensor,
        tables: Iterable[Tensor],
        slots: Iterable[Tensor],
        max_query_len: int,
        max_key_len: int,
    ) -> list[PageView]:
        """One view per pool, of its table and its slots."""
        return [
            PageView(
                query_start=query_start,
                context_lens=context_lens,
                block_table=table,
                slots=place,
                page_size=self.page_size,
                max_query_len=max_query_len,
                max_key_len=max_key_len,
            )
            for table, place in zip(tables, slots, strict=True)
        ]

    def layers(self, views: Sequence[PageView], first: int, last: int) -> list[LayerCache]:
        """Storage and view of layers first .. last - 1."""
        return [
            LayerCache(*self._storage[index], views[self._pool_of[index]])
            for index in range(first, last)
        ]

    def _int32(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values.astype(np.int32, copy=False)).to(self._device)


def stored_dtype(kernels: Kernels, kv_dtype: str) -> torch.dtype:
    """What keys and values are stored as; refuses what the kernels cannot read."""
    if kv_dtype == "auto":
        return kernels.dtype
    if kernels.why_no_fp8_cache is not None:
        why = kernels.why_no_fp8_cache
        raise RequestError(f"kv_dtype is 'fp8', but {why}; or use kv_dtype='auto'.")
    return torch.float8_e4m3fn


def check_keys(kernels: Kernels, kv_keys: str, target: ModelConfig | None = None) -> None:
    """Refuse to rebuild keys where the kernels cannot, or the target, once known, shares none."""
    if kv_keys == "stored":
        return
    missing = kernels.why_no_rebuilt_keys
    if target is not None and not shares_keys(target):
        missing = (
            f"{target.architecture} has a projection of its own for values, of which no key can "
            "be made (Gemma 4's full layers share one);"
        )
    if missing is not None:
        raise RequestError(f"kv_keys is 'rebuilt', but {missing} use kv_keys='stored'.")
