"""Where chunks of prompts end: outside of pictures, and as late as they may."""

from __future__ import annotations

import random

import pytest

from flashdraft.engine import sequence as module
from flashdraft.engine.sequence import Sequence
from tests import pictured
from tests.pictured import picture, words


def sequence_of(*parts):
    return Sequence(pictured.request("a", parts), frozenset(), 1000)


def test_a_text_is_cut_anywhere():
    text = sequence_of(words(50))
    assert [text.cut(0, 7), text.cut(7, 50), text.cut(49, 9)] == [7, 43, 1]
    assert text.pictures_in(0, 50) == [] and text.num_picture_tokens(0, 50) == 0


def test_a_chunk_ends_before_a_picture_that_does_not_fit():
    one = sequence_of(words(10), picture("a", 8), words(5))
    assert [one.cut(0, most) for most in (4, 10, 11, 17, 18, 19, 99)] == [4, 10, 10, 10, 18, 19, 23]


def test_a_picture_at_the_beginning_of_a_chunk_is_in_it_however_large():
    one = sequence_of(picture("a", 8), picture("b", 4), words(2))
    assert [one.cut(0, most) for most in (1, 7, 8, 11, 12, 13)] == [8, 8, 8, 8, 12, 13]
    assert [one.cut(8, most) for most in (1, 4, 5)] == [4, 4, 5]


def test_a_chunk_has_no_more_pictures_than_a_tower_should_see_at_once(monkeypatch):
    monkeypatch.setattr(module, "MAX_CHUNK_PICTURES", 10)
    one = sequence_of(words(3), *(picture(name, 4) for name in "abc"), picture("d", 30), words(2))
    assert one.cut(0, 99) == 3 + 4 + 4
    assert one.cut(11, 99) == 4
    assert one.cut(15, 99) == 30
    assert one.cut(45, 99) == 2


def test_nothing_begins_inside_a_picture():
    with pytest.raises(AssertionError, match="inside a picture"):
        sequence_of(words(3), picture("a", 4)).cut(5, 9)


@pytest.mark.parametrize("seed", range(50))
def test_chunks_are_the_largest_that_cut_no_picture(seed):
    source = random.Random(seed)
    one = sequence_of(*pictured.random_parts(source, 30))
    inside = {i for p in one.request.pictures for i in range(p.start + 1, p.end)}
    starts = {p.start: p.end for p in one.request.pictures}
    start, length, seen = 0, len(one.tokens), []
    while start < length:
        most = source.randint(1, 40)
        count = one.cut(start, most)
        ends = [e for e in range(start + 1, min(start + most, length) + 1) if e not in inside]
        assert start + count == (max(ends) if ends else starts[start])
        chunk = one.pictures_in(start, count)
        seen += [p._replace(start=p.start + start) for p in chunk]
        assert all(p.start >= 0 and p.end <= count for p in chunk)
        start += count
    assert seen == list(one.request.pictures)
    assert one.stats.picture_tokens == sum(p.picture.num_tokens for p in one.request.pictures)
