"""Trees of rows on the CPU: equal to torch's under dense masks, and bit for bit to their paths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashdraft.kernels.cpu.backend import CpuKernels, available
from flashdraft.kernels.interface import CAUSAL, BlockMask, Trees
from flashdraft.kernels.torch_backend import TorchKernels
from tests.picture_rows import are_close
from tests.tree_rows import CASES, Batch, Case, ancestors_of, make_trees


def make_native() -> CpuKernels:
    """Made in each test: they are those of the processors' level that is tested."""
    if not available():
        pytest.skip("the native kernels are not built")
    return CpuKernels(quantize=False)


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> CpuKernels | TorchKernels:
    if request.param == "native":
        return make_native()
    return TorchKernels(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_rows_see_their_ancestors(name: str, kernels: CpuKernels | TorchKernels) -> None:
    batch = Batch(CASES[name])
    assert are_close(batch.attend(kernels), batch.expect())


@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("seed", range(8))
def test_a_path_has_the_bits_of_a_chain(
    seed: int, window: int | None, kernels: CpuKernels | TorchKernels
) -> None:
    case = Case([(24 + seed, 5 * seed)], [3 + seed % 10], window)
    batch = Batch(case, seed)
    found = batch.attend(kernels)
    (tree,), page_size = batch.trees, case.page_size
    assert tree is not None
    context = case.lengths[0][1]
    for row, path in enumerate(ancestors_of(tree)):
        chain = Batch(replace(case, lengths=[(len(path), context)], depths=[0]), seed)
        chain.query, chain.caches, chain.table = (
            batch.query[path],
            batch.caches.clone(),
            batch.table,
        )
        for place, one in enumerate(path):  # where its keys lie if nothing else was drafted
            source, target = context + one, context + place
            slots = [(int(batch.table[0, i // page_size]), i % page_size) for i in (source, target)]
            chain.caches[:, *slots[1]] = batch.caches[:, *slots[0]]
        assert torch.equal(chain.attend(kernels, CAUSAL)[-1], found[row])


def test_rows_in_order_have_the_bits_of_no_trees(kernels: CpuKernels | TorchKernels) -> None:
    batch = Batch(Case([(40, 30), (150, 9), (1, 5)], [0, 0, 0], window=16))
    assert torch.equal(batch.attend(kernels), batch.attend(kernels, CAUSAL))


def test_rows_of_a_picture_and_of_a_tree_are_of_one_pass() -> None:
    kernels, batch = make_native(), Batch(Case([(20, 9), (12, 3)], [6, 0], window=14))
    ahead = torch.zeros(32, dtype=torch.int32)
    ahead[22:27] = torch.arange(4, -1, -1)
    found = batch.attend(kernels, replace(batch.mask, ahead=ahead))
    assert torch.equal(found[:20], batch.attend(kernels)[:20])
    assert torch.equal(found[20:], batch.attend(kernels, BlockMask(ahead=ahead))[20:])


def test_a_sibling_is_never_read(kernels: CpuKernels | TorchKernels) -> None:
    batch = Batch(Case([(3, 12)], [2]))
    batch.mask = BlockMask(trees=make_trees([3], [[0, 0]]))
    clean = batch.attend(kernels)
    page, offset = int(batch.table[0, 13 // 8]), 13 % 8  # the key of the second row
    batch.caches[:, page, offset] = float("nan")
    found = batch.attend(kernels)
    assert torch.equal(found[[0, 2]], clean[[0, 2]]) and found[1].isnan().all()


def test_trees_that_are_none_are_refused() -> None:
    kernels, batch = make_native(), Batch(Case([(3, 12)], [2]))
    trees = make_trees([3], [[0, 0]])
    wrong = [
        Trees(trees.ancestors, torch.tensor([0, 2, 1], dtype=torch.int32)),  # deeper than it can be
        Trees(trees.ancestors, torch.tensor([0, -1, 1], dtype=torch.int32)),
        Trees(torch.tensor([1, 1, 5]), trees.depths),  # a row that does not see itself
        Trees(trees.ancestors[:2], trees.depths),
        Trees(trees.ancestors, trees.depths.to(torch.int64)),
    ]
    for bad in wrong:
        with pytest.raises(ValueError):
            batch.attend(kernels, BlockMask(trees=bad))
