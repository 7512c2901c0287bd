"""What fails ends alone: the engine lives on, and every other answer stays as it was."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch

from flashdraft.core import FinishReason, Request, SamplingParams
from flashdraft.engine.cache.pages import NO_PAGE
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.drafts import Draft
from flashdraft.engine.engine import Engine
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.registry import build_target
from tests import zoo

PLAIN = EngineConfig(verify=0, ngram=False, cache=CacheOptions(cache_gb=0.01))
DRAFTED = EngineConfig(verify=7, cache=CacheOptions(cache_gb=0.01))
POISON = 66  # the token that breaks things
BANNED = {POISON: -1000.0}


def healthy(count=3, max_tokens=14):
    params = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, temperature=0.8, logit_bias=BANNED
    )
    return [Request(f"r{i}", [4 + i] * (5 + 9 * i) + [9], params, seed=i) for i in range(count)]


def victim(place):
    """A request that meets the poison as its `place`-th token: in the prompt, or in the answer."""
    params = SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.8, logit_bias=BANNED)
    if place < 40:
        prompt = [11] * 40
        prompt[place] = POISON
        return Request("victim", prompt, params, seed=77)
    forced = dataclasses.replace(params, logit_bias={POISON: 1000.0})
    return Request("victim", [11] * 40, forced, seed=77)


@functools.cache
def clean_target(family="qwen3"):
    return zoo.tiny_target(family, zoo.kernels("float32"), taps=(0, 2))


def tokens(generations):
    return {key: generation.token_ids for key, generation in generations.items()}


def plain_answers(target, requests):
    return tokens(zoo.run(Engine(target, config=PLAIN), requests))


@functools.cache
def poisoned_target(backend, value=math.nan):
    """A target whose embedding of one token is not a number; the head is a clean one."""
    config = ModelConfig.from_hf(zoo.CONFIGS["qwen3"])
    tensors = zoo.random_tensors(config)
    tensors["model.embed_tokens.weight"][POISON] = value
    return build_target(config, zoo.Tensors(tensors), zoo.kernels(backend), (0, 2))


def break_forward(monkeypatch, target, error):
    """Make every pass over the poison raise."""
    forward = target.forward

    def broken(token_ids, batch):
        if POISON in token_ids.tolist():
            raise error
        return forward(token_ids, batch)

    monkeypatch.setattr(target, "forward", broken)


def assert_lives_on(engine, target):
    """Nothing is left behind, and the next requests are served as if nothing had happened."""
    engine.check_integrity()
    for pool in engine.book.pools:
        assert pool.num_available == pool.num_pages
    after = [dataclasses.replace(r, id=f"after-{r.id}") for r in healthy()]
    expected = plain_answers(target, after)
    proposer = engine.proposer and engine.proposer._proposer
    if isinstance(proposer, zoo.ScriptedProposer):
        proposer.answers.update(expected)
    assert tokens(zoo.run(engine, after)) == expected
    assert engine.last_step.num_decoding > 0


@pytest.mark.parametrize("place", [0, 17, 39, 40])
@pytest.mark.parametrize("with_drafter", [False, True])
def test_a_pass_that_raises_ends_only_its_request(monkeypatch, place, with_drafter):
    target = clean_target()
    requests = healthy()
    expected = plain_answers(target, requests)
    break_forward(monkeypatch, target, ValueError("no luck"))
    drafter = zoo.tiny_drafter(target.kernels) if with_drafter else None
    engine = Engine(target, drafter, dataclasses.replace(DRAFTED, prefill_chunk=16))
    done = zoo.run(engine, [requests[0], victim(place), *requests[1:]])
    failed = done.pop("victim")
    assert failed.finish_reason is FinishReason.ERROR and "ValueError: no luck" in failed.error
    assert failed.token_ids == ([POISON] if place == 40 else [])
    assert tokens(done) == expected
    assert_lives_on(engine, target)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_is_named_and_the_next_request_is_served(monkeypatch, error):
    target = clean_target()
    break_forward(monkeypatch, target, error)
    engine = Engine(target, zoo.tiny_drafter(target.kernels), DRAFTED)
    failed = zoo.run(engine, [victim(3)])["victim"]
    assert failed.finish_reason is FinishReason.ERROR
    assert "out of memory" in failed.error and "max_context" in failed.error
    assert_lives_on(engine, target)


def test_out_of_memory_of_a_large_batch_alone_loses_nothing(monkeypatch):
    target = clean_target("gemma4")
    requests = healthy(4)
    expected = plain_answers(target, requests)
    forward = target.forward

    def tight(token_ids, batch):
        if len(token_ids) > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(token_ids, batch)

    monkeypatch.setattr(target, "forward", tight)
    engine = Engine(target, zoo.tiny_drafter(target.kernels), DRAFTED)
    assert tokens(zoo.run(engine, requests)) == expected


def test_a_draft_that_breaks_the_pass_costs_no_request(monkeypatch):
    """Plainly decoded these requests never meet the poison: it stands in their drafts alone."""
    target = clean_target()
    requests = healthy()
    expected = plain_answers(target, requests)
    break_forward(monkeypatch, target, ValueError("no luck"))
    drafts = {key: [*answer[:5], POISON, *answer[6:]] for key, answer in expected.items()}
    engine = Engine(target, config=DRAFTED, proposer=zoo.ScriptedProposer(drafts, 0.0, 7))
    assert tokens(zoo.run(engine, requests)) == expected
    alone = Engine(target, config=DRAFTED, proposer=zoo.ScriptedProposer(drafts, 0.0, 7))
    assert tokens(zoo.run(alone, requests[:1])) == {"r0": expected["r0"]}


# -- logits that are not numbers -------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "float32", "int8"])
@pytest.mark.parametrize("place", [39, 40])
def test_nan_ends_only_its_request(backend, place):
    """Its pages are handed to others afterwards: what is left there must not leak into them."""
    target = poisoned_target(backend)
    requests = healthy(2, max_tokens=8)
    expected = plain_answers(target, requests)
    drafter = zoo.tiny_drafter(target.kernels)
    config = dataclasses.replace(DRAFTED, verify=3, max_context=64, prefix_cache=False)
    engine = Engine(target, drafter, config)
    done = zoo.run(engine, [victim(place), *requests])
    failed = done.pop("victim")
    assert failed.finish_reason is FinishReason.ERROR and "NaN" in failed.error
    assert "file of the model is damaged" in failed.error and "--verify-files" in failed.error
    assert "logit_bias" not in failed.error  # though the request has one
    assert failed.token_ids == ([POISON] if place == 40 else [])
    assert tokens(done) == expected
    for keys, values in engine.cache._storage:  # as if every page had been its own
        keys.fill_(math.nan)
        values.fill_(math.nan)
    again = [dataclasses.replace(r, id=f"again-{r.id}") for r in requests]
    assert list(tokens(zoo.run(engine, again)).values()) == list(expected.values())


def test_a_request_that_leaves_no_token_is_told_so():
    """Every token stops, and none may yet."""
    target = clean_target()
    params = SamplingParams(
        max_tokens=4, min_tokens=2, stop_token_ids=list(range(zoo.VOCAB)), logit_bias={3: 1.0}
    )
    failed = zoo.run(Engine(target, config=PLAIN), [Request("a", [4, 5], params, seed=1)])["a"]
    assert failed.finish_reason is FinishReason.ERROR
    assert "logit_bias and min_tokens leave no token to choose" in failed.error
    assert "damaged" not in failed.error


@pytest.mark.parametrize("backend", ["torch", "float32", "int8"])
def test_nan_behind_a_rejected_draft_does_not_matter(backend):
    target = poisoned_target(backend)
    requests = healthy(2, max_tokens=8)
    expected = plain_answers(target, requests)
    drafts = {key: [*answer[:3], POISON, *answer[4:]] for key, answer in expected.items()}
    engine = Engine(target, config=DRAFTED, proposer=zoo.ScriptedProposer(drafts, 0.0, 7))
    assert tokens(zoo.run(engine, requests)) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_nan_after_accepted_drafts_keeps_what_plain_decoding_shows(monkeypatch, temperature):
    """The row at position 5 is bad: of a prompt of two, four tokens come out and then the error."""
    target = clean_target()
    request = Request(
        "a", [5, 9], SamplingParams(max_tokens=12, ignore_eos=True, temperature=temperature), 4
    )
    answer = plain_answers(target, [request])["a"]
    forward, head, positions = target.forward, target.head, []

    def remember(token_ids, batch):
        positions[:] = batch.positions.tolist()
        return forward(token_ids, batch)

    def spoil(hidden):
        found = head(hidden)
        found.products[[place == 5 for place in positions[-len(hidden) :]]] = math.nan
        return found

    monkeypatch.setattr(target, "forward", remember)
    monkeypatch.setattr(target, "head", spoil)
    bare = zoo.run(Engine(target, config=PLAIN), [request])["a"]
    assert bare.token_ids == answer[:4] and bare.finish_reason is FinishReason.ERROR
    proposer = zoo.ScriptedProposer({"a": answer}, 0.0, 7)
    engine = Engine(target, config=dataclasses.replace(DRAFTED, ngram=False), proposer=proposer)
    drafted = zoo.run(engine, [request])["a"]
    assert drafted.token_ids == bare.token_ids and drafted.error == bare.error
    assert drafted.drafted == [False, True, True, True]
    assert drafted.stats.decode_tokens == drafted.stats.accepted == 3
    assert len(engine.last_step.verify_lengths) == engine.last_step.num_decoding == 1


# -- proposers -------------------------------------------------------------------------------------


class Faulty(zoo.ScriptedProposer):
    """A scripted proposer, one of whose methods raises from its n-th call on."""

    def __init__(self, answers, method, healthy_calls):
        super().__init__(answers, 0.2, 7)
        self._left = healthy_calls
        setattr(self, method, self._guard(getattr(self, method)))

    def _guard(self, method):
        def guarded(*arguments):
            self._left -= 1
            if self._left < 0:
                raise ValueError("the drafter is broken")
            return method(*arguments)

        return guarded


@pytest.mark.parametrize("method", ["propose", "buffer", "fold", "fold_overdue", "forget"])
@pytest.mark.parametrize("healthy_calls", [0, 4])
@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
def test_a_proposer_that_raises_costs_drafts_and_no_request(family, method, healthy_calls, caplog):
    target = clean_target(family)
    requests = healthy(max_tokens=30)  # gemma4: beyond its window of 20
    expected = plain_answers(target, requests)
    proposer = Faulty(expected, method, healthy_calls)
    engine = Engine(target, config=DRAFTED, proposer=proposer)
    done = zoo.run(engine, requests)
    assert tokens(done) == expected
    assert all(generation.error is None for generation in done.values())
    assert_lives_on(engine, target)
    assert "the drafter is broken" in caplog.text and "for 0 requests" not in caplog.text


def test_pages_behind_the_window_are_given_back_without_the_drafter_too():
    target = clean_target("gemma4")
    request = healthy(1, max_tokens=120)[0]
    expected = plain_answers(target, [request])
    engine = Engine(target, config=DRAFTED, proposer=Faulty(expected, "fold", 0))
    windows = [i for i, pool in enumerate(engine.book.pools) if pool.window is not None]
    engine.submit(request)
    held, done = [], {}
    while engine.has_work:
        done |= {e.request_id: e.generation for e in engine.step() if e.generation is not None}
        for sequence in engine.scheduler.running:
            tables = [engine.book.table(sequence, pool) for pool in windows]
            held += [sum(page != NO_PAGE for page in table) for table in tables]
    assert tokens(done) == expected
    assert max(held) <= 20 // 16 + 2  # the window, and the pages at both of its ends


@pytest.mark.parametrize("policy", [None, 7])
def test_a_drafter_of_nans_costs_drafts_and_no_request(policy):
    target = clean_target()
    requests = healthy()
    expected = plain_answers(target, requests)
    drafter = zoo.tiny_drafter(target.kernels)
    head = drafter.head
    drafter.head = lambda *rows: head(*rows)._replace(multiplier=math.nan)
    engine = Engine(target, drafter, dataclasses.replace(DRAFTED, verify=policy, ngram=False))
    done = zoo.run(engine, requests)
    assert tokens(done) == expected
    assert all(generation.error is None for generation in done.values())


@pytest.mark.parametrize("token", [-1, zoo.VOCAB])
def test_drafts_outside_the_vocabulary_cost_no_request(token):
    class Foreign(zoo.ScriptedProposer):
        def propose(self, works, samplers, limits):
            return [Draft([token] * work.room, [0.5] * work.room) for work in works]

    target = clean_target()
    requests = healthy()
    expected = plain_answers(target, requests)
    engine = Engine(target, config=DRAFTED, proposer=Foreign({}, 0.0, 7))
    assert tokens(zoo.run(engine, requests)) == expected


# -- the output side -------------------------------------------------------------------------------


def test_a_decoder_that_raises_ends_only_its_request():
    class Fragile:
        def push_pieces(self, ids):
            if POISON in ids:
                raise ValueError("cannot spell this")
            return [chr(97 + token % 26) for token in ids]

        def flush_pieces(self):
            raise ValueError("nor this")

    target = clean_target()
    requests = healthy()
    expected = plain_answers(target, requests)
    engine = Engine(target, zoo.tiny_drafter(target.kernels), DRAFTED, Fragile)
    done = zoo.run(engine, [requests[0], victim(40), *requests[1:]])
    failed = done.pop("victim")
    assert failed.finish_reason is FinishReason.ERROR and "cannot spell this" in failed.error
    assert tokens(done) == expected
    assert all("nor this" in generation.error for generation in done.values())
    assert_lives_on(engine, target)


# -- interrupts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["target.forward", "proposer.propose"])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_an_interrupt_before_the_commit_loses_nothing(monkeypatch, where, at):
    target = clean_target()
    requests = healthy()
    expected = plain_answers(target, requests)
    engine = Engine(target, config=DRAFTED, proposer=zoo.ScriptedProposer(expected, 0.3, 7))
    owner, name = (target, "forward") if where == "target.forward" else (engine.proposer, "propose")
    original, calls = getattr(owner, name), []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        zoo.run(engine, requests)
    engine.check_integrity()
    assert tokens(zoo.run(engine, [])) == expected
    assert_lives_on(engine, target)


def test_an_interrupt_inside_the_commit_ends_that_steps_requests_alone(monkeypatch):
    target = clean_target()
    requests = healthy(4)
    config = dataclasses.replace(DRAFTED, max_batch=2)
    expected = plain_answers(target, requests)
    engine = Engine(target, config=config, proposer=zoo.ScriptedProposer(expected, 0.3, 7))
    settle, calls = engine._committer.settle, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        settle(*arguments)

    monkeypatch.setattr(engine._committer, "settle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        zoo.run(engine, requests)
    engine.check_integrity()
    assert [engine.is_running(request.id) for request in requests] == [False, False, True, True]
    done = tokens(zoo.run(engine, []))
    assert done == {key: expected[key] for key in ("r2", "r3")}
    assert_lives_on(engine, target)
