"""Pictures in every API: where they stand, what is refused, and what they may cost."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import threading
from typing import Any

import pytest

from flashdraft.core import Picture
from flashdraft.errors import CapacityError, RequestError
from flashdraft.media.pictures import PictureRules
from flashdraft.media.sizes import cells_of
from flashdraft.server.answering import pictures as opening
from flashdraft.server.answering.pictures import PictureMemory, PictureOpener, picture_part
from flashdraft.server.http.picture_fields import SentText
from flashdraft.server.settings import ServerSettings
from tests.unit.server.asgi_client import call_async
from tests.unit.server.scripted import Scripted
from tests.unit.server.seeing import (
    CELL,
    Seeing,
    assert_given_back,
    base64_of,
    data_url,
    make_vision,
    png,
)

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT, TOKENIZE = "/v1/messages/count_tokens", "/tokenize"
OLLAMA, GENERATE = "/api/chat", "/api/generate"
URL = data_url(png())
HEADERS = {"host": "test", "content-type": "application/json"}


def url_part(url: str = URL, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def block(**source: Any) -> dict[str, Any]:
    usual = {"type": "base64", "media_type": "image/png", "data": base64_of(png())}
    return {"type": "image", "source": source or usual}


def said(*content: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": [*content], **fields}


TEXT = {"type": "text", "text": "what is it?"}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
USE = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
SHOWN: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [said(url_part(), TEXT)]}, "user"),
    (
        CHAT,
        {"messages": [said(TEXT), CALLED, said(url_part(), role="tool", tool_call_id="c")]},
        "tool",
    ),
    (
        RESPONSES,
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "what is it?"},
                        {"type": "input_image", "image_url": URL, "detail": "auto"},
                    ],
                }
            ]
        },
        "user",
    ),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": "look"},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_image", "image_url": URL}],
                },
            ]
        },
        "tool",
    ),
    (MESSAGES, {"messages": [said(block(), TEXT)], "max_tokens": 9}, "user"),
    (
        MESSAGES,
        {
            "messages": [
                said(TEXT),
                said(USE, role="assistant"),
                said(
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "is_error": True,
                        "content": [block(), TEXT],
                    }
                ),
            ],
            "max_tokens": 9,
        },
        "tool",
    ),
    (
        OLLAMA,
        {
            "messages": [{"role": "user", "content": "what?", "images": [base64_of(png())]}],
            "stream": False,
        },
        "user",
    ),
    (GENERATE, {"prompt": "what?", "images": [base64_of(png())], "stream": False}, "user"),
    (GENERATE, {"images": [base64_of(png())], "stream": False}, "user"),
]


@pytest.mark.parametrize(("path", "body", "role"), SHOWN)
def test_a_picture_takes_its_place_in_the_prompt(
    path: str, body: dict[str, Any], role: str
) -> None:
    server = Seeing("a cat")
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    (request,) = server.engine.requests
    (placed,) = request.pictures
    tokens, ids = make_vision().tokens, request.prompt_ids
    count = cells_of(64, 48, 280, CELL).num_tokens
    assert placed.picture.num_tokens == count
    assert list(ids[placed.start : placed.end]) == [tokens.picture] * count
    assert (ids[placed.start - 1], ids[placed.end]) == (tokens.begin, tokens.end)
    assert list(ids).count(tokens.picture) == count
    before = server.engine.tokenizer.decode(ids[: placed.start], skip_special=False)
    assert before.rpartition("<|turn>")[2].startswith(f"{role}\n")
    assert len(placed.picture.pixels) == 3 * placed.picture.width * placed.picture.height


def test_usage_counts_the_tokens_of_pictures_and_metrics_show_them() -> None:
    server = Seeing("a cat")
    usage = server.post(CHAT, {"messages": [said(url_part(), TEXT)]}).json()["usage"]
    assert usage["prompt_tokens"] == len(server.engine.requests[0].prompt_ids)
    assert usage["prompt_tokens_details"].keys() == {"cached_tokens"}
    server.post(CHAT, {"messages": [said(url_part("data:image/png;base64,AAAA"))]})
    shown = server.get("/metrics").body.decode()
    count = cells_of(64, 48, 280, CELL).num_tokens
    assert 'flashdraft_pictures_total{outcome="opened"} 1' in shown
    assert 'flashdraft_pictures_total{outcome="refused"} 1' in shown
    assert f"flashdraft_picture_tokens_total {count}" in shown


def test_tokens_are_counted_as_they_are_answered() -> None:
    server = Seeing("a cat")
    body = {"messages": [said(block(), TEXT)]}
    server.post(MESSAGES, {**body, "max_tokens": 9})
    ids = list(server.engine.requests[0].prompt_ids)
    assert server.post(COUNT, body).json() == {"input_tokens": len(ids)}
    server.post(CHAT, {"messages": [said(url_part(), TEXT)]})
    chat_ids = list(server.engine.requests[1].prompt_ids)
    found = server.post(TOKENIZE, {"messages": [said(url_part(), TEXT)]}).json()
    assert found["tokens"] == chat_ids and found["count"] == len(chat_ids)


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({}, 280),
        ({"detail": "auto"}, 280),
        ({"detail": "low"}, 70),
        ({"detail": "high"}, 560),
        ({"max_soft_tokens": 1120}, 1120),
        ({"detail": "low", "max_soft_tokens": 140}, 140),
    ],
)
def test_how_many_tokens_a_picture_takes_can_be_said(fields: dict[str, Any], budget: int) -> None:
    server = Seeing("a cat")
    count = cells_of(64, 48, budget, CELL).num_tokens
    part = {"type": "input_image", "image_url": URL, **fields}
    for path, body in (
        (CHAT, {"messages": [said(url_part(**fields))]}),
        (RESPONSES, {"input": [{"role": "user", "content": [part]}]}),
    ):
        assert server.post(path, body).status_code == 200
        assert server.engine.requests[-1].pictures[0].picture.num_tokens == count


def test_several_answers_share_their_pictures_and_pictures_keep_their_order() -> None:
    server = Seeing("a", "b")
    parts = [url_part(data_url(png(width, 40))) for width in (40, 400, 40)]
    assert server.post(CHAT, {"messages": [said(*parts, TEXT)], "n": 2}).status_code == 200
    first, second = server.engine.requests
    assert [id(one.picture) for one in first.pictures] == [
        id(one.picture) for one in second.pictures
    ]
    one, other, again = (placed.picture for placed in first.pictures)
    assert one.key == again.key != other.key and other.width > one.width
    assert first.pictures[0].end < first.pictures[1].start


def test_what_can_see_says_so() -> None:
    sees, blind = Seeing("x"), Scripted("x")
    assert sees.get("/v1/models").json()["data"][0]["capabilities"][-3:] == [
        "vision",
        "video",
        "pdf",
    ]
    assert "vision" in sees.post("/api/show", {}).json()["capabilities"]
    assert "vision" not in blind.serving.capabilities


@pytest.mark.parametrize(("path", "body", "role"), SHOWN)
def test_a_model_without_vision_refuses_before_anything_is_decoded(
    path: str, body: dict[str, Any], role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "read_data_url", pytest.fail)
    server = Scripted("x")
    response = server.post(path, body)
    assert response.status_code == 400
    assert "is a picture, and the model takes none" in response.text
    assert server.engine.requests == []


INTERNAL = "http://169.254.169.254/latest/meta-data"
NOT_OPENED = [
    "https://example.com/cat.png",
    INTERNAL,
    "http://127.0.0.1:8000/metrics",
    "http://[::1]/",
    "file:///etc/passwd",
    "FILE:///etc/passwd",
    "/etc/passwd",
    "../../etc/passwd",
    "\\\\host\\share",
    "ftp://example.com/cat.png",
    "gopher://x",
    "javascript:alert(1)",
    "blob:https://x",
    "cat.png",
    " data:image/png;base64,AAAA",
    "\x00data:",
    base64_of(png()),
]


@pytest.mark.parametrize("url", NOT_OPENED)
def test_nothing_but_a_data_url_is_opened(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashdraft.media.sources.MediaFetcher.fetch", pytest.fail)
    server = Seeing("x")
    part = {"type": "input_image", "image_url": url}
    for path, body, place in (
        (CHAT, {"messages": [said(TEXT, url_part(url))]}, "messages[0].content[1].image_url.url"),
        (RESPONSES, {"input": [{"role": "user", "content": [part]}]}, "input[0].content[0].image"),
        (
            MESSAGES,
            {"messages": [said(block(type="url", url=url))], "max_tokens": 4},
            "messages[0].content[0].source.url",
        ),
    ):
        response = server.post(path, body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"].startswith(place)
        assert "no data: URL" in response.json()["error"]["message"]
    assert server.engine.requests == []


def test_an_address_is_fetched_where_its_host_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def fetch(self: Any, url: str, kind: Any) -> bytes:
        asked.append((url, threading.current_thread().name))
        if "example.com" not in url:
            raise RequestError("The host is not among those that are allowed.")
        return png()

    monkeypatch.setattr("flashdraft.media.sources.MediaFetcher.fetch", fetch)
    server = Seeing("x", allow_media_domains=("example.com",))
    body = {"messages": [said(url_part("https://example.com/cat.png"))]}
    assert server.post(CHAT, body).status_code == 200
    assert len(server.engine.requests[0].pictures) == 1
    error = server.post(CHAT, {"messages": [said(url_part(INTERNAL))]}).json()["error"]
    assert error["param"] == "messages[0].content[0].image_url.url"
    assert "not among those" in error["message"]
    for url in ("file:///etc/passwd", "/etc/passwd"):
        assert server.post(CHAT, {"messages": [said(url_part(url))]}).status_code == 400
    assert [url for url, _ in asked] == ["https://example.com/cat.png", INTERNAL]
    assert all("flashdraft-fetches" in thread for _, thread in asked)


BOTH = {"type": "url", "url": "https://x", "data": "A"}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [said(url_part("data:image/png;base64,AAAA"))]}, "cannot be taken"),
    (CHAT, {"messages": [said(url_part("data:image/png;base64,@@@@"))]}, "cannot be taken"),
    (CHAT, {"messages": [said(url_part("data:image/png,AAAA"))]}, "cannot be taken"),
    (CHAT, {"messages": [said(url_part("data:"))]}, "cannot be taken"),
    (CHAT, {"messages": [said(url_part(""))]}, "url: it is empty"),
    (CHAT, {"messages": [said({"type": "image_url"})]}, "image_url is missing"),
    (CHAT, {"messages": [said({"type": "image_url", "image_url": {}})]}, "url is missing"),
    (CHAT, {"messages": [said({"type": "image_url", "image_url": {"url": 5}})]}, "a string"),
    (CHAT, {"messages": [said(url_part(detail="original"))]}, "image_url.detail"),
    (CHAT, {"messages": [said(url_part(max_soft_tokens=281))]}, "image_url.max_soft_tokens"),
    (CHAT, {"messages": [said(url_part(max_soft_tokens="70"))]}, "image_url.max_soft_tokens"),
    (CHAT, {"messages": [said(url_part(surprise=1))]}, "image_url.surprise"),
    (CHAT, {"messages": [said({**TEXT, "image_url": {"url": URL}})]}, "has no meaning"),
    (CHAT, {"messages": [said(url_part(), role="system"), said(TEXT)]}, "role 'system'"),
    (CHAT, {"messages": [said(url_part(), role="assistant"), said(TEXT)]}, "role 'assistant'"),
    (CHAT, {"messages": [said(url_part(), role="developer"), said(TEXT)]}, "role 'developer'"),
    (
        CHAT,
        {"messages": [said({"type": "input_audio", "input_audio": {}})]},
        "sound is not heard here",
    ),
    (CHAT, {"messages": [said({"type": "video_url", "video_url": {}})]}, "url is missing"),
    (CHAT, {"messages": [said({"type": "text", "text": "<|image|>"})]}, "1 places for 0 pictures"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "stores no files",
    ),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        "stores no files",
    ),
    (
        RESPONSES,
        {"input": [{"role": "system", "content": [{"type": "input_image", "image_url": URL}]}]},
        "role system",
    ),
    (
        MESSAGES,
        {"messages": [said(block(type="file", file_id="f"))], "max_tokens": 4},
        "stores no files",
    ),
    (
        MESSAGES,
        {
            "messages": [said(block(type="base64", media_type="image/bmp", data="AAAA"))],
            "max_tokens": 4,
        },
        "media_type",
    ),
    (
        MESSAGES,
        {"messages": [said(block(type="base64", media_type="image/png"))], "max_tokens": 4},
        "source.data is missing",
    ),
    (
        MESSAGES,
        {"messages": [said(block(**BOTH))], "max_tokens": 4},
        "data has no meaning",
    ),
    (MESSAGES, {"messages": [said({"type": "image"})], "max_tokens": 4}, "source is missing"),
    (MESSAGES, {"messages": [said({"type": "document"})], "max_tokens": 4}, "source is missing"),
    (
        MESSAGES,
        {
            "messages": [said(block(type="base64", media_type="image/png", data=URL))],
            "max_tokens": 4,
        },
        "base64 alone",
    ),
    (MESSAGES, {"messages": [said(TEXT)], "system": [block()], "max_tokens": 4}, "'image'"),
    (
        MESSAGES,
        {"messages": [said(TEXT), said(block(), role="assistant")], "max_tokens": 4},
        "'image'",
    ),
    (OLLAMA, {"messages": [{"role": "user", "images": ["AAAA"]}]}, "messages[0].images[0] cannot"),
    (OLLAMA, {"messages": [{"role": "user", "images": [URL]}]}, "base64 alone"),
    (OLLAMA, {"messages": [{"role": "user", "images": [5]}]}, "messages[0].images[0]"),
    (OLLAMA, {"messages": [{"role": "system", "images": ["AAAA"]}]}, "role 'system'"),
    (GENERATE, {"prompt": "x", "raw": True, "images": ["AAAA"]}, "has no meaning with raw"),
]


@pytest.mark.parametrize(("path", "body", "words"), REFUSED)
def test_what_cannot_be_taken_is_refused_in_words(
    path: str, body: dict[str, Any], words: str
) -> None:
    server = Seeing("x")
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    assert words in response.text
    assert server.engine.requests == []


def test_a_request_has_at_most_so_many_pictures() -> None:
    server = Seeing("x", max_pictures=2)
    error = server.post(CHAT, {"messages": [said(*[url_part()] * 3)]}).json()["error"]
    assert error["param"] == "messages[0].content[2].image_url.url"
    assert "past the 2 pictures" in error["message"] and "--max-pictures" in error["message"]
    many = {"messages": [{"role": "user", "images": ["AAAA"] * 1000}]}
    assert "past the 2 pictures" in server.post(OLLAMA, many).text
    assert (
        "at most 1024"
        in server.post(OLLAMA, {"messages": [{"role": "user", "images": ["AAAA"] * 1025}]}).text
    )


def test_pictures_may_be_longer_than_texts_and_nothing_else_may() -> None:
    limits = {"max_body_bytes": 20_000, "max_picture_body_bytes": 60_000}
    long = data_url(png() + b"\0" * 30_000)  # what follows a picture's end belongs to nobody
    hidden = {**CALL, "function": {"name": "f", "arguments": json.dumps({"url": "a" * 30_000})}}
    deep = {"type": "tool_use", "id": "c", "name": "f", "input": {"source": {"data": "a" * 30_000}}}
    server = Seeing("x", **limits)
    assert server.post(CHAT, {"messages": [said(url_part(long))]}).status_code == 200
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "a" * 30_000}]}),
        (CHAT, {"messages": [said(TEXT), {**CALLED, "tool_calls": [hidden]}, said(TEXT)]}),
        (MESSAGES, {"messages": [said(TEXT), said(deep, role="assistant")], "max_tokens": 4}),
        (GENERATE, {"prompt": "a" * 30_000}),
    ):
        response = server.post(path, body)
        assert response.status_code == 400 and "besides its pictures" in response.text
    # where no pictures are taken, nothing is longer
    assert server.post("/v1/completions", {"prompt": "a" * 30_000}).status_code == 413
    server.engine.info = dataclasses.replace(server.engine.info, vision=None)
    assert server.post(CHAT, {"messages": [said(url_part(long))]}).status_code == 413


def test_pictures_that_wait_and_pictures_that_are_open_have_a_limit_together() -> None:
    server = Seeing("x", max_picture_memory_bytes=3 * 280 * CELL**2 + 2000)
    body = {"messages": [said(url_part())]}
    assert server.post(CHAT, body).status_code == 200
    error = server.post(CHAT, {"messages": [said(url_part(), url_part())]})
    assert error.status_code == 503 and error.json()["error"]["code"] == "no_capacity"
    kept = server.engine.requests  # as long as the first request's pictures are there
    assert len(kept[0].pictures[0].picture.pixels) > 2000
    assert server.post(CHAT, body).status_code == 503
    kept.clear()
    gc.collect()
    assert_given_back(server.serving.pictures)
    assert server.post(CHAT, body).status_code == 200


def test_memory_is_given_back_however_a_picture_ends() -> None:
    memory = PictureMemory(1000)
    with pytest.raises(ValueError, match="x"), memory.hold(900):
        assert memory.num_bytes == 900
        with pytest.raises(CapacityError, match="900 bytes of the 1000"), memory.hold(101):
            pass
        raise ValueError("x")
    picture = Picture(b"\0" * 27, 3, 3, 1, b"k")
    memory.keep(picture)
    assert memory.num_bytes == 27
    del picture
    assert memory.num_bytes == 0


class _Slow:
    """Opens a picture when it is let."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.going = self.most = self.begun = 0
        self._lock = threading.Lock()

    def __call__(self, data: bytes, rules: PictureRules) -> Picture:
        with self._lock:
            self.begun += 1
            self.going += 1
            self.most = max(self.most, self.going)
        assert self.release.wait(20)
        with self._lock:
            self.going -= 1
        return Picture(b"\0" * 3, 1, 1, 1, b"k" * 32)


class _Nobody:
    def picture_opened(self, num_tokens: int) -> None: ...

    def picture_refused(self) -> None: ...


def one_picture() -> list[dict[str, Any]]:
    return [{"role": "user", "content": [picture_part(SentText(URL), "here")]}]


def test_few_pictures_are_opened_at_once_and_none_for_who_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = _Slow()
    monkeypatch.setattr(opening, "open_picture", slow)

    async def scenario() -> None:
        opener = PictureOpener(ServerSettings(), _Nobody())
        tasks = [asyncio.create_task(opener.open(one_picture(), make_vision())) for _ in range(6)]
        while slow.going < opening.OPEN_AT_ONCE:
            await asyncio.sleep(0.005)
        for task in tasks[2:5]:
            task.cancel()
        await asyncio.wait(tasks[2:5])
        slow.release.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(one, asyncio.CancelledError) for one in found] == [
            *[False] * 2, *[True] * 3, False
        ]  # fmt: skip
        assert opener._memory.num_bytes == 3 * 3  # of those that were opened: no more is held

    asyncio.run(scenario())
    assert slow.most == opening.OPEN_AT_ONCE and slow.begun == 3


def test_few_fetched_files_wait_to_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows before how long a file is: files are counted, not their bytes."""
    slow, fetched = _Slow(), list[str]()
    monkeypatch.setattr(opening, "open_picture", slow)

    def fetch(self: Any, url: str, kind: Any) -> bytes:
        fetched.append(url)
        return b"a file"

    monkeypatch.setattr("flashdraft.media.sources.MediaFetcher.fetch", fetch)

    def one_address() -> list[dict[str, Any]]:
        part = picture_part(SentText("https://example.com/cat.png"), "here")
        return [{"role": "user", "content": [part]}]

    async def scenario() -> None:
        settings = ServerSettings(allow_media_domains=("example.com",))
        opener = PictureOpener(settings, _Nobody())
        opened = [opener.open(one_address(), make_vision()) for _ in range(12)]
        tasks = [asyncio.create_task(one) for one in opened]
        async with asyncio.timeout(20.0):
            while len(fetched) < opening.FETCH_AT_ONCE:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        assert len(fetched) == opening.FETCH_AT_ONCE
        slow.release.set()
        assert len(await asyncio.gather(*tasks)) == len(fetched) == 12

    asyncio.run(scenario())


def test_opening_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _Slow()
    monkeypatch.setattr(opening, "open_picture", slow)
    server = Seeing("x", picture_timeout_s=0.05)
    response = server.post(CHAT, {"messages": [said(url_part())]})
    slow.release.set()
    assert response.status_code == 503 and "within 0.05 s" in response.text


def test_a_client_that_leaves_while_its_picture_is_opened_is_not_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = _Slow()
    monkeypatch.setattr(opening, "open_picture", slow)
    server = Seeing("x")

    async def scenario() -> None:
        body = json.dumps({"messages": [said(url_part())]}).encode()
        task = asyncio.create_task(call_async(server.app, "POST", CHAT, HEADERS, [body]))
        while not slow.going:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait([task])
        assert server.serving.pictures._memory.num_bytes == 0
        slow.release.set()

    asyncio.run(scenario())
    assert server.engine.requests == []


def test_a_body_forgets_the_text_of_a_picture_that_was_opened() -> None:
    text = SentText(URL)
    part = picture_part(text, "here")
    opener = PictureOpener(ServerSettings(), _Nobody())
    messages = [{"role": "user", "content": [part]}]
    opened = asyncio.run(opener.open(messages, make_vision()))
    assert len(text) == 0
    assert len(opened.pictures) == 1
    assert opened.messages == [
        {"role": "user", "content": [{"type": "image", "image": opened.pictures[0].key}]}
    ]
