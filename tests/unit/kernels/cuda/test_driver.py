"""The CUDA C++ kernels compiled by NVRTC for cards that are not there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flashdraft.errors import FlashdraftError
from flashdraft.kernels.cuda.attention.few_rows import make_flags as attention_flags
from flashdraft.kernels.cuda.attention.few_rows import plan_few as plan_attention
from flashdraft.kernels.cuda.attention.many_rows import make_flags as many_rows_flags
from flashdraft.kernels.cuda.attention.many_rows import plan_many as plan_many_rows
from flashdraft.kernels.cuda.driver import (
    Kernel,
    can_compile,
    compile_source,
    name_architecture,
)
from flashdraft.kernels.cuda.experts.plan import MANY_SLABS, SOME_SLABS
from flashdraft.kernels.cuda.experts.slabs import ExpertsProduct, count_stages
from flashdraft.kernels.cuda.experts.slabs import make_flags as slabs_flags
from flashdraft.kernels.cuda.quantized.few_rows import make_flags
from flashdraft.kernels.cuda.quantized.few_rows_plan import Product, plan_few
from flashdraft.kernels.cuda.quantized.fp8_rows import TILES, plan_fp8
from flashdraft.kernels.cuda.quantized.fp8_rows import make_flags as fp8_flags
from flashdraft.kernels.cuda.quantized.layout import Code
from flashdraft.kernels.cuda.quantized.many_rows import make_flags as many_flags
from flashdraft.kernels.cuda.quantized.many_rows_plan import SHAPES, make_plan
from flashdraft.kernels.interface import (
    BIDIRECTIONAL,
    CAUSAL,
    BlockMask,
    PagedKeys,
    PageView,
    QKVSpec,
    Trees,
)
from flashdraft.kernels.kinds import Activation
from tests.unit.kernels.cuda.cross_compile import CARDS, count_spilled

INT4, INT8 = (Code.INT4, 32, 4, 1), (Code.INT8, 32, 2, 1)
FP8, FP8_BLOCKS = (Code.FP8, 64, 0, 3), (Code.FP8, 64, 1, 3)
PRODUCTS = {
    "int4": Product(*INT4, 16384, 0, 42),
    "int4, gated": Product(*INT4, 21504, 21504, 42),
    "int4, groups of 128": Product(Code.INT4, 32, 1, 2, 16384, 0, 42),
    "int4, experts up": Product(*INT4, 8 * 704, 704, 22, 1, 704, 22),
    "int4, experts down": Product(*INT4, 2816, 0, 8 * 6, 2, 2816, 6),
    "int4, normed": Product(*INT4, 16384, 0, 42, normed=2),
    "int4, gated, normed": Product(*INT4, 21504, 21504, 42, normed=2),
    "int4, a sum of three, normed": Product(*INT4, 8192, 0, 22, normed=3),
    "int4, gated, normed, routed": Product(*INT4, 2112, 2112, 22, normed=2, num_to_choose=8),
    "int4, experts up, normed": Product(*INT4, 8 * 704, 704, 22, 1, 704, 22, normed=1),
    "int8": Product(*INT8, 16384, 0, 84),
    "int8, gated": Product(*INT8, 21504, 21504, 84),
    "fp8": Product(*FP8, 16384, 0, 42),
    "fp8, gated": Product(*FP8, 21504, 21504, 42),
    "fp8 in blocks": Product(*FP8_BLOCKS, 16384, 0, 42),
}
MAX_SPILLED = 64  # bytes of a thread: what the loop does not use


CASES = [("sm_90", name, 1) for name in PRODUCTS]
CASES += [
    ("sm_90", name, 16) for name in PRODUCTS if not PRODUCTS[name].experts + PRODUCTS[name].normed
]
OTHERS = [(name, 16) for name in ("int4", "int8, gated")]
OTHERS += [(name, 1) for name in ("int4, gated", "int8", "fp8", "int4, experts down")]
OTHERS += [("int4, normed", 1), ("int4, gated", 16), ("int4, gated, normed, routed", 1)]
OTHERS += [("int4, experts up, normed", 1)]
CASES += [(card, *other) for card in CARDS if card != "sm_90" for other in OTHERS]


# rows, heads, key heads, numbers of a head; of Gemma 4 and its drafters
ATTENTIONS = [(1, 32, 16, 256), (5, 32, 16, 256), (16, 32, 16, 256), (1, 32, 4, 512)]
ATTENTIONS += [(16, 32, 4, 512), (5, 8, 8, 256), (1, 32, 8, 128), (16, 32, 8, 128)]


PICTURES = BlockMask(ahead=torch.empty(1, device="meta"))
TREES = BlockMask(trees=Trees(PICTURES.ahead, PICTURES.ahead))
# heads, key heads, numbers of a head, window, mask
MANY_ROWS = {
    "31B, sliding, pictures": (32, 16, 256, 1024, PICTURES),
    "26B, sliding, pictures": (16, 8, 256, 1024, PICTURES),
    "31B, sliding, trees": (32, 16, 256, 1024, TREES),
    "31B, sliding, trees and pictures": (32, 16, 256, 1024, replace(TREES, ahead=PICTURES.ahead)),
    "31B, full, trees": (32, 4, 512, None, TREES),
    "128 numbers, sliding, trees": (32, 8, 128, 1024, TREES),
    "31B, sliding": (32, 16, 256, 1024, CAUSAL),
    "31B, full": (32, 4, 512, None, CAUSAL),
    "drafter": (32, 8, 128, None, BIDIRECTIONAL),
}


# values' code, width, scales of a row in a step and what they are, and the code that is zero
FORMATS = {
    "floats": (),
    "int4": (*INT4, 8),
    "int4, groups of 128": (Code.INT4, 32, 1, 2, 8),
    "int8": (*INT8, 128),
    "fp8": FP8,
    "fp8, narrow": (Code.FP8, 32, 0, 3),
}
PAIRS_OF_SLABS = SOME_SLABS._replace(rows=32, slabs=2, resident=2)


def architecture(card):
    return name_architecture(*divmod(card.capability, 10))


@pytest.mark.parametrize("sizes", ATTENTIONS)
@pytest.mark.parametrize("card", ["sm_90", "sm_120"])
def test_attention_compiles_and_keeps_to_registers(card, sizes):
    _, num_heads, num_kv_heads, head_dim = sizes
    found = CARDS[card]
    plan = plan_attention(*sizes, found.limits)
    if plan is None:  # shared memory does not hold it
        assert card == "sm_120" and head_dim == 512
        return
    norm, is_full = torch.ones(head_dim), head_dim == 512
    spec = QKVSpec(num_heads, num_kv_heads, head_dim, 1e-6, norm, norm, True, is_full)
    for mask in (CAUSAL, TREES) if is_full else (CAUSAL, PICTURES, TREES):
        flags = attention_flags(plan, spec, None if is_full else 1024, mask)
        binary = compile_source("attention/attend_few.cu", flags, architecture(found))
        assert count_spilled(binary) <= MAX_SPILLED


@pytest.mark.parametrize(("card", "name", "num_rows"), CASES)
def test_compiles_and_keeps_to_registers(card, name, num_rows):
    product, found = PRODUCTS[name], CARDS[card]
    plan = plan_few(num_rows, product, found.limits)
    activation = Activation.GELU_TANH if product.up_rows else None
    flags = make_flags(product, plan, activation)
    binary = compile_source("quantized/few_rows.cu", flags, architecture(found))
    assert count_spilled(binary) <= MAX_SPILLED


MANY = [name for name in PRODUCTS if not PRODUCTS[name].experts + PRODUCTS[name].normed]


@pytest.mark.parametrize("name", MANY)
def test_many_rows_compile_and_multiply_side_by_side(name, caplog):
    """In tiles of the sizes that take most registers, and in one that takes few."""
    product, limits = PRODUCTS[name], CARDS["sm_90"].limits
    activation = Activation.GELU_TANH if product.up_rows else None
    for shape in ((32, 1, 12), (128, 2, 12), (256, 1, 12), (128, 1, 16)):
        assert shape in SHAPES
        plan = make_plan(shape, 512, product, limits)
        flags = many_flags(product, plan, activation)
        with caplog.at_level("INFO"):
            binary = compile_source("quantized/many_rows.cu", flags, name_architecture(9, 0))
        assert count_spilled(binary) <= MAX_SPILLED
    assert "serialized" not in caplog.text


@pytest.mark.parametrize("team", [1, 2])
@pytest.mark.parametrize("activation", [None, Activation.GELU_TANH])
@pytest.mark.parametrize("tile", TILES)
def test_rows_in_fp8_compile_and_multiply_side_by_side(tile, activation, team, caplog):
    sizes = tile.rows, 16384, 42, activation is not None
    plan = plan_fp8(*sizes, CARDS["sm_90"].limits, tile, team)
    with caplog.at_level("INFO"):
        flags = fp8_flags(plan, activation)
        binary = compile_source("quantized/fp8_rows.cu", flags, name_architecture(9, 0))
    assert count_spilled(binary) == 0 and "serialized" not in caplog.text


@pytest.mark.parametrize("case", MANY_ROWS)
def test_attention_of_many_rows_compiles_and_multiplies_side_by_side(case, caplog):
    num_heads, num_kv_heads, head_dim, window, mask = MANY_ROWS[case]
    plan = plan_many_rows(512, 17, num_heads, num_kv_heads, head_dim, CARDS["sm_90"].limits)
    query = torch.empty(512, num_heads, head_dim, device="meta")
    cache = torch.empty(1, 16, num_kv_heads, head_dim, device="meta")
    tables = [torch.empty(1, device="meta")] * 4
    keys = PagedKeys(cache, cache, PageView(*tables, 16, 512, 4096), 1.0, window, mask)
    for team in (1, 2) if head_dim == 512 else (1,):
        flags = many_rows_flags(plan._replace(team=team), query, keys)
        with caplog.at_level("INFO"):
            binary = compile_source("attention/attend_many.cu", flags, name_architecture(9, 0))
        assert count_spilled(binary) <= 304  # where parts are joined, and where warps copy
    assert "serialized" not in caplog.text


EXPERTS = [(name, is_gated, SOME_SLABS) for name in FORMATS for is_gated in (True, False)]
EXPERTS += [(name, True, MANY_SLABS) for name in ("floats", "int4", "fp8")]
EXPERTS += [(name, False, PAIRS_OF_SLABS) for name in ("floats", "int4")]


@pytest.mark.parametrize(("name", "is_gated", "plan"), EXPERTS)
def test_experts_compile_and_multiply_side_by_side(name, is_gated, plan, caplog):
    limits = CARDS["sm_90"].limits
    columns, depth = (704, 2816) if is_gated else (2816, 704)
    product = ExpertsProduct(columns, depth, is_gated, *FORMATS[name])
    stages = count_stages(plan, product, limits)
    weights = 64 * plan.slabs * plan.resident * sum(product.row_bytes)
    assert stages * weights >= (96 if plan.rows <= 64 else 48) << 10  # on their way, bytes
    activation = Activation.GELU_TANH if is_gated else None
    flags = slabs_flags(plan, stages, product, activation, is_gated and name != "floats")
    with caplog.at_level("INFO"):
        binary = compile_source("experts/slabs.cu", flags, name_architecture(9, 0))
    assert count_spilled(binary) <= 32
    assert "serialized" not in caplog.text


def test_an_nvrtc_that_does_not_work_is_left_alone(monkeypatch, caplog):
    def fail(*rest):
        raise RuntimeError("CUDA error 222: made by a newer compiler")

    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(Kernel, "load", staticmethod(lambda *rest: None))
    assert can_compile.__wrapped__(device)
    monkeypatch.setattr(Kernel, "load", staticmethod(fail))
    assert not can_compile.__wrapped__(device)
    assert "Triton takes its place: CUDA error 222" in caplog.text
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not can_compile.__wrapped__(device)


def test_an_error_says_what_the_compiler_says():
    with pytest.raises(FlashdraftError, match="(?s)few_rows.cu does not compile.*TILES"):
        compile_source("quantized/few_rows.cu", {}, "sm_90")
