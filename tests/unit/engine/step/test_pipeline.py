"""Running ahead: steps on the device, read one behind, change no token and lose no request.

On the CPU the same steps run without being captured; tests/gpu runs them as CUDA graphs.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from flashdraft.core import FinishReason, GrammarSpec, Request, SamplingParams
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.engine.policy.step import StepPolicy
from flashdraft.engine.sequence import Sequence
from flashdraft.engine.step import prepare
from flashdraft.engine.step.device import DeviceSteps
from flashdraft.engine.step.result import SlotResult, StepRecord, pack_scores
from flashdraft.engine.step.seats import Seat
from flashdraft.engine.step.shape import LONE_ROWS, MIXED_ROWS
from flashdraft.engine.step.trees import Proposed
from flashdraft.engine.streams import MOST_GRAPHS, Graphs
from flashdraft.kernels.accept import pack_rows
from flashdraft.kernels.draw.rule import MAX_TOP, Draw
from tests import zoo

PLAIN = EngineConfig(verify=0, ngram=False, cache=CacheOptions(cache_gb=0.01), run_ahead=False)
AHEAD = EngineConfig(verify=7, ngram=False, cache=CacheOptions(cache_gb=0.01), run_ahead=True)


def greedy_requests(count, max_tokens=40, seed=5, **settings):
    """Greedy requests of many prompt lengths; every third one goes on after its stop token."""
    source = random.Random(seed)
    requests = []
    for i in range(count):
        length = source.choice([1, 2, 15, 16, 17, 33, 50])
        prompt = [source.randrange(4, zoo.VOCAB) for _ in range(length)]
        params = SamplingParams(
            max_tokens=source.randrange(1, max_tokens), ignore_eos=i % 3 == 0, **settings
        )
        requests.append(Request(f"r{i}", prompt, params, seed=i))
    return requests


def tokens(generations):
    return {key: generation.token_ids for key, generation in generations.items()}


def plain_tokens(target, requests):
    return tokens(zoo.run(Engine(target, config=PLAIN), requests))


class Oracle:
    """Stands in for the drafter's pass of a step: drafts known answers, corrupted at a rate."""

    def __init__(self, engine, answers, wrong):
        self.engine, self.answers, self.wrong = engine, answers, wrong
        self.random = random.Random(11)
        self.num_steps = 0
        engine.steps.pieces._drafts_of = self.draft

    def draft(self, shape):
        self.num_steps += 1
        batch, width, slots = shape.batch, shape.width, self.engine._pipeline._slots
        drafts = torch.zeros(batch, width, dtype=torch.int64)
        for slot, seat in enumerate(self.engine._pipeline._seats[:batch]):
            if seat is None or not slots.alive[slot]:
                continue
            sequence = seat.sequence
            done = int(slots.lengths[slot]) + 1 - sequence.num_prompt
            known = self.answers[sequence.request.id][done : done + width]
            said = set(self.answers[sequence.request.id])
            never = next(token for token in range(zoo.VOCAB) if token not in said)
            for place, token in enumerate(known):
                is_wrong = self.random.random() < self.wrong
                drafts[slot, place] = never if is_wrong else token
        return Proposed(drafts, torch.rand(batch, width))


def build(backend="float32", family="gemma4", config=AHEAD, **settings):
    target = zoo.tiny_target(family, zoo.kernels(backend), taps=(0, 2))
    drafter = zoo.tiny_drafter(target.kernels, 8)
    return target, Engine(target, drafter, dataclasses.replace(config, **settings))


@pytest.mark.parametrize("backend", ["float32", "int8"])
@pytest.mark.parametrize("family", list(zoo.CONFIGS))
@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.0])
def test_the_law_holds_one_step_behind(family, backend, wrong):
    target, engine = build(backend, family, max_batch=4)
    requests = greedy_requests(9)
    free = [
        dataclasses.replace(r, params=dataclasses.replace(r.params, ignore_eos=True, max_tokens=60))
        for r in requests
    ]
    oracle = Oracle(engine, plain_tokens(target, free), wrong)
    drafted = zoo.run(engine, requests)
    assert tokens(drafted) == plain_tokens(target, requests)
    assert oracle.num_steps > 0
    long = [g for g in drafted.values() if g.stats.decode_tokens > 16]
    if wrong == 0.0:
        assert long and all(g.stats.mean_accepted_length > 3 for g in long)
    if wrong == 1.0:
        assert all(g.stats.accepted == 0 for g in drafted.values())


@pytest.mark.parametrize("verify", [None, 0, 1, 3, 7])
@pytest.mark.parametrize("max_batch", [1, 3, 8])
def test_every_batch_and_verify_length(verify, max_batch):
    target, engine = build(verify=verify, max_batch=max_batch)
    requests = greedy_requests(7)
    assert tokens(zoo.run(engine, requests)) == plain_tokens(target, requests)


def test_a_target_alone_runs_ahead_too():
    target = zoo.tiny_target("gemma4_moe", zoo.kernels("float32"))
    engine = Engine(target, config=dataclasses.replace(AHEAD, verify=None, max_batch=2))
    requests = greedy_requests(5)
    assert tokens(zoo.run(engine, requests)) == plain_tokens(target, requests)
    assert engine._pipeline._num_launched > 20


def test_greedy_and_sampled_requests_take_turns():
    target, engine = build(max_batch=3)
    requests = greedy_requests(5)
    requests += [dataclasses.replace(r, id=f"m{r.id}") for r in zoo.mixed_requests(6)]
    random.Random(2).shuffle(requests)
    assert tokens(zoo.run(engine, requests)) == plain_tokens(target, requests)


@pytest.mark.parametrize("verify", [None, 0, 7])
def test_sampled_requests_run_ahead_with_the_same_noise(verify):
    target, engine = build(max_batch=4, verify=verify)
    settings = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {},
        {"temperature": 1.3, "top_k": 12, "min_p": 0.05},
    ]
    requests = [
        Request(f"r{i}", [5 + i, 9, 30], SamplingParams(max_tokens=40, **settings[i % 4]), i)
        for i in range(8)
    ]
    assert tokens(zoo.run(engine, requests)) == plain_tokens(target, requests)
    assert engine._pipeline._num_launched > 20


def test_drafts_of_sampled_requests_are_drawn_with_the_targets_noise():
    target, engine = build(max_batch=2)
    params = SamplingParams(max_tokens=60, temperature=1.0, ignore_eos=True)
    requests = [Request(f"r{i}", [5 + i, 9], params, i) for i in range(2)]
    free = plain_tokens(target, requests)
    Oracle(engine, free, wrong=0.0)
    drafted = zoo.run(engine, requests)
    assert tokens(drafted) == free
    assert all(g.stats.mean_accepted_length > 4 for g in drafted.values())


def test_requests_that_come_late_join():
    target, engine = build(max_batch=4)
    requests = greedy_requests(8)
    expected, done = plain_tokens(target, requests), {}
    waiting = list(requests)
    for step in range(400):
        if waiting and step % 3 == 0:
            engine.submit(waiting.pop(0))
        for event in engine.step():
            if event.generation is not None:
                done[event.request_id] = event.generation.token_ids
        engine.check_integrity()
    assert done == expected


def never(*_):
    raise AssertionError("the host took a step of its own")


def serve(engine, arrivals, steps=600):
    """Submit requests at their steps; what each of them got, step by step and in the end."""
    pieces, done = {}, {}
    for step in range(steps):
        for request in arrivals.get(step, ()):
            engine.submit(request)
        for event in engine.step():
            pieces.setdefault(event.request_id, []).append((step, len(event.token_ids)))
            if event.generation is not None:
                done[event.request_id] = event.generation
        engine.check_integrity()
        if not engine.has_work and step > max(arrivals):
            break
    return pieces, done


@pytest.mark.parametrize("is_filled_up", [False, True])
@pytest.mark.parametrize("family", ["gemma4", "gemma4_moe"])
@pytest.mark.parametrize("verify", [0, 7])
def test_arrivals_and_ends_never_leave_the_pipeline(verify, family, is_filled_up, monkeypatch):
    target, engine = build(family=family, max_batch=4, verify=verify)
    engine._pipeline._steps.graphs.captures = False
    if is_filled_up:  # passes with prompts have rows of nobody, as those that are captured
        engine._pipeline._steps.graphs = SlowToBegin()
    requests = [*greedy_requests(6), *requests_of_all_kinds(6)]
    requests = [dataclasses.replace(r, id=f"r{i}") for i, r in enumerate(requests)]
    pieces, done = serve(engine, {3 * i: [request] for i, request in enumerate(requests)})
    expected = plain_tokens(target, requests)
    assert {key: generation.token_ids for key, generation in done.items()} == expected


def limit_prompts(engine, rows):
    """Have no more rows of prompts in a step that somebody decodes in."""
    choose = engine.step_policy.choose

    def limited(options, prompts, context):
        choice = choose(options, prompts, context)
        most = rows if options.num_awake else choice.prompt_rows
        return choice._replace(prompt_rows=min(choice.prompt_rows, most))

    engine.step_policy.choose = limited


def test_a_long_prompt_rides_beside_those_who_decode():
    target, engine = build(max_batch=4, verify=0)
    limit_prompts(engine, 40)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    early = [Request(f"r{i}", [5 + i, 9], params, i) for i in range(2)]
    late = Request("long", [7 + i % 50 for i in range(200)], params, 9)
    pieces, done = serve(engine, {0: early, 10: [late]})
    first = pieces["long"][0][0]
    assert first >= 10 + 200 // 40
    for request in early:  # a token in every step, those of the prompt too
        steps = [step for step, _ in pieces[request.id]]
        assert steps == list(range(steps[0], steps[0] + 60))
    expected = plain_tokens(target, [*early, late])
    assert {key: generation.token_ids for key, generation in done.items()} == expected


def test_a_sleeping_slot_writes_nothing_of_its_own():
    """Its prompt's keys are what they are without anybody beside it."""
    target, engine = build(max_batch=4)
    limit_prompts(engine, 16)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    early = [Request(f"r{i}", [5 + i, 9], params, i) for i in range(3)]
    late = Request("long", [7 + i % 50 for i in range(90)], params, 9)
    _, done = serve(engine, {0: early, 6: [late]})
    expected = plain_tokens(target, [*early, late])
    assert {key: generation.token_ids for key, generation in done.items()} == expected


KINDS = [
    {},
    {"logprobs": 3},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "repetition_penalty": 1.3, "logprobs": 20},
    {"presence_penalty": 0.7, "frequency_penalty": 0.2},
    {"logit_bias": {7: 2.5, 9: -100.0}, "temperature": 1.2},
    {"min_tokens": 12, "temperature": 0.9, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 12, "top_p": 0.95, "repetition_penalty": 0.8, "min_tokens": 3},
]


def requests_of_all_kinds(count, seed=8):
    source = random.Random(seed)
    return [
        Request(
            f"r{i}",
            [source.randrange(4, zoo.VOCAB) for _ in range(source.choice([1, 5, 16, 33]))],
            SamplingParams(
                max_tokens=source.randrange(13, 40), ignore_eos=i % 5 == 0, **KINDS[i % 8]
            ),
            seed=i,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("verify", [0, 3, 7])
@pytest.mark.parametrize("family", ["gemma4", "llama"])
def test_every_kind_of_request_is_drawn_on_the_device(family, verify, monkeypatch):
    target, engine = build(family=family, max_batch=5, verify=verify)
    requests = requests_of_all_kinds(24)
    _, done = serve(engine, {2 * i: [request] for i, request in enumerate(requests)})
    expected = zoo.run(Engine(target, config=PLAIN), requests)
    assert {k: g.token_ids for k, g in done.items()} == tokens(expected)
    for key, generation in done.items():
        other = expected[key]
        assert (generation.logprobs is None) == (other.logprobs is None)
        for mine, theirs in zip(generation.logprobs or [], other.logprobs or [], strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
            values = [[x for _, x in one.top] for one in (mine, theirs)]
            assert values[0] == pytest.approx(values[1], abs=1e-5)


@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_penalties_count_what_was_accepted_and_no_more(wrong):
    target, engine = build(max_batch=3)
    params = SamplingParams(
        max_tokens=50, ignore_eos=True, repetition_penalty=1.4, frequency_penalty=0.5
    )
    requests = [Request(f"r{i}", [5 + i, 9, 30], params, i) for i in range(3)]
    longer = dataclasses.replace(params, max_tokens=70)
    answers = plain_tokens(target, [dataclasses.replace(r, params=longer) for r in requests])
    Oracle(engine, answers, wrong)
    done = zoo.run(engine, requests)
    assert tokens(done) == plain_tokens(target, requests)
    if wrong == 0.0:
        assert all(g.stats.mean_accepted_length > 4 for g in done.values())


def test_who_is_preempted_keeps_its_penalties(monkeypatch):
    target, engine = build(max_batch=6)
    small = zoo.cache_for(target, zoo.tiny_drafter(target.kernels, 8), 24)
    target, engine = build(max_batch=6, cache=CacheOptions(cache_gb=small))
    params = SamplingParams(
        max_tokens=60, ignore_eos=True, temperature=0.8, frequency_penalty=0.6, logprobs=1
    )
    requests = [Request(f"r{i}", [5 + i] * 30, params, i) for i in range(6)]
    _, done = serve(engine, {0: requests}, steps=2000)
    assert {k: g.token_ids for k, g in done.items()} == plain_tokens(target, requests)
    assert sum(g.stats.preemptions for g in done.values()) > 0
    assert all(len(g.logprobs) == 60 for g in done.values())


def test_a_request_whose_settings_leave_no_token_is_told_so(monkeypatch):
    target, engine = build(max_batch=3)
    params, every = SamplingParams(max_tokens=9, ignore_eos=True), tuple(range(zoo.VOCAB))
    requests = [
        Request("good", [5, 6], params, 0),
        Request("bad", [5, 7], dataclasses.replace(params, min_tokens=5, stop_token_ids=every), 0),
    ]
    _, done = serve(engine, {0: requests})
    assert done["bad"].finish_reason is FinishReason.ERROR and "min_tokens" in done["bad"].error
    assert done["good"].token_ids == plain_tokens(target, requests[:1])["good"]


PHRASES = GrammarSpec("lark", "phrases")


def compiler(spec):
    return zoo.TokenGrammar(zoo.phrases)


def guided_engine(family="qwen3", **settings):
    target = zoo.tiny_target(family, zoo.kernels("float32"), taps=(0, 2))
    config = dataclasses.replace(AHEAD, **settings)
    drafter = zoo.tiny_drafter(target.kernels, 8)
    engine = Engine(target, drafter, config, grammar_compiler=compiler)
    return target, engine


def guided_requests(count):
    """Every other one by a grammar, of all kinds of settings."""
    requests = requests_of_all_kinds(count)
    return [
        dataclasses.replace(r, grammar=PHRASES if i % 2 else None) for i, r in enumerate(requests)
    ]


@pytest.mark.parametrize("wrong", [0.0, 0.3, None])
@pytest.mark.parametrize("verify", [0, 7])
def test_grammars_have_their_say_between_the_pieces(verify, wrong, monkeypatch):
    target, engine = guided_engine(max_batch=4, verify=verify)
    requests = guided_requests(14)
    plain = Engine(target, config=PLAIN, grammar_compiler=compiler)
    expected = zoo.run(plain, requests)
    oracle = Oracle(engine, tokens(expected), wrong) if wrong is not None and verify else None
    _, done = serve(engine, {3 * i: [request] for i, request in enumerate(requests)}, steps=900)
    assert {k: g.token_ids for k, g in done.items()} == tokens(expected)
    assert all(done[k].finish_reason is g.finish_reason for k, g in expected.items())
    if wrong == 0.0 and verify:
        assert sum(done[f"r{i}"].stats.accepted for i in range(1, 14, 2)) > 40
    if oracle is not None:
        assert oracle.num_steps <= engine._pipeline._num_launched


def test_a_grammar_lets_the_pipeline_run_ahead(monkeypatch, caplog):
    target, engine = guided_engine(max_batch=4)
    requests = guided_requests(8)
    in_flight = []

    def launch(self, *arguments, **settings):
        guide = arguments[3]
        if guide is not None and guide.decoding:
            in_flight.append(1 + len(engine._pipeline._in_flight))
        return real(self, *arguments, **settings)

    real = DeviceSteps.launch
    monkeypatch.setattr(DeviceSteps, "launch", launch)
    _, done = serve(engine, {0: requests})
    assert sum(count == 2 for count in in_flight) > 0.5 * len(in_flight) > 10
    assert not caplog.records  # no answer's end is taken for a failure of its grammar
    plain = Engine(target, config=PLAIN, grammar_compiler=compiler)
    assert {k: g.token_ids for k, g in done.items()} == tokens(zoo.run(plain, requests))


@pytest.mark.parametrize(
    ("stop_ids", "steps", "expected"),
    [
        ((), [], [7]),
        ((), [([3, 4], 1)], [7, 3, 4]),
        ((), [([3, 4, 5], 0), ([6], 0)], [7, 3, 6]),
        ((), [([3, -1], 1)], None),  # no token can come: the answer ends in an error
        ((4,), [([3, 4], 1)], None),
        ((), [([3, 4], 1), ([5, 6], 1)], None),  # as many as were wanted
    ],
)
def test_what_is_in_flight_belongs_to_a_seats_output(stop_ids, steps, expected):
    request = Request("r", [1, 2], SamplingParams(max_tokens=5), seed=0)
    sequence = Sequence(request, frozenset(stop_ids), 7)
    sequence.tokens.append(7)
    seat = Seat(sequence, None, 2, 0)
    results = [SlotResult(accepted, samples[:-1], samples, []) for samples, accepted in steps]
    assert seat.output_after(results) == expected


class Hinter(Oracle):
    """It draws what no grammar allows; the right token is the second likeliest."""

    def draft(self, shape):
        right, confidence = super().draft(shape)
        ids = torch.full((right.numel(), MAX_TOP), -1)
        ids[:, 0], ids[:, 1] = 0, right.flatten()
        logits = torch.where(ids >= 0, -torch.arange(float(MAX_TOP)), -torch.inf)
        drawn = Draw(ids[:, 0], logits[:, 0], logits.logsumexp(1), ids, logits)
        self.engine.steps.pieces.exchange.offer(pack_scores(drawn).view(*right.shape, -1))
        return Proposed(torch.zeros_like(right), confidence)


def test_a_grammar_picks_from_the_likeliest_tokens():
    target, engine = guided_engine(max_batch=2)
    params = SamplingParams(max_tokens=40, temperature=0.7)
    requests = [Request(f"r{i}", [5 + i, 9], params, i, grammar=PHRASES) for i in range(4)]
    expected = zoo.run(Engine(target, config=PLAIN, grammar_compiler=compiler), requests)
    Hinter(engine, tokens(expected), wrong=0.0)
    _, done = serve(engine, {0: requests})
    assert tokens(done) == tokens(expected)
    assert all(g.stats.mean_accepted_length > 4 for g in done.values())


def test_a_grammar_cuts_what_was_looked_up():
    target, engine = guided_engine(max_batch=2, ngram=True)
    requests = guided_requests(8)
    expected = zoo.run(Engine(target, config=PLAIN, grammar_compiler=compiler), requests)
    said = [[*r.prompt_ids, *expected[r.id].token_ids] for r in requests]
    again = [
        dataclasses.replace(r, id=f"again{r.id}", prompt_ids=ids[: len(r.prompt_ids)] + ids)
        for r, ids in zip(requests, said, strict=True)
    ]
    plain = Engine(target, config=PLAIN, grammar_compiler=compiler)
    assert tokens(zoo.run(engine, again)) == tokens(zoo.run(plain, again))


def test_what_a_grammar_forces_is_drafted(monkeypatch):
    target, engine = guided_engine(max_batch=2)
    params = SamplingParams(max_tokens=40, temperature=1.0)
    requests = [Request(f"r{i}", [5 + i, 9], params, i, grammar=PHRASES) for i in range(2)]
    Oracle(engine, {r.id: [] for r in requests}, wrong=0.0)  # it knows nothing
    _, done = serve(engine, {0: requests})
    assert all(g.stats.accepted > 0 for g in done.values())
    plain = Engine(target, config=PLAIN, grammar_compiler=compiler)
    assert {k: g.token_ids for k, g in done.items()} == tokens(zoo.run(plain, requests))


def test_a_grammar_that_breaks_ends_its_request_alone(monkeypatch):
    def breaking(spec):
        return zoo.TokenGrammar(zoo.phrases, breaks_at=4)

    target = zoo.tiny_target("qwen3", zoo.kernels("float32"), taps=(0, 2))
    drafter = zoo.tiny_drafter(target.kernels, 8)
    engine = Engine(target, drafter, AHEAD, grammar_compiler=breaking)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    good, bad = Request("good", [5, 6], params, 0), Request("bad", [5, 7], params, 0)
    _, done = serve(engine, {0: [good, dataclasses.replace(bad, grammar=PHRASES)]})
    assert done["bad"].finish_reason is FinishReason.ERROR and "grammar" in done["bad"].error
    assert done["good"].token_ids == plain_tokens(target, [good])["good"]


def test_who_gives_way_is_served_without_the_host(monkeypatch):
    target, engine = build(max_batch=6)
    small = zoo.cache_for(target, zoo.tiny_drafter(target.kernels, 8), 24)
    target, engine = build(max_batch=6, cache=CacheOptions(cache_gb=small))
    requests = [
        Request(f"r{i}", [5 + i] * 30, SamplingParams(max_tokens=60, ignore_eos=True), i)
        for i in range(6)
    ]
    _, done = serve(engine, {0: requests}, steps=2000)
    assert {k: g.token_ids for k, g in done.items()} == plain_tokens(target, requests)
    assert sum(g.stats.preemptions for g in done.values()) > 0


def test_a_prompt_that_is_cancelled_half_way_frees_its_slot():
    target, engine = build(max_batch=2)
    limit_prompts(engine, 16)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    early, late = Request("a", [5, 9], params, 0), Request("b", [7] * 120, params, 1)
    engine.submit(early)
    for _ in range(4):
        engine.step()
    engine.submit(late)
    for _ in range(3):
        engine.step()
    engine.cancel("b")
    after = Request("c", [11, 12], params, 2)
    engine.submit(after)
    done = {}
    for _ in range(200):
        for event in engine.step():
            if event.generation is not None:
                done[event.request_id] = event.generation
        engine.check_integrity()
    assert done["b"].finish_reason is FinishReason.CANCELLED
    expected = plain_tokens(target, [early, after])
    assert done["a"].token_ids == expected["a"] and done["c"].token_ids == expected["c"]
    assert all(pool.num_available == pool.num_pages for pool in engine.book.pools)


def test_too_few_pages_only_cost_time():
    target, engine = build(max_batch=6)
    small = zoo.cache_for(target, zoo.tiny_drafter(target.kernels, 8), 14)
    target, engine = build(max_batch=6, cache=CacheOptions(cache_gb=small))
    requests = [
        Request(f"r{i}", [5 + i] * 30, SamplingParams(max_tokens=60, ignore_eos=True), i)
        for i in range(6)
    ]
    generations = zoo.run(engine, requests)
    assert tokens(generations) == plain_tokens(target, requests)
    assert sum(g.stats.preemptions for g in generations.values()) > 0
    assert engine._pipeline._num_launched > 0


def test_a_cancelled_request_leaves_the_others_alone():
    target, engine = build(max_batch=4)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    requests = [Request(f"r{i}", [7 + i, 9], params, i) for i in range(4)]
    for request in requests:
        engine.submit(request)
    done = {}
    for step in range(200):
        if step == 8:
            assert engine._pipeline.is_flying
            engine.cancel("r1")
            engine.cancel("r3")
        for event in engine.step():
            if event.generation is not None:
                done[event.request_id] = event.generation
        engine.check_integrity()
    assert done["r1"].finish_reason is FinishReason.CANCELLED
    expected = plain_tokens(target, requests)
    for key in ("r0", "r2"):
        assert done[key].token_ids == expected[key]
    for key in ("r1", "r3"):
        assert done[key].token_ids == expected[key][: len(done[key].token_ids)]
    assert not engine.has_work
    assert all(pool.num_available == pool.num_pages for pool in engine.book.pools)


def test_a_prefix_hit_on_pages_written_ahead_is_sound():
    target, engine = build(max_batch=2)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    first = Request("a", [9, 8, 7], params, 0)
    answer = zoo.run(engine, [first])["a"].token_ids
    turn = Request("b", [9, 8, 7, *answer, 11, 12], params, 0)
    second = zoo.run(engine, [turn])["b"]
    assert second.stats.cached_tokens >= 48
    assert second.token_ids == plain_tokens(target, [turn])["b"]


def test_the_accept_function_is_the_callers():
    target = zoo.tiny_target("gemma4", zoo.kernels("float32"), taps=(0, 2))
    drafter = zoo.tiny_drafter(target.kernels, 8)

    def two(samples, starts, nodes, is_node):
        return torch.full_like(starts, 0b111)

    engine = Engine(target, drafter, AHEAD, accept=two)
    params = SamplingParams(max_tokens=31, ignore_eos=True)
    generation = zoo.run(engine, [Request("a", [5, 6], params, 0)])["a"]
    assert len(generation.token_ids) == 31
    assert generation.stats.histogram == {3: 10}


@pytest.mark.parametrize("fails_at", [1, 4])
def test_a_step_that_fails_costs_no_request(fails_at, monkeypatch):
    target, engine = build(max_batch=3)
    requests = greedy_requests(4, max_tokens=30)
    launch, count = DeviceSteps.launch, 0

    def fail(self, *arguments):
        nonlocal count
        count += 1
        if count == fails_at:
            raise RuntimeError("the device is on fire")
        return launch(self, *arguments)

    monkeypatch.setattr(DeviceSteps, "launch", fail)
    assert tokens(zoo.run(engine, requests)) == plain_tokens(target, requests)
    assert count > fails_at


@pytest.mark.parametrize("left", [5, 7])
def test_slots_are_empty_after_a_step_that_fails(left, monkeypatch):
    """Who sat there must not go on writing into pages that are others' now."""
    target, engine = build(max_batch=8, verify=3)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    short = dataclasses.replace(params, max_tokens=12)
    requests = [Request(f"r{i}", [5 + i, 9], params if i < left else short, i) for i in range(8)]
    launch, count = DeviceSteps.launch, 0

    def fail(self, *arguments):
        nonlocal count
        count += 1
        if count == 6:
            raise RuntimeError("the device is on fire")
        return launch(self, *arguments)

    monkeypatch.setattr(DeviceSteps, "launch", fail)
    assert tokens(zoo.run(engine, requests)) == plain_tokens(target, requests)
    slots, seated = engine._pipeline._slots, engine._pipeline._seats
    assert count > 8 and not any(seated) and not slots.alive.any()


def test_an_interrupt_in_a_commit_ends_what_it_tore(monkeypatch):
    target, engine = build(max_batch=4, verify=3)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    requests = [Request(f"r{i}", [5 + i, 9], params, i) for i in range(3)]
    for request in requests:
        engine.submit(request)
    for _ in range(5):
        engine.step()
    late = Request("late", [11, 12], params, 7)
    engine.submit(late)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine._committer, "settle", interrupt)
        engine.step()
    engine.check_integrity()
    assert not any(engine.is_running(request.id) for request in requests)
    done = zoo.run(engine, [])
    assert done["late"].token_ids == plain_tokens(target, [late])["late"]


def test_a_long_prompt_leaves_room_for_a_short_one():
    target, engine = build(max_batch=4, verify=0)
    limit_prompts(engine, 20)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    first = Request("a", [5, 9], params, 0)
    long = Request("long", [7 + i % 50 for i in range(400)], params, 1)
    short = Request("short", [11] * 15, params, 2)
    pieces, done = serve(engine, {0: [first], 4: [long], 6: [short]})
    assert pieces["short"][0][0] < 12 < pieces["long"][0][0]
    expected = plain_tokens(target, [first, long, short])
    assert {key: generation.token_ids for key, generation in done.items()} == expected


def test_a_row_without_a_token_ends_its_request_alone():
    target, engine = build(max_batch=2, verify=0)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    requests = [Request("good", [5, 6], params, 0), Request("bad", [7, 8], params, 0)]
    expected = plain_tokens(target, requests)
    whole, count = target.head, 0

    def broken(hidden):
        nonlocal count
        count += 1
        head = whole(hidden)
        if count >= 5 and len(hidden) == 2:
            head.products[1] = math.nan
        return head

    target.head = broken
    done = zoo.run(engine, requests)
    assert done["bad"].finish_reason is FinishReason.ERROR and "NaN" in done["bad"].error
    assert done["bad"].token_ids == expected["bad"][: len(done["bad"].token_ids)]
    assert done["good"].token_ids == expected["good"]


def test_requests_with_verify_lengths_of_their_own():
    target, engine = build(max_batch=4, verify=None)
    requests = [dataclasses.replace(r, verify=0) for r in greedy_requests(3)]
    generations = zoo.run(engine, requests)
    assert all(g.stats.drafted == 0 for g in generations.values())
    mixed = [dataclasses.replace(r, verify=i % 3) for i, r in enumerate(greedy_requests(6))]
    assert tokens(zoo.run(engine, mixed)) == plain_tokens(target, mixed)


def rows_cost_nothing(engine):
    """Whatever else the machine does meanwhile."""
    times = engine.step_policy.times
    times.alone, times.draft = lambda batch, rows: 0.01, lambda batch, width: 1e-4
    times.beside, times.row_price = lambda rows, context: 0.011, lambda: 1e-5


@pytest.mark.parametrize("verify", [None, 4])
@pytest.mark.parametrize("has_drafter", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_what_followed_earlier_is_looked_up_on_the_device(family, has_drafter, verify):
    target = zoo.tiny_target(family, zoo.kernels("float32"), taps=(0, 2))
    drafter = zoo.tiny_drafter(target.kernels, 8) if has_drafter else None
    config = dataclasses.replace(AHEAD, ngram=True, verify=verify, max_batch=3)
    engine = Engine(target, drafter, config)
    rows_cost_nothing(engine)
    params = SamplingParams(max_tokens=60, ignore_eos=True, logit_bias={7: 20.0, 9: 20.1})
    repetitive = [Request(f"a{i}", [7, 9, 7, 7, 9, 5 + i] * 4, params, i) for i in range(3)]
    requests = [*repetitive, *requests_of_all_kinds(6)]
    done = zoo.run(engine, requests)
    assert tokens(done) == plain_tokens(target, requests)
    looked = [done[request.id].stats for request in repetitive]
    assert all(stats.accepted > 0.5 * stats.decode_tokens for stats in looked), looked
    assert engine.steps.slots.history is not None


class SlowToBegin:
    """Graphs as they are on a GPU: a shape's first two runs take the host long."""

    captures = True

    def __init__(self):
        self.runs = Counter()
        self.failed = set()

    def __iter__(self):
        return (key for key, runs in self.runs.items() if runs > 1)

    def is_ready(self, key):
        return self.runs[key] > 1

    def call(self, key, function):
        time.sleep(0.0 if self.is_ready(key) else 0.02)
        self.runs[key] += 1
        return function()


def verified(keys):
    """(batch, rows) of the target's passes among pieces of steps."""
    return {(key[1], key[2]) for key in keys if key[0] == "verify"}


def batches(keys):
    return {batch for batch, _ in verified(keys)}


def test_prepared_steps_are_not_captured_again_and_change_nothing():
    target, engine = build(max_batch=4, verify=None)
    engine._pipeline._steps.graphs = graphs = SlowToBegin()
    engine.prepare(seconds=60.0)
    prepared = set(graphs)
    sizes = engine.steps.sizes
    assert batches(prepared) == {1, 2, 4}
    assert verified(prepared) == {(b, rows) for b in (1, 2, 4) for rows in sizes.rows_for(b)}
    for requests in (greedy_requests(9), greedy_requests(9, temperature=0.8)):
        assert tokens(zoo.run(engine, requests)) == plain_tokens(target, requests)
    assert set(graphs.runs) == prepared


def test_preparing_stops_in_time_and_says_so(monkeypatch, caplog):
    _, engine = build(max_batch=4)
    engine._pipeline._steps.graphs = graphs = SlowToBegin()
    clock = iter(range(1000))
    monkeypatch.setattr(prepare, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    engine.prepare(seconds=16.5)  # two steps for each shape
    assert 0 < len(graphs.runs) < 17
    assert "not all steps are captured" in caplog.text


def test_what_steps_take_is_known_once_they_are_prepared():
    _, engine = build(max_batch=4, verify=None)
    engine._pipeline._steps.graphs = SlowToBegin()
    engine.prepare(seconds=60.0)
    times, sizes = engine.step_policy.times, engine.steps.sizes
    assert all(times.knows_alone(b, rows) for b in sizes.batches for rows in sizes.rows_for(b))
    assert times.row_price() > 0.0


def test_steps_are_prepared_behind_one_that_nobody_reads_any_more():
    target, engine = build(max_batch=2, verify=None)
    engine._pipeline._steps.graphs = graphs = SlowToBegin()
    requests = greedy_requests(2)
    free = Request("r0", [5, 6, 7], SamplingParams(max_tokens=90, ignore_eos=True), seed=0)
    spoken = plain_tokens(target, [free])["r0"]
    ends = dataclasses.replace(free.params, stop_token_ids=(spoken[4],))
    zoo.run(engine, [dataclasses.replace(free, params=ends)])
    assert engine._pipeline.is_flying  # the step behind the one with the stop token
    engine.prepare(seconds=60.0)
    prepared = set(graphs)
    assert tokens(zoo.run(engine, requests)) == plain_tokens(target, requests)
    assert set(graphs) == prepared


def test_nothing_is_prepared_while_requests_run():
    _, engine = build(max_batch=4)
    engine._pipeline._steps.graphs = graphs = SlowToBegin()
    engine.submit(greedy_requests(1)[0])
    engine.prepare(seconds=60.0)
    assert not graphs.runs


def test_a_step_that_cannot_be_prepared_is_no_failure(monkeypatch, caplog):
    target, engine = build(max_batch=4)
    engine._pipeline._steps.graphs = graphs = SlowToBegin()

    def fail(key, function):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(graphs, "call", fail)
        engine.prepare(seconds=60.0)
    assert "cannot be prepared: no room" in caplog.text
    requests = greedy_requests(3)
    assert tokens(zoo.run(engine, requests)) == plain_tokens(target, requests)


class FailsToCapture(Graphs):
    """Graphs on a device that has no memory for one of them."""

    def __init__(self, batch):
        super().__init__(torch.device("cpu"))
        self.captures, self.batch, self.asked = True, batch, []

    def call(self, key, function):
        self.asked.append(key)
        return super().call(key, function)

    def _record(self, function):
        if self.asked[-1][:2] == ("verify", self.batch):
            raise torch.OutOfMemoryError("no room")
        return SimpleNamespace(replay=function), None


def test_a_step_that_cannot_be_captured_costs_the_others_nothing(caplog):
    target, engine = build(max_batch=4)
    engine._pipeline._steps.graphs = graphs = FailsToCapture(batch=2)
    requests = [
        Request(f"r{i}", [5 + i], SamplingParams(max_tokens=30 - 6 * i, ignore_eos=True), seed=i)
        for i in range(4)
    ]
    assert tokens(zoo.run(engine, requests)) == plain_tokens(target, requests)
    assert batches(graphs.failed) == {2} and "no room" in caplog.text
    assert batches(graphs) >= {1, 4}


def test_preparing_ends_where_the_memory_does():
    _, engine = build(max_batch=4, verify=None)
    engine._pipeline._steps.graphs = graphs = FailsToCapture(batch=2)
    engine.prepare(seconds=60.0)
    assert batches(graphs) == {4} and len(graphs.failed) == 1


def test_preparing_writes_to_the_page_of_nobody_alone():
    _, engine = build(max_batch=4, verify=None)
    engine._pipeline._slots.tables.random_(1, 5)  # as other requests have left them
    engine._pipeline._steps.graphs = SlowToBegin()
    layers = engine.cache._storage
    before = [torch.stack(layer) for layer in layers]
    engine.prepare(seconds=60.0)
    changes = [
        (torch.stack(now) != old).any(-1).any(-1).any(-1).any(0)
        for now, old in zip(layers, before, strict=True)
    ]
    assert not any(pages[:-1].any() for pages in changes)  # the last page is nobody's
    changed = any(pages[-1] for pages in changes)
    assert changed  # the steps did run


def test_steps_say_what_they_were_chosen_for():
    _, engine = build(max_batch=4, verify=None)
    seen = []
    for request in greedy_requests(3, max_tokens=30):
        engine.submit(request)
    while engine.has_work:
        engine.step()
        seen.append(engine.last_step)
    decoded = [stats for stats in seen if stats.num_decoding]
    assert {stats.plain_tokens for stats in decoded} <= {1.0, 2.0, 3.0}  # somebody may have left
    assert all(stats.plain_s > 0.0 and stats.expected_s > 0.0 for stats in decoded)
    assert any(stats.expected_tokens > stats.plain_tokens for stats in decoded)


def test_no_pages_for_a_newcomer_is_no_reason_to_decode_without_drafts():
    target = zoo.tiny_target("llama", zoo.kernels("float32"), taps=(0, 2))
    drafter = zoo.tiny_drafter(target.kernels, 8)
    few = CacheOptions(cache_gb=zoo.cache_for(target, drafter, 8))
    config = EngineConfig(cache=few, max_batch=4, ngram=False, run_ahead=True)
    engine = Engine(target, drafter, config)
    engine.steps.graphs = SlowToBegin()
    choose, rows = engine.step_policy.choose, []

    def drafts(options, prompts, context):
        rows.append((len(prompts), options.rows))
        most = options.rows_beside if prompts else options.rows
        return choose(options, prompts, context)._replace(num_rows=most[0 if prompts else -1])

    engine.step_policy.choose = drafts
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [Request(f"r{i}", [5 + i] * 50, params, i) for i in range(4)]
    done = zoo.run(engine, requests)
    assert tokens(done) == plain_tokens(target, requests)
    assert all(done[request.id].stats.drafted > 0 for request in requests)


@pytest.mark.parametrize("has_drafter", [False, True])
def test_no_more_is_prepared_than_is_kept(has_drafter):
    target = zoo.tiny_target("llama", zoo.kernels("float32"), taps=(0, 2))
    drafter = zoo.tiny_drafter(target.kernels, 16) if has_drafter else None
    sizes = {"max_batch": 32, "max_step_tokens": 4096, "run_ahead": True}
    engine = Engine(target, drafter, EngineConfig(cache=CacheOptions(cache_gb=0.05), **sizes))
    engine.steps.graphs = graphs = SlowToBegin()
    engine.prepare(seconds=300.0)
    mixed = {key[1] for key in graphs if key[0] == "mixed"}
    assert mixed == {*MIXED_ROWS, *LONE_ROWS} and len(set(graphs)) <= MOST_GRAPHS


@pytest.mark.parametrize("limits", [{"max_context": 200}, {"max_step_tokens": 64}])
def test_every_pass_with_prompts_that_may_come_is_prepared(limits):
    target = zoo.tiny_target("llama", zoo.kernels("float32"), taps=(0, 2))
    config = dataclasses.replace(AHEAD, verify=None, max_batch=12, **limits)
    engine = Engine(target, zoo.tiny_drafter(target.kernels, 16), config)
    engine.steps.graphs = graphs = SlowToBegin()
    engine.prepare(seconds=300.0)
    prepared = set(graphs)
    dice, choose = random.Random(0), engine.step_policy.choose

    def anything(options, prompts, context):
        choice = choose(options, prompts, context)
        rows = dice.choice(options.rows_beside if prompts else options.rows)
        most = engine.scheduler.max_step_tokens
        return choice._replace(num_rows=rows, prompt_rows=min(sum(prompts), most))

    engine.step_policy.choose = anything
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    requests = [Request(f"r{i}", [5 + i] * (20 + 7 * i), params, i) for i in range(16)]
    zoo.run(engine, requests)
    assert set(graphs.runs) == prepared


def test_a_prefix_that_is_found_keeps_nobody_waiting():
    target = zoo.tiny_target("llama", zoo.kernels("float32"))
    config = dataclasses.replace(AHEAD, verify=0, max_batch=8, prefix_cache=True)
    engine = Engine(target, config=config)
    params, shared = SamplingParams(max_tokens=60, ignore_eos=True), list(range(4, 52))
    short = dataclasses.replace(params, max_tokens=2)
    zoo.run(engine, [Request("warm", [*shared, 60], short, 0)])
    found = Request("found", [*shared, 61], params, 0)
    late = Request("late", [11, 12, 13], params, 0)
    first = Request("first", [5, 9], params, 0)
    pieces, done = serve(engine, {0: [first], 9: [found], 10: [late]})
    assert done["found"].stats.cached_tokens >= 32
    assert pieces["late"][0][0] <= 13


def test_a_chunk_that_takes_others_pages_fails_no_step(monkeypatch, caplog):
    """Whoever gives way after the rows were chosen has none of them."""
    target, engine = build(max_batch=4, verify=None)
    engine.steps.graphs = SlowToBegin()
    plan, given = type(engine._pipeline)._plan_prompts, []
    choose = engine.step_policy.choose

    def widest(options, prompts, context):
        most = options.rows_beside if prompts else options.rows
        choice = choose(options, prompts, context)
        return choice._replace(num_rows=most[-1], prompt_rows=min(choice.prompt_rows, 20))

    engine.step_policy.choose = widest

    def greedy(self, budget):
        while budget and self._num_awake > 1 and self._asleep and len(given) < 4:
            given.append(1)
            self._give_way()
        return plan(self, budget)

    monkeypatch.setattr(type(engine._pipeline), "_plan_prompts", greedy)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    requests = [Request(f"r{i}", [5 + i, 9], params, i) for i in range(3)]
    long = Request("long", [7 + i % 50 for i in range(400)], params, 9)
    _, done = serve(engine, {0: [requests[0]], 3: [long], 6: requests[1:]})
    assert given and "failed" not in caplog.text
    assert tokens(done) == plain_tokens(target, [*requests, long])


@pytest.mark.parametrize("verify", [1, 2])
def test_a_fixed_length_is_kept_where_few_of_a_batch_are_awake(verify):
    target, engine = build(max_batch=40, verify=verify)
    engine.steps.graphs = SlowToBegin()
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    requests = [Request(f"r{i}", [5 + i, 9], params, i) for i in range(5)]
    done = zoo.run(engine, requests)
    assert tokens(done) == plain_tokens(target, requests)
    for generation in done.values():
        # near its end nothing is drafted behind which the target's own token has no place
        least = sum(min(verify, left) for left in range(generation.stats.steps))
        assert generation.stats.drafted >= least > 0


def test_what_a_cut_leaves_is_the_targets_own():
    """Acceptance from outside is asked about what a request wants verified alone."""
    target = zoo.tiny_target("gemma4", zoo.kernels("float32"), taps=(0, 2))

    def everything(samples, starts, nodes, is_node):
        counts = is_node.sum(1).tolist()
        for first, count, tokens in zip(starts.tolist(), counts, nodes.tokens, strict=False):
            samples[first : first + count] = tokens[:count]
        return pack_rows(is_node)

    config = dataclasses.replace(AHEAD, verify=None)
    engine = Engine(target, zoo.tiny_drafter(target.kernels, 8), config, accept=everything)
    engine.steps.graphs = SlowToBegin()  # rows of nobody fill a step up
    drawn, pieces = [], engine.steps.pieces
    choose = pieces._choose

    def spy(hidden, rows, place):
        found = choose(hidden, rows, place)
        drawn.append(found.tolist())
        return found.clone()

    pieces._choose = spy
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    generation = zoo.run(engine, [Request("a", [5, 6], params, 0, verify=1)])["a"]
    assert generation.stats.histogram[2] >= 11
    steps = [rows for rows in drawn if len(rows) > 1]  # the others are of the prompt
    bonuses = generation.token_ids[2::2]
    assert bonuses == [rows[1] for rows in steps[: len(bonuses)]]


# -- at the edges ----------------------------------------------------------------------------------


@pytest.mark.parametrize("has_drafter", [False, True])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_an_answer_may_fill_the_whole_cache(has_drafter, run_ahead):
    """Drafts need no pages behind the end, and nobody behind it waits for ever."""
    target = zoo.tiny_target("llama", zoo.kernels("float32"), taps=(0, 2))
    drafter = zoo.tiny_drafter(target.kernels, 8) if has_drafter else None
    few = CacheOptions(cache_gb=zoo.cache_for(target, drafter, 8))
    config = EngineConfig(cache=few, max_batch=3, verify=7, run_ahead=run_ahead)
    engine = Engine(target, drafter, config)
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    requests = [Request(f"r{i}", [5 + i, 6, 7], params, i) for i in range(3)]
    done = zoo.run(engine, requests)
    most = engine.max_context - 3
    expected = plain_tokens(target, requests)
    assert tokens(done) == {key: answer[:most] for key, answer in expected.items()}
    assert 50 < most < 500


@pytest.mark.parametrize("length", [60, 70, 101, 300])
def test_a_long_prompt_wakes_while_the_next_step_is_launched(length):
    target = zoo.tiny_target("llama", zoo.kernels("float32"))
    engine = Engine(target, config=dataclasses.replace(AHEAD, ngram=True, max_batch=2))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [Request("a", [5 + i % 9 for i in range(length)], params, 0)]
    done = zoo.run(engine, requests)
    assert done["a"].stats.preemptions == 0  # no step has failed
    assert tokens(done) == plain_tokens(target, requests)


def phrases(spec):
    return zoo.TokenGrammar(zoo.phrases)


def test_a_grammar_with_lookups_and_no_drafter_fails_no_step():
    target = zoo.tiny_target("qwen3", zoo.kernels("float32"))
    config = dataclasses.replace(AHEAD, ngram=True, max_batch=2)
    params, spec = SamplingParams(max_tokens=30), GrammarSpec("lark", "phrases")
    requests = [Request(f"r{i}", [9] * (26 + i), params, i, grammar=spec) for i in range(3)]
    done = zoo.run(Engine(target, config=config, grammar_compiler=phrases), requests)
    assert all(generation.stats.preemptions == 0 for generation in done.values())
    alone = Engine(target, config=PLAIN, grammar_compiler=phrases)
    assert tokens(done) == tokens(zoo.run(alone, requests))


def test_what_one_request_fixes_is_its_own():
    target, engine = build(max_batch=8, verify=1)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    requests = [Request(f"r{i}", [5 + i, 9], params, i) for i in range(7)]
    requests.append(Request("wide", [40, 9], params, 7, verify=6))
    launch, rows = engine.steps.launch, []

    def spy(shape, *rest):
        rows.append(shape.num_rows)
        return launch(shape, *rest)

    engine.steps.launch = spy
    done = zoo.run(engine, requests)
    assert tokens(done) == plain_tokens(target, requests)
    assert max(rows) <= 8 * 3  # 7 of 1 and 6 are 13: two each
    for generation in done.values():
        widest = 6 if generation is done["wide"] else 1
        assert len(generation.stats.slots_verified) <= widest


def test_what_is_prepared_for_a_fixed_length_is_what_runs():
    _, engine = build(max_batch=4, verify=3)
    engine.steps.graphs = SlowToBegin()
    engine.prepare(seconds=60.0)
    prepared = set(engine.steps.graphs)
    zoo.run(engine, greedy_requests(6, max_tokens=30, temperature=0.9))
    drafted = {key for key in engine.steps.graphs.runs if key[0] == "draft"}
    assert drafted and drafted <= prepared


@pytest.mark.parametrize(
    ("row_s", "host_s", "expected"),
    [(1e-4, 0.05, 1030), (2e-5, 0.05, LONE_ROWS[0]), (1e-4, 0.0, 1030), (1e-4, 0.16, 1536)],
)
def test_a_long_pass_is_filled_up_where_the_host_would_take_longer(row_s, host_s, expected):
    _, engine = build(max_batch=4)
    steps = engine.steps
    assert steps.fill_up(1030, 0) == 1030, "nothing is captured here"
    steps.graphs = SlowToBegin()
    steps.row_s, steps._host_s = row_s, host_s
    assert steps.fill_up(1030, 0) == expected
    assert steps.fill_up(1030, 4) == 1030, "with others in it there is no such pass"
    assert steps.fill_up(700, 0) == steps.fill_up(700, 4) == 704
    assert steps.fill_up(5000, 0) == 5000


def test_what_long_passes_take_is_known_once_steps_are_prepared():
    target = zoo.tiny_target("llama", zoo.kernels("float32"))
    cache = CacheOptions(cache_gb=0.05)
    config = EngineConfig(cache=cache, max_batch=4, max_step_tokens=4096, run_ahead=True)
    engine = Engine(target, config=config)
    engine.steps.graphs = SlowToBegin()
    engine.prepare(seconds=300.0)
    assert engine.steps._host_s > 0.0 and 0.0 < engine.steps.row_s < 0.1


@pytest.mark.parametrize("tree", [None, "auto"])
def test_who_has_no_rows_costs_nobody_their_scores(tree, monkeypatch):
    """Who has ended on the device, while the next step was in flight, may have no rows in it."""
    target, engine = build(max_batch=3, verify=None, tree=tree)
    engine._recover = None  # no step may fail
    choose, num_empty = StepPolicy.choose, 0

    def few(self, options, prompts=(), context=0):
        found = choose(self, options, prompts, context)
        awake = options.num_awake
        return found._replace(num_rows=awake + 2, width=7) if awake else found

    def count(self):
        nonlocal num_empty
        found = read(self)
        num_empty += sum(one.num_rows == 0 for one in found.slots)
        return found

    read = StepRecord.read
    monkeypatch.setattr(StepPolicy, "choose", few)
    monkeypatch.setattr(StepRecord, "read", count)
    lengths = (24, 16, 9)
    params = [SamplingParams(max_tokens=n, logprobs=2, ignore_eos=True) for n in lengths]
    requests = [Request(f"r{i}", [5 + i, 9], one, i) for i, one in enumerate(params)]
    done = zoo.run(engine, requests)
    assert tokens(done) == plain_tokens(target, requests)
    assert all(len(one.logprobs) == len(one.token_ids) for one in done.values())
    assert num_empty > 0
