"""The CUDA C++ kernel for many rows on a GPU: against the float weight."""

from __future__ import annotations

import pytest
import torch

from flashdraft.kernels.cuda.quantized.layout import pack_quantized
from flashdraft.kernels.kinds import Activation, Scheme
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
def only_on_hopper(monkeypatch):
    """Whatever is faster: any number of rows, and small weights."""
    from flashdraft.kernels.cuda.quantized import many_rows

    if torch.cuda.get_device_capability(DEVICE) != (9, 0):
        pytest.skip("only Hopper has the instructions")
    monkeypatch.setattr(many_rows, "MIN_VALUES", 0)
    monkeypatch.setattr(many_rows, "MIN_ROWS", 1)
    monkeypatch.setattr(many_rows, "MAX_ROWS", 512)


def limits():
    from flashdraft.kernels.cuda.card import read_limits

    return read_limits(DEVICE)


def multiply(x, packed, activation=None):
    from flashdraft.kernels.cuda.quantized.many_rows import multiply_many

    arrivals = torch.zeros(1 << 18, device=DEVICE, dtype=torch.int32)
    found = multiply_many(x, packed, limits(), arrivals, activation)
    assert found is not None and not arrivals.any()
    return found


@pytest.mark.parametrize("name", FEW_ROWS_FORMATS)
@pytest.mark.parametrize("num_rows", [17, 64, 100, 128, 200, 300])
@pytest.mark.parametrize(("out", "depth"), [(900, 2048), (901, 1152)])
def test_every_format(name, num_rows, out, depth):
    torch.manual_seed(0)
    weight = FORMATS[name](out=out, depth=depth).to(DEVICE)
    x = torch.randn(num_rows, depth, device=DEVICE).bfloat16()
    expected = x.double() @ weight.dequantize().double().T
    assert distance(multiply(x, pack_quantized(weight)).double(), expected) < 0.003


@pytest.mark.parametrize("name", ["q4_0", "fp8 row"])
@pytest.mark.parametrize("num_rows", [17, 40, 128, 512])
@pytest.mark.parametrize(
    ("out", "depth"), [(16384, 5376), (5376, 8192), (43008, 5376), (5376, 21504)]
)
def test_large_weights(name, num_rows, out, depth):
    """Those of 31B: whole tiles, parts of them, and both. A wrong row or column shows by itself."""
    torch.manual_seed(0)
    weight = FORMATS[name](out=out, depth=depth).to(DEVICE)
    x = torch.randn(num_rows, depth, device=DEVICE).bfloat16()
    expected = x.float() @ weight.dequantize().T
    found = multiply(x, pack_quantized(weight)).float()
    assert distance(found, expected) < 0.003
    for dim in (0, 1):
        apart = (found - expected).norm(dim=dim) / expected.norm(dim=dim)
        assert float(apart.max()) < 0.006


SHAPES = [(rows, tiles, 12) for rows in (32, 64, 96, 128) for tiles in (1, 2)]
SHAPES += [(192, 1, 12), (256, 1, 12), *((rows, 1, 16) for rows in (32, 64, 96, 128))]


def test_these_are_all_shapes():
    from flashdraft.kernels.cuda.quantized import many_rows_plan

    assert set(SHAPES) == set(many_rows_plan.SHAPES)


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "fp8 row", "w4a16 128"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_of_every_shape(name, shape):
    """Gates as well, over columns that fill no tile, by rows that fill none."""
    from flashdraft.kernels.cuda.quantized.few_rows_plan import describe_product
    from flashdraft.kernels.cuda.quantized.many_rows import launch
    from flashdraft.kernels.cuda.quantized.many_rows_plan import make_plan

    torch.manual_seed(4)
    weight = FORMATS[name](out=2 * 2720, depth=2816).to(DEVICE)
    packed, arrivals = pack_quantized(weight), torch.zeros(1 << 18, device=DEVICE).int()
    for num_rows in (shape[0] - 9, shape[0] + 5):
        x = torch.randn(num_rows, 2816, device=DEVICE).bfloat16()
        product = describe_product(packed)
        plan = make_plan(shape, num_rows, product, limits())
        expected = x.double() @ weight.dequantize().double().T
        found = launch(x, packed, product, plan, arrivals)
        assert distance(found.double(), expected) < 0.003
        product = describe_product(packed, gated=True)
        plan = make_plan(shape, num_rows, product, limits())
        found = launch(x, packed, product, plan, arrivals, Activation.SILU)
        gate, up = expected.bfloat16().double().chunk(2, dim=1)
        assert distance(found.double(), gate * gate.sigmoid() * up) < 0.006
        assert not arrivals.any()


@pytest.mark.parametrize("name", FEW_ROWS_FORMATS)
def test_it_is_as_near_as_a_copy_in_bfloat16(name):
    """Where it rounds a weight, it rounds it as the copy for longer prompts does."""
    from flashdraft.kernels.cuda.quantized.linear import dequantize

    torch.manual_seed(8)
    weight = FORMATS[name](out=1024, depth=4096).to(DEVICE)
    packed = pack_quantized(weight)
    x = torch.randn(128, 4096, device=DEVICE).bfloat16()
    expected = x.double() @ weight.dequantize().double().T
    copied = x @ dequantize(packed, torch.bfloat16).T
    found = multiply(x, packed)
    assert distance(found.double(), expected) < 1.02 * distance(copied.double(), expected)
    if weight.scheme is Scheme.INT4:
        one = torch.eye(4096, device=DEVICE)[:256].bfloat16()
        assert torch.equal(multiply(one, packed).T, weight.dequantize(torch.bfloat16)[:, :256])


@pytest.mark.parametrize("name", FEW_ROWS_FORMATS)
@pytest.mark.parametrize("num_rows", [17, 33, 130])
@pytest.mark.parametrize("activation", Activation)
def test_gates(name, num_rows, activation):
    check_gates(multiply, name, num_rows, activation, DEVICE)


def test_the_backend_takes_it(monkeypatch):
    from flashdraft.kernels.cuda import backend as triton_backend
    from flashdraft.kernels.cuda.quantized import many_rows

    monkeypatch.setattr(triton_backend, "MIN_QUANTIZED_VALUES", 0)
    taken, launch = [], many_rows.launch
    monkeypatch.setattr(
        many_rows, "launch", lambda x, *rest: taken.append(len(x)) or launch(x, *rest)
    )
    torch.manual_seed(5)
    weight = FORMATS["q4_0"](out=900, depth=2048)
    monkeypatch.setattr(many_rows, "MIN_ROWS", 17)
    monkeypatch.setattr(many_rows, "MAX_ROWS", 100)
    for exact in (False, True):
        backend = triton_backend.TritonKernels(DEVICE, torch.bfloat16, exact=exact)
        for num_rows in (16, 17, 100, 101):
            x = torch.randn(num_rows, 2048, device=DEVICE).bfloat16()
            found = backend.linear(x, backend.pack(weight))
            assert distance(found, x.float() @ weight.dequantize().to(DEVICE).T) < 0.004
    assert taken == [17, 100]


def test_large_and_small_numbers_are_exact():
    check_sizes(multiply, torch.logspace(-12, 12, 18, device=DEVICE))


def test_every_fp8_number():
    check_every_fp8_number(multiply, torch.arange(20, device=DEVICE) * 51)


def test_a_row_does_not_depend_on_others():
    torch.manual_seed(6)
    packed = pack_quantized(FORMATS["q4_0"](out=1000, depth=2048).to(DEVICE))
    x = torch.randn(100, 2048, device=DEVICE).bfloat16()
    whole = multiply(x, packed)
    x[50:] = float("nan")
    found = multiply(x, packed)
    assert torch.equal(found[:50], whole[:50]) and bool(found[50:].isnan().all())


@pytest.mark.parametrize("name", ["q4_0", "fp8 row"])
@pytest.mark.parametrize("num_rows", [17, 128, 300])
def test_the_same_bits_every_time(name, num_rows):
    check_same_bits(multiply, name, num_rows, DEVICE)


@pytest.mark.parametrize("name", ["q4_0", "fp8 row"])
@pytest.mark.parametrize("num_rows", [17, 128])
def test_a_chain_in_a_graph_is_the_chain(name, num_rows):
    """Kernels that begin before their predecessors end wait for what these write."""
    from flashdraft.kernels.cuda.quantized.many_rows import multiply_many

    torch.manual_seed(3)
    packed = [pack_quantized(FORMATS[name](out=5376, depth=5376).to(DEVICE)) for _ in range(4)]
    x = torch.randn(num_rows, 5376, device=DEVICE).bfloat16()
    arrivals = torch.zeros(1 << 18, device=DEVICE, dtype=torch.int32)
    scale = float(multiply(x, packed[0]).float().std())

    def chain():
        y = x / scale**4  # no other kernel lies between two of these
        for weight in packed * 2:
            y = multiply_many(y, weight, limits(), arrivals)
        return y / scale**4

    expected = chain()
    torch.cuda.synchronize()
    assert bool(expected.isfinite().all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)
    assert not arrivals.any()
