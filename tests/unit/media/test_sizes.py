"""How large pictures become, beside what transformers makes of them."""

from __future__ import annotations

import math
import random

import pytest
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from flashdraft.media.sizes import BUDGETS, cells_of

SIZES = [(224, 224), (640, 480), (1920, 1080), (3024, 4032), (1240, 1754), (4000, 300)]
NUM_TOKENS = {  # of Gemma 4's processor
    70: [64, 63, 66, 63, 63, 60],
    140: [121, 130, 120, 130, 126, 129],
    280: [256, 266, 264, 266, 266, 244],
    560: [529, 540, 527, 540, 532, 516],
    1120: [1089, 1064, 1100, 1064, 1092, 1098],
}


@pytest.mark.parametrize("budget", BUDGETS)
def test_tokens_of_common_sizes(budget: int) -> None:
    assert [cells_of(*size, budget, 48).num_tokens for size in SIZES] == NUM_TOKENS[budget]


def test_a_size_where_exact_integers_would_differ() -> None:
    assert cells_of(1360, 952, 70, 48).num_tokens == 54
    assert math.isqrt(70 * 952 // 1360) * math.isqrt(70 * 1360 // 952) == 70


@pytest.mark.parametrize(
    ("width", "height", "columns", "rows"),
    [(1, 1, 16, 16), (900, 3, 280, 1), (3, 900, 1, 280), (65535, 1, 280, 1), (2, 5, 10, 26)],
)
def test_odd_sizes(width: int, height: int, columns: int, rows: int) -> None:
    assert cells_of(width, height, 280, 48) == (rows, columns)


@pytest.mark.parametrize("patch", [4, 16])
def test_any_size_is_that_of_transformers(patch: int) -> None:
    chance = random.Random(patch)
    cell = 3 * patch
    for _ in range(10_000):
        width, height = (int(math.exp(chance.uniform(0, 11))) for _ in "wh")
        budget = chance.choice(BUDGETS)
        rows, columns = cells_of(width, height, budget, cell)
        expected = get_aspect_ratio_preserving_size(height, width, patch, 9 * budget, 3)
        assert (rows * cell, columns * cell) == expected, (width, height, budget)
        assert 1 <= rows * columns <= budget
