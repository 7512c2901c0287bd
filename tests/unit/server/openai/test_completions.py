"""/v1/completions against a scripted engine: prompts, echo, the older logprobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashdraft.chat.schema.json_rule import JsonGrammar
from flashdraft.core import GrammarSpec
from flashdraft.errors import QueueFullError
from tests.unit.server.scripted import CALL, Scripted
from tests.unit.server.sse_reading import read_chunks

PATH = "/v1/completions"


def ask(server: Scripted, **fields: Any) -> Any:
    response = server.post(PATH, {"model": "tiny", "prompt": "the fox", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_plain_completion() -> None:
    server = Scripted(" jumps")
    answer = ask(server)
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": " jumps", "logprobs": None, "finish_reason": "stop"}
    ]
    request = server.engine.requests[0]
    assert list(request.prompt_ids) == server.engine.tokenizer.encode("the fox")
    assert request.params.max_tokens == 16 and request.prompt_logprobs is None
    assert answer["usage"]["prompt_tokens"] == len(request.prompt_ids)


def test_marks_stay_text_of_no_meaning() -> None:
    text = ask(Scripted("a" + CALL), max_tokens=200)["choices"][0]["text"]
    assert text.startswith("acall:get_weather")


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("the fox", 1), (["the fox", "the dog"], 2), ([5, 6, 7], 1), ([[5, 6], [7], [8]], 3)],
)
def test_prompts_of_every_form(prompt: Any, count: int) -> None:
    server = Scripted("x")
    answer = ask(server, prompt=prompt, n=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * count))
    prompts = [list(request.prompt_ids) for request in server.engine.requests]
    assert len(prompts) == 2 * count
    given = {tuple(one) for one in prompts}
    assert len(given) == count
    assert answer["usage"]["prompt_tokens"] == sum(map(len, given))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * count


def test_a_schema_is_read_once_for_many_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    body = JsonGrammar.body

    def counted(grammar: JsonGrammar, schema: Any, *where: str) -> str:
        read.append(schema)
        return body(grammar, schema, *where)

    monkeypatch.setattr(JsonGrammar, "body", counted)
    server, schema = Scripted("x"), {"properties": {"once": {"type": "null"}}}
    ask(server, prompt=[f"{n}" for n in range(20)], guided_json=schema)
    grammars = {request.grammar for request in server.engine.requests}
    assert len(server.engine.requests) == 20 and len(grammars) == 1
    assert read == [schema]


@pytest.mark.parametrize(("max_batch", "max_queue", "limit"), [(8, 256, 16), (1, 1, 2), (3, 0, 3)])
def test_many_prompts_are_asked_a_few_at_a_time(max_batch: int, max_queue: int, limit: int) -> None:
    server = Scripted("one two three", max_queue=max_queue)
    server.engine.info = replace(server.engine.info, max_batch=max_batch)
    running, most = 0, 0
    generate = server.engine.generate

    async def counted(request: Any, reserved: Any) -> Any:
        nonlocal running, most
        if running == max_batch + max_queue:
            raise QueueFullError("The queue is full.", 1.0)
        running += 1
        most = max(most, running)
        try:
            async for event in generate(request):
                yield event
        finally:
            running -= 1

    server.engine.generate = counted
    assert len(ask(server, prompt=["a"] * 60)["choices"]) == 60
    assert 2 <= most <= limit


def test_special_tokens_of_an_answer_have_no_width() -> None:
    script = '<|channel>a<channel|>the fox<|"|> dog'
    (choice,) = ask(Scripted(script), logprobs=1, max_tokens=99)["choices"]
    text, logprobs, marks = choice["text"], choice["logprobs"], 0
    assert text == "athe fox dog"
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if token.startswith("<"):
            marks += 1
        else:
            assert text[offset:].startswith(token)
    assert marks == 4  # the one that ended the answer too
    (last,) = logprobs["text_offset"][-1:]
    assert last == len(text)


def test_echo_scores_the_prompt_as_harnesses_need_it() -> None:
    server = Scripted("!")
    answer = ask(server, prompt=[[5, 6, 7, 8]], echo=True, logprobs=1, max_tokens=1)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == 5  # the prompt's four and the new one
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.25, -0.25]
    assert logprobs["top_logprobs"][0] is None
    for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert top == {token: -0.25}
    assert "".join(logprobs["tokens"]) == choice["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert choice["finish_reason"] == "length"
    assert server.engine.requests[0].prompt_logprobs == 1


def test_the_stop_token_counts_as_the_one_new_token() -> None:
    (choice,) = ask(Scripted(""), prompt=[[5, 6]], echo=True, logprobs=1, max_tokens=1)["choices"]
    assert choice["logprobs"]["tokens"][2:] == ["<|im_end|>"]
    assert choice["finish_reason"] == "stop" and "im_end" not in choice["text"]


def test_echo_of_no_new_tokens() -> None:
    server = Scripted("never seen")
    answer = ask(server, echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "the fox" and choice["finish_reason"] == "length"
    assert "".join(choice["logprobs"]["tokens"]) == "the fox"
    assert answer["usage"]["completion_tokens"] == 0
    assert server.engine.requests[0].params.max_tokens == 1
    assert ask(server, echo=True, max_tokens=0)["choices"][0]["logprobs"] is None


def test_offsets_hold_in_texts_of_several_bytes() -> None:
    server = Scripted("é😀x")
    (choice,) = ask(server, echo=True, logprobs=2, prompt="aé")["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "aéé😀x"
    assert [len(logprobs[name]) for name in logprobs] == [len(logprobs["tokens"])] * 4
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert logprobs["tokens"][-2:] == ["x", "<|im_end|>"]
    assert logprobs["text_offset"][-2:] == [4, 5]


def test_stream() -> None:
    server = Scripted(" jumps over")
    body = {"model": "tiny", "prompt": ["the fox", "a dog"], "stream": True, "echo": True}
    body |= {"stream_options": {"include_usage": True}, "flashdraft": {"tokens": True}}
    chunks = read_chunks(server.post(PATH, body).text)
    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["the fox jumps over", "a dog jumps over"]
    reasons = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert [reason for reason in reasons if reason] == ["stop", "stop"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 2
    assert any("tokens" in chunk.get("flashdraft", {}) for chunk in chunks)


def test_streamed_logprobs_equal_the_whole_ones() -> None:
    server = Scripted(" jumps é")
    whole = ask(server, logprobs=1)["choices"][0]["logprobs"]
    body = {"model": "tiny", "prompt": "the fox", "stream": True, "logprobs": 1}
    parts = [c["choices"][0]["logprobs"] for c in read_chunks(server.post(PATH, body).text)]
    for name in whole:
        assert sum((part[name] for part in parts if part), []) == whole[name], name


def test_forms_become_grammars() -> None:
    server = Scripted("x")
    ask(server, guided_choice=["x", "y"])
    assert server.engine.requests[0].grammar == GrammarSpec("choice", '["x", "y"]')


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"echo": True, "max_tokens": -1}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "stream": True}, "stream"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": []}, "messages"),
    ],
)
def test_refusals(fields: dict[str, Any], param: str) -> None:
    server = Scripted("x")
    response = server.post(PATH, {"model": "tiny", "prompt": "a", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


def test_best_of_that_changes_nothing_is_taken() -> None:
    assert len(ask(Scripted("x"), n=2, best_of=2)["choices"]) == 2


def test_too_long_a_prompt_has_its_code() -> None:
    server = Scripted("x")
    response = server.post(PATH, {"model": "tiny", "prompt": [5] * 5000})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "5000 tokens" in response.json()["error"]["message"]
