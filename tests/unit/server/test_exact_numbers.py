"""Numbers go through the server as they were written: from a body's bytes to the engine's grammar,
and from the model's answer to the client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flashdraft.core import GrammarSpec
from flashdraft.server.http.errors import json_text
from tests.unit.server.openai.test_structured import matches
from tests.unit.server.scripted import MODEL, Scripted
from tests.unit.server.sse_reading import read_events

NUMBERS = ["9007199254740993", "123456789012345678", "1.50", "1e400", "-0", str(2**128 - 1)]
SCHEMA = '{"type": "object", "properties": {"id": {"const": NUMBER}}, "required": ["id"]}'
USER = '"messages": [{"role": "user", "content": "hi"}]'
TOOL = f'{{"type": "function", "function": {{"name": "f", "parameters": {SCHEMA}}}}}'
STRICT = TOOL.replace('"name"', '"strict": true, "name"')
ROUTES = {
    "response_format": (
        "/v1/chat/completions",
        f'{USER}, "response_format": {{"type": "json_schema", '
        f'"json_schema": {{"name": "a", "schema": {SCHEMA}}}}}',
    ),
    "guided_json": ("/v1/chat/completions", f'{USER}, "guided_json": {SCHEMA}'),
    "guided_json as text": (
        "/v1/chat/completions",
        f'{USER}, "guided_json": {json.dumps(SCHEMA)}',
    ),
    "structured_outputs": (
        "/v1/completions",
        f'"prompt": "hi", "structured_outputs": {{"json": {SCHEMA}}}',
    ),
    "text.format": (
        "/v1/responses",
        f'"input": "hi", "text": {{"format": {{"type": "json_schema", "name": "a", '
        f'"schema": {SCHEMA}}}}}',
    ),
    "output_config": (
        "/v1/messages",
        f'{USER}, "max_tokens": 9, "output_config": {{"format": {{"type": "json_schema", '
        f'"schema": {SCHEMA}}}}}',
    ),
}
TOOLS = {
    "tools, required": (
        "/v1/chat/completions",
        f'{USER}, "tools": [{TOOL}], "tool_choice": "required"',
    ),
    "tools, strict": ("/v1/chat/completions", f'{USER}, "tools": [{STRICT}]'),
    "responses": (
        "/v1/responses",
        f'"input": "hi", "tool_choice": "required", "tools": [{{"type": "function", "name": "f", '
        f'"parameters": {SCHEMA}}}]',
    ),
    "anthropic": (
        "/v1/messages",
        f'{USER}, "max_tokens": 9, "tool_choice": {{"type": "any"}}, '
        f'"tools": [{{"name": "f", "input_schema": {SCHEMA}}}]',
    ),
}


def post(server: Scripted, route: tuple[str, str], number: str, more: str = "") -> Any:
    path, fields = route
    body = f'{{"model": "{MODEL}", {fields}{more}}}'
    return server.post(path, body.replace("NUMBER", number))


def grammar_of(route: tuple[str, str], number: str) -> GrammarSpec:
    server = Scripted("x")
    answer = post(server, route, number)
    assert answer.status_code == 200, answer.text
    grammar = server.engine.requests[-1].grammar
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_a_number_of_a_body_arrives_in_the_grammar(route: tuple[str, str], number: str) -> None:
    grammar = grammar_of(route, number)
    assert matches(grammar, f'{{"id": {number}}}')
    assert not matches(grammar, f'{{"id": {json.dumps(float(number))}}}')
    assert not matches(grammar, f'{{"id": {number}0}}')


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("route", TOOLS.values(), ids=TOOLS)
def test_a_number_of_a_tool_arrives_in_the_grammar(route: tuple[str, str], number: str) -> None:
    grammar = grammar_of(route, number)
    assert matches(grammar, f"<|tool_call>call:f{{id:{number}}}<tool_call|>")
    assert not matches(grammar, f"<|tool_call>call:f{{id:{number}0}}<tool_call|>")


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_a_bound_that_cannot_be_kept_is_refused_by_its_place(route: tuple[str, str]) -> None:
    path, fields = route
    lost = (path, fields.replace("const", "minimum"))
    answer = post(Scripted("x"), lost, "9007199254740993")
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "'id': minimum is 9007199254740993, which cannot be kept exactly" in message
    assert "Round it" in message


@pytest.mark.parametrize("route", [*ROUTES.values(), *TOOLS.values()], ids=[*ROUTES, *TOOLS])
def test_a_multiple_of_absurd_size_is_refused_in_words(route: tuple[str, str]) -> None:
    path, fields = route
    lost = (path, fields.replace("const", "multipleOf"))
    answer = post(Scripted("x"), lost, "1e9999999")
    assert answer.status_code == 400
    assert "multipleOf is 1E+9999999; it must have at most 60" in answer.json()["error"]["message"]


@pytest.mark.parametrize("number", [*NUMBERS, "12345678901234567890123", "-0.0"])
def test_a_number_of_a_call_leaves_as_the_model_wrote_it(number: str) -> None:
    script = f"<|tool_call>call:f{{id:{number},more:[{number}]}}<tool_call|>"
    arguments = f'{{"id": {number}, "more": [{number}]}}'
    tool = '{"name": "f", "SCHEMA": {"type": "object"}}'
    anthropic_tool = tool.replace("SCHEMA", "input_schema")
    anthropic = ("/v1/messages", f'{USER}, "max_tokens": 99, "tools": [{anthropic_tool}]')
    assert f'"input":{arguments}' in post(Scripted(script), anthropic, "").text
    events = read_events(post(Scripted(script), anthropic, "", ', "stream": true').text)
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert "".join(delta["partial_json"] for delta in deltas) == arguments
    function = f'{{"type": "function", "function": {tool.replace("SCHEMA", "parameters")}}}'
    chat = ("/v1/chat/completions", f'{USER}, "tools": [{function}]')
    message = post(Scripted(script), chat, "").json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_what_a_response_repeats_has_the_clients_numbers() -> None:
    for more in ("", ', "stream": true'):
        text = post(Scripted("x"), TOOLS["responses"], "1.50", more).text
        assert '"const": 1.50' in text and '"const":1.5}' not in text


def test_other_fields_take_numbers_as_they_did() -> None:
    route = ("/v1/chat/completions", f'{USER}, "temperature": 1.50, "max_tokens": 10, "seed": -0')
    server = Scripted("x")
    assert post(server, route, "").status_code == 200
    params = server.engine.requests[-1].params
    assert (params.temperature, params.max_tokens, params.seed) == (1.5, 10, 0)
    assert json_text({"a": float("inf")}) == '{"a":null}'
