"""Plans of paged attention: they fit the device, fill it, and cover every key."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashdraft.kernels.interface import PageView
from flashdraft.kernels.triton_plan import (
    MAX_SPLITS,
    AttentionPlan,
    DeviceLimits,
    padded_head_dim,
    plan_attention,
)

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
) -> AttentionPlan:
    """The plan for `num_seqs` sequences of `num_rows` rows and `num_keys` keys each."""
    query = torch.empty(num_seqs * num_rows, heads[0], head_dim, dtype=dtype, device="meta")
    cache = torch.empty(1, 16, heads[1], head_dim, dtype=dtype, device="meta")
    lens = torch.empty(num_seqs, device="meta")
    view = PageView(lens, lens, lens, lens, 16, max_query_len=num_rows, max_key_len=num_keys)
    return plan_attention(query, cache, view, window, limits)


def test_one_long_sequence_is_split_over_the_device() -> None:
    chosen = plan(1, 1, 32768)
    assert HOPPER.num_processors <= 8 * chosen.num_splits <= 8 * MAX_SPLITS


def test_short_contexts_and_full_devices_are_not_split() -> None:
    assert plan(1, 1, 400).num_splits == 1
    assert plan(128, 1, 8192).num_splits == 1
    assert plan(1, 4096, 4096).num_splits == 1
    assert plan(1, 1, 32768, window=256).num_splits == 1


@pytest.mark.parametrize(
    ("num_rows", "num_keys", "window"),
    list(itertools.product((1, 8, 33), (513, 1000, 8191, 262144), (None, 1024, 2048))),
)
def test_splits_cover_every_key(num_rows: int, num_keys: int, window: int | None) -> None:
    chosen = plan(1, num_rows, num_keys, window=window)
    assert 1 < chosen.num_splits <= MAX_SPLITS
    assert chosen.split_keys % chosen.block_n == 0
    for first_row in range(num_rows):  # a tile may begin at any row, and end at the last
        low, high = 0, num_keys
        if window is not None:
            low = max(0, num_keys - num_rows + first_row - window + 1)
        splits = (high - 1) // chosen.split_keys - low // chosen.split_keys + 1
        assert splits <= chosen.num_splits


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
