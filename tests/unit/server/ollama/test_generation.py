"""/api/chat and /api/generate against a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flashdraft.errors import EngineLostError, QueueFullError
from tests.unit.server.scripted import CALL, OTHER_CALL, THOUGHT, WEATHER, Scripted

CHAT, GENERATE = "/api/chat", "/api/generate"
SAID = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
ATTACKS = [
    'a\n{"model":"tiny","done":true,"done_reason":"stop"}\nb',
    'a\u2028{"error":"x"}\u2028b\u2029c\x85{"done":true}\x85',
    '"},"done":true}\n',
    "a\r\n\r\n<script>alert(1)</script>",
]


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"messages": [SAID]} if path == CHAT else {"prompt": "hi"}
    return {"model": "tiny", **asked, **fields}


def ask(server: Scripted, path: str, **fields: Any) -> Any:
    response = server.post(path, body_of(path, stream=False, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()


def stream(server: Scripted, path: str, **fields: Any) -> list[Any]:
    response = server.post(path, body_of(path, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    lines = response.text.splitlines()  # as Ollama's own client reads them
    return [json.loads(line) for line in lines]


def text_of(path: str, part: Any, name: str = "content") -> str:
    if path == CHAT:
        return str(part["message"].get(name, ""))
    return str(part.get("response" if name == "content" else name, ""))


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_a_stream_is_the_default_and_its_last_line_has_the_numbers(path: str) -> None:
    server = Scripted("Hello world")
    *parts, last = stream(server, path)
    assert "".join(text_of(path, part) for part in parts) == "Hello world"
    assert len(parts) > 1 and not any(part["done"] for part in parts)
    assert last["done"] is True and last["done_reason"] == "stop" and text_of(path, last) == ""
    assert last["model"] == "tiny" and last["created_at"].endswith("Z")
    assert all(type(last[name]) is int for name in TIMES)
    assert last["prompt_eval_duration"] == 500_000_000 and last["eval_duration"] == 2_000_000_000
    request = server.engine.requests[0]
    assert last["prompt_eval_count"] == len(request.prompt_ids) and last["eval_count"] > 2
    assert last["flashdraft"]["accepted"] == 4
    assert server.metrics.seen == [(path, "stop")]


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_a_whole_answer_is_the_stream_in_one(path: str) -> None:
    server = Scripted(THOUGHT + "Hello world")
    whole = ask(server, path, think=True)
    assert (
        text_of(path, whole) == "Hello world" and text_of(path, whole, "thinking") == "let me see"
    )
    assert whole["done"] is True and whole["done_reason"] == "stop"
    parts = stream(server, path, think="high")
    for name, text in (("content", "Hello world"), ("thinking", "let me see")):
        assert "".join(text_of(path, part, name) for part in parts) == text
    assert "<|think|>" in server.prompt()
    ask(server, path, think=False)
    assert "<|think|>" not in server.prompt()


@pytest.mark.parametrize("path", [CHAT, GENERATE])
@pytest.mark.parametrize("script", ATTACKS)
@pytest.mark.parametrize("width", [1, 7, 500])
def test_an_answer_cannot_write_lines_of_its_own(path: str, script: str, width: int) -> None:
    parts = stream(Scripted(script, width=width), path)
    assert "".join(text_of(path, part) for part in parts) == script
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert not any("error" in part for part in parts)


@pytest.mark.parametrize("script", ATTACKS)
def test_an_answer_cannot_write_events_of_its_own(script: str) -> None:
    response = Scripted(script).post("/v1/chat/completions", {"messages": [SAID], "stream": True})
    events = [line for line in response.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in events)
    made = [json.loads(line[6:]) for line in events[:-1]]
    assert "".join(one["choices"][0]["delta"].get("content") or "" for one in made) == script


def test_calls_come_whole_and_with_objects() -> None:
    server = Scripted(THOUGHT + "Well." + CALL + OTHER_CALL)
    *parts, last = stream(server, CHAT, tools=TOOLS)
    calls = [call for part in parts for call in part["message"].get("tool_calls", ())]
    assert [call["function"]["arguments"] for call in calls] == [
        {"city": "Paris", "days": 2},
        {"city": "Rome"},
    ]
    assert [call["function"]["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2 and last["done_reason"] == "stop"
    whole = ask(server, CHAT, tools=TOOLS)["message"]
    assert whole["content"] == "Well." and len(whole["tool_calls"]) == 2
    assert "<|tool>get_weather<tool|>" in server.prompt()


def test_results_find_their_calls() -> None:
    called = {
        "role": "assistant",
        "content": "",
        "thinking": "hm",
        "tool_calls": [
            {"function": {"name": "f", "arguments": {"a": 1}}},
            {"function": {"name": "g", "arguments": {}}},
        ],
    }
    results = [
        {"role": "tool", "tool_name": "g", "content": "two"},
        {"role": "tool", "content": "one"},
    ]
    server = Scripted("x")
    system = {"role": "system", "content": "be brief"}
    ask(server, CHAT, messages=[system, SAID, called, *results])
    prompt = server.prompt()
    assert "<|turn>system\nbe brief" in prompt and '(hm)[f:{"a": 1}][g:{}]' in prompt
    assert prompt.index("g=two") < prompt.index("f=one")


def test_options_reach_the_engine() -> None:
    server = Scripted("x")
    options = {
        "temperature": 0,
        "top_k": 40.0,
        "top_p": 0.9,
        "min_p": 0.05,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 7,
        "stop": ["end"],
        "num_predict": 12,
        "num_ctx": 4096,
        "num_gpu": 99,
        "use_mmap": True,
        "brand_new": {"any": "thing"},
    }
    ask(server, GENERATE, options=options, keep_alive="5m")
    params = server.engine.requests[0].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0, 40, 0.9, 0.05)
    assert (params.repetition_penalty, params.presence_penalty) == (1.1, 0.5)
    assert (params.frequency_penalty, params.seed, params.max_tokens) == (-0.5, 7, 12)
    assert tuple(params.stop) == ("end",)
    ask(server, CHAT, options={"num_predict": -1, "top_k": -1, "seed": -1}, keep_alive=-1)
    params = server.engine.requests[1].params
    assert params.top_k == 0 and params.max_tokens == server.engine.info.max_context
    ask(server, CHAT)
    assert server.engine.requests[2].params.max_tokens == 1024


def test_a_large_format_is_no_larger_than_elsewhere() -> None:
    schema = {"type": "object", "properties": {f"name{n}": {"type": "null"} for n in range(300)}}
    ask(Scripted("{}"), CHAT, format=schema)
    ask(Scripted("{}"), GENERATE, format={"enum": [f"word {n}" for n in range(1100)]})


def test_a_limit_ends_an_answer() -> None:
    assert (
        ask(Scripted("one two three"), CHAT, options={"num_predict": 2})["done_reason"] == "length"
    )


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (GENERATE, {"raw": True, "think": True}, "think is asked of the model's template"),
        (
            CHAT,
            {"messages": [SAID, {"role": "assistant", "content": "so"}], "think": True},
            "think is on",
        ),
        (CHAT, {"options": {"stop": ["x" * 5000]}}, "A stop string has 5000 characters"),
        (CHAT, {"options": {"num_ctx": 4097}}, "options.num_ctx is 4097; this server's context"),
        (CHAT, {"options": {"num_ctx": "8k"}}, "options.num_ctx"),
        (CHAT, {"options": {"temperature": "hot"}}, "options.temperature"),
        (CHAT, {"options": {"temperature": -1}}, "options.temperature is -1"),
        (CHAT, {"options": {"top_k": 1.5}}, "options.top_k"),
        (CHAT, {"options": {"repeat_penalty": 0}}, "options.repeat_penalty is 0"),
        (CHAT, {"options": {"stop": [1]}}, "options.stop"),
        (CHAT, {"options": {"stop": [""]}}, "options.stop holds an empty string"),
        (CHAT, {"options": {"num_gpu": "all"}}, "options.num_gpu"),
        (CHAT, {"options": []}, "options"),
        (CHAT, {"stream": "yes"}, "stream"),
        (CHAT, {"format": "xml"}, "format"),
        (CHAT, {"think": "hard"}, "think"),
        (CHAT, {"truncate": True}, "truncate is true"),
        (CHAT, {"surprise": 1}, "surprise is not supported"),
        (CHAT, {"messages": [{**SAID, "images": ["AAAA"]}]}, "messages[0].images[0] is a picture"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]},
         "messages[0].tool_calls"),
        (CHAT, {"tools": TOOLS * 2}, "same name"),
        (GENERATE, {"images": ["AAAA"]}, "images[0] is a picture"),
        (GENERATE, {"suffix": "x"}, "suffix is not supported"),
        (GENERATE, {"template": "{{ .Prompt }}"}, "template is not supported"),
        (GENERATE, {"context": [1, 2]}, "context is not supported"),
        (GENERATE, {"raw": True, "system": "x"}, "system has no meaning with raw"),
        (GENERATE, {"top_logprobs": 3}, "top_logprobs is set without logprobs"),
        (GENERATE, {"prompt": "the " * 5000}, "the context holds 4096"),
        (GENERATE, {"prompt": 5}, "prompt"),
    ],
)  # fmt: skip
def test_refusals_are_in_words(path: str, fields: dict[str, Any], words: str) -> None:
    server = Scripted("x")
    response = server.post(path, body_of(path, **fields))
    assert response.status_code == 400, response.text
    assert response.json().keys() == {"error"} and words in response.json()["error"]
    assert server.engine.requests == []


@pytest.mark.parametrize("path", [CHAT, GENERATE])
@pytest.mark.parametrize("nothing", [{}, {"prompt": ""}, {"messages": []}])
def test_asking_nothing_is_a_load(path: str, nothing: dict[str, Any]) -> None:
    server = Scripted("x")
    if (path == CHAT) is ("prompt" in nothing):
        return
    response = server.post(path, {"model": "tiny", **nothing, "keep_alive": 0})
    made = response.json()
    assert response.status_code == 200 and (made["done"], made["done_reason"]) == (True, "load")
    assert text_of(path, made) == "" and server.engine.requests == []
    assert server.post(path, {"model": "other"}).status_code == 404


def test_raw_prompts_are_continued_as_they_are() -> None:
    server = Scripted("<|tool_call>x")
    assert ask(server, GENERATE, raw=True, prompt="the fox")["response"] == "x"
    assert "<|turn>" not in server.prompt()
    ask(server, GENERATE, system="be brief", prompt="the fox")
    assert "<|turn>system\nbe brief<turn|>\n<|turn>user\nthe fox<turn|>" in server.prompt()


@pytest.mark.parametrize("wanted", ["json", {"type": "object"}, {}])
def test_format_becomes_a_grammar(wanted: Any) -> None:
    server = Scripted("{}")
    for path in (CHAT, GENERATE):
        ask(server, path, format=wanted)
        assert server.engine.requests[-1].grammar is not None
    ask(server, CHAT, format="")
    assert server.engine.requests[-1].grammar is None


def test_log_probabilities() -> None:
    server = Scripted("Hello")
    whole = ask(server, CHAT, logprobs=True, top_logprobs=2)
    assert len(whole["logprobs"][0]["top_logprobs"]) == 2
    streamed = [one for part in stream(server, GENERATE, logprobs=True) if "logprobs" in part
                for one in part["logprobs"]]  # fmt: skip
    assert len(streamed) == len(whole["logprobs"])


@pytest.mark.parametrize(
    ("name", "status"),
    [("tiny", 200), ("tiny:latest", 200), (None, 200), ("tiny:7b", 404), ("llama3", 404)],
)
def test_latest_is_no_other_model(name: str | None, status: int) -> None:
    response = Scripted("x").post(CHAT, body_of(CHAT, model=name, stream=False))
    assert response.status_code == status, response.text
    if status == 404:
        assert "not found" in response.json()["error"] and "tiny:latest" in response.json()["error"]
    else:
        assert response.json()["model"] == (name or "tiny:latest")


def test_a_tag_that_is_served_must_be_named() -> None:
    server = Scripted("x", served_model_names=("qwen3:0.6b", "org/m"))
    assert server.post(CHAT, body_of(CHAT, model="qwen3:0.6b")).status_code == 200
    assert server.post(CHAT, body_of(CHAT, model="org/m:latest")).status_code == 200
    assert server.post(CHAT, body_of(CHAT, model="qwen3")).status_code == 404


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [(QueueFullError("full", 2.0), 429), (EngineLostError("gone"), 503), (ValueError("a"), 500)],
)
def test_failures_have_ollamas_shape(error: Exception, status: int, is_stream: bool) -> None:
    response = Scripted(error).post(CHAT, body_of(CHAT, stream=is_stream))
    assert response.status_code == status
    assert isinstance(response.json()["error"], str)


def test_a_failure_in_mid_stream_is_the_last_line() -> None:
    parts = stream(Scripted("some text here and more!!Gone."), CHAT)
    assert parts[-1] == {"error": "Gone."} and len(parts) > 1
