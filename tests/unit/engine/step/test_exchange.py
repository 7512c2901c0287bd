"""What host and device exchange: which mask each row of the target is drawn by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from flashdraft.engine.step.exchange import Exchange

WIDTH = 3
WORDS = 2


def make_exchange() -> Exchange:
    return Exchange(4, WIDTH, 1 + WIDTH, 40, torch.device("cpu"), torch.from_numpy)


def guide(slots: list[int], places: list[tuple[int, int]]) -> Any:
    """Slots with a grammar, and the rows that have a mask: the n-th has the words n + 1."""
    numbers = np.arange(1, 1 + len(places), dtype=np.int32)
    words = np.repeat(numbers[:, None], WORDS, axis=1)
    where = np.asarray(places, dtype=np.int64).reshape(-1, 2)
    return SimpleNamespace(slots=slots, masks=lambda drafts: (where, words))


def mask_of(exchange: Exchange, slot: int) -> list[int]:
    return exchange.mask_of(torch.full((1 + WIDTH,), slot), torch.arange(1 + WIDTH)).tolist()


def test_everything_is_allowed_at_first() -> None:
    exchange = make_exchange()
    assert all(mask_of(exchange, slot) == [-1] * 4 for slot in range(4))


def test_a_guided_slot_has_its_masks_and_nothing_is_allowed_elsewhere() -> None:
    exchange = make_exchange()
    exchange.before_draw(guide([1, 3], [(1, 0), (1, 1), (3, 0)]), {})
    assert [mask_of(exchange, slot) for slot in (0, 2)] == [[-1] * 4] * 2
    one, other = mask_of(exchange, 1), mask_of(exchange, 3)
    assert exchange.masks[one].tolist() == [[1] * WORDS, [2] * WORDS, [0] * WORDS, [0] * WORDS]
    assert exchange.masks[other].tolist() == [[3] * WORDS, *[[0] * WORDS] * 3]
    exchange.before_draw(guide([0], [(0, 0)]), {})  # the next step's word is the only one
    assert exchange.masks[mask_of(exchange, 0)].tolist() == [[1] * WORDS, *[[0] * WORDS] * 3]
    assert [mask_of(exchange, slot) for slot in (1, 2, 3)] == [[-1] * 4] * 3


def test_rows_behind_the_drafts_have_the_last_ones_mask() -> None:
    exchange = make_exchange()
    exchange.before_draw(guide([2], [(2, WIDTH)]), {})
    owner, place = torch.tensor([2, 2, 0]), torch.tensor([WIDTH + 5, -4, WIDTH + 5])
    assert exchange.mask_of(owner, place).tolist() == [1, 0, -1]
