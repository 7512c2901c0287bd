"""Requests that share a compiled grammar share its work, and not what it is beyond."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("llguidance")

from flashdraft.chat.grammar.compiler import LlguidanceCompiler
from flashdraft.core import GrammarSpec
from flashdraft.engine.sampling.grammar import GrammarError
from flashdraft.models.tokenizer import Tokenizer
from tests.tiny import END_OF_TURN, VOCAB_SIZE, make_tiny_tokenizer

TINY = Tokenizer(make_tiny_tokenizer())

DEMANDING = GrammarSpec("regex", "(?:.*[a-m].{57}b)")  # nearly every text leads to a new state
LENGTH = 1200


def new_compiler() -> LlguidanceCompiler:
    return LlguidanceCompiler(TINY, VOCAB_SIZE, [END_OF_TURN])


def bits(mask: bytes) -> np.ndarray:
    return np.nonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))[0]


def walk(matcher, seed: int, length: int = LENGTH) -> tuple[list[int], list[bytes]]:
    """Some way through a grammar, by a seed: the tokens and the masks, as far as it leads."""
    choose = random.Random(seed)
    tokens, masks = [], []
    try:
        for _ in range(length):
            masks.append(matcher.allowed())
            tokens.append(int(choose.choice(bits(masks[-1]))))
            assert matcher.advance(tokens[-1])
    except GrammarError:
        pass
    return tokens, masks


def alone(seed: int, length: int = LENGTH) -> tuple[list[int], list[bytes]]:
    return walk(new_compiler()(DEMANDING).start(), seed, length)


def test_later_requests_do_not_suffer_from_what_earlier_ones_used() -> None:
    grammar = new_compiler()(DEMANDING)
    for seed in range(6):
        assert walk(grammar.start(), seed) == alone(seed)
    assert len(alone(0)[0]) == LENGTH


def test_running_requests_go_on_unchanged_when_another_has_used_the_lexer_up() -> None:
    grammar = new_compiler()(DEMANDING)
    tokens, masks = alone(7)
    matcher = grammar.start()
    for place, token in enumerate(tokens):
        if place in (100, 300, 301):
            for seed in range(3):
                walk(grammar.start(), 1000 * place + seed)
        assert matcher.allowed() == masks[place]
        if place % 50 == 10:
            matcher.rollback(10)
            assert matcher.allowed() == masks[place - 10]
            assert all(matcher.advance(token) for token in tokens[place - 10 : place])
        assert matcher.advance(token)


def test_a_request_that_is_too_much_by_itself_fails_and_the_grammar_stays_good() -> None:
    grammar = new_compiler()(DEMANDING)
    far = [0, 0]
    for turn in range(2):
        far[turn] = len(walk(grammar.start(), 5, 20_000)[0])
        assert walk(grammar.start(), 0) == alone(0)
    assert min(far) > LENGTH and max(far) < 20_000


def test_a_long_answer_is_replayed_whole() -> None:
    tokens, _ = alone(5, 2000)
    matcher = new_compiler()(DEMANDING).start()
    assert all(matcher.advance(token) for token in tokens)
