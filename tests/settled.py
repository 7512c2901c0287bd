"""Caches and random paths through trees, for `Kernels.settle`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flashdraft.kernels.settle import PagedTensor, Settled

NUM_PAGES, PAGE_SIZE, NUM_POOLS = 48, 8, 2


def make_stored(seed: int, device: torch.device | None = None) -> list[PagedTensor]:
    """Keys and values of four layers, of two pools and several sizes; the last page is nobody's."""
    generator = torch.Generator().manual_seed(seed)
    stored = []
    for layer, (heads, dim) in enumerate([(2, 8), (1, 64), (3, 32), (2, 300)]):
        for _ in range(2):
            shape = (NUM_PAGES + 1, PAGE_SIZE, heads, dim)
            dtype = torch.bfloat16 if layer % 2 else torch.float32
            cache = torch.randn(shape, generator=generator).to(dtype).to(device or "cpu")
            stored.append(PagedTensor(cache, layer % NUM_POOLS))
    return stored


def make_moves(seed: int, num_slots: int, max_depth: int) -> Settled:
    """Paths that ascend; some are chains, some have ended at the anchor."""
    random = np.random.default_rng(seed)
    num_nodes = [int(random.integers(0, 4 * max_depth)) for _ in range(num_slots)]
    starts = np.concatenate([[0], np.cumsum([1 + n for n in num_nodes])])
    path = np.zeros((num_slots, 1 + max_depth), dtype=np.int64)
    for slot, count in enumerate(num_nodes):
        length = int(random.integers(0, min(max_depth, count) + 1))
        chosen = 1 + np.sort(random.choice(count, length, replace=False)) if length else []
        path[slot, 1 : 1 + length] = chosen
    # more rows than the caches have places would share them
    places = np.stack(
        [random.permutation(NUM_PAGES * PAGE_SIZE)[: starts[-1]] for _ in range(NUM_POOLS)]
    )
    return Settled(
        torch.from_numpy(path),
        torch.from_numpy(starts[:-1].astype(np.int32)),
        torch.from_numpy(places),
        torch.full((NUM_POOLS,), NUM_PAGES),
    )


def by_hand(stored: Sequence[PagedTensor], moves: Settled) -> list[Tensor]:
    """The caches afterwards, but for the page of nobody."""
    moved = [one.cache.clone() for one in stored]
    for slot, start in enumerate(moves.starts.tolist()):
        for place, row in enumerate(moves.path[slot].tolist()):
            if row <= place:
                continue
            for after, (before, pool) in zip(moved, stored, strict=True):
                source, target = (int(moves.places[pool, start + one]) for one in (row, place))
                after.view(-1, *after.shape[2:])[target] = before.view(-1, *after.shape[2:])[source]
    return moved
