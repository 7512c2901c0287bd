"""The mixture of experts and the norms around it on a real GPU, at Gemma 4 26B-A4B's sizes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdraft.kernels.interface import Residual
from flashdraft.kernels.kinds import Activation
from flashdraft.kernels.torch_backend import TorchKernels

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
HIDDEN, INNER, NUM_EXPERTS, NUM_CHOSEN = 2816, 704, 128, 8
RELATIVE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-5}

SLABS_PLANS = [(64, 4), (32, 4), (64, 3), (128, 3), (128, 2), (32, 2, 2), (16, 2, 2)]


def triton_kernels(dtype: torch.dtype, exact: bool = False) -> Any:
    from flashdraft.kernels.cuda.backend import TritonKernels

    return TritonKernels(CUDA, dtype, exact)


@functools.cache
def make_weights() -> tuple[Tensor, Tensor]:
    generator = torch.Generator(CUDA).manual_seed(1)

    def draw(rows: int, columns: int) -> Tensor:
        weight = torch.randn(NUM_EXPERTS, rows, columns, device=CUDA, generator=generator)
        return (weight * columns**-0.5).bfloat16()

    return draw(2 * INNER, HIDDEN), draw(HIDDEN, INNER)


def make_rows(num_rows: int, routing: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, chosen and weights; degenerate: all rows choose the same experts."""
    lottery = torch.rand(1 if routing == "degenerate" else num_rows, NUM_EXPERTS, device=CUDA)
    chosen = lottery.argsort(1)[:, :NUM_CHOSEN].expand(num_rows, -1).contiguous()
    x = torch.randn(num_rows, HIDDEN, device=CUDA).to(dtype)
    return x, chosen, torch.rand(num_rows, NUM_CHOSEN, device=CUDA)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("routing", ["degenerate", "uniform"])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 32, 33, 64, 65, 128, 512, 513, 1024, 2100])
def test_experts_match_float32(rows: int, routing: str) -> None:
    check_experts(rows, routing, torch.bfloat16, Activation.GELU_TANH)


@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_experts_in_other_types(rows: int, dtype: torch.dtype) -> None:
    check_experts(rows, "uniform", dtype, Activation.SILU)


def check_experts(rows: int, routing: str, dtype: torch.dtype, activation: Activation) -> None:
    kernels, reference = triton_kernels(dtype), TorchKernels(CUDA, torch.float32)
    gate_up, down = make_weights()
    x, chosen, weights = make_rows(rows, routing, dtype)
    packed = kernels.pack_experts(gate_up), kernels.pack_experts(down)
    found = kernels.experts(x, *packed, chosen, weights, activation)
    exact = [Converted(gate_up), Converted(down)]
    expected = reference.experts(x.float(), *exact, chosen, weights, activation)  # type: ignore[arg-type]
    assert found.dtype == dtype and found.shape == (rows, HIDDEN)
    assert relative_error(found, expected) < RELATIVE[dtype]
    assert torch.equal(found, kernels.experts(x, *packed, chosen, weights, activation))


@pytest.mark.parametrize("plan", SLABS_PLANS)
@pytest.mark.parametrize("routing", ["degenerate", "uniform", "skewed"])
def test_slabs_of_every_plan_match_float32(routing: str, plan: tuple[int, ...]) -> None:
    """Also a layer whose experts have from no row to all of them."""
    from flashdraft.kernels.cuda.experts import slabs
    from flashdraft.kernels.cuda.experts.plan import SlabsPlan

    if torch.cuda.get_device_capability(CUDA) != (9, 0):
        pytest.skip("only Hopper has the instructions")
    kernels, reference = triton_kernels(torch.bfloat16), TorchKernels(CUDA, torch.float32)
    gate_up, down = make_weights()
    exact: Any = Converted(gate_up), Converted(down)
    for rows in (1, 16, 100, 300):
        x, chosen, weights = make_rows(rows, routing, torch.bfloat16)
        if routing == "skewed":  # the first expert has every row, the last ones none
            luck = torch.rand(rows, NUM_EXPERTS, device=CUDA)
            luck[:, 0], luck[:, 9:40] = 2.0, luck[:, 9:40] ** 4
            chosen = luck[:, :120].argsort(1, descending=True)[:, :NUM_CHOSEN].contiguous()
        inputs = (chosen, weights, Activation.GELU_TANH)
        settings = (*inputs, SlabsPlan(*plan), kernels._limits)
        found = slabs.mix_planned(x, gate_up, down, *settings)
        assert found is not None
        assert relative_error(found, reference.experts(x.float(), *exact, *inputs)) < 8e-3
        for _ in range(5):  # whichever block is first
            again = slabs.mix_planned(x, gate_up, down, *settings)
            assert again is not None and torch.equal(found, again)


class Converted:
    """Experts' weights in float32, one at a time."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __getitem__(self, expert: int) -> Tensor:
        return self.weight[expert].float()


def test_exact_bits_do_not_depend_on_the_other_rows() -> None:
    kernels = triton_kernels(torch.bfloat16, exact=True)
    x, chosen, weights = make_rows(300, "uniform", torch.bfloat16)

    def run(first: int, last: int) -> Tensor:
        rows = slice(first, last)
        return kernels.experts(
            x[rows], *make_weights(), chosen[rows], weights[rows], Activation.GELU_TANH
        )

    together = run(0, 300)
    assert torch.equal(together, torch.cat([run(i, i + 1) for i in range(300)]))
    assert torch.equal(together, torch.cat([run(i, i + 50) for i in range(0, 300, 50)]))


@pytest.mark.parametrize("rows", [1, 16, 32, 64, 512])
def test_a_graph_follows_new_routing(rows: int) -> None:
    kernels = triton_kernels(torch.bfloat16)
    scale = torch.rand(NUM_EXPERTS, device=CUDA) + 0.5
    x = torch.randn(rows, HIDDEN, device=CUDA).bfloat16()
    logits = torch.randn(rows, NUM_EXPERTS, device=CUDA).bfloat16()

    def run() -> Tensor:
        chosen, weights = kernels.choose_experts(logits, NUM_CHOSEN, scale)
        return kernels.experts(x, *make_weights(), chosen, weights, Activation.GELU_TANH)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    for spread in (1.0, 0.0):  # the second time everybody chooses the first experts
        x.normal_()
        logits.normal_().mul_(spread)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(output, run())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_choice_matches_torch(dtype: torch.dtype) -> None:
    # Few digits: what differs at all still differs after the softmax.
    logits = (torch.randn(1000, NUM_EXPERTS, device=CUDA) * 2).bfloat16().to(dtype)
    scale = torch.rand(NUM_EXPERTS, device=CUDA)
    chosen, weights = triton_kernels(dtype).choose_experts(logits, NUM_CHOSEN, scale)
    # Of equals the first: a stable sort says the same.
    expected = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :NUM_CHOSEN]
    assert torch.equal(chosen, expected)
    chances = logits.float().softmax(-1).gather(1, expected)
    chances = chances / chances.sum(-1, keepdim=True) * scale[expected]
    torch.testing.assert_close(weights, chances, atol=1e-6, rtol=1e-5)


def draw_router(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows and a router whose logits are the same in every order of addition."""
    x = torch.randint(-8, 9, (rows, HIDDEN), device=CUDA).to(dtype)
    return x, (torch.randint(-8, 9, (NUM_EXPERTS, HIDDEN), device=CUDA) / 512).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_routing_is_a_linear_and_a_choice(rows: int, dtype: torch.dtype) -> None:
    kernels, scale = triton_kernels(dtype), torch.rand(NUM_EXPERTS, device=CUDA) + 0.5
    for num_chosen in (1, 4, NUM_CHOSEN):
        x, router = draw_router(rows, dtype)
        logits = (x.double() @ router.double().T).to(dtype)
        expected, shares = kernels.choose_experts(logits, num_chosen, scale)
        for _ in range(20):  # whoever comes last chooses
            chosen, weights = kernels.route(x, router, num_chosen, scale)
            assert torch.equal(chosen, expected)
            torch.testing.assert_close(weights, shares, atol=1e-6, rtol=1e-5)
    assert not kernels._arrivals.any()


def test_routing_prefers_the_first_of_equals() -> None:
    kernels, scale = triton_kernels(torch.bfloat16), torch.ones(NUM_EXPERTS, device=CUDA)
    x, router = torch.ones(4, HIDDEN, device=CUDA).bfloat16(), draw_router(1, torch.bfloat16)[1]
    router[:] = router[0]
    router[[5, 90], 0] += 1
    chosen, _ = kernels.route(x, router, NUM_CHOSEN, scale)
    assert chosen.tolist() == [[5, 90, 0, 1, 2, 3, 4, 6]] * 4


@pytest.mark.parametrize("rows", [1, 4])
def test_a_graph_routes_new_rows(rows: int) -> None:
    kernels, scale = triton_kernels(torch.bfloat16), torch.rand(NUM_EXPERTS, device=CUDA) + 0.5
    x, router = draw_router(rows, torch.bfloat16)
    kernels.route(x, router, NUM_CHOSEN, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.route(x, router, NUM_CHOSEN, scale)
    for _ in range(5):
        x.copy_(draw_router(rows, torch.bfloat16)[0])
        graph.replay()
        expected = kernels.choose_experts(kernels.linear(x, router), NUM_CHOSEN, scale)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("hidden", [HIDDEN, 5376])
@pytest.mark.parametrize(
    ("deltas", "post", "scalar", "outputs"),
    [(1, False, False, 1), (1, False, True, 1), (1, False, False, 3), (2, True, True, 1)],
)
def test_residual_norms(hidden: int, deltas: int, post: bool, scalar: bool, outputs: int) -> None:
    x, *others = torch.randn(1 + deltas, 33, hidden, device=CUDA).bfloat16() * 3
    vectors = iter(torch.randn(8, hidden, device=CUDA).bfloat16())
    residual = Residual(
        x,
        [(other, next(vectors)) for other in others],
        next(vectors) if post else None,
        torch.full((1,), 0.7, device=CUDA).bfloat16() if scalar else None,
    )
    arguments: Any = (residual, [next(vectors) for _ in range(outputs)], 1e-6)
    stream, normed = triton_kernels(torch.bfloat16).residual_norms(*arguments)
    expected_stream, expected = TorchKernels(CUDA, torch.bfloat16).residual_norms(*arguments)
    torch.testing.assert_close([stream, *normed], [expected_stream, *expected], atol=0.1, rtol=2e-2)
    assert relative_error(stream, expected_stream.float()) < 1e-3
