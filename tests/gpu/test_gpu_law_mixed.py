"""The law over all kinds of requests on a GPU, with exact kernels: no token is another one.

Log-probabilities are sums of many numbers, and may differ by their rounding. The grammar is a toy
of the tests and needs no llguidance.
"""

from __future__ import annotations

import functools

import pytest

from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.kernels.select import select_kernels
from tests import mixed, zoo

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-5
ROOMY = CacheOptions(cache_gb=0.05)
PLAIN = EngineConfig(verify=0, ngram=False, prefix_cache=False, cache=ROOMY)


@functools.cache
def target(family, dtype):
    return zoo.tiny_target(family, select_kernels("cuda", dtype, exact=True), taps=(0, 2))


def engine_of(model, drafter, config, proposer=None):
    return Engine(
        model,
        drafter,
        config,
        new_decoder=mixed.Letters,
        proposer=proposer,
        grammar_compiler=mixed.compile_phrases,
    )


@functools.cache  # the same answers serve many tests
def alone(family, dtype, grammars):
    engine = engine_of(target(family, dtype), None, PLAIN)
    return mixed.run_alone(engine, mixed.mixed_requests(grammars=grammars))


def check(engine, family, dtype, grammars):
    """Everybody's answer, once it is found to be lawful."""
    requests = mixed.mixed_requests(grammars=grammars)
    done = mixed.run_mixed(engine, requests)
    mixed.assert_lawful(requests, done, alone(family, dtype, grammars), TOLERANCE)
    return done.values()


@pytest.mark.parametrize("grammars", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gemma4", "gemma4_moe", "qwen3"])
def test_a_drafter_changes_no_answer(family, dtype, grammars):
    model = target(family, dtype)
    config = EngineConfig(verify=7, cache=ROOMY)
    engine = engine_of(model, zoo.tiny_drafter(model.kernels, 8), config)
    for _ in range(2):  # the second time with what the first has captured
        done = check(engine, family, dtype, grammars)
        assert sum(one.stats.drafted for one in done) > 0


@pytest.mark.parametrize("family", ["gemma4", "gemma4_moe"])
def test_giving_way_changes_no_answer(family):
    model = target(family, "float32")
    drafter = zoo.tiny_drafter(model.kernels, 8)
    few = CacheOptions(cache_gb=zoo.cache_for(model, drafter, 12))
    config = EngineConfig(verify=7, cache=few, prefill_chunk=7, max_step_tokens=40)
    done = check(engine_of(model, drafter, config), family, "float32", False)
    assert sum(one.stats.preemptions for one in done) > 0


@pytest.mark.parametrize("family", ["gemma4", "gemma4_moe"])
def test_right_drafts_change_no_answer(family):
    answers = {name: one.token_ids for name, one in alone(family, "float32", False).items()}
    config = EngineConfig(verify=7, cache=ROOMY)
    proposer = zoo.ScriptedProposer(answers, wrong=0.2, max_drafts=7)
    engine = engine_of(target(family, "float32"), None, config, proposer)
    done = check(engine, family, "float32", False)
    assert sum(one.stats.accepted for one in done) > 200


@pytest.mark.parametrize("family", ["gemma4", "gemma4_moe"])
def test_what_is_looked_up_changes_no_answer(family):
    config = EngineConfig(verify=7, cache=ROOMY)
    engine = engine_of(target(family, "float32"), None, config)
    done = check(engine, family, "float32", False)
    assert sum(one.stats.accepted for one in done) > 20
