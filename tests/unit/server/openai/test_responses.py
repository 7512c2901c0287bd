"""/v1/responses against a scripted engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashdraft.core import GrammarSpec
from flashdraft.errors import QueueFullError
from tests.unit.server.scripted import CALL, OTHER_CALL, THOUGHT, WEATHER, Scripted
from tests.unit.server.sse_reading import read_events

PATH = "/v1/responses"
RECORDED = json.loads((Path(__file__).parents[1] / "requests/codex_responses.json").read_text())
TOOLS = [{"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": False}]


def ask(server: Scripted, **fields: Any) -> Any:
    response = server.post(PATH, {"model": "tiny", "input": "hi", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: Scripted, **fields: Any) -> list[Any]:
    response = server.post(PATH, {"model": "tiny", "input": "hi", "stream": True, **fields})
    assert response.status_code == 200, response.text
    events = read_events(response.text)
    assert all(name == data["type"] for name, data in events)
    numbers = [data["sequence_number"] for _, data in events]
    assert numbers == list(range(len(events)))
    return [data for _, data in events]


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def test_plain_answer() -> None:
    server = Scripted("Hello world")
    answer = ask(server, instructions="Be brief.", max_output_tokens=50, top_p=0.9, seed=3)
    assert (answer["object"], answer["status"], answer["model"]) == (
        "response",
        "completed",
        "tiny",
    )
    (item,) = answer["output"]
    assert item["type"] == "message" and item["status"] == "completed"
    assert item["content"][0]["text"] == "Hello world"
    request = server.engine.requests[0]
    assert answer["usage"]["input_tokens"] == len(request.prompt_ids)
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 2
    assert answer["store"] is False and answer["previous_response_id"] is None
    assert (request.params.max_tokens, request.params.top_p, request.seed) == (50, 0.9, 3)
    assert "<|turn>system\nBe brief.<turn|>\n<|turn>user\nhi<turn|>" in server.prompt()
    assert answer["flashdraft"]["drafted"] == 6


def test_items_of_every_kind() -> None:
    server = Scripted(THOUGHT + "Well." + CALL + OTHER_CALL)
    answer = ask(server, tools=TOOLS, reasoning={"effort": "low"})
    kinds = [item["type"] for item in answer["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    reasoning, _, call, other = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "let me see"}]
    assert json.loads(call["arguments"]) == {"city": "Paris", "days": 2}
    assert call["call_id"] != other["call_id"] and call["call_id"].startswith("call_")
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert "<|think|>" in server.prompt()


@pytest.mark.parametrize("width", [1, 3, 100])
def test_stream_builds_the_same_items(width: int) -> None:
    server = Scripted(THOUGHT + "Well." + CALL + OTHER_CALL, width=width)
    whole = ask(server, tools=TOOLS)
    events = stream(server, tools=TOOLS)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    items: dict[int, dict[str, Any]] = {}
    texts: dict[int, str] = {}
    for event in events[2:-1]:
        index, kind = event["output_index"], event["type"]
        if kind == "response.output_item.added":
            assert index == len(items)
            items[index], texts[index] = event["item"], ""
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[index]["id"]
            texts[index] += event["delta"]
        elif kind in ("response.output_text.done", "response.reasoning_text.done"):
            assert event["text"] == texts[index]
        elif kind == "response.function_call_arguments.done":
            assert event["arguments"] == texts[index]
        elif kind == "response.output_item.done":
            assert event["item"]["id"] == items[index]["id"]
            items[index] = event["item"]
    done = events[-1]["response"]
    assert done["output"] == list(items.values())
    assert list(map(without_ids, done["output"])) == list(map(without_ids, whole["output"]))
    assert done["usage"] == whole["usage"]


def test_cut_answer_is_incomplete() -> None:
    server = Scripted("one two three four")
    answer = ask(server, max_output_tokens=2)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"
    last = stream(server, max_output_tokens=2)[-1]
    assert last["type"] == "response.incomplete"


def test_forms_and_choices_become_grammars() -> None:
    server = Scripted("{}")
    schema = {"type": "object"}
    ask(server, text={"format": {"type": "json_schema", "name": "x", "schema": schema}})
    assert server.engine.requests[-1].grammar == GrammarSpec("json_schema", json.dumps(schema))
    ask(server, text={"format": {"type": "json_object"}})
    assert server.engine.requests[-1].grammar == GrammarSpec("json_object")
    ask(server, tools=TOOLS, tool_choice={"type": "function", "name": "get_weather"})
    assert server.engine.requests[-1].grammar is not None


def test_logprobs() -> None:
    server = Scripted("aé")
    (item,) = ask(server, top_logprobs=1)["output"]
    entries = item["content"][0]["logprobs"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "aé"
    deltas = [e for e in stream(server, top_logprobs=1) if e["type"].endswith("text.delta")]
    assert deltas[0]["logprobs"][0]["token"] == "a"


def test_recorded_request_of_codex_replays() -> None:
    server = Scripted(THOUGHT + '<|tool_call>call:shell{command:[<|"|>ls<|"|>]}<tool_call|>')
    events = stream(server, **RECORDED)
    last = events[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "function_call"]
    assert json.loads(last["output"][1]["arguments"]) == {"command": ["ls"]}
    prompt = server.prompt()
    assert prompt.count("<|tool>") == 2  # the hosted one is not offered
    assert "(Look at the parser.)[shell:" in prompt and "I'll look at the parser." in prompt
    assert "<|turn>tool\nshell=def parse" in prompt and "shell=src<turn|>" in prompt


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"previous_response_id": "resp_1"}, "send the whole conversation"),
        ({"conversation": "conv_1"}, "keeps no state"),
        ({"background": True}, "background"),
        ({"background": 0}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "x"}}, "stored prompts"),
        ({"frobnicate": 1}, "not supported"),
        ({"input": []}, "empty"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "image_url is missing",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "sound is not heard"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"text": {"format": {"type": "json_schema"}}}, "schema"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "no tools"),
    ],
)
def test_refusals(fields: dict[str, Any], words: str) -> None:
    server = Scripted("x")
    response = server.post(PATH, {"model": "tiny", "input": "hi", **fields})
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"], response.text
    assert server.engine.requests == []


def test_odd_values_that_are_sent_back_do_no_harm() -> None:
    server = Scripted("x")
    body = '{"model": "tiny", "input": "hi", "user": "\\ud800", "metadata": {"a": NaN}}'
    response = server.post(PATH, body)
    assert response.status_code == 200, response.text
    assert response.json()["metadata"] == {"a": None}
    streamed = server.post(PATH, body[:-1] + ', "stream": true}')
    assert read_events(streamed.text)[-1][0] == "response.completed"


def test_failures() -> None:
    refused = Scripted(QueueFullError("full", 1)).post(
        PATH, {"model": "tiny", "input": "hi", "stream": True}
    )
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
    server = Scripted("some text here and more!!Gone.")
    last = stream(server)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "generation_failed", "message": "Gone."}
    assert server.metrics.seen == [(PATH, "error")]
