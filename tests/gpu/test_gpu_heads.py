"""Drafters with heads on a real GPU: the rules of paths and convolutions, in a graph too.

And whole steps: with exact=True drafted tokens are plain tokens, whatever the head.
"""

from __future__ import annotations

import pytest
import torch

from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.kernels import convolution, paths
from flashdraft.kernels.select import select_kernels
from tests import zoo
from tests.grown import Drawn, make_drawn
from tests.pathed import make_paths

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def told(seed: int, is_sure: bool) -> tuple[Drawn, paths.SlotCandidates, paths.PathScores]:
    drawn = make_drawn(seed)
    return drawn, *make_paths(drawn, 16, seed, is_sure)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_sure", [False, True])
@pytest.mark.parametrize("count", [1, 8, 17])
def test_paths_are_those_of_the_rule_and_a_graph_holds_them(
    count: int, is_sure: bool, seed: int
) -> None:
    kernels = select_kernels("cuda", "bfloat16")
    drawn, candidates, scores = told(seed, is_sure)
    expected = paths.offer_paths(candidates, scores, drawn.settings, drawn.rows, count)
    moved = drawn.to(CUDA)
    given = paths.SlotCandidates(*(one.to(CUDA) for one in candidates))
    sure = None if scores.sure is None else scores.sure.to(CUDA)
    said = paths.PathScores(scores.added.to(CUDA), sure)

    def run() -> tuple[paths.PathOffers, tuple[torch.Tensor, torch.Tensor]]:
        offers = kernels.offer_paths(given, said, moved.settings, moved.rows, count)
        return offers, kernels.follow(offers, 1)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, chain = run()
    graph.replay()
    assert torch.equal(found.tokens.cpu(), expected.tokens)
    assert torch.equal(found.numbers.cpu(), expected.numbers)
    near = {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(found.confidence.cpu(), expected.confidence, **near)
    assert torch.equal(chain[0].cpu(), paths.follow(expected, 1)[0])


@pytest.mark.parametrize("features", [2816, 5376])
def test_convolutions_are_those_of_the_rule(features: int) -> None:
    kernels = select_kernels("cuda", "bfloat16")
    x, base = (torch.randn(n, features, device=CUDA, dtype=torch.bfloat16) for n in (32, 2))
    changes = torch.randn(32, 4 * (features // 16), device=CUDA, dtype=torch.bfloat16)
    places = torch.arange(32, device=CUDA) % 16
    given = convolution.Convolution(base, changes.chunk(2, dim=1)[1], places)
    wide = convolution.Convolution(base.float(), given.changes.float(), places)
    expected = convolution.convolve(x.float(), wide)
    near = {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(kernels.convolve(x, given).float(), expected, **near)


@pytest.mark.parametrize("kind", zoo.ADDED)
def test_the_law_over_heads(kind: str) -> None:
    kernels = select_kernels("cuda", "bfloat16", exact=True)
    target = zoo.tiny_target("llama", kernels, taps=(0, 2))
    requests = zoo.mixed_requests(6, max_tokens=24)
    room = CacheOptions(cache_gb=0.05)
    plain = zoo.run(
        Engine(target, config=EngineConfig(verify=0, ngram=False, cache=room)), requests
    )
    drafter = zoo.tiny_drafter(kernels, 7, added=zoo.ADDED[kind])
    config = EngineConfig(verify=6, ngram=False, cache=room)
    drafted = zoo.run(Engine(target, drafter, config), requests)
    assert {k: g.token_ids for k, g in drafted.items()} == {
        k: g.token_ids for k, g in plain.items()
    }
