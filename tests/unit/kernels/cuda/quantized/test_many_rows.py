"""The CUDA C++ kernel for many rows against the dequantised weight, emulated on a CPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flashdraft.kernels.cuda.quantized import few_rows, many_rows
from flashdraft.kernels.cuda.quantized.few_rows_plan import Product, describe_product
from flashdraft.kernels.cuda.quantized.layout import Code, pack_quantized
from flashdraft.kernels.cuda.quantized.many_rows import multiply_many
from flashdraft.kernels.cuda.quantized.many_rows_plan import (
    MAX_ROWS,
    MIN_ROWS,
    SHAPES,
    ManyPlan,
    choose_shape,
    count_cycles,
    make_plan,
    plan_many,
)
from flashdraft.kernels.kinds import Activation, Scheme
from tests.unit.kernels.cuda.cross_compile import CARDS
from tests.unit.kernels.cuda.emulated import check_product
from tests.unit.kernels.cuda.emulated_many_rows import multiply
from tests.unit.kernels.cuda.quantized.test_few_rows import KINDS, products
from tests.unit.kernels.cuda.quantized.test_linear import FEW_ROWS_FORMATS, FORMATS

H200 = CARDS["sm_90"].limits
SMALL = ManyPlan(rows=32, tiles=1, stages=3, steps=2, num_blocks=3)


def make_x(num_rows, depth):
    """Rows with something between them that must not be read."""
    wide = torch.full((num_rows, depth + 24), math.nan).bfloat16()
    wide[:, 8 : 8 + depth] = torch.randn(num_rows, depth)
    return wide[:, 8 : 8 + depth]


def check(name, num_rows, plan, activation=None, **sizes):
    torch.manual_seed(0)
    weight = FORMATS[name](**sizes)
    x = make_x(num_rows, weight.shape[1])
    found = multiply(x, pack_quantized(weight), plan, activation)
    # where groups have scales these are multiplied into the weight, which is rounded
    check_product(found, x, weight, activation, torch.float32 if "row" in name else x.dtype)


@pytest.mark.parametrize("name", FEW_ROWS_FORMATS)
def test_every_format(name):
    """Two tiles of x, the second nearly empty; columns that fill no tile."""
    tiles = 2 if name.endswith("row") else 1
    check(name, 39, SMALL._replace(tiles=tiles), out=200, depth=512)


@pytest.mark.parametrize("name", FEW_ROWS_FORMATS)
def test_gates(name):
    """Also where a warpgroup has no columns left."""
    tiles = 2 if name.endswith("row") else 1
    activation = Activation.SILU if name == "q8_0" else Activation.GELU_TANH
    check(name, 17, SMALL._replace(tiles=tiles), activation, out=2 * 160, depth=384)


@pytest.mark.parametrize(
    ("name", "shape", "stages", "steps"),
    [
        ("q4_0", (128, 2, 12), 4, 3),
        ("q4_0", (96, 1, 16), 2, 2),
        ("w4a16 128", (256, 1, 12), 3, 5),
        ("w4a16 64", (64, 1, 12), 12, 2),
        ("q8_0", (192, 1, 12), 5, 4),
        ("fp8 row", (96, 2, 12), 3, 2),
        ("int8 row", (64, 2, 12), 2, 3),
        ("fp8 block", (128, 1, 16), 4, 2),
    ],
)
def test_tiles_of_every_size(name, shape, stages, steps):
    rows, tiles, warps = shape
    assert shape in SHAPES
    plan = ManyPlan(rows, tiles, stages, steps, num_blocks=3, warps=warps)
    check(name, 100, plan, out=136, depth=640)


@pytest.mark.parametrize("name", ["q4_0", "fp8 row"])
@pytest.mark.parametrize("num_blocks", [1, 2, 4, 5, 11, 16])
def test_every_way_to_share_the_work(name, num_blocks):
    """Four tiles of four steps: whole tiles, halves, what fits nowhere, and single units."""
    tiles, out = (2, 512) if name == "fp8 row" else (1, 256)
    plan = SMALL._replace(tiles=tiles, num_blocks=num_blocks)
    check(name, 50, plan, out=out, depth=512)


@pytest.mark.parametrize(("out", "depth"), [(101, 704), (30, 128), (260, 640)])
def test_sizes_that_fill_nothing(out, depth):
    check("q4_0", 33, SMALL._replace(num_blocks=2), out=out, depth=depth)


def test_three_warpgroups():
    check("fp8 row", 40, SMALL._replace(warps=16), out=200, depth=512)


@pytest.mark.parametrize("name", ["q4_0", "fp8 row"])
def test_large_and_small_numbers_are_exact(name):
    """Codes are tiny numbers on their way: none may be lost, whatever the range of x."""
    torch.manual_seed(0)
    weight = FORMATS[name](out=128, depth=256)
    x = torch.randn(18, 256).bfloat16() * torch.logspace(-12, 12, 18)[:, None].bfloat16()
    found = multiply(x, pack_quantized(weight), SMALL._replace(num_blocks=2))
    expected = x.float() @ weight.dequantize().T
    distance = (found.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(distance.max()) < 0.003


@pytest.mark.parametrize("name", ["q4_0", "w4a16 64", "w4a16 128", "q8_0", "fp8 block"])
def test_it_multiplies_by_the_weight_that_is_bfloat16_for_longer_prompts(name):
    """A row of x that is one at a place gives a column of the weight."""
    torch.manual_seed(0)
    weight = FORMATS[name](out=128, depth=256)
    x = torch.eye(256).bfloat16()
    found = multiply(x, pack_quantized(weight), ManyPlan(128, 1, 3, 2, num_blocks=2)).T
    expected = weight.dequantize(torch.bfloat16)
    if weight.scheme is Scheme.INT4:
        assert torch.equal(found, expected)
    else:  # where two bfloat16 are nearly as near
        assert float((found != expected).float().mean()) < 0.01
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)


def test_a_row_does_not_depend_on_others():
    torch.manual_seed(0)
    weight = pack_quantized(FORMATS["q4_0"](out=200, depth=512))
    x = torch.randn(40, 512).bfloat16()
    whole = multiply(x, weight, SMALL)
    assert torch.equal(multiply(x, weight, SMALL), whole)
    x[[1, 39]] = math.nan
    found = multiply(x, weight, SMALL)
    assert bool(found[[1, 39]].isnan().all())
    rest = [row for row in range(40) if row not in (1, 39)]
    assert torch.equal(found[rest], whole[rest])


@pytest.mark.parametrize("num_rows", [MIN_ROWS, 33, 128, 129, MAX_ROWS])
@pytest.mark.parametrize("code", KINDS)
def test_plans_fit_the_card_and_keep_it_busy(code, num_rows):
    for product in products(code):
        if product.experts:
            continue
        chosen = plan_many(num_rows, product, H200)
        for plan in filter(None, (make_plan(s, num_rows, product, H200) for s in SHAPES)):
            columns, row_tiles = plan.count_tiles(num_rows, product)
            assert plan.shared_bytes(product) <= H200.shared_bytes
            assert plan.stages >= 3 and plan.steps >= 2
            assert 0 < plan.num_blocks <= H200.num_processors
            assert columns * row_tiles * product.num_steps >= plan.num_blocks
        assert 0 <= chosen.rows * chosen.count_tiles(num_rows, product)[1] - num_rows < 64
        if product.columns * product.num_steps * product.step >= 1 << 25:
            assert chosen.num_blocks >= 0.9 * H200.num_processors


LINEARS = {  # of 31B: columns, depth
    "qkv": (16384, 5376),
    "output": (5376, 8192),
    "gate": (21504, 5376),
    "down": (5376, 21504),
}


@pytest.mark.parametrize(
    ("code", "num_rows", "name", "shapes"),
    [
        (Code.INT4, 48, "qkv", {(64, 2, 12)}),
        (Code.INT4, 48, "output", {(64, 1, 16), (64, 1, 12)}),
        (Code.INT4, 64, "gate", {(64, 2, 12)}),
        (Code.INT4, 64, "down", {(64, 2, 12)}),
        (Code.INT4, 96, "qkv", {(96, 2, 12)}),
        (Code.INT4, 96, "output", {(96, 1, 12)}),
        (Code.INT4, 96, "gate", {(96, 2, 12)}),
        (Code.INT4, 96, "down", {(96, 2, 12), (96, 1, 16)}),
        (Code.INT4, 128, "qkv", {(128, 1, 12)}),
        (Code.INT4, 128, "output", {(128, 1, 12)}),
        (Code.INT4, 128, "gate", {(128, 2, 12)}),
        (Code.INT4, 128, "down", {(128, 1, 12), (128, 1, 16)}),
        (Code.FP8, 48, "gate", {(64, 2, 12)}),
        (Code.FP8, 48, "output", {(64, 1, 12), (64, 1, 16)}),
        (Code.FP8, 96, "gate", {(96, 2, 12)}),
        (Code.FP8, 96, "output", {(96, 1, 12)}),
        (Code.FP8, 128, "qkv", {(128, 1, 12)}),
        (Code.FP8, 128, "gate", {(128, 2, 12), (128, 1, 16)}),
        (Code.FP8, 128, "down", {(128, 1, 12), (128, 1, 16)}),
        (Code.INT8, 64, "gate", {(64, 2, 12)}),
        (Code.INT8, 96, "down", {(96, 2, 12)}),
        (Code.INT8, 128, "qkv", {(128, 2, 12)}),
        (Code.INT8, 128, "output", {(128, 1, 12), (128, 1, 16)}),
        (Code.INT8, 128, "down", {(128, 2, 12), (128, 1, 16)}),
        *(
            (code, rows, name, {shape})
            for code in KINDS
            for name in LINEARS
            for rows, shape in {
                192: (192, 1, 12),
                256: (256, 1, 12),
                384: (192, 1, 12),
                512: (256, 1, 12),
            }.items()
        ),
    ],
)
def test_the_fastest_tiles_of_an_h200_are_chosen(code, num_rows, name, shapes):
    """Those within 3 % of the fastest one."""
    columns, depth = LINEARS[name]
    kind = KINDS[code]
    product = Product(*kind, columns, columns * (name == "gate"), 0)
    product = product._replace(num_steps=depth // product.step)
    assert choose_shape(num_rows, product) in shapes


@pytest.mark.parametrize(
    ("num_rows", "rows", "num_tiles"),
    [(33, 64, 1), (97, 128, 1), (129, 192, 1), (224, 256, 1), (320, 192, 2), (448, 256, 2)],
)
def test_tails_have_no_tile_of_their_own(num_rows, rows, num_tiles):
    product = Product(*KINDS[Code.INT4], 16384, 0, 42)
    plan = plan_many(num_rows, product, H200)
    assert (plan.rows, plan.count_tiles(num_rows, product)[1]) == (rows, num_tiles)


def test_blocks_that_share_tiles_alike_are_preferred():
    int4 = KINDS[Code.INT4]
    shapes = {(16384, 5376): 128, (5376, 21504): 126, (5376, 8192): 126}
    found = {}
    for out, depth in shapes:
        product = Product(*int4, out, 0, depth // 128)
        found[out, depth] = make_plan((128, 1, 12), 128, product, H200).num_blocks
    assert found == shapes


def test_a_small_weight_is_not_shared_among_all():
    """So many parts of a tile would take longer to join than to multiply."""
    product = Product(*KINDS[Code.INT4], 1024, 0, 8)
    plan = make_plan((128, 1, 12), 128, product, H200)
    assert plan.num_blocks % 8 == 0 and 8 <= plan.num_blocks <= 32
    everybody = plan._replace(num_blocks=64)
    assert count_cycles(plan, 128, product) < count_cycles(everybody, 128, product)


def test_a_card_with_no_room_has_no_plan():
    product = Product(*KINDS[Code.INT4], 16384, 0, 42)
    assert plan_many(128, product, H200._replace(shared_bytes=24 << 10)) is None


def test_what_it_leaves_to_others(monkeypatch):
    small = pack_quantized(FORMATS["q4_0"](out=128, depth=256))
    weight = replace(small, shape=(1 << 17, 256))
    narrow = pack_quantized(FORMATS["q4_0"](out=128, depth=192))
    six = pack_quantized(FORMATS["q6_k"](out=128, depth=256))

    def is_launched(num_rows, weight):
        x = torch.zeros(num_rows, weight.shape[1]).bfloat16()
        return multiply_many(x, weight, H200, torch.zeros(1)) is not None

    assert not is_launched(128, weight)  # on a CPU
    monkeypatch.setattr(few_rows, "can_compile", lambda device: True)
    monkeypatch.setattr(many_rows, "is_hopper", lambda device: True)
    monkeypatch.setattr(many_rows, "launch", lambda x, *rest: x)
    numbers = (0, 1, MIN_ROWS - 1, MIN_ROWS, MAX_ROWS, MAX_ROWS + 1)
    assert [n for n in numbers if is_launched(n, weight)] == [MIN_ROWS, MAX_ROWS]
    assert not is_launched(128, small)
    monkeypatch.setattr(many_rows, "MIN_VALUES", 0)
    assert is_launched(128, small)
    assert not is_launched(128, narrow) and not is_launched(128, six)
    x = torch.zeros(100, 264).bfloat16()
    shifted = multiply_many(x[:, 1:257], weight, H200, torch.zeros(1))
    floats = multiply_many(x[:, :256].float(), weight, H200, torch.zeros(1))
    assert shifted is None and floats is None
    gated = describe_product(replace(weight, shape=(80, 256)), gated=True)
    assert gated is None
