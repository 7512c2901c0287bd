"""Pictures in the native CPU kernels' attention: right values, and the law, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashdraft.kernels.cpu.backend import CpuKernels, available
from flashdraft.kernels.interface import CAUSAL, BlockMask
from tests.picture_rows import CASES, Batch, are_close

if not available():
    pytest.skip("the native kernels are not built", allow_module_level=True)


def make_kernels(threads: int = 1) -> CpuKernels:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    kernels = CpuKernels(quantize=False)
    torch.set_num_threads(before)
    return kernels


@pytest.mark.parametrize("name", CASES)
def test_rows_see_their_picture_whole(name: str) -> None:
    batch = Batch(CASES[name])
    assert are_close(batch.attend(make_kernels()), batch.expect(batch.case.pictures))


def test_other_rules_would_be_found_out() -> None:
    batch = Batch(CASES["longer than the window"])
    found = batch.attend(make_kernels())
    assert not are_close(found, batch.expect([]))
    assert not are_close(found, batch.expect(batch.case.pictures, is_even=True))
    batch = Batch(CASES["one right behind the other"])
    assert not are_close(batch.attend(make_kernels()), batch.expect([(0, 5, 36)]))


@pytest.mark.parametrize("name", CASES)
def test_without_pictures_bits_are_as_ever(name: str) -> None:
    batch, kernels = Batch(CASES[name]), make_kernels()
    nothing = BlockMask(ahead=torch.zeros(len(batch.query), dtype=torch.int32))
    assert torch.equal(batch.attend(kernels, nothing), batch.attend(kernels, CAUSAL))


@pytest.mark.parametrize("name", CASES)
def test_a_row_does_not_depend_on_threads(name: str) -> None:
    batch = Batch(CASES[name])
    alone = batch.attend(make_kernels())
    for threads in (2, 3, 8):
        assert torch.equal(batch.attend(make_kernels(threads)), alone)


def attend_rows(batch: Batch, s: int, first: int, last: int) -> Tensor:
    """Some rows of one sequence, in a pass of their own."""
    start, (_, context) = sum(batch.rows[:s]) + first, batch.case.lengths[s]
    ahead = batch.mask.ahead
    assert ahead is not None
    keys, end = batch.keys(CAUSAL), start + last - first
    view = replace(
        keys.view,
        query_start=torch.tensor([0, last - first], dtype=torch.int32),
        context_lens=torch.tensor([context + first], dtype=torch.int32),
        block_table=batch.table[s : s + 1],
    )
    keys = replace(keys, view=view, mask=BlockMask(ahead=ahead[start:end].contiguous()))
    return make_kernels().attention(batch.query[start:end], keys)


def test_a_row_does_not_depend_on_its_batch() -> None:
    batch = Batch(CASES["beside others"])
    whole = batch.attend(make_kernels()).split(batch.rows)
    for s, rows in enumerate(batch.rows):
        assert torch.equal(attend_rows(batch, s, 0, rows), whole[s])


@pytest.mark.parametrize("name", ["two, markers between", "longer than the window", "no window"])
def test_a_row_does_not_depend_on_how_a_prompt_is_cut(name: str) -> None:
    """Wherever a cut leaves pictures whole: so rows come to lie in other tiles, too."""
    batch = Batch(CASES[name])
    whole, num_rows = batch.attend(make_kernels()), batch.rows[0]
    pictures = [range(first + 1, first + count) for _, first, count in batch.case.pictures]
    for cut in range(1, num_rows):
        if not any(cut in picture for picture in pictures):
            parts = [attend_rows(batch, 0, 0, cut), attend_rows(batch, 0, cut, num_rows)]
            assert torch.equal(torch.cat(parts), whole), cut


def test_what_follows_a_picture_is_kept_out_of_it() -> None:
    batch, kernels = Batch(CASES["in the middle"]), make_kernels()
    clean = batch.attend(kernels)
    page, place = divmod(9 + 17, batch.case.page_size)
    batch.caches[:, batch.table[0, page].long(), place] = float("nan")
    found = batch.attend(kernels)
    assert torch.equal(found[: 9 + 17], clean[: 9 + 17])
    assert found[9 + 17 :].isnan().all()


def test_a_row_that_sees_what_is_not_there_is_refused() -> None:
    batch, kernels = Batch(CASES["beside others"]), make_kernels()
    good = batch.mask.ahead
    assert good is not None
    for row, value in ((0, 1), (1 + 45 - 1, 1), (1, -1), (3, 44), (3, 2**31 - 1), (3, -(2**31))):
        bad = good.clone()
        bad[row] = value
        with pytest.raises(ValueError, match="ahead"):
            batch.attend(kernels, BlockMask(ahead=bad))
    shorter = good.clone()
    shorter[10] = 0  # less than the row before it sees
    for bad in (shorter, good.long(), good[:-1], torch.stack([good, good], 1)[:, 0]):
        with pytest.raises(ValueError):
            batch.attend(kernels, BlockMask(ahead=bad))
    keys = batch.keys(batch.mask)
    starts = torch.tensor([0, 10**9, 0, 0, 0, 0, 93], dtype=torch.int32)
    with pytest.raises(ValueError, match="query_start"):
        kernels.attention(batch.query, replace(keys, view=replace(keys.view, query_start=starts)))
