"""Pages that hold pictures: which prompts share them, and where a hit may end."""

from __future__ import annotations

import random

import pytest

from flashdraft.core import Picture
from flashdraft.engine.cache.pages import PageBook, Pool
from tests import pictured
from tests.pictured import picture, words

SIZE = 4


def make_book(windows=(None,), num_pages=64):
    return PageBook([Pool(num_pages, window) for window in windows], SIZE)


def digests(*parts):
    """Of all complete pages of a prompt."""
    request, found = pictured.request("a", parts), []
    pages = len(request.prompt_ids) // SIZE
    make_book()._extend_digests(found, request.prompt_ids, pages, request.pictures)
    return found


def publish(book, *parts):
    """Have a whole prompt in the cache, whose owner has left."""
    request = pictured.request("a", parts)
    book.open("a", request.prompt_ids, None, request.pictures)
    assert book.reserve("a", len(request.prompt_ids))
    book.publish("a", request.prompt_ids, len(request.prompt_ids))
    book.close("a")


def hit(book, *parts, most=None):
    """How much of a prompt is found."""
    request = pictured.request("b", parts)
    length = book.open("b", request.prompt_ids, most, request.pictures)
    book.close("b")
    book.check_integrity()
    return length


def common(first, second):
    """How many pages are alike, from the start; all later ones differ."""
    alike = [a == b for a, b in zip(first, second, strict=True)]
    assert alike == sorted(alike, reverse=True)
    return sum(alike)


def test_a_text_hashes_as_it_does_without_pictures_about():
    text, found = words(16), []
    make_book()._extend_digests(found, text, 4)
    behind = digests(text, picture("a", 8))
    assert found == digests(text) == behind[:4]
    assert {len(one) for one in behind} == {32} and len(set(behind)) == 6


def test_another_picture_changes_every_page_from_the_first_that_it_touches():
    one, other = picture("a", 7), picture("b", 7)
    text, rest = words(6), words(11, seed=2)
    assert common(digests(text, one, rest), digests(text, other, rest)) == 1
    assert common(digests(text, one, rest), digests(text, one, rest)) == 6


def test_every_bit_of_a_key_counts():
    one = picture("a", 7)
    for bit in range(256):
        key = (int.from_bytes(one.key, "big") ^ (1 << bit)).to_bytes(32, "big")
        other = Picture(b"", 0, 0, 7, key)
        assert common(digests(one, words(5)), digests(other, words(5))) == 0


@pytest.mark.parametrize(
    "parts",
    [
        [[pictured.PICTURE] * 8],  # ids alone
        [[pictured.PICTURE], picture("a", 8)],
        [picture("a", 4), picture("a", 4)],
        [Picture(b"", 0, 0, 12, picture("a", 8).key)],  # its end is not there yet
    ],
)
def test_a_picture_is_another_one_at_another_place_or_of_another_size(parts):
    assert common(digests(picture("a", 8)), digests(*parts)[:2]) == 0


def test_the_order_of_pictures_in_a_page_counts():
    one, other = picture("a", 2), picture("b", 2)
    assert common(digests(one, other), digests(other, one)) == 0
    assert common(digests(one, other), digests(one, other)) == 1
    assert common(digests(one, one), digests(one, other)) == 0


def test_the_same_picture_is_found_and_another_one_is_not():
    book, text, rest = make_book(), words(8), words(9, seed=1)
    publish(book, text, picture("a", 8), rest)
    assert hit(book, text, picture("a", 8), rest) == 24
    assert hit(book, text, picture("b", 8), rest) == 8
    assert hit(book, text, picture("a", 8), [5]) == 16
    assert hit(book, text, picture("a", 8)) == 8  # its last token is left to compute: all of it is


@pytest.mark.parametrize("before", range(9))
def test_a_hit_that_would_end_inside_a_picture_ends_before_it(before):
    book, text, one = make_book(), words(before), picture("a", 10)
    publish(book, text, one, words(9, seed=1))
    found = hit(book, text, one, [5])
    end = before + 10
    expected = end if end % SIZE == 0 else before // SIZE * SIZE
    assert found == expected
    for most in range(before + 20):
        found = hit(book, text, one, words(9, seed=1), most=most)
        assert found <= most and not before < found < end
        full = min(most, before + 18) // SIZE * SIZE
        assert found == (before // SIZE * SIZE if before < full < end else full)


def test_pictures_in_a_row_may_leave_no_page_but_the_first():
    book = make_book()
    pictures = [picture(name, 6) for name in "abcd"]
    publish(book, words(4), *pictures, [5])
    borders = {4, 10, 16, 22, 28}
    for count in range(30):
        found = hit(book, words(4), *pictures, [5, 6, 7], most=count)
        assert found == max(n for n in (0, 4, 16, 28) if n <= count)
        assert found == 0 or found in borders


def test_a_shorter_hit_needs_its_own_window():
    """What precedes a picture was given back: with it the window that a hit before it looks at."""
    book = make_book([None, 6])
    request = pictured.request("a", [words(8), picture("a", 10), words(9, seed=1)])
    book.open("a", request.prompt_ids, None, request.pictures)
    assert book.reserve("a", len(request.prompt_ids))
    book.recycle("a", 18)  # pages that end before token 13
    book.publish("a", request.prompt_ids, len(request.prompt_ids))
    book.recycle("a", 24)
    book.close("a")
    assert hit(book, words(8), picture("a", 10), words(9, seed=1)) == 24
    assert hit(book, words(8), picture("a", 10), [5]) == 0


def test_half_a_picture_is_never_published():
    book, request = make_book(), pictured.request("a", [words(3), picture("a", 10), [5]])
    book.open("a", request.prompt_ids, None, request.pictures)
    assert book.reserve("a", 14)
    for length in (4, 8, 12):
        with pytest.raises(AssertionError, match="half a picture"):
            book.publish("a", request.prompt_ids, length)
    book.publish("a", request.prompt_ids, 3)
    book.publish("a", request.prompt_ids, 13)
    assert sum(page >= 0 for page in book.pools[0]._page_of.values()) == 3


def test_who_waits_keeps_its_digests():
    book, request = make_book(), pictured.request("a", [words(3), picture("a", 10), words(9)])
    tokens = list(request.prompt_ids)
    for _ in range(3):
        assert book.open("a", tokens, None, request.pictures) == 0
        book.close("a")
    publish(book, words(3), picture("a", 10), words(9))
    assert book.open("a", tokens, None, request.pictures) == 20


@pytest.mark.parametrize("seed", range(100))
def test_what_is_found_was_published_with_the_same_pictures(seed):
    """Against a model that compares prompts token by token, pictures by their keys and offsets."""
    source, book, known = random.Random(seed), make_book(num_pages=500), []

    def contents(request):
        tokens = [(token, b"", 0, 0) for token in request.prompt_ids]
        for placed in request.pictures:
            for i in range(placed.start, placed.end):
                one = placed.picture
                tokens[i] = (pictured.PICTURE, one.key, i - placed.start, one.num_tokens)
        return tokens

    for number in range(12):
        parts = pictured.random_parts(source, 30)
        request = pictured.request(f"r{number}", [*parts, words(source.randint(0, 5), seed=number)])
        content = contents(request)
        inside = {i for p in request.pictures for i in range(p.start + 1, p.end)}
        shared = max((_alike(content, other) for other in known), default=0)
        longest = min(shared, len(content) - 1) // SIZE * SIZE
        expected = max(n for n in range(0, longest + 1, SIZE) if n not in inside)
        assert book.open(number, request.prompt_ids, None, request.pictures) == expected
        assert book.reserve(number, len(content))
        book.publish(number, request.prompt_ids, len(content))
        known.append(content[: len(content) // SIZE * SIZE])
        book.check_integrity()


def _alike(content, other):
    pairs = zip(content, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(content), len(other)))
