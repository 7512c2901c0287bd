"""The law over all kinds of requests: 64 together, drafted, each as alone without drafts.

On the CPU bit for bit: tokens, text, ends and log-probabilities. Requests come and are cancelled
while others run, and give way where pages are few.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from typing import NamedTuple

import pytest

from flashdraft.core import FinishReason, Request, SamplingParams
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from tests import mixed, zoo
from tests.unit.engine.step.test_pipeline import Oracle

ROOMY = CacheOptions(cache_gb=0.01)
PLAIN = EngineConfig(verify=0, ngram=False, prefix_cache=False, cache=ROOMY)
LOOPS = {"at_once": {"run_ahead": False}, "ahead": {"run_ahead": True}}  # when a step is read
FEW_PAGES = 12  # for eight sequences, of which one may need six


class Case(NamedTuple):
    """A target, who drafts for it, and with how much room."""

    family: str
    drafts: str  # "random" = by a random drafter, "right" = mostly right ones, "ngram" = looked up
    is_small: bool = False  # there are too few pages for all
    backend: str = "float32"
    verify: int | None = 7


CASES = [
    Case("gemma4", "random", is_small=True),
    Case("gemma4", "right"),
    Case("gemma4", "ngram", verify=None),
    Case("gemma4_moe", "random"),
    Case("gemma4_moe", "right", is_small=True),
    Case("qwen3", "ngram", is_small=True),
    Case("qwen3", "right", backend="int8", verify=None),
]


@functools.cache
def target(family, backend):
    return zoo.tiny_target(family, zoo.kernels(backend), taps=(0, 2))


@functools.cache  # the same answers serve many tests
def alone(family, backend):
    engine = mixed.engine_of(target(family, backend), None, PLAIN)
    return mixed.run_alone(engine, mixed.mixed_requests())


def build(case, loop):
    model = target(case.family, case.backend)
    drafter = None if case.drafts == "ngram" else zoo.tiny_drafter(model.kernels, 8)
    config = EngineConfig(verify=case.verify, cache=ROOMY, **LOOPS[loop])
    if case.is_small:
        few = CacheOptions(cache_gb=zoo.cache_for(model, drafter, FEW_PAGES))
        config = dataclasses.replace(config, cache=few, prefill_chunk=7, max_step_tokens=40)
    engine = mixed.engine_of(model, drafter, config)
    if case.drafts == "right":
        teach(engine, {name: g.token_ids for name, g in alone(case.family, case.backend).items()})
    return engine


def teach(engine, answers, wrong=0.2):
    """Put known answers, corrupted at a rate, in the place of what the drafter says."""
    script = zoo.ScriptedProposer(answers, wrong, engine.proposer.max_drafts)
    engine.proposer._proposer.propose = script.propose
    Oracle(engine, answers, wrong)


def total(generations, name):
    """One of the statistics, over all requests."""
    return sum(getattr(generation.stats, name) for generation in generations.values())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_all_kinds_together_are_as_each_alone(case, loop):
    requests, engine = mixed.mixed_requests(), build(case, loop)
    done = mixed.run_mixed(engine, requests)
    mixed.assert_lawful(requests, done, alone(case.family, case.backend))
    if case.verify is not None:  # else it depends on what the steps cost
        num_tokens = sum(len(generation.token_ids) for generation in done.values())
        least = {"random": 0.02, "right": 0.4, "ngram": 0.1}[case.drafts]
        assert total(done, "accepted") > least * num_tokens
    assert total(done, "cached_tokens") > 0
    if case.is_small:
        assert total(done, "preemptions") > 0
    assert all(pool.num_available == pool.num_pages for pool in engine.book.pools)


def test_many_of_every_kind_are_in_the_mix_and_all_kinds_meet():
    requests = mixed.mixed_requests()
    assert requests == mixed.mixed_requests() != mixed.mixed_requests(seed=6)
    assert len({one.request.id for one in requests}) == 64
    counts = Counter(kind for one in requests for kind in one.kinds)
    assert {kind: counts[kind] for kind in mixed.KINDS if counts[kind] < 6} == {}
    assert counts["temperature"] <= 58  # some are greedy
    met = {pair for one in requests for pair in itertools.combinations(sorted(one.kinds), 2)}
    assert len(met) > 0.9 * len(list(itertools.combinations(mixed.KINDS, 2)))
    assert len({one.arrives_at for one in requests}) >= 20
    assert {one.cancel_after for one in requests} > {0, 1, 5}
    assert not any("grammar" in one.kinds for one in mixed.mixed_requests(grammars=False))


@pytest.mark.parametrize("family", ["gemma4", "gemma4_moe"])
def test_answers_of_the_mix_end_in_every_way(family):
    eos_ids, ways = target(family, "float32").config.eos_token_ids, Counter()
    for one in mixed.mixed_requests():
        answer, params = alone(family, "float32")[one.request.id], one.request.params
        way = answer.finish_reason.value
        if answer.finish_reason is FinishReason.STOP:
            last = answer.token_ids[-1]
            way = "stop string"
            if last in params.stop_token_ids:
                way = "stop token"
            elif last in eos_ids and not params.ignore_eos:
                way = "end of sequence"
            elif one.request.grammar is not None and not params.stop:
                way = "grammar"
        ways[way] += 1
    assert ways["error"] <= 3  # a grammar that forces a stop token
    assert ways["grammar"] >= 1
    assert all(ways[way] >= 3 for way in ("length", "stop string", "stop token", "end of sequence"))


def test_who_gave_way_and_finds_all_its_pages_again_goes_on_once():
    """The younger one gives way when its pages are just full, and comes back to all of them."""
    model = target("llama", "float32")
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    requests = [
        Request("older", [5] * 33, dataclasses.replace(params, max_tokens=20), 0),
        Request("younger", [9] * 2, params, 0),
    ]
    expected = zoo.run(Engine(model, config=PLAIN), requests)["younger"]
    few = CacheOptions(cache_gb=zoo.cache_for(model, None, 5))
    config = EngineConfig(verify=0, ngram=False, cache=few, max_batch=2, run_ahead=True)
    done = zoo.run(Engine(model, config=config), requests)["younger"]
    assert done.token_ids == expected.token_ids


def test_who_runs_beside_changes_no_bit_of_log_probabilities():
    params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=3)
    request = Request("a", [5, 9, 30], params, 0)
    beside = Request("b", [7, 8], params, 0, prompt_logprobs=0)
    engine = Engine(target("gemma4", "float32"), config=dataclasses.replace(PLAIN, run_ahead=True))
    lone = zoo.run(engine, [request])["a"]
    assert zoo.run(engine, [request, beside])["a"].logprobs == lone.logprobs
