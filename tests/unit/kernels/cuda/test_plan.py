"""Plans of attention and linears: they fit the device, fill it, and cover every key."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from flashdraft.kernels.cuda.plan import (
    MAX_SPLITS,
    MIN_SPLIT_KEYS,
    AttentionPlan,
    DeviceLimits,
    LinearPlan,
    padded_head_dim,
    plan_attention,
    plan_exact_attention,
    plan_exact_linear,
    plan_linear,
)
from flashdraft.kernels.interface import CAUSAL, PagedKeys, PageView

HOPPER = DeviceLimits(num_processors=132, shared_bytes=227 * 1024)
CONSUMER = DeviceLimits(num_processors=128, shared_bytes=99 * 1024)


def plan(
    num_seqs: int,
    num_rows: int,
    num_keys: int,
    head_dim: int = 128,
    heads: tuple[int, int] = (32, 8),
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    limits: DeviceLimits = HOPPER,
    make: Callable[..., AttentionPlan] = plan_attention,
) -> AttentionPlan:
    """The plan for `num_seqs` sequences of `num_rows` rows and `num_keys` keys each."""
    query = torch.empty(num_seqs * num_rows, heads[0], head_dim, dtype=dtype, device="meta")
    cache = torch.empty(1, 16, heads[1], head_dim, dtype=dtype, device="meta")
    lens = torch.empty(num_seqs, device="meta")
    view = PageView(lens, lens, lens, lens, 16, max_query_len=num_rows, max_key_len=num_keys)
    return make(query, PagedKeys(cache, cache, view, 1.0, window, CAUSAL), limits)


def test_one_long_sequence_is_split_over_the_device() -> None:
    chosen = plan(1, 1, 32768)
    assert HOPPER.num_processors <= 8 * chosen.num_splits <= 8 * MAX_SPLITS


def test_short_contexts_and_full_devices_are_not_split() -> None:
    assert plan(1, 1, 200).num_splits == 1
    assert plan(128, 1, 8192).num_splits == 1
    assert plan(1, 4096, 4096).num_splits == 1
    assert plan(1, 1, 32768, window=64).num_splits == 1


def test_a_block_over_a_short_context_occupies_the_device() -> None:
    """Verifying 16 tokens over 1000 keys, in Gemma 4's layers: more than a few programs work."""
    sliding = plan(1, 16, 1000, head_dim=256, heads=(32, 16), window=1024)
    full = plan(1, 16, 1000, head_dim=512, heads=(32, 4))
    assert 16 * sliding.num_splits >= HOPPER.num_processors
    assert 4 * 2 * full.num_splits >= 100


@pytest.mark.parametrize("window", [None, 1024, 2048])
@pytest.mark.parametrize("num_rows", [1, 8, 33])
def test_splits_grow_with_the_sequence(num_rows: int, window: int | None) -> None:
    """The plan of a long bound serves short sequences too: splits have a least length, no most."""
    chosen = plan(1, num_rows, 262144, window=window)
    assert chosen.spread
    assert 1 < chosen.num_splits <= MAX_SPLITS
    assert chosen.split_keys % chosen.block_n == 0
    assert chosen.split_keys >= MIN_SPLIT_KEYS


@pytest.mark.parametrize(
    ("num_rows", "num_keys", "window"),
    list(itertools.product((1, 8, 33), (1, 513, 8191, 262144), (None, 1024, 2048))),
)
def test_exact_splits_cover_every_key(num_rows: int, num_keys: int, window: int | None) -> None:
    num_rows = min(num_rows, num_keys)
    chosen = plan(1, num_rows, num_keys, window=window, make=plan_exact_attention)
    assert not chosen.spread and chosen.split_keys % chosen.block_n == 0
    for first_row in range(num_rows):  # a tile may begin at any row, and end at the last
        low, high = 0, num_keys
        if window is not None:
            low = max(0, num_keys - num_rows + first_row - window + 1)
        splits = (high - 1) // chosen.split_keys - low // chosen.split_keys + 1
        assert splits <= chosen.num_splits


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("window", [None, 1024])
def test_exact_plans_differ_in_the_number_of_splits_alone(
    head_dim: int, window: int | None
) -> None:
    plans = {
        plan(*sizes, head_dim=head_dim, window=window, make=plan_exact_attention)._replace(
            num_splits=0
        )
        for sizes in ((1, 1, 1), (1, 16, 5000), (32, 1, 100000), (3, 2048, 4096))
    }
    assert len(plans) == 1


# The fastest of many on an H200: columns and depth, block_n, block_k, warps, stages, splits, swap.
MEASURED = {
    (8192, 2816): (64, 256, 4, 3, 1, True),  # 26B: queries, keys and values
    (9216, 2816): (64, 128, 4, 4, 1, True),  # the same of full layers
    (2816, 4096): (64, 128, 4, 4, 3, True),  # what comes after attention
    (2816, 8192): (64, 256, 4, 3, 3, True),
    (4224, 2816): (32, 128, 4, 5, 1, False),  # gate and up
    (2816, 2112): (64, 64, 4, 6, 3, False),  # down
    (128, 2816): (32, 128, 4, 5, 11, False),  # the router
    (16384, 5376): (64, 128, 4, 4, 1, True),  # 31B
    (18432, 5376): (128, 64, 4, 5, 1, True),
    (5376, 8192): (64, 128, 4, 4, 3, True),
    (5376, 16384): (64, 128, 4, 4, 3, True),
    (43008, 5376): (64, 128, 4, 4, 1, True),
    (5376, 21504): (64, 128, 4, 4, 3, True),
}


@pytest.mark.parametrize("shape", MEASURED)
@pytest.mark.parametrize("num_rows", [1, 8, 16, 17, 32])
def test_linear_plans_are_the_measured_ones(shape: tuple[int, int], num_rows: int) -> None:
    chosen = plan_linear(num_rows, *shape, 2, HOPPER)
    assert chosen == (16 if num_rows <= 16 else 32, *MEASURED[shape])


@pytest.mark.parametrize("limits", [HOPPER, CONSUMER])
@pytest.mark.parametrize("num_rows", [1, 16, 32])
def test_linear_plans_fill_the_device_once(num_rows: int, limits: DeviceLimits) -> None:
    columns = (128, 1024, 2816, 3000, 4096, 5376, 6144, 10000, 12288, 262144)
    for shape in itertools.product(columns, (2048, 2112, 2880, 4096, 5376, 21504)):
        chosen = plan_linear(num_rows, *shape, 2, limits)
        assert chosen is not None
        stage = (chosen.block_m + chosen.block_n) * chosen.block_k * 2
        assert stage * chosen.num_stages <= limits.shared_bytes
        check_parts(chosen, shape, limits)


def check_parts(chosen: LinearPlan, shape: tuple[int, int], limits: DeviceLimits) -> None:
    """No part of the depth is empty, and the parts of all tiles run at the same time."""
    num_steps = -(-shape[1] // chosen.block_k)
    num_programs = -(-shape[0] // chosen.block_n) * chosen.num_splits
    assert 1 <= chosen.num_splits <= num_steps
    assert -(-num_steps // chosen.num_splits) * (chosen.num_splits - 1) < num_steps, "an empty part"
    if chosen.num_splits > 1:
        assert num_programs <= 4 * limits.num_processors
    if shape[0] > 1024:
        assert num_programs >= 0.6 * limits.num_processors


def test_small_weights_and_many_rows_are_left_to_torch() -> None:
    assert plan_linear(16, 5376, 1024, 2, HOPPER) is None
    assert plan_linear(33, 5376, 8192, 2, HOPPER) is None
    assert plan_linear(0, 5376, 8192, 2, HOPPER) is None
    assert plan_linear(16, 5376, 8192, 4, HOPPER) is None, "no tensor cores for float32"


@pytest.mark.parametrize("limits", [HOPPER, CONSUMER])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_linear_tiles_fit_shared_memory(limits: DeviceLimits, itemsize: int) -> None:
    shapes = (5376, 8192), (43008, 9), (262144, 5376)
    plans = [plan_exact_linear(*shape, itemsize, limits) for shape in shapes]
    plans += [p for m in (1, 64) if (p := plan_linear(m, 5376, 8192, itemsize, limits))]
    for chosen in plans:
        stage = (chosen.block_m + chosen.block_n) * chosen.block_k * itemsize
        assert stage * chosen.num_stages <= limits.shared_bytes
    assert plans[2].num_splits == 1, "the head's depth is never cut"


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("limits", [HOPPER, CONSUMER])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_fit_shared_memory(head_dim: int, limits: DeviceLimits, dtype: torch.dtype) -> None:
    for num_rows in (1, 16, 1024):
        chosen = plan(1, num_rows, 4096, head_dim=head_dim, dtype=dtype, limits=limits)
        num_bytes = (chosen.block_m + 2 * chosen.block_n) * head_dim * dtype.itemsize
        assert num_bytes <= limits.shared_bytes
        assert chosen.block_m >= 16 and chosen.block_n >= 16


def test_verify_blocks_use_wide_tiles() -> None:
    assert plan(1, 1, 100).block_m == 16
    assert plan(1, 16, 100).block_m == 64
    assert plan(1, 16, 100, head_dim=512, limits=CONSUMER).block_m == 16


def test_empty_batches_have_a_plan() -> None:
    assert plan(0, 0, 0).num_splits == 1


def test_padded_head_dim() -> None:
    assert [padded_head_dim(n) for n in (1, 8, 16, 20, 64, 96, 512)] == [
        16,
        16,
        16,
        32,
        64,
        128,
        512,
    ]
