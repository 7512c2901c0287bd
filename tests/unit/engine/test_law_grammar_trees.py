"""The law over trees that the host grows through grammars: bit for bit what plain decoding says.

Choices, patterns, and objects whose keys are forced; greedy and sampled, with penalties and
log-probabilities; beside plain requests, trees of the device, chains and lookups.
"""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest

from flashdraft.core import GrammarSpec, Request, SamplingParams
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.draft.guided import MOST_GUIDED
from flashdraft.engine.drafts import BLOCK_SOURCE, NGRAM_SOURCE, OFFERED_SOURCES
from flashdraft.engine.engine import Engine
from flashdraft.engine.step.guide import StepGuide
from tests import mixed, zoo
from tests.unit.engine.test_law_trees import (
    PLAIN,
    TREES,
    LookupOracle,
    TreeOracle,
    Witness,
    fail_at_once,
    shown,
    target,
    tokens,
)

MAX_TOKENS = 26
WORDS = [random.Random(n).choices(range(10, 14), k=n) for n in (3, 5, 9, 12, 17)]
KEYS = [[20, 21, 22], [23, 24], [25, 26, 27, 28]]


def choice(said):
    """One of a few words that begin alike."""
    words = [word for word in WORDS if word[: len(said)] == list(said)]
    return {word[len(said)] for word in words if len(word) > len(said)}, list(said) in words


def pattern(said):
    """Letters and digits by turns of two, as many as one likes."""
    letters, digits = set(range(6, 30)), set(range(30, 60))
    return letters if len(said) % 4 < 2 else digits, len(said) % 4 == 0 and len(said) > 7


def fields(said):
    """As JSON: every key is forced, every value is free and ends with a comma, the last one not."""
    at, rest = 0, list(said)
    while at < len(KEYS):
        key = KEYS[at]
        count = len(key)
        if len(rest) < count:
            return {key[len(rest)]}, False
        rest = rest[count:]
        if 4 not in rest:
            values = set(range(30, 66)) if len(rest) < 5 else set()
            return values | ({4} if rest else set()), False
        at, rest = at + 1, rest[rest.index(4) + 1 :]
    return set(), True


RULES = {"phrases": zoo.phrases, "choice": choice, "pattern": pattern, "fields": fields}


def compile_rule(spec):
    return zoo.TokenGrammar(RULES[spec.text])


@pytest.fixture(autouse=True)
def fails_at_once(monkeypatch):
    fail_at_once(monkeypatch)


@functools.cache
def requests_of(count=12, seed=3):
    """Of all settings, by all grammars; every third wants log-probabilities."""
    found = []
    for n, one in enumerate(zoo.mixed_requests(count, seed, MAX_TOKENS)):
        params = dataclasses.replace(one.params, logprobs=4 if n % 3 == 0 else None)
        grammar = GrammarSpec("lark", [*RULES][n % len(RULES)])
        found.append(dataclasses.replace(one, params=params, grammar=grammar))
    return found


def build(family="gemma4", backend="float32", drafts=True, config=TREES, **settings):
    model = target(family, backend)
    drafter = zoo.tiny_drafter(model.kernels, 8) if drafts else None
    config = dataclasses.replace(config, **settings)
    return Engine(model, drafter, config, grammar_compiler=compile_rule)


@functools.cache
def plain(family="gemma4", backend="float32", count=12):
    engine, answers = build(family, backend, False, PLAIN), {}
    for request in requests_of(count):
        answers |= zoo.run(engine, [request])
    return answers


def assert_same(found, expected):
    assert tokens(found) == tokens(expected)
    for key, one in expected.items():
        assert found[key].finish_reason is one.finish_reason
        assert found[key].logprobs == one.logprobs


@pytest.mark.parametrize(
    ("family", "backend"),
    [("gemma4", "float32"), ("gemma4", "int8"), ("qwen3", "torch"), ("gemma4_moe", "float32")],
)
def test_trees_through_grammars_are_what_plain_decoding_says(family, backend):
    count = 4 if backend == "torch" else 12
    requests, expected = requests_of(count), plain(family, backend, count)
    for settings in ({}, {"tree": None, "run_ahead": True, "verify": 7}):  # trees, and chains
        engine = build(family, backend, **settings)
        if settings == {}:
            TreeOracle(engine, tokens(expected))
        found = zoo.run(engine, requests)
        assert_same(found, expected)
        branches = sum(one.stats.branches for one in found.values())
        assert (branches > 0) == (settings == {})
    assert any(one.finish_reason.value == "stop" for one in expected.values())


@pytest.mark.parametrize("tree", [1, 4, 15, 63, "auto"])
def test_a_grammar_s_tree_has_fifteen_nodes_at_most(tree):
    requests, expected = requests_of(), plain()
    engine = build(tree=tree, max_batch=3)
    TreeOracle(engine, tokens(expected))
    witness = Witness(engine)
    assert_same(zoo.run(engine, requests), expected)
    sizes = [len(draft.tokens) for draft, _ in witness.seen]
    limit = MOST_GUIDED if tree == "auto" else min(tree, MOST_GUIDED)
    assert max(sizes) <= limit and (max(sizes) == limit or tree == "auto")
    for draft, path in witness.seen:
        siblings = list(zip(draft.parents, draft.tokens, strict=False))
        assert len(set(siblings)) == len(siblings), "a token stands once behind a row"
        assert all(parent <= row for row, parent in enumerate(draft.parents))
        ways = zip(path[1:], path[:-1], strict=True)
        assert all(draft.parents[row - 1] == parent for row, parent in ways)


def test_a_tree_brings_more_than_a_chain_and_its_branches_are_counted():
    requests, expected = requests_of(), plain()
    lengths = {}
    for verify in (None, 7):
        engine = build()
        TreeOracle(engine, tokens(expected), on_chain=0.5, offered=1.0)
        witness = Witness(engine)
        wanted = [dataclasses.replace(one, verify=verify, shows_trees=True) for one in requests]
        events = shown(engine, wanted)
        found = {key: every[-1].generation for key, every in events.items()}
        assert_same(found, expected)
        stats = [one.stats for one in found.values()]
        lengths[verify] = sum(s.decode_tokens for s in stats) / sum(s.steps for s in stats)
        trees = [tree for every in events.values() for event in every for tree in event.trees]
        branches, accepted = (sum(getattr(s, name) for s in stats) for name in NAMES)
        assert bool(trees) == (branches > 0) == (accepted > 0) == (verify is None)
        assert branches == sum(draft.num_branches for draft, _ in witness.seen)
        assert accepted == sum(draft.num_off_chain(path[1:]) for draft, path in witness.seen)
        assert sum(s.drafted for s in stats) == sum(len(d.tokens) for d, _ in witness.seen)
        sources = set().union(*(draft.sources for draft, _ in witness.seen))
        assert sources == {BLOCK_SOURCE, *(OFFERED_SOURCES if verify is None else ())}
    assert lengths[None] > 1.1 * lengths[7]


NAMES = ("branches", "branches_accepted")


def test_every_row_has_the_mask_of_its_own_way(monkeypatch):
    """A node's mask is that of a grammar which goes its way and no other."""
    requests, expected = requests_of(), plain()
    engine, seen, real = build(max_batch=4), [0, 0], StepGuide.masks

    def masks(guide, drafts):
        places, words = real(guide, drafts)
        found = {tuple(place): row for place, row in zip(places.tolist(), words, strict=True)}
        for slot, guided in guide.decoding.items():
            if guided.history is None:
                assert not any(place[0] == slot for place in found)
                continue
            draft, rule = drafts[slot], RULES[guided.request.grammar.text]
            ways = [list(guided.history)]
            for row, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True), 1):
                ways.append([*ways[parent], token])
                seen[0] += 1
                assert token == 2 or token in rule(ways[parent])[0], "the grammar lets it through"
                stops = guided.constraint.stop_ids
                is_over = token in stops or (not stops and rule(ways[row]) == (set(), True))
                assert ((slot, row) in found) != is_over
            for row, way in enumerate(ways):
                if (slot, row) in found:
                    bits = found[slot, row].view("uint8")
                    allowed = {n for n in range(zoo.VOCAB) if bits[n >> 3] >> (n & 7) & 1}
                    assert allowed - guided.constraint.stop_ids == rule(way)[0] - {2}
                    seen[1] += len(draft.parents) > 0 and row > draft.depth
        return places, words

    monkeypatch.setattr(StepGuide, "masks", masks)
    TreeOracle(engine, tokens(expected))
    assert_same(zoo.run(engine, requests), expected)
    assert seen[0] > 300 and seen[1] > 50


@pytest.mark.parametrize("kind", ["grammar", "free"])
def test_no_node_is_deeper_than_what_is_left(kind):
    """The target's own token behind the deepest one is the last."""
    lefts = set()
    params = SamplingParams(ignore_eos=True)
    requests = [
        Request(
            f"r{n}",
            [5 + n, 9],
            dataclasses.replace(params, max_tokens=n, temperature=n % 2 * 0.9),
            n,
            grammar=GrammarSpec("lark", "pattern") if kind == "grammar" else None,
        )
        for n in range(2, 12)
    ]
    expected = {}
    for request in requests:
        expected |= zoo.run(build(drafts=False, config=PLAIN), [request])
    engine = build()
    TreeOracle(engine, tokens(expected), on_chain=0.3)
    count_step = []
    for request in requests:
        engine.submit(request)
    lives = list(engine._live.values())
    for live in lives:
        real = live.count_step

        def counted(step, draft, path, num_kept, live=live, real=real):
            left = live.sequence.num_left + num_kept
            lefts.add(left)
            assert draft.depth <= left - 1
            count_step.append(draft.depth == left - 1)
            real(step, draft, path, num_kept)

        live.count_step = counted
    while engine.has_work:
        engine.step()
    assert {live.sequence.request.id: live.sequence.output_ids for live in lives} == tokens(
        expected
    )
    assert {1, 2, 3} <= lefts and sum(count_step) > 5


@pytest.mark.parametrize("max_batch", [2, 5])
def test_grammars_trees_and_chains_share_a_batch(max_batch):
    """Beside them plain requests, and lookups, which join the trees of both."""
    requests = [
        dataclasses.replace(
            one, grammar=one.grammar if n % 3 else None, verify=(None, None, None, 4, 0)[n % 5]
        )
        for n, one in enumerate(requests_of(15, 8))
    ]
    expected, alone = {}, build(drafts=False, config=PLAIN)
    for request in requests:
        expected |= zoo.run(alone, [request])
    engine = build(max_batch=max_batch, ngram=True)
    TreeOracle(engine, tokens(expected))
    LookupOracle(engine, tokens(expected))
    witness = Witness(engine)
    found = zoo.run(engine, requests)
    assert_same(found, expected)
    for request in requests:
        stats = found[request.id].stats
        assert stats.branches == 0 or request.verify is None
    guided = [found[r.id].stats for r in requests if r.grammar and r.verify is None]
    assert sum(stats.branches_accepted for stats in guided) > 0
    assert {draft.source for draft, _ in witness.seen} >= {BLOCK_SOURCE, NGRAM_SOURCE}


@pytest.mark.parametrize("ngram", [False, True])
def test_who_gives_way_or_is_cancelled_changes_nobody_s_answer(ngram):
    requests = [one for one in mixed.mixed_requests(64, 11) if "grammar" in one.kinds][:16]
    requests = [
        dataclasses.replace(one, arrives_at=n // 3, cancel_after=(None, None, 3)[n % 3])
        for n, one in enumerate(requests)
    ]
    model = target("gemma4")
    expected = mixed.run_alone(mixed.engine_of(model, None, PLAIN), requests)
    drafter = zoo.tiny_drafter(model.kernels, 8)
    config = EngineConfig(
        tree=31,
        ngram=ngram,
        cache=CacheOptions(cache_gb=zoo.cache_for(model, drafter, 20)),
        prefill_chunk=7,
        max_step_tokens=40,
    )
    engine = mixed.engine_of(model, drafter, config)
    TreeOracle(engine, tokens(expected))
    done = mixed.run_mixed(engine, requests)
    mixed.assert_lawful(requests, done, expected)
    assert sum(one.stats.preemptions for one in done.values()) > 0
    assert sum(one.stats.branches for one in done.values()) > 0
