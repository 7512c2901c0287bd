"""Slots: a sequence comes, goes on by what is drawn, and ends where its request says so."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashdraft.core import SamplingParams
from flashdraft.engine.step.slots import NEVER, NUM_STOPS, Slots, SlotState
from flashdraft.kernels.advance import is_over
from flashdraft.kernels.draw.rule import SlotRequest

CPU = torch.device("cpu")
REQUEST = SlotRequest(SamplingParams(), 0, [5, 6, 7], stop_ids=(2, 3))


def three(**settings):
    """Three slots, of which the second one decodes behind five tokens."""
    slots = Slots(3, 1, 4, 64, CPU)
    state = {"anchor": 9, "length": 5, "request": REQUEST, **settings}
    slots.load(1, SlotState(**state))
    return slots


def over(slots, tokens, count):
    """Whether slot 1 has ended with the first `count` of these tokens."""
    spoken = torch.tensor([[2] * len(tokens), tokens, [2] * len(tokens)])
    counts = torch.tensor([1, count, 1])
    ahead = slots.states._replace(lengths=slots.lengths + counts.to(torch.int32))
    return bool(is_over(ahead, spoken, counts)[1])


def test_a_stop_token_ends_a_slot_if_it_is_committed():
    slots = three()
    assert over(slots, [8, 3, 8], 2) and over(slots, [2, 8, 8], 3)
    assert not over(slots, [8, 3, 8], 1) and not over(slots, [8, 8, 8], 3)


@pytest.mark.parametrize(("is_constrained", "ends"), [(False, False), (True, True)])
def test_before_min_tokens_a_stop_token_ends_only_what_a_grammar_lets_through(is_constrained, ends):
    params = SamplingParams(min_tokens=4)  # of the answer: positions up to 6
    slots = three(request=REQUEST._replace(params=params, is_constrained=is_constrained))
    assert over(slots, [3, 8], 2) is ends  # position 6
    assert over(slots, [8, 3], 2)  # position 7


def test_a_slot_ends_with_its_last_token():
    assert over(three(end=9), [8, 8, 8], 3) and not over(three(end=10), [8, 8, 8], 3)
    assert not over(three(end=NEVER), [8, 8, 8], 3)


def test_who_wakes_with_its_last_token_does_not_wake():
    slots = Slots(4, 1, 4, 64, CPU)
    for slot, end in enumerate((NEVER, NEVER, 4, NEVER)):
        late = dataclasses.replace(REQUEST.params, min_tokens=int(slot == 3))
        request = REQUEST._replace(params=late)
        slots.load(slot, SlotState(7, 0, request, is_awake=False, end=end))
    every = torch.arange(4)
    slots.wake(every, torch.tensor([8, 3, 8, 3]), torch.full((4,), 3))
    assert slots.alive.tolist() == [1, 0, 0, 1]
    assert slots.anchors.tolist() == [8, 3, 8, 3] and slots.lengths.tolist() == [3] * 4


def test_an_emptied_slot_has_nothing_of_who_was_there():
    slots = three(limit=4, end=8)
    slots.clear([1])
    fresh = Slots(3, 1, 4, 64, CPU)
    for mine, theirs in zip(slots._states, fresh._states, strict=True):
        assert torch.equal(mine, theirs)


def test_slots_move_with_all_they_have():
    slots = three(limit=4, end=8)
    slots.move([1, 0, 2])
    assert slots.limits.tolist() == [4, -1, -1] and slots.anchors.tolist() == [9, 0, 0]
    spoken = torch.tensor([[3], [3], [3]])
    counts = torch.ones(3, dtype=torch.int64)
    ahead = slots.states._replace(lengths=slots.lengths + 1)
    assert is_over(ahead, spoken, counts).tolist() == [True, False, False]


def test_more_stop_tokens_than_fit_are_left_to_the_host():
    many = tuple(range(20, 20 + 2 * NUM_STOPS))
    slots = three(request=REQUEST._replace(stop_ids=many))
    assert over(slots, [20], 1) and not over(slots, [many[-1]], 1)
