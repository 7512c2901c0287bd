"""Grammars: every answer is a sentence, drafts change no token, and a broken matcher ends alone."""

from __future__ import annotations

import dataclasses
import functools
import random

import numpy as np
import pytest
import torch

from flashdraft.core import FinishReason, GrammarSpec, Request, SamplingParams
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.drafts import FORCED_SOURCE, Draft
from flashdraft.engine.engine import Engine
from flashdraft.engine.sampling.grammar import Constraint, GrammarError
from flashdraft.engine.sampling.mask import apply_masks, mask_on_device
from flashdraft.errors import RequestError
from tests import zoo

EOS = 2
SPEC = GrammarSpec("lark", "phrases")
PLAIN = EngineConfig(verify=0, ngram=False, cache=CacheOptions(cache_gb=0.01))
DRAFTED = EngineConfig(verify=7, cache=CacheOptions(cache_gb=0.01))
GRAMMAR = zoo.TokenGrammar(zoo.phrases)


def compiler(spec):
    """By the grammar's text: "phrases", or "broken N" which fails after N tokens."""
    name, _, place = spec.text.partition(" ")
    return zoo.TokenGrammar(zoo.phrases, breaks_at=int(place) if name == "broken" else None)


@functools.cache
def target(family="qwen3"):
    return zoo.tiny_target(family, zoo.kernels("float32"), taps=(0, 2))


def engine_of(config, *, family="qwen3", drafter=False, proposer=None):
    small = zoo.tiny_drafter(target(family).kernels) if drafter else None
    return Engine(target(family), small, config, proposer=proposer, grammar_compiler=compiler)


def mixed_requests(count=6, max_tokens=40):
    """Every other request has a grammar; settings of all kinds."""
    return [
        dataclasses.replace(request, grammar=SPEC) if i % 3 != 1 else request
        for i, request in enumerate(zoo.mixed_requests(count, max_tokens=max_tokens))
    ]


@functools.cache
def expected(family="qwen3", count=6):
    """Each request alone and plain."""
    answers = {}
    for request in mixed_requests(count):
        answers.update(zoo.run(engine_of(PLAIN, family=family), [request]))
    return answers


def tokens(generations):
    return {key: generation.token_ids for key, generation in generations.items()}


def is_sentence(generation):
    assert generation.finish_reason is FinishReason.STOP, generation
    assert generation.token_ids[-1] == EOS
    return GRAMMAR.matches(generation.token_ids[:-1])


# -- the law ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(zoo.CONFIGS))
def test_plain_answers_are_sentences(family):
    answers = expected(family)
    for request in mixed_requests():
        if request.grammar and not request.params.ignore_eos:
            assert is_sentence(answers[request.id])
    assert len({tuple(ids) for ids in tokens(answers).values()}) == len(answers)


@pytest.mark.parametrize("family", list(zoo.CONFIGS))
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_scripted_drafts_change_no_token(family, wrong):
    answers = tokens(expected(family))
    proposer = zoo.ScriptedProposer(answers, wrong, max_drafts=7)
    done = zoo.run(engine_of(DRAFTED, family=family, proposer=proposer), mixed_requests())
    assert tokens(done) == answers
    free = [g for key, g in done.items() if key in ("r1", "r4")]
    bound = [g for key, g in done.items() if key not in ("r1", "r4")]
    if wrong == 1.0:  # what the grammar forces is found all the same
        assert sum(g.stats.accepted for g in bound) > 0.3 * sum(len(g.token_ids) for g in bound)
    else:
        assert all(g.stats.accepted > 0 for g in [*free, *bound])


@pytest.mark.parametrize("family", list(zoo.CONFIGS))
@pytest.mark.parametrize("verify", [None, 1, 7])
@pytest.mark.parametrize("ngram", [False, True])
def test_block_drafts_change_no_token(family, verify, ngram):
    config = EngineConfig(verify=verify, ngram=ngram, cache=CacheOptions(cache_gb=0.01))
    done = zoo.run(engine_of(config, family=family, drafter=True), mixed_requests())
    assert tokens(done) == tokens(expected(family))


def test_a_draft_may_reach_the_end_of_a_grammar_without_stop_tokens(caplog):
    """No row behind the end is asked for: nothing fails there, and drafts go on."""
    grammar = zoo.TokenGrammar(lambda ids: ({7} if len(ids) < 6 else set(), len(ids) == 6))
    constraint = Constraint(grammar, (), 0, zoo.VOCAB)
    assert len(constraint.masks([7, 7], [7, 7, 7, 7, 7])) == 4
    assert not constraint.failures and not caplog.text
    assert constraint.ends([7] * 6) and not constraint.ends([7] * 5)
    assert constraint.fit([7], None, 3).tokens == [7, 7, 7]


@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_preemption_and_small_chunks_change_no_token(family):
    drafter = zoo.tiny_drafter(target(family).kernels)
    size = zoo.cache_for(target(family), drafter, 17)
    config = EngineConfig(
        max_batch=8, cache=CacheOptions(cache_gb=size), prefill_chunk=7, max_step_tokens=40
    )
    done = zoo.run(engine_of(config, family=family, drafter=True), mixed_requests(8))
    assert tokens(done) == tokens(expected(family, 8))
    assert sum(g.stats.preemptions for g in done.values()) > 0


def test_verify_zero_is_plain_for_one_request():
    requests = [dataclasses.replace(r, verify=0) for r in mixed_requests()]
    done = zoo.run(engine_of(DRAFTED), requests)
    assert tokens(done) == tokens(expected())
    assert all(g.stats.drafted == 0 for g in done.values())


# -- drafts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [None, 7])
def test_forced_tokens_are_drafts_without_any_drafter(verify):
    config = EngineConfig(verify=verify, ngram=False, cache=CacheOptions(cache_gb=0.01))
    requests = [r for r in mixed_requests() if r.grammar]
    done = zoo.run(engine_of(config), requests)
    assert tokens(done) == {key: tokens(expected())[key] for key in done}
    if verify:  # a forced token is always right
        assert all(g.stats.accepted == g.stats.drafted > 0 for g in done.values())
        assert all(g.stats.steps < 0.8 * len(g.token_ids) for g in done.values())


def test_drafts_of_the_block_drafter_are_sentences_and_forced_tokens_are_certain():
    engine = engine_of(dataclasses.replace(DRAFTED, ngram=False), drafter=True)
    seen = []
    choose = engine.policy.choose

    def spy(drafts, *rest):
        works = [s for s in engine.scheduler.running if s.is_decoding]
        seen.extend((list(s.output_ids), d) for s, d in zip(works, drafts, strict=False) if d)
        return choose(drafts, *rest)

    engine.policy.choose = spy
    request = Request("a", [5, 9], SamplingParams(max_tokens=40), 1, grammar=SPEC)
    zoo.run(engine, [request])
    assert len(seen) > 2
    for history, draft in seen:
        path = list(history)
        for token, confidence in zip(draft.tokens, draft.confidence, strict=True):
            allowed, may_end = zoo.phrases(path)
            assert token in allowed or (token == EOS and may_end)
            assert confidence == 1.0 or len(allowed) > 1
            path.append(token)


def test_fit_cuts_what_is_forbidden_and_adds_what_is_forced():
    constraint = Constraint(GRAMMAR, {EOS}, 0, zoo.VOCAB)
    second = 4 + (6 * 2 + 1) % 60
    third = 4 + (second * 2 + 2) % 60
    assert constraint.fit([], Draft([6, 6, 6], [0.5, 0.6, 0.7], "ngram"), 7) == Draft(
        [6, second, third, 5], [0.5, 1.0, 1.0, 1.0], "ngram"
    )
    assert constraint.fit([6], None, 2) == Draft([second, third], [1.0, 1.0], FORCED_SOURCE)
    assert constraint.fit([], None, 7) is None, "nothing is forced here"
    assert constraint.fit([], Draft([7], [0.9], "ngram"), 7) is None
    phrase = [6, second, third, 5, 20, 20]
    # a stop token where the grammar may end, and nothing behind it
    assert constraint.fit(phrase, Draft([EOS, 6], [0.4, 0.4], "n"), 7) == Draft([EOS], [0.4], "n")
    assert constraint.fit(phrase[:-1], Draft([EOS], [0.4], "n"), 7) is None
    assert constraint.fit(phrase * 4, None, 7) == Draft([EOS], [1.0], FORCED_SOURCE)


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [PLAIN, DRAFTED])
@pytest.mark.parametrize("min_tokens", [7, 30])
def test_min_tokens_puts_off_the_end_until_the_grammar_has_no_more(config, min_tokens):
    params = SamplingParams(max_tokens=60, min_tokens=min_tokens, temperature=1.5)
    requests = [Request(f"r{i}", [5, i], params, i, grammar=SPEC) for i in range(4, 12)]
    done = zoo.run(engine_of(config), requests)
    for generation in done.values():
        assert is_sentence(generation)
        assert len(generation.token_ids) > min(min_tokens, 24)
    assert max(len(g.token_ids) for g in done.values()) == 25


@pytest.mark.parametrize("config", [PLAIN, DRAFTED])
def test_without_stop_tokens_the_answer_ends_with_the_grammar(config):
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0)
    done = zoo.run(engine_of(config), [Request("a", [5, 7], params, 3, grammar=SPEC)])["a"]
    assert done.finish_reason is FinishReason.STOP and done.error is None
    assert len(done.token_ids) == 24 and GRAMMAR.matches(done.token_ids)


def test_every_stop_token_of_the_request_may_end_it_and_nowhere_else():
    """Token 20 stands inside sentences too, but here it is a stop token."""
    params = SamplingParams(max_tokens=60, stop_token_ids=(20, 50), temperature=2.0)
    requests = [Request(f"r{i}", [5, i], params, i, grammar=SPEC) for i in range(4, 40)]
    plain, drafted = (zoo.run(engine_of(c), requests) for c in (PLAIN, DRAFTED))
    assert tokens(plain) == tokens(drafted)
    ends = set()
    for generation in plain.values():
        assert generation.finish_reason is FinishReason.STOP
        assert not {EOS, 20, 50} & set(generation.token_ids[:-1])
        assert GRAMMAR.matches(generation.token_ids[:-1])
        ends.add(generation.token_ids[-1])
    assert ends == {EOS, 20, 50}


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1, 4, 13])
@pytest.mark.parametrize("drafter", [False, True])
def test_a_matcher_that_fails_ends_only_its_request(place, drafter, caplog):
    broken = Request(
        "broken",
        [5, 9],
        SamplingParams(max_tokens=40),
        1,
        grammar=GrammarSpec("lark", f"broken {place}"),
    )
    whole = zoo.run(engine_of(PLAIN), [dataclasses.replace(broken, grammar=SPEC)])["broken"]
    requests = mixed_requests()
    for config in (PLAIN, DRAFTED, EngineConfig(cache=CacheOptions(cache_gb=0.01))):
        engine = engine_of(config, drafter=drafter)
        done = zoo.run(engine, [requests[0], broken, *requests[1:]])
        failed = done.pop("broken")
        assert tokens(done) == tokens(expected())
        if len(whole.token_ids) <= place:  # it never comes to the place where it would break
            assert failed.token_ids == whole.token_ids
            continue
        assert failed.finish_reason is FinishReason.ERROR
        assert failed.error.startswith(f"The grammar failed (at output token {place})")
        assert "the matcher is broken" not in failed.error  # the log has it
        assert "the matcher is broken" in caplog.text
        assert failed.token_ids == whole.token_ids[:place]
        engine.check_integrity()


def test_a_panic_of_native_code_is_a_failure_and_ctrl_c_is_not(caplog):
    class Panic(BaseException):
        pass

    class Matcher(zoo.TokenMatcher):
        error: BaseException | None = None

        def allowed(self):
            if Matcher.error is not None:
                raise Matcher.error
            return super().allowed()

    class Grammar(zoo.TokenGrammar):
        def start(self):
            return Matcher(self)

    grammar = Grammar(zoo.phrases)
    engine = Engine(target(), config=PLAIN, grammar_compiler=lambda spec: grammar)
    request = Request("a", [5, 9], SamplingParams(max_tokens=40), 1, grammar=SPEC)
    whole = zoo.run(engine, [request])["a"].token_ids
    engine.submit(request)
    engine.step()
    Matcher.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    Matcher.error = None
    assert zoo.run(engine, [])["a"].token_ids == whole, "an interrupt loses nothing"
    Matcher.error = Panic("index out of range")
    failed = zoo.run(engine, [request])["a"]
    assert failed.finish_reason is FinishReason.ERROR and "index" not in failed.error
    assert "index out of range" in caplog.text


def test_without_a_compiler_a_grammar_is_refused_with_the_remedy():
    engine = Engine(target(), config=PLAIN)
    assert not engine.supports_grammar and engine_of(PLAIN).supports_grammar
    with pytest.raises(RequestError, match=r"flashdraft\[serve\]"):
        engine.submit(Request("a", [5], SamplingParams(), 0, grammar=SPEC))
    with pytest.raises(RequestError, match="grammar is 'x'; it must be None or a GrammarSpec"):
        engine.submit(Request("a", [5], SamplingParams(), 0, grammar="x"))
    assert not engine.has_work


# -- the constraint itself -------------------------------------------------------------------------


def test_answers_do_not_depend_on_what_was_asked_before():
    source = random.Random(5)
    grammar = zoo.TokenGrammar(zoo.phrases)
    used = Constraint(grammar, {EOS}, 8, zoo.VOCAB)
    history: list[int] = []
    for _ in range(400):
        drafts = []
        for _ in range(source.randrange(6)):
            allowed = sorted(zoo.phrases([*history, *drafts])[0]) or [EOS]
            wrong = source.random() < 0.2
            drafts.append(source.randrange(zoo.VOCAB) if wrong else source.choice(allowed))
        fresh = Constraint(grammar, {EOS}, 8, zoo.VOCAB)
        if source.random() < 0.5:
            draft = Draft(drafts, [0.5] * len(drafts), "x")
            assert used.fit(history, draft, 9) == fresh.fit(history, draft, 9)
        else:
            ours, theirs = used.masks(history, drafts), fresh.masks(history, drafts)
            assert ours.keys() == theirs.keys()
            assert all(np.array_equal(ours[row], theirs[row]) for row in ours)
        step = source.random()
        if step < 0.1:
            history = history[: source.randrange(len(history) + 1)]
        elif step < 0.6:
            history = [*history, *sorted(zoo.phrases(history)[0])[:1]]


@pytest.mark.parametrize("vocab", [1, 8, 67, 256, 1001])
def test_a_mask_forbids_every_token_without_a_bit(vocab):
    source = np.random.default_rng(vocab)
    rows = torch.from_numpy(source.normal(size=(4, vocab)).astype(np.float32))
    allowed = source.random((4, vocab)) < 0.3
    masks = [np.packbits(row, bitorder="little") for row in allowed]
    expected = rows.masked_fill(~torch.from_numpy(allowed), -torch.inf)
    kept = rows.clone()
    for masked in (apply_masks(rows, masks), mask_on_device(rows, np.stack(masks))):
        assert masked.equal(expected) and rows.equal(kept)
    assert apply_masks(rows[:0], []).shape == (0, vocab)


def test_masks_are_made_once_and_only_for_rows_that_are_reached():
    grammar = zoo.TokenGrammar(zoo.phrases)
    constraint = Constraint(grammar, {EOS}, 0, zoo.VOCAB)
    draft = constraint.fit([], Draft([6], [0.5], "x"), 4)
    assert grammar.num_masks == 0, "cutting a draft needs no masks"
    assert len(constraint.masks([], draft.tokens)) == 5 == grammar.num_masks
    assert len(constraint.masks([], draft.tokens)) == 5 == grammar.num_masks
    assert len(constraint.masks(draft.tokens[:2], [*draft.tokens[2:], 66, 20, 20])) == 3
    assert grammar.num_masks == 5, "nothing lies behind a token that cannot come"


def random_tree(source, history):
    """Tokens and parents, most of which the grammar lets through; where they lead from, by row."""
    ways, tokens, parents = [list(history)], [], []
    for _ in range(source.randrange(1, 16)):
        parent = source.randrange(len(ways))
        allowed = sorted(zoo.phrases(ways[parent])[0]) or [EOS]
        wrong = source.random() < 0.15
        token = source.randrange(zoo.VOCAB) if wrong else source.choice(allowed)
        if [*ways[parent], token] not in ways:
            ways.append([*ways[parent], token])
            tokens.append(token)
            parents.append(parent)
    return ways, tokens, parents


def test_a_tree_s_rows_have_the_masks_of_their_ways():
    source = random.Random(9)
    used = Constraint(zoo.TokenGrammar(zoo.phrases), {EOS}, 8, zoo.VOCAB)
    history: list[int] = []
    num_rows = 0
    for _ in range(60):
        ways, tokens, parents = random_tree(source, history)
        found = used.masks(history, tokens, parents)
        assert list(found)[0] == 0 and not used.failures
        for row, way in enumerate(ways):
            fresh = Constraint(zoo.TokenGrammar(zoo.phrases), {EOS}, 8, zoo.VOCAB)
            drafts = way[len(history) :]
            alone = fresh.masks(history, drafts).get(len(drafts))
            assert (row in found) == (alone is not None)
            assert alone is None or np.array_equal(found[row], alone)
        num_rows += len(found)
        kept = [way for row, way in enumerate(ways) if row in found and zoo.phrases(way)[0]]
        history = source.choice(kept) if kept else []
    assert num_rows > 150


def test_a_branch_that_fails_takes_no_other_with_it():
    """Its own rows are not reached, and why is said of the first of them."""

    def rule(tokens):
        if list(tokens[:1]) == [7] and len(tokens) > 1:
            raise ValueError("the matcher is broken")
        return {6, 7, 8}, False

    constraint = Constraint(zoo.TokenGrammar(rule), {EOS}, 0, zoo.VOCAB)
    tokens, parents = [6, 7, 8, 6, 7, 8], [0, 0, 0, 2, 4, 3]
    assert set(constraint.masks([], tokens, parents)) == {0, 1, 2, 3, 6}
    assert set(constraint.failures) == {4} and "output token 2" in constraint.failures[4]
    assert set(constraint.masks([6], [8], [0])) == {0, 1} and not constraint.failures


def test_a_grammar_costs_one_mask_per_verified_row():
    grammars = []

    def counting(spec):
        grammars.append(compiler(spec))
        return grammars[-1]

    config = EngineConfig(verify=0, ngram=False, cache=CacheOptions(cache_gb=0.01))
    engine = Engine(target(), config=config, grammar_compiler=counting)
    done = zoo.run(engine, [Request("a", [5, 9], SamplingParams(max_tokens=40), 1, grammar=SPEC)])
    assert grammars[0].num_masks == len(done["a"].token_ids)


class _UsedUp:
    """A grammar whose matchers fail once their masks were too many, and then refuse to go on."""

    def __init__(self, places):
        self.places = places  # at which a mask is too much
        self.is_used_up = False
        self.inner = zoo.TokenGrammar(zoo.phrases)

    def start(self):
        grammar = self

        class Matcher(zoo.TokenMatcher):
            def allowed(self):
                if len(self._tokens) in grammar.places:
                    grammar.is_used_up = True
                    raise GrammarError("too many states")
                return super().allowed()

            def advance(self, token):
                return not grammar.is_used_up and super().advance(token)

        return Matcher(self.inner)


@pytest.mark.parametrize("config", [PLAIN, DRAFTED])
@pytest.mark.parametrize("drafter", [False, True])
def test_the_first_failure_is_told_and_not_that_of_the_replay(config, drafter, caplog):
    request = Request("a", [5, 9], SamplingParams(max_tokens=40), 1, grammar=SPEC)
    small = zoo.tiny_drafter(target().kernels) if drafter else None
    engine = Engine(target(), small, config, grammar_compiler=lambda spec: _UsedUp({7}))
    failed = zoo.run(engine, [request])["a"]
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error.startswith("The grammar is too complex (at output token 7)")
    assert caplog.text.count("a grammar failed") == 1


def test_after_a_failure_nothing_is_drafted_and_the_answer_goes_on():
    class Grammar(zoo.TokenGrammar):
        num_left = 1

        def start(self):
            grammar = self

            class Matcher(zoo.TokenMatcher):
                def forced(self):
                    if len(self._tokens) >= 4 and grammar.num_left:
                        grammar.num_left -= 1
                        raise GrammarError("too many states")
                    return super().forced()

            return Matcher(self)

    config = EngineConfig(verify=7, ngram=False, cache=CacheOptions(cache_gb=0.01))
    request = Request("a", [5, 9], SamplingParams(max_tokens=40), 1, grammar=SPEC)
    whole = zoo.run(engine_of(config), [request])["a"]
    grammar = Grammar(zoo.phrases)
    engine = Engine(target(), config=config, grammar_compiler=lambda spec: grammar)
    done = zoo.run(engine, [request])["a"]
    assert grammar.num_left == 0
    assert done.token_ids == whole.token_ids and done.finish_reason is FinishReason.STOP
    assert done.stats.drafted < whole.stats.drafted
