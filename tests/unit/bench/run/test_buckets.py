"""A request's seconds, each in one bucket; how often a draft slot was verified, and accepted."""

from __future__ import annotations

import time

import pytest

from flashdraft.core import GenerationStats, Request, SamplingParams
from flashdraft.engine.config import EngineConfig
from flashdraft.engine.engine import Engine
from tests import zoo

KERNELS = zoo.kernels("torch")
LONG_PROMPT = [4 + i % 60 for i in range(200)]
MILLISECOND = 1e-3


def make_engine(run_ahead: bool = False, **settings: int) -> Engine:
    target = zoo.tiny_target("llama", KERNELS, taps=(0, 2))
    config = EngineConfig(ngram=False, run_ahead=run_ahead, **settings)
    return Engine(target, zoo.tiny_drafter(KERNELS), config)


def run_timed(engine: Engine, requests: list[Request]) -> dict[str, tuple[GenerationStats, float]]:
    """Statistics of every request, and its seconds by this test's own clock."""
    begun: dict[str, float] = {}
    for request in requests:
        begun[request.id] = time.perf_counter()
        engine.submit(request)
    done: dict[str, tuple[GenerationStats, float]] = {}
    while engine.has_work:
        for event in engine.step():
            if event.generation is not None:
                seconds = time.perf_counter() - begun[event.request_id]
                done[event.request_id] = event.generation.stats, seconds
    return done


def request(name: str, verify: int | None = None, max_tokens: int = 24) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(name, LONG_PROMPT, params, seed=1, verify=verify)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("verify", [0, 4])
def test_buckets_are_arrival_to_last_token(verify: int, run_ahead: bool) -> None:
    engine = make_engine(run_ahead, max_batch=1, verify=7, prefill_chunk=64)
    done = run_timed(engine, [request(name, verify) for name in "ab"])
    for stats, seconds in done.values():
        total = sum(stats.buckets.values())
        assert total == pytest.approx(stats.ttft_s + stats.decode_s, abs=1e-9)
        # the test's clock also has what comes after the last token: its text, its pages
        assert total <= seconds and all(part >= 0 for part in stats.buckets.values())
    first, second = done["a"][0], done["b"][0]
    # nothing else runs: the second one waits for as long as the first one takes
    assert first.queue_s < first.prefill_s
    assert second.queue_s >= first.ttft_s + first.decode_s - 5 * MILLISECOND


def test_the_buckets_end_with_the_last_token_within_a_millisecond() -> None:
    engine = make_engine(max_batch=1, verify=4)
    ends = []
    for attempt in range(5):  # the machine may pause between the commit and this test's clock
        [(stats, seconds)] = run_timed(engine, [request(str(attempt))]).values()
        last_step = engine.last_step
        ends.append(seconds - sum(stats.buckets.values()) - last_step.commit_s)
    assert min(ends) < MILLISECOND


def test_the_drafters_context_of_the_prompt_has_its_own_bucket() -> None:
    engine = make_engine(max_batch=2, verify=4)
    done = run_timed(engine, [request("drafted"), request("plain", verify=0)])
    assert done["drafted"][0].drafter_prefill_s > 0
    assert done["plain"][0].drafter_prefill_s == 0  # its context is written after its last token


def test_a_long_prompts_context_is_written_before_the_first_token() -> None:
    engine = make_engine(max_batch=1, verify=4, prefill_chunk=64)
    prompt = LONG_PROMPT * 2
    long = Request("long", prompt, SamplingParams(max_tokens=1), seed=1)
    [(stats, _)] = run_timed(engine, [long]).values()
    assert stats.drafter_prefill_s > 0 and stats.decode_s == 0
    parts = stats.queue_s + stats.prefill_s + stats.drafter_prefill_s
    assert parts == pytest.approx(stats.ttft_s)


def test_slots_are_counted_as_they_are_verified_and_accepted() -> None:
    target = zoo.tiny_target("llama", KERNELS)
    plain = Engine(target, config=EngineConfig(verify=0, ngram=False))
    [(expected, _)] = run_timed(plain, [request("a")]).values()
    assert expected.slots_verified == [] and expected.slots_accepted == []
    answer = zoo.run(plain, [request("a")])["a"].token_ids
    proposer = zoo.ScriptedProposer({"a": answer}, 0.3, max_drafts=5)
    engine = Engine(target, config=EngineConfig(verify=5, ngram=False), proposer=proposer)
    [(stats, _)] = run_timed(engine, [request("a")]).values()
    assert sum(stats.slots_verified) == stats.drafted > 0
    assert sum(stats.slots_accepted) == stats.accepted > 0
    assert stats.slots_verified[0] <= stats.steps
    assert stats.slots_verified == sorted(stats.slots_verified, reverse=True)
    pairs = zip(stats.slots_accepted, stats.slots_verified, strict=True)
    assert all(accepted <= verified for accepted, verified in pairs)
    committed = sum(n * count for n, count in stats.histogram.items())
    assert committed == stats.decode_tokens
