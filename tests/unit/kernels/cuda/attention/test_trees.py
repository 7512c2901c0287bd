"""Trees of rows in the Triton kernels, in the interpreter, against dense masks and chains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashdraft.kernels.cuda.plan import AttentionPlan
from flashdraft.kernels.interface import CAUSAL, BlockMask
from tests.interpreted import judge, report
from tests.picture_rows import are_close, see_pictures
from tests.tree_rows import CASES, Batch, Case, make_trees
from tests.unit.kernels.cuda.test_interpreter import NARROW, WIDE, split, spread

# Merging splits takes the interpreter longest: few cases are split.
PLANS: dict[str, tuple[AttentionPlan, list[str]]] = {
    "narrow": (NARROW, ["sixteen rows", "all 64, a window", "trees and chains"]),
    "wide": (WIDE, list(CASES)),
    "split": (split(5, 16), ["over the window's edge"]),
    "spread": (spread(3), ["over the window's edge"]),
}


def attend(batch: Batch, mask: BlockMask, plan: AttentionPlan) -> Tensor:
    from flashdraft.kernels.cuda.attention.paged import paged_attention

    return paged_attention(batch.query, batch.keys(mask), plan)


def check_rule(name: str, plan: AttentionPlan) -> None:
    """A row sees its ancestors, and not all before it."""
    batch = Batch(CASES[name])
    found = attend(batch, batch.mask, plan)
    assert are_close(found, batch.expect())
    assert are_close(found, attend(batch, CAUSAL, plan)) == (name == "a root alone")


def check_order(plan: AttentionPlan) -> None:
    """Rows that follow one another have the bits of no trees, and so has a tree's first path."""
    tree = [0, 1, 2, 0, 4, 3, 1, 0]
    batch = Batch(Case([(70, 9), (1, 5), (9, 21)], [0, 0, 4], window=16, heads=(1, 1)))
    mask = BlockMask(trees=make_trees(batch.rows, [None, None, tree]))
    trees, chains = attend(batch, mask, plan), attend(batch, CAUSAL, plan)
    in_order = 70 + 1 + 4
    assert torch.equal(trees[:in_order], chains[:in_order])
    assert not torch.isclose(trees[in_order:], chains[in_order:]).any()


def check_company(plan: AttentionPlan) -> None:
    """A tree's bits do not depend on who is beside it, nor those of a picture's rows."""
    batch = Batch(Case([(20, 9), (12, 3)], [6, 0], window=14))
    pictures = see_pictures(batch.rows, [(1, 2, 5)])
    both, tree, picture = (
        attend(batch, mask, plan)
        for mask in (replace(batch.mask, ahead=pictures.ahead), batch.mask, pictures)
    )
    assert torch.equal(both, torch.cat([tree[:20], picture[20:]]))
    assert not torch.equal(both[20:], tree[20:])
    alone = Batch(replace(batch.case, lengths=[(20, 9)], depths=[6]))
    alone.query, alone.caches, alone.table = batch.query[:20], batch.caches, batch.table[:1]
    assert torch.equal(attend(alone, alone.mask, plan), tree[:20])


CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"{name}, {how}": lambda name=name, plan=plan: check_rule(name, plan)
        for how, (plan, names) in PLANS.items()
        for name in names
    },
    "order": lambda: check_order(NARROW),
    "order, split": lambda: check_order(split(5, 16)),
    "company": lambda: check_company(NARROW),
    "company, wide tiles": lambda: check_company(WIDE),
}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, failures: dict[str, str]) -> None:
    judge(failures[name])


if __name__ == "__main__":
    report(CHECKS)
