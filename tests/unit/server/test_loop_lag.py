"""A long prompt does not hold up the event loop: every other stream goes on while it is read."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from typing import Any

import pytest
from tokenizers import processors

from flashdraft.core import GrammarSpec
from flashdraft.models.tokenizer import LONG_TEXT, Tokenizer
from flashdraft.server.answering.constraints import answer_grammar
from flashdraft.server.answering.serving import LONG_AT_ONCE, Serving
from flashdraft.server.app import create_app
from flashdraft.server.settings import ServerSettings
from flashdraft.server.telemetry.metrics import Metrics
from tests.tiny import make_tiny_tokenizer
from tests.unit.server.asgi_client import call_and_watch, call_async
from tests.unit.server.scripted import MODEL, ScriptedEngine, make_tokenizer

pytestmark = pytest.mark.alone  # it measures how long the loop stands still

TEXT = ("the quick brown fox jumps over the lazy dog; " * 20_000)[:900_000]
MAX_LAG_S = 0.3  # tokenizing TEXT takes longer than that
HEADERS = {"host": "127.0.0.1:8000", "content-type": "application/json"}
MESSAGES = [{"role": "user", "content": TEXT}]
WRONG = [5] * 300_000 + ["x"]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}),
    ("/v1/completions", {"model": MODEL, "prompt": TEXT, "max_tokens": 4}),
    ("/v1/completions", {"model": MODEL, "prompt": [5] * 300_000, "max_tokens": 4}),
    ("/v1/completions", {"model": MODEL, "prompt": WRONG}),
    ("/v1/responses", {"model": MODEL, "input": TEXT, "max_output_tokens": 4}),
    ("/v1/messages", {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}),
    ("/v1/messages/count_tokens", {"model": MODEL, "messages": MESSAGES}),
    ("/tokenize", {"prompt": TEXT}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"tokens": [5] * 300_000}),
]


def make_serving() -> Serving:
    engine = ScriptedEngine(make_tokenizer(), ["the quick"])
    engine.info = dataclasses.replace(engine.info, max_context=1_000_000)
    return Serving(engine, engine.tokenizer, ServerSettings(), Metrics())


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
def test_the_loop_goes_on_while_a_long_prompt_is_read(path: str, body: dict[str, Any]) -> None:
    app = create_app(make_serving(), lambda line: None)
    data = json.dumps(body).encode()

    async def poll() -> None:
        assert (await call_async(app, "GET", "/version", HEADERS)).status == 200

    answer, lag_s = call_and_watch(app, path, HEADERS, data, poll)
    assert answer.status == (400 if body.get("prompt") == WRONG else 200)
    assert lag_s < MAX_LAG_S


def test_few_long_texts_at_once_and_short_ones_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serving = make_serving()
    going, seen, release = [0], [0], threading.Event()
    lock = threading.Lock()

    encode = serving.tokenizer.encode

    def slow(text: str, add_special: bool = False) -> list[int]:
        if len(text) <= LONG_TEXT:
            return encode(text, add_special)
        with lock:
            going[0] += 1
            seen[0] = max(seen[0], going[0])
        assert release.wait(20)
        with lock:
            going[0] -= 1
        return [1, 2, 3]

    monkeypatch.setattr(serving.tokenizer, "encode", slow)

    async def ask() -> None:
        long = [asyncio.create_task(serving.tokenize("a" * (LONG_TEXT + 1))) for _ in range(6)]
        short = await asyncio.wait_for(serving.tokenize("the quick"), 10)
        assert short == serving.tokenizer.encode("the quick")
        while going[0] < LONG_AT_ONCE:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        release.set()
        assert [len(ids) for ids in await asyncio.gather(*long)] == [3] * 6

    asyncio.run(ask())
    assert seen[0] == LONG_AT_ONCE


def test_long_tools_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decides who waits is the whole of a request, not its messages alone."""
    serving = make_serving()
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 20_000}}]
    names: list[str] = []

    def encode(*arguments: Any, **named: Any) -> list[int]:
        names.append(threading.current_thread().name)
        assert named["waits"] is (named["tools"] is not None)
        return [1]

    monkeypatch.setattr("flashdraft.server.answering.serving.encode_chat", encode)
    for offered in (None, tools):
        asyncio.run(serving.tokenize_chat([{"role": "user", "content": "x"}], offered, None, True))
    assert "short" in names[0] and "long" in names[1]


def test_the_grammar_of_tools_is_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(make_serving(), lambda line: None)
    threads: list[threading.Thread] = []

    def write(*arguments: Any) -> GrammarSpec | None:
        threads.append(threading.current_thread())
        return answer_grammar(*arguments)

    monkeypatch.setattr("flashdraft.server.answering.questions.answer_grammar", write)
    function = {"name": "f", "strict": True, "parameters": {"type": "object"}}
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "the"}],
        "tools": [{"type": "function", "function": function}],
    }
    data = json.dumps(body).encode()
    answer = asyncio.run(call_async(app, "POST", "/v1/chat/completions", HEADERS, [data]))
    assert answer.status == 200 and threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("add_special", [False, True])
def test_a_long_text_has_the_tokens_it_would_have_if_it_were_short(add_special: bool) -> None:
    backend = make_tiny_tokenizer()
    around = [("<|im_start|>", 1), ("<|im_end|>", 2)]
    backend.post_processor = processors.TemplateProcessing(
        "<|im_start|> $A <|im_end|>", None, around
    )
    serving = dataclasses.replace(make_serving(), tokenizer=Tokenizer(backend))
    text = TEXT[: LONG_TEXT + 100]
    found = asyncio.run(serving.tokenize(text, add_special))
    assert (found[0] == 1) is add_special
    assert found == backend.encode(text, add_special_tokens=add_special).ids


def test_texts_and_token_lists_have_limits() -> None:
    app = create_app(make_serving(), lambda line: None)

    async def ask(path: str, body: dict[str, Any]) -> tuple[int, str]:
        answer = await call_async(app, "POST", path, HEADERS, [json.dumps(body).encode()])
        return answer.status, answer.json()["error"]["message"]

    status, message = asyncio.run(ask("/tokenize", {"prompt": "a" * (2 * 1024 * 1024 + 1)}))
    assert status == 400 and "at most 2097152 are tokenized" in message
    status, message = asyncio.run(ask("/detokenize", {"tokens": [5] * 600_000}))
    assert status == 413 and "at most 524288" in message
    serving = make_serving()
    info = dataclasses.replace(serving.engine.info, max_context=1000)
    serving.engine.info = info  # type: ignore[misc]
    app = create_app(serving, lambda line: None)
    status, message = asyncio.run(ask("/detokenize", {"tokens": [5] * 2_001}))
    assert status == 400 and message == "tokens has 2001 entries; at most 2000, twice the context."
    for wrong in ([True], ["5"], [1.0]):
        status, message = asyncio.run(ask("/detokenize", {"tokens": wrong}))
        assert status == 400 and message.startswith("tokens[0]: input should be a valid integer")
