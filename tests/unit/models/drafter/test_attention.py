"""Masks of blocks over packed documents: dense, and as flex attention's list of tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from flashdraft.models.drafter.attention import TILE, BlockLayout

KINDS = [(False, None), (True, None), (True, 5), (False, 5), (True, 300)]


def random_layout(
    num_context: int, num_blocks: int, block_rows: int, with_widths: bool = False
) -> BlockLayout:
    """Documents of random lengths side by side; anchors anywhere in them, ascending."""
    generator = torch.Generator().manual_seed(num_context + num_blocks)
    edges = torch.randint(1, num_context, (6,), generator=generator).sort().values
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), edges])
    anchors = torch.randint(0, num_context, (num_blocks,), generator=generator).sort().values
    own_start = starts[torch.searchsorted(starts, anchors, right=True) - 1]
    widths = torch.randint(1, block_rows + 1, (num_blocks,), generator=generator)
    return BlockLayout(num_context, block_rows, own_start, anchors, widths if with_widths else None)


def mask_by_hand(layout: BlockLayout, causal: bool, window: int | None) -> Tensor:
    num_blocks, rows = len(layout.anchors), layout.block_rows
    mask = torch.zeros(num_blocks * rows, layout.num_context + num_blocks * rows, dtype=torch.bool)
    for block in range(num_blocks):
        anchor, start = int(layout.anchors[block]), int(layout.starts[block])
        width = rows if layout.widths is None else int(layout.widths[block])
        for place in range(rows):
            row = mask[block * rows + place]
            for key in range(start, anchor):
                row[key] = window is None or anchor + place - key < window
            for key in range(width):
                near = window is None or abs(place - key) < window
                row[layout.num_context + block * rows + key] = near and (key <= place or not causal)
    return mask


@pytest.mark.parametrize(("causal", "window"), KINDS)
@pytest.mark.parametrize("with_widths", [False, True])
def test_a_block_sees_its_own_document_before_its_anchor_and_itself(
    causal: bool, window: int | None, with_widths: bool
) -> None:
    layout = random_layout(40, 9, 4, with_widths)
    expected = mask_by_hand(layout, causal, window)
    assert torch.equal(layout.dense_mask(causal, window), expected)
    assert (expected[:, :40].sum(1) > 0).any() and not expected[:, :40].all()


@pytest.mark.parametrize(("causal", "window"), KINDS)
@pytest.mark.parametrize(
    ("num_context", "num_blocks", "block_rows"), [(512, 32, 16), (700, 21, 10), (300, 90, 7)]
)
def test_tiles_cover_what_is_seen_and_little_more(
    num_context: int, num_blocks: int, block_rows: int, causal: bool, window: int | None
) -> None:
    layout = random_layout(num_context, num_blocks, block_rows)
    dense, mask = layout.dense_mask(causal, window), layout.tile_mask(causal, window)
    evaluated = create_mask(mask.mask_mod, 1, 1, *dense.shape, device="cpu")[0, 0]
    assert torch.equal(evaluated, dense)
    pad = [-size % TILE for size in dense.shape]
    padded = torch.nn.functional.pad(dense, (0, pad[1], 0, pad[0]))
    tiles = padded.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).any(3).any(1)
    listed = listed_tiles(mask)
    assert not (tiles & ~listed).any(), "a tile in which something is seen is skipped"
    assert torch.equal(listed_tiles(mask, transposed=True), listed.T), "backward reads another list"
    if window is None:  # a document between two others' anchors costs at most its own tiles
        assert listed.sum() <= tiles.sum() + tiles.shape[0]


def listed_tiles(mask: BlockMask, transposed: bool = False) -> Tensor:
    counts = mask.q_num_blocks if transposed else mask.kv_num_blocks
    indices = mask.q_indices if transposed else mask.kv_indices
    assert counts is not None and indices is not None
    listed = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for tile, count in enumerate(counts[0, 0].tolist()):
        listed[tile, indices[0, 0, tile, :count].long()] = True
        assert listed[tile].sum() == count
    return listed
