"""Objects of clients' schemas end after their properties, unless the server leaves them open."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flashdraft.chat.binding import ToolUse
from flashdraft.chat.grammar.compiler import LlguidanceCompiler
from flashdraft.core import GrammarSpec
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.server.answering.constraints import answer_grammar
from flashdraft.server.answering.serving import Serving
from flashdraft.server.settings import ServerSettings
from tests.tiny import END_OF_TURN
from tests.unit.chat.chat_factory import qwen3_tokenizer
from tests.unit.server.scripted import CountedMetrics, Scripted, ScriptedEngine, make_tokenizer

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "o": {"$ref": "#/$defs/O"}},
    "required": ["a"],
    "$defs": {"O": {"type": "object", "properties": {"b": {"type": "integer"}}}},
}
GOOD = ['{"a": 1}', '{"a": 1, "o": {}}', '{"a": 1, "o": {"b": 2}}']
MORE = ['{"a": 1, "x": 2}', '{"a": 1, "o": {"x": 2}}', '{"a": 1, "o": {"b": 2, "x": 2}}']
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "response_format": (
        "/v1/chat/completions",
        CHAT
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA},
            }
        },
    ),
    "guided_json": ("/v1/chat/completions", CHAT | {"guided_json": SCHEMA}),
    "guided_json as text": ("/v1/chat/completions", CHAT | {"guided_json": json.dumps(SCHEMA)}),
    "structured_outputs": ("/v1/chat/completions", CHAT | {"structured_outputs": {"json": SCHEMA}}),
    "completions": ("/v1/completions", {"prompt": "hi", "guided_json": SCHEMA}),
    "responses": ("/v1/responses", {"input": "hi", "text": {"format": {**FORMAT, "name": "n"}}}),
    "messages": (
        "/v1/messages",
        CHAT | {"max_tokens": 9, "output_config": {"format": FORMAT}},
    ),
}


def taken(spec: GrammarSpec, texts: list[str], tokenizer: Tokenizer, end: int) -> list[bool]:
    """Which texts a grammar takes whole."""
    grammar = LlguidanceCompiler(tokenizer, tokenizer.vocab_size, [end])(spec)
    found = []
    for text in texts:
        matcher = grammar.start()
        found.append(all(map(matcher.advance, tokenizer.encode(text))) and matcher.may_end())
    return found


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("is_open", [False, True])
def test_every_field_with_a_schema_follows_the_same_rule(field: str, is_open: bool) -> None:
    path, body = FIELDS[field]
    server = Scripted("x", open_objects=is_open)
    answer = server.post(path, {"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    grammar = server.engine.requests[0].grammar
    assert grammar is not None
    found = taken(grammar, GOOD + MORE, make_tokenizer(), END_OF_TURN)
    assert found == [True] * len(GOOD) + [is_open] * len(MORE)


@pytest.mark.parametrize(
    ("is_open", "is_strict", "takes_more"),
    [(False, False, False), (False, True, False), (True, False, True), (True, True, False)],
)
def test_arguments_of_calls_follow_it_and_strict_tools_always_end(
    is_open: bool, is_strict: bool, takes_more: bool
) -> None:
    tokenizer = qwen3_tokenizer()
    settings = ServerSettings(open_objects=is_open)
    serving = Serving(ScriptedEngine(tokenizer, []), tokenizer, settings, CountedMetrics())
    function = {"name": "f", "parameters": SCHEMA, "strict": is_strict}
    use = ToolUse(({"type": "function", "function": function},), "f", parallel=False)
    grammar = answer_grammar(serving, use, None, [], thinking=False)
    assert grammar is not None
    calls = [
        f'<tool_call>\n{{"name": "f", "arguments": {one}}}\n</tool_call>' for one in GOOD + MORE
    ]
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    found = taken(grammar, calls, tokenizer, end)
    assert found == [True] * len(GOOD) + [takes_more] * len(MORE)
    assert function["parameters"] == SCHEMA, "the prompt shows the schema as it came"
