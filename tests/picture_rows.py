"""Pictures among the rows of a pass: what every row sees, by the rule of pictures itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from flashdraft.kernels.interface import CAUSAL, BlockMask, Kernels, PagedKeys, PageView

Pictures = Sequence[tuple[int, int, int]]  # sequence, first row in it, number of rows


def see_pictures(rows: Sequence[int], pictures: Pictures) -> BlockMask:
    """What kernels are told, of sequences with so many rows."""
    ahead = torch.zeros(sum(rows), dtype=torch.int32)
    for s, first, count in pictures:
        start = sum(rows[:s]) + first
        ahead[start : start + count] = torch.arange(count - 1, -1, -1)
    return BlockMask(ahead=ahead)


def find_seen(
    s: int, rows: int, context: int, pictures: Pictures, window: int | None, is_even: bool = False
) -> Tensor:
    """[rows, context + rows] bool: (in order or in one picture) and within the window.

    `is_even` is the wrong rule by which a window hides as much ahead as it does behind.
    """
    picture = torch.full((context + rows,), -1)
    for number, (owner, first, count) in enumerate(pictures):
        if owner == s:
            picture[context + first : context + first + count] = number
    own, key = torch.arange(context, context + rows).unsqueeze(1), torch.arange(context + rows)
    seen = (key <= own) | ((picture[own] == picture) & (picture[own] >= 0))
    if window is None:
        return seen
    return seen & (own - key < window) & ((key - own < window) | (not is_even))


def attend_densely(query: Tensor, keys: PagedKeys, seen: Sequence[Tensor]) -> Tensor:
    """torch's attention in float32, each sequence under its dense mask."""
    assert keys.key_cache is not None
    view, outputs = keys.view, []
    starts = view.query_start.tolist()
    for s, mask in enumerate(seen):
        rows, index = query[starts[s] : starts[s + 1]].float(), torch.arange(mask.shape[1])
        table = view.block_table[s].clamp(0, len(keys.key_cache) - 1)  # some are stale
        pages = table[index // view.page_size].long()
        found, values = (
            cache[pages, index % view.page_size].float().nan_to_num().transpose(0, 1)
            for cache in (keys.key_cache, keys.value_cache)
        )
        group = query.shape[1] // len(found)
        mixed = F.scaled_dot_product_attention(
            rows.transpose(0, 1),
            found.repeat_interleave(group, 0),
            values.repeat_interleave(group, 0),
            attn_mask=mask,
            scale=keys.scale,
        )
        outputs.append(mixed.transpose(0, 1).flatten(1))
    return torch.cat(outputs)


class PagedCase(Protocol):
    """Rows and earlier keys of every sequence, the window, and how large everything is."""

    @property
    def lengths(self) -> Sequence[tuple[int, int]]: ...

    @property
    def window(self) -> int | None: ...

    @property
    def heads(self) -> tuple[int, int]: ...

    @property
    def dim(self) -> int: ...

    @property
    def page_size(self) -> int: ...


@dataclass(frozen=True)
class Case:
    """Rows and earlier keys of every sequence, its pictures, and the window."""

    lengths: Sequence[tuple[int, int]]
    pictures: Pictures
    window: int | None
    heads: tuple[int, int] = (4, 2)
    dim: int = 16
    page_size: int = 8


CASES = {
    "at the beginning": Case([(12, 0)], [(0, 0, 7)], 5),
    "in the middle": Case([(40, 0)], [(0, 9, 17)], 30),
    "at the end": Case([(25, 6)], [(0, 11, 14)], 20),
    "everything": Case([(35, 0)], [(0, 0, 35)], 50),
    "two, markers between": Case([(50, 3)], [(0, 5, 16), (0, 23, 20)], 24, page_size=16),
    "one right behind the other": Case([(50, 3)], [(0, 5, 16), (0, 21, 20)], 24),
    "longer than the window": Case([(70, 20)], [(0, 10, 50)], 16, page_size=32),
    "of one row": Case([(9, 4)], [(0, 3, 1)], 6),
    "no window": Case([(30, 9)], [(0, 4, 20)], None, page_size=1),
    "a window of one": Case([(20, 3)], [(0, 4, 12)], 1),
    "beside others": Case(
        [(1, 40), (45, 0), (0, 3), (16, 33), (30, 9), (1, 0)],
        [(1, 2, 20), (1, 24, 19), (4, 20, 10)],
        18,
    ),
    "many heads of a key": Case([(33, 7), (2, 9)], [(0, 1, 24)], 12, heads=(40, 1), dim=6),
    "no groups": Case([(33, 7), (2, 9)], [(0, 1, 24)], 12, heads=(3, 3), dim=64),
}


class PagedBatch:
    """A case's sequences in shuffled pages. What lies behind the window has no page."""

    def __init__(self, case: PagedCase, mask: BlockMask, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.shape, self.rows, self.mask = case, [rows for rows, _ in case.lengths], mask
        self.query = torch.randn(sum(self.rows), case.heads[0], case.dim)
        counts = [-(-sum(pair) // case.page_size) for pair in case.lengths]
        self.caches = torch.randn(2, sum(counts) + 3, case.page_size, case.heads[1], case.dim)
        free = torch.randperm(sum(counts) + 3).int()
        self.table = torch.full((len(counts), max(counts)), -7, dtype=torch.int32)
        for s, count in enumerate(counts):
            stale = max(0, case.lengths[s][1] + 1 - (case.window or 10**6)) // case.page_size
            self.table[s, stale:count], free = free[stale:count], free[count:]

    def keys(self, mask: BlockMask) -> PagedKeys:
        case, starts = self.shape, torch.tensor([0, *self.rows]).cumsum(0).int()
        contexts = [context for _, context in case.lengths]
        slots = torch.zeros(len(self.query), dtype=torch.int64)  # attention does not read them
        sizes = case.page_size, max(self.rows), max(map(sum, case.lengths))
        tables = starts, torch.tensor(contexts, dtype=torch.int32), self.table
        view = PageView(*tables, slots, *sizes)
        return PagedKeys(*self.caches, view, case.dim**-0.5, case.window, mask)

    def attend(self, kernels: Kernels, mask: BlockMask | None = None) -> Tensor:
        return kernels.attention(self.query, self.keys(mask or self.mask))


class Batch(PagedBatch):
    """Sequences with pictures."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, see_pictures([rows for rows, _ in case.lengths], case.pictures))
        self.case = case

    def expect(self, pictures: Pictures, is_even: bool = False) -> Tensor:
        lengths, window = self.case.lengths, self.case.window
        return attend_densely(
            self.query,
            self.keys(CAUSAL),
            [
                find_seen(s, *pair, pictures, window, is_even=is_even)
                for s, pair in enumerate(lengths)
            ],
        )


def are_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=3e-6)
