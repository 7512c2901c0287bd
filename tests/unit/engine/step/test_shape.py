"""Few shapes serve every step."""

from __future__ import annotations

import pytest

from flashdraft.engine.step.shape import FEW_SLOTS, LONE_ROWS, MIXED_ROWS, StepSizes
from flashdraft.engine.streams import MOST_GRAPHS


@pytest.mark.parametrize("max_width", [0, 1, 7, 15])
@pytest.mark.parametrize("max_batch", [1, 2, 5, 8, 24, 32, 33, 64, 100, 256, 1000])
@pytest.mark.parametrize("num_nodes", [0, 31, 63])
def test_no_more_graphs_than_the_limit_are_ever_captured(max_batch, max_width, num_nodes):
    sizes = StepSizes(max_batch, max_width, num_nodes)
    shapes = sizes.shapes
    verified = {(one.batch, one.num_rows, one.width) for one in shapes}
    drafted = {
        (one.batch, width)
        for one in shapes
        for width in sizes.widths_for(one.batch, one.num_rows)
        if width
    }
    # a step's time beforehand is that of its draft and that of its rows: both ran in some step
    assert drafted == {one.draft_key for one in shapes if one.width}
    mixed = len(MIXED_ROWS) * (1 if max_batch <= FEW_SLOTS else 2) + len(LONE_ROWS)
    assert len(verified) + len(drafted) + len(sizes.drawn) + mixed <= MOST_GRAPHS == 64


@pytest.mark.parametrize("max_batch", [1, 5, 32, 100])
def test_every_number_of_requests_has_a_batch_and_rows(max_batch):
    sizes = StepSizes(max_batch, 15)
    assert sizes.batch_for(0) == 0
    for count in range(1, max_batch + 1):
        batch = sizes.batch_for(count)
        assert count <= batch <= max(max_batch, 1)
        rows = sizes.rows_for(batch)
        assert rows[0] == batch and rows == sorted(set(rows)) and rows[-1] <= 16 * batch


@pytest.mark.parametrize(("batch", "most"), [(1, 64), (2, 128), (4, 128), (8, 128), (16, 256)])
def test_few_requests_may_have_whole_trees(batch, most):
    assert StepSizes(32, 15, 63).rows_for(batch)[-1] == most
    assert StepSizes(32, 15, 63).most_rows(batch) == most
    assert StepSizes(32, 15).most_rows(batch) == 16 * batch


def test_half_a_block_is_drafted_where_many_verify_little():
    sizes = StepSizes(32, 15)
    assert sizes.widths_for(32, 32) == [0]
    assert sizes.widths_for(32, 128) == [7]
    assert sizes.widths_for(32, 256) == [7, 15]  # halves are enough, if all verify as many
    assert sizes.widths_for(32, 384) == sizes.widths_for(32, 512) == [15]
    assert sizes.widths_for(1, 4) == [15]  # what few draft costs next to nothing
    assert StepSizes(32, 3).widths_for(32, 64) == [3]  # a half would be one token
