"""The law: tokens with drafting equal tokens without it, bit for bit, on the CPU.

Over every backend and family, over proposers that are never, sometimes or always right, over block
sizes and verify lengths, batches, preemption and prefix hits.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest

from flashdraft.core import FinishReason, Request, SamplingParams
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from tests import zoo

PLAIN = EngineConfig(verify=0, ngram=False, cache=CacheOptions(cache_gb=0.01))
FAMILIES = list(zoo.CONFIGS)
BACKENDS = ["torch", "float32", "int8"]
WRONG = [0.0, 0.4, 1.0]  # shares of draft tokens


def plain_answers(target, requests, config=PLAIN):
    """Each request decoded alone, plainly, in an engine of its own."""
    answers = {}
    for request in requests:
        answers.update(zoo.run(Engine(target, config=config), [request]))
    return answers


@functools.cache  # the same answers serve many tests
def expected_answers(family, backend, count, max_tokens=40):
    target = zoo.tiny_target(family, zoo.kernels(backend))
    requests = zoo.mixed_requests(count, max_tokens=max_tokens)
    return requests, tokens(plain_answers(target, requests))


def tokens(generations):
    return {key: generation.token_ids for key, generation in generations.items()}


def scripted_answers(family, backend):
    count, length = (3, 16) if backend == "torch" else (6, 40)
    return expected_answers(family, backend, count, length)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrong", WRONG)
def test_scripted_drafts_do_not_change_a_token(family, backend, wrong):
    target = zoo.tiny_target(family, zoo.kernels(backend))
    requests, expected = scripted_answers(family, backend)
    proposer = zoo.ScriptedProposer(expected, wrong, max_drafts=7)
    engine = Engine(
        target, config=EngineConfig(verify=7, cache=CacheOptions(cache_gb=0.01)), proposer=proposer
    )
    drafted = zoo.run(engine, requests)
    assert tokens(drafted) == expected
    accepted = sum(g.stats.accepted for g in drafted.values())
    if wrong == 0.0:
        assert all(g.stats.mean_accepted_length > 2 for g in drafted.values() if g.stats.steps > 3)
    if wrong == 1.0:
        ngram_only = dataclasses.replace(engine.config, ngram=False)
        engine = Engine(target, config=ngram_only, proposer=proposer)
        drafted = zoo.run(engine, requests)
        assert tokens(drafted) == expected
        accepted = sum(g.stats.accepted for g in drafted.values())
        assert accepted == 0


@pytest.mark.parametrize("backend", ["float32", "int8"])
@pytest.mark.parametrize("block_size", range(2, 17))
def test_block_drafter_of_every_size(backend, block_size):
    target = zoo.tiny_target("gemma4", zoo.kernels(backend), taps=(0, 2))
    drafter = zoo.tiny_drafter(target.kernels, block_size)
    requests, expected = expected_answers("gemma4", backend, 4)
    for verify in sorted({1, block_size // 2, block_size - 1}):
        config = EngineConfig(verify=verify, ngram=False, cache=CacheOptions(cache_gb=0.01))
        assert tokens(zoo.run(Engine(target, drafter, config), requests)) == expected


@pytest.mark.parametrize("backend", ["float32", "int8"])
@pytest.mark.parametrize("verify", range(16))
def test_every_verify_length(backend, verify):
    target = zoo.tiny_target("llama", zoo.kernels(backend))
    requests, expected = expected_answers("llama", backend, 6)
    proposer = zoo.ScriptedProposer(expected, 0.15, max_drafts=15)
    engine = Engine(
        target,
        config=EngineConfig(verify=verify, cache=CacheOptions(cache_gb=0.01)),
        proposer=proposer,
    )
    assert tokens(zoo.run(engine, requests)) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_verify_lengths_mixed_within_a_batch_and_chosen_by_the_policy(family):
    target = zoo.tiny_target(family, zoo.kernels("float32"), taps=(0, 2))
    requests, expected = expected_answers(family, "float32", 6)
    lengths = [None, 0, 3, None, 15, 1]
    mixed = [dataclasses.replace(r, verify=v) for r, v in zip(requests, lengths, strict=True)]
    proposer = zoo.ScriptedProposer(expected, 0.2, max_drafts=15)
    engine = Engine(
        target, config=EngineConfig(cache=CacheOptions(cache_gb=0.01)), proposer=proposer
    )
    assert tokens(zoo.run(engine, mixed)) == expected
    drafter = zoo.tiny_drafter(target.kernels)
    assert (
        tokens(
            zoo.run(Engine(target, drafter, EngineConfig(cache=CacheOptions(cache_gb=0.01))), mixed)
        )
        == expected
    )


@pytest.mark.parametrize("backend", ["float32", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_preemption_prefix_hits_and_small_chunks(family, backend):
    target = zoo.tiny_target(family, zoo.kernels(backend), taps=(0, 2))
    drafter = zoo.tiny_drafter(target.kernels)
    requests, expected = expected_answers(family, backend, 8)
    config = EngineConfig(
        max_batch=8,
        cache=CacheOptions(cache_gb=zoo.cache_for(target, drafter, 17)),
        prefill_chunk=7,
        max_step_tokens=40,
    )
    engine = Engine(target, drafter, config)
    first = zoo.run(engine, requests)
    assert tokens(first) == expected
    assert sum(g.stats.preemptions for g in first.values()) > 0
    again = [dataclasses.replace(r, id=f"again-{r.id}") for r in requests]
    roomy = Engine(
        target,
        drafter,
        dataclasses.replace(config, cache=dataclasses.replace(config.cache, cache_gb=0.02)),
    )
    zoo.run(roomy, requests)
    second = zoo.run(roomy, again)
    assert {k.removeprefix("again-"): v for k, v in tokens(second).items()} == expected
    assert sum(g.stats.cached_tokens for g in second.values()) > 0


@pytest.mark.parametrize("place", range(1, 12))
def test_stop_token_and_limit_inside_a_block(place):
    target = zoo.tiny_target("llama", zoo.kernels("float32"))
    prompt = [5, 9, 33, 12]
    free = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8)
    request = Request("a", prompt, free, seed=5)
    answer = plain_answers(target, [request])["a"].token_ids
    stop = answer[place]
    first = answer.index(stop)
    for params, expected, reason in (
        (
            dataclasses.replace(free, stop_token_ids=(stop,)),
            answer[: first + 1],
            FinishReason.STOP,
        ),
        (dataclasses.replace(free, max_tokens=place), answer[:place], FinishReason.LENGTH),
    ):
        proposer = zoo.ScriptedProposer({"a": answer}, 0.0, max_drafts=15)
        engine = Engine(
            target,
            config=EngineConfig(verify=15, cache=CacheOptions(cache_gb=0.01)),
            proposer=proposer,
        )
        generation = zoo.run(engine, [Request("a", prompt, params, seed=5)])["a"]
        assert generation.token_ids == expected
        assert generation.finish_reason is reason
        assert len(generation.drafted) == len(generation.token_ids)


def test_the_context_limit_ends_an_answer_alike():
    target = zoo.tiny_target("llama", zoo.kernels("float32"))
    config = EngineConfig(verify=0, ngram=False, cache=CacheOptions(cache_gb=0.01), max_context=40)
    request = Request("a", list(range(4, 34)), SamplingParams(max_tokens=99, ignore_eos=True), 1)
    plain = plain_answers(target, [request], config)["a"]
    assert len(plain.token_ids) == 10 and plain.finish_reason is FinishReason.LENGTH
    proposer = zoo.ScriptedProposer({"a": plain.token_ids}, 0.0, max_drafts=15)
    drafted = Engine(target, config=dataclasses.replace(config, verify=15), proposer=proposer)
    assert zoo.run(drafted, [request])["a"].token_ids == plain.token_ids
