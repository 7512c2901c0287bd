"""The lookup on the device: for every slot what the index on the host drafts."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from flashdraft.engine.draft import lookup, ngram
from flashdraft.engine.draft.lookup import MARGIN, TokenHistory, look_up
from flashdraft.engine.draft.ngram import NgramIndex
from flashdraft.kernels.advance import append_tokens

CPU = torch.device("cpu")
VOCAB_SIZE = 64


@pytest.fixture(autouse=True)
def _look_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_LOOKS", 10**6)


def hold(texts: list[list[int]], max_length: int, rng: random.Random | None = None) -> TokenHistory:
    """Every text in a slot of its own, behind it what somebody else left there."""
    history = TokenHistory(len(texts), max_length, CPU)
    for slot, text in enumerate(texts):
        if rng is not None:
            others = [*text[-4:], *(rng.randrange(4) for _ in range(max_length))]
            history.load(slot, 0, torch.tensor(others[:max_length]))
            rest = [*text, *text, *others][:max_length]
            history.load(slot, 0, torch.tensor(rest))
        history.load(slot, 0, torch.tensor(text, dtype=torch.int64))
    return history


def ask(history: Tensor, texts: list[list[int]], width: int, forbidden: set[int]) -> None:
    """The lookup's drafts are those of the index, for every text."""
    mask = None
    if forbidden:
        mask = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        mask[list(forbidden)] = True
    ends = torch.tensor([len(text) for text in texts])
    tokens, confidence = look_up(history, ends, width, mask)
    assert tokens.shape == confidence.shape == (len(texts), width)
    assert tokens.dtype == torch.int64 and confidence.dtype == torch.float32
    for slot, text in enumerate(texts):
        draft = NgramIndex(forbidden).propose(text, width)
        expected = [] if draft is None else draft.tokens
        sure = [] if draft is None else draft.confidence
        rest = width - len(expected)
        assert tokens[slot].tolist() == [*expected, *[0] * rest], text
        # to the bit
        assert confidence[slot].tolist() == torch.tensor([*sure, *[0.0] * rest]).tolist(), text


def draft_of(text: list[int], width: int) -> list[int]:
    tokens, confidence = look_up(
        hold([text], len(text)).until(len(text)), torch.tensor([len(text)]), width
    )
    assert bool((confidence > 0).all())
    return tokens[0].tolist()


def test_repeated_text_goes_on_as_before() -> None:
    assert draft_of([1, 2, 3, 4, 5, 6, 9, 1, 2, 3], 4) == [4, 5, 6, 9]
    assert draft_of([8, 1, 2, 3, 7, 1, 2, 4, 8, 1, 2], 1) == [3]
    assert draft_of([1, 2, 3, 1, 2, 4, 9, 1, 2], 1) == [4]


def test_a_repeating_run_goes_on_repeating() -> None:
    assert draft_of([7, 8, 7, 8, 7, 8], 5) == [7, 8, 7, 8, 7]
    assert draft_of([5, 5, 5], 15) == [5] * 15
    for period in range(1, 12):
        texts = [[slot % period for slot in range(length)] for length in range(1, 40)]
        ask(hold(texts, 40).until(40), texts, 15, set())


@pytest.mark.parametrize("like_a_gpu", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 12])
def test_random_texts_as_the_index_does(
    size: int, like_a_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if like_a_gpu:
        costs = lookup._costs(CPU).to(torch.uint8)
        monkeypatch.setattr(lookup, "_costs", lambda device: costs)
    rng, num_drafts = random.Random(size), 0
    for _ in range(120):
        max_length = rng.choice((3, 12, 60, 200))
        texts = [
            [rng.randrange(size) for _ in range(rng.randint(0, max_length))] for _ in range(12)
        ]
        longest = max(1, *map(len, texts))
        forbidden = set(rng.sample(range(size), rng.randint(0, size - 1)))
        forbidden = forbidden if rng.random() < 0.5 else set()
        history = hold(texts, max_length, rng).until(rng.randint(longest, max_length))
        ask(history, texts, rng.randint(1, 15), forbidden)
        num_drafts += sum(NgramIndex(forbidden).propose(text, 1) is not None for text in texts)
    assert num_drafts > 100


def test_texts_with_long_repeats_as_the_index_does() -> None:
    rng = random.Random(0)
    for _ in range(60):
        texts = []
        for _ in range(12):
            parts = [[rng.randrange(VOCAB_SIZE) for _ in range(12)] for _ in range(3)]
            text: list[int] = []
            for _ in range(rng.randint(2, 8)):
                part = rng.choice(parts)
                begin = rng.randrange(8)
                text += part[begin : rng.randint(begin + 2, 12)]
            texts.append(text)
        forbidden = set(rng.sample(range(VOCAB_SIZE), 6))
        ask(hold(texts, 100, rng).until(100), texts, rng.randint(1, 15), forbidden)


@pytest.mark.parametrize("width", range(1, 16))
def test_short_texts_and_nobody(width: int) -> None:
    texts = [[], [1], [1, 1], [1, 2], [1, 1, 1], [1, 2, 1], [1, 1, 2], [], [2, 1, 2, 1], [0] * 9]
    for forbidden in (set[int](), {1}, {0, 2}):
        ask(hold(texts, 9).until(9), texts, width, forbidden)
        ask(hold(texts, 20, random.Random(0)).until(20), texts, width, forbidden)
    ask(TokenHistory(3, 1, CPU).until(1), [[], [], []], width, set())


def test_more_places_than_the_index_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_LOOKS", 64)
    text = [9, 8, 1, 2, 7, *[1, 2, 3] * 100, 9, 8, 1, 2]
    draft = NgramIndex().propose(text, 1)
    assert draft is not None and draft.tokens == [3]
    assert draft_of(text, 1) == [7]


def test_nothing_depends_on_what_the_tensors_hold() -> None:
    device = torch.device("meta")  # it holds nothing
    history = TokenHistory(4, 30, device)
    counts = torch.empty(4, dtype=torch.int64, device=device)
    tokens, confidence = look_up(
        history.until(20), counts, 6, torch.empty(VOCAB_SIZE, dtype=torch.bool, device=device)
    )
    append_tokens(history.behind_first, counts, tokens, counts)
    history.move(counts)
    assert tokens.shape == confidence.shape == (4, 6)


def test_a_history_grows_as_its_texts_do() -> None:
    rng = random.Random(1)
    texts = [[rng.randrange(3) for _ in range(rng.randint(1, 9))] for _ in range(6)]
    history = hold(texts, 120)
    for _ in range(40):
        width = rng.randint(1, 8)
        counts = [min(rng.randint(0, width), 120 - len(text)) for text in texts]
        tokens = torch.tensor([[rng.randrange(3) for _ in range(width)] for _ in texts])
        lengths = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32)
        append_tokens(history.behind_first, lengths, tokens, torch.tensor(counts))
        for text, row, count in zip(texts, tokens.tolist(), counts, strict=True):
            text += row[:count]
        if rng.random() < 0.3:
            order = [rng.randrange(6) for _ in texts]
            history.move(torch.tensor(order))
            texts = [list(texts[source]) for source in order]
        for slot, text in enumerate(texts):
            assert history.until(120)[slot, MARGIN : MARGIN + len(text)].tolist() == text
        ask(history.until(max(map(len, texts))), texts, 5, set())


def test_what_is_not_counted_is_written_nowhere() -> None:
    history = hold([[1, 2, 3], [4, 5, 6]], 5)
    before = history.until(5).clone()
    drafts = torch.tensor([[7, 8, 9, 9, 9], [7, 8, 9, 9, 9]])
    append_tokens(history.behind_first, torch.tensor([0, 2]), drafts, torch.tensor([0, 0]))
    assert torch.equal(history.until(5), before)
    append_tokens(history.behind_first, torch.tensor([0, 2]), drafts, torch.tensor([1, 5]))
    assert history.until(5)[:, MARGIN:].tolist() == [[1, 7, 3, -1, -1], [4, 5, 6, 7, 8]]
    assert bool((history.until(0) == -1).all())


def test_a_slot_is_loaded_in_parts_and_a_few_slots_change_places() -> None:
    history = hold([[1, 1], [2, 2], [3, 3]], 4)
    address = history.until(4).data_ptr()
    history.load(1, 1, torch.tensor([5, 6, 7]))
    history.move(torch.tensor([1, 0]))
    assert history.until(4)[:, MARGIN:].tolist() == [[2, 5, 6, 7], [1, 1, -1, -1], [3, 3, -1, -1]]
    append_tokens(
        history.behind_first, torch.tensor([3]), torch.tensor([[9]]), torch.tensor([1])
    )  # no room
    assert history.until(4)[:, MARGIN:].tolist() == [[2, 5, 6, 7], [1, 1, -1, -1], [3, 3, -1, -1]]
    assert history.until(4).data_ptr() == address, "a captured step goes on reading it"
