"""Trees of draft tokens on a real GPU: the rule's bit for bit, and in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashdraft.kernels import tree as rule
from flashdraft.kernels.torch_backend import TorchKernels
from tests.grown import assert_equal, grow_by, make_drawn, make_offered

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SHAPES = [(1, 1, 1), (7, 4, 15), (15, 8, 12), (15, 8, 16), (15, 8, 48), (15, 8, 63), (15, 0, 15)]


def make_kernels() -> Any:
    from flashdraft.kernels.cuda.backend import TritonKernels

    return TritonKernels(CUDA, torch.bfloat16)


@pytest.mark.parametrize("num_slots", [1, 8, 200])
@pytest.mark.parametrize("shape", SHAPES)
def test_trees_are_those_of_the_rule(shape: tuple[int, int, int], num_slots: int) -> None:
    (width, count, num_nodes), kernels = shape, make_kernels()
    for seed in range(10):
        offered = make_offered(seed, num_slots, width, count, has_rivals=seed % 3 > 0)
        found = grow_by(kernels, rule.Offered(*(one.to(CUDA) for one in offered)), num_nodes)
        assert_equal(found, rule.grow(offered, num_nodes))


@pytest.mark.parametrize("count", [1, 8, rule.MAX_OFFERS])
def test_offers_are_those_of_the_rule(count: int) -> None:
    for seed in range(20):
        drawn = make_drawn(seed)
        expected, found = rule.offer(*drawn, count), make_kernels().offer(*drawn.to(CUDA), count)
        assert torch.equal(found.tokens.cpu(), expected.tokens), seed
        torch.testing.assert_close(
            found.confidence.cpu(), expected.confidence, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("num_nodes", [12, 48])
@pytest.mark.parametrize("kernels", [make_kernels, lambda: TorchKernels(CUDA, torch.float32)])
def test_captured_trees_are_replayed_with_other_offers(kernels: Any, num_nodes: int) -> None:
    backend, others = kernels(), [make_offered(seed, 8, 15, 8) for seed in range(1, 6)]
    offered, drawn = make_offered(0, 8, 15, 8, CUDA), make_drawn(1).to(CUDA)
    grow_by(backend, offered, num_nodes), backend.offer(*drawn, 8)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        offers, found = backend.offer(*drawn, 8), grow_by(backend, offered, num_nodes)
    for seed, other in enumerate(others, start=2):
        for one, value in zip(offered, other, strict=True):
            one.copy_(value)
        again = make_drawn(2 * seed + 1)
        for one, value in zip(drawn.draw, again.draw, strict=True):
            one.copy_(value)
        graph.replay()
        if backend.name == "triton":  # torch may multiply in another order
            assert_equal(found, rule.grow(other, num_nodes))
        kept = again._replace(settings=make_drawn(1).settings, rows=make_drawn(1).rows)
        assert torch.equal(offers.tokens.cpu(), rule.offer(*kept, 8).tokens)


def test_a_tree_takes_microseconds() -> None:
    """What a step pays on the device, without the host's part; the bound is generous."""
    backend, offered = make_kernels(), make_offered(1, 8, 15, 8, CUDA)
    drawn = make_drawn(1).to(CUDA)
    alone = make_offered(1, 8, 15, 8, CUDA, has_rivals=False)
    for name, call in (
        ("grow 63", lambda: grow_by(backend, offered, 63)),
        ("grow 63 without rivals", lambda: grow_by(backend, alone, 63)),
        ("grow 31", lambda: grow_by(backend, offered, 31)),
        ("offer 8", lambda: backend.offer(*drawn, 8)),
    ):
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        microseconds = start.elapsed_time(end) / 20 * 1000
        print(f"{name}: {microseconds:.1f} us")
        assert microseconds < 200
