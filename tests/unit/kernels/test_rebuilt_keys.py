"""Keys made of values as they are read, in the torch reference: the very keys that were not stored.

The rebuilt keys are compared through attention, bit for bit. In float32 nothing is rounded between
a norm and its weight, so there is no bound to state but equality.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdraft.kernels.interface import (
    BIDIRECTIONAL,
    CAUSAL,
    BlockMask,
    Heads,
    KeyRebuild,
    PagedKeys,
    PageView,
    QKVSpec,
    RopeTable,
)
from flashdraft.kernels.torch_backend import TorchKernels
from tests.tree_rows import make_trees

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
PAGE_SIZE = 4
HEAD_DIM, NUM_ROTATED = 32, 5
SPEC = QKVSpec(
    num_heads=4,
    num_kv_heads=2,
    head_dim=HEAD_DIM,
    eps=1e-6,
    q_norm=torch.linspace(0.5, 1.5, HEAD_DIM),
    k_norm=torch.linspace(-0.7, 1.9, HEAD_DIM),
    v_norm=True,
    share_kv=True,
)
MASKS = {"causal": CAUSAL, "bidirectional": BIDIRECTIONAL}


def make_rope(num_positions: int = 64) -> RopeTable:
    """The first pairs rotate, faster than any model's; the others stand still."""
    frequencies = torch.zeros(HEAD_DIM // 2)
    frequencies[:NUM_ROTATED] = 0.8 ** torch.arange(NUM_ROTATED)
    angles = torch.arange(float(num_positions)).unsqueeze(1) * frequencies
    return RopeTable(angles.cos(), angles.sin())


def rebuild(kernels: TorchKernels) -> KeyRebuild:
    assert SPEC.k_norm is not None
    return KeyRebuild(SPEC.k_norm.to(kernels.dtype), make_rope(), NUM_ROTATED)


def make_view(lengths: list[tuple[int, int]], seed: int = 0) -> PageView:
    """Sequences of so many earlier keys and so many rows, in pages of no order."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-(context + rows) // PAGE_SIZE) for context, rows in lengths]
    free = torch.randperm(sum(counts), generator=generator).tolist()
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    slots = []
    for s, (context, rows) in enumerate(lengths):
        table[s, : counts[s]] = torch.tensor([free.pop() for _ in range(counts[s])])
        slots += [
            int(table[s, j // PAGE_SIZE]) * PAGE_SIZE + j % PAGE_SIZE
            for j in range(context, context + rows)
        ]
    rows = torch.tensor([0, *(rows for _, rows in lengths)])
    return PageView(
        query_start=rows.cumsum(0).int(),
        context_lens=torch.tensor([context for context, _ in lengths], dtype=torch.int32),
        block_table=table,
        slots=torch.tensor(slots),
        page_size=PAGE_SIZE,
        max_query_len=max(rows for _, rows in lengths),
        max_key_len=max(context + rows for context, rows in lengths),
    )


def run(
    kernels: TorchKernels,
    inputs: list[Tensor],
    steps: list[list[int]],
    masks: BlockMask | list[BlockMask] = CAUSAL,
    *,
    stores_keys: bool,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Rows of every sequence, in steps that say how many of each are next: their outputs.

    There may be a mask for every step.
    """
    if isinstance(masks, BlockMask):
        masks = [masks] * len(steps)
    pages = len(inputs) * (-(-max(map(len, inputs)) // PAGE_SIZE))
    cache = torch.zeros(2, pages, PAGE_SIZE, 2, HEAD_DIM, dtype=dtype or kernels.dtype)
    keys = cache[0] if stores_keys else None
    whole = make_view([(0, len(rows)) for rows in inputs])
    done, outputs = [0] * len(inputs), [[] for _ in inputs]
    for step, mask in zip(steps, masks, strict=True):
        view = make_view(list(zip(done, step, strict=True)))
        places = [done[s] + i for s, count in enumerate(step) for i in range(count)]
        owner = [s for s, count in enumerate(step) for _ in range(count)]
        page = whole.block_table[owner, [place // PAGE_SIZE for place in places]].long()
        slots = page * PAGE_SIZE + torch.tensor(places) % PAGE_SIZE
        qkv = torch.stack([inputs[s][place] for s, place in zip(owner, places, strict=True)])
        query = kernels.prepare_qkv(
            qkv.to(kernels.dtype),
            Heads(SPEC, make_rope(), positions_of(places, mask)),
            keys,
            cache[1],
            slots,
        )
        view = replace(view, block_table=whole.block_table, slots=slots)
        rule: dict[str, Any] = {"scale": 1.0, "window": None, "mask": mask}
        found = kernels.attention(
            query,
            PagedKeys(
                keys, cache[1], view, rebuild=None if stores_keys else rebuild(kernels), **rule
            ),
        )
        for s, row in zip(owner, found, strict=True):
            outputs[s].append(row)
        done = [before + count for before, count in zip(done, step, strict=True)]
    if not stores_keys:
        assert not cache[0].any(), "keys were written"
    return [torch.stack(rows) for rows in outputs]


def positions_of(places: list[int], mask: BlockMask) -> Tensor:
    """Where rows stand; a tree's are those of one sequence."""
    return torch.tensor(places) if mask.trees is None else places[0] + mask.trees.depths.long()


def make_inputs(*lengths: int) -> list[Tensor]:
    torch.manual_seed(7)
    return [torch.randn(length, SPEC.width) * 2 for length in lengths]


STEPS = {
    "one prompt": ((13,), [[13]]),
    "chunks": ((13,), [[5], [4], [4]]),
    "token by token": ((6,), [[1]] * 6),
    "several sequences": ((11, 4, 9), [[6, 1, 3], [1, 1, 1], [4, 2, 5]]),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
def test_float32_is_the_same_to_the_bit(name: str, mask: str) -> None:
    lengths, steps = STEPS[name]
    inputs, kernels = make_inputs(*lengths), TorchKernels(CPU, torch.float32)
    stored, rebuilt = (
        run(kernels, inputs, steps, MASKS[mask], stores_keys=stores) for stores in (True, False)
    )
    assert all(torch.equal(a, b) for a, b in zip(stored, rebuilt, strict=True))


def test_a_tree_s_keys_stand_where_their_rows_do() -> None:
    inputs, kernels = make_inputs(9), TorchKernels(CPU, torch.float32)
    tree = BlockMask(trees=make_trees([4], [[0, 0, 2]]))
    stored, rebuilt = (
        run(kernels, inputs, [[5], [4]], [CAUSAL, tree], stores_keys=stores)
        for stores in (True, False)
    )
    assert torch.equal(stored[0], rebuilt[0])
    in_order = run(kernels, inputs, [[5], [4]], [CAUSAL, CAUSAL], stores_keys=False)
    assert not torch.equal(in_order[0][-2:], rebuilt[0][-2:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_differs_by_the_roundings_of_a_value(dtype: torch.dtype) -> None:
    """One rounding more, of the value before its weight: within two units in the last place."""
    inputs, kernels = make_inputs(24), TorchKernels(CPU, dtype)
    stored, rebuilt = (
        run(kernels, inputs, [[24]], stores_keys=stores)[0].float() for stores in (True, False)
    )
    unit = torch.finfo(dtype).eps
    assert not torch.equal(stored, rebuilt)
    assert (stored - rebuilt).norm() <= 2 * unit * stored.norm()


def test_fp8_keys_are_made_of_the_rounded_values() -> None:
    """As if the rounded values had been given, and no key been rounded to 8 bits."""
    inputs, kernels = make_inputs(10), TorchKernels(CPU, torch.float32)
    found = run(kernels, inputs, [[10]], stores_keys=False, dtype=FP8)[0]
    view = make_view([(0, 10)])
    rope, rows = make_rope(), torch.arange(10)
    values = torch.zeros(2, 3, PAGE_SIZE, 2, HEAD_DIM)
    query = kernels.prepare_qkv(
        inputs[0], Heads(SPEC, rope, rows), values[0], values[1], view.slots
    )
    rounded = values[1].to(FP8).float()
    rule: dict[str, Any] = {"scale": 1.0, "window": None, "mask": CAUSAL}
    expected = kernels.attention(
        query, PagedKeys(None, rounded, view, rebuild=rebuild(kernels), **rule)
    )
    assert torch.equal(found, expected)
    both = run(kernels, inputs, [[10]], stores_keys=True, dtype=FP8)[0]
    assert not torch.equal(found, both), "a cache with both rounds the keys as well"


def test_rows_do_not_depend_on_their_neighbours_or_chunks() -> None:
    inputs = make_inputs(11, 4, 9)
    for dtype, stored in ((torch.float32, None), (torch.bfloat16, None), (torch.float32, FP8)):
        kernels = TorchKernels(CPU, dtype)
        together = run(
            kernels, inputs, [[6, 1, 3], [1, 1, 1], [4, 2, 5]], stores_keys=False, dtype=stored
        )
        for rows, outputs in zip(inputs, together, strict=True):
            steps = [[1]] * len(rows)
            alone = run(kernels, [rows], steps, stores_keys=False, dtype=stored)[0]
            assert torch.equal(alone, outputs)


def test_all_that_is_written_is_the_value_and_the_query_is_as_ever() -> None:
    kernels, (rows,) = TorchKernels(CPU, torch.float32), make_inputs(5)
    caches, places = torch.zeros(3, 2, PAGE_SIZE, 2, HEAD_DIM), torch.arange(5)
    with_keys = kernels.prepare_qkv(rows, Heads(SPEC, make_rope(), places), *caches[:2], places)
    without = kernels.prepare_qkv(rows, Heads(SPEC, make_rope(), places), None, caches[2], places)
    assert torch.equal(with_keys, without) and torch.equal(caches[1], caches[2])
