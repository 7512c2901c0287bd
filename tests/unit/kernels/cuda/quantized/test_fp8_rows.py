"""The CUDA C++ kernel for rows in e4m3 against float64, emulated on a CPU."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flashdraft.kernels.cuda.quantized.activations import CodedRows
from flashdraft.kernels.cuda.quantized.fp8_rows import (
    TILES,
    Fp8Plan,
    Tile,
    choose_tile,
    plan_fp8,
)
from flashdraft.kernels.cuda.quantized.layout import pack_quantized
from flashdraft.kernels.kinds import Activation, Scheme
from flashdraft.kernels.quantized import code_rows
from tests.unit.kernels.cuda.cross_compile import CARDS
from tests.unit.kernels.cuda.emulated import REFERENCE
from tests.unit.kernels.cuda.emulated_fp8_rows import multiply
from tests.unit.kernels.cuda.quantized.test_linear import FORMATS

H200 = CARDS["sm_90"].limits
SMALL = Fp8Plan(Tile(32, 1, 2), stages=3, num_blocks=3)


def lay_out(codes, scale, row_tile):
    """Coded rows as `activations.code_rows` lays them out; what fills a tile up is no number."""
    num_rows, depth = codes.shape
    planes = codes.view(torch.uint8).view(num_rows, depth // 128, 2, 64).transpose(2, 3)
    filled = torch.full((-(-num_rows // row_tile) * row_tile,), math.nan)
    filled[:num_rows] = scale
    return CodedRows(planes.contiguous().view(torch.int16).squeeze(-1), filled)


def expect(x, weight, activation=None):
    """In float64, of the same codes."""
    codes, scale = code_rows(x, Scheme.FP8)
    rows = codes.double() * scale.double()[:, None]
    products = rows @ weight.dequantize().double().T
    if activation is None:
        return products
    return REFERENCE.gated(products.bfloat16().float(), activation).double()


def check(num_rows, plan, activation=None, out=200, depth=512, x=None):
    torch.manual_seed(0)
    weight = FORMATS["fp8 row"](out=out, depth=depth)
    x = torch.randn(num_rows, depth).bfloat16() if x is None else x
    coded = lay_out(*code_rows(x, Scheme.FP8), plan.tile.rows)
    found = multiply(coded, pack_quantized(weight), plan, activation)
    expected = expect(x, weight, activation)
    # bfloat16's rounding, of the sums in float32; of both halves where they are gated
    rtol = 0.004 if activation is None else 0.012
    spread = float(expected.std())
    torch.testing.assert_close(found.double(), expected, atol=1e-3 * spread, rtol=rtol)


def test_two_tiles_of_x_the_second_nearly_empty():
    check(39, SMALL)


@pytest.mark.parametrize("activation", Activation)
def test_gates(activation):
    """Also where a block has no columns left."""
    check(17, SMALL, activation, out=2 * 160, depth=384)


@pytest.mark.parametrize("tile", [*TILES, Tile(128, 1, 1), Tile(192, 2, 1)])
def test_tiles_of_every_size(tile):
    check(100, Fp8Plan(tile, 3, num_blocks=3), out=136, depth=640)


@pytest.mark.parametrize("num_blocks", [1, 2, 4, 5, 11, 16])
def test_every_way_to_share_the_work(num_blocks):
    """Four tiles of four steps: whole tiles, halves, what fits nowhere, and single units."""
    check(50, SMALL._replace(num_blocks=num_blocks), out=256, depth=512)


@pytest.mark.parametrize("activation", [None, Activation.GELU_TANH])
@pytest.mark.parametrize("num_teams", [1, 3, 4])
def test_teams_share_rows(num_teams, activation):
    """Blocks of two: the second one's last tile has no columns."""
    plan = Fp8Plan(Tile(64, 1, 2), 3, 2 * num_teams, team=2)
    check(70, plan, activation, out=2 * 160 if activation else 320, depth=384)


@pytest.mark.parametrize(("out", "depth"), [(101, 384), (30, 128), (260, 640)])
def test_sizes_that_fill_nothing(out, depth):
    check(33, SMALL._replace(num_blocks=2), out=out, depth=depth)


def test_rows_of_every_size():
    sizes = torch.logspace(-12, 12, 18)[:, None]
    torch.manual_seed(0)
    x = (torch.randn(18, 256) * sizes).bfloat16()
    weight = FORMATS["fp8 row"](out=128, depth=256)
    coded = lay_out(*code_rows(x, Scheme.FP8), 32)
    found = multiply(coded, pack_quantized(weight), SMALL._replace(num_blocks=2)).double()
    expected = expect(x, weight)
    assert float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max()) < 0.003


def test_a_row_does_not_depend_on_others():
    torch.manual_seed(0)
    weight = pack_quantized(FORMATS["fp8 row"](out=200, depth=512))
    x = torch.randn(40, 512).bfloat16()

    def product():
        return multiply(lay_out(*code_rows(x, Scheme.FP8), 32), weight, SMALL)

    whole = product()
    x[1, 7], x[39] = math.nan, math.inf
    found = product()
    assert bool(found[[1, 39]].isnan().all())
    rest = [row for row in range(40) if row not in (1, 39)]
    assert torch.equal(found[rest], whole[rest])


@pytest.mark.parametrize("team", [1, 2])
@pytest.mark.parametrize("num_rows", [17, 64, 128, 129, 256, 300, 2048])
def test_plans_fit_the_card_and_keep_it_busy(num_rows, team):
    for columns, num_steps, gated in ((16384, 42, False), (5376, 168, False), (21504, 42, True)):
        plan = plan_fp8(num_rows, columns, num_steps, gated, H200, team=team)
        assert plan.shared_bytes <= H200.shared_bytes and plan.stages >= 4
        tiles = plan.count_tiles(num_rows, columns, gated)
        assert tiles[1] * plan.tile.rows >= num_rows and plan.num_blocks % team == 0
        assert 0.95 * H200.num_processors - 1 <= plan.num_blocks <= H200.num_processors


def test_tiles_leave_few_rows_empty():
    found = {n: choose_tile(n).rows for n in (1, 32, 33, 128, 129, 200, 320, 384, 512, 2048)}
    assert found == {
        1: 32, 32: 32, 33: 64, 128: 128, 129: 192, 200: 256, 320: 192, 384: 192, 512: 256, 2048: 256
    }  # fmt: skip


def test_a_card_with_no_room_has_no_plan():
    assert plan_fp8(128, 16384, 42, False, H200._replace(shared_bytes=64 << 10)) is None
