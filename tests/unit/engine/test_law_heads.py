"""The law over every head: drafters that choose paths through their slots change no token.

Chains and trees, greedy and sampled, alone and in batches where some requests have penalties or a
grammar, on every CPU backend.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch

from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.kernels.paths import PathScores
from tests import mixed, zoo
from tests.unit.engine.test_law_trees import fail_at_once, plain, target, tokens

ROOMY = CacheOptions(cache_gb=0.01)
WAYS = {  # the host's drafts, and the device's chains and trees
    "host": EngineConfig(verify=6, ngram=False, cache=ROOMY),
    "device": EngineConfig(verify=6, ngram=False, run_ahead=True, cache=ROOMY),
    "trees": EngineConfig(tree=15, ngram=False, cache=ROOMY),
}
KINDS = list(zoo.ADDED)


@pytest.fixture(autouse=True)
def fails_at_once(monkeypatch):
    fail_at_once(monkeypatch)


@functools.cache
def drafter(kind, backend="float32", seed=1, family="llama"):
    kernels = target(family, backend).kernels
    return zoo.tiny_drafter(kernels, 7, seed, added=zoo.ADDED[kind])


def build(kind, way, backend="float32", **settings):
    settings = dataclasses.replace(WAYS[way], **settings)
    return Engine(target("llama", backend), drafter(kind, backend), settings)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["float32", "int8", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_head_changes_a_token(kind, backend, way):
    requests, expected = plain("llama", backend, *((2, 12) if backend == "torch" else (5, 24)))
    drafted = zoo.run(build(kind, way, backend), requests)
    assert tokens(drafted) == expected
    assert sum(g.stats.drafted for g in drafted.values()) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_beside_lookups_a_head_s_trees_change_no_token(kind):
    requests, expected = plain("llama", "float32", 5, 24)
    assert tokens(zoo.run(build(kind, "trees", tree=31, ngram=True), requests)) == expected


class Bigrams:
    """Stands in for what a head says: for a token behind the one that it follows in an answer."""

    def __init__(self, answers):
        pairs = [pair for answer in answers.values() for pair in itertools.pairwise(answer)]
        self._known = torch.zeros(zoo.VOCAB, zoo.VOCAB)
        self._known[tuple(torch.tensor(pairs).T)] = 30.0

    def score_paths(self, hidden, anchors, candidates):
        ids = candidates.clamp(min=0)
        first = anchors.view(-1, 1, 1).expand(-1, 1, ids.shape[2])
        before = torch.cat([first, ids[:, :-1]], dim=1)
        added = self._known[before.unsqueeze(3), ids.unsqueeze(2)]
        return PathScores(added.flatten(0, 1).contiguous(), None)


@pytest.mark.parametrize("way", WAYS)
def test_a_head_that_knows_has_its_tokens_drafted(way, monkeypatch):
    requests, expected = plain("llama", "float32", 5, 24)
    accepted = []
    for knows in (False, True):
        engine = build("selector", way)
        if knows:
            scores = Bigrams(expected).score_paths
            monkeypatch.setattr(drafter("selector", "float32"), "score_paths", scores)
        done = zoo.run(engine, requests)
        assert tokens(done) == expected
        accepted.append(sum(g.stats.accepted for g in done.values()))
    assert accepted[1] > accepted[0] + 15


@pytest.mark.parametrize(("kind", "run_ahead"), [("gated", True), ("selector", False)])
def test_requests_of_every_kind_are_as_each_alone(kind, run_ahead):
    requests = mixed.mixed_requests()[:24]
    config = EngineConfig(verify=0, ngram=False, prefix_cache=False, cache=ROOMY)
    alone = mixed.run_alone(mixed.engine_of(target("llama"), None, config), requests)
    config = EngineConfig(verify=6, run_ahead=run_ahead, cache=ROOMY)
    engine = mixed.engine_of(target("llama"), drafter(kind), config)
    mixed.assert_lawful(requests, mixed.run_mixed(engine, requests), alone)
