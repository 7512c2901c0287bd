"""Rows laid out by tensor operations are those that one would lay out by hand."""

from __future__ import annotations

import random

import pytest
import torch

from flashdraft.engine.step.layout import lay_out_rows


def by_hand(blocks, lengths, counts):
    tokens, positions, starts = [], [], [0]
    for s, block in enumerate(blocks):
        for place in range(counts[s] + 1):
            tokens.append(block[place])
            positions.append(lengths[s] + place)
        starts.append(len(tokens))
    return tokens, positions, starts


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("whole", [False, True])
def test_rows_are_those_by_hand(seed, whole):
    source = random.Random(seed)
    num_seqs, width = source.randint(1, 6), source.randint(1, 9)
    blocks = [[source.randrange(99) for _ in range(width)] for _ in range(num_seqs)]
    lengths = [source.randrange(20) for _ in range(num_seqs)]
    counts = [width - 1 if whole else source.randrange(width) for _ in range(num_seqs)]
    rows = lay_out_rows(
        torch.tensor(blocks),
        torch.tensor(lengths, dtype=torch.int32),
        None if whole else torch.tensor(counts) + 1,
        num_seqs + sum(counts),
    )
    assert tuple(part.tolist() for part in rows[:3]) == by_hand(blocks, lengths, counts)
    assert rows.owner.tolist() == [s for s in range(num_seqs) for _ in range(counts[s] + 1)]
    assert [part.dtype for part in rows] == [torch.int64, torch.int64, torch.int32, torch.int64]
