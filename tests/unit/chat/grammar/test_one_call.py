"""Where an answer makes one call and no second: clients that wait for one fail at two."""

from __future__ import annotations

import pytest

from flashdraft.chat.answer_format import AnswerFormat
from flashdraft.models.tokenizer import Tokenizer
from tests.unit.chat.chat_factory import (
    CHATML_MARKS,
    byte_tokenizer,
    gemma4_tokenizer,
    qwen3_tokenizer,
    tool,
)
from tests.unit.chat.grammar.test_tools import accepts

TOOLS = [tool("now"), tool("later")]
GEMMA4_CALL = "<|tool_call>call:now{}<tool_call|>"
HERMES_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
HERMES_CALLS = f"{HERMES_CALL}\n{HERMES_CALL}"


@pytest.mark.parametrize(
    ("tokenizer", "once", "twice"),
    [
        (gemma4_tokenizer(), GEMMA4_CALL, GEMMA4_CALL * 2),
        (qwen3_tokenizer(), HERMES_CALL, HERMES_CALLS),
    ],
)
def test_a_function_that_is_named_is_called_once(
    tokenizer: Tokenizer, once: str, twice: str
) -> None:
    named = AnswerFormat.of(tokenizer).tool_grammar(TOOLS, "now", parallel=True, thinking=False)
    assert accepts(tokenizer, named, once) and not accepts(tokenizer, named, twice)
    anyone = AnswerFormat.of(tokenizer).tool_grammar(TOOLS, "required", True, thinking=False)
    assert accepts(tokenizer, anyone, once) and accepts(tokenizer, anyone, twice)


def test_a_model_that_was_only_told_of_calls_makes_one() -> None:
    """It would repeat itself until its tokens are used up, and a client's loop ends there."""
    tokenizer = byte_tokenizer(CHATML_MARKS, [], "{{ messages }}")
    assert AnswerFormat.of(tokenizer).told_marks is not None
    spec = AnswerFormat.of(tokenizer).tool_grammar(TOOLS, "required", parallel=True)
    assert accepts(tokenizer, spec, HERMES_CALL) and not accepts(tokenizer, spec, HERMES_CALLS)
