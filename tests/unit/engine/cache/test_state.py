"""The caches hold what a fresh prefill of the same tokens would have put there, bit for bit.

After drafting and rolling back, in batches, in chunks, over prefix hits and after preemption: the
target's and the drafter's keys and values, and so the drafts themselves.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from flashdraft.core import Request, SamplingParams
from flashdraft.engine.cache.layers import cache_layers
from flashdraft.engine.cache.pages import NO_PAGE
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from tests import zoo

PLAIN = EngineConfig(verify=0, ngram=False, cache=CacheOptions(cache_gb=0.01))
DRAFTED = EngineConfig(verify=5, cache=CacheOptions(cache_gb=0.01))
FAMILIES = list(zoo.CONFIGS)
LONG = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.8)


def pair(family, backend="float32"):
    target = zoo.tiny_target(family, zoo.kernels(backend), taps=(0, 2))
    return target, zoo.tiny_drafter(target.kernels)


def prompts(count, seed=5):
    source = random.Random(seed)
    return [
        [source.randrange(4, zoo.VOCAB) for _ in range(source.choice([3, 17, 40]))]
        for _ in range(count)
    ]


def stored(engine, sequence, length):
    """{(layer, position): keys and values} of the first `length` tokens, where a page is held."""
    cache, found = engine.cache, {}
    for layer, (keys, values) in enumerate(cache._storage):
        table = engine.book.table(sequence, cache._pool_of[layer])
        for position in range(length):
            page, slot = table[position // 16], position % 16
            if page != NO_PAGE:
                found[layer, position] = torch.stack([keys[page, slot], values[page, slot]])
    return found


def assert_as_after_prefill(engine, sequence, target, drafter):
    """Compare with an engine of its own that takes the same tokens as a prompt, in one chunk."""
    engine.proposer.fold([sequence])
    length = sequence.num_cached
    assert sequence.num_folded == length > 0
    fresh = Engine(
        target,
        drafter,
        EngineConfig(verify=5, prefill_chunk=512, cache=CacheOptions(cache_gb=0.01)),
    )
    fresh.submit(Request("fresh", sequence.tokens[:length], LONG, 0))
    fresh.step()
    expected_of = fresh._live["fresh"].sequence
    fresh.proposer.fold([expected_of])
    expected, found = stored(fresh, expected_of, length), stored(engine, sequence, length)
    assert expected_of.num_folded == length
    num_layers = len(cache_layers(target.config, drafter.config))
    last = {(layer, length - 1) for layer in range(num_layers)}
    shared = expected.keys() & found.keys()
    assert last <= shared, "every layer has its last token"
    different = [
        place for place in sorted(shared) if not torch.equal(expected[place], found[place])
    ]
    assert different == []


@pytest.mark.parametrize("backend", ["float32", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_after_rollbacks_the_caches_are_those_of_a_fresh_prefill(family, backend):
    target, drafter = pair(family, backend)
    engine = Engine(target, drafter, DRAFTED)
    for i, prompt in enumerate(prompts(3)):
        engine.submit(Request(f"r{i}", prompt, LONG, seed=i))
    rejected = 0
    for step in range(1, 19):
        engine.step()
        engine.check_integrity()
        rejected += engine.last_step.num_drafted - engine.last_step.num_accepted
        if step % 6 == 0:
            for live in engine._live.values():
                assert_as_after_prefill(engine, live.sequence, target, drafter)
    assert rejected > 50


@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
def test_after_accepted_and_corrupted_drafts_too(family):
    """Drafts that are mostly right: accepted tokens' entries come from the verify pass itself."""
    target, drafter = pair(family)
    request = Request("a", prompts(1)[0], LONG, seed=3)
    plain = Engine(target, config=PLAIN)
    plain.submit(request)
    answer = [token for _ in range(60) for event in plain.step() for token in event.token_ids]
    engine = Engine(target, drafter, DRAFTED)
    script = zoo.ScriptedProposer({"a": answer}, 0.15, 7)
    engine.proposer._proposer.propose = script.propose  # its context is kept up all the same
    engine.submit(request)
    for _ in range(12):
        engine.step()
        assert_as_after_prefill(engine, engine._live["a"].sequence, target, drafter)
    stats = engine._live["a"].sequence.stats
    assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_prefix_hit_and_after_preemption(family):
    target, drafter = pair(family)
    engine = Engine(target, drafter, dataclasses.replace(DRAFTED, prefill_chunk=10))
    first = Request("first", prompts(1)[0] * 2, dataclasses.replace(LONG, max_tokens=30), seed=1)
    answer = zoo.run(engine, [first])["first"]
    turn = [*first.prompt_ids, *answer.token_ids, 7, 8, 9]
    engine.submit(Request("second", turn, LONG, seed=2))
    for _ in range(4):
        engine.step()
    sequence = engine._live["second"].sequence
    assert sequence.stats.cached_tokens >= 32
    assert_as_after_prefill(engine, sequence, target, drafter)
    engine.scheduler.preempt(sequence)
    engine._drop_preempted()
    for _ in range(4):
        engine.step()
    assert sequence.stats.preemptions == 1
    assert_as_after_prefill(engine, sequence, target, drafter)


@pytest.mark.parametrize("backend", ["float32", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_batched_equals_single(family, backend):
    target, drafter = pair(family, backend)
    requests = [
        dataclasses.replace(r, params=dataclasses.replace(r.params, logprobs=3))
        for r in zoo.mixed_requests(6, max_tokens=20)
    ]
    config = dataclasses.replace(DRAFTED, prefix_cache=False, ngram=False)
    together = zoo.run(Engine(target, drafter, config), requests)
    for request in requests:
        alone = zoo.run(Engine(target, drafter, config), [request])[request.id]
        assert together[request.id].token_ids == alone.token_ids
        assert together[request.id].logprobs == alone.logprobs
        assert together[request.id].drafted == alone.drafted  # the drafts are the same ones


@pytest.mark.parametrize("family", ["qwen3", "gemma4_moe"])
@pytest.mark.parametrize("backend", ["float32", "int8"])
def test_chunk_sizes_do_not_matter(family, backend):
    target, drafter = pair(family, backend)
    request = Request(
        "a", prompts(1)[0] * 2, dataclasses.replace(LONG, max_tokens=16, logprobs=2), 9
    )
    assert len(request.prompt_ids) == 80
    answers = []
    for chunk in (1, 7, 16, 33, 256):
        config = dataclasses.replace(DRAFTED, prefill_chunk=chunk)
        generation = zoo.run(Engine(target, drafter, config), [request])["a"]
        answers.append((generation.token_ids, generation.logprobs, generation.drafted))
    assert all(answer == answers[0] for answer in answers)


def record_drafts(engine):
    """Every draft the engine's proposer makes from now on: (anchor's position, tokens, chances)."""
    drafts, propose = [], engine.proposer.propose

    def recording(works, samplers, limits):
        made = propose(works, samplers, limits)
        drafts.extend(
            (work.start, draft.tokens, draft.confidence)
            for work, draft in zip(works, made, strict=True)
        )
        return made

    engine.proposer.propose = recording
    return drafts


@pytest.mark.parametrize("backend", ["float32", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_over_a_prefix_hit_are_those_of_a_cold_start(family, backend):
    target, drafter = pair(family, backend)
    config = dataclasses.replace(DRAFTED, ngram=False, prefill_chunk=24)
    params = dataclasses.replace(LONG, max_tokens=24)
    request = Request("a", prompts(1)[0] * 2, params, seed=4)
    engine = Engine(target, drafter, config)
    drafts = record_drafts(engine)
    cold = zoo.run(engine, [request])["a"]
    num_cold = len(drafts)
    warm = zoo.run(engine, [request])["a"]
    assert cold.stats.cached_tokens == 0 and warm.stats.cached_tokens >= 64
    assert warm.token_ids == cold.token_ids
    assert num_cold > 5 and drafts[num_cold:] == drafts[:num_cold]
    assert warm.stats.mean_accepted_length == cold.stats.mean_accepted_length


@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
def test_drafts_beside_one_that_does_not_draft_are_those_of_a_cold_start(family):
    """Its drafter context lags behind: pages that lack it must not be shared yet."""
    target, drafter = pair(family)
    config = dataclasses.replace(DRAFTED, ngram=False)
    request = Request("a", prompts(1)[0] * 2, dataclasses.replace(LONG, max_tokens=12), seed=4)
    alone = Engine(target, drafter, config)
    cold = record_drafts(alone)
    zoo.run(alone, [request])
    engine = Engine(target, drafter, config)
    engine.submit(Request("quiet", request.prompt_ids, LONG, seed=5, verify=0))
    for _ in range(3):
        engine.step()
    engine.submit(request)
    drafts = record_drafts(engine)
    while "a" in engine._live:
        engine.step()
    assert len(cold) > 3 and drafts == cold
