"""cuda/experts/slabs.cu, emulated, against every expert's weight in float32."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flashdraft.kernels.cuda.driver import Map
from flashdraft.kernels.cuda.experts import slabs
from flashdraft.kernels.cuda.experts.plan import MANY_SLABS, SOME_SLABS, SlabsPlan, plan_slabs
from flashdraft.kernels.cuda.experts.routing import GatheredRows
from flashdraft.kernels.cuda.experts.slabs import (
    describe_experts,
    make_flags,
    mix_slabs,
    prepare,
    shared_bytes,
)
from flashdraft.kernels.cuda.quantized.layout import pack_quantized
from flashdraft.kernels.kinds import Activation
from flashdraft.kernels.quantized import stack_experts
from tests.unit.kernels.cuda.cross_compile import CARDS
from tests.unit.kernels.cuda.emulated import REFERENCE, build, emulated_map
from tests.unit.kernels.cuda.quantized.test_linear import FORMATS

H200 = CARDS["sm_90"].limits
SMALL = SlabsPlan(rows=32, slabs=2)
GELU = Activation.GELU_TANH
GUARD = 64  # numbers behind a result
MOST_ERROR = 6e-3  # gates, results and weights are rounded to bfloat16, scales in float16 too


def make_map(array, box):
    """What emulated_warpgroups.h reads in the place of a card's map."""
    if array.dim() == 3:
        return emulated_map(array, box)
    strides = [2 * stride for stride in array.stride()]
    words = array.data_ptr(), array.shape[1], *strides[:2], *strides[2:4], box[1], array.shape[4]
    return Map(words)


def arrange(x):
    """Of 32 values four by four pairs, by columns."""
    return x.view(len(x), -1, 4, 4, 2).transpose(2, 3).reshape(x.shape)


def sort_rows(counts, tile_size):
    """Tiles of experts with so many rows each; results go to places in a shuffled order."""
    num_pairs, tiles, first = sum(counts), [], 0
    for expert, count in enumerate(counts):
        for begin in range(first, first + count, tile_size):
            tiles.append((expert, begin, min(begin + tile_size, first + count)))
        first += count
    # No tile is behind the last one; whoever read one would find no such expert.
    table = torch.tensor([*tiles, (1 << 20, 1 << 20, 1 << 20)], dtype=torch.int32).T.contiguous()
    order = torch.randperm(num_pairs).int()
    return order, table, torch.tensor([len(tiles)], dtype=torch.int32)


def run(x, counts, weight, plan, num_blocks, activation=None, is_arranged=False, stages=3):
    """The kernel's result, with blocks in both orders, which must give the same bits."""
    product = describe_experts(weight, activation is not None)
    order, table, num_tiles = sort_rows(counts, plan.rows)
    gathered = x if product.code is None else arrange(x)
    rows = GatheredRows(gathered, order, *table, num_tiles)
    work, output, _kept = prepare(gathered, weight, product, rows, make_map)
    flags = make_flags(plan, stages, product, activation, is_arranged)
    library = build("slabs", *flags.items())
    assert library.shared_bytes() == shared_bytes(plan, stages, product) <= H200.shared_bytes
    assert library.argument_bytes() == ctypes.sizeof(work)
    found = []
    for backwards in (0, 1):
        room = torch.full((output.numel() + GUARD,), math.nan).bfloat16()
        work.output = room.data_ptr()
        library.run(ctypes.byref(work), num_blocks, backwards)
        assert bool(room[output.numel() :].isnan().all())
        found.append(room[: output.numel()].view(output.shape))
    assert torch.equal(*(one.view(torch.int16) for one in found))
    return found[0], order


def check(counts, floats, weight, plan=SMALL, num_blocks=3, activation=None, **others):
    """`floats`: what the weight is, in float32."""
    x = torch.randn(sum(counts), floats.shape[2]).bfloat16()
    found, order = run(x, counts, weight, plan, num_blocks, activation, **others)
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    expected = torch.einsum("rk,rnk->rn", x.float(), floats[owners])
    if activation is None:  # back to where rows were
        found = found[order.long()]
    else:
        expected = REFERENCE.gated(expected.bfloat16().float(), activation)
        if others.get("is_arranged"):
            found = arrange(found)
    spread = float(expected.std())
    torch.testing.assert_close(found.float(), expected, atol=0.03 * spread, rtol=0.02)
    assert float((found.float() - expected).norm() / expected.norm()) < MOST_ERROR


def draw(num_experts, rows, depth):
    weight = (torch.randn(num_experts, rows, depth) * depth**-0.5).bfloat16()
    return weight.float(), weight


def draw_few(name, num_experts, rows, depth):
    stack = stack_experts([FORMATS[name](out=rows, depth=depth) for _ in range(num_experts)])
    return stack.dequantize(), pack_quantized(stack)


COUNTS = {
    "uniform": [5, 9, 7, 8],
    "an expert without rows": [0, 12, 0, 33, 0],
    "degenerate": [0, 70, 70, 0],
    "one row": [0, 0, 1],
    "every size": [1, 8, 9, 16, 17, 31, 32, 33],
}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("activation", [None, GELU])
def test_floats(counts, activation):
    torch.manual_seed(0)
    check(counts, *draw(len(counts), 192, 192), activation=activation)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("activation", [None, GELU])
def test_four_bits(counts, activation):
    torch.manual_seed(0)
    check(counts, *draw_few("q4_0", len(counts), 192, 256), activation=activation)


@pytest.mark.parametrize("name", ["q4_0", "w4a16 64", "w4a16 128", "q8_0", "int8 row", "fp8 row"])
@pytest.mark.parametrize("is_arranged", [False, True])
def test_every_format(name, is_arranged):
    """Depths that fill no step, too."""
    torch.manual_seed(0)
    counts = [3, 0, 20]
    check(counts, *draw_few(name, 3, 128, 384), activation=GELU, is_arranged=is_arranged)
    check(counts, *draw_few(name, 3, 128, 640 if "128" in name else 704))


@pytest.mark.parametrize("is_few", [False, True])
@pytest.mark.parametrize(
    ("plan", "stages"),
    [
        (SlabsPlan(rows=16, slabs=2, resident=2), 4),
        (SlabsPlan(rows=64, slabs=4), 5),
        (SlabsPlan(rows=128, slabs=3), 3),
    ],
)
def test_tiles_of_every_size(plan, stages, is_few):
    torch.manual_seed(0)
    counts = [15, 40, 64, 65, 129]
    weight = draw_few("q4_0", 5, 384, 256) if is_few else draw(5, 384, 128)
    check(counts, *weight, plan, num_blocks=2, stages=stages)
    check(counts, *weight, plan, 2, Activation.SILU, stages=stages, is_arranged=is_few)


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 11, 40])
def test_every_way_to_share_the_work(num_blocks):
    """Ten slabs of three tiles each, also where there are more blocks than slabs."""
    torch.manual_seed(0)
    check([4, 2, 35], *draw(3, 192, 64), num_blocks=num_blocks)


@pytest.mark.parametrize("is_few", [False, True])
def test_a_row_depends_on_no_other(is_few):
    """Whatever else its expert has, and in tiles of whatever size."""
    torch.manual_seed(0)
    _, weight = draw_few("q4_0", 3, 128, 256) if is_few else draw(3, 128, 128)
    x, counts = torch.randn(40, weight.shape[2]).bfloat16(), [10, 0, 30]

    def results(x, counts, num_blocks):
        found, order = run(x, counts, weight, SMALL, num_blocks)
        return found[order.long()]

    whole = results(x, counts, 3)
    x[[3, 39]] = math.nan
    found = results(x, counts, 2)
    assert bool(found[[3, 39]].isnan().all())
    found[[3, 39]] = whole[[3, 39]]
    assert torch.equal(found, whole)
    assert torch.equal(results(x[11:20], [0, 0, 9], 3), whole[11:20])


def test_large_and_small_scales_are_in_range():
    torch.manual_seed(0)
    stack = stack_experts([FORMATS["q4_0"](out=64, depth=128) for _ in range(2)])
    for factor in (2.0**13, 2.0**-9):
        scaled = replace(stack, scale=stack.scale * factor)
        check([9, 3], scaled.dequantize(), pack_quantized(scaled))


def test_who_takes_which_way():
    """Few rows are in one tile for all experts; many in 16 bits fill Triton's."""
    assert plan_slabs(16, False) is plan_slabs(16, True) is None
    for num_rows in (17, 128, 512):
        assert plan_slabs(num_rows, False) == plan_slabs(num_rows, True) == SOME_SLABS
    assert plan_slabs(513, False) == plan_slabs(1024, False) == MANY_SLABS
    assert plan_slabs(1025, False) is None and plan_slabs(1 << 14, True) == MANY_SLABS


def test_what_it_leaves_to_others(monkeypatch):
    _, weight = draw(2, 128, 64)
    up, down = weight, draw(2, 64, 64)[1]
    x, chosen = torch.zeros(20, 64).bfloat16(), torch.zeros(20, 1).long()

    def is_taken(x=x, gate_up=up, down=down, limits=H200):
        found = mix_slabs(x, gate_up, down, chosen, torch.ones(20, 1), GELU, limits)
        return found is not None

    assert not is_taken()  # on a CPU
    monkeypatch.setattr(slabs, "is_readable", lambda x: x.dtype is torch.bfloat16)
    monkeypatch.setattr(slabs, "gather_rows", lambda *inputs: GatheredRows(*[None] * 6))
    monkeypatch.setattr(slabs, "multiply", lambda *inputs: x)
    monkeypatch.setattr(slabs, "mix_parts", lambda parts, weights: parts)
    assert is_taken()
    assert not is_taken(limits=H200._replace(generation=12))
    assert not is_taken(limits=H200._replace(shared_bytes=64 << 10))
    assert not is_taken(x=x.half()) and not is_taken(x=x[:16])
    assert not is_taken(down=down.half()) and not is_taken(down=down[:, :32])
    assert not is_taken(gate_up=up[:, :80]) and not is_taken(gate_up=up[:, :, :60])
    for name in ("q4_1", "q6_k", "w4a16 16", "w4a16 256", "float32 scales"):
        assert not is_taken(gate_up=draw_few(name, 2, 128, 512)[1]), name
    assert is_taken(down=draw_few("q8_0", 2, 64, 64)[1])
