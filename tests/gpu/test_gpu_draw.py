"""The draw on a real GPU, over Gemma 4's vocabulary: bit for bit the rule's, and in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashdraft.kernels.draw import arithmetic, host, reference
from flashdraft.kernels.draw.rule import Draw, HeadProducts
from tests.drawn import CPU, Rows, assert_equal, make_rows

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
VOCABULARY = 262144
KINDS: dict[str, dict[str, Any]] = {
    "mixed": {},
    "free": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "top-k and top-p": {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "min_p": 0.0},
    "top-p": {"temperature": 0.9, "top_k": 0, "top_p": 0.95, "min_p": 0.0},
    "large top-k": {"temperature": 1.3, "top_k": 5000, "top_p": 0.9, "min_p": 0.0},
    "min-p": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.02},
    "greedy": {"temperature": 0.0},
}


def draw(batch: Rows) -> Draw:
    from flashdraft.kernels.cuda.backend import TritonKernels

    return TritonKernels(CUDA, torch.float32).draw(*batch.drawable)


def test_torch_on_the_device_computes_the_same_bits() -> None:
    bits = torch.randint(0, 2**31 - 1, (1 << 20,), dtype=torch.int32)
    scaled = -torch.empty(1 << 20).exponential_(0.1)
    assert torch.equal(arithmetic.gumbel(bits.to(CUDA)).cpu(), arithmetic.gumbel(bits))
    assert torch.equal(arithmetic.weigh(scaled.to(CUDA)).cpu(), arithmetic.weigh(scaled))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [VOCABULARY, 100_003])
def test_equals_the_reference(kind: str, vocab_size: int) -> None:
    batch = make_rows(1, vocab_size, num_slots=14, **KINDS[kind]).to(CUDA)
    assert_equal(draw(batch), reference.draw(*batch.drawable))


def test_equals_the_host() -> None:
    batch = make_rows(2, 49152, num_slots=28, masked=True)
    assert_equal(draw(batch.to(CUDA)), host.draw(*batch.drawable))
    assert_equal(reference.draw(*batch.to(CUDA).drawable), host.draw(*batch.drawable))


@pytest.mark.parametrize("kind", ["mixed", "greedy", "top-k and top-p", "top-p", "large top-k"])
def test_a_head_s_products_are_as_good_as_its_logits(kind: str) -> None:
    from flashdraft.kernels.cuda.backend import TritonKernels

    kernels = TritonKernels(CUDA, torch.bfloat16)
    batch = make_rows(4, VOCABULARY, num_slots=14, **KINDS[kind]).to(CUDA)
    forbidden = torch.arange(VOCABULARY, device=CUDA) % 7 == 3
    for softcap, banned in ((30.0, None), (None, forbidden), (30.0, forbidden)):
        head = HeadProducts((batch.logits * 3).to(torch.bfloat16), 0.75, softcap, banned)
        found = kernels.draw(head, *batch.drawable[1:])
        assert_equal(found, kernels.draw(kernels.finish_logits(*head), *batch.drawable[1:]))
        assert banned is None or not banned[found.tokens.clamp(min=0)].any()


def test_half_precision_logits_with_their_many_equals() -> None:
    for kind in ("mixed", "top-p", "top-k and top-p", "large top-k"):
        batch = make_rows(3, VOCABULARY, num_slots=14, **KINDS[kind])
        half = Rows(batch.logits.to(torch.bfloat16), *batch.drawable[1:], []).to(CUDA)
        full = Rows(half.logits.float(), *half.drawable[1:], [])
        assert_equal(draw(half), reference.draw(*full.drawable))


def test_a_row_alone_is_the_row_in_a_batch() -> None:
    batch = make_rows(4, VOCABULARY, num_slots=14).to(CUDA)
    together = draw(batch)
    for _ in range(3):
        assert all(map(equal, draw(batch), together)), "two runs differ"
    for row in range(0, len(batch.logits), 5):
        for found, expected in zip(draw(batch.alone(row)), together, strict=True):
            assert equal(found[0], expected[row])


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(0.5), other.nan_to_num(0.5))


@pytest.mark.parametrize("implementation", [draw, lambda batch: reference.draw(*batch.drawable)])
def test_a_captured_draw_is_replayed_with_other_rows(implementation: Any) -> None:
    batch = make_rows(5, VOCABULARY, num_slots=14).to(CUDA)
    implementation(batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = implementation(batch)
    for seed in range(6, 9):
        other = make_rows(seed, VOCABULARY, num_slots=14)
        batch.logits.copy_(other.logits)
        for name in ("owner", "positions", "followed", "ancestors"):
            getattr(batch.rows, name).copy_(getattr(other.rows, name))
        batch.settings.set(dict(enumerate(other.requests)))
        graph.replay()
        assert_equal(found, reference.draw(*other.to(CUDA).drawable))


def test_slots_are_set_and_counted_without_waiting() -> None:
    batch = make_rows(6, 1000)
    there = batch.to(CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        there.settings.set(dict(enumerate(batch.requests[::-1])))
        slots, tokens = torch.arange(28, device=CUDA), torch.ones(28, 3, device=CUDA).long()
        there.settings.count(slots, tokens, slots % 4)
        there.settings.move([3, 4], [4, 3])
        draw(there)
        reference.draw(*there.drawable)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    batch.settings.set(dict(enumerate(batch.requests[::-1])))
    batch.settings.count(slots.cpu(), tokens.cpu(), slots.cpu() % 4)
    batch.settings.move([3, 4], [4, 3])
    assert torch.equal(there.settings.facts.to(CPU), batch.settings.facts)
    assert torch.equal(there.settings.bias.to(CPU), batch.settings.bias)
