"""Trees among the rows of a pass: what every row sees, by the rule of trees itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashdraft.kernels.interface import BlockMask, Trees
from tests.picture_rows import PagedBatch, attend_densely

Tree = Sequence[int]  # the parent of every row but the first, all of them before it


def random_tree(num_rows: int, depth: int, seed: int) -> list[int]:
    """Some tree of so many rows that is no deeper."""
    chance, depths, parents = random.Random(seed), [0], list[int]()
    for _ in range(num_rows - 1):
        parents.append(chance.choice([row for row, one in enumerate(depths) if one < depth]))
        depths.append(depths[parents[-1]] + 1)
    return parents


def ancestors_of(tree: Tree) -> list[list[int]]:
    """The rows that every row follows, and itself."""
    found = [[0]]
    for row, parent in enumerate(tree, start=1):
        found.append([*found[parent], row])
    return found


def as_word(rows: Sequence[int]) -> int:
    """Bits of a signed word."""
    return as_signed(sum(1 << row for row in rows))


def as_signed(word: int) -> int:
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


def make_trees(rows: Sequence[int], trees: Sequence[Tree | None]) -> Trees:
    """What kernels are told, of sequences with so many rows; None: they follow one another."""
    ancestors, depths = list[int](), list[int]()
    for count, tree in zip(rows, trees, strict=True):
        if tree is None or not count:
            ancestors += [-1] * count
            depths += range(count)
        else:
            assert count == 1 + len(tree)
            found = ancestors_of(tree)
            ancestors += map(as_word, found)
            depths += [len(one) - 1 for one in found]
    return Trees(torch.tensor(ancestors), torch.tensor(depths, dtype=torch.int32))


def find_seen(rows: int, context: int, tree: Tree | None, window: int | None) -> Tensor:
    """[rows, context + rows] bool: earlier keys and ancestors, within the window by position."""
    chain = [list(range(row + 1)) for row in range(rows)]
    found = chain if tree is None else ancestors_of(tree)
    position = [*range(context), *(context + len(one) - 1 for one in found)]
    seen = torch.zeros(rows, context + rows, dtype=torch.bool)
    for row, own in enumerate(found[:rows]):
        for key in [*range(context), *(context + one for one in own)]:
            seen[row, key] = window is None or position[context + row] - position[key] < window
    return seen


@dataclass(frozen=True)
class Case:
    """Rows and earlier keys of every sequence, how deep their trees are, and the window.

    A depth of 0: the rows follow one another.
    """

    lengths: Sequence[tuple[int, int]]
    depths: Sequence[int]
    window: int | None = None
    heads: tuple[int, int] = (4, 2)
    dim: int = 16
    page_size: int = 8


CASES = {
    "a root alone": Case([(1, 9)], [3]),
    "no context": Case([(16, 0)], [4]),
    "sixteen rows": Case([(16, 33)], [6]),
    "all 64": Case([(64, 21)], [15]),
    "all 64, flat": Case([(64, 21)], [1]),
    "all 64, a window": Case([(64, 90)], [15], window=17),
    "over the window's edge": Case([(33, 40)], [11], window=12),
    "a window that holds all": Case([(33, 40)], [11], window=500),
    "a page a row": Case([(30, 9)], [7], page_size=1),
    "pages end inside": Case([(40, 60)], [9], window=24, page_size=16),
    "trees and chains": Case([(16, 40), (20, 5), (0, 3), (64, 70)], [5, 0, 2, 15], window=20),
    "beside a prompt": Case([(32, 40), (150, 30), (64, 7)], [8, 0, 12], window=16),
    "many heads of a key": Case([(33, 7), (2, 9)], [6, 1], window=12, heads=(40, 1), dim=6),
    "no groups": Case([(33, 7), (16, 90)], [6, 15], heads=(3, 3), dim=64),
}


class Batch(PagedBatch):
    """Sequences with trees."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        rows = [count for count, _ in case.lengths]
        self.case, self.trees = case, list[Tree | None]()
        for s, (count, depth) in enumerate(zip(rows, case.depths, strict=True)):
            self.trees.append(random_tree(count, depth, seed + s) if depth else None)
        super().__init__(case, BlockMask(trees=make_trees(rows, self.trees)), seed)

    def seen(self) -> list[Tensor]:
        """What each sequence's rows see."""
        window, pairs = self.case.window, zip(self.case.lengths, self.trees, strict=True)
        return [find_seen(*pair, tree, window) for pair, tree in pairs]

    def expect(self) -> Tensor:
        """torch's attention under dense masks."""
        return attend_densely(self.query, self.keys(BlockMask()), self.seen())
