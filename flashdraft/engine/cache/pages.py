"""Page bookkeeping: who holds which page of the cache, and which pages hold which prefix. No torch.

The cache is a few pools of pages of equal token count. A pool without a window keeps every token of
a sequence; a pool with a window gives pages back once no later token can see them. All pools move
together: a sequence has room for a token in all of them or in none. Storage lives in storage.py.

What is written for a picture's tokens depends on all of the picture, and its tokens say nothing of
it: its key is part of the content of every page that it touches, and nobody begins inside of it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from flashdraft.core import PlacedPicture

DIGEST_SIZE = 32  # bytes
NO_PAGE = -1  # stands in a page table where a windowed pool has given the page back


class Pool:
    """One pool: free pages, held pages, and released pages whose content may be found again."""

    def __init__(self, num_pages: int, window: int | None) -> None:
        self.num_pages = num_pages
        self.window = window
        self._holders = [0] * num_pages
        self._digest_of: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._free = deque(range(num_pages))
        self._cached: OrderedDict[int, None] = OrderedDict()  # released, findable; oldest first

    @property
    def num_available(self) -> int:
        """Pages that can be handed out now, forgetting cached ones if need be."""
        return len(self._free) + len(self._cached)

    def allocate(self) -> int:
        """Hand out a page: a blank one, else the longest unused cached one."""
        if self._free:
            page = self._free.popleft()
        else:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
        self._holders[page] = 1
        return page

    def first_missing(self, digests: Iterable[bytes]) -> int | None:
        """The place of the first of these prefixes whose last page is not there."""
        known = self._page_of
        return next((i for i, digest in enumerate(digests) if digest not in known), None)

    def share(self, digests: Iterable[bytes]) -> list[int]:
        """Take one more hold of the last page of each of these prefixes; all must be there."""
        pages = [self._page_of[digest] for digest in digests]
        for page in pages:
            if self._holders[page] == 0:
                del self._cached[page]
            self._holders[page] += 1
        return pages

    def publish(self, page: int, digest: bytes) -> None:
        """Make a complete page findable, unless another page with the same content already is."""
        if self._digest_of[page] is None and digest not in self._page_of:
            self._digest_of[page] = digest
            self._page_of[digest] = page

    def release(self, pages: Iterable[int]) -> None:
        """Give up one hold of each of these pages; the first ones are forgotten first."""
        for page in pages:
            if page == NO_PAGE:
                continue
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if self._digest_of[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None

    def forget_cached(self) -> None:
        """Drop every cached page that nobody holds."""
        for page in self._cached:
            self._forget(page)
            self._free.append(page)
        self._cached.clear()

    def _forget(self, page: int) -> None:
        digest = self._digest_of[page]
        if digest is not None:
            del self._page_of[digest]
            self._digest_of[page] = None

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless every page is free, cached or held, as counted by `held`."""
        counts = [0] * self.num_pages
        for page in held:
            counts[page] += 1
        assert counts == self._holders, "holders do not match the page tables"
        idle = list(self._free) + list(self._cached)
        assert len(idle) == len(set(idle)), "a page is listed twice"
        assert set(idle) == {p for p, n in enumerate(counts) if n == 0}, "a page leaked"
        named = {d: p for p, d in enumerate(self._digest_of) if d is not None}
        assert named == self._page_of, "the prefix index is out of step"
        assert all(self._digest_of[p] is None for p in self._free), "a free page is findable"
        assert all(self._digest_of[p] is not None for p in self._cached), "a cached page is not"


@dataclass
class _Holding:
    """What one sequence holds."""

    tokens: Sequence[int]  # the caller's own list: it only grows
    digests: list[bytes]  # of its first pages, as many as were asked for yet
    tables: list[array[int]]  # one per pool
    num_published: int  # complete pages that were offered to later sequences, from the start
    pictures: Sequence[PlacedPicture] = ()


class PageBook:
    """The page tables of all sequences over all pools."""

    def __init__(
        self, pools: Sequence[Pool], page_size: int, use_prefix_cache: bool = True
    ) -> None:
        self.pools = list(pools)
        self.page_size = page_size
        self._use_prefix_cache = use_prefix_cache
        self._holdings: dict[Hashable, _Holding] = {}
        # a prompt that waits for room is opened and closed every step: its digests are kept
        self._last_closed: _Holding | None = None

    def __contains__(self, owner: Hashable) -> bool:
        return owner in self._holdings

    def table(self, owner: Hashable, pool_index: int) -> array[int]:
        """The sequence's page table in one pool (read only)."""
        return self._holdings[owner].tables[pool_index]

    def open(
        self,
        owner: Hashable,
        tokens: Sequence[int],
        most: int | None = None,
        pictures: Sequence[PlacedPicture] = (),
    ) -> int:
        """Begin a sequence on whatever prefix of `tokens` is cached; return that prefix's length.

        It is no longer than `most`, ends outside of pictures, and at least the last token is left
        to compute. A hit needs every page of the pools without a window and, in each pool with one,
        the pages that the next token can still see. The list `tokens` is remembered: append to it
        as you like, but change nothing that is in it.
        """
        assert owner not in self._holdings
        last, num_pages = self._last_closed, 0
        digests = last.digests if last is not None and last.tokens is tokens else []
        if self._use_prefix_cache:
            longest = len(tokens) - 1 if most is None else min(most, len(tokens) - 1)
            most_pages = longest // self.page_size
            self._extend_digests(digests, tokens, most_pages, pictures)
            num_pages = self._longest_hit(digests[:most_pages], pictures)
        tables = []
        for pool in self.pools:
            first = self._first_visible_page(pool, num_pages * self.page_size)
            table = array("i", [NO_PAGE]) * first
            table.extend(pool.share(digests[first:num_pages]))
            tables.append(table)
        self._holdings[owner] = _Holding(tokens, digests, tables, num_pages, pictures)
        return num_pages * self.page_size

    def reserve(self, owner: Hashable, length: int, window_length: int | None = None) -> bool:
        """Make room for `length` tokens (pools with a window: `window_length`), all or nothing."""
        holding = self._holdings[owner]
        wanted = [self._missing(holding, i, length, window_length) for i in range(len(self.pools))]
        if any(n > pool.num_available for n, pool in zip(wanted, self.pools, strict=True)):
            return False
        for n, pool, table in zip(wanted, self.pools, holding.tables, strict=True):
            table.extend(pool.allocate() for _ in range(n))
        return True

    def _missing(
        self, holding: _Holding, pool_index: int, length: int, window_length: int | None
    ) -> int:
        if self.pools[pool_index].window is not None and window_length is not None:
            length = window_length
        return max(0, self._pages_for(length) - len(holding.tables[pool_index]))

    def truncate(self, owner: Hashable, length: int) -> None:
        """Forget every token from `length` on: the only way back."""
        holding = self._holdings[owner]
        keep = self._pages_for(length)
        assert holding.num_published * self.page_size <= length, "cannot cut into shared pages"
        for pool, table in zip(self.pools, holding.tables, strict=True):
            first = self._first_visible_page(pool, length)
            assert NO_PAGE not in table[first:keep], "cannot go back behind a window given back"
            pool.release(table[keep:])
            del table[keep:]

    def publish(self, owner: Hashable, tokens: Sequence[int], length: int) -> None:
        """Make the pages complete for tokens[:length] findable by later sequences."""
        holding = self._holdings[owner]
        assert self._outside(holding.pictures, length) == length, "half a picture is written"
        complete = length // self.page_size
        if not self._use_prefix_cache or complete <= holding.num_published:
            return
        self._extend_digests(holding.digests, tokens, complete, holding.pictures)
        for index in range(holding.num_published, complete):
            for pool, table in zip(self.pools, holding.tables, strict=True):
                if table[index] != NO_PAGE:
                    pool.publish(table[index], holding.digests[index])
        holding.num_published = complete

    def recycle(self, owner: Hashable, length: int) -> None:
        """Give back windowed pages that no token at position `length` or later can see."""
        for pool, table in zip(self.pools, self._holdings[owner].tables, strict=True):
            index = min(self._first_visible_page(pool, length), len(table)) - 1
            while index >= 0 and table[index] != NO_PAGE:
                pool.release((table[index],))
                table[index] = NO_PAGE
                index -= 1

    def close(self, owner: Hashable) -> None:
        """End a sequence; its published pages stay findable until their room is needed."""
        holding = self._holdings.pop(owner)
        for pool, table in zip(self.pools, holding.tables, strict=True):
            pool.release(reversed(table))  # the end of a prefix is forgotten before its start
        holding.tables.clear()
        self._last_closed = holding

    def forget_cached(self) -> None:
        """Empty the prefix cache of pages nobody holds."""
        for pool in self.pools:
            pool.forget_cached()

    def check_integrity(self) -> None:
        """Raise AssertionError if any page is leaked, doubly held or wrongly findable."""
        for i, pool in enumerate(self.pools):
            tables = [holding.tables[i] for holding in self._holdings.values()]
            pool.check_integrity(page for table in tables for page in table if page != NO_PAGE)
            if pool.window is None:
                assert all(NO_PAGE not in table for table in tables), "a page is missing"

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _first_visible_page(self, pool: Pool, length: int) -> int:
        """The first page that a token at position `length` can see in this pool."""
        if pool.window is None:
            return 0
        return max(0, length - pool.window + 1) // self.page_size

    def _outside(self, pictures: Sequence[PlacedPicture], length: int) -> int:
        """A length that ends inside no picture: this one, or where the one begins that it cuts."""
        cut = (placed.start for placed in pictures if placed.start < length < placed.end)
        return next(cut, length)

    def _longest_hit(self, digests: Sequence[bytes], pictures: Sequence[PlacedPicture] = ()) -> int:
        """How many of these pages, from the start, can be taken over."""
        num_pages = len(digests)
        for pool in self.pools:
            if pool.window is None:
                missing = pool.first_missing(digests[:num_pages])
                num_pages = num_pages if missing is None else missing
        while num_pages > 0:
            length = num_pages * self.page_size
            if (outside := self._outside(pictures, length)) < length:
                num_pages = outside // self.page_size
                continue
            gap = self._last_gap(digests, num_pages)
            if gap is None:
                break
            num_pages = gap  # every longer hit up to the one tried would need the missing page too
        return num_pages

    def _last_gap(self, digests: Sequence[bytes], num_pages: int) -> int | None:
        """The last page that a hit of `num_pages` needs in a pool with a window, but is gone."""
        gaps = []
        for pool in self.pools:
            if pool.window is not None:
                first = self._first_visible_page(pool, num_pages * self.page_size)
                missing = pool.first_missing(reversed(digests[first:num_pages]))
                if missing is not None:
                    gaps.append(num_pages - 1 - missing)
        return max(gaps, default=None)

    def _extend_digests(
        self,
        digests: list[bytes],
        tokens: Sequence[int],
        count: int,
        pictures: Sequence[PlacedPicture] = (),
    ) -> None:
        """Grow `digests` to `count` pages; each is over everything up to its page's end."""
        done, size = len(digests), self.page_size
        data = array("q", tokens[done * size : count * size]).tobytes()
        width = 8 * size
        for start in range(0, width * (count - done), width):
            parent = digests[-1] if digests else b""
            page = parent + data[start : start + width]
            if pictures:
                page += _picture_content(pictures, len(digests) * size, size)
            digests.append(hashlib.blake2b(page, digest_size=DIGEST_SIZE).digest())


def _picture_content(pictures: Sequence[PlacedPicture], start: int, count: int) -> bytes:
    """What tells the pictures of the tokens start : start + count from others, in their place."""
    return b"".join(
        placed.picture.key + array("q", [start - placed.start, placed.picture.num_tokens]).tobytes()
        for placed in pictures
        if placed.start < start + count and placed.end > start
    )
