"""Rows in 8 bits and their products: Triton's in its interpreter against torch's and float64.

What runs in the interpreter is this file as a script (tests/interpreted.py).
"""

from __future__ import annotations

import math

import pytest
import torch

from flashdraft.kernels.cuda.quantized.layout import pack_quantized, round_activations
from flashdraft.kernels.kinds import Activation, Scheme
from flashdraft.kernels.quantized import code_rows, quantize, round_rows
from tests.interpreted import judge, report
from tests.unit.kernels.cuda.quantized.test_linear import FORMATS

CPU = torch.device("cpu")


def make_rows(depth):
    """Of all sizes, with zeros, and with what is no number; strided."""
    x = torch.randn(9, depth) * torch.logspace(-30, 30, 9)[:, None]
    x[1, 3:] = 0
    x[2] = 0
    x[3, 5], x[4, 6], x[5, 7] = math.nan, math.inf, -math.inf
    x[6, :4] = torch.tensor([127.0, 127.5, 448.0, 450.0])
    wide = torch.full((9, depth + 16), math.nan)
    wide[:, :depth] = x
    return wide[:, :depth]


def make_weight(scheme, depth):
    return pack_quantized(quantize(torch.randn(8, depth), scheme))


def check_values(scheme, depth):
    from flashdraft.kernels.cuda.quantized import activations

    x = make_rows(depth)
    found, expected = (
        activations.round_rows(x, make_weight(scheme, depth)),
        round_rows(x, scheme),
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def check_codes(scheme, depth):
    """They lie as those of a weight: a row's steps, and in these two planes."""
    from flashdraft.kernels.cuda.quantized import activations

    x, weight = make_rows(depth), make_weight(scheme, depth)
    found, (codes, scale) = activations.code_rows(x, weight, 4), code_rows(x, scheme)
    torch.testing.assert_close(found.scale[:9], scale, rtol=0, atol=0, equal_nan=True)
    whole, lanes = scale.isfinite(), weight.lanes
    planes = codes.view(torch.uint8)[whole].view(-1, weight.num_steps, 2, lanes)
    expected = planes.transpose(2, 3).contiguous().view(torch.int16).squeeze(-1)
    assert len(found.scale) == 12 and torch.equal(found.codes[whole], expected)


def check_product(name, num_rows, activation=None, out=200, depth=256):
    """In float64, of the same codes."""
    from flashdraft.kernels.cuda.quantized import activations, coded_rows
    from flashdraft.kernels.torch_backend import TorchKernels

    weight = FORMATS[name](out=out, depth=depth)
    x, packed = torch.randn(num_rows, depth), pack_quantized(weight)
    expected = round_rows(x, weight.scheme).double() @ weight.dequantize().double().T
    if activation is not None:
        expected = TorchKernels(CPU, torch.float32).gated(expected.float(), activation).double()
    coded = activations.code_rows(x, packed)
    found = coded_rows.multiply_tiles(coded, packed, torch.float32, activation)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)


def check_every_number_of_rows(name, exact):
    """The same values are multiplied whichever way rows go, and not those of x itself."""
    from flashdraft.kernels.cuda import quantized_backend
    from flashdraft.kernels.cuda.backend import TritonKernels

    weight = FORMATS[name](out=200)
    kernels = TritonKernels(CPU, torch.float32, exact)
    packed = pack_quantized(weight)
    rounded = round_activations(packed, weight.scheme)
    x = torch.randn(200, 256)
    expected = round_rows(x, weight.scheme) @ weight.dequantize().T
    assert quantized_backend.round_before((packed,), weight.scheme) == (rounded,)
    for num_rows in (1, 16, 17, 200):
        found = kernels.linear(x[:num_rows], rounded)
        torch.testing.assert_close(found, expected[:num_rows], atol=1e-4, rtol=1e-5)
        gated = kernels.gated_linear(x[:num_rows], rounded, Activation.SILU)
        whole = kernels.gated(expected[:num_rows], Activation.SILU)
        torch.testing.assert_close(gated, whole, atol=1e-3, rtol=1e-4)
    plain = kernels.linear(x, packed)
    torch.testing.assert_close(plain, x @ weight.dequantize().T, atol=1e-3, rtol=1e-5)


def check_norms_before_it():
    """The stream's norm is rounded as any row is: one launch would not."""
    from flashdraft.kernels.cuda.backend import TritonKernels
    from flashdraft.kernels.interface import Residual

    kernels, weight = TritonKernels(CPU, torch.float32), FORMATS["fp8 row"](out=200)
    packed = round_activations(pack_quantized(weight), Scheme.FP8)
    x, norm = torch.randn(1, 256), torch.randn(256)
    _, found = kernels.residual_linear(Residual(x), norm, 1e-6, packed)
    normed = round_rows(kernels.rms_norm(x, norm, 1e-6), Scheme.FP8)
    torch.testing.assert_close(found, normed @ weight.dequantize().T, atol=1e-4, rtol=1e-5)


CASES = [(Scheme.FP8, 256), (Scheme.FP8, 640), (Scheme.FP8, 96), (Scheme.INT8, 128)]
CASES += [(Scheme.INT8, 320)]
EIGHT_BITS = ("fp8 row", "fp8 block", "q8_0", "int8 row", "iq4_xs", "nvfp4")
CHECKS = {
    **{f"values, {s}, {d}": lambda s=s, d=d: check_values(s, d) for s, d in CASES},
    **{f"codes, {s}, {d}": lambda s=s, d=d: check_codes(s, d) for s, d in CASES},
    **{
        f"{name}, {rows} rows": lambda name=name, rows=rows: check_product(name, rows)
        for name in EIGHT_BITS
        for rows in (17, 40)
    },
    **{
        f"{name}, gated, {activation}": lambda name=name, a=activation: check_product(name, 19, a)
        for name in ("fp8 row", "q8_0")
        for activation in Activation
    },
    **{
        f"{name}, any number of rows{', exact' * exact}": lambda name=name, e=exact: (
            check_every_number_of_rows(name, e)
        )
        for name in ("fp8 row", "q8_0")
        for exact in (False, True)
    },
    "norms": check_norms_before_it,
}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name, failures):
    judge(failures[name])


@pytest.mark.parametrize("scheme", [Scheme.FP8, Scheme.INT8])
def test_rounded_rows_are_exact_in_bfloat16(scheme):
    """So kernels for floats compute what those for codes do."""
    torch.manual_seed(0)
    x = (torch.randn(64, 256) * torch.logspace(-20, 20, 64)[:, None]).bfloat16()
    codes, scale = code_rows(x, scheme)
    values = codes.double() * scale.double()[:, None]
    assert torch.equal(round_rows(x, scheme).double(), values)
    assert torch.equal(round_rows(x.float(), scheme), round_rows(x, scheme).float())


def test_scales_are_the_smallest_powers_of_two_that_reach():
    x = torch.tensor([[448.0], [449.0], [0.4375], [224.0], [0.0], [1e-38], [3e38]])
    codes, scale = code_rows(x, Scheme.FP8)
    assert scale.tolist()[:4] == [1, 2, 2**-10, 0.5]
    assert codes.float().flatten().tolist()[:4] == [448, 224, 448, 448]
    assert codes.float().flatten().tolist()[4:6] == [0, 0] and bool(scale.isfinite().all())
    codes, scale = code_rows(torch.tensor([[127.0], [-127.5], [63.0], [-1.0]]), Scheme.INT8)
    assert scale.tolist() == [1, 2, 0.5, 2**-6] and codes.flatten().tolist() == [127, -64, 126, -64]


def test_what_is_no_number_stays_so():
    x = torch.ones(4, 8)
    x[0, 3], x[1, 4], x[2, 5] = math.nan, math.inf, -math.inf
    for scheme in (Scheme.FP8, Scheme.INT8):
        assert round_rows(x, scheme).isnan().all(1).tolist() == [True, True, True, False]


def test_only_weights_of_the_same_bits_have_their_rows_rounded():
    small = {name: pack_quantized(FORMATS[name]()) for name in FORMATS}
    found = {
        (name, scheme)
        for name, weight in small.items()
        for scheme in (Scheme.FP8, Scheme.INT8)
        if round_activations(weight, scheme).activations is scheme
    }
    assert found == {
        ("fp8 row", Scheme.FP8),
        ("fp8 block", Scheme.FP8),
        ("q8_0", Scheme.INT8),
        ("int8 row", Scheme.INT8),
        ("iq4_xs", Scheme.INT8),  # levels are kept as codes of eight bits
        ("nvfp4", Scheme.INT8),
    }


if __name__ == "__main__":
    report(CHECKS)
