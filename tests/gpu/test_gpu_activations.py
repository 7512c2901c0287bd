"""Rows in 8 bits on a GPU: against float64 of the same codes, by every way there is."""

from __future__ import annotations

import pytest
import torch

from flashdraft.kernels.cuda.quantized.layout import pack_quantized, round_activations
from flashdraft.kernels.kinds import Activation, Scheme
from flashdraft.kernels.quantized import quantize, round_rows
from tests.gpu.products import distance
from tests.unit.kernels.cuda.quantized.test_linear import FORMATS

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
BOUND = 0.003  # of a product: bfloat16's rounding, and what fp8's sums lose in 128 values


def limits():
    from flashdraft.kernels.cuda.card import read_limits

    return read_limits(DEVICE)


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability(DEVICE) != (9, 0):
        pytest.skip("only Hopper has the instructions")


@pytest.fixture
def fp8():
    if torch.cuda.get_device_capability(DEVICE) < (8, 9):
        pytest.skip("this card has no 8-bit floats")


def expect(x, weight, activation=None):
    from flashdraft.kernels.torch_backend import TorchKernels

    products = round_rows(x, weight.scheme).double() @ weight.dequantize().double().T
    if activation is None:
        return products
    return TorchKernels(DEVICE, torch.float32).gated(products.float(), activation).double()


def multiply(x, packed, activation=None, tile=None, team=1):
    from flashdraft.kernels.cuda.quantized import activations, fp8_rows

    gated = activation is not None
    columns = packed.shape[0] // (2 if gated else 1)
    sizes = len(x), columns, packed.num_steps, gated, limits()
    plan = fp8_rows.plan_fp8(*sizes, tile, team)
    arrivals = torch.zeros(1 << 18, device=DEVICE, dtype=torch.int32)
    coded = activations.code_rows(x, packed, plan.tile.rows)
    found = fp8_rows.multiply_fp8(coded, packed, plan, arrivals, x.dtype, activation)
    assert not arrivals.any()
    return found


def tiles():
    from flashdraft.kernels.cuda.quantized.fp8_rows import TILES, Tile

    return (*TILES, Tile(128, 1, 1))


@pytest.mark.parametrize("scheme", [Scheme.FP8, Scheme.INT8])
def test_rows_are_rounded_as_in_torch(scheme, request):
    from flashdraft.kernels.cuda.quantized import activations

    if scheme is Scheme.FP8:
        request.getfixturevalue("fp8")
    torch.manual_seed(0)
    for depth in (256, 5376, 21504):
        weight = pack_quantized(quantize(torch.randn(8, depth, device=DEVICE), scheme))
        sizes = torch.logspace(-30, 30, 64, device=DEVICE)[:, None]
        x = (torch.randn(64, depth, device=DEVICE) * sizes).bfloat16()
        x[3, 5], x[4, 6], x[5] = float("nan"), float("inf"), 0
        found = activations.round_rows(x, weight)
        torch.testing.assert_close(found, round_rows(x, scheme), rtol=0, atol=0, equal_nan=True)
        coded = activations.code_rows(x, weight)
        codes = coded.codes.view(torch.uint8).view(64, weight.num_steps, weight.lanes, 2)
        codes = codes.transpose(2, 3).reshape(64, depth)
        codes = codes.view(torch.float8_e4m3fn if scheme is Scheme.FP8 else torch.int8)
        values = (codes.float() * coded.scale[:64, None]).bfloat16()
        torch.testing.assert_close(values, found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("team", [1, 2])
@pytest.mark.parametrize("activation", [None, *Activation])
@pytest.mark.parametrize(("out", "depth"), [(900, 2048), (904, 1152), (2 * 2112, 2816)])
def test_every_tile(out, depth, activation, team):
    torch.manual_seed(0)
    weight = FORMATS["fp8 row"](out=out, depth=depth).to(DEVICE)
    packed = pack_quantized(weight)
    for tile in tiles():
        for num_rows in (1, tile.rows, tile.rows + 17):
            x = torch.randn(num_rows, depth, device=DEVICE).bfloat16()
            found = multiply(x, packed, activation, tile, team).double()
            bound = BOUND if activation is None else 0.006
            assert distance(found, expect(x, weight, activation)) < bound, (tile, num_rows)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("team", [1, 2])
@pytest.mark.parametrize("num_rows", [17, 64, 128, 192, 256, 512, 1024])
@pytest.mark.parametrize(("out", "depth"), [(18432, 5376), (5376, 8192), (5376, 21504)])
def test_large_weights(out, depth, num_rows, team):
    """Those of 31B: whole tiles, parts of them, and both. A wrong row or column shows by itself."""
    torch.manual_seed(0)
    weight = FORMATS["fp8 row"](out=out, depth=depth).to(DEVICE)
    x = torch.randn(num_rows, depth, device=DEVICE).bfloat16()
    expected = expect(x, weight)
    found = multiply(x, pack_quantized(weight), team=team).double()
    assert distance(found, expected) < BOUND
    for dim in (0, 1):
        apart = (found - expected).norm(dim=dim) / expected.norm(dim=dim)
        assert float(apart.max()) < 2 * BOUND


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("team", [1, 2])
def test_a_row_does_not_depend_on_others(team):
    torch.manual_seed(6)
    packed = pack_quantized(FORMATS["fp8 row"](out=1000, depth=2048).to(DEVICE))
    x = torch.randn(100, 2048, device=DEVICE).bfloat16()
    whole = multiply(x, packed, team=team)
    assert torch.equal(multiply(x, packed, team=team), whole)
    x[50:] = float("nan")
    found = multiply(x, packed, team=team)
    assert torch.equal(found[:50], whole[:50]) and bool(found[50:].isnan().all())


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("team", [1, 2])
@pytest.mark.parametrize("num_rows", [17, 128, 300])
def test_a_chain_in_a_graph_is_the_chain(num_rows, team):
    """Kernels that begin before their predecessors end wait for what these write."""
    torch.manual_seed(3)
    packed = [pack_quantized(FORMATS["fp8 row"](out=5376, depth=5376).to(DEVICE)) for _ in range(4)]
    x = torch.randn(num_rows, 5376, device=DEVICE).bfloat16()
    scale = float(multiply(x, packed[0]).float().std())

    def chain():
        from flashdraft.kernels.cuda.quantized import activations, fp8_rows

        y = x / scale**4
        for weight in packed * 2:
            sizes = num_rows, 5376, weight.num_steps, False, limits()
            plan = fp8_rows.plan_fp8(*sizes, None, team)
            coded = activations.code_rows(y, weight, plan.tile.rows)
            y = fp8_rows.multiply_fp8(coded, weight, plan, arrivals, y.dtype)
        return y / scale**4

    arrivals = torch.zeros(1 << 18, device=DEVICE, dtype=torch.int32)
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


@pytest.mark.parametrize("name", ["fp8 row", "fp8 block", "q8_0", "int8 row"])
@pytest.mark.parametrize("num_rows", [17, 64, 300])
def test_triton(name, num_rows, request):
    from flashdraft.kernels.cuda.quantized import activations, coded_rows

    torch.manual_seed(0)
    weight = FORMATS[name](out=904, depth=2048).to(DEVICE)
    if weight.scheme is Scheme.FP8:
        request.getfixturevalue("fp8")
    packed = pack_quantized(weight)
    x = torch.randn(num_rows, 2048, device=DEVICE).bfloat16()
    coded = activations.code_rows(x, packed)
    for activation in (None, Activation.GELU_TANH):
        found = coded_rows.multiply_tiles(coded, packed, x.dtype, activation).double()
        bound = BOUND if activation is None else 0.006
        assert distance(found, expect(x, weight, activation)) < bound


@pytest.mark.parametrize("scheme", [Scheme.FP8, Scheme.INT8])
@pytest.mark.parametrize("exact", [False, True])
def test_any_number_of_rows_is_rounded_alike(scheme, exact, monkeypatch, request):
    from flashdraft.kernels.cuda import backend as triton_backend

    if scheme is Scheme.FP8:
        request.getfixturevalue("fp8")
    monkeypatch.setattr(triton_backend, "MIN_QUANTIZED_VALUES", 0)
    settings = DEVICE, torch.bfloat16, exact, scheme, None, scheme
    kernels = triton_backend.TritonKernels(*settings)
    torch.manual_seed(5)
    weight = quantize(torch.randn(2 * 904, 2048, device=DEVICE) * 2048**-0.5, scheme)
    packed = kernels.pack(weight)
    assert packed.activations is scheme
    assert kernels.pack_head(weight).activations is None
    assert kernels.pack_drafter(weight).activations is None
    x = torch.randn(700, 2048, device=DEVICE).bfloat16()
    for num_rows in (1, 8, 16, 17, 64, 65, 128, 256, 257, 700):
        found = kernels.linear(x[:num_rows], packed).double()
        assert distance(found, expect(x[:num_rows], weight)) < BOUND
        gated = kernels.gated_linear(x[:num_rows], packed, Activation.GELU_TANH).double()
        assert distance(gated, expect(x[:num_rows], weight, Activation.GELU_TANH)) < 0.006
    if exact:
        whole = kernels.linear(x, packed)
        for place in (0, 17, 699):
            assert torch.equal(kernels.linear(x[place : place + 1], packed)[0], whole[place])


@pytest.mark.usefixtures("hopper")
def test_many_rows_go_to_the_tensor_cores(monkeypatch):
    from flashdraft.kernels.cuda.backend import TritonKernels
    from flashdraft.kernels.cuda.quantized import coded_rows

    taken, multiply_fp8 = [], coded_rows.multiply_fp8
    monkeypatch.setattr(
        coded_rows, "multiply_fp8", lambda x, *rest: taken.append(1) or multiply_fp8(x, *rest)
    )
    kernels = TritonKernels(DEVICE, torch.bfloat16)
    weight = pack_quantized(FORMATS["fp8 row"](out=900, depth=2048).to(DEVICE))
    rounded = round_activations(weight, Scheme.FP8)
    x = torch.randn(coded_rows.MIN_ROWS, 2048, device=DEVICE).bfloat16()
    kernels.linear(x, weight), kernels.linear(x[1:], rounded)
    assert not taken
    kernels.linear(x, rounded)
    assert taken
