"""cuda/attention/attend_many.cu, emulated, against torch's attention."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from flashdraft.kernels.interface import (
    BIDIRECTIONAL,
    CAUSAL,
    BlockMask,
    PagedKeys,
    PageView,
    Trees,
)
from flashdraft.kernels.torch_backend import TorchKernels
from tests import tree_rows
from tests.picture_rows import attend_densely, find_seen, see_pictures
from tests.unit.kernels.cuda.attention.test_few_rows import HOPPER, PAGE
from tests.unit.kernels.cuda.emulated import build, emulated_map

pytest.importorskip("triton", reason="Triton is not installed")

from flashdraft.kernels.cuda.attention.many_rows import (
    MAX_PLACES,
    MAX_SEQS,
    is_readable,
    make_flags,
    plan_many,
    plan_teams,
    prepare,
)

IN_PARTS = (("JOIN_UNITS", -(10**6)), ("MIN_UNITS", 1))  # no tile stays whole
MIXED = [(50, 7), (0, 0), (9, 75), (0, 20), (5, 1)]
PICTURES = [(2, 5, 40), (2, 47, 27), (3, 0, 17)]  # sequence, first row, rows


def pictured(sequences, pictures):
    return see_pictures([rows for _, rows in sequences], pictures)


def grow(sequences, depths):
    """A tree for every sequence, none where the depth is 0."""
    pairs = zip(sequences, depths, strict=True)
    return [
        tree_rows.random_tree(rows, depth, rows) if depth else None for (_, rows), depth in pairs
    ]


def treed(sequences, depths):
    rows = [rows for _, rows in sequences]
    return BlockMask(trees=tree_rows.make_trees(rows, grow(sequences, depths)))


WOODED = [(90, 16), (33, 70), (0, 0), (41, 64), (0, 33), (7, 1)]
# heads, key heads, head size, window, (keys before, rows) of every sequence, how deep its tree is
WOODS = {
    "trees": (4, 2, 256, 14, WOODED, [6, 0, 0, 12, 5, 3]),
    "trees, no window": (8, 1, 512, None, [(70, 9), (0, 20), (60, 30)], [3, 0, 7]),
    "a tree over many tiles": (32, 1, 128, 13, [(75, 64)], [11]),
    "a flat tree": (2, 1, 128, 2, [(130, 40)], [1]),
}
# heads, key heads, head size, window, mask, (keys before, rows) of every sequence
CASES = {
    "decoding": (4, 2, 256, 64, CAUSAL, [(100, 16), (3, 1), (0, 0), (40, 5)]),
    "a chunk beside": (4, 2, 256, 40, CAUSAL, [(90, 16), (0, 0), (33, 70), (0, 30)]),
    "full": (8, 1, 512, None, CAUSAL, [(70, 9), (0, 20), (200, 1)]),
    "both ways": (4, 1, 128, None, BIDIRECTIONAL, [(60, 16), (100, 16)]),
    "both ways, sliding": (4, 1, 128, 40, BIDIRECTIONAL, [(90, 16), (7, 16)]),
    "no group": (3, 3, 128, None, CAUSAL, [(33, 7), (0, 150)]),
    "one long": (2, 1, 128, None, CAUSAL, [(1500, 3)]),
    "pictures": (2, 1, 256, 24, pictured(MIXED, PICTURES), MIXED),
    "pictures, no window": (2, 1, 128, None, pictured(MIXED, PICTURES), MIXED),
    "a picture alone": (8, 1, 512, 9, pictured([(0, 20)], [(0, 1, 18)]), [(0, 20)]),
    "a tree beside pictures": (
        *(2, 1, 256, 24),
        replace(pictured(MIXED, PICTURES), trees=treed(MIXED, [3, 0, 0, 0, 2]).trees),
        MIXED,
    ),
    "many": (2, 2, 128, 1024, CAUSAL, [(3 * i, 1 + i % 3) for i in range(40)]),
}
CASES |= {
    name: (*sizes, treed(sequences, depths), sequences)
    for name, (*sizes, sequences, depths) in WOODS.items()
}


def make_inputs(
    heads, kv_heads, dim, sequences, window=None, spare_rows=0, first_row=0, page_size=PAGE
):
    """Queries, keys, values and the view; rows before and behind those of sequences are spare.

    What nobody may read is no number, or in no page.
    """
    torch.manual_seed(heads + len(sequences))
    counts = [-(-(context + rows) // page_size) for context, rows in sequences]
    num_pages = sum(counts) + 2
    free, table = torch.randperm(num_pages), torch.full((len(sequences), max(counts) + 3), -7)
    for s, count in enumerate(counts):
        table[s, :count], free = free[:count], free[count:]
    starts = torch.tensor([0, *(rows for _, rows in sequences)]).cumsum(0) + first_row
    num_rows = int(starts[-1]) + spare_rows
    query = torch.randn(num_rows, heads, dim).bfloat16()
    keys, values = (torch.randn(num_pages, page_size, kv_heads, dim).bfloat16() for _ in range(2))
    for s, (context, rows) in enumerate(sequences):
        end = context + rows
        if window is not None:
            table[s, : max(0, context - window + 1) // page_size] = -7
        if end % page_size:
            for cache in (keys, values):
                cache[table[s, end // page_size], end % page_size :] = float("nan")
    view = PageView(
        query_start=starts.int(),
        context_lens=torch.tensor([context for context, _ in sequences], dtype=torch.int32),
        block_table=table.int(),
        slots=torch.zeros(num_rows, dtype=torch.int64),
        page_size=page_size,
        max_query_len=max(rows for _, rows in sequences),
        max_key_len=max(context + rows for context, rows in sequences),
    )
    return query, keys, values, view


def attend(query, keys, num_blocks, backwards=False, definitions=(), team=1):
    """The kernel's result, and what it left where blocks meet."""
    num_kv_heads, num_seqs = keys.value_cache.shape[2], keys.view.context_lens.shape[0]
    sizes = *query.shape[:2], num_kv_heads, query.shape[2]
    plan = plan_many(sizes[0], num_seqs, *sizes[1:], HOPPER._replace(num_processors=1))
    plan = plan._replace(num_blocks=num_blocks * team)
    plan = plan_teams(plan, num_seqs) if team == 2 else plan
    flags = make_flags(plan, query, keys)
    library = build("attend_many", *flags.items(), *definitions)
    assert library.shared_bytes() == plan.shared_bytes <= HOPPER.shared_bytes
    meetings = torch.zeros(MAX_PLACES, dtype=torch.int32)
    work, output, _kept = prepare(query, keys, meetings, plan, emulated_map)
    assert library.argument_bytes() == ctypes.sizeof(work)
    output.fill_(7)
    library.run(ctypes.byref(work), plan.num_blocks, int(backwards))
    return output, meetings


def expect(query, keys, own):
    """In float32, sequence by sequence, for the rows that have one."""
    tables, mask = (
        (keys.view.query_start - own.start, keys.view.block_table.clamp(min=0)),
        keys.mask,
    )
    if mask.ahead is not None:
        mask = replace(mask, ahead=mask.ahead[own])
    if mask.trees is not None:
        mask = replace(mask, trees=Trees(mask.trees.ancestors[own], mask.trees.depths[own]))
    view = replace(keys.view, query_start=tables[0], block_table=tables[1])
    kernels = TorchKernels(torch.device("cpu"), torch.float32)
    return kernels.attention(query[own].float(), replace(keys, view=view, mask=mask))


def spread(mask, num_rows, own):
    """A mask of these rows among others: that of nobody's rows is anything."""

    def place(table):
        wide = torch.full([num_rows], 2**30, dtype=table.dtype)
        wide[own] = table
        return wide

    if mask.ahead is not None:
        mask = replace(mask, ahead=place(mask.ahead))
    if mask.trees is not None:
        mask = replace(mask, trees=Trees(place(mask.trees.ancestors), place(mask.trees.depths)))
    return mask


def check(case, num_blocks, backwards=False, definitions=(), team=1, **of_inputs):
    heads, kv_heads, dim, window, mask, sequences = CASES[case]
    query, *caches, view = make_inputs(heads, kv_heads, dim, sequences, window, **of_inputs)
    own = slice(int(view.query_start[0]), int(view.query_start[-1]))
    keys = PagedKeys(*caches, view, dim**-0.5, window, spread(mask, len(query), own))
    assert is_readable(query, keys)
    found, meetings = attend(query, keys, num_blocks, backwards, definitions, team)
    expected = expect(query, keys, own)
    assert not torch.any(meetings), "the next launch begins with zeros"
    assert (found[own].float() - expected).norm() < 0.006 * expected.norm()
    spare = torch.ones(len(found), dtype=torch.bool)
    spare[own] = False
    assert torch.all(found[spare] == 7), "rows of nobody are left alone"
    return found


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_torch_says(case):
    check(case, num_blocks=3)


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 40])
def test_however_many_blocks_share_the_work(num_blocks):
    check("a chunk beside", num_blocks)
    check("full", num_blocks)
    check("one long", num_blocks)  # in parts, which are joined


@pytest.mark.parametrize("case", CASES)
def test_parts_are_joined_and_the_order_of_blocks_changes_no_bit(case):
    for num_blocks in (2, 7):
        one, other = (check(case, num_blocks, order, IN_PARTS) for order in (False, True))
        assert torch.equal(one, other)


FULL = ("full", "trees, no window", "a picture alone")  # of 512 numbers a head
LONG = [(1100, 3), (0, 0), (0, 65), (200, 20)]
CASES |= {"full, long": (8, 1, 512, None, CAUSAL, LONG)}


@pytest.mark.parametrize("case", [*FULL, "full, long", "a chunk beside"])
def test_two_blocks_have_a_tile_together(case):
    whole = check(case, 1, team=2)
    assert torch.equal(whole, check(case, 1)), "a row's bits do not depend on the other block"
    one, other = (check(case, 5, order, IN_PARTS, team=2) for order in (False, True))
    assert torch.equal(one, other)


@pytest.mark.parametrize("case", ["pictures", "pictures, no window"])
def test_rows_see_their_picture_whole(case):
    heads, kv_heads, dim, window, mask, sequences = CASES[case]
    query, *caches, view = make_inputs(heads, kv_heads, dim, sequences, window)
    keys = PagedKeys(*caches, view, dim**-0.5, window, mask)

    def differ_from(pictures, is_even=False):
        lengths = enumerate(sequences)
        seen = [find_seen(s, b, a, pictures, window, is_even) for s, (a, b) in lengths]
        expected = attend_densely(query, keys, seen)
        return float((found.float() - expected).norm() / expected.norm())

    found, _ = attend(query, keys, 3)
    assert differ_from(PICTURES) < 0.006
    assert differ_from([]) > 0.1
    assert window is None or differ_from(PICTURES, is_even=True) > 0.1
    nothing = pictured(sequences, [])
    for num_blocks, definitions in ((3, ()), (7, IN_PARTS)):
        one, other = (
            attend(query, replace(keys, mask=mask), num_blocks, False, definitions)[0]
            for mask in (nothing, CAUSAL)
        )
        assert torch.equal(one, other)


def find_by_row(rows, context, tree, window):
    """The wrong rule by which a tree's window goes by the row."""
    row, key = torch.arange(rows).unsqueeze(1), torch.arange(context + rows)
    return tree_rows.find_seen(rows, context, tree, None) & (context + row - key < window)


@pytest.mark.parametrize("case", WOODS)
def test_rows_of_trees_see_their_ancestors_alone(case):
    heads, kv_heads, dim, window, mask, sequences = CASES[case]
    query, *caches, view = make_inputs(heads, kv_heads, dim, sequences, window)
    keys = PagedKeys(*caches, view, dim**-0.5, window, mask)
    trees = grow(*WOODS[case][-2:])

    def differ_from(trees, find=tree_rows.find_seen):
        pairs = zip(sequences, trees, strict=True)
        seen = [find(rows, context, tree, window) for (context, rows), tree in pairs]
        expected = attend_densely(query, keys, seen)
        return float((found.float() - expected).norm() / expected.norm())

    found, _ = attend(query, keys, 3)
    assert differ_from(trees) < 0.006
    assert differ_from([None] * len(trees)) > 0.1
    assert window is None or differ_from(trees, find_by_row) > 0.1


def test_of_rows_in_order_bits_are_as_ever():
    for case, definitions in (("a chunk beside", ()), ("full", IN_PARTS), ("one long", IN_PARTS)):
        heads, kv_heads, dim, window, _, sequences = CASES[case]
        query, *caches, view = make_inputs(heads, kv_heads, dim, sequences, window)
        one, other = (
            attend(query, PagedKeys(*caches, view, 0.1, window, mask), 5, False, definitions)[0]
            for mask in (CAUSAL, treed(sequences, [0] * len(sequences)))
        )
        assert torch.equal(one, other)


@pytest.mark.parametrize("page_size", [8, 32, 64, 128])
def test_pages_of_any_size(page_size):
    check("a chunk beside", 3, page_size=page_size)
    check("a tree over many tiles", 3, page_size=page_size)
    check("full", 7, definitions=IN_PARTS, page_size=page_size)


def test_rows_of_nobody_are_left_alone():
    check("decoding", 5, spare_rows=9, first_row=67)
    check("pictures", 5, spare_rows=9, first_row=67, page_size=64)
    check("trees", 5, spare_rows=9, first_row=67)


def test_what_it_cannot_read_it_leaves_to_others():
    query, keys, values, view = make_inputs(4, 2, 256, [(20, 3)])
    paged = PagedKeys(keys, values, view, 1.0, None, CAUSAL)
    assert is_readable(query, paged)
    assert not is_readable(query.float(), paged)
    assert not is_readable(query, PagedKeys(None, values, view, 1.0, None, CAUSAL))
    narrow = [cache.to(torch.float8_e4m3fn) for cache in (keys, values)]
    assert not is_readable(query, PagedKeys(*narrow, view, 1.0, None, CAUSAL))
    assert plan_many(3, MAX_SEQS + 1, 4, 2, 256, HOPPER) is None
    wide = replace(view, query_start=view.query_start.long())
    assert not is_readable(query, replace(paged, view=wide))
    assert not is_readable(query, replace(paged, mask=BlockMask(ahead=torch.zeros(3).long())))
    trees = treed([(20, 3)], [1]).trees
    assert is_readable(query, replace(paged, mask=BlockMask(trees=trees)))
    for wrong in (
        replace(trees, ancestors=trees.ancestors.int()),
        replace(trees, ancestors=trees.ancestors.repeat_interleave(2)[::2]),
        replace(trees, depths=trees.depths.long()),
        replace(trees, depths=trees.depths.repeat_interleave(2)[::2]),
    ):
        assert not is_readable(query, replace(paged, mask=BlockMask(trees=wrong)))
    assert plan_many(3, 1, 0, 2, 256, HOPPER) is None
    assert plan_many(3, 1, 4, 2, 96, HOPPER) is None
    assert plan_many(3, 1, 9, 3, 256, HOPPER) is None
    assert plan_many(16, 1, 32, 4, 512, HOPPER) is None, "one tile in many parts"
    assert plan_many(128, 8, 32, 4, 512, HOPPER) is not None
    assert plan_many(3, 1, 4, 2, 256, HOPPER._replace(shared_bytes=99 * 1024)) is None
