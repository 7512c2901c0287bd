"""cuda/attention/attend_few.cu, emulated, against torch's prepare_qkv and attention."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from flashdraft.kernels.cuda.plan import DeviceLimits
from flashdraft.kernels.interface import (
    BIDIRECTIONAL,
    CAUSAL,
    BlockMask,
    PageView,
    QKVSpec,
    RopeTable,
    Trees,
)
from flashdraft.kernels.torch_backend import TorchKernels
from tests.picture_rows import see_pictures
from tests.tree_rows import Tree, make_trees, random_tree
from tests.unit.kernels.cuda.emulated import build

pytest.importorskip("triton", reason="Triton is not installed")

from flashdraft.kernels.cuda.attention.few_rows import (
    MAX_MEETINGS,
    SPLITS,
    make_flags,
    plan_few,
    prepare,
)
from flashdraft.kernels.interface import Heads, PagedKeys

HOPPER = DeviceLimits(132, 227 * 1024, generation=9)
PAGE = 16
FULL = {"v_norm": True, "share_kv": True}


def see_tree(num_rows: int, tree: Tree | None) -> BlockMask:
    return BlockMask(trees=make_trees([num_rows], [tree]))


A_PICTURE = see_pictures([16], [(0, 2, 12)])
# heads, key heads, head size, rows, keys before them, window, mask, of the spec
CASES = {
    "one row, sliding": (4, 2, 256, 1, 300, 1024, CAUSAL, {"v_norm": True}),
    "one row, full": (8, 1, 512, 1, 100, None, CAUSAL, FULL),
    "one row, first": (4, 2, 128, 1, 0, None, CAUSAL, {}),
    "block, sliding": (4, 2, 256, 16, 200, 64, CAUSAL, {"v_norm": True}),
    "block, full": (8, 1, 512, 16, 70, None, CAUSAL, FULL),
    "block, both ways": (4, 1, 128, 16, 600, None, BIDIRECTIONAL, {}),
    "block, both ways, sliding": (4, 1, 128, 16, 90, 40, BIDIRECTIONAL, {}),
    "odd group": (9, 3, 128, 7, 33, None, CAUSAL, {"q_norm": None, "k_norm": None}),
    "several rounds": (2, 1, 128, 3, 1500, None, CAUSAL, {}),
    "prompt": (2, 2, 256, 5, 0, 1024, CAUSAL, {"v_norm": True}),
    "a picture": (4, 2, 256, 16, 60, 8, A_PICTURE, {"v_norm": True}),
    "pictures, no window": (
        *(9, 3, 128, 13, 20, None),
        *(see_pictures([13], [(0, 0, 5), (0, 5, 8)]), {"q_norm": None}),
    ),
    "a tree": (4, 2, 256, 16, 60, 8, see_tree(16, random_tree(16, 6, 1)), {"v_norm": True}),
    "a tree, several tiles": (16, 1, 128, 16, 90, 5, see_tree(16, random_tree(16, 4, 2)), {}),
    "a flat tree": (4, 2, 128, 15, 33, 3, see_tree(15, [0] * 14), {}),
    "a tree, full": (8, 1, 512, 16, 70, None, see_tree(16, random_tree(16, 5, 3)), FULL),
    "a tree, odd group": (9, 3, 128, 13, 20, None, see_tree(13, random_tree(13, 3, 4)), {}),
    "a tree alone": (4, 2, 128, 9, 0, 1024, see_tree(9, random_tree(9, 4, 5)), {}),
    "a picture beside trees": (
        *(4, 2, 256, 16, 60, 8),
        *(replace(A_PICTURE, trees=make_trees([16], [None])), {"v_norm": True}),
    ),
    "more pages than threads": (4, 2, 256, 1, 9000, 1024, CAUSAL, {"v_norm": True}),
    "block, more pages than threads": (4, 2, 256, 16, 9001, 1024, CAUSAL, {"v_norm": True}),
}


def make_inputs(heads, kv_heads, dim, num_rows, context, num_spare, of_spec):
    """What `Kernels.attend` takes, with spare rows after those of the sequence."""
    torch.manual_seed(num_rows + context)
    num_keys, total = context + num_rows, num_rows + num_spare
    num_pages = -(-num_keys // PAGE) + 2
    norm = {"q_norm": 1 + torch.rand(dim).bfloat16(), "k_norm": 1 + torch.rand(dim).bfloat16()}
    spec = QKVSpec(heads, kv_heads, dim, 1e-6, **(norm | of_spec))
    angles = torch.rand(num_keys + 4, dim // 2) * 6
    table = torch.randperm(num_pages)[: num_pages - 1].int()
    places = torch.arange(context, num_keys)
    slots = table[places // PAGE].long() * PAGE + places % PAGE
    spare_slots = torch.full((num_spare,), num_pages * PAGE)
    view = PageView(
        query_start=torch.tensor([0, num_rows], dtype=torch.int32),
        context_lens=torch.tensor([context], dtype=torch.int32),
        block_table=table[None],
        slots=torch.cat([slots, spare_slots]),
        page_size=PAGE,
        max_query_len=num_rows,
        max_key_len=num_keys,
    )
    qkv = torch.randn(total, spec.width).bfloat16()
    positions = torch.cat([places + 3, torch.zeros(num_spare, dtype=torch.int64)])
    caches = [torch.randn(num_pages + 1, PAGE, kv_heads, dim).bfloat16() for _ in range(2)]
    return qkv, spec, RopeTable(angles.cos(), angles.sin()), positions, *caches, view


def expect(inputs, scale, window, mask):
    qkv, spec, rope, positions, keys, values, view = inputs
    kernels = TorchKernels(torch.device("cpu"), torch.bfloat16)
    query = kernels.prepare_qkv(qkv, Heads(spec, rope, positions), keys, values, view.slots)
    rows = int(view.query_start[1])
    return kernels.attention(
        query[:rows], PagedKeys(keys, values, view, scale=scale, window=window, mask=mask)
    )


def attend(inputs, scale, window, mask, meetings):
    plan = plan_few(
        inputs[0].shape[0],
        inputs[1].num_heads,
        inputs[1].num_kv_heads,
        inputs[1].head_dim,
        HOPPER,
    )
    assert plan is not None
    keys = PagedKeys(*inputs[4:], scale=scale, window=window, mask=mask)
    work, output, (_, parts, states) = prepare(inputs[0], Heads(*inputs[1:4]), keys, meetings, plan)
    for unwritten in (output, parts, states):
        unwritten.fill_(torch.nan)
    library = build("attend_few", *make_flags(plan, inputs[1], window, mask).items())
    assert library.shared_bytes() == plan.shared_bytes
    assert library.argument_bytes() == ctypes.sizeof(work)
    library.run(ctypes.byref(work), plan.num_blocks)
    return output[: int(inputs[-1].query_start[1])]


@pytest.mark.parametrize("case", CASES)
def test_it_prepares_writes_and_attends_like_torch(case):
    heads, kv_heads, dim, num_rows, context, window, mask, of_spec = CASES[case]
    inputs = make_inputs(
        heads, kv_heads, dim, num_rows, context, 2 if num_rows < 15 and num_rows > 1 else 0, of_spec
    )
    theirs = (*inputs[:4], inputs[4].clone(), inputs[5].clone(), inputs[6])
    scale, meetings = dim**-0.5, torch.zeros(MAX_MEETINGS, dtype=torch.int32)
    expected = expect(theirs, scale, window, mask)
    for call in (1, 2):  # what the first one leaves behind does not disturb the second
        found = attend(inputs, scale, window, mask, meetings)
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        assert error < 0.006
        assert int(meetings.max()) == call * SPLITS
    for ours, other in zip(inputs[4:6], theirs[4:6], strict=True):
        own = ours.flatten(0, 1)[inputs[6].slots[:num_rows]].float()
        wanted = other.flatten(0, 1)[inputs[6].slots[:num_rows]].float()
        assert (own - wanted).norm() <= 0.004 * wanted.norm()
        ours.flatten(0, 1)[inputs[6].slots[:num_rows]] = 0
        other.flatten(0, 1)[inputs[6].slots] = 0
        if len(inputs[6].slots) == num_rows:
            assert torch.equal(ours, other), "another key or value has changed"


def test_a_sum_of_meetings_may_run_over():
    case = CASES["one row, first"]
    inputs = make_inputs(*case[:5], 0, case[7])
    expected = expect(inputs, 0.1, None, CAUSAL)
    meetings = torch.full((MAX_MEETINGS,), -SPLITS, dtype=torch.int32)
    found = attend(inputs, 0.1, None, CAUSAL, meetings)
    assert (found.float() - expected.float()).norm() < 0.006 * expected.float().norm()
    assert int(meetings[0]) == 0


@pytest.mark.parametrize("case", ["one row, sliding", "block, sliding", "odd group"])
def test_without_pictures_and_trees_bits_are_as_ever(case):
    *sizes, window, _, of_spec = CASES[case]
    inputs, meetings = make_inputs(*sizes, 0, of_spec), torch.zeros(MAX_MEETINGS, dtype=torch.int32)
    one, other, another = (
        attend(inputs, 0.1, window, mask, meetings)
        for mask in (CAUSAL, see_pictures([sizes[3]], []), see_tree(sizes[3], None))
    )
    assert torch.equal(one, other) and torch.equal(one, another)


def test_a_picture_is_seen():
    *sizes, window, mask, of_spec = CASES["a picture"]
    inputs, meetings = make_inputs(*sizes, 0, of_spec), torch.zeros(MAX_MEETINGS, dtype=torch.int32)
    found = attend(inputs, 0.1, window, mask, meetings).float()
    wrong = expect(inputs, 0.1, window, CAUSAL).float()
    assert (found - wrong).norm() > 0.1 * wrong.norm()


@pytest.mark.parametrize("case", ["a tree", "a tree, several tiles", "a flat tree"])
def test_rows_of_a_tree_see_their_ancestors_alone(case):
    """Pages behind the first row's window are stale, and positions are those of depths."""
    *sizes, window, mask, of_spec = CASES[case]
    inputs, meetings = make_inputs(*sizes, 0, of_spec), torch.zeros(MAX_MEETINGS, dtype=torch.int32)
    num_rows, context, trees = *sizes[3:], mask.trees
    positions, *caches, view = inputs[3:]
    positions.copy_(context + trees.depths)
    for cache in caches:
        cache[-1] = torch.nan
    view.block_table[0, : (context - window + 1) // PAGE] = len(caches[0]) - 1
    found = attend(inputs, 0.1, window, mask, meetings).float()

    def differ_from(ancestors, depths):
        rule = BlockMask(trees=Trees(ancestors, depths))
        expected = expect(inputs, 0.1, window, rule).float()
        return float((found - expected).norm() / expected.norm())

    by_row = torch.arange(num_rows, dtype=torch.int32)
    assert differ_from(trees.ancestors, trees.depths) < 0.006
    assert differ_from(trees.ancestors, by_row) > 0.1
    assert differ_from(torch.full_like(trees.ancestors, -1), trees.depths) > 0.1


@pytest.mark.parametrize(
    ("num_rows", "heads", "kv_heads", "dim"),
    [(1, 32, 16, 256), (16, 32, 16, 256), (1, 32, 4, 512), (16, 32, 4, 512), (16, 32, 8, 128)],
)
def test_all_blocks_of_gemma_4_run_at_once_on_a_hopper_card(num_rows, heads, kv_heads, dim):
    plan = plan_few(num_rows, heads, kv_heads, dim, HOPPER)
    assert plan is not None and plan.num_blocks % SPLITS == 0
    assert plan.num_blocks <= 132 * (HOPPER.shared_bytes // plan.shared_bytes)


def test_what_would_not_all_run_at_once_is_refused():
    few = DeviceLimits(16, 227 * 1024, generation=9)
    assert plan_few(16, 32, 16, 256, few) is None
    assert plan_few(1, 4, 2, 256, few) is not None
    assert plan_few(1, 4, 2, 256, few._replace(shared_bytes=10 << 10)) is None
    assert plan_few(1, 4, 2, 64, few) is None
