"""The law over trees of drafts: on the CPU bit for bit what plain decoding says.

The right tokens stand somewhere in trees that are otherwise wrong: paths lead over branches, while
windows, pages and ends come in between. Requests of every kind meet, and trees meet chains.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter

import pytest
import torch

from flashdraft.core import Request, SamplingParams
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.draft.ngram import MAX_MATCH, MIN_MATCH, confidence_of
from flashdraft.engine.drafts import ASIDE_SOURCES, DEVICE_SOURCES, NODE_SOURCES
from flashdraft.engine.engine import Engine
from flashdraft.engine.step.result import pack_scores
from flashdraft.engine.step.trees import NUM_OFFERS, Proposed
from flashdraft.errors import RequestError
from flashdraft.kernels.draw.rule import MAX_TOP, Draw
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.registry import build_target
from tests import mixed, zoo

ROOMY = CacheOptions(cache_gb=0.01)
PLAIN = EngineConfig(verify=0, ngram=False, prefix_cache=False, cache=ROOMY)
TREES = EngineConfig(tree=31, ngram=False, cache=ROOMY)
FEW_PAGES = 24  # for eight sequences, of which one may need nine


def fail_at_once(monkeypatch):
    """A step that fails is taken back and run without drafts: the answer would not tell."""

    def fail(engine, error):
        raise error

    monkeypatch.setattr(Engine, "_recover", fail)


@pytest.fixture(autouse=True)
def fails_at_once(monkeypatch):
    fail_at_once(monkeypatch)


def continuations(engine, answers, batch, width):
    """Of everybody who decodes the slot, and what is known to follow; zeros behind its end."""
    slots = engine.steps.slots
    for slot, seat in enumerate(engine._pipeline._seats[:batch]):
        if seat is not None and slots.alive[slot]:
            sequence = seat.sequence
            done = int(slots.lengths[slot]) + 1 - sequence.num_prompt
            known = answers[sequence.request.id][done : done + width]
            yield slot, [*known, *[0] * (width - len(known))]


class LookupOracle:
    """Stands in for lookups: known tokens for some slots, here and there wrong ones."""

    def __init__(self, engine, answers, right=0.8, found=0.8):
        self.engine, self.answers, self.right, self.found = engine, answers, right, found
        self.random = random.Random(5)
        engine.steps.pieces._look_up = self.look_up

    def look_up(self, history, batch, width):
        tokens, confidence = torch.zeros(batch, width, dtype=torch.int64), torch.zeros(batch, width)
        for slot, known in continuations(self.engine, self.answers, batch, width):
            if self.random.random() < self.found:
                wrong = [self.random.randrange(zoo.VOCAB) for _ in known]
                both = zip(known, wrong, strict=True)
                said = [a if self.random.random() < self.right else b for a, b in both]
                tokens[slot] = torch.tensor(said)
                confidence[slot] = confidence_of(self.random.randint(MIN_MATCH, MAX_MATCH))
                confidence[slot, self.random.randrange(1, 2 * width + 1) :] = 0.0
        return Proposed(tokens * (confidence > 0), confidence)


class Witness:
    """Remembers every draft that was verified, with the target's path through it."""

    def __init__(self, engine):
        self.seen, self._observe = [], engine.policy.observe
        engine.policy.observe = self.observe

    def observe(self, momentum, draft, num_accepted, path=()):
        self.seen.append((draft, list(path)))
        self._observe(momentum, draft, num_accepted, path)

    def sources(self, is_accepted):
        """How many nodes there were of each source, or how many were accepted."""
        return Counter(
            source
            for draft, path in self.seen
            for row, source in enumerate(draft.sources, start=1)
            if row in path or not is_accepted
        )


class TreeOracle:
    """Stands in for the drafter: at each place the known token is on the chain, or only offered.

    Grammars are told the same as what grows trees on the device.
    """

    def __init__(self, engine, answers, on_chain=0.4, offered=0.9):
        self.engine, self.answers = engine, answers
        self.on_chain, self.offered = on_chain, offered
        self.random = random.Random(7)
        engine.steps.pieces._drafts_of = self.draft

    def draft(self, shape):
        batch, width, trees = shape.batch, shape.width, self.engine.steps.pieces.trees
        chain = torch.zeros(batch, width, dtype=torch.int64)
        for slot, known in continuations(self.engine, self.answers, batch, width):
            for place, right in enumerate(known):
                tokens = self.random.sample(range(zoo.VOCAB), NUM_OFFERS)
                if self.random.random() < self.offered and right not in tokens:
                    tokens[self.random.randrange(1, 4)] = right
                if self.random.random() < self.on_chain:
                    tokens = [right, *(token for token in tokens if token != right)]
                tokens = tokens[:NUM_OFFERS]
                trees._others[slot, place, 0, : len(tokens)] = torch.tensor(tokens)
                trees._sure[slot, place] = 0.0
                sure = torch.rand(len(tokens)).sort(descending=True).values
                trees._sure[slot, place, 0, : len(tokens)] = sure
                chain[slot, place] = tokens[0]
        self.tell_grammars(chain)
        return Proposed(chain, trees._sure[:batch, :width, 0, 0].clone())

    def tell_grammars(self, chain):
        pieces, (batch, width) = self.engine.steps.pieces, chain.shape
        ids, logits = torch.full((batch, width, MAX_TOP), -1), torch.empty(batch, width, MAX_TOP)
        ids[..., :NUM_OFFERS] = pieces.trees._others[:batch, :width, 0]
        logits[...] = -torch.inf
        logits[..., :NUM_OFFERS] = pieces.trees._sure[:batch, :width, 0].log()
        none = torch.zeros(batch * width)
        first = logits[..., 0].flatten()
        drawn = Draw(chain.flatten(), first, none, ids.flatten(0, 1), logits.flatten(0, 1))
        pieces.exchange.offer(pack_scores(drawn).view(batch, width, -1))


@functools.cache
def target(family, backend="float32"):
    return zoo.tiny_target(family, zoo.kernels(backend), taps=(0, 2))


def build(family, config=TREES, backend="float32", block_size=8, **settings):
    model = target(family, backend)
    drafter = zoo.tiny_drafter(model.kernels, block_size)
    return Engine(model, drafter, dataclasses.replace(config, **settings))


def tokens(generations):
    return {key: generation.token_ids for key, generation in generations.items()}


@functools.cache  # the same answers serve many tests
def plain(family, backend="float32", count=8, max_tokens=60):
    requests = [
        dataclasses.replace(one, params=dataclasses.replace(one.params, ignore_eos=True))
        for one in zoo.mixed_requests(count, max_tokens=max_tokens)
    ]
    answers = {}
    for request in requests:
        answers |= tokens(zoo.run(Engine(target(family, backend), config=PLAIN), [request]))
    return requests, answers


@pytest.mark.parametrize("backend", ["float32", "int8", "torch"])
@pytest.mark.parametrize("family", list(zoo.CONFIGS))
def test_paths_over_branches_are_what_plain_decoding_says(family, backend):
    count, length = (2, 20) if backend == "torch" else (8, 60)
    requests, expected = plain(family, backend, count, length)
    engine = build(family, backend=backend)
    TreeOracle(engine, expected)
    drafted = zoo.run(engine, requests)
    assert tokens(drafted) == expected
    assert sum(g.stats.accepted for g in drafted.values()) > 0.3 * sum(map(len, expected.values()))


@pytest.mark.parametrize("tree", [1, 5, 15, 16, 31, 63, "auto"])
@pytest.mark.parametrize("block_size", [2, 8, 16])
@pytest.mark.parametrize("max_batch", [1, 3])
def test_every_size_of_tree_and_block(tree, block_size, max_batch):
    requests, expected = plain("gemma4")
    engine = build("gemma4", tree=tree, block_size=block_size, max_batch=max_batch)
    TreeOracle(engine, expected)
    drafted = zoo.run(engine, requests)
    assert tokens(drafted) == expected
    stats = [generation.stats for generation in drafted.values()]
    num_nodes, depths = sum(s.drafted for s in stats), sum(sum(s.slots_verified) for s in stats)
    if tree == "auto":  # whether branches pay is for measured times to say
        assert num_nodes >= depths
    else:
        assert num_nodes > depths or tree == 1, "there are branches"


def shown(engine, requests):
    """The events of requests, by their ids."""
    events = {one.id: [] for one in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
    return events


def test_branches_are_counted_and_shown_to_who_asks():
    requests, expected = plain("gemma4")
    engine = build("gemma4")
    TreeOracle(engine, expected)
    requests = [dataclasses.replace(one, shows_trees=n % 2 == 0) for n, one in enumerate(requests)]
    events = shown(engine, requests)
    for request in requests:
        *_, last = events[request.id]
        stats, trees = last.generation.stats, [(e, t) for e in events[request.id] for t in e.trees]
        assert 0 < stats.branches <= stats.drafted
        assert 0 < stats.branches_accepted <= min(stats.branches, stats.accepted)
        assert bool(trees) == request.shows_trees
        for event, tree in trees:
            assert len(tree.tokens) == len(tree.parents) <= 63
            assert all(parent <= row for row, parent in enumerate(tree.parents))
            kept = [tree.tokens[row - 1] for row in tree.path]
            assert kept == list(event.token_ids[tree.at :][: len(kept)])
            assert all(event.drafted[tree.at :][: len(kept)])
            ways = [0, *tree.path]
            assert [tree.parents[row - 1] for row in tree.path] == ways[:-1]


def test_a_step_counts_its_branches():
    requests, expected = plain("gemma4")
    engine = build("gemma4")
    TreeOracle(engine, expected)
    for request in requests:
        engine.submit(request)
    every = []
    while engine.has_work:
        engine.step()
        every.append(engine.last_step)
    assert sum(one.num_branches for one in every) > sum(one.num_branches_accepted for one in every)
    assert sum(one.num_branches_accepted for one in every) > 0
    assert all(len(one.depths) == len(one.verify_lengths) for one in every)
    pairs = [p for one in every for p in zip(one.depths, one.verify_lengths, strict=True)]
    assert all(depth <= length for depth, length in pairs) and max(pairs)[0] <= 7


def test_chains_have_no_branches():
    requests, expected = plain("gemma4")
    engine = build("gemma4", tree=None, verify=7)
    requests = [dataclasses.replace(one, shows_trees=True) for one in requests]
    for events in shown(engine, requests).values():
        stats = events[-1].generation.stats
        assert stats.drafted > 0 and stats.branches == stats.branches_accepted == 0
        assert not any(event.trees for event in events)


def test_a_tree_brings_more_than_its_chain():
    requests, expected = plain("gemma4")
    lengths = {}
    for branches in (True, False):
        engine = build("gemma4")
        TreeOracle(engine, expected, on_chain=0.5, offered=1.0)
        chains = [dataclasses.replace(one, verify=7) for one in requests]
        drafted = zoo.run(engine, requests if branches else chains)
        assert tokens(drafted) == expected
        stats = [generation.stats for generation in drafted.values()]
        lengths[branches] = sum(s.decode_tokens for s in stats) / sum(s.steps for s in stats)
    assert lengths[True] > 1.2 * lengths[False]


@pytest.mark.parametrize("family", ["gemma4", "gemma4_moe", "qwen3"])
@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("ngram", [False, True])
def test_all_kinds_together_are_as_each_alone(family, is_small, ngram):
    requests, expected = mixed.mixed_requests(), alone(family)
    config = dataclasses.replace(TREES, ngram=ngram)
    model = target(family)
    drafter = zoo.tiny_drafter(model.kernels, 8)
    if is_small:
        few = CacheOptions(cache_gb=zoo.cache_for(model, drafter, FEW_PAGES))
        config = dataclasses.replace(config, cache=few, prefill_chunk=7, max_step_tokens=40)
    engine = Engine(
        model,
        drafter,
        config,
        new_decoder=mixed.Letters,
        grammar_compiler=mixed.compile_phrases,
    )
    TreeOracle(engine, {name: one.token_ids for name, one in expected.items()})
    done = mixed.run_mixed(engine, requests)
    mixed.assert_lawful(requests, done, expected)
    accepted = sum(one.stats.accepted for one in done.values())
    assert accepted > 0.2 * sum(len(one.token_ids) for one in done.values())
    assert sum(one.stats.cached_tokens for one in done.values()) > 0
    if is_small:
        assert sum(one.stats.preemptions for one in done.values()) > 0
    assert all(pool.num_available == pool.num_pages for pool in engine.book.pools)


@functools.cache
def alone(family):
    engine = Engine(
        target(family),
        None,
        PLAIN,
        new_decoder=mixed.Letters,
        grammar_compiler=mixed.compile_phrases,
    )
    return mixed.run_alone(engine, mixed.mixed_requests())


@pytest.mark.parametrize("tree", [2, 15, 31, 63, "auto"])
@pytest.mark.parametrize("family", ["gemma4", "qwen3"])
def test_lookups_join_the_drafter_s_trees(family, tree):
    requests, expected = plain(family)
    engine = build(family, tree=tree, ngram=True)
    TreeOracle(engine, expected)
    LookupOracle(engine, expected)
    witness = Witness(engine)
    assert tokens(zoo.run(engine, requests)) == expected
    verified, accepted = (witness.sources(is_accepted) for is_accepted in (False, True))
    if tree != "auto":  # which verifies what pays by measured times, nothing on a busy machine
        assert {draft.source for draft, _ in witness.seen} == set(DEVICE_SOURCES)
        assert verified.keys() == set(NODE_SOURCES) or tree == 2
        assert accepted.keys() >= {*DEVICE_SOURCES, *ASIDE_SOURCES} or tree == 2
    for draft, _ in witness.seen:
        siblings = list(zip(draft.parents, draft.tokens, strict=True))
        assert len(set(siblings)) == len(siblings), "a token stands once behind a row"


def test_a_rival_chain_is_learnt_from_by_its_own_word():
    requests, expected = plain("gemma4")
    engine = build("gemma4", tree=63, ngram=True)
    TreeOracle(engine, expected, on_chain=0.0, offered=0.0)  # the drafter is always wrong
    LookupOracle(engine, expected, right=1.0, found=1.0)
    zoo.run(engine, requests)
    survival = engine.policy.survival
    assert survival.chance("ngram", 0.95) > 0.9
    assert survival.chance("block aside", 0.95) < 0.2, "where it leaves a chain that is right"


def test_a_rival_chain_brings_what_the_better_one_misses():
    requests, expected = plain("gemma4")
    lengths = {}
    for joins in (True, False):
        engine = build("gemma4", tree=31, ngram=True)
        engine.steps.pieces.trees._has_rivals = joins
        TreeOracle(engine, expected, on_chain=0.7, offered=0.0)
        LookupOracle(engine, expected, right=0.7, found=1.0)
        drafted = zoo.run(engine, requests)
        assert tokens(drafted) == expected
        stats = [generation.stats for generation in drafted.values()]
        lengths[joins] = sum(s.decode_tokens for s in stats) / sum(s.steps for s in stats)
    assert lengths[True] > 1.07 * lengths[False]


def answers_of(family, requests, window=None):
    engine = Engine(windowed(family, window), config=PLAIN)
    return {one.id: zoo.run(engine, [one])[one.id].token_ids for one in requests}


@functools.cache
def windowed(family, window):
    settings = {} if window is None else {"sliding_window": window}
    config = ModelConfig.from_hf({**zoo.CONFIGS[family], **settings})
    kernels = zoo.kernels("float32")
    kernels._threads = 1  # products are tiny: a second one would only wait
    return build_target(config, zoo.Tensors(zoo.random_tensors(config)), kernels, (0, 2))


@pytest.mark.parametrize(("page_size", "window"), [(4, 9), (16, 20), (7, 16)])
def test_trees_lie_across_the_borders_of_pages_and_windows(page_size, window):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    lengths = range(window - 8, window - 8 + max(page_size, 14))
    source = random.Random(2)
    requests = [
        Request(f"r{n}", [source.randrange(4, zoo.VOCAB) for _ in range(n)], params, n)
        for n in lengths
    ]
    expected, model = answers_of("gemma4", requests, window), windowed("gemma4", window)
    config = dataclasses.replace(TREES, page_size=page_size, max_batch=4)
    engine = Engine(model, zoo.tiny_drafter(model.kernels, 8), config)
    TreeOracle(engine, expected, on_chain=0.3, offered=1.0)
    crossed, moves = set(), engine.steps.pieces._settle

    def settle(moved):
        """Note rows of paths that move from a page to another."""
        starts, last = moved.starts.tolist(), moved.places.shape[1] - 1
        for slot, path in enumerate(moved.path.tolist()):
            for row, found in enumerate(path):
                if found > row:
                    ends = (min(starts[slot] + one, last) for one in (found, row))
                    pairs = zip(*(moved.places[:, one].tolist() for one in ends), strict=True)
                    for a, b in pairs:
                        if a // page_size != b // page_size:
                            crossed.add(b % page_size)
        moves(moved)

    engine.steps.pieces._settle = settle
    drafted = zoo.run(engine, requests)
    assert tokens(drafted) == expected
    assert len(crossed) >= 4, "rows moved over borders, of many places"
    assert sum(one.stats.accepted for one in drafted.values()) > 2 * len(requests)


def test_trees_and_chains_share_a_batch():
    requests, expected = plain("gemma4")
    requests = [
        dataclasses.replace(one, verify=(None, 5, None, 0)[i % 4]) for i, one in enumerate(requests)
    ]
    engine = build("gemma4", max_batch=4, ngram=True)
    TreeOracle(engine, expected)
    LookupOracle(engine, expected)
    drafted = zoo.run(engine, requests)
    assert tokens(drafted) == expected
    for request in requests:
        stats = drafted[request.id].stats
        has_branches = stats.drafted > sum(stats.slots_verified)
        assert has_branches == (request.verify is None), request.id


def test_a_request_that_fixes_how_much_is_verified_has_a_chain():
    requests, expected = plain("gemma4")
    requests = [dataclasses.replace(r, verify=i % 4) for i, r in enumerate(requests)]
    engine = build("gemma4")
    TreeOracle(engine, expected)
    drafted = zoo.run(engine, requests)
    assert tokens(drafted) == expected
    for request in requests:
        stats = drafted[request.id].stats
        assert len(stats.slots_verified) <= request.verify
        assert stats.drafted == sum(stats.slots_verified)


def test_statistics_tell_nodes_and_depths():
    requests, expected = plain("gemma4")
    engine = build("gemma4", tree=63, block_size=8)
    TreeOracle(engine, expected)
    for generation in zoo.run(engine, requests).values():
        stats = generation.stats
        assert len(stats.slots_verified) <= 7 < stats.drafted / stats.steps
        assert sum(stats.slots_accepted) == stats.accepted
        assert sum(n * count for n, count in stats.histogram.items()) == stats.decode_tokens


def test_trees_must_fit_the_windows():
    config = ModelConfig.from_hf({**zoo.CONFIGS["gemma4"], "sliding_window": 7})
    kernels = zoo.kernels("float32")
    narrow = build_target(config, zoo.Tensors(zoo.random_tensors(config)), kernels, (0, 2))
    with pytest.raises(RequestError, match="window of 7 tokens"):
        Engine(narrow, zoo.tiny_drafter(kernels, 8), TREES)
    Engine(narrow, zoo.tiny_drafter(kernels, 7), TREES)


def test_chains_and_trees_are_not_fixed_at_once():
    with pytest.raises(RequestError, match="give one of them"):
        EngineConfig(verify=3, tree=15)
    for wrong in (0, 64, True, 1.5, "all"):
        with pytest.raises(RequestError, match="from 1 to 63"):
            EngineConfig(tree=wrong)


def test_greedy_and_sampled_log_probabilities_are_those_of_the_path():
    params = SamplingParams(max_tokens=40, logprobs=3, ignore_eos=True, temperature=0.9)
    requests, _ = plain("gemma4")
    requests = [dataclasses.replace(one, params=params) for one in requests[:3]]
    expected = {}
    for request in requests:
        expected |= zoo.run(Engine(target("gemma4"), config=PLAIN), [request])
    engine = build("gemma4")
    TreeOracle(engine, tokens(expected))
    found = zoo.run(engine, requests)
    assert tokens(found) == tokens(expected)
    assert all(found[key].logprobs == expected[key].logprobs for key in expected)
    assert sum(one.stats.accepted for one in found.values()) > 20
