"""The CUDA C++ kernel for few rows on a GPU: against the float weight, and beside Triton's."""

from __future__ import annotations

import pytest
import torch

from flashdraft.kernels.cuda.quantized.layout import pack_quantized
from flashdraft.kernels.interface import Mixture, Residual
from flashdraft.kernels.kinds import Activation, Scheme
from flashdraft.kernels.quantized import stack_experts
from tests.gpu.products import (
    check_every_fp8_number,
    check_gates,
    check_same_bits,
    check_sizes,
    distance,
)
from tests.unit.kernels.cuda.quantized.test_linear import FEW_ROWS_FORMATS, FORMATS

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def in_use(monkeypatch):
    """Also where Triton is faster."""
    from flashdraft.kernels.cuda.quantized import few_rows

    monkeypatch.setattr(few_rows, "MAX_ROWS", dict.fromkeys(few_rows.MAX_ROWS, 16))
    monkeypatch.setattr(few_rows, "MIN_VALUES", 0)


def limits():
    from flashdraft.kernels.cuda.card import read_limits

    return read_limits(DEVICE)


def multiply(x, packed, activation=None):
    from flashdraft.kernels.cuda.quantized.few_rows import multiply_few

    arrivals = torch.zeros(1 << 18, device=DEVICE, dtype=torch.int32)
    found = multiply_few(x, packed, limits(), arrivals, activation)
    assert found is not None and not arrivals.any()
    return found


@pytest.mark.parametrize("name", FEW_ROWS_FORMATS)
@pytest.mark.parametrize("num_rows", [1, 2, 8, 9, 16])
@pytest.mark.parametrize(("out", "depth"), [(900, 2048), (5376, 8192), (16384, 5376)])
def test_every_format(name, num_rows, out, depth):
    torch.manual_seed(0)
    weight = FORMATS[name](out=out, depth=depth).to(DEVICE)
    x = torch.randn(num_rows, depth, device=DEVICE).bfloat16()
    expected = x.float() @ weight.dequantize().T
    assert distance(multiply(x, pack_quantized(weight)), expected) < 0.003


@pytest.mark.parametrize("name", FEW_ROWS_FORMATS)
@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize("activation", Activation)
def test_gates(name, num_rows, activation):
    check_gates(multiply, name, num_rows, activation, DEVICE)


def test_the_backend_takes_it(monkeypatch):
    from flashdraft.kernels.cuda import backend as triton_backend
    from flashdraft.kernels.cuda.quantized import few_rows

    monkeypatch.setattr(triton_backend, "MIN_QUANTIZED_VALUES", 0)
    taken, launch = [], few_rows.launch
    monkeypatch.setattr(
        few_rows, "launch", lambda x, *rest: taken.append(len(x)) or launch(x, *rest)
    )
    torch.manual_seed(5)
    weight = FORMATS["q4_0"](out=900, depth=2048)
    backend = triton_backend.TritonKernels(DEVICE, torch.bfloat16)
    for num_rows in (1, 16, 17):
        x = torch.randn(num_rows, 2048, device=DEVICE).bfloat16()
        found = backend.linear(x, backend.pack(weight))
        assert distance(found, x.float() @ weight.dequantize().to(DEVICE).T) < 0.003
    assert taken == [1, 16]


def test_large_and_small_numbers_are_exact():
    sizes = torch.tensor([1e-12, 1e-6, 1, 1e4, 1e8, 1e12], device=DEVICE)
    check_sizes(multiply, sizes)


def test_every_fp8_number():
    check_every_fp8_number(multiply, torch.tensor([5], device=DEVICE))


@pytest.mark.parametrize("num_rows", [1, 16])
def test_the_same_bits_every_time(num_rows):
    check_same_bits(multiply, "q4_0", num_rows, DEVICE)


@pytest.mark.parametrize("num_rows", [1, 16])
def test_a_chain_in_a_graph_is_the_chain(num_rows):
    """Kernels that begin before their predecessors end wait for what these write."""
    torch.manual_seed(3)
    weights = [FORMATS["q4_0"](out=5376, depth=5376).to(DEVICE) for _ in range(4)]
    packed = [pack_quantized(weight) for weight in weights]
    x = torch.randn(num_rows, 5376, device=DEVICE).bfloat16()

    def chain():
        y = x
        for weight in packed:
            y = multiply_unchecked(y, weight)
            y = (y / y.float().std()).bfloat16()
            y = multiply_unchecked(y, weight)
        return y

    arrivals = torch.zeros(1 << 18, device=DEVICE, dtype=torch.int32)

    def multiply_unchecked(y, weight):
        from flashdraft.kernels.cuda.quantized.few_rows import multiply_few

        return multiply_few(y, weight, limits(), arrivals)

    expected = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)
    assert not arrivals.any()


@pytest.mark.parametrize("is_settled", [False, True])
@pytest.mark.parametrize("inner", [128, 704])
def test_a_mixture_for_one_row(inner, is_settled):
    from flashdraft.kernels.cuda.experts.quantized import mix_quantized
    from flashdraft.kernels.cuda.experts.quantized_one_row import mix_one
    from flashdraft.kernels.cuda.quantized.few_rows_plan import Experts

    torch.manual_seed(4)
    gate_up = stack_experts([FORMATS["q4_0"](out=2 * inner, depth=2816) for _ in range(16)])
    down = stack_experts([FORMATS["q4_0"](out=2816, depth=inner) for _ in range(16)])
    packed = pack_quantized(gate_up.to(DEVICE)), pack_quantized(down.to(DEVICE))
    x = torch.randn(1, 2816, device=DEVICE).bfloat16()
    chosen = torch.randperm(16, device=DEVICE)[None, :8].contiguous()
    shares = torch.rand(1, 8, device=DEVICE)
    arrivals = torch.zeros(1 << 18, device=DEVICE, dtype=torch.int32)
    activation, choice = Activation.GELU_TANH, Experts(chosen, shares, is_settled)
    found = mix_one(x, *packed, choice, activation, limits(), arrivals)
    routed = (chosen, shares, activation)
    expected = mix_quantized(x, *packed, *routed, limits().num_processors, arrivals)
    assert found is not None and distance(found, expected.float()) < 0.006
    assert not arrivals.any()


@pytest.mark.parametrize("num_deltas", [0, 1, 2])
@pytest.mark.parametrize("hidden", [2816, 5376])
@pytest.mark.parametrize("activation", [None, Activation.GELU_TANH])
@pytest.mark.parametrize("scheme", [Scheme.INT4, Scheme.FP8])
def test_a_row_that_it_sums_up_and_norms(scheme, activation, hidden, num_deltas):
    from flashdraft.kernels.cuda.backend import TritonKernels
    from flashdraft.kernels.cuda.quantized.few_rows import multiply_normed

    torch.manual_seed(num_deltas)
    kernels = TritonKernels(DEVICE, torch.bfloat16, quantize=scheme)
    arrivals = torch.zeros(1 << 18, device=DEVICE, dtype=torch.int32)
    weight = kernels.pack(torch.randn(8192, hidden, device=DEVICE).bfloat16() / 64)
    x, *others = torch.randn(1 + num_deltas, 1, hidden, device=DEVICE).bfloat16() * 3
    norm, *norms = 1 + torch.rand(4, hidden, device=DEVICE).bfloat16()
    scalar = torch.full((1,), 0.7, device=DEVICE).bfloat16() if num_deltas else None
    post = norms[-1] if num_deltas == 2 else None
    residual = Residual(x, list(zip(others, norms, strict=False)), post, scalar)
    inputs = (residual, norm, 1e-6, weight)
    both = multiply_normed(*inputs, limits(), arrivals, activation)
    assert both is not None and not arrivals.any()
    exact = TritonKernels(DEVICE, torch.bfloat16, exact=True)
    expected, wanted = exact.residual_linear(*inputs, activation)
    assert distance(both[0], expected.float()) < 0.003
    assert distance(both[1], wanted.float()) < (0.006 if activation is None else 0.008)
    usual = kernels.residual_linear(*inputs, activation)
    assert all(torch.equal(a, b) for a, b in zip(usual, both, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_a_mixture_in_four_launches(seed):
    """Of 26B's sizes, with fewer experts; that it is taken, and chooses as others do."""
    from flashdraft.kernels.composed import compose_mixture
    from flashdraft.kernels.cuda.backend import TritonKernels
    from flashdraft.kernels.cuda.experts.quantized_one_row import mix_row

    torch.manual_seed(seed)
    kernels = TritonKernels(DEVICE, torch.bfloat16, quantize=Scheme.INT4)

    def draw(*shape):
        return torch.randn(*shape, device=DEVICE).bfloat16() / 32

    norms = 1 + torch.rand(4, 2816, device=DEVICE).bfloat16()
    parts = Mixture(
        norms[0],
        kernels.pack(draw(4224, 2816)),
        kernels.pack(draw(2816, 2112)),
        norms[1],
        kernels.pack(draw(32, 2816), quantize=False),
        8,
        torch.rand(32, device=DEVICE) + 0.5,
        norms[2],
        kernels.pack_experts(draw(32, 1408, 2816)),
        kernels.pack_experts(draw(32, 2816, 704)),
        Activation.GELU_TANH,
        1e-6,
    )
    x, delta = torch.randn(2, 1, 2816, device=DEVICE).bfloat16() * 2
    residual = Residual(x, [(delta, norms[3])])
    arrivals = torch.zeros(1 << 18, device=DEVICE, dtype=torch.int32)
    found = mix_row(residual, parts, limits(), arrivals)
    assert found is not None and not arrivals.any()
    expected = compose_mixture(kernels, residual, parts)
    for mine, theirs in zip(found, expected, strict=True):
        assert distance(mine, theirs.float()) < 0.006
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = mix_row(residual, parts, limits(), arrivals)
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))
