"""Quantised linears in Triton against the dequantised weight, in Triton's interpreter.

What runs in the interpreter is this file as a script (tests/interpreted.py); the instructions that
a GPU unpacks codes with are left to the GPU tests.
"""

from __future__ import annotations

import pytest
import torch

from flashdraft.errors import CheckpointError
from flashdraft.kernels.cuda.quantized.layout import Number, pack_quantized
from flashdraft.kernels.kinds import Scheme, filled_bytes
from flashdraft.kernels.quantized import Quantized, quantize
from tests.interpreted import judge, report


def floats(*shape, dtype=torch.float16, least=0.001, most=0.02):
    return (torch.rand(*shape) * (most - least) + least).to(dtype)


def codes(scheme, *shape):
    if scheme is Scheme.FP8:
        return (torch.randn(*shape) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    if scheme is Scheme.INT8:
        return torch.randint(-128, 128, shape, dtype=torch.int8)
    return torch.randint(0, 1 << scheme.bits, shape, dtype=torch.uint8)


def build(scheme, group, *, zero=0, dtype=torch.float16, low=None, over=False, out=100, depth=256):
    """A random weight of a format."""
    shape = (out, depth // group)
    if over:
        signed = low is None
        scale = torch.randint(-128 if signed else 0, 128 if signed else 64, shape)
        scale = scale.to(torch.int8 if signed else torch.uint8)
    else:
        scale = floats(*shape, dtype=dtype)
    minimum = super_minimum = None
    if low is not None:
        minimum = floats(*shape, dtype=low, most=0.2)
        if over:
            minimum = torch.randint(0, 64, shape, dtype=torch.uint8)
            super_minimum = floats(out, depth // 256, most=0.01)
    return Quantized(
        scheme,
        codes(scheme, out, depth),
        scale,
        group,
        zero,
        minimum,
        floats(out, depth // 256, most=0.002) if over else None,
        super_minimum,
    )


FORMATS = {
    "q4_0": lambda **s: build(Scheme.INT4, 32, zero=8, **s),
    "q4_1": lambda **s: build(Scheme.INT4, 32, low=torch.float16, **s),
    "q4_k": lambda **s: build(Scheme.INT4, 32, low=torch.float16, over=True, **s),
    "q6_k": lambda **s: build(Scheme.INT6, 16, zero=32, over=True, **s),
    "q2_k": lambda **s: build(Scheme.INT4, 16, low=torch.float16, over=True, **s),
    "q3_k": lambda **s: build(Scheme.INT4, 16, zero=4, over=True, **s),
    "iq4_xs": lambda **s: build(Scheme.INT8, 32, over=True, **s),
    "nvfp4": lambda **s: build(Scheme.INT8, 16, dtype=torch.float32, **s),
    "gptq": lambda **s: build(Scheme.INT4, 128, low=torch.float32, **s),
    "q8_0": lambda **s: build(Scheme.INT8, 32, **s),
    "q5_1": lambda **s: build(Scheme.INT8, 32, low=torch.float16, **s),
    "w4a16 16": lambda **s: build(Scheme.INT4, 16, zero=8, dtype=torch.bfloat16, **s),
    "w4a16 64": lambda **s: build(Scheme.INT4, 64, zero=8, dtype=torch.bfloat16, **s),
    "w4a16 128": lambda **s: build(Scheme.INT4, 128, zero=8, dtype=torch.bfloat16, **s),
    "w4a16 256": lambda **s: build(Scheme.INT4, 256, zero=8, dtype=torch.bfloat16, **s),
    "asymmetric 32": lambda **s: build(
        Scheme.INT4, 32, dtype=torch.bfloat16, low=torch.float32, **s
    ),
    "asymmetric 128": lambda **s: build(
        Scheme.INT4, 128, dtype=torch.bfloat16, low=torch.float32, **s
    ),
    "float32 scales": lambda **s: build(Scheme.INT4, 32, zero=8, dtype=torch.float32, **s),
    "fp8 row": lambda depth=256, **s: build(
        Scheme.FP8, depth, dtype=torch.float32, depth=depth, **s
    ),
    "fp8 block": lambda **s: build(Scheme.FP8, 128, dtype=torch.float32, **s),
    "int8 row": lambda depth=256, **s: build(
        Scheme.INT8, depth, dtype=torch.float32, depth=depth, **s
    ),
    "asymmetric row": lambda depth=256, **s: build(
        Scheme.INT4, depth, dtype=torch.bfloat16, low=torch.float32, depth=depth, **s
    ),
}

# those that the CUDA C++ kernel for few rows reads
FEW_ROWS_FORMATS = ("q4_0", "w4a16 64", "w4a16 128", "q8_0", "int8 row", "fp8 row", "fp8 block")


def check_product(weight, num_rows, splits=None, warps=None):
    from flashdraft.kernels.cuda.quantized import linear as kernels

    x = torch.randn(num_rows, weight.shape[1])
    packed = pack_quantized(weight)
    plan = kernels.plan_quantized(num_rows, packed, num_processors=2)
    if splits is not None:
        plan = plan._replace(num_splits=splits)
    if warps is not None:
        plan = plan._replace(num_warps=warps)
    arrivals = torch.zeros(256, dtype=torch.int32)
    for _ in range(2):  # a call leaves the counters as it found them
        found = kernels.multiply_quantized(x, packed, plan, arrivals)
        expected = x.float() @ weight.dequantize().T
        assert not arrivals.any()
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-5)


def check_gated(name, num_rows, inner, splits):
    """One launch gives what the product and the gate give."""
    from flashdraft.kernels.cuda.quantized import linear as kernels
    from flashdraft.kernels.kinds import Activation
    from flashdraft.kernels.torch_backend import TorchKernels

    weight = FORMATS[name](out=2 * inner)
    x, packed = torch.randn(num_rows, weight.shape[1]), pack_quantized(weight)
    arrivals = torch.zeros(256, dtype=torch.int32)
    reference = TorchKernels(torch.device("cpu"), torch.float32)
    for activation in Activation:
        plan = kernels.plan_quantized(num_rows, packed, num_processors=2, gated=True)
        plan = plan._replace(num_splits=splits)
        found = kernels.multiply_quantized(x, packed, plan, arrivals, activation)
        expected = reference.gated(x @ weight.dequantize().T, activation)
        assert not arrivals.any()
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-5)


def test_depths_are_cut_as_an_h200_is_fastest():
    """31B's and 26B's linears in int4 and fp8, as measured."""
    pytest.importorskip("triton")
    from flashdraft.kernels.cuda.quantized.linear import _plan

    def splits(rows, out, steps, is_int4=True, gated=False):
        return _plan(rows, steps, out, is_int4, gated, 132).num_splits

    assert splits(1, 5376, 64) == 6  # 11.2 µs; with 5 parts 11.8, with 7 parts 15.1
    assert splits(1, 5376, 168) == 6
    assert splits(1, 16384, 42) == 2
    assert splits(1, 43008, 42, gated=True) in (3, 5)  # 40 µs; 53 µs as one
    assert splits(1, 8192, 22) == 4
    assert splits(1, 2816, 32) == 8
    assert splits(16, 5376, 64) == 6
    assert splits(16, 16384, 42) in (2, 3)
    assert splits(16, 43008, 42, gated=True) == 3  # 48 µs; with 2 parts 55
    assert splits(16, 5376, 168, False) == 6  # 32 µs; with 12 parts 45
    assert splits(16, 16384, 42, False) == 2
    assert splits(16, 43008, 42, False, gated=True) == 1  # 59 µs; with 2 parts 75


def check_weight(weight):
    from flashdraft.kernels.cuda.quantized.linear import dequantize

    packed, expected = pack_quantized(weight), weight.dequantize()
    rows = torch.tensor([99, 0, 5, 5, 63, 64])
    close = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(dequantize(packed, torch.float32), expected, **close)
    part = dequantize(packed, torch.float32, first=37, count=41)
    torch.testing.assert_close(part, expected[37:78], **close)
    torch.testing.assert_close(dequantize(packed, torch.float32, rows), expected[rows], **close)


def check_every_fp8_number():
    from flashdraft.kernels.cuda.quantized.linear import dequantize

    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(64, 1)
    finite = every.float().nan_to_num(0.0).to(torch.float8_e4m3fn)
    weight = Quantized(Scheme.FP8, finite, torch.ones(64, 1), 256)
    assert torch.equal(dequantize(pack_quantized(weight), torch.float32), finite.float())


def check_nothing():
    from flashdraft.kernels.cuda.quantized import linear as kernels

    packed = pack_quantized(FORMATS["q4_0"]())
    plan = kernels.plan_quantized(0, packed, 2)
    none = torch.zeros(0, 256, dtype=torch.bfloat16)
    assert kernels.multiply_quantized(none, packed, plan, torch.zeros(0)).shape == (0, 100)
    rows = torch.zeros(0, dtype=torch.int64)
    assert kernels.dequantize(packed, torch.float32, rows).shape == (0, 256)


# rows, inner size, parts of the depth: sizes that no tile divides among them
GATED = [(1, 64, 1), (1, 50, 2), (16, 128, 2), (11, 96, 1), (40, 33, 2), (3, 30, 2)]
GATED += [(16, 160, 2), (40, 64, 1)]
ODD = ("q4_0", "q8_0", "fp8 row", "int8 row", "asymmetric row")
CHECKS = {
    **{f"{n}, 1 row": lambda n=n: check_product(FORMATS[n](), 1) for n in FORMATS},
    **{
        f"{n}, gated {case}": lambda n=n, case=case: check_gated(n, *case)
        for n in ("q4_0", "q4_k", "fp8 row")
        for case in GATED
    },
    **{
        f"{n}, narrow tiles, {m} rows": lambda n=n, m=m, k=k: check_product(
            FORMATS[n](out=72, depth=512), m, splits=k, warps=2
        )
        for n in FORMATS
        for m, k in ((11, 2), (40, 1))
    },
    **{f"{n}, 11 rows": lambda n=n: check_product(FORMATS[n](), 11) for n in FORMATS},
    **{
        f"{n}, depth {d}": lambda n=n, d=d: check_product(FORMATS[n](depth=d, out=64), 3)
        for n in ODD
        for d in (64, 96, 160, 576, 704)
    },
    **{
        f"{n}, cut in {k}": lambda n=n, k=k: check_product(FORMATS[n](depth=768), 5, k)
        for n in ("q4_0", "q6_k", "fp8 row")
        for k in (2, 3)
    },
    "more rows than a tile": lambda: check_product(FORMATS["q4_0"](), 70),
    **{f"{n} itself": lambda n=n: check_weight(FORMATS[n]()) for n in FORMATS},
    "every fp8 number": check_every_fp8_number,
    "nothing to do": check_nothing,
}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name, failures):
    judge(failures[name])


@pytest.mark.parametrize("name", FORMATS)
def test_packing_keeps_the_size(name):
    weight = FORMATS[name](out=128)
    more = pack_quantized(weight).num_bytes - weight.num_bytes
    assert more == (2 * 128 if name == "w4a16 256" else 0)  # a row's only scale becomes a float32


@pytest.mark.parametrize("scheme", [Scheme.INT4, Scheme.INT8, Scheme.FP8])
@pytest.mark.parametrize(("depth", "filled"), [(704, 768), (2112, 2176), (768, 768), (192, 192)])
def test_rows_that_are_filled_up_are_counted(scheme, depth, filled):
    """Only those of 4-bit codes are."""
    coded = quantize(torch.randn(128, depth), scheme)
    packed = pack_quantized(coded)
    assert packed.num_bytes == filled_bytes(coded.shape, coded.num_bytes)
    expected = filled if scheme is Scheme.INT4 else depth
    assert packed.num_steps * packed.planes * packed.lanes == expected


@pytest.mark.parametrize(
    ("scheme", "group", "allowed"),
    [
        (Scheme.INT4, 8, "16, 32 or a multiple of 64"),
        (Scheme.INT4, 48, "16, 32 or a multiple of 64"),
        (Scheme.INT6, 96, "16, 32 or a multiple of 64"),
        (Scheme.INT8, 8, "16 or a multiple of 32"),
        (Scheme.FP8, 48, "16 or a multiple of 32"),
    ],
)
def test_groups_that_the_kernels_cannot_read_are_a_checkpoint_error(scheme, group, allowed):
    weight = build(scheme, group, depth=2 * 96 * 8)
    with pytest.raises(CheckpointError, match=f"groups of {group} values.*{allowed}.*CPU"):
        pack_quantized(weight)


@pytest.mark.parametrize("scheme", [Scheme.INT4, Scheme.INT6, Scheme.INT8, Scheme.FP8])
def test_groups_that_the_error_allows_are_packed(scheme):
    whole = 64 if scheme in (Scheme.INT4, Scheme.INT6) else 32
    for group in (16, 32, whole, 3 * whole, 24):  # 24: a whole row
        depth = 24 if group == 24 else 2 * group
        assert pack_quantized(build(scheme, group, depth=depth)).shape == (100, depth)


def test_experts_are_packed_one_by_one():
    torch.manual_seed(4)
    stack = quantize(torch.randn(3, 64, 256), Scheme.INT4)
    packed = pack_quantized(stack)
    for expert in range(3):
        alone = pack_quantized(stack.expert(expert))
        assert torch.equal(packed.codes[expert], alone.codes)
        assert torch.equal(packed.scale.values[expert], alone.scale.values)
    assert packed.scale.kind is Number.FLOAT16


def test_a_plan_is_one_for_all_rows_where_it_must_be_exact():
    pytest.importorskip("triton")
    from flashdraft.kernels.cuda.quantized.linear import plan_quantized

    packed = pack_quantized(quantize(torch.randn(128, 512), Scheme.INT4))
    plans = {plan_quantized(rows, packed, 132, exact=True) for rows in (1, 16, 64, 4096)}
    assert len(plans) == 1


if __name__ == "__main__":
    report(CHECKS)
