"""The plans of an H200, which were measured there: other cards' needs must not change them.

test_plan.py has the linears of few rows; here is everything else that a plan decides.
"""

from __future__ import annotations

import pytest
import torch

from flashdraft.kernels.cuda.experts.plan import (
    ALL_ROWS,
    FEW_ROWS,
    FLOAT32,
    MANY_ROWS,
    ONE_ROW,
    SOME_ROWS,
    ExpertsPlan,
    TilePlan,
    plan_exact_experts,
    plan_experts,
)
from flashdraft.kernels.cuda.plan import (
    DeviceLimits,
    plan_attention,
    plan_exact_attention,
    plan_exact_linear,
    plan_linear,
)
from flashdraft.kernels.interface import CAUSAL, PagedKeys, PageView

H200 = DeviceLimits(num_processors=132, shared_bytes=227 * 1024)
# head size: heads, key heads, window
HEADS = {64: (9, 3, None), 128: (64, 8, 2048), 256: (32, 16, 1024), 512: (32, 4, None)}
# (itemsize, head size, rows; None: exact): block_m, block_n, warps, stages, splits, their keys
ATTENTION: dict[tuple[int, int, int | None], tuple[int, int, int, int, int, int]] = {
    (2, 64, 1): (16, 64, 4, 3, 64, 64),
    (2, 64, 16): (64, 64, 4, 3, 64, 64),
    (2, 64, 64): (64, 64, 4, 3, 58, 64),
    (2, 64, 1024): (128, 64, 8, 3, 3, 64),
    (2, 64, None): (64, 64, 4, 3, 2, 2048),
    (2, 128, 1): (16, 64, 4, 3, 32, 64),
    (2, 128, 16): (64, 64, 4, 3, 16, 64),
    (2, 128, 64): (128, 64, 8, 3, 4, 64),
    (2, 128, 1024): (128, 64, 8, 3, 1, 0),
    (2, 128, None): (64, 64, 4, 3, 10, 256),
    (2, 256, 1): (16, 64, 4, 3, 16, 64),
    (2, 256, 16): (64, 32, 4, 3, 16, 64),
    (2, 256, 64): (64, 32, 4, 3, 8, 64),
    (2, 256, 1024): (128, 64, 8, 3, 1, 0),
    (2, 256, None): (64, 32, 4, 3, 6, 256),
    (2, 512, 1): (16, 32, 4, 3, 64, 64),
    (2, 512, 16): (64, 32, 8, 3, 16, 64),
    (2, 512, 64): (64, 32, 8, 3, 4, 64),
    (2, 512, 1024): (64, 32, 8, 3, 1, 0),
    (2, 512, None): (64, 32, 8, 3, 2, 2048),
    (4, 64, 1): (16, 32, 4, 1, 64, 64),
    (4, 64, 16): (16, 32, 4, 1, 58, 64),
    (4, 128, 64): (16, 32, 4, 1, 2, 64),
    (4, 256, 1024): (16, 16, 4, 1, 1, 0),
    (4, 512, None): (16, 16, 4, 1, 2, 2048),
}
# (columns, depth): splits of the exact linear in two bytes and in four
EXACT_LINEARS = {
    (8192, 2816): (3, 4),
    (9216, 2816): (3, 3),
    (2816, 4096): (8, 10),
    (2816, 2112): (5, 6),
    (128, 2816): (5, 8),
    (18432, 5376): (5, 7),
    (43008, 5376): (1, 1),
    (262144, 5376): (1, 1),
    (5376, 21504): (9, 6),
    (960, 576): (3, 3),
    (576, 1536): (4, 6),
}
EXPERTS = {1: ONE_ROW, 2: ALL_ROWS, 16: ALL_ROWS, 64: FEW_ROWS, 1024: SOME_ROWS, 4096: MANY_ROWS}
EXPERT_TILES = {
    ONE_ROW: ((16, 256, 4, 3, 1), (4, 128, 4, 3, 1), 0, 0),
    ALL_ROWS: ((32, 128, 4, 4, 3), (32, 64, 4, 15, 1), 16, 4),
    FEW_ROWS: ((16, 128, 4, 5, 4), (64, 64, 4, 5, 5), 16, 0),
    SOME_ROWS: ((32, 128, 4, 3, 2), (64, 64, 4, 4, 3), 64, 0),
    MANY_ROWS: ((64, 64, 8, 4, 1), (128, 64, 8, 4, 1), 128, 0),
    FLOAT32: ((16, 32, 4, 2, 4), (32, 32, 4, 2, 4), 16, 0),
}


@pytest.mark.parametrize(("itemsize", "head_dim", "num_rows"), ATTENTION)
def test_attention(itemsize: int, head_dim: int, num_rows: int | None) -> None:
    heads, kv_heads, window = HEADS[head_dim]
    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    rows = num_rows or 16
    query = torch.empty(rows, heads, head_dim, dtype=dtype, device="meta")
    cache = torch.empty(1, 16, kv_heads, head_dim, dtype=dtype, device="meta")
    lens = torch.empty(1, device="meta")
    view = PageView(lens, lens, lens, lens, 16, max_query_len=rows, max_key_len=4096)
    make = plan_exact_attention if num_rows is None else plan_attention
    plan = make(query, PagedKeys(cache, cache, view, 1.0, window, CAUSAL), H200)
    assert plan[:-1] == ATTENTION[itemsize, head_dim, num_rows]
    assert plan.spread == (num_rows is not None and plan.num_splits > 1)


@pytest.mark.parametrize("shape", EXACT_LINEARS)
def test_exact_linears(shape: tuple[int, int]) -> None:
    halves, floats = EXACT_LINEARS[shape]
    block_n = 64 if shape[0] <= 8192 else 128
    assert plan_exact_linear(*shape, 2, H200) == (64, block_n, 64, 4, 4, halves, False)
    assert plan_exact_linear(*shape, 4, H200) == (16, 64, 32, 4, 2, floats, False)
    assert plan_linear(64, *shape, 2, H200) is None


@pytest.mark.parametrize("num_rows", EXPERTS)
def test_experts(num_rows: int) -> None:
    assert plan_experts(num_rows, 8, 128, 2) == EXPERTS[num_rows]
    assert plan_experts(max(2, num_rows), 8, 128, 4) == FLOAT32
    assert plan_exact_experts(2) == FEW_ROWS


@pytest.mark.parametrize("plan", EXPERT_TILES)
def test_tiles_of_experts(plan: ExpertsPlan) -> None:
    up, down, block_m, splits = EXPERT_TILES[plan]
    assert plan == ExpertsPlan(TilePlan(*up), TilePlan(*down), block_m, splits)
