"""Random slots and drafts, for `Kernels.share_rows` and `Kernels.lay_out`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flashdraft.engine.policy.verify import BUCKET_EDGES
from flashdraft.kernels.layout import DraftedSlots, PassRows, SlotTables

NUM_SOURCES = 2
PAGE_SIZE, NUM_PAGES = 8, 12  # of a table: positions end before their product
NEVER = 2**31 - 1


def integers(random: np.random.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.from_numpy(random.integers(low, high, shape))


def make_drafted(seed: int, num_slots: int, width: int) -> DraftedSlots:
    """Some slots sleep, have no draft, or a limit; many confidences are alike."""
    random = np.random.default_rng(seed)
    confidence = torch.from_numpy(random.choice([0.005, 0.3, 0.45, 0.9, 1.0], (num_slots, width)))
    confidence[integers(random, 0, 15, num_slots, width) == 0] = 0.0
    chances = torch.from_numpy(random.random((NUM_SOURCES, len(BUCKET_EDGES) + 1)))
    limits = integers(random, -3, width + 1, num_slots).clamp(min=-1)
    alive = integers(random, 0, 4, num_slots).clamp(max=1)
    return DraftedSlots(
        confidence.to(torch.float32),
        integers(random, 0, NUM_SOURCES, num_slots),
        chances.to(torch.float32),
        torch.tensor(BUCKET_EDGES),
        limits,
        alive.to(torch.int32),
    )


def make_slots(seed: int, num_slots: int, num_pools: int) -> SlotTables:
    """Of several lengths; some sleep, some end soon. All but the first slots take no part."""
    random = np.random.default_rng(seed)
    lengths = integers(random, 0, PAGE_SIZE * NUM_PAGES - 16, num_slots)
    ends = lengths + integers(random, 1, 20, num_slots)
    ends[integers(random, 0, 2, num_slots) == 0] = NEVER
    return SlotTables(
        integers(random, 0, 99, num_slots),
        lengths.to(torch.int32),
        integers(random, 0, 4, num_slots).clamp(max=1).to(torch.int32),
        ends,
        integers(random, 0, 500, num_pools, num_slots, NUM_PAGES).to(torch.int32),
        integers(random, 500, 600, num_pools),
        PAGE_SIZE,
    )


def make_rows(num_rows: int, num_slots: int, num_pools: int, device: torch.device) -> PassRows:
    """Rows as another step may have left them."""
    rows = PassRows.allocate(num_rows, num_slots, num_pools, device)
    for one in rows:
        one.fill_(7)
    return rows
