"""From an answer's tokens to reasoning, content and tool calls: the chat package's front door.

The pieces of an answer are its text, cut where special tokens stood, and the ids of those tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashdraft.chat.answers.deltas import (
    Content,
    Delta,
    PlainParser,
    Reasoning,
    ResponseParser,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    join_deltas,
)
from flashdraft.chat.answers.formats import answer_format, open_thought, supports_tools
from flashdraft.chat.answers.machine import MarkedParser
from flashdraft.chat.grammar.tools import tool_grammar
from flashdraft.chat.sampling import sampling_defaults
from flashdraft.chat.schema.reading import tool_functions
from flashdraft.models.tokenizer import Tokenizer

__all__ = [
    "Content",
    "Delta",
    "Reasoning",
    "ResponseParser",
    "ToolCallArguments",
    "ToolCallBegin",
    "ToolCallEnd",
    "join_deltas",
    "response_parser",
    "sampling_defaults",
    "supports_tools",
    "tool_grammar",
]


def response_parser(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    tools: Sequence[Mapping[str, Any]] | None,
) -> ResponseParser:
    """The parser of one answer; without tools a call is content, spelled as the model wrote it."""
    found = answer_format(tokenizer, tool_functions(tools))
    if found is None:
        return PlainParser()
    return MarkedParser(found, open_thought(tokenizer, prompt_ids))
