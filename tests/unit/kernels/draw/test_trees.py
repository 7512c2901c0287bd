"""Rows of trees: a row's penalties are those of its own path, as if that were committed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashdraft.kernels.draw import host, reference
from flashdraft.kernels.draw.rule import DrawnRows
from flashdraft.kernels.nodes import MAX_NODES
from tests.drawn import PENALISED, assert_equal, make_rows, siblings

DRAWS = {"torch": reference.draw, "numpy": host.draw}
SHAPES = [(2, 1), (5, 2), (17, 4), (33, 6), (64, 1), (64, 15), (64, None)]  # rows of a slot, depth


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize(("num_rows", "depth"), SHAPES)
def test_a_row_is_drawn_as_if_its_path_were_committed(
    draw: Any, num_rows: int, depth: int | None
) -> None:
    for seed, settings in ((0, PENALISED), (1, PENALISED | {"temperature": 0.0}), (2, {})):
        batch = make_rows(seed, 41, 4, num_rows, masked=seed == 0, depth=depth, **settings)
        for rows in (batch, batch.tempted()):
            assert_equal(draw(*rows.drawable), draw(*rows.committed().drawable))


@pytest.mark.parametrize(("num_rows", "depth"), SHAPES)
def test_a_row_is_adjusted_as_if_its_path_were_committed(num_rows: int, depth: int | None) -> None:
    batch = make_rows(num_rows, 41, 4, num_rows, depth=depth, **PENALISED)
    found = reference.adjust(*batch.drawable)
    expected = reference.adjust(*batch.committed().drawable)
    assert torch.equal(found.nan_to_num(0.5), expected.nan_to_num(0.5))


@pytest.mark.parametrize(("num_rows", "depth"), SHAPES)
def test_numpy_equals_torch(num_rows: int, depth: int | None) -> None:
    batch = make_rows(num_rows, 301, 4, num_rows, depth=depth)
    assert_equal(host.draw(*batch.drawable), reference.draw(*batch.drawable))


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_tokens_beside_a_path_do_not_count(draw: Any) -> None:
    batch, tokens = siblings()
    assert draw(*batch.drawable).tokens.tolist() == tokens


def test_more_draft_tokens_than_a_word_has_bits_are_refused() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    DrawnRows(zero, zero, torch.zeros(1, MAX_NODES, dtype=torch.int64), zero)
    with pytest.raises(AssertionError):
        DrawnRows(zero, zero, torch.zeros(1, MAX_NODES + 1, dtype=torch.int64), zero)
