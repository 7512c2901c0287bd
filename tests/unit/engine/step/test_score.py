"""Log-probabilities of the prompt: the target's own, whatever way the prompt was computed."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from types import SimpleNamespace

import pytest
import torch

from flashdraft.core import FinishReason, Request, SamplingParams
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.engine.step import score
from flashdraft.engine.step.result import TokenScores
from flashdraft.errors import RequestError
from tests import zoo

NUM_TOP = 3
PROMPT = [random.Random(1).randrange(4, zoo.VOCAB) for _ in range(53)]
CONFIG = EngineConfig(cache=CacheOptions(cache_gb=0.02), prefill_chunk=16)


@functools.cache
def target(family="gemma4", backend="float32"):
    return zoo.tiny_target(family, zoo.kernels(backend), taps=(0, 2))


def request(name="a", prompt=PROMPT, max_tokens=12, count=NUM_TOP, **settings):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **settings)
    return Request(name, prompt, params, 7, prompt_logprobs=count)


@functools.cache
def expected(family="gemma4", backend="float32"):
    """Each token forced as the answer to the prompt before it, and its logprobs asked for."""
    engine = Engine(
        target(family, backend), config=EngineConfig(verify=0, cache=CacheOptions(cache_gb=0.02))
    )
    asked = []
    for end in range(1, len(PROMPT)):
        params = SamplingParams(max_tokens=1, logprobs=NUM_TOP, logit_bias={PROMPT[end]: 1e6})
        asked.append(Request(str(end), PROMPT[:end], params, 0))
    done = zoo.run(engine, asked)
    return [None, *(done[str(end)].logprobs[0] for end in range(1, len(PROMPT)))]


@pytest.mark.parametrize("backend", ["float32", "int8"])
@pytest.mark.parametrize("family", list(zoo.CONFIGS))
def test_they_are_those_of_forced_answers(family, backend):
    done = zoo.run(Engine(target(family, backend), config=CONFIG), [request()])["a"]
    assert done.prompt_logprobs == expected(family, backend)
    assert len(done.prompt_logprobs) == len(PROMPT) and len(done.token_ids) == 12


@pytest.mark.parametrize("chunk", [1, 5, 16, 17, 256])
def test_chunks_do_not_matter(chunk):
    engine = Engine(target(), config=dataclasses.replace(CONFIG, prefill_chunk=chunk))
    assert zoo.run(engine, [request()])["a"].prompt_logprobs == expected()


def test_a_cached_prefix_is_computed_again_and_the_pages_are_there_for_others():
    engine = Engine(target("llama"), config=CONFIG)
    first = zoo.run(engine, [request()])["a"]
    again = zoo.run(engine, [request()])["a"]
    assert first.prompt_logprobs == again.prompt_logprobs == expected("llama")
    assert again.stats.cached_tokens == 0 and again.token_ids == first.token_ids
    assert zoo.run(engine, [request(count=None)])["a"].stats.cached_tokens == 48


def test_preempted_and_drafted_requests_have_every_entry_once():
    drafter = zoo.tiny_drafter(target().kernels)
    config = EngineConfig(
        max_batch=6,
        cache=CacheOptions(cache_gb=zoo.cache_for(target(), drafter, 13)),
        prefill_chunk=7,
        max_step_tokens=40,
    )
    engine = Engine(target(), drafter, config)
    done = zoo.run(engine, [request(f"r{i}", temperature=0.8, max_tokens=60) for i in range(6)])
    assert sum(generation.stats.preemptions for generation in done.values()) > 0
    for generation in done.values():
        assert generation.finish_reason is FinishReason.LENGTH
        assert generation.prompt_logprobs == expected()


def test_a_failed_step_leaves_no_entries_behind(monkeypatch):
    engine = Engine(target(), config=CONFIG)
    read, calls = engine._pipeline.read, []

    def failing(*arguments):
        calls.append(1)
        found = read(*arguments)
        if len(calls) in (2, 3):
            raise ValueError("once more, please") if len(calls) == 2 else KeyboardInterrupt
        return found

    monkeypatch.setattr(engine._pipeline, "read", failing)
    with pytest.raises(KeyboardInterrupt):
        zoo.run(engine, [request()])
    assert zoo.run(engine, [])["a"].prompt_logprobs == expected()


def test_without_being_asked_there_are_none_and_a_single_token_follows_nothing():
    engine = Engine(target(), config=CONFIG)
    assert zoo.run(engine, [request(count=None)])["a"].prompt_logprobs is None
    assert zoo.run(engine, [request(prompt=[5])])["a"].prompt_logprobs == [None]
    bare = zoo.run(engine, [request(count=0)])["a"].prompt_logprobs
    assert [one.logprob for one in bare[1:]] == [one.logprob for one in expected()[1:]]
    assert all(one.top == () for one in bare[1:])


def test_no_large_matrix_of_logits_is_made(monkeypatch):
    model, sizes = target(), []
    head = model.head

    def counted(hidden):
        sizes.append(len(hidden))
        return head(hidden)

    monkeypatch.setattr(model, "head", counted)
    config = dataclasses.replace(CONFIG, prefill_chunk=256, verify=0)
    zoo.run(Engine(model, config=config), [request(max_tokens=1)])
    assert sum(sizes) == len(PROMPT) and max(sizes) <= score.ROWS_AT_ONCE


@pytest.mark.parametrize("count", [-1, 21, 1.0, True, "3"])
def test_a_bad_number_is_refused(count):
    with pytest.raises(
        RequestError, match=r"prompt_logprobs is .*None or an integer between 0 and 20"
    ):
        Engine(target(), config=CONFIG).submit(request(count=count))


def logprobs_of(row, token, num_top):
    """What the target thinks of a token, had it this row of logits."""
    config = SimpleNamespace(vocab_size=len(row))
    fake = SimpleNamespace(config=config, kernels=zoo.kernels("float32"), logits=lambda x: x)
    words = score.score_rows(fake, row.unsqueeze(0), torch.tensor([token]), num_top)
    return TokenScores(words.numpy()).logprobs(0, num_top)


def test_logprobs_are_those_of_the_raw_row():
    row = torch.randn(30, generator=torch.Generator().manual_seed(16)) * 3.0
    total = math.log(sum(math.exp(x) for x in row.tolist()))
    expected = [x - total for x in row.tolist()]
    found = logprobs_of(row, 4, 5)
    assert found.logprob == pytest.approx(expected[4], abs=1e-6)
    assert [token for token, _ in found.top] == sorted(range(30), key=lambda i: -expected[i])[:5]
    assert [p for _, p in found.top] == pytest.approx(sorted(expected, reverse=True)[:5], abs=1e-6)
    assert logprobs_of(row, 4, 0).top == ()
    rows = torch.stack([row, row * 2])
    assert logprobs_of(rows[1], 4, 5) == logprobs_of(row * 2, 4, 5)


def test_top_logprobs_of_equals_come_by_id_and_exclude_the_impossible():
    row = torch.tensor([0.0, 1.0, 0.0, -math.inf, 1.0, 0.0])
    assert [token for token, _ in logprobs_of(row, 1, 3).top] == [1, 4, 0]
    assert [token for token, _ in logprobs_of(row, 1, 20).top] == [1, 4, 0, 2, 5]
