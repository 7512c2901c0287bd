"""Grammars that are refused say why in words, and not what llguidance calls it."""

from __future__ import annotations

import json

import pytest

from flashdraft.chat.grammar.compiler import LlguidanceCompiler, _refusal
from flashdraft.core import GrammarSpec
from flashdraft.engine.sampling.grammar import GrammarTooComplexError
from flashdraft.errors import RequestError
from flashdraft.models.tokenizer import Tokenizer
from tests.tiny import END_OF_TURN, VOCAB_SIZE, make_tiny_tokenizer

pytest.importorskip("llguidance")

TINY = Tokenizer(make_tiny_tokenizer())
BRANCHES = "|".join(f".*{chr(ord('a') + number)}.{{5}}" for number in range(26))


def compile_grammar(kind: str, text: str) -> None:
    LlguidanceCompiler(TINY, VOCAB_SIZE, [END_OF_TURN])(GrammarSpec(kind, text))


def check_words(refusal: RequestError) -> None:
    message = str(refusal)
    assert isinstance(refusal, GrammarTooComplexError)
    assert "too complex" in message and "Repeat less" in message
    assert "limits." not in message and "fuel" not in message and len(message) < 200


def test_a_pattern_beyond_the_lexers_work_is_too_complex() -> None:
    schema = {"type": "string", "pattern": BRANCHES, "minLength": 100, "maxLength": 200}
    with pytest.raises(GrammarTooComplexError) as refused:
        compile_grammar("json_schema", json.dumps(schema))
    check_words(refused.value)


def test_no_client_is_told_to_raise_a_limit_of_the_server() -> None:
    # llguidance's own words; they need a vocabulary larger than a test's
    said = "lexer precomputation failed; either increase limits.initial_lexer_fuel or disable"
    check_words(_refusal("regex", f"{said} limits.precompute_large_lexemes"))


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", r"[^\s\S]", "matches no text"),
        ("json_schema", '{"$ref": "#"}', "never ends"),
        ("json_schema", '{"anyOf": [{"$ref": "#"}]}', "never ends"),
        ("lark", 'start: start "a"', "never ends"),
    ],
)
def test_what_nothing_matches_is_said_in_words(kind: str, text: str, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        compile_grammar(kind, text)
    assert words in str(refused.value) and "NoExtensionBias" not in str(refused.value)
