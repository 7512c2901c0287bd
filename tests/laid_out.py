"""Random slots and trees, for `Kernels.share_rows`, `Kernels.lay_out` and `Kernels.advance`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flashdraft.kernels.layout import DraftedSlots, PassRows, SlotTables
from flashdraft.kernels.nodes import TreeNodes
from flashdraft.kernels.tree import NUM_SOURCES
from tests.tree_rows import ancestors_of, as_signed, as_word, random_tree

NUM_TOKENS = 200
PAGE_SIZE, NUM_PAGES = 8, 20  # of a table: positions end before their product
NEVER = 2**31 - 1


def integers(random: np.random.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.from_numpy(random.integers(low, high, shape))


def make_drafted(seed: int, num_slots: int, num_nodes: int) -> DraftedSlots:
    """Some slots sleep, have no draft, or a limit; many chances are alike."""
    random = np.random.default_rng(seed)
    survival = torch.from_numpy(random.choice([0.005, 0.3, 0.45, 0.9, 1.0], (num_slots, num_nodes)))
    survival = survival.cummin(1).values if seed % 2 else survival  # a chain may be seeded
    survival[integers(random, 0, 15, num_slots, num_nodes).cummin(1).values == 0] = 0.0
    limits = integers(random, -3, num_nodes + 1, num_slots).clamp(min=-1)
    alive = integers(random, 0, 4, num_slots).clamp(max=1)
    return DraftedSlots(survival.to(torch.float64), limits, alive.to(torch.int32))


def make_nodes(seed: int, num_slots: int, num_nodes: int, max_depth: int = 5) -> TreeNodes:
    """Random trees of as many nodes or fewer, whose siblings are different tokens."""
    random, columns = np.random.default_rng(seed), list[list[list[float]]]()
    for slot in range(num_slots):
        count = int(random.integers(0, num_nodes + 1))
        tree = random_tree(1 + count, max_depth, seed + slot) if num_nodes else []
        paths = ancestors_of(tree)[1:]
        tokens = random.permutation(NUM_TOKENS)[:count].tolist()
        parts = [tokens, tree, [as_word(path) for path in paths], [len(p) - 1 for p in paths]]
        for part, nothing in zip(parts, (0, 0, None, 1), strict=True):
            own = [1 | 2 << node for node in range(count, num_nodes)]
            part += [one if nothing is None else nothing for one in own]
        columns.append([*parts, [0.5] * count + [0.0] * (num_nodes - count)])
    filled = torch.empty(num_slots, 5, num_nodes, dtype=torch.int64)
    for slot, one in enumerate(columns):
        for part in range(4):
            filled[slot, part] = torch.tensor([as_signed(int(x)) for x in one[part]])
        filled[slot, 4] = torch.tensor([int(x > 0) for x in one[4]])
    tokens, parents, ancestors, depths, is_node = (one.contiguous() for one in filled.unbind(1))
    confidence = is_node * torch.from_numpy(random.uniform(0.1, 1.0, is_node.shape))
    survival = confidence.clone()
    depths = depths.to(torch.int32)
    sources = (tokens % NUM_SOURCES).to(torch.int32)
    sure = confidence.to(torch.float32)
    return TreeNodes(tokens, parents, ancestors, depths, sure, survival, sources)


def make_slots(seed: int, num_slots: int, num_pools: int) -> SlotTables:
    """Of several lengths; some sleep, some end soon. All but the first slots take no part."""
    random = np.random.default_rng(seed)
    lengths = integers(random, 0, PAGE_SIZE * NUM_PAGES - 64, num_slots)
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
