"""Quantised experts on a real GPU, at Gemma 4 26B-A4B's sizes, against their weights as floats."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdraft.kernels.cuda.quantized.layout import PackedWeight, pack_quantized
from flashdraft.kernels.kinds import Activation, Scheme
from flashdraft.kernels.quantized import Quantized, quantize
from flashdraft.kernels.torch_backend import TorchKernels

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
HIDDEN, INNER, NUM_EXPERTS, NUM_CHOSEN = 2816, 704, 128, 8
MOST_ERROR = 8e-3  # of bfloat16 rows between exact weights
FORMATS = ("int4", "int8", "fp8", "q4_k", "q6_k")


def draw_blocks(name: str, rows: int, depth: int) -> Quantized:
    """Random numbers in a layout with scales of scales, whose values are about as large."""
    shape, size = (NUM_EXPERTS, rows, depth), depth**-0.5
    signed = name == "q6_k"
    group, bits = (16, 6) if signed else (32, 4)

    def over(most: float) -> Tensor:
        return torch.rand(*shape[:2], depth // 256, device=CUDA).mul_(most).half()

    def small(low: int, high: int) -> Tensor:
        dtype = torch.int8 if signed else torch.uint8
        return torch.randint(low, high, (*shape[:2], depth // group), device=CUDA, dtype=dtype)

    return Quantized(
        Scheme.INT6 if signed else Scheme.INT4,
        torch.randint(0, 1 << bits, shape, device=CUDA, dtype=torch.uint8),
        small(-128, 128) if signed else small(0, 64),
        group,
        zero=32 if signed else 0,
        minimum=None if signed else small(0, 64),
        super_scale=over(size / 700),
        super_minimum=None if signed else over(size / 100),
    )


@functools.lru_cache(maxsize=1)
def make_weights(name: str) -> tuple[Quantized, Quantized, PackedWeight, PackedWeight]:
    """Both products' weights, plain and packed; 704 has no blocks of 256, so down is int8 there."""

    def draw(rows: int, depth: int) -> Quantized:
        weight = torch.randn(NUM_EXPERTS, rows, depth, device=CUDA, dtype=torch.bfloat16)
        scheme = Scheme.INT8 if name in ("q4_k", "q6_k") else Scheme(name)
        return quantize(weight * depth**-0.5, scheme)

    is_block = name in ("q4_k", "q6_k")
    gate_up = draw_blocks(name, 2 * INNER, HIDDEN) if is_block else draw(2 * INNER, HIDDEN)
    down = draw(HIDDEN, INNER)
    return gate_up, down, pack_quantized(gate_up), pack_quantized(down)


def make_rows(num_rows: int, routing: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, chosen and weights; degenerate: all rows choose the same experts."""
    lottery = torch.rand(1 if routing == "degenerate" else num_rows, NUM_EXPERTS, device=CUDA)
    chosen = lottery.argsort(1)[:, :NUM_CHOSEN].expand(num_rows, -1).contiguous()
    x = torch.randn(num_rows, HIDDEN, device=CUDA, dtype=torch.bfloat16)
    return x, chosen, torch.rand(num_rows, NUM_CHOSEN, device=CUDA)


class Mixture:
    """`mix_quantized` with one format's weights and this card's processors."""

    def __init__(self, name: str) -> None:
        self.gate_up, self.down, *self.packed = make_weights(name)
        self.arrivals = torch.zeros(1 << 15, device=CUDA, dtype=torch.int32)
        self.num_processors = torch.cuda.get_device_properties(CUDA).multi_processor_count

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, exact: bool = False) -> Tensor:
        from flashdraft.kernels.cuda.experts.quantized import mix_quantized

        activation = Activation.GELU_TANH
        return mix_quantized(
            x,
            *self.packed,
            chosen,
            weights,
            activation,
            self.num_processors,
            self.arrivals,
            exact,
        )

    def expected(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        inputs: Any = (Experts(self.gate_up), Experts(self.down), chosen, weights)
        reference = TorchKernels(CUDA, torch.float32)
        return reference.experts(x.float(), *inputs, Activation.GELU_TANH)


class Experts:
    """Experts' weights in float32, one at a time."""

    def __init__(self, weight: Quantized) -> None:
        self.weight = weight

    def __getitem__(self, expert: int) -> Tensor:
        return self.weight.expert(expert).dequantize()


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_experts_match_float32(name: str) -> None:
    mix = Mixture(name)
    for routing in ("degenerate", "uniform"):
        for num_rows in (1, 2, 7, 8, 9, 16, 17, 33, 64):
            rows = make_rows(num_rows, routing)
            found, expected = mix(*rows), mix.expected(*rows)
            error = float((found.float() - expected).norm() / expected.norm())
            assert error < MOST_ERROR, f"{num_rows} rows, {routing}: {error}"
            for _ in range(10):  # whoever comes last, the parts are added in their order
                assert torch.equal(mix(*rows), found), "two runs differ"
            assert not mix.arrivals.any()


@pytest.mark.parametrize("routing", ["degenerate", "uniform"])
@pytest.mark.parametrize("name", FORMATS)
def test_more_rows_of_quantized_experts_match_float32(name: str, routing: str) -> None:
    """On Hopper in slabs, where the formats allow it."""
    from flashdraft.kernels.cuda.backend import TritonKernels

    mix, kernels = Mixture(name), TritonKernels(CUDA, torch.bfloat16)
    for num_rows in (17, 64, 65, 128, 512, 513, 1100):
        rows = make_rows(num_rows, routing)
        x, *choice = rows
        found = kernels.experts(x, *mix.packed, *choice, Activation.GELU_TANH)
        expected = mix.expected(*rows)
        error = float((found.float() - expected).norm() / expected.norm())
        assert error < MOST_ERROR, f"{num_rows} rows: {error}"
        again = kernels.experts(x, *mix.packed, *choice, Activation.GELU_TANH)
        assert torch.equal(found, again), "two runs differ"


@pytest.mark.parametrize("plan", [(64, 4), (64, 3), (32, 4), (128, 3), (128, 2), (32, 2, 2)])
@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_slabs_of_quantized_experts_match_float32(name: str, plan: tuple[int, ...]) -> None:
    from flashdraft.kernels.cuda.card import read_limits
    from flashdraft.kernels.cuda.experts import slabs
    from flashdraft.kernels.cuda.experts.plan import SlabsPlan

    if torch.cuda.get_device_capability(CUDA) != (9, 0):
        pytest.skip("only Hopper has the instructions")
    mix, settings = Mixture(name), (SlabsPlan(*plan), read_limits(CUDA))
    for num_rows in (1, 40, 200):
        rows = make_rows(num_rows, "uniform")
        x, *choice = rows
        found = slabs.mix_planned(x, *mix.packed, *choice, Activation.GELU_TANH, *settings)
        expected = mix.expected(*rows)
        assert found is not None
        assert float((found.float() - expected).norm() / expected.norm()) < MOST_ERROR


@pytest.mark.parametrize("name", ["int4", "fp8"])
def test_exact_bits_of_quantized_experts_do_not_depend_on_the_other_rows(name: str) -> None:
    mix, (x, chosen, weights) = Mixture(name), make_rows(64, "uniform")

    def run(size: int) -> Tensor:
        parts = (slice(i, i + size) for i in range(0, 64, size))
        return torch.cat([mix(x[p], chosen[p], weights[p], exact=True) for p in parts])

    together = run(64)
    for size in (1, 3, 16, 32):
        assert torch.equal(run(size), together), f"{size} rows at a time"


@pytest.mark.parametrize("num_rows", [1, 4, 16, 64])
def test_a_graph_of_quantized_experts_follows_new_routing(num_rows: int) -> None:
    mix = Mixture("int4")
    rows = make_rows(num_rows, "uniform")
    mix(*rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = mix(*rows)
    for routing in ("degenerate", "uniform"):
        for old, new in zip(rows, make_rows(num_rows, routing), strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(output, mix(*rows))


@pytest.mark.parametrize("name", ["int4", "q4_k"])
def test_dequantized_experts_are_the_weights(name: str) -> None:
    from flashdraft.kernels.cuda.quantized.linear import dequantize

    gate_up, _, packed, _ = make_weights(name)
    found = dequantize(packed, torch.bfloat16)
    for expert in (0, 1, NUM_EXPERTS - 1):
        expected = gate_up.expert(expert).dequantize()
        torch.testing.assert_close(found[expert].float(), expected, atol=1e-6, rtol=8e-3)
