"""Weights in few bits on a GPU: the instructions that unpack codes, against the float weight."""

from __future__ import annotations

import pytest
import torch

from flashdraft.kernels.cuda.quantized.layout import pack_quantized
from flashdraft.kernels.kinds import Activation, Scheme
from flashdraft.kernels.quantized import quantize, stack_experts
from tests.gpu.products import distance
from tests.unit.kernels.cuda.quantized.test_linear import FORMATS

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def even_small_weights(monkeypatch):
    """What is tested here is small: it must stay in few bits all the same."""
    from flashdraft.kernels.cuda import backend as triton_backend

    monkeypatch.setattr(triton_backend, "MIN_QUANTIZED_VALUES", 0)


def kernels(**settings):
    from flashdraft.kernels.cuda.backend import TritonKernels

    return TritonKernels(DEVICE, torch.bfloat16, **settings)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 7, 16, 40, 64, 65, 130, 256, 257])
def test_linears_of_every_format(name, num_rows):
    torch.manual_seed(0)
    weight, backend = FORMATS[name](out=900, depth=2048), kernels()
    x = torch.randn(num_rows, 2048, device=DEVICE).bfloat16()
    found = backend.linear(x, backend.pack(weight))
    expected = x.float() @ weight.dequantize().to(DEVICE).T
    # many rows meet a weight that is rounded to bfloat16; the result always is
    assert distance(found, expected) < (0.003 if num_rows <= 256 else 0.005)
    assert not backend._arrivals.any()


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q6_k", "fp8 row"])
@pytest.mark.parametrize("num_rows", [1, 16, 40])
@pytest.mark.parametrize("num_warps", [2, 4])
@pytest.mark.parametrize("splits", [1, 4])
def test_tiles_of_every_width(name, num_rows, num_warps, splits):
    from flashdraft.kernels.cuda.quantized import linear as quantized

    torch.manual_seed(9)
    packed = pack_quantized(FORMATS[name](out=900, depth=2048).to(DEVICE))
    x = torch.randn(num_rows, 2048, device=DEVICE).bfloat16()
    arrivals = torch.zeros(256, device=DEVICE, dtype=torch.int32)
    plan = quantized.plan_quantized(num_rows, packed, 132)
    plan = plan._replace(num_warps=num_warps, num_splits=splits)
    found = quantized.multiply_quantized(x, packed, plan, arrivals)
    expected = x.float() @ quantized.dequantize(packed, torch.float32).T
    assert distance(found, expected) < 0.003
    assert not arrivals.any()


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q6_k", "q8_0", "fp8 row", "w4a16 128"])
@pytest.mark.parametrize("num_rows", [1, 16, 40, 300])
def test_gated_linears_are_gates_of_linears(name, num_rows):
    torch.manual_seed(8)
    weight, backend = FORMATS[name](out=2 * 1056, depth=2048), kernels()
    x, packed = torch.randn(num_rows, 2048, device=DEVICE).bfloat16(), backend.pack(weight)
    wide = x.float() @ weight.dequantize().to(DEVICE).T
    for activation in Activation:
        found = backend.gated_linear(x, packed, activation)
        expected = backend.gated(backend.linear(x, packed), activation)
        torch.testing.assert_close(found, expected, atol=0.02 * float(wide.std()), rtol=0.02)
    assert not backend._arrivals.any()


@pytest.mark.parametrize("num_rows", [256, 257, 1000])
def test_prompts_through_a_weight_of_several_pieces(num_rows, monkeypatch):
    from flashdraft.kernels.cuda import quantized_backend

    monkeypatch.setattr(quantized_backend, "FLOAT_BYTES", 1 << 20)  # 256 rows of it
    torch.manual_seed(6)
    weight, backend = FORMATS["q4_0"](out=900, depth=2048), kernels()
    x = torch.randn(num_rows, 2048, device=DEVICE).bfloat16()
    expected = x.float() @ weight.dequantize().to(DEVICE).T
    assert distance(backend.linear(x, backend.pack(weight)), expected) < 0.005


@pytest.mark.parametrize("name", FORMATS)
def test_a_stack_in_one_launch_is_its_weights_one_by_one(name):
    from flashdraft.kernels.cuda.quantized.linear import dequantize

    torch.manual_seed(7)
    weights = [FORMATS[name](out=900, depth=512).to(DEVICE) for _ in range(5)]
    found = dequantize(pack_quantized(stack_experts(weights)), torch.bfloat16)
    alone = [dequantize(pack_quantized(weight), torch.bfloat16) for weight in weights]
    assert torch.equal(found, torch.stack(alone))


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "fp8 row", "int8 row"])
@pytest.mark.parametrize("depth", [576, 704, 2112, 2816])
def test_depths_of_real_models(name, depth):
    torch.manual_seed(1)
    weight, backend = FORMATS[name](out=128, depth=depth), kernels()
    x = torch.randn(5, depth, device=DEVICE).bfloat16()
    expected = x.float() @ weight.dequantize().to(DEVICE).T
    assert distance(backend.linear(x, backend.pack(weight)), expected) < 0.003


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_a_table_are_the_formats_own_values(name):
    torch.manual_seed(2)
    weight, backend = FORMATS[name](out=900, depth=512), kernels()
    table = backend.pack_embedding(weight, None)
    ids = torch.randint(0, 900, (3, 17), device=DEVICE)
    expected = weight.dequantize().to(DEVICE)[ids]
    found = backend.embed(ids, table)
    assert found.shape == (3, 17, 512)
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=1e-6)


def test_every_fp8_number_is_exact():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0)
    weight = FORMATS["fp8 row"](out=64, depth=256)
    weight = type(weight)(
        Scheme.FP8, every.repeat(64, 1).to(torch.float8_e4m3fn), torch.ones(64, 1), 256
    )
    backend = kernels()
    one = torch.eye(256, device=DEVICE).bfloat16()[:64]
    found = backend.linear(one, backend.pack(weight))
    assert torch.equal(found.float(), every.to(DEVICE)[:64, None].expand(64, 64))


@pytest.mark.parametrize("scheme", [Scheme.INT4, Scheme.INT8, Scheme.FP8])
def test_a_head_in_few_bits_finds_the_likeliest_token(scheme):
    torch.manual_seed(3)
    weight = quantize(torch.randn(5000, 512), scheme)
    backend = kernels()
    x = torch.randn(9, 512, device=DEVICE).bfloat16()
    found = backend.finish_logits(backend.linear(x, backend.pack_head(weight)), 1.0, 30.0)
    logits = backend.linear(x, backend.pack(weight)).float()
    expected = 30 * torch.tanh(logits / 30)
    assert torch.equal(found.argmax(1), expected.argmax(1))


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q6_k", "fp8 row"])
def test_exact_rows_do_not_depend_on_their_number(name):
    torch.manual_seed(4)
    weight, backend = FORMATS[name](out=900, depth=2048), kernels(exact=True)
    packed = backend.pack(weight)
    x = torch.randn(300, 2048, device=DEVICE).bfloat16()
    whole = backend.linear(x, packed)
    for first, last in ((0, 1), (1, 17), (17, 81), (81, 300)):
        assert torch.equal(backend.linear(x[first:last], packed), whole[first:last])


def test_parts_in_different_formats_are_one_weight():
    torch.manual_seed(5)
    parts = [FORMATS["q4_k"](out=192), FORMATS["q6_k"](out=64), torch.randn(64, 256)]
    backend = kernels()
    x = torch.randn(3, 256, device=DEVICE).bfloat16()
    floats = [p if isinstance(p, torch.Tensor) else p.dequantize() for p in parts]
    expected = x.float() @ torch.cat(floats).to(DEVICE).T
    assert distance(backend.linear(x, backend.pack(*parts)), expected) < 0.005
