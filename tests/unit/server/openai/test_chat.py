"""/v1/chat/completions against a scripted engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashdraft.core import GrammarSpec
from flashdraft.errors import QueueFullError
from tests.unit.server.scripted import CALL, OTHER_CALL, THOUGHT, WEATHER, Scripted
from tests.unit.server.sse_reading import read_chunks

PATH = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


def ask(server: Scripted, **fields: Any) -> Any:
    response = server.post(PATH, {**BODY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: Scripted, **fields: Any) -> list[Any]:
    response = server.post(PATH, {**BODY, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return read_chunks(response.text)


def test_plain_answer() -> None:
    server = Scripted("Hello é 😀 world")
    answer = ask(server)
    assert answer["object"] == "chat.completion" and answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "Hello é 😀 world"
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    request = server.engine.requests[0]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(request.prompt_ids)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert answer["flashdraft"]["mean_accepted_length"] == 3.0
    assert answer["flashdraft"]["histogram"] == {"3": 2}
    assert server.metrics.seen == [(PATH, "stop")]


def test_settings_reach_the_engine_and_defaults_come_from_the_checkpoint() -> None:
    server = Scripted("x")
    ask(server)
    params = server.engine.requests[0].params
    assert (params.temperature, params.top_k) == (0.7, 64)
    assert params.max_tokens == 1024 < server.engine.info.max_context
    given = {
        "temperature": 0.1,
        "top_p": 0.5,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["a", "b"],
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [5],
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
    }
    ask(server, **given, logit_bias={"12": -100}, top_k=-1, flashdraft={"verify": 0})
    request = server.engine.requests[1]
    for name, value in given.items():
        found = getattr(request.params, name)
        assert (list(found) if name == "stop" else found) == value, name
    assert request.params.logit_bias == {12: -100} and request.params.top_k == 0
    assert request.seed == 7 and request.verify == 0
    ask(server, max_tokens=9, max_completion_tokens=4)
    assert server.engine.requests[2].params.max_tokens == 4


def test_null_means_absent() -> None:
    server = Scripted("x")
    names = ("temperature", "top_p", "n", "seed", "stop", "max_tokens", "tools", "tool_choice")
    names += ("stream", "stream_options", "response_format", "logit_bias", "logprobs", "user")
    ask(server, **dict.fromkeys(names))
    assert server.engine.requests[0].params.temperature == 0.7


def test_length_ends_the_answer() -> None:
    answer = ask(Scripted("one two three four"), max_tokens=3)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("width", [1, 2, 7, 100])
def test_thoughts_and_calls_are_parsed_for_every_step_width(width: int) -> None:
    server = Scripted(THOUGHT + "Well." + CALL + OTHER_CALL, width=width)
    whole = ask(server, tools=TOOLS, **THINKING)["choices"][0]
    message = whole["message"]
    assert message["reasoning_content"] == "let me see" and message["content"] == "Well."
    found = [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]
    assert found == [{"city": "Paris", "days": 2}, {"city": "Rome"}]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert whole["finish_reason"] == "tool_calls"
    assert "<|think|>" in server.prompt() and "<|tool>get_weather<tool|>" in server.prompt()
    streamed = join_chunks(stream(server, tools=TOOLS, **THINKING))
    assert streamed["reasoning_content"] == "let me see" and streamed["content"] == "Well."
    assert [json.loads(call["arguments"]) for call in streamed["calls"]] == found
    assert streamed["finish_reason"] == "tool_calls"


def join_chunks(chunks: list[Any]) -> dict[str, Any]:
    """What a client makes of the deltas of choice 0."""
    made: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                made[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(made["calls"])
                    assert call["type"] == "function"
                    made["calls"].append(dict(call["function"]))
                else:
                    made["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            made["finish_reason"] = choice["finish_reason"]
    return made


def test_stream_has_role_first_reason_last_and_usage_after() -> None:
    server = Scripted("Hello world")
    chunks = stream(server, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0
    assert chunks[-2]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert chunks[-2]["flashdraft"]["steps"] == 2
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-2])
    assert "usage" not in stream(server)[-1]


def test_continuous_usage_grows() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(Scripted("one two three four five"), stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == counts[-2] > 3


def test_token_view_covers_the_text() -> None:
    chunks = stream(Scripted("Hello é world"), flashdraft={"tokens": True})
    views = [chunk["flashdraft"] for chunk in chunks if "tokens" in chunk.get("flashdraft", {})]
    tokens = [token for view in views for token in view["tokens"]]
    assert "".join(token["text"] for token in tokens) == "Hello é world"
    assert [view["step"] for view in views] == list(range(1, len(views) + 1))
    assert {token["drafted"] for token in tokens} == {True, False}
    assert not any("trees" in view for view in views)


def test_the_trees_of_steps_are_told_to_who_asks() -> None:
    chunks = stream(Scripted("Hello world again"), flashdraft={"tokens": True, "trees": True})
    views = [chunk["flashdraft"] for chunk in chunks if "tokens" in chunk.get("flashdraft", {})]
    (tree,) = views[0]["trees"]
    texts = [token["text"] for token in views[0]["tokens"]]
    assert tree["at"] == 1 and tree["texts"][1:] == texts[1:]
    assert tree["parents"] == [0, 0, 2][: len(texts)] and tree["path"] == [2, 3][: len(texts) - 1]


def test_logprobs_have_exact_bytes() -> None:
    server = Scripted("aé😀")
    content = ask(server, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "aé😀"
    assert content[0]["token"] == "a" and content[0]["logprob"] == -0.25
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(content)
    chunks = stream(server, logprobs=True)
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    streamed = [entry for part in parts for entry in part["content"]]
    assert [e["bytes"] for e in streamed] == [e["bytes"] for e in content]
    assert all(entry["top_logprobs"] == [] for entry in streamed)


def test_n_answers_have_seeds_of_their_own() -> None:
    server = Scripted("first", "second", "third")
    answer = ask(server, n=3, seed=2**63 - 2)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    texts = {choice["message"]["content"] for choice in answer["choices"]}
    assert texts == {"first", "second", "third"}
    seeds = [request.seed for request in server.engine.requests]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]
    prompt = len(server.engine.requests[0].prompt_ids)
    assert answer["usage"]["prompt_tokens"] == prompt
    assert len({request.id for request in server.engine.requests}) == 3
    chunks = stream(server, n=2)
    ends = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1]


def test_one_failure_of_n_ends_all_of_them() -> None:
    server = Scripted("a long answer that goes on", QueueFullError("full", 3.2))
    response = server.post(PATH, {**BODY, "n": 2})
    assert response.status_code == 429 and response.headers["retry-after"] == "4"
    assert len(server.engine.cancelled) == 2
    assert server.metrics.seen == [(PATH, "refused")]


def test_tool_choice() -> None:
    server = Scripted(CALL + OTHER_CALL)
    none = ask(server, tools=TOOLS, tool_choice="none")["choices"][0]
    assert "tool_calls" not in none["message"] and none["finish_reason"] == "stop"
    assert "get_weather<tool|>" not in server.prompt()
    one = ask(server, tools=TOOLS, parallel_tool_calls=False)["choices"][0]["message"]
    assert len(one["tool_calls"]) == 1
    assert server.engine.requests[-1].grammar is None
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        ask(server, tools=TOOLS, tool_choice=choice)
        grammar = server.engine.requests[-1].grammar
        assert grammar is not None and grammar.kind == "lark"
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    ask(server, tools=strict)
    assert server.engine.requests[-1].grammar is not None


def test_forms_become_grammars() -> None:
    server = Scripted("{}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    def grammar(**fields: Any) -> GrammarSpec | None:
        ask(server, **fields)
        return server.engine.requests[-1].grammar

    assert grammar(response_format={"type": "text"}) is None
    assert grammar(response_format={"type": "json_object"}) == GrammarSpec("json_object")
    wanted = GrammarSpec("json_schema", json.dumps(schema))
    named = {"name": "x", "schema": schema, "strict": True}
    assert grammar(response_format={"type": "json_schema", "json_schema": named}) == wanted
    assert grammar(guided_json=schema) == wanted == grammar(guided_json=json.dumps(schema))
    assert grammar(structured_outputs={"json": schema}) == wanted
    assert grammar(guided_regex="a+") == GrammarSpec("regex", "a+")
    assert grammar(guided_choice=["a", "b"]) == GrammarSpec("choice", '["a", "b"]')
    thinking = grammar(guided_json=schema, **THINKING)
    assert thinking is not None and thinking.kind == "lark" and "%json" in thinking.text


def test_thinking_switches() -> None:
    server = Scripted("x")
    for fields, is_on in (
        ({}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "medium"}, True),
        (THINKING, True),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, False),
    ):
        ask(server, **fields)
        assert ("<|think|>" in server.prompt()) is is_on, fields


def test_history_of_tools_and_thoughts_reaches_the_template() -> None:
    server = Scripted("done")
    arguments = json.dumps({"city": "Paris"})
    call = {"id": "c1", "type": "function",
            "function": {"name": "get_weather", "arguments": arguments}}  # fmt: skip
    ask(
        server,
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": "Weather?", "name": "Ann"},
            {"role": "assistant", "content": None, "reasoning_content": "look it up",
             "tool_calls": [call], "refusal": None, "annotations": [], "audio": None,
             "function_call": None},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ],
        tools=TOOLS,
    )  # fmt: skip
    prompt = server.prompt()
    assert "Be brief.<turn|>" in prompt
    assert '(look it up)[get_weather:{"city": "Paris"}]' in prompt
    assert "get_weather=rain<turn|>" in prompt


def test_recorded_request_of_a_coding_agent_replays() -> None:
    recorded = json.loads(
        (Path(__file__).parents[1] / "requests/coding_agent_chat.json").read_text()
    )
    server = Scripted(THOUGHT + '<|tool_call>call:Bash{command:<|"|>pytest<|"|>}<tool_call|>')
    response = server.post(PATH, recorded)
    assert response.status_code == 200, response.text
    chunks = read_chunks(response.text)
    made = join_chunks(chunks)
    assert made["reasoning_content"] == "let me see"
    assert made["calls"] == [{"name": "Bash", "arguments": '{"command": "pytest"}'}]
    assert chunks[-1]["usage"]["prompt_tokens"] == len(server.engine.requests[0].prompt_ids)
    prompt = server.prompt()
    assert prompt.count("<|tool>") == len(recorded["tools"]) and "<|think|>" in prompt
    assert "Read=def parse(text):" in prompt and "Grep=src/parser.py:1" in prompt
