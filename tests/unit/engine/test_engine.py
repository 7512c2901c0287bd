"""The engine's manners: events, texts, statistics, log-probabilities and cancelling.

What comes out must not depend on drafting, and what was promised in core.py must hold.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest
import torch

from flashdraft.core import FinishReason, Request, SamplingParams
from flashdraft.engine.cache.storage import Span
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.errors import ContextLengthError, RequestError
from flashdraft.models.layers import ForwardBatch
from tests import zoo

PLAIN = EngineConfig(verify=0, ngram=False, cache=CacheOptions(cache_gb=0.01))
DRAFTED = EngineConfig(verify=7, ngram=False, cache=CacheOptions(cache_gb=0.01))


class Letters:
    """A decoder in which every token is one letter."""

    def push_pieces(self, ids):
        return [chr(ord("a") + token % 26) for token in ids]

    def flush_pieces(self):
        return []


@pytest.fixture(scope="module")
def target():
    return zoo.tiny_target("qwen3", zoo.kernels("float32"), taps=(0, 2))


def plain(target, *requests):
    """Each request decoded plainly, all of them in one batch."""
    return zoo.run(Engine(target, config=PLAIN, new_decoder=Letters), requests)


def scripted(target, answers, wrong=0.0, config=DRAFTED):
    """An engine that drafts these answers, corrupted at a rate."""
    proposer = zoo.ScriptedProposer(answers, wrong, max_drafts=7)
    return Engine(target, config=config, proposer=proposer, new_decoder=Letters)


def both(target, request, wrong=0.3):
    """One request's answer decoded plainly and with drafts."""
    free = dataclasses.replace(
        request, params=dataclasses.replace(request.params, stop=(), stop_token_ids=())
    )
    answers = {request.id: plain(target, free)[request.id].token_ids}
    drafted = zoo.run(scripted(target, answers, wrong), [request])[request.id]
    return plain(target, request)[request.id], drafted


def assert_all_free(engine):
    assert not engine.has_work
    assert [pool.num_available for pool in engine.book.pools] == [
        pool.num_pages for pool in engine.book.pools
    ]
    engine.check_integrity()


# -- events and text -------------------------------------------------------------------------------


def test_events_joined_are_the_generation(target):
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.9, logprobs=2)
    requests = [Request(f"r{i}", [5 + i, 9, 12], params, seed=i) for i in range(3)]
    answers = {key: g.token_ids for key, g in plain(target, *requests).items()}
    engine = scripted(target, answers, wrong=0.3)
    for request in requests:
        engine.submit(request)
    events = defaultdict(list)
    while engine.has_work:
        for event in engine.step():
            assert event.token_ids, "an event without tokens"
            events[event.request_id].append(event)
    for request in requests:
        mine = events[request.id]
        assert [event.generation is not None for event in mine] == [False] * (len(mine) - 1) + [
            True
        ]
        generation = mine[-1].generation
        assert sum((list(event.token_ids) for event in mine), []) == generation.token_ids
        assert "".join(event.text for event in mine) == generation.text
        assert sum((list(event.drafted) for event in mine), []) == generation.drafted
        assert sum((list(event.logprobs) for event in mine), []) == generation.logprobs
        assert generation.token_ids == answers[request.id]
        assert any(generation.drafted) and not all(generation.drafted)


def test_the_first_token_is_no_draft_and_each_decode_step_ends_with_one_that_is_not(target):
    request = Request("a", [7, 8, 9], SamplingParams(max_tokens=22, ignore_eos=True), 0)
    answer = plain(target, request)["a"].token_ids
    engine = scripted(target, {"a": answer})
    engine.submit(request)
    flags = []
    while engine.has_work:
        flags += [event.drafted for event in engine.step()]
    assert flags == [
        (False,),
        (True,) * 7 + (False,),
        (True,) * 7 + (False,),
        (True,) * 4 + (False,),
    ]


def letters_of(tokens):
    return "".join(Letters().push_pieces(tokens))


@pytest.mark.parametrize("begin", range(1, 14, 2))
@pytest.mark.parametrize("length", [1, 3, 6])
def test_a_stop_string_ends_text_and_tokens_alike(target, begin, length):
    """Its letters lie anywhere in the blocks of eight, or across two of them."""
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0)
    free = Request("a", [5, 9, 33, 12], params, seed=11)
    answer = plain(target, free)["a"].token_ids
    letters = letters_of(answer)
    stop = letters[begin : begin + length]
    first = letters.index(stop)
    request = dataclasses.replace(free, params=dataclasses.replace(params, stop=(stop, "nothere")))
    for generation in both(target, request, wrong=0.0):
        assert generation.finish_reason is FinishReason.STOP
        assert generation.text == letters[:first]
        assert generation.token_ids == answer[: first + length]
        assert len(generation.drafted) == len(generation.token_ids)


def test_the_start_of_a_stop_string_is_shown_only_when_it_is_none(target):
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.5)
    answer = plain(target, Request("a", [5, 9], params, 0))["a"].token_ids
    letters = letters_of(answer)
    stop = letters[3:6] + "!"  # begins at the fourth letter, but never ends
    request = Request("a", [5, 9], dataclasses.replace(params, stop=(stop,)), 0)
    for config in (PLAIN, DRAFTED):
        engine = scripted(target, {"a": answer}, config=config)
        engine.submit(request)
        shown = ""
        while engine.has_work:
            for event in engine.step():
                shown += event.text
                assert letters.startswith(shown)
                if event.generation is None:
                    assert len(shown) not in (4, 5, 6)
        assert shown == letters


def test_token_ids_include_the_stop_token_and_the_text_does_not(target):
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8)
    free = Request("a", [5, 9, 33, 12], params, seed=5)
    answer = plain(target, free)["a"].token_ids
    for stop in answer[:10]:
        end = answer.index(stop)
        stopped = dataclasses.replace(params, stop_token_ids=(stop,))
        for generation in both(target, dataclasses.replace(free, params=stopped), wrong=0.0):
            assert generation.finish_reason is FinishReason.STOP
            assert generation.token_ids == answer[: end + 1]
            assert generation.text == letters_of(answer[:end])


def test_eos_ends_an_answer_unless_ignored(target):
    (eos,) = target.config.eos_token_ids
    params = SamplingParams(max_tokens=10, logit_bias={eos: 1000.0})
    for generation in both(target, Request("a", [5, 9], params, 0)):
        assert (generation.token_ids, generation.text) == ([eos], "")
        assert generation.finish_reason is FinishReason.STOP
    ignoring = dataclasses.replace(params, ignore_eos=True)
    for generation in both(target, Request("a", [5, 9], ignoring, 0)):
        assert generation.token_ids == [eos] * 10
        assert generation.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("min_tokens", [1, 4, 9])
def test_min_tokens_come_before_any_stop_token(target, min_tokens):
    (eos,) = target.config.eos_token_ids
    params = SamplingParams(max_tokens=20, logit_bias={eos: 1000.0}, min_tokens=min_tokens)
    for generation in both(target, Request("a", [5, 9], params, 0), wrong=0.0):
        assert len(generation.token_ids) == min_tokens + 1
        assert eos not in generation.token_ids[:-1]
        assert generation.token_ids[-1] == eos


def test_logit_bias_forces_and_bans(target):
    params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.0)
    request = Request("a", [5, 9], params, seed=3)
    usual = set(plain(target, request)["a"].token_ids)
    banned = dataclasses.replace(params, logit_bias=dict.fromkeys(usual, -1000.0))
    for generation in both(target, dataclasses.replace(request, params=banned)):
        assert usual.isdisjoint(generation.token_ids)
    forced = dataclasses.replace(params, logit_bias={41: 1000.0})
    for generation in both(target, dataclasses.replace(request, params=forced)):
        assert generation.token_ids == [41] * 16


# -- log-probabilities -----------------------------------------------------------------------------


def target_logits(target, tokens):
    """The target's logits after every one of these tokens, from one pass over an empty cache."""
    engine = Engine(target, config=PLAIN)
    engine.submit(Request("x", tokens, SamplingParams(max_tokens=1), 0))
    (work,) = engine.scheduler.schedule(0)
    cache = engine.cache
    rows = cache.rows(engine.book, [Span(work.sequence, 0, len(tokens))])
    layers = cache.layers(rows.views, 0, len(target.config.cached_layers))
    batch = ForwardBatch(rows.positions, rows.end_position, layers)
    return target.logits(target.forward(torch.tensor(tokens), batch).hidden)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_targets_own(target, temperature):
    params = SamplingParams(
        max_tokens=20, ignore_eos=True, temperature=temperature, logprobs=5, presence_penalty=0.7
    )
    prompt = [5, 9, 33, 12]
    bare, drafted = both(target, Request("a", prompt, params, seed=2))
    assert bare.token_ids == drafted.token_ids and drafted.stats.accepted > 0
    assert bare.logprobs == drafted.logprobs
    raw = target_logits(target, prompt + bare.token_ids)[len(prompt) - 1 : -1]
    expected = raw.double().log_softmax(-1)
    assert len(bare.logprobs) == len(bare.token_ids) == len(expected)
    for token, row, logprob in zip(bare.token_ids, expected, bare.logprobs, strict=True):
        assert logprob.logprob == pytest.approx(float(row[token]), abs=1e-6)
        best = row.topk(5)
        assert [place for place, _ in logprob.top] == best.indices.tolist()
        assert [value for _, value in logprob.top] == pytest.approx(best.values.tolist(), abs=1e-6)


def test_logprobs_of_a_batch_do_not_mix(target):
    requests = [
        dataclasses.replace(r, params=dataclasses.replace(r.params, logprobs=n))
        for r, n in zip(
            zoo.mixed_requests(6, max_tokens=16), [None, 0, 3, 20, None, 1], strict=True
        )
    ]
    alone = {r.id: plain(target, r)[r.id] for r in requests}
    answers = {key: generation.token_ids for key, generation in alone.items()}
    for together in (plain(target, *requests), zoo.run(scripted(target, answers, 0.2), requests)):
        for request in requests:
            assert together[request.id].logprobs == alone[request.id].logprobs
            count = request.params.logprobs
            if count is None:
                assert together[request.id].logprobs is None
            else:
                assert {len(entry.top) for entry in together[request.id].logprobs} == {count}


# -- statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_statistics_add_up(target, wrong):
    requests = zoo.mixed_requests(6, max_tokens=30)
    answers = {key: g.token_ids for key, g in plain(target, *requests).items()}
    engine = scripted(target, answers, wrong)
    for request in requests:
        engine.submit(request)
    steps, done = [], {}
    while engine.has_work:
        done |= {e.request_id: e.generation for e in engine.step() if e.generation is not None}
        steps.append(engine.last_step)
    for request in requests:
        generation, stats = done[request.id], done[request.id].stats
        assert stats.prompt_tokens == len(request.prompt_ids)
        assert stats.decode_tokens == len(generation.token_ids) - 1  # the prefill's is not in it
        assert sum(stats.histogram.values()) == stats.steps
        assert sum(n * count for n, count in stats.histogram.items()) == stats.decode_tokens
        assert stats.accepted == sum(generation.drafted)
        assert stats.accepted <= stats.drafted
        if stats.steps:
            assert stats.mean_accepted_length == stats.decode_tokens / stats.steps
        if wrong == 1.0:
            assert stats.accepted == 0 and set(stats.histogram) <= {1}
    for step in steps:
        assert len(step.verify_lengths) == step.num_decoding
        assert sum(step.verify_lengths) == step.num_drafted >= step.num_accepted
        assert all(0 <= length <= 7 for length in step.verify_lengths)
    totals = [generation.stats for generation in done.values()]
    assert sum(step.num_decoding for step in steps) == sum(s.steps for s in totals)
    assert sum(step.num_drafted for step in steps) == sum(s.drafted for s in totals)
    assert sum(step.num_accepted for step in steps) == sum(s.accepted for s in totals)
    computed = sum(s.prompt_tokens - s.cached_tokens for s in totals)
    assert sum(step.num_prefill_tokens for step in steps) == computed


def test_verify_lengths_say_what_was_chosen(target):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = [Request(f"r{n}", [5, 9 + n], params, 0, verify=n) for n in (0, 2, 5)]
    answers = {key: g.token_ids for key, g in plain(target, *requests).items()}
    engine = scripted(target, answers, 0.5, dataclasses.replace(DRAFTED, verify=None))
    for request in requests:
        engine.submit(request)
    engine.step()
    assert engine.last_step.verify_lengths == () and engine.last_step.num_prefill_tokens == 6
    engine.step()
    assert engine.last_step.verify_lengths == (0, 2, 5)
    zoo.run(engine, [])


@pytest.mark.parametrize(("any_width", "rows"), [(True, 4), (False, 8)])
def test_a_block_is_cut_only_for_a_drafter_that_was_trained_for_it(target, any_width, rows):
    drafter = zoo.tiny_drafter(target.kernels, any_width=any_width)
    widths = []
    forward = drafter.forward

    def watched(embeddings, attend, places):
        widths.append(len(embeddings))
        return forward(embeddings, attend, places)

    drafter.forward = watched
    engine = Engine(target, drafter, DRAFTED, new_decoder=Letters)
    request = Request("a", [5, 9], SamplingParams(max_tokens=20, ignore_eos=True), 0, verify=3)
    drafted = zoo.run(engine, [request])["a"]
    assert max(widths) == rows  # the anchor and the slots
    assert drafted.token_ids == plain(target, request)["a"].token_ids


def test_an_answer_of_one_token_has_no_decode_step(target):
    generation = plain(target, Request("a", [5], SamplingParams(max_tokens=1), 0))["a"]
    assert generation.stats.steps == 0 and generation.stats.mean_accepted_length == 0.0
    assert generation.stats.histogram == {} and generation.stats.decode_tokens == 0
    assert generation.stats.ttft_s > 0 and generation.stats.tokens_per_s == 0.0


# -- cancelling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
def test_cancel_at_any_point(family, num_steps):
    """The victim's prefill takes four steps; then it decodes."""
    target = zoo.tiny_target(family, zoo.kernels("float32"), taps=(0, 2))
    drafter = zoo.tiny_drafter(target.kernels)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    prompt = [4 + i * 7 % 60 for i in range(55)]
    victim = Request("victim", prompt, params, 0)
    others = [Request(f"r{i}", prompt[: 6 + i], params, i) for i in range(2)]
    expected = {r.id: plain(target, r)[r.id].token_ids for r in [victim, *others]}
    config = EngineConfig(
        verify=7, prefill_chunk=16, max_step_tokens=48, cache=CacheOptions(cache_gb=0.01)
    )
    engine = Engine(target, drafter, config)
    for request in (others[0], victim, others[1]):
        engine.submit(request)
    before = [event for _ in range(num_steps) for event in engine.step()]
    seen = [t for event in before if event.request_id == "victim" for t in event.token_ids]
    engine.cancel("victim")
    engine.cancel("victim")
    engine.cancel("somebody else")
    sequence = engine._live["victim"].sequence
    events = engine.step()
    (last,) = [event for event in events if event.request_id == "victim"]
    assert last.generation.finish_reason is FinishReason.CANCELLED
    assert last.generation.token_ids == seen == expected["victim"][: len(seen)]
    assert sequence not in engine.book and sequence not in engine.proposer._proposer._buffered
    engine.check_integrity()
    done = {e.request_id: e.generation for e in [*before, *events] if e.generation is not None}
    done |= zoo.run(engine, [])
    assert {r.id: done[r.id].token_ids for r in others} == {r.id: expected[r.id] for r in others}
    assert_all_free(engine)
    assert zoo.run(engine, [victim])["victim"].token_ids == expected["victim"]


@pytest.mark.parametrize("num_steps", range(5))
def test_cancelling_the_only_request_frees_every_page_without_a_step(target, num_steps):
    engine = Engine(
        target, zoo.tiny_drafter(target.kernels), EngineConfig(cache=CacheOptions(cache_gb=0.01))
    )
    engine.submit(Request("a", [5] * 40, SamplingParams(max_tokens=30, ignore_eos=True), 0))
    tokens = [t for _ in range(num_steps) for e in engine.step() for t in e.token_ids]
    engine.cancel("a")
    (event,) = engine.flush_cancelled()
    assert event.generation.finish_reason is FinishReason.CANCELLED
    assert event.generation.token_ids == tokens and event.token_ids == ()
    assert engine.flush_cancelled() == [] and engine.step() == []
    assert_all_free(engine)


def test_cancelling_one_that_waits_behind_a_full_batch(target):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    requests = [Request(f"r{i}", [5, 6 + i], params, 0) for i in range(3)]
    engine = Engine(target, config=dataclasses.replace(PLAIN, max_batch=1))
    expected = plain(target, *requests)
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.cancel("r1")
    (event,) = [event for event in engine.step() if event.request_id == "r1"]
    assert event.generation.finish_reason is FinishReason.CANCELLED
    assert event.generation.token_ids == []
    done = zoo.run(engine, [])
    assert {k: g.token_ids for k, g in done.items()} == {
        k: expected[k].token_ids for k in ("r0", "r2")
    }
    engine.cancel("r0")  # long gone
    assert engine.step() == []
    assert_all_free(engine)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"prompt_ids": []}, RequestError, "empty"),
        ({"prompt_ids": [5, -1]}, RequestError, "-1.*0 to 66"),
        ({"prompt_ids": [zoo.VOCAB]}, RequestError, "67.*0 to 66"),
        ({"prompt_ids": [True]}, RequestError, "True"),
        ({"prompt_ids": [5.0]}, RequestError, r"5\.0"),
        ({"prompt_ids": ["5"]}, RequestError, "'5'"),
        ({"prompt_ids": [5] * 512}, ContextLengthError, "512 tokens.*Shorten"),
        ({"verify": -1}, RequestError, "verify is -1"),
        ({"verify": 2.5}, RequestError, r"verify is 2\.5"),
        ({"verify": True}, RequestError, "verify is True"),
        ({"params": SamplingParams(logit_bias={99: 1.0})}, RequestError, "99.*66"),
        ({"params": SamplingParams(stop_token_ids=[99])}, RequestError, "99.*66"),
    ],
)
def test_what_cannot_be_served_is_refused_and_leaves_nothing(target, change, error, message):
    engine = Engine(target, config=PLAIN)
    good = Request("good", [5, 6], SamplingParams(max_tokens=4), 0)
    with pytest.raises(error, match=message):
        engine.submit(dataclasses.replace(good, **change))
    assert_all_free(engine)
    assert zoo.run(engine, [good])["good"].token_ids == plain(target, good)["good"].token_ids


def test_an_id_in_use_is_refused(target):
    engine = Engine(target, config=PLAIN)
    request = Request("a", [5], SamplingParams(max_tokens=3), 0)
    engine.submit(request)
    with pytest.raises(RequestError, match="'a' is already running"):
        engine.submit(request)
    zoo.run(engine, [])
    zoo.run(engine, [request])
