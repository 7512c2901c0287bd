"""The law with pictures: drafted = plain, together = alone, cached = cold, and however it is cut.

Bit for bit, tokens and log-probabilities, over targets whose features are noise seeded by a
picture's key: a row that sees another picture, or half of one, says something else.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter

import pytest

from flashdraft.core import FinishReason, SamplingParams
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.engine.step import device
from tests import pictured, zoo
from tests.pictured import picture, request, words
from tests.unit.engine.step.test_pipeline import Oracle, limit_prompts

ROOMY = CacheOptions(cache_gb=0.01)
PLAIN = EngineConfig(verify=0, ngram=False, prefix_cache=False, cache=ROOMY)
LOOPS = {"at_once": {"run_ahead": False}, "ahead": {"run_ahead": True}}
SETTINGS = [
    SamplingParams(max_tokens=9, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=7, temperature=1.0),
    SamplingParams(max_tokens=7, temperature=0.8, repetition_penalty=1.3, logprobs=0),
    SamplingParams(max_tokens=6, temperature=1.2, top_p=0.9, top_k=30),
]
LARGE = picture("large", 33)  # than the window, and than most chunks
PROMPTS = {
    "first": [picture("a", 9), words(12)],
    "middle": [words(14), [pictured.BEGIN], picture("b", 9), [pictured.END], words(7, seed=1)],
    "last": [words(5), picture("a", 9)],
    "alone": [picture("c", 16)],
    "two": [words(3), picture("a", 9), picture("b", 9), words(4)],
    "large": [words(4), LARGE, words(9, seed=2)],
    "largest first": [LARGE, picture("d", 1), words(2)],
    "many": [words(17), *(picture(name, 5) for name in "abcde"), words(3), picture("a", 9), [7]],
    "text": [words(30, seed=3)],
    "film": [words(5), *pictured.film("a", 4, 9), words(6)],
    "film and picture": [*pictured.film("b", 2, 6), picture("a", 9), words(3)],
}


FASTEST = pictured.BACKENDS[-1]


@functools.cache
def target(backend=FASTEST, family="gemma4"):
    return pictured.tiny_target(zoo.kernels(backend), family)


def requests():
    return [
        request(name, parts, SETTINGS[i % len(SETTINGS)], seed=40 + i)
        for i, (name, parts) in enumerate(PROMPTS.items())
    ]


@functools.cache  # the same answers serve many tests
def alone(backend=FASTEST, family="gemma4"):
    """Each request decoded alone, plainly, its prompt in one chunk, in an engine of its own."""
    model, answers = target(backend, family), {}
    for one in requests():
        answers.update(zoo.run(Engine(model, config=PLAIN), [one]))
    return answers


def assert_same(done, expected):
    assert done.keys() == expected.keys()
    for name, generation in done.items():
        assert generation.error is None
        assert generation.token_ids == expected[name].token_ids, name
        assert generation.logprobs == expected[name].logprobs, name
        assert generation.finish_reason is expected[name].finish_reason


def tokens(generations):
    return {name: generation.token_ids for name, generation in generations.items()}


def engine_of(model=None, has_drafter=True, **settings):
    model = model or target()
    drafter = zoo.tiny_drafter(model.kernels, 4) if has_drafter else None
    return Engine(model, drafter, EngineConfig(**{"verify": 3, "cache": ROOMY, **settings}))


def test_the_prompts_mean_what_they_say():
    """Features matter, so do their order and their number; the answers are not all alike."""
    answers = tokens(alone())
    assert len({tuple(ids[:4]) for ids in answers.values()}) >= 7
    variants = {
        "ab": [words(3), picture("a", 9), picture("b", 9), words(4)],
        "ba": [words(3), picture("b", 9), picture("a", 9), words(4)],
        "aa": [words(3), picture("a", 9), picture("a", 9), words(4)],
        "ids": [words(3), [pictured.PICTURE] * 18, words(4)],
    }
    params = SamplingParams(max_tokens=14, ignore_eos=True, logprobs=1)
    found = zoo.run(
        Engine(target(), config=PLAIN), [request(k, v, params) for k, v in variants.items()]
    )
    assert len({one.logprobs[0].logprob for one in found.values()}) == 4
    assert not any(
        token in (pictured.BEGIN, pictured.PICTURE, pictured.END)
        for one in (*alone().values(), *found.values())
        for token in one.token_ids
    )


@pytest.mark.parametrize("backend", pictured.BACKENDS)
@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.0])
def test_scripted_drafts_do_not_change_a_bit(wrong, backend):
    expected = alone(backend)
    script = zoo.ScriptedProposer(tokens(expected), wrong, max_drafts=3)
    config = EngineConfig(verify=3, ngram=False, cache=ROOMY)
    done = zoo.run(Engine(target(backend), config=config, proposer=script), requests())
    assert_same(done, expected)
    accepted = sum(generation.stats.accepted for generation in done.values())
    assert (accepted == 0) == (wrong == 1.0)


@pytest.mark.parametrize("backend", pictured.BACKENDS)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("has_drafter", [True, False])
@pytest.mark.parametrize("family", ["gemma4", "gemma4_moe", "gemma4_small"])
def test_together_and_drafted_is_as_alone_and_plain(family, has_drafter, loop, backend):
    engine = engine_of(target(backend, family), has_drafter, **LOOPS[loop])
    done = zoo.run(engine, requests())
    assert_same(done, alone(backend, family))
    for one in requests():
        stats = done[one.id].stats
        assert stats.picture_tokens == sum(
            map(one.prompt_ids.count, (pictured.PICTURE, pictured.VIDEO))
        )


@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_the_law_holds_one_step_behind(wrong):
    engine = engine_of(**LOOPS["ahead"], ngram=False)
    Oracle(engine, tokens(alone()), wrong)
    done = zoo.run(engine, requests())
    assert_same(done, alone())
    assert sum(generation.stats.accepted for generation in done.values()) > 5


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_any_chunk_is_as_one_chunk(chunk, loop):
    engine = engine_of(prefill_chunk=chunk, max_step_tokens=33, **LOOPS[loop])
    assert_same(zoo.run(engine, requests()), alone())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_second_time_is_as_the_first_and_needs_no_tower(loop):
    model = pictured.tiny_target(zoo.kernels(FASTEST))
    engine = engine_of(model, **LOOPS[loop])
    assert_same(zoo.run(engine, requests()), alone())
    num_seen = {p.picture.key for one in requests() for p in one.pictures}
    assert sorted(model.vision.encoded) == sorted(num_seen)  # each of them once
    again = [dataclasses.replace(one, id=f"again {one.id}") for one in requests()]
    done = zoo.run(engine, again)
    assert_same({k.removeprefix("again "): g for k, g in done.items()}, alone())
    assert done["again many"].stats.cached_tokens == 32  # 48 is inside of a picture
    assert sorted(model.vision.encoded) == sorted(num_seen)


@pytest.mark.parametrize("loop", LOOPS)
def test_who_gives_way_goes_on_as_if_it_had_not(loop):
    model = target()
    drafter = zoo.tiny_drafter(model.kernels, 4)
    few = CacheOptions(cache_gb=zoo.cache_for(model, drafter, 12))
    sizes = {"prefill_chunk": 7, "max_step_tokens": 40, "max_batch": 8}
    engine = Engine(model, drafter, EngineConfig(verify=3, cache=few, **sizes, **LOOPS[loop]))
    again = [
        dataclasses.replace(one, id=f"{one.id} {turn}") for turn in range(2) for one in requests()
    ]
    done = zoo.run(engine, again)
    assert sum(generation.stats.preemptions for generation in done.values()) > 0
    for turn in range(2):
        found = {k[:-2]: g for k, g in done.items() if k.endswith(str(turn))}
        assert_same(found, alone())
    assert all(pool.num_available == pool.num_pages for pool in engine.book.pools)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_picture_larger_than_all_that_is_left_of_a_step_does_not_starve(loop):
    """Beside those who decode there are few rows for prompts in any step."""
    engine = engine_of(verify=0, max_batch=3, **LOOPS[loop], max_step_tokens=33)
    limit_prompts(engine, 2)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    early = [request(f"early{i}", [words(3 + i)], params) for i in range(2)]
    late = request("late", [words(3), LARGE, LARGE, words(4)], SamplingParams(max_tokens=4))
    for one in early:
        engine.submit(one)
    for _ in range(4):
        engine.step()
    engine.submit(late)
    done, ends = {}, {}
    for step in range(200):
        for event in engine.step():
            if event.generation is not None:
                done[event.request_id], ends[event.request_id] = event.generation, step
        engine.check_integrity()
    assert ends["late"] < 20 < ends["early0"]
    for one in (*early, late):
        assert zoo.run(Engine(target(), config=PLAIN), [one])[one.id].token_ids == (
            done[one.id].token_ids
        )


@pytest.mark.parametrize("loop", LOOPS)
def test_a_full_step_and_a_whole_picture_fit(loop):
    """Rows of everybody, of other prompts up to the limit, and of one picture more."""
    engine = engine_of(verify=3, max_batch=8, max_step_tokens=33, **LOOPS[loop])
    largest, forward = 0, engine.target.forward
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    early = [request(f"a{i}", [words(8, seed=i)], params) for i in range(4)]
    late = [request(f"b{i}", [words(5, seed=i), LARGE], params) for i in range(4)]

    def counted(token_ids, batch):
        nonlocal largest
        largest = max(largest, len(token_ids))
        return forward(token_ids, batch)

    expected = tokens(zoo.run(Engine(target(), config=PLAIN), [*early, *late]))
    engine.target.forward = counted
    try:
        for one in early:
            engine.submit(one)
        for _ in range(3):
            engine.step()
        assert tokens(zoo.run(engine, late)).items() <= expected.items()
    finally:
        engine.target.forward = forward
    assert largest > 33
    assert largest <= len(engine.steps.pieces.hidden)


# -- as on a GPU -----------------------------------------------------------------------------------


class Replayed:
    """Graphs as they are on a GPU: what ran first by a key is what runs, whatever is asked for."""

    captures = True

    def __init__(self, device):
        self.functions, self.runs, self.failed = {}, Counter(), set()

    def __iter__(self):
        return iter(self.functions)

    def __len__(self):
        return len(self.functions)

    def is_ready(self, key):
        return self.runs[key] > 1

    def call(self, key, function):
        self.runs[key] += 1
        return self.functions.setdefault(key, function)()


@pytest.fixture
def replayed(monkeypatch):
    monkeypatch.setattr(device, "Graphs", Replayed)


def watch(engine, monkeypatch):
    """The pictures of every pass: (rows, where its tensors lie, its pictures' rows)."""
    passes, forward = [], engine.target.forward

    def watched(token_ids, batch):
        found = batch.pictures
        places = found and tuple(one.data_ptr() for one in vars(found).values())
        passes.append((len(token_ids), places, found and found.is_picture.tolist()))
        if found is not None:
            assert {len(one) for one in vars(found).values()} == {len(token_ids)}
            assert not found.ahead[~found.is_picture].any()
        return forward(token_ids, batch)

    monkeypatch.setattr(engine.target, "forward", watched)
    return passes


def test_captured_passes_read_the_same_buffers_whatever_they_hold(replayed, monkeypatch):
    engine = engine_of(pictured.tiny_target(zoo.kernels(FASTEST)), run_ahead=True, max_batch=4)
    passes = watch(engine, monkeypatch)
    text = [request(f"text{i}", [words(20, seed=i)], SETTINGS[0]) for i in range(3)]
    expected = {**alone(), **zoo.run(Engine(target(), config=PLAIN), text)}
    done = zoo.run(engine, [*requests(), *text])
    assert tokens(done) == tokens(expected)
    assert engine.steps.pieces._captured and any(key[0] == "mixed" for key in engine.steps.graphs)
    beside = [one for one in passes if one[1] is not None]
    assert len({one[1] for one in beside}) == 1
    assert {one[0] for one in beside} == {128}
    assert any(any(one[2]) for one in beside) and not all(any(one[2]) for one in beside)
    assert any(one[1] is None for one in passes), "who decodes alone has no pictures"


@pytest.mark.parametrize("family", ["gemma4", "gemma4_small"])
def test_prepared_passes_see_the_pictures_that_come_later(replayed, family):
    engine = engine_of(target(family=family), run_ahead=True, max_batch=2, max_step_tokens=64)
    engine.prepare(60.0)
    assert any(key[0] == "mixed" for key in engine.steps.graphs)
    some, expected = requests()[:3], tokens(alone(family=family))
    assert tokens(zoo.run(engine, some)) == {one.id: expected[one.id] for one in some}


def test_a_text_has_no_pictures_in_its_pass(monkeypatch):
    engine = engine_of()
    passes = watch(engine, monkeypatch)
    zoo.run(engine, [request("text", [words(30)], SETTINGS[0])])
    assert passes and all(one[1] is None for one in passes)
    assert engine.pictures.num_encoded == engine.pictures.num_found == 0


# -- random traces ---------------------------------------------------------------------------------


@functools.cache
def pool():
    """Requests that begin alike, with their plain answers."""
    source, found = random.Random(4), []
    for number in range(24):
        params = SETTINGS[number % len(SETTINGS)]
        if number % 2:  # they outgrow the pages that their prompts came with
            params = dataclasses.replace(params, max_tokens=30, ignore_eos=True)
        parts = [*pictured.random_parts(source, 30), words(1, seed=number)]
        one = request(f"r{number}", parts[:-1] if number % 3 == 0 else parts, params, seed=number)
        found.append((one, zoo.run(Engine(target(), config=PLAIN), [one])[one.id].token_ids))
    return found


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("group", range(5))
def test_random_traces_keep_the_law_and_every_page(group, loop):
    met = Counter()
    for seed in range(20):  # ten groups: two hundred traces
        met += random_trace(random.Random(f"{group} {loop} {seed}"), LOOPS[loop])
    assert met["done"] > 10 and met["cancelled"] > 0 and met["preempted"] > 0, met
    assert met["cached"] > 0


def random_trace(source, loop):
    """A few requests that come and leave while others run, in an engine of few pages."""
    model, met = target(), Counter()
    drafter = zoo.tiny_drafter(model.kernels, 4) if source.random() < 0.5 else None
    settings = {
        "cache": CacheOptions(
            cache_gb=zoo.cache_for(model, drafter, source.choice([9, 10, 14, 40]))
        ),
        "max_batch": source.choice([3, 8]),
        "max_step_tokens": source.choice([30, 64]),
        "prefill_chunk": source.choice([5, 16, 40]),
        "verify": source.choice([0, 1, 3]),
    }
    engine, done, chosen = Engine(model, drafter, EngineConfig(**settings, **loop)), {}, {}
    for number in range(source.randint(4, 8)):
        one, answer = source.choice(pool())
        chosen[f"{one.id} {number}"] = one, answer
    coming, cancelled = list(chosen), set()
    for _ in range(600):
        if coming and source.random() < 0.7:
            name = coming.pop()
            engine.submit(dataclasses.replace(chosen[name][0], id=name))
        if source.random() < 0.03:
            name = source.choice(list(chosen))
            if engine.is_running(name):
                engine.cancel(name)
                cancelled.add(name)
        for event in engine.step():
            if event.generation is not None:
                done[event.request_id] = event.generation
        engine.check_integrity()
        if not engine.has_work and not coming:
            break
    assert done.keys() == chosen.keys()
    for name, generation in done.items():
        one, answer = chosen[name]
        if generation.finish_reason is FinishReason.CANCELLED:
            assert name in cancelled
            assert generation.token_ids == answer[: len(generation.token_ids)]
        else:
            assert generation.error is None and generation.token_ids == answer, one
        met["cancelled"] += generation.finish_reason is FinishReason.CANCELLED
        met["done"] += generation.finish_reason is not FinishReason.CANCELLED
        met["preempted"] += generation.stats.preemptions
        met["cached"] += generation.stats.cached_tokens
    assert all(one.num_available == one.num_pages for one in engine.book.pools)
    return met
