"""The native CPU kernels' linears and row operations: right values, and the contract to the bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashdraft.kernels.cpu.backend import CpuKernels, available
from flashdraft.kernels.kinds import Activation
from flashdraft.kernels.torch_backend import TorchKernels

if not available():
    pytest.skip("the native kernels are not built", allow_module_level=True)

REFERENCE = TorchKernels(torch.device("cpu"), torch.float32)
WIDTHS = range(1, 41)
COLUMNS = (1, 3, 16, 63, 576)  # whole vectors, a part of one, both
WEIGHT_SHAPES = ((1, 1), (37, 19), (8, 64), (130, 77), (48, 300))  # (out, in)


def make_kernels(quantize: bool = False, threads: int = 1) -> CpuKernels:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    kernels = CpuKernels(quantize)
    torch.set_num_threads(before)
    return kernels


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def assert_rows_stand_alone(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """The first n rows at once, each row alone and every split give the same bits."""
    whole = function(x)
    for width in WIDTHS:
        assert torch.equal(function(x[:width]), whole[:width]), f"width {width}"
    assert torch.equal(torch.cat([function(row) for row in x.split(1)]), whole)
    for size in (2, 3, 5, 7, 8, 9, 16):
        assert torch.equal(torch.cat([function(part) for part in x.split(size)]), whole)
    order = torch.randperm(len(x))
    assert torch.equal(function(x[order]), whole[order])


# --- linear ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", WEIGHT_SHAPES)
@pytest.mark.parametrize("quantize", [False, True])
def test_linear_rows_stand_alone(shape: tuple[int, int], quantize: bool) -> None:
    kernels = make_kernels(quantize)
    weight = kernels.pack(torch.randn(shape))
    assert_rows_stand_alone(lambda x: kernels.linear(x, weight), torch.randn(40, shape[1]))


@pytest.mark.parametrize("shape", WEIGHT_SHAPES)
def test_float_linear_is_right(shape: tuple[int, int]) -> None:
    kernels, weight, x = make_kernels(), torch.randn(shape), torch.randn(11, shape[1])
    exact = x.double() @ weight.double().T
    error = (kernels.linear(x, kernels.pack(weight)) - exact).abs().max()
    assert error <= 1e-6 * shape[1]


def rotate(x: Tensor) -> Tensor:
    """Rows padded to a multiple of 64 and turned by the matrix of native/rotate.h."""
    mix = torch.ones(1, 1)
    while len(mix) < 64:
        mix = torch.cat([torch.cat([mix, mix], 1), torch.cat([mix, -mix], 1)])
    padded = F.pad(x, (0, -x.shape[1] % 64))
    return (padded.view(-1, 64) @ (mix / 8)).view(padded.shape)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(integers, scales) as the 8-bit linear defines them, in float64."""
    largest = x.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, 127) / largest  # torch's 127 / x is not one division
    inverse = torch.where(largest > 0, inverse, torch.zeros_like(largest))
    return (x.double() * inverse.double()).round(), largest / 127


@pytest.mark.parametrize("shape", WEIGHT_SHAPES)
def test_int8_linear_sums_exactly(shape: tuple[int, int]) -> None:
    kernels = make_kernels(quantize=True)
    x = torch.randint(-9, 10, (13, shape[1])).float()  # whole numbers rotate without rounding
    x[3] = 0
    x[4, 0] = 1000.0  # an outlier
    packed = kernels.pack(torch.randn(shape))
    panels, depth, panel, group = packed.panels.shape
    weight = packed.panels.transpose(1, 2).reshape(panels * panel, group * depth)[: shape[0]]
    integers, scales = quantize_rows(rotate(x))
    expected = (integers @ weight.double().T).float() * scales * packed.scale[: shape[0]]
    assert torch.equal(kernels.linear(x, packed), expected)


def test_int8_linear_is_close_to_float_in_spite_of_outliers() -> None:
    weight, x = torch.randn(96, 576), torch.randn(9, 576)
    x[:, [5, 200]] *= 40
    exact = x @ weight.T
    kernels = make_kernels(quantize=True)
    error = (kernels.linear(x, kernels.pack(weight)) - exact).norm() / exact.norm()
    assert error < 0.015  # 0.05 without the rotation


def test_int8_linear_of_not_a_number_stays_in_its_row() -> None:
    kernels = make_kernels(quantize=True)
    weight, x = kernels.pack(torch.randn(20, 40)), torch.randn(3, 40)
    clean = kernels.linear(x, weight)
    x[1, 7] = float("nan")
    poisoned = kernels.linear(x, weight)
    assert poisoned[1].isnan().all()
    assert torch.equal(poisoned[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("quantize", [False, True])
def test_large_and_many_rows(quantize: bool) -> None:
    """More rows than one cache block, and as many inputs as a large model has."""
    kernels = make_kernels(quantize)
    weight, x = torch.randn(20, 9000) / 95, torch.randn(37, 9000)
    packed = kernels.pack(weight)
    whole = kernels.linear(x, packed)
    assert torch.equal(whole[36:], kernels.linear(x[36:], packed))
    assert torch.allclose(whole, x @ weight.T, atol=0.1 if quantize else 1e-4)


# --- row operations -------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", COLUMNS)
def test_row_operations_stand_alone(columns: int) -> None:
    kernels, weight = make_kernels(), torch.randn(columns)
    x = 3 * torch.randn(40, columns)
    assert_rows_stand_alone(lambda rows: kernels.rms_norm(rows, weight, 1e-6), x)
    assert_rows_stand_alone(lambda rows: kernels.rms_norm(rows, None, 1e-6), x)
    assert_rows_stand_alone(kernels.softmax, x)
    assert_rows_stand_alone(kernels.argmax, x)
    assert_rows_stand_alone(lambda rows: kernels.finish_logits(rows, 0.7, 3.0), x)
    for activation in Activation:
        gate_up = 3 * torch.randn(40, 2 * columns)
        assert_rows_stand_alone(lambda rows, a=activation: kernels.gated(rows, a), gate_up)


@pytest.mark.parametrize("columns", COLUMNS)
def test_norms_are_right(columns: int) -> None:
    kernels, weight = make_kernels(), torch.randn(columns)
    x, delta = torch.randn(5, columns), torch.randn(5, columns)
    total, normed = kernels.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    assert torch.equal(normed, kernels.rms_norm(total, weight, 1e-5))
    double = total.double()
    exact = double * torch.rsqrt(double.square().mean(-1, keepdim=True) + 1e-5)
    assert torch.allclose(normed.double(), exact * weight, rtol=1e-6, atol=1e-7)
    assert torch.allclose(kernels.rms_norm(total, None, 1e-5).double(), exact, rtol=1e-6, atol=1e-7)


def test_norm_of_heads() -> None:
    kernels, weight, x = make_kernels(), torch.randn(8), torch.randn(3, 4, 8)
    flat = kernels.rms_norm(x.view(12, 8), weight, 1e-6)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-6), flat.view(3, 4, 8))


def relative_error(value: Tensor, exact: Tensor) -> float:
    return float(((value.double() - exact) / exact).abs().max())


def test_activations_are_accurate() -> None:
    kernels = make_kernels()
    x = torch.cat([torch.linspace(-30, 30, 20001), torch.randn(2000) * 1e-3])
    x = x[x != 0].unsqueeze(0)
    gate_up, double = torch.cat([x, torch.ones_like(x)], 1), x.double()
    exact = double * torch.sigmoid(double)
    assert relative_error(kernels.gated(gate_up, Activation.SILU), exact) < 1e-6
    near = double.abs() < 4  # further out the rounding of the exponent itself shows
    inner = 2 * (2 / torch.pi) ** 0.5 * (double + 0.044715 * double**3)
    exact = double * torch.sigmoid(inner)
    gelu = kernels.gated(gate_up, Activation.GELU_TANH)
    assert relative_error(gelu[near], exact[near]) < 2e-6
    assert torch.allclose(gelu.double(), exact, rtol=1e-6, atol=1e-8)
    exact = torch.tanh(double / 5) * 5
    assert relative_error(kernels.finish_logits(x, softcap=5.0), exact) < 1e-6


def test_activations_at_the_extremes() -> None:
    kernels = make_kernels()
    x = torch.tensor([[-1e30, -2000.0, 0.0, 2000.0, 1e30, float("nan")]])
    silu = kernels.gated(torch.cat([x, torch.ones_like(x)], 1), Activation.SILU)
    assert torch.allclose(silu[0, 1:5], torch.tensor([0.0, 0.0, 2000.0, 1e30]))
    assert silu[0, 0].isfinite()
    assert silu[0, 5].isnan()
    capped = kernels.finish_logits(x, softcap=30.0)
    assert torch.equal(capped[0, :5], torch.tensor([-30.0, -30.0, 0.0, 30.0, 30.0]))
    assert capped[0, 5].isnan()


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("multiplier", [1.0, 0.6])
def test_finished_logits_are_right(multiplier: float, softcap: float | None) -> None:
    kernels = make_kernels()
    products, forbidden = 5 * torch.randn(9, 203), torch.rand(203) < 0.1
    free = kernels.finish_logits(products.clone(), multiplier, softcap)
    expected = REFERENCE.finish_logits(products.clone(), multiplier, softcap)
    torch.testing.assert_close(free, expected, rtol=1e-6, atol=1e-6)
    logits = kernels.finish_logits(products.clone(), multiplier, softcap, forbidden)
    assert torch.equal(logits, free.masked_fill(forbidden, -torch.inf))
    forbidden = ~forbidden  # another mask, perhaps where the last one lay
    logits = kernels.finish_logits(products.clone(), multiplier, softcap, forbidden)
    assert torch.equal(logits, free.masked_fill(forbidden, -torch.inf))


def test_softmax_is_right() -> None:
    kernels = make_kernels()
    x = torch.randn(4, 1003) * 10
    x[1, ::2] = -float("inf")
    x[2] = 5.0
    probabilities = kernels.softmax(x)
    assert torch.allclose(probabilities.double(), x.double().softmax(-1), rtol=1e-5, atol=1e-30)
    assert (probabilities[1, ::2] == 0).all()


def test_argmax_takes_the_first_of_equals_and_shows_what_is_not_a_number() -> None:
    kernels = make_kernels()
    x = torch.zeros(5, 100)
    x[0, [30, 60]] = 2.0
    x[1] = float("nan")
    x[2, 5], x[2, 70] = float("nan"), 1.0
    x[3] = -float("inf")
    assert kernels.argmax(x).tolist() == [30, 0, 5, 0, 0]
    for row in range(100):  # in every place of a vector, a block's rest included
        x[4] = torch.linspace(0.0, 9.0, 100)
        x[4, row] = float("nan")
        assert kernels.argmax(x).tolist() == x.argmax(-1).tolist()


# --- threads, batches of nothing, experts ---------------------------------------------------------


@pytest.mark.parametrize("quantize", [False, True])
def test_threads_change_nothing(quantize: bool) -> None:
    one, three = make_kernels(quantize, threads=1), make_kernels(quantize, threads=3)
    x = torch.randn(33, 2048)
    weight = one.pack(torch.randn(77, 2048))

    def everything(kernels: CpuKernels) -> list[Tensor]:
        return [
            kernels.linear(x, weight),
            kernels.rms_norm(x, None, 1e-6),
            kernels.softmax(x),
            kernels.finish_logits(x, softcap=2.0),
            kernels.argmax(x),
            kernels.gated(x, Activation.SILU),
        ]

    for alone, together in zip(everything(one), everything(three), strict=True):
        assert torch.equal(alone, together)


def test_many_callers_at_once() -> None:
    kernels = make_kernels(quantize=True, threads=2)
    weight, x = kernels.pack(torch.randn(300, 200)), torch.randn(6, 200)
    expected = kernels.linear(x, weight)

    def call_often(_: int) -> bool:
        return all(torch.equal(kernels.linear(x, weight), expected) for _ in range(200))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(call_often, range(4)))


def test_a_forked_child_has_its_own_threads() -> None:
    kernels = make_kernels(threads=2)
    weight, x = kernels.pack(torch.randn(300, 200)), torch.randn(6, 200)
    expected = kernels.linear(x, weight)
    child = os.fork()
    if child == 0:
        same = all(torch.equal(kernels.linear(x, weight), expected) for _ in range(50))
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("quantize", [False, True])
def test_no_rows(quantize: bool) -> None:
    kernels, nothing = make_kernels(quantize), torch.empty(0, 16)
    assert kernels.linear(nothing, kernels.pack(torch.randn(5, 16))).shape == (0, 5)
    assert kernels.rms_norm(nothing, None, 1e-6).shape == (0, 16)
    assert kernels.gated(nothing, Activation.SILU).shape == (0, 8)
    assert kernels.softmax(nothing).shape == (0, 16)
    assert kernels.argmax(nothing).shape == (0,)


def test_experts_match_the_reference() -> None:
    kernels, x = make_kernels(), torch.randn(7, 12)
    gate_up, down = torch.randn(4, 20, 12), torch.randn(4, 12, 10)
    chosen, weights = torch.randint(0, 4, (7, 2)), torch.rand(7, 2)
    results = [
        by.experts(
            x,
            [by.pack(w) for w in gate_up],
            [by.pack(w) for w in down],
            chosen,
            weights,
            Activation.SILU,
        )
        for by in (kernels, REFERENCE)
    ]
    assert torch.allclose(results[0], results[1], rtol=1e-4, atol=1e-4)


# --- wrong input raises, and never crashes --------------------------------------------------------


def test_wrong_tensors_are_refused() -> None:
    kernels, x = make_kernels(), torch.randn(4, 16)
    weight = kernels.pack(torch.randn(8, 16))
    for wrong in (x.double(), x.half(), x.t(), x[:, ::2], x.to("meta")):
        with pytest.raises(ValueError):
            kernels.linear(wrong, weight)
        with pytest.raises(ValueError):
            kernels.softmax(wrong)
    with pytest.raises(ValueError, match="16 inputs"):
        kernels.linear(torch.randn(4, 15), weight)
    with pytest.raises(ValueError):
        kernels.rms_norm(x, torch.randn(15), 1e-6)
    with pytest.raises(ValueError):
        kernels.add_rms_norm(x, torch.randn(3, 16), torch.randn(16), 1e-6)
    with pytest.raises(ValueError, match="even"):
        kernels.gated(torch.randn(4, 15), Activation.SILU)
