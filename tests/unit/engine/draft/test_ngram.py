"""The n-gram proposer: longest match, latest place, and what comes after it."""

from __future__ import annotations

import random
import time
import tracemalloc

import pytest

from flashdraft.engine.draft.ngram import MAX_LOOKS, MAX_MATCH, MIN_MATCH, NgramIndex


def propose(tokens: list[int], room: int = 4) -> list[int] | None:
    draft = NgramIndex().propose(tokens, room)
    return None if draft is None else draft.tokens


def naive(tokens: list[int], room: int) -> tuple[list[int], int] | None:
    """The drafts and the length of the match, by looking everywhere."""
    for length in range(min(MAX_MATCH, len(tokens)), MIN_MATCH - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                following = list(tokens[end:])
                while len(following) < room:
                    following += following[: len(tokens) - end]
                return following[:room], length
    return None


def test_repeated_text_goes_on_as_before() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]) == [4, 5, 6, 9]


def test_a_repeating_run_goes_on_repeating() -> None:
    assert propose([7, 8, 7, 8, 7, 8], 5) == [7, 8, 7, 8, 7]
    assert propose([5, 5, 5], 3) == [5, 5, 5]
    assert propose([0, 1, 2, 3, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]


def test_the_latest_place_is_preferred_and_the_longest_match_before_it() -> None:
    assert propose([1, 2, 3, 1, 2, 4, 9, 1, 2], 1) == [4]
    assert propose([8, 1, 2, 3, 7, 1, 2, 4, 8, 1, 2], 1) == [3]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 1], [1, 2, 3, 4, 5], [1, 2, 3, 4, 1, 3]])
def test_nothing_to_propose(tokens: list[int]) -> None:
    assert propose(tokens) is None


@pytest.mark.parametrize("room", [0, 1, 3, 15])
def test_room_is_kept(room: int) -> None:
    drafts = propose([1, 2, 3, 4, 5, 1, 2], room)
    assert drafts is None if room == 0 else drafts is not None and len(drafts) == room


def test_confidence_grows_with_the_match_and_stays_a_probability() -> None:
    text, seen = list(range(20)), []
    for length in range(MIN_MATCH, MAX_MATCH + 3):
        draft = NgramIndex().propose([*text, 99, *text[10 - length : 10]], 3)
        assert draft is not None and draft.tokens == [10, 11, 12]
        assert draft.source == "ngram" and len(set(draft.confidence)) == 1
        seen.append(draft.confidence[0])
    assert seen == sorted(seen) and 0.0 < seen[0] < seen[-1] < 1.0
    assert seen[-1] == seen[-3], f"more than {MAX_MATCH} tokens are not compared"


def test_random_growing_texts_against_a_naive_search() -> None:
    num_found = 0
    for seed in range(300):
        rng = random.Random(seed)
        size = rng.choice((2, 4, 12))
        tokens, index = [rng.randrange(size) for _ in range(rng.randint(1, 12))], NgramIndex()
        for _ in range(25):
            room = rng.randint(1, 12)
            draft, expected = index.propose(tokens, room), naive(tokens, room)
            if expected is None:
                assert draft is None
            else:
                assert draft is not None and draft.tokens == expected[0]
                surer = 0.6 * (expected[1] - MIN_MATCH) / (MAX_MATCH - MIN_MATCH)
                assert draft.confidence == pytest.approx([0.35 + surer] * room)
                num_found += 1
            for _ in range(rng.choice((1, 1, 5))):  # the answer grows, by drafts of its own or not
                repeat = draft is not None and rng.random() < 0.5
                tokens.append(draft.tokens[0] if repeat and draft else rng.randrange(size))
    assert num_found > 1000


def test_a_common_pair_is_looked_up_in_bounded_time() -> None:
    rng, tokens = random.Random(0), []
    for _ in range(20_000):
        tokens += [1, 2, rng.randrange(10, 50_000)]
    index = NgramIndex()
    tokens += [1, 2]
    index.extend(tokens)
    begin = time.process_time()
    for _ in range(100):
        assert index.propose(tokens, 4) is not None
    assert time.process_time() - begin < 100 * MAX_LOOKS * 5e-6


def test_a_long_prompt_is_indexed_fast_and_small() -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(50_000) for _ in range(100_000)]  # hardly a pair comes up twice
    begin = time.process_time()
    NgramIndex().extend(tokens)
    assert time.process_time() - begin < 1.0
    tracemalloc.start()
    try:
        index = NgramIndex()
        index.extend(tokens[:20_000])
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 20_000 * 250
