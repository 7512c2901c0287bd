"""The cache's size, its limits in words, and the views that kernels read."""

from __future__ import annotations

import dataclasses
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashdraft.core import Request, SamplingParams
from flashdraft.engine.cache.layers import CacheLayer, bytes_per_token
from flashdraft.engine.cache.memory import build_cache
from flashdraft.engine.cache.pages import PageBook
from flashdraft.engine.cache.planning import GB, LOOKAHEAD, plan_pages, window_pages
from flashdraft.engine.cache.storage import KVCache, Span
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.sequence import Sequence
from flashdraft.errors import CapacityError, RequestError

KERNELS: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)


def fake_target(windows: list[int | None], max_position: int = 4096) -> Any:
    sizes = {"num_kv_heads": 1, "head_dim": 4, "share_kv": False}
    layers = [SimpleNamespace(window=window, **sizes) for window in windows]
    config = SimpleNamespace(layers=layers, cached_layers=layers, max_position=max_position)
    return SimpleNamespace(config=config, kernels=KERNELS, vision=None)


def fake_drafter(windows: list[int | None], block_size: int = 8) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(num_kv_heads=1, head_dim=4, windows=windows, block_size=block_size)
    )


def make_sequence(num_tokens: int) -> Sequence:
    tokens = list(range(num_tokens))
    return Sequence(Request("r", tokens, SamplingParams(), 0), frozenset(), 10**6)


# -- pages within a budget -----------------------------------------------------------------------


def test_bytes_per_token_adds_up_keys_and_values_by_window() -> None:
    layers = [CacheLayer(2, 8, None), CacheLayer(1, 4, 16), CacheLayer(2, 8, None)]
    assert bytes_per_token(layers, torch.bfloat16) == {None: 2 * 2 * 2 * 8 * 2, 16: 2 * 1 * 4 * 2}


def test_plan_fits_the_budget_and_is_maximal() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        windows = [None, 16, 40][: rng.randint(1, 3)]
        layers = [CacheLayer(rng.randint(1, 4), 8, rng.choice(windows)) for _ in range(6)]
        page_size, budget = rng.choice((4, 16)), rng.randrange(500_000)
        most = {window: rng.randint(1, 60) for window in windows}
        costs = bytes_per_token(layers, torch.float32)
        pages = plan_pages(layers, torch.float32, page_size, budget, most)

        def size(pages: dict[int | None, int], costs: Any = costs, tokens: int = page_size) -> int:
            return sum(costs[window] * tokens * count for window, count in pages.items())

        assert pages.keys() == costs.keys()
        assert size(pages) <= budget
        assert all(count <= most[window] for window, count in pages.items())
        larger = {w: min(max(pages.values()) + 1, most[w]) for w in pages}
        assert larger == pages or size(larger) > budget


# -- the context that fits -----------------------------------------------------------------------


def gb(target: Any, num_tokens: int, drafter: Any = None) -> float:
    """A budget of this many tokens in every pool."""
    layers = [CacheLayer(1, 4, layer.window) for layer in target.config.layers]
    layers += [CacheLayer(1, 4, window) for window in drafter.config.windows] if drafter else []
    return sum(bytes_per_token(layers, torch.float32).values()) * num_tokens / GB


def test_a_large_cache_allows_every_position_and_wastes_nothing() -> None:
    target = fake_target([None, 64], max_position=500)
    cache, context = build_cache(target, None, EngineConfig(max_batch=2))
    assert context == 500
    per_sequence = window_pages(64, 256 + LOOKAHEAD, 16)
    full, windowed = (pool.num_pages for pool in cache.book_pools)
    assert full == 2 * -(-(500 + 256 + LOOKAHEAD) // 16), "no more than two sequences can fill"
    assert windowed == 4 * per_sequence, "two running, and as much again for cached prefixes"


@pytest.mark.parametrize("max_batch", [1, 8])
@pytest.mark.parametrize("prefill_chunk", [1, 256])
@pytest.mark.parametrize("max_context", [2, 3, 17, 1000])
def test_a_context_that_was_asked_for_is_given(
    max_batch: int, prefill_chunk: int, max_context: int
) -> None:
    shapes: list[list[int | None]] = [[None], [None, 24], [24], [16, None, 40]]
    for windows in shapes:
        config = EngineConfig(
            max_batch=max_batch, prefill_chunk=prefill_chunk, max_context=max_context
        )
        assert build_cache(fake_target(windows), None, config)[1] == max_context


def test_a_small_cache_limits_the_context() -> None:
    target = fake_target([None])
    assert (
        build_cache(target, None, EngineConfig(cache=CacheOptions(cache_gb=gb(target, 320))))[1]
        == 320
    )
    assert (
        build_cache(target, None, EngineConfig(cache=CacheOptions(cache_gb=gb(target, 335))))[1]
        == 320
    )


def test_windows_make_room_for_a_long_context_that_was_asked_for() -> None:
    target = fake_target([None, 64, 64, 64, 64, 64], max_position=100_000)
    config = EngineConfig(max_batch=64, cache=CacheOptions(cache_gb=gb(target, 4000)))
    assert build_cache(target, None, config)[1] == 4000, "windows for all 64 take their share"
    config = EngineConfig(
        max_batch=64, cache=CacheOptions(cache_gb=gb(target, 4000)), max_context=20_000
    )
    assert build_cache(target, None, config)[1] == 20_000


def test_spare_windows_make_room_for_all_sequences_at_full_length() -> None:
    target = fake_target([None, *[1024] * 10], max_position=100_000)
    config = EngineConfig(max_batch=8, max_context=8192)
    every_token = 8 * -(-(8192 + 256 + LOOKAHEAD) // 16)
    per_sequence = window_pages(1024, 256 + LOOKAHEAD, 16)
    page_bytes = 16 * 2 * 4 * 4  # of one layer: keys and values of one head of four floats

    def pools(num_windows: float) -> tuple[int, int]:
        size = (every_token + 10 * num_windows * per_sequence) * page_bytes
        config_ = dataclasses.replace(
            config,
            cache=dataclasses.replace(config.cache, cache_gb=(size + 4 * 11 * page_bytes) / GB),
        )
        full, windowed = (one.num_pages for one in build_cache(target, None, config_)[0].book_pools)
        return full, windowed

    assert pools(16) == (every_token, 16 * per_sequence), "room for both"
    full, windowed = pools(12)
    assert full == every_token and windowed >= 8 * per_sequence, "all eight come before spare ones"
    assert pools(6)[0] < every_token, "there is not enough for all"


def test_a_model_without_full_attention_is_limited_by_its_positions_alone() -> None:
    assert build_cache(fake_target([24, 40]), None, EngineConfig())[1] == 4096
    target = fake_target([1000])
    tiny = EngineConfig(cache=CacheOptions(cache_gb=gb(target, 160)))
    assert build_cache(target, None, tiny)[1] == 160, "a pool smaller than its window"


@pytest.mark.parametrize("block_size", [8, 100])
def test_the_drafters_lag_has_room_in_windowed_pools(block_size: int) -> None:
    target, drafter = fake_target([None]), fake_drafter([24, None], block_size)
    config = EngineConfig(
        max_batch=1, prefill_chunk=16, cache=CacheOptions(cache_gb=gb(target, 4096, drafter))
    )
    cache, _ = build_cache(target, drafter, config)
    pool = next(pool for pool in cache.book_pools if pool.window == 24)
    # 24 visible tokens, 255 whose taps are only buffered yet, a chunk or a block on top
    assert pool.num_pages * 16 >= 24 + 255 + max(16, block_size) + 16


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(max_context=5000), r"max_context is 5000; at most 4096 .* 4096 positions"),
        (
            EngineConfig(max_context=2000, cache=CacheOptions(cache_gb=320 * 32 / GB)),
            r"max_context is 2000; at most 320 .* raise cache_gb",
        ),
        (
            EngineConfig(cache=CacheOptions(cache_gb=1e-9)),
            r"cache_gb is 0\.000000\d*; a single page .* Raise cache_gb",
        ),
        (
            EngineConfig(cache=CacheOptions(cache_gb=1e-9), max_context=100),
            r"cache_gb is 0\.0.* Raise cache_gb",
        ),
    ],
)
def test_too_large_a_wish_names_value_limit_and_remedy(config: EngineConfig, message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        build_cache(fake_target([None]), None, config)


def test_the_remedy_helps() -> None:
    with pytest.raises(CapacityError) as caught:
        build_cache(fake_target([None, 24]), None, EngineConfig(cache=CacheOptions(cache_gb=1e-9)))
    needed = re.search(r"takes (\S+)\.", str(caught.value))
    assert needed is not None
    enough = EngineConfig(cache=CacheOptions(cache_gb=float(needed.group(1)) + 1e-6))
    assert build_cache(fake_target([None, 24]), None, enough)[1] >= 16


@pytest.mark.parametrize(
    "setting",
    [
        {"max_batch": 0},
        {"page_size": 0},
        {"max_step_tokens": -1},
        {"prefill_chunk": 0},
        {"max_context": 1},
        {"cache_gb": 0.0},
        {"cache_gb": float("nan")},
        {"verify": -1},
        {"verify": 64},
    ],
)
def test_engine_config_refuses(setting: dict[str, Any]) -> None:
    [(name, value)] = setting.items()
    kind = CacheOptions if name == "cache_gb" else EngineConfig
    with pytest.raises(RequestError, match=rf"{name} is {value}; it must be"):
        kind(**setting)


# -- rows ----------------------------------------------------------------------------------------


def test_rows_against_a_naive_computation() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        page_size = rng.choice((4, 16))
        pages: dict[int | None, int] = {None: 200, 24: 160}
        cache = KVCache([CacheLayer(1, 4, w) for w in pages], pages, page_size, KERNELS)
        book = PageBook(cache.book_pools, page_size)
        spans = []
        for _ in range(rng.randint(1, 5)):
            sequence = make_sequence(150)
            start, count = rng.randint(0, 60), rng.choice((1, 1, 4, 30))
            book.open(sequence, sequence.tokens)
            assert book.reserve(sequence, start + count + rng.randint(0, 40), start + count)
            book.recycle(sequence, start)
            spans.append(Span(sequence, start, count))
        check_rows(cache, book, spans)


def check_rows(cache: KVCache, book: PageBook, spans: list[Span]) -> None:
    rows, size = cache.rows(book, spans), cache.page_size
    positions = [p for span in spans for p in range(span.start, span.start + span.count)]
    assert rows.positions.tolist() == positions
    assert rows.positions.dtype == torch.int64
    assert rows.end_position == max(positions) + 1
    offsets = [sum(span.count for span in spans[:i]) for i in range(len(spans) + 1)]
    assert rows.offsets == offsets
    assert len(rows.views) == 2
    for pool, view in enumerate(rows.views):
        assert view.query_start.tolist() == offsets
        assert view.context_lens.tolist() == [span.start for span in spans]
        assert (view.page_size, view.max_key_len) == (size, rows.end_position)
        assert view.max_query_len == max(span.count for span in spans)
        assert view.slots.dtype == torch.int64 and view.block_table.dtype == torch.int32
        slots = []
        for i, span in enumerate(spans):
            table = book.table(span.sequence, pool)
            assert view.block_table[i, : len(table)].tolist() == list(table)
            for position in range(span.start, span.start + span.count):
                assert table[position // size] >= 0, "a row is written where there is no page"
                slots.append(table[position // size] * size + position % size)
        assert view.slots.tolist() == slots
        assert len(set(slots)) == len(slots), "two rows in one slot"


def test_layers_read_the_pool_of_their_window() -> None:
    layers = [CacheLayer(1, 4, 24), CacheLayer(2, 8, None), CacheLayer(1, 4, 24)]
    cache = KVCache(layers, {24: 5, None: 9}, 4, KERNELS)
    book, sequence = PageBook(cache.book_pools, 4), make_sequence(6)
    book.open(sequence, sequence.tokens)
    assert book.reserve(sequence, 6)
    rows = cache.rows(book, [Span(sequence, 0, 6)])
    first, second, third = cache.layers(rows.views, 0, 3)
    assert first.view is third.view is rows.views[0]
    assert second.view is rows.views[1]
    # one page more than the book knows of: for rows of nobody
    assert first.key.shape == (6, 4, 1, 4) and second.value.shape == (10, 4, 2, 8)
    assert cache.scratch_pages == [5, 9]
    assert first.key.data_ptr() != third.key.data_ptr()
    assert [len(part) for part in (cache.layers(rows.views, 1, 3), first.key)] == [2, 6]
    book.close(sequence)  # nothing of the views keeps the tables from changing


def test_a_cache_beyond_memory_says_so() -> None:
    with pytest.raises(CapacityError, match="does not fit in memory .* lower cache_gb"):
        KVCache([CacheLayer(1 << 20, 1 << 10, None)], {None: 1 << 30}, 16, KERNELS)
