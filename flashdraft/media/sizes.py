"""How large a picture becomes, and how many tokens of a prompt it takes: one rule for both."""

from __future__ import annotations

import math
from typing import NamedTuple

BUDGETS = (70, 140, 280, 560, 1120)  # tokens that a picture may take
MOST_TOKENS = BUDGETS[-1]


class Cells(NamedTuple):
    """A picture's rows and columns of cells; a cell is one token of the prompt."""

    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns


def cells_of(width: int, height: int, budget: int, cell: int) -> Cells:
    """The cells, `cell` pixels wide and high, of a picture that may take `budget` tokens.

    The aspect is nearly kept; small pictures are enlarged. In floats, as the models were trained:
    exact integers give another number for some sizes.
    """
    factor = math.sqrt(budget * cell**2 / (height * width))
    rows, columns = (math.floor(factor * side / cell) for side in (height, width))
    if rows == 0:
        return Cells(1, min(width // height, budget))
    if columns == 0:
        return Cells(min(height // width, budget), 1)
    return Cells(rows, columns)
