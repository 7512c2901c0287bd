"""How many pages a budget of bytes gives to every pool, and the context they allow. No torch."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from flashdraft.engine.cache.layers import CacheLayer, ValueType, bytes_per_token
from flashdraft.engine.config import MAX_BUFFERED, EngineConfig
from flashdraft.media.sizes import MOST_TOKENS
from flashdraft.models.drafter.config import DrafterConfig

GB = 10**9
DEFAULT_CPU_GB = 1.0
GPU_SHARE = 0.85  # of the memory left once the weights are there
LOOKAHEAD = 64  # tokens a step may write beyond the committed ones
TREE_LOOKAHEAD = 96  # the same where it may be a tree: of two steps in flight what they commit, too
SPARE_WINDOWS = 2  # a windowed pool's room, in running sequences: as much again for cached prefixes


def plan_pools(
    layers: Sequence[CacheLayer],
    dtype: ValueType,
    budget: int,
    config: EngineConfig,
    longest: int,
    slack: int,
) -> dict[int | None, int]:
    """Pages of every pool: windows to spare for cached prefixes, unless sequences need the room.

    A context that was asked for comes before windows for many sequences, and all sequences at that
    length come before spare windows.
    """
    num_windows = SPARE_WINDOWS * config.max_batch
    while True:
        most = _most_pages(layers, config, longest, slack, num_windows)
        pages = plan_pages(layers, dtype, config.page_size, budget, most)
        fits_one = all(n >= longest for n in length_limits(pages, config.page_size, slack))
        fits_all = None not in pages or pages[None] >= most[None]
        is_settled = fits_one and (fits_all or num_windows <= config.max_batch)
        if config.max_context is None or is_settled or num_windows == 1:
            return pages
        num_windows //= 2


def length_limits(pages: dict[int | None, int], page_size: int, slack: int) -> list[int]:
    """What limits a sequence that can always run to its end, if need be alone."""
    return [
        count * page_size
        for window, count in pages.items()
        if window is None or count < window_pages(window, slack, page_size)
    ]


def window_slack(
    drafter: DrafterConfig | None, config: EngineConfig, takes_pictures: bool = False
) -> int:
    """Tokens a sequence holds in a windowed pool beside its window."""
    step_tokens = max(config.max_step_tokens, config.max_batch)  # as the scheduler has it
    chunk = min(config.prefill_chunk, step_tokens)
    if takes_pictures:  # a picture is never cut
        chunk = max(chunk, MOST_TOKENS)
    lookahead = LOOKAHEAD if config.tree is None else TREE_LOOKAHEAD
    return chunk + lookahead + draft_lag(drafter)


def draft_lag(drafter: DrafterConfig | None) -> int:
    """Of these, what a drafter's context may lag behind by."""
    if drafter is None:
        return 0
    return MAX_BUFFERED + max(0, drafter.block_size - LOOKAHEAD)


def window_pages(window: int, slack: int, page_size: int) -> int:
    """Pages that one sequence may need at once in a windowed pool.

    Beside the window these are for `slack` tokens: those a step writes, and those that the
    drafter's context lags behind by.
    """
    return -(-(window + slack) // page_size) + 1  # one more: the range may begin inside a page


def plan_pages(
    layers: Sequence[CacheLayer],
    dtype: ValueType,
    page_size: int,
    budget: int,
    most: Mapping[int | None, int],
) -> dict[int | None, int]:
    """Pages per pool that fit `budget` bytes, and no more than `most` in each.

    Every token needs a page in every pool until a pool with a window has its `most`, so the pools
    grow together.
    """
    costs = bytes_per_token(layers, dtype)

    def pages_at(count: int) -> dict[int | None, int]:
        return {window: min(count, most[window]) for window in costs}

    def size(count: int) -> int:
        return sum(n * page_size * costs[window] for window, n in pages_at(count).items())

    counts = range(max(most.values()) + 1)
    return pages_at(bisect.bisect_right(counts, budget, key=size) - 1)


def _most_pages(
    layers: Sequence[CacheLayer], config: EngineConfig, longest: int, slack: int, num_windows: int
) -> dict[int | None, int]:
    """What each pool can use: every sequence at full length, or `num_windows` windows."""
    every_token = config.max_batch * -(-(longest + slack) // config.page_size)
    most: dict[int | None, int] = {}
    for window in {layer.window for layer in layers}:
        most[window] = every_token
        if window is not None:
            per_sequence = window_pages(window, slack, config.page_size)
            most[window] = min(every_token, num_windows * per_sequence)
    return most
