"""Our renderings equal those of transformers, or differ for a reason that is on the list."""

from __future__ import annotations

import pytest

from tests.unit.chat.renderings.comparison import (
    EXPECTED,
    PROMPTED,
    REASONS,
    REFUSED,
    TEMPLATES,
    Outcome,
    compare,
    outcomes,
    summary,
)
from tests.unit.chat.renderings.conversations import CONVERSATIONS


@pytest.fixture(scope="module")
def found() -> list[Outcome]:
    return list(outcomes())


def test_there_is_much_to_compare(found: list[Outcome]) -> None:
    counts = summary(found)
    print(counts)
    assert counts["templates"] >= 25 and counts["conversations"] >= 20
    assert counts["compared"] == counts["templates"] * counts["conversations"]
    told = counts["by_reason"][PROMPTED]["renderings"]
    # few refusals: most of what the template itself can say, it says
    assert counts["equal_texts"] > (counts["compared"] - told) // 2


def test_every_difference_has_its_reason(found: list[Outcome]) -> None:
    unexplained = [one for one in found if one.ours != one.theirs and not one.reasons]
    assert unexplained == []


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_reason_is_needed(template: str, found: list[Outcome]) -> None:
    different = [one for one in found if one.template == template and one.ours != one.theirs]
    for name in EXPECTED[template]:
        others = tuple(one for one in EXPECTED[template] if one != name)
        again = [
            compare(template, TEMPLATES[template], one.conversation, others)
            for one in different
            if name in one.reasons
        ]
        assert [one for one in again if not one.reasons], f"{name} explains nothing"


def test_the_lists_name_what_there_is(found: list[Outcome]) -> None:
    assert EXPECTED.keys() <= TEMPLATES.keys()
    assert CONVERSATIONS.keys() >= REFUSED
    assert {name for one in found for name in one.reasons} == REASONS.keys()
    assert all(one.ours is None for one in found if one.conversation in REFUSED)
