"""Attention of many rows in one launch, on a GPU: against torch, in graphs, beside `attend_few`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashdraft.kernels.interface import BIDIRECTIONAL, CAUSAL, Heads, PagedKeys
from tests.gpu.test_gpu_attend_few import REAL as FEW
from tests.gpu.test_gpu_attend_few import make_kernels, to_device
from tests.unit.kernels.cuda.attention.test_few_rows import make_inputs as make_few
from tests.unit.kernels.cuda.attention.test_many_rows import CASES, expect, make_inputs, treed

pytestmark = pytest.mark.gpu

DECODING = [(482 + 97 * i, 16) for i in range(8)]
PROMPTS = [(300, 200), (0, 140), (0, 0), (1100, 33)]
ONE_EACH = [(700 + 31 * i, 1) for i in range(32)]
WIDE = [(482 + 97 * i, 64 - 5 * i) for i in range(8)]  # blocks that are trees
TREES, BESIDE = treed(WIDE, [9] * 8), treed(WIDE + PROMPTS, [9] * 8 + [0] * 4)
REAL = {
    "31B, sliding": (32, 16, 256, 1024, CAUSAL, DECODING),
    "31B, sliding, prompts": (32, 16, 256, 1024, CAUSAL, DECODING + PROMPTS),
    "31B, sliding, a prompt": (32, 16, 256, 1024, CAUSAL, [(0, 1100)]),
    "31B, sliding, one each": (32, 16, 256, 1024, CAUSAL, [*ONE_EACH, (0, 90)]),
    "31B, full": (32, 4, 512, None, CAUSAL, DECODING),
    "31B, full, prompts": (32, 4, 512, None, CAUSAL, DECODING + PROMPTS),
    "31B, full, a prompt": (32, 4, 512, None, CAUSAL, [(0, 700)]),
    "31B, full, long": (32, 4, 512, None, CAUSAL, [(9000, 130), (0, 33), (2500, 700)]),
    "31B, full, one each": (32, 4, 512, None, CAUSAL, [*ONE_EACH, (0, 90)]),
    "26B, sliding": (16, 8, 256, 1024, CAUSAL, DECODING + PROMPTS),
    "26B, full": (16, 2, 512, None, CAUSAL, DECODING + PROMPTS),
    "31B, sliding, trees": (32, 16, 256, 1024, TREES, WIDE),
    "31B, sliding, trees and prompts": (32, 16, 256, 1024, BESIDE, WIDE + PROMPTS),
    "31B, full, trees": (32, 4, 512, None, TREES, WIDE),
    "31B, full, trees and prompts": (32, 4, 512, None, BESIDE, WIDE + PROMPTS),
    "26B, a small window, trees and prompts": (16, 8, 256, 40, BESIDE, WIDE + PROMPTS),
    "drafter": (32, 8, 128, None, BIDIRECTIONAL, DECODING),
    "drafter, sliding": (32, 8, 128, 1024, BIDIRECTIONAL, DECODING),
}


def make(case):
    heads, kv_heads, dim, window, mask, sequences = (CASES | REAL)[case]
    query, *caches, view = make_inputs(heads, kv_heads, dim, sequences, window)
    keys = PagedKeys(*caches, view, dim**-0.5, window, mask)
    return query, keys, expect(query, keys, slice(0, len(query)))


def attend(kernels, query, keys, num_processors=None):
    """By the kernel alone, on as many processors."""
    from flashdraft.kernels.cuda.attention import many_rows

    limits = kernels._limits
    limits = limits._replace(num_processors=num_processors or limits.num_processors)
    meetings = torch.zeros(many_rows.MAX_PLACES, device=query.device, dtype=torch.int32)
    found = many_rows.attend_many(query, keys, meetings, limits)
    assert found is not None
    assert not meetings.any()
    return found


@pytest.mark.parametrize("case", CASES | REAL)
def test_it_is_what_torch_says(case):
    query, keys, expected = make(case)
    kernels, query, keys = make_kernels(), to_device(query), to_device(keys)
    for num_processors in (1, 2, 4) if case in CASES else (None, 50, 9):
        found = attend(kernels, query, keys, num_processors)
        assert (found.cpu().float() - expected).norm() < 0.006 * expected.norm()
        assert torch.equal(found, attend(kernels, query, keys, num_processors))


@pytest.mark.parametrize("case", [name for name in REAL if REAL[name][2] > 128])
def test_one_block_or_two_have_a_tile(case):
    """Whichever the rule chooses: on many processors, and on few, where tiles are in parts."""
    from flashdraft.kernels.cuda.attention import many_rows

    query, keys, expected = make(case)
    kernels, query, keys = make_kernels(), to_device(query), to_device(keys)
    heads, kv_heads, dim, *_, sequences = REAL[case]
    sizes = len(query), len(sequences), heads, kv_heads, dim
    meetings = torch.zeros(many_rows.MAX_PLACES, device=query.device, dtype=torch.int32)
    for num_processors in (kernels._limits.num_processors, 50, 9, 2):
        limits = kernels._limits._replace(num_processors=num_processors)
        alone = many_rows.plan_alone(*sizes, limits)
        for plan in (alone, many_rows.plan_teams(alone, len(sequences))):
            found, again = (many_rows.attend_by(plan, query, keys, meetings) for _ in range(2))
            assert (found.cpu().float() - expected).norm() < 0.006 * expected.norm()
            assert torch.equal(found, again)
            assert not meetings.any()


def test_a_captured_launch_follows_its_tables():
    """Rows, lengths and pages are data."""
    query, keys, _ = make("31B, sliding, prompts")
    kernels, here, placed = make_kernels(), to_device(query), to_device(keys)
    kernels.attention(here, placed)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.attention(here, placed)
    view = keys.view
    for shift in (0, 5, 11):
        starts = view.query_start.clone()
        starts[1:-1] = torch.clamp(starts[1:-1] - shift, min=0)
        contexts = torch.clamp(view.context_lens - 40 * shift, min=0)
        pages = view.block_table.clamp(min=0)[:, torch.randperm(view.block_table.shape[1])]
        pages = torch.where(pages > 0, pages, 1)
        for table, new in zip(
            (placed.view.query_start, placed.view.context_lens, placed.view.block_table),
            (starts, contexts, pages),
            strict=True,
        ):
            table.copy_(new)
        for mine, other in (
            (placed.key_cache, keys.key_cache),
            (placed.value_cache, keys.value_cache),
        ):
            mine.copy_(torch.nan_to_num(other, 0.5))
        graph.replay()
        expected = expect(query, to_cpu(placed), slice(0, len(query)))
        assert (found.cpu().float() - expected).norm() < 0.006 * expected.norm()


def test_a_captured_launch_follows_its_trees():
    """One launch serves passes with trees, with others, and with none."""
    query, keys, _ = make("31B, sliding, trees and prompts")
    kernels, here, placed = make_kernels(), to_device(query), to_device(keys)
    attend(kernels, here, placed)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.attention(here, placed)
    for depths in ([3] * 8, [1, 20, 0, 5, 0, 2, 7, 0], [0] * 8):
        mask = treed(WIDE + PROMPTS, depths + [0] * 4)
        placed.mask.trees.ancestors.copy_(mask.trees.ancestors)
        placed.mask.trees.depths.copy_(mask.trees.depths)
        graph.replay()
        expected = expect(query, replace(keys, mask=mask), slice(0, len(query)))
        assert (found.cpu().float() - expected).norm() < 0.006 * expected.norm()


def to_cpu(keys):
    view = keys.view
    tables = {name: getattr(view, name).cpu() for name in ("query_start", "context_lens", "slots")}
    view = replace(view, block_table=view.block_table.cpu(), **tables)
    caches = {name: getattr(keys, name).cpu() for name in ("key_cache", "value_cache")}
    return replace(keys, view=view, **caches)


def test_few_rows_before_it_do_not_disturb_it():
    """Both ways count blocks that meet, each in places of its own."""
    *sizes, window, mask, of_spec = FEW["31B, sliding, block"]
    kernels = make_kernels()
    few = [to_device(value) for value in make_few(*sizes, 0, of_spec)]
    query, keys, expected = make("31B, sliding, prompts")
    query, keys = to_device(query), to_device(keys)
    for _ in range(3):
        paged = PagedKeys(*few[4:], scale=sizes[2] ** -0.5, window=window, mask=mask)
        kernels.attend(few[0], Heads(*few[1:4]), paged)
        found = kernels.attention(query, keys)
        assert (found.cpu().float() - expected).norm() < 0.006 * expected.norm()
