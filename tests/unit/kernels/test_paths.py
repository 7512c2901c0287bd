"""Paths through slots: candidates in order behind each other, and the chains that follow them."""

from __future__ import annotations

import pytest
import torch

from flashdraft.kernels.paths import PathOffers, follow, list_candidates, offer_paths
from tests.grown import make_drawn
from tests.pathed import make_paths, offers_by_hand


@pytest.mark.parametrize("is_sure", [False, True])
@pytest.mark.parametrize("count", [1, 5, 17])
@pytest.mark.parametrize("seed", range(6))
def test_offers_are_those_by_hand(seed: int, count: int, is_sure: bool) -> None:
    drawn = make_drawn(seed)
    candidates, scores = make_paths(drawn, 16, seed, is_sure)
    offers = offer_paths(candidates, scores, drawn.settings, drawn.rows, count)
    for row in range(len(candidates.tokens)):
        for before in (0, 3, 16, 17):
            expected = offers_by_hand(drawn, candidates, scores, row, before, count)
            tokens, confidence, numbers = zip(*expected, strict=True)
            assert offers.tokens[row, before].tolist() == list(tokens)
            assert offers.numbers[row, before].tolist() == list(numbers)
            found = offers.confidence[row, before].tolist()
            assert found == pytest.approx(list(confidence), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_candidates_are_what_was_drawn_and_the_likeliest_each_once(seed: int) -> None:
    draw = make_drawn(seed).draw
    candidates = list_candidates(draw, 16)
    for row, token in enumerate(draw.tokens.tolist()):
        found = [one for one in candidates.tokens[row].tolist() if one >= 0]
        tops = [one for one in draw.top_ids[row, :16].tolist() if one >= 0]
        assert found == ([token, *(one for one in tops if one != token)] if token >= 0 else [])


def test_a_head_without_a_say_leaves_the_likeliest_first() -> None:
    drawn = make_drawn(1, temperature=0.0)
    candidates, scores = make_paths(drawn, 16, 0, is_sure=False)
    scores.added.zero_()
    offers = offer_paths(candidates, scores, drawn.settings, drawn.rows, 4)
    is_drawn = drawn.draw.tokens >= 0
    assert torch.equal(offers.tokens[is_drawn, 0, 0], drawn.draw.tokens[is_drawn])
    chances = (drawn.draw.logit - drawn.draw.log_total).exp()
    torch.testing.assert_close(offers.confidence[is_drawn, 5, 0], chances[is_drawn])


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_head_says_nothing(broken: float) -> None:
    drawn = make_drawn(2)
    candidates, scores = make_paths(drawn, 16, 0, is_sure=True)
    assert scores.sure is not None
    scores.added.fill_(broken)
    scores.sure.fill_(torch.nan)
    told = drawn.settings, drawn.rows, 5
    found = offer_paths(candidates, scores, *told)
    silent = scores._replace(added=torch.zeros_like(scores.added), sure=None)
    for one, other in zip(found, offer_paths(candidates, silent, *told), strict=True):
        assert torch.equal(one, other)


def test_a_chain_follows_the_first_of_each() -> None:
    generator = torch.Generator().manual_seed(3)
    slots, width, before, count = 5, 7, 4, 3
    shape = slots * width, before, count
    offers = PathOffers(
        torch.randint(100, shape, generator=generator),
        torch.rand(shape, generator=generator),
        torch.randint(before - 1, shape, generator=generator),
    )
    tokens, confidence = follow(offers, width)
    for slot in range(slots):
        last = 0
        for place in range(width):
            row = slot * width + place
            assert tokens[slot, place] == offers.tokens[row, last, 0]
            assert confidence[slot, place] == offers.confidence[row, last, 0]
            last = int(offers.numbers[row, last, 0])
