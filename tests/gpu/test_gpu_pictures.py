"""Pictures in every attention kernel on a GPU: against torch under a dense mask, and in graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashdraft.kernels.interface import CAUSAL, BlockMask, Heads, PagedKeys
from tests.gpu.test_gpu_attend_few import make_kernels, to_device
from tests.gpu.test_gpu_attend_many import attend as attend_many
from tests.picture_rows import attend_densely, find_seen, see_pictures
from tests.unit.kernels.cuda.attention.test_few_rows import make_inputs as make_few
from tests.unit.kernels.cuda.attention.test_many_rows import make_inputs

pytestmark = pytest.mark.gpu

DECODING = [(482 + 97 * i, 16) for i in range(8)]
# heads, key heads, head size, window; (keys before, rows) of every sequence; its pictures, which
# are a sequence, a first row and a number of rows
CASES = {
    "31B, a picture": ((32, 16, 256, 1024), [(0, 290)], [(0, 5, 266)]),
    "31B, after much": ((32, 16, 256, 1024), [(1500, 700)], [(0, 0, 256), (0, 258, 266)]),
    "31B, beyond the window": ((32, 16, 256, 1024), [(40, 1300)], [(0, 17, 1120)]),
    "31B, beside decoding": (
        (32, 16, 256, 1024),
        [*DECODING, (0, 290), (300, 160), (0, 0), (7, 1)],
        [(8, 9, 266), (9, 0, 63), (9, 65, 70)],
    ),
    "26B, beside decoding": (
        (16, 8, 256, 1024),
        [(0, 90), *DECODING, (700, 600)],
        [(0, 2, 63), (9, 20, 540)],
    ),
    "a small window": ((16, 8, 256, 40), [(90, 16), (33, 300)], [(1, 11, 256)]),
}


def make(name):
    """Queries, keys under the rule of pictures, and what torch says."""
    (heads, kv_heads, dim, window), sequences, pictures = CASES[name]
    query, *caches, view = make_inputs(heads, kv_heads, dim, sequences, window)
    mask = see_pictures([rows for _, rows in sequences], pictures)
    keys = PagedKeys(*caches, view, dim**-0.5, window, mask)
    return query, keys, expect(query, keys, sequences, pictures)


def expect(query, keys, sequences, pictures):
    lengths = enumerate(sequences)
    seen = [find_seen(s, rows, before, pictures, keys.window) for s, (before, rows) in lengths]
    return attend_densely(query, keys, seen)


def is_close(found, expected):
    return bool((found.cpu().float() - expected).norm() < 0.006 * expected.norm())


def attend_by_triton(kernels, query, keys, exact=False, plan=None):
    from flashdraft.kernels.cuda.attention.paged import paged_attention
    from flashdraft.kernels.cuda.plan import plan_attention, plan_exact_attention

    make_plan = plan_exact_attention if exact else plan_attention
    return paged_attention(query, keys, plan or make_plan(query, keys, kernels._limits))


def without(mask):
    return BlockMask(ahead=torch.zeros_like(mask.ahead))


@pytest.mark.parametrize("name", CASES)
def test_attend_many_shows_rows_their_picture(name):
    query, keys, expected = make(name)
    kernels, query, keys = make_kernels(), to_device(query), to_device(keys)
    if kernels._limits.generation != 9:
        pytest.skip("the kernel is for Hopper")
    for num_processors in (None, 50, 9):
        found = attend_many(kernels, query, keys, num_processors)
        assert is_close(found, expected)
        assert torch.equal(found, attend_many(kernels, query, keys, num_processors))
        one, other = (
            attend_many(kernels, query, replace(keys, mask=mask), num_processors)
            for mask in (without(keys.mask), CAUSAL)
        )
        assert torch.equal(one, other), "without pictures bits are as ever"
        assert not is_close(found, other.cpu().float())


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_triton_shows_rows_their_picture(name, exact):
    query, keys, expected = make(name)
    kernels, query, keys = make_kernels(), to_device(query), to_device(keys)
    assert is_close(attend_by_triton(kernels, query, keys, exact), expected)
    one, other = (
        attend_by_triton(kernels, query, replace(keys, mask=mask), exact)
        for mask in (without(keys.mask), CAUSAL)
    )
    assert torch.equal(one, other), "without pictures bits are as ever"


@pytest.mark.parametrize("split_keys", [256, 512])
def test_triton_shows_them_in_splits(split_keys):
    from flashdraft.kernels.cuda.plan import plan_exact_attention

    query, keys, expected = make("31B, beyond the window")
    kernels, query, keys = make_kernels(), to_device(query), to_device(keys)
    plan = plan_exact_attention(query, keys, kernels._limits)
    for spread in (False, True):
        cut = plan._replace(num_splits=16, split_keys=split_keys, spread=spread)
        assert is_close(attend_by_triton(kernels, query, keys, plan=cut), expected)


def test_exact_rows_do_not_depend_on_where_a_prompt_is_cut():
    """Before and behind its pictures."""
    from flashdraft.kernels.cuda.backend import TritonKernels

    query, keys, _ = make("31B, after much")
    kernels = TritonKernels(torch.device("cuda", 0), torch.bfloat16, exact=True)
    query, keys = to_device(query), to_device(keys)
    whole, cuts = kernels.attention(query, keys), [0, 256, 257, 258, 524, 700]
    for start, end in zip(cuts, cuts[1:], strict=False):
        view = replace(
            keys.view,
            query_start=torch.tensor([0, end - start], device="cuda", dtype=torch.int32),
            context_lens=keys.view.context_lens + start,
            max_query_len=end - start,
        )
        mask = BlockMask(ahead=keys.mask.ahead[start:end].contiguous())
        found = kernels.attention(query[start:end], replace(keys, view=view, mask=mask))
        assert torch.equal(found, whole[start:end])


@pytest.mark.parametrize("num_rows", [1, 16])
def test_few_rows_see_their_picture(num_rows):
    """A block that decodes has none, and goes the way of few rows with the same bits as ever."""
    from flashdraft.kernels.cuda.attention.few_rows import attend_few
    from tests.unit.kernels.cuda.attention import test_few_rows as few

    sizes, of_spec = (32, 16, 256, num_rows, 500), {"v_norm": True}
    kernels, inputs = make_kernels(), make_few(*sizes, 0, of_spec)
    ours = [to_device(value) for value in inputs]

    def attend(mask, window):
        keys = PagedKeys(*ours[4:], scale=256**-0.5, window=window, mask=to_device(mask))
        heads = Heads(*ours[1:4])
        return attend_few(ours[0], heads, keys, kernels._meetings, kernels._limits)

    nothing = see_pictures([num_rows], [])
    found = attend(nothing, 1024)
    if found is None:
        pytest.skip("the kernel does not run on this card")
    assert torch.equal(found, attend(CAUSAL, 1024))
    if num_rows > 2:
        mask = see_pictures([num_rows], [(0, 1, num_rows - 2)])
        expected = few.expect(inputs, 256**-0.5, 8, mask).float()
        assert is_close(attend(mask, 8), expected)


@pytest.mark.parametrize("exact", [False, True])
def test_a_captured_pass_has_pictures_or_none(exact):
    """What rows see is data: one launch serves passes with pictures and without."""
    from flashdraft.kernels.cuda.backend import TritonKernels

    _, sequences, pictures = CASES["31B, beside decoding"]
    query, keys, _ = make("31B, beside decoding")
    kernels = TritonKernels(torch.device("cuda", 0), torch.bfloat16, exact=exact)
    here, placed = to_device(query), to_device(keys)
    ahead = placed.mask.ahead
    kernels.attention(here, placed)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.attention(here, placed)
    rows = [count for _, count in sequences]
    for some in (pictures, [], pictures[1:], [(8, 0, 290)]):
        ahead.copy_(see_pictures(rows, some).ahead)
        graph.replay()
        assert is_close(found, expect(query, keys, sequences, some))
        if not some:
            assert torch.equal(found, kernels.attention(here, replace(placed, mask=CAUSAL)))
