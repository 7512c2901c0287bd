"""Acceptance against a naive loop."""

from __future__ import annotations

import random

import pytest
import torch

from flashdraft.kernels.accept import accept, accept_ragged


def naive(samples: list[int], drafts: list[int]) -> tuple[int, int]:
    num_accepted = 0
    while num_accepted < len(drafts) and drafts[num_accepted] == samples[num_accepted]:
        num_accepted += 1
    return num_accepted, samples[num_accepted]


def random_cases(chance: random.Random, width: int) -> list[tuple[list[int], list[int]]]:
    """(samples, drafts) per sequence: 0 to width - 1 drafts, right most of the time."""
    cases = []
    for _ in range(chance.randrange(1, 6)):
        samples = [chance.randrange(3) for _ in range(chance.randrange(1, width + 1))]
        wrong = chance.choice([0.0, 0.2, 1.0])
        drafts = [s if chance.random() >= wrong else s + 1 for s in samples[:-1]]
        cases.append((samples, drafts))
    return cases


@pytest.mark.parametrize("width", [1, 2, 5, 16])
def test_accept_matches_a_naive_loop(width: int) -> None:
    chance = random.Random(width)
    for _ in range(100):
        cases = random_cases(chance, width)
        expected = [naive(samples, drafts) for samples, drafts in cases]
        # Padding that would agree if it were looked at.
        samples = torch.tensor([s + [1] * (width - len(s)) for s, _ in cases])
        drafts = torch.tensor([d + [1] * (width - 1 - len(d)) for _, d in cases])
        drafts = drafts.to(torch.int64).reshape(len(cases), width - 1)
        lengths = torch.tensor([len(d) for _, d in cases])
        outcome = accept(samples, drafts, lengths)
        assert list(zip(*(t.tolist() for t in outcome), strict=True)) == expected

        tokens = [token for _, d in cases for token in [9, *d]]  # anchor, then drafts
        flat = [token for s, _ in cases for token in s]
        starts = torch.tensor([0, *(len(s) for s, _ in cases)]).cumsum(0).to(torch.int32)
        ragged = accept_ragged(torch.tensor(flat), torch.tensor(tokens), starts, width)
        assert list(zip(*(t.tolist() for t in ragged), strict=True)) == expected


def test_a_length_hides_drafts_that_would_agree() -> None:
    samples = torch.tensor([[4, 5, 6], [4, 5, 6], [4, 5, 6]])
    outcome = accept(samples, samples[:, :2], torch.tensor([0, 1, 2]))
    assert outcome.num_accepted.tolist() == [0, 1, 2]
    assert outcome.bonus.tolist() == [4, 5, 6]


def test_agreement_after_the_first_refusal_does_not_count() -> None:
    outcome = accept(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 9, 3]]), torch.tensor([3]))
    assert (outcome.num_accepted.tolist(), outcome.bonus.tolist()) == ([1], [2])


def test_acceptance_ends_where_no_token_can_be_chosen() -> None:
    outcome = accept(torch.tensor([[1, -1, 3, 4]]), torch.tensor([[1, 2, 3]]), torch.tensor([3]))
    assert (outcome.num_accepted.tolist(), outcome.bonus.tolist()) == ([1], [-1])


def test_an_empty_batch_is_fine() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    outcome = accept(empty.view(0, 4), empty.view(0, 3), empty)
    assert outcome.num_accepted.shape == outcome.bonus.shape == (0,)
