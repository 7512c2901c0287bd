"""Passes of a few sizes over fixed places: what is padded is not seen, nor what was before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashdraft.core import Picture
from flashdraft.errors import RequestError
from flashdraft.models.vision.fixed import MAX_PICTURES, SIZES, FixedPasses, Key
from flashdraft.models.vision.patches import passes
from flashdraft.models.vision.tower import Gemma4VisionTower
from tests import zoo
from tests.unit.models.vision.towers import shown, tiny_tower

SMALL = (6, 12, 20)  # tokens


class Replays:
    """As graphs do: what ran first by a key runs again, and what it said is overwritten."""

    def __init__(self) -> None:
        self.functions: dict[Key, Callable[[], Tensor]] = {}
        self.found: dict[Key, Tensor] = {}
        self.calls: list[Key] = []

    def call(self, key: Key, function: Callable[[], Tensor]) -> Tensor:
        self.calls.append(key)
        for found in self.found.values():
            found.fill_(torch.nan)
        found = self.functions.setdefault(key, function)()
        return self.found.setdefault(key, found).copy_(found)


@pytest.fixture(params=["torch", "float32"])
def tower(request: pytest.FixtureRequest) -> Gemma4VisionTower:
    return tiny_tower(zoo.kernels(request.param))


def as_graphs(tower: Gemma4VisionTower) -> tuple[FixedPasses, Replays]:
    replays = Replays()
    return FixedPasses(tower, replays.call, SMALL), replays


def check(fixed: FixedPasses, tower: Gemma4VisionTower, pictures: list[Picture]) -> None:
    for found, one in zip(fixed.encode(pictures), pictures, strict=True):
        assert torch.equal(found, tower.encode([one])[0])
        assert found.untyped_storage().nbytes() == found.nbytes


def test_a_padded_picture_has_the_same_features(tower: Gemma4VisionTower) -> None:
    fixed, replays = as_graphs(tower)
    for rows, columns in [(1, 1), (2, 3), (3, 2), (1, 7), (4, 3), (13, 1), (4, 5)]:
        check(fixed, tower, [shown(rows, columns)])
    assert [size for _, size in replays.calls] == [6, 6, 6, 12, 12, 20, 20]


def test_pictures_of_a_pass_do_not_see_each_other(tower: Gemma4VisionTower) -> None:
    fixed, replays = as_graphs(tower)
    check(fixed, tower, [shown(2, 3), shown(1, 2), shown(3, 1)])
    check(fixed, tower, [shown(2, 2), shown(1, 5)])  # in the places of the last ones
    check(fixed, tower, [shown(4, 3)])
    check(fixed, tower, [shown(1, 1, seed) for seed in range(MAX_PICTURES)])
    assert [size for _, size in replays.calls] == [12] * 4


def test_what_was_said_before_stays(tower: Gemma4VisionTower) -> None:
    fixed, _ = as_graphs(tower)
    (first,) = fixed.encode([shown(2, 3)])
    copy = first.clone()
    (second,) = fixed.encode([shown(2, 3, seed=1)])
    assert torch.equal(first, copy) and not torch.equal(first, second)


def test_more_than_there_is_room_for(tower: Gemma4VisionTower) -> None:
    fixed, replays = as_graphs(tower)
    check(fixed, tower, [shown(1, 1, seed) for seed in range(MAX_PICTURES + 1)])
    assert [size for _, size in replays.calls] == [12, 6]
    check(fixed, tower, [shown(2, 3), shown(3, 7), shown(4, 4), shown(1, 5)])
    assert [size for _, size in replays.calls[2:]] == [6, 20, 6]  # 21 tokens run as they are
    assert fixed.encode([]) == []


def test_nobodys_rows_are_not_even_finite(tower: Gemma4VisionTower) -> None:
    """Whatever is behind the pictures comes to nothing."""

    def call(key: Key, function: Callable[[], Tensor]) -> Tensor:
        found = function()
        assert len(found) == key[1]
        found[4:] = torch.nan
        return found

    check(FixedPasses(tower, call, SMALL), tower, [shown(2, 2)])


def test_a_picture_that_does_not_fit_is_refused_and_the_next_is_not() -> None:
    tower = tiny_tower(zoo.kernels("float32"))
    fixed, _ = as_graphs(tower)
    with pytest.raises(RequestError, match="whose sides|sides must be multiples"):
        fixed.encode([shown(2, 2), Picture(bytes(3 * 13 * 12), 13, 12, 1, bytes(32))])
    check(fixed, tower, [shown(1, 3)])


def test_every_pass_can_be_rehearsed() -> None:
    fixed, replays = as_graphs(tiny_tower(zoo.kernels("float32")))
    for key in fixed.keys:
        fixed.rehearse(key)
    assert replays.calls == fixed.keys == [("tower", size) for size in reversed(SMALL)]


def test_the_usual_sizes_waste_little() -> None:
    """Tokens of pictures as the default budget makes them, of frames, and of two pictures."""
    for num_tokens in (63, 66, 70, 260, 264, 266, 270, 280, 528, 532, 560):
        size = next(size for size in SIZES if size >= num_tokens)
        assert size <= 1.12 * num_tokens
    assert list(SIZES) == sorted(set(SIZES))


def test_passes_keep_the_order_and_the_room() -> None:
    pictures = [shown(1, count) for count in (3, 3, 1, 7, 2, 2, 2, 2)]
    found = [[one.num_tokens for one in some] for some in passes(pictures, 6)]
    assert found == [[3, 3], [1], [7], [2, 2, 2], [2]]
    found = [[one.num_tokens for one in some] for some in passes(pictures, 6, 2)]
    assert found == [[3, 3], [1], [7], [2, 2], [2, 2]]
