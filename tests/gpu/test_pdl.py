"""Kernels that start before their predecessors end give the same bits as kernels that do not.

Layers as Gemma 4 26B-A4B has them are captured in a graph, whose memory the kernels hand on to each
other, and replayed with ever other inputs: what is read too early, or written too early, shows as a
difference, since the replay before left other numbers there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flashdraft.kernels.interface import (
    CAUSAL,
    Heads,
    Mixture,
    PagedKeys,
    PageView,
    QKVSpec,
    Residual,
    RopeTable,
)
from flashdraft.kernels.kinds import Activation, Scheme

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
BF16 = torch.bfloat16
HIDDEN, DENSE, INNER, NUM_EXPERTS, NUM_CHOSEN = 2816, 2112, 704, 16, 8
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, WINDOW = 16, 8, 256, 16, 1024
VOCABULARY, NUM_LAYERS, CONTEXT = 20_000, 3, 700
NUM_INPUTS, NUM_REPLAYS = 8, 200
EPS, GELU = 1e-6, Activation.GELU_TANH
SPEC = QKVSpec(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, EPS)


class Layer(NamedTuple):
    """One layer's weights, packed, and its cache."""

    norm: Tensor
    qkv: Any
    output: Any
    gate_up: Any
    down: Any
    router: Any
    scale: Tensor
    experts_up: Any
    experts_down: Any
    keys: Tensor
    values: Tensor


def draw(*shape: int) -> Tensor:
    return (torch.randn(shape, device=CUDA) * shape[-1] ** -0.5).to(BF16)


def make_layer(kernels: Any, num_pages: int) -> Layer:
    cache = (num_pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    return Layer(
        norm=(torch.rand(HIDDEN, device=CUDA) + 0.5).to(BF16),
        qkv=kernels.pack(draw(SPEC.width, HIDDEN)),
        output=kernels.pack(draw(HIDDEN, NUM_HEADS * HEAD_DIM)),
        gate_up=kernels.pack(draw(2 * DENSE, HIDDEN)),
        down=kernels.pack(draw(HIDDEN, DENSE)),
        router=kernels.pack(draw(NUM_EXPERTS, HIDDEN) * 8, quantize=False),
        scale=torch.rand(NUM_EXPERTS, device=CUDA) + 0.5,
        experts_up=kernels.pack_experts(draw(NUM_EXPERTS, 2 * INNER, HIDDEN)),
        experts_down=kernels.pack_experts(draw(NUM_EXPERTS, HIDDEN, INNER)),
        keys=draw(*cache),
        values=draw(*cache),
    )


def make_view(num_rows: int, num_pages: int) -> PageView:
    """One sequence, its rows after the context."""
    slots = torch.arange(CONTEXT, CONTEXT + num_rows, device=CUDA)
    return PageView(
        query_start=torch.tensor([0, num_rows], device=CUDA, dtype=torch.int32),
        context_lens=torch.tensor([CONTEXT], device=CUDA, dtype=torch.int32),
        block_table=torch.arange(num_pages, device=CUDA, dtype=torch.int32).unsqueeze(0),
        slots=slots,
        page_size=PAGE_SIZE,
        max_query_len=num_rows,
        max_key_len=CONTEXT + num_rows,
    )


class Chain:
    """A model's step out of the kernels alone, on one input buffer."""

    def __init__(self, num_rows: int, exact: bool, scheme: Scheme | None = None) -> None:
        from flashdraft.kernels.cuda.backend import TritonKernels

        torch.manual_seed(0)
        num_pages = -(-(CONTEXT + num_rows) // PAGE_SIZE)
        self.kernels: Any = TritonKernels(CUDA, BF16, exact, scheme)
        self.view = make_view(num_rows, num_pages)
        angles = torch.rand(CONTEXT + num_rows, HEAD_DIM // 2, device=CUDA)
        self.rope = RopeTable(angles.cos(), angles.sin())
        self.layers = [make_layer(self.kernels, num_pages) for _ in range(NUM_LAYERS)]
        self.head = self.kernels.pack_head(draw(VOCABULARY, HIDDEN))
        self.inputs = torch.randn(NUM_INPUTS, num_rows, HIDDEN, device=CUDA).to(BF16)
        self.x = self.inputs[0].clone()

    def run(self) -> tuple[Tensor, ...]:
        """Everything a step gives."""
        residual = Residual(self.x)
        for layer in self.layers:
            residual = self.run_layer(layer, residual)
        x, (normed,) = self.kernels.residual_norms(residual, [self.layers[0].norm], EPS)
        products = self.kernels.linear(normed, self.head)
        return x, normed, products, self.kernels.finish_logits(products, 1.0, 30.0)

    def run_layer(self, layer: Layer, residual: Residual) -> Residual:
        k, view, caches = self.kernels, self.view, (layer.keys, layer.values)
        x, qkv = k.residual_linear(residual, layer.norm, EPS, layer.qkv)
        keys = PagedKeys(*caches, view, scale=1.0, window=WINDOW, mask=CAUSAL)
        mixed = k.attend(qkv, Heads(SPEC, self.rope, view.slots), keys)
        deltas = [(k.linear(mixed, layer.output), layer.norm)]
        attended = Residual(x, deltas)
        mlp, experts = (layer.gate_up, layer.down), (layer.experts_up, layer.experts_down)
        router = (layer.norm, layer.router, NUM_CHOSEN, layer.scale)
        parts = Mixture(layer.norm, *mlp, *router, layer.norm, *experts, GELU, EPS)
        x, dense, mixed = k.mixture(attended, parts)
        deltas = [(dense, layer.norm), (mixed, layer.norm)]
        return Residual(x, deltas, layer.norm)


def allow_overlap(monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    from flashdraft.kernels.cuda import overlap

    monkeypatch.setattr(overlap, "can_overlap", lambda device: allowed)
    for most in ("MAX_ROWS", "MAX_SMALL_ROWS"):
        monkeypatch.setattr(overlap, most, 1 << 30)  # also where it does not pay


@pytest.fixture(autouse=True)
def hopper() -> None:
    from flashdraft.kernels.cuda.overlap import can_overlap

    if not can_overlap(CUDA):
        pytest.skip("kernels overlap on compute capability 9.0 and later")


@pytest.mark.parametrize(
    ("num_rows", "exact", "scheme"),
    [
        *((rows, exact, None) for rows in (1, 8, 24, 100) for exact in (False, True)),
        *((rows, False, scheme) for rows in (1, 16, 100) for scheme in (Scheme.INT4, Scheme.FP8)),
    ],
)
def test_overlapping_layers_keep_their_bits(
    num_rows: int,
    exact: bool,
    scheme: Scheme | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flashdraft.kernels.cuda import backend
    from flashdraft.kernels.cuda.quantized import few_rows, many_rows

    monkeypatch.setattr(backend, "MIN_QUANTIZED_VALUES", 0)
    monkeypatch.setattr(few_rows, "MIN_VALUES", 0)
    monkeypatch.setattr(many_rows, "MIN_VALUES", 0)
    chain = Chain(num_rows, exact, scheme)
    allow_overlap(monkeypatch, False)
    expected = []
    for rows in chain.inputs:
        chain.x.copy_(rows)
        expected.append(chain.run())
    assert not torch.equal(expected[0][0], expected[1][0])
    allow_overlap(monkeypatch, True)
    chain.run()  # compiles, which a capture must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain.run()
    differences = torch.zeros(NUM_REPLAYS, len(found), device=CUDA, dtype=torch.int64)
    for i in range(NUM_REPLAYS):  # one replay on the heels of the other: the host never waits
        chain.x.copy_(chain.inputs[i % NUM_INPUTS])
        graph.replay()
        for j, one in enumerate(found):
            differences[i, j] = (one != expected[i % NUM_INPUTS][j]).sum()
    assert differences.sum() == 0, differences.nonzero()[:5].tolist()
    assert not chain.kernels._arrivals.any()


def test_memory_is_handed_on_among_small_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long chain of short kernels over few buffers: each is written as soon as it is free."""
    from flashdraft.kernels.cuda.backend import TritonKernels

    torch.manual_seed(0)
    kernels, weight = TritonKernels(CUDA, BF16), torch.rand(HIDDEN, device=CUDA).to(BF16) + 0.5
    square = draw(HIDDEN, HIDDEN)  # cut along its depth
    inputs = torch.randn(NUM_INPUTS, 16, HIDDEN, device=CUDA).to(BF16)
    x = inputs[0].clone()

    def run() -> Tensor:
        stream, normed = kernels.add_rms_norm(x, x, weight, EPS)
        for _ in range(100):
            stream, normed = kernels.add_rms_norm(stream, normed, weight, EPS)
            stream, normed = kernels.add_rms_norm(normed, stream, weight, EPS)
            normed = kernels.linear(kernels.rms_norm(normed, None, EPS), square)
        return torch.cat([stream, normed], 1)

    allow_overlap(monkeypatch, False)
    expected = []
    for rows in inputs:
        x.copy_(rows)
        expected.append(run())
    allow_overlap(monkeypatch, True)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    differences = torch.zeros(NUM_REPLAYS, device=CUDA, dtype=torch.int64)
    for i in range(NUM_REPLAYS):
        x.copy_(inputs[i % NUM_INPUTS])
        graph.replay()
        differences[i] = (found != expected[i % NUM_INPUTS]).sum()
    assert differences.sum() == 0, differences.nonzero()[:5].tolist()
