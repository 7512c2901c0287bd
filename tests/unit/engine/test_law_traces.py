"""The law over random traces: small batches of every kind of request, whose drafts are trees.

Who comes when, what they ask for, who is cancelled, how large trees, blocks, pages, windows and
batches are: all is drawn. Each answer is the one that plain decoding has, alone, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest

from flashdraft.engine.config import CacheOptions, EngineConfig
from tests import mixed, zoo
from tests.unit.engine.test_law_trees import (
    PLAIN,
    ROOMY,
    LookupOracle,
    TreeOracle,
    fail_at_once,
    windowed,
)

NUM_ENGINES, NUM_TRACES = 40, 25  # of each
WINDOWS = {"gemma4": (9, 13, 20), "qwen3": (None,)}
MAX_TOKENS = 6
LONGEST = mixed.MAX_PROMPT + MAX_TOKENS


@pytest.fixture(autouse=True)
def fails_at_once(monkeypatch):
    fail_at_once(monkeypatch)


@functools.cache
def plain_engine(family, window):
    return mixed.engine_of(windowed(family, window), None, PLAIN)


def random_engine(source, family, window):
    model = windowed(family, window)
    drafter = zoo.tiny_drafter(model.kernels, source.choice((2, 4, 8)))
    page_size, cache = source.choice((3, 8, 16)), ROOMY
    if source.random() < 0.4:  # few pages: somebody has to give way
        pages = 2 + -(-2 * (LONGEST + 64) // 16)
        cache = CacheOptions(cache_gb=zoo.cache_for(model, drafter, pages))
    config = EngineConfig(
        max_batch=source.choice((1, 2, 4)),
        tree=source.choice((1, 2, 5, 9, 15, 16, 23, 31, 63, "auto")),
        page_size=page_size,
        cache=cache,
        prefill_chunk=source.choice((11, 16, 256)),
        max_step_tokens=source.choice((20, 512)),
        prefix_cache=source.random() < 0.7,
        ngram=source.random() < 0.7,
    )
    return mixed.engine_of(model, drafter, config)


def random_trace(source):
    """One to three requests; each may be of several kinds."""
    requests = mixed.mixed_requests(source.choice((1, 1, 2, 3)), source.randrange(2**31))
    return [dataclasses.replace(one, request=shorten(source, one.request)) for one in requests]


def shorten(source, request):
    params = request.params
    count = source.randint(1, MAX_TOKENS)
    least = min(params.min_tokens, count)
    verify = source.choice((None, None, None, 0, 2, 15))
    params = dataclasses.replace(params, max_tokens=count, min_tokens=least)
    return dataclasses.replace(request, params=params, verify=verify)


@pytest.mark.parametrize("seed", range(NUM_ENGINES))
def test_random_traces_are_lawful(seed):
    source = random.Random(seed)
    family = ("gemma4", "gemma4", "qwen3")[seed % 3]
    window = source.choice(WINDOWS[family])
    engine, alone = random_engine(source, family, window), plain_engine(family, window)
    answers = {}
    TreeOracle(engine, answers, source.random(), source.random()).random.seed(seed)
    if engine.config.ngram and source.random() < 0.7:  # else by the real lookup
        LookupOracle(engine, answers, source.random(), source.random()).random.seed(seed)
    accepted = 0
    for _ in range(NUM_TRACES):
        trace = random_trace(source)
        expected = mixed.run_alone(alone, trace)
        answers.clear()
        answers.update({name: one.token_ids for name, one in expected.items()})
        done = mixed.run_mixed(engine, trace)
        mixed.assert_lawful(trace, done, expected)
        accepted += sum(one.stats.accepted for one in done.values())
    assert accepted > 0
    assert all(pool.num_available == pool.num_pages for pool in engine.book.pools)
