"""Films and PDFs in every API: where they stand, what is refused, and what they may cost."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import pytest

from flashdraft.errors import CapacityError
from flashdraft.media import kinds
from flashdraft.media.kinds import FILM, PDF
from flashdraft.media.sizes import cells_of
from flashdraft.models.config.vision import VisionTokens
from flashdraft.server.answering import pictures as opening
from flashdraft.server.answering.pictures import PictureOpener, media_part
from flashdraft.server.http.picture_fields import SentText
from flashdraft.server.settings import ServerSettings
from tests.unit.media.film_files import ENCRYPTED, filled, film, grey, pdf
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
COUNT = "/v1/messages/count_tokens"
PAGES = pdf([(300, 400), (400, 300)], [filled(1, 0, 0), filled(0, 0, 1)])
PDF_URL = data_url(PAGES, "application/pdf")
FILM_BYTES = film(3, fps=1)
FILM_URL = data_url(FILM_BYTES, "video/mp4")
TEXT = {"type": "text", "text": "what is it?"}


def said(*content: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": [*content], **fields}


def file_part(url: str = PDF_URL, **fields: Any) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": url, **fields}}


def film_part(url: str = FILM_URL, **fields: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url, **fields}}


def block(data: str | None = None, **fields: Any) -> dict[str, Any]:
    source = {
        "type": "base64",
        "media_type": "application/pdf",
        "data": base64_of(PAGES) if data is None else data,
    }
    return {"type": "document", "source": source, **fields}


def input_file(**fields: Any) -> dict[str, Any]:
    return {"input": [said({"type": "input_file", **(fields or {"file_data": PDF_URL})})]}


CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [block(), TEXT]}
SHOWN: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [said(file_part(filename="a.pdf"), TEXT)]}, "user"),
    (
        CHAT,
        {
            "messages": [
                said(TEXT),
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                said(file_part(), role="tool", tool_call_id="c"),
            ]
        },
        "tool",
    ),
    (RESPONSES, input_file(file_data=PDF_URL, filename="a.pdf", detail="auto"), "user"),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": "look"},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_file", "file_data": PDF_URL}],
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
                said(
                    {"type": "tool_use", "id": "c", "name": "look", "input": {}}, role="assistant"
                ),
                said(RESULT),
            ],
            "max_tokens": 9,
        },
        "tool",
    ),
]


@pytest.mark.parametrize(("path", "body", "role"), SHOWN)
def test_a_pdf_is_its_pages_where_it_stands(path: str, body: dict[str, Any], role: str) -> None:
    server = Seeing("a cat")
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    (request,) = server.engine.requests
    red, blue = request.pictures
    tokens, ids = make_vision().tokens, request.prompt_ids
    for placed, size in ((red, (300, 400)), (blue, (400, 300))):
        assert placed.picture.num_tokens == cells_of(*size, 560, CELL).num_tokens
        assert set(ids[placed.start : placed.end]) == {tokens.picture}
        assert (ids[placed.start - 1], ids[placed.end]) == (tokens.begin, tokens.end)
    assert red.end + 1 == blue.start - 1
    assert red.picture.pixels[:3] == b"\xff\0\0" and blue.picture.pixels[:3] == b"\0\0\xff"
    before = server.engine.tokenizer.decode(ids[: red.start], skip_special=False)
    assert before.rpartition("<|turn>")[2].startswith(f"{role}\n")


def test_a_film_is_its_frames_behind_their_times() -> None:
    server = Seeing("a cat")
    response = server.post(CHAT, {"messages": [said(film_part(), TEXT)]})
    assert response.status_code == 200, response.text
    (request,) = server.engine.requests
    tokens, ids = make_vision().tokens, list(request.prompt_ids)
    assert len(request.pictures) == 3
    for placed in reversed(request.pictures):
        assert set(ids[placed.start : placed.end]) == {tokens.video}
        del ids[placed.start - 1 : placed.end + 1]
    shown = server.engine.tokenizer.decode(ids, skip_special=False)
    assert shown == "<|turn>user\n00:00  00:01  00:02 what is it?<turn|>\n<|turn>model"
    assert response.json()["usage"]["prompt_tokens"] == len(request.prompt_ids)


def test_pictures_films_and_pdfs_keep_their_order() -> None:
    server = Seeing("x", max_pictures=19)
    picture = {"type": "image_url", "image_url": {"url": data_url(png())}}
    parts = (film_part(), file_part(max_soft_tokens=70), picture, film_part())
    assert server.post(CHAT, {"messages": [said(*parts)]}).status_code == 200
    (request,) = server.engine.requests
    video, still = make_vision().tokens.video, make_vision().tokens.picture
    kinds = [request.prompt_ids[placed.start] for placed in request.pictures]
    assert kinds == [video] * 3 + [still] * 3 + [video] * 3
    keys = [placed.picture.key for placed in request.pictures]
    assert keys[:3] == keys[-3:] and len(set(keys)) == 6


def test_tokens_and_metrics_count_pages_and_frames() -> None:
    server = Seeing("a cat")
    body = {"messages": [said(block(), TEXT)]}
    server.post(MESSAGES, {**body, "max_tokens": 9})
    (request,) = server.engine.requests
    assert server.post(COUNT, body).json() == {"input_tokens": len(request.prompt_ids)}
    server.post(CHAT, {"messages": [said(film_part())]})
    shown = server.get("/metrics").body.decode()
    assert 'flashdraft_pictures_total{outcome="opened"} 7' in shown
    count = sum(
        one.picture.num_tokens
        for request, times in zip(server.engine.requests, (2, 1), strict=True)
        for one in request.pictures * times
    )
    assert f"flashdraft_picture_tokens_total {count}" in shown


@pytest.mark.parametrize(
    ("path", "body", "budget"),
    [
        (CHAT, {"messages": [said(file_part(max_soft_tokens=70))]}, 70),
        (RESPONSES, input_file(file_data=PDF_URL, detail="low"), 70),
        (RESPONSES, input_file(file_data=PDF_URL, max_soft_tokens=1120), 1120),
    ],
)
def test_how_many_tokens_a_page_takes_can_be_said(
    path: str, body: dict[str, Any], budget: int
) -> None:
    server = Seeing("x")
    assert server.post(path, body).status_code == 200
    first = server.engine.requests[0].pictures[0].picture
    assert first.num_tokens == cells_of(300, 400, budget, CELL).num_tokens


def test_what_a_document_is_called_stands_before_it() -> None:
    server = Seeing("x")
    named = block(title="The year", context="of a shop", citations={"enabled": False})
    assert server.post(MESSAGES, {"messages": [said(named)], "max_tokens": 4}).status_code == 200
    (request,) = server.engine.requests
    begin = request.prompt_ids[: request.pictures[0].start - 1]
    text = server.engine.tokenizer.decode(begin, skip_special=False)
    assert "The year" in text and text.endswith("of a shop")


def test_a_model_without_vision_or_without_films_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "read_data_url", pytest.fail)
    blind = Scripted("x")
    for part, noun in ((film_part(), "film"), (file_part(), "PDF")):
        error = blind.post(CHAT, {"messages": [said(part)]}).json()["error"]
        assert f"is a {noun}, and the model takes none" in error["message"]
    sees = Seeing("x")
    tokens = make_vision().tokens
    without = make_vision()._replace(tokens=VisionTokens(tokens.begin, tokens.picture, tokens.end))
    sees.engine.info = dataclasses.replace(sees.engine.info, vision=without)
    error = sees.post(CHAT, {"messages": [said(TEXT, film_part())]}).json()["error"]
    assert error["param"] == "messages[0].content[1].video_url.url"
    assert "The model sees pictures and takes no films" in error["message"]
    assert "video" not in sees.get("/v1/models").json()["data"][0]["capabilities"]


def test_what_is_not_installed_is_said_and_no_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds.importlib.util, "find_spec", lambda name: None)
    server = Seeing("x")
    assert server.get("/v1/models").json()["data"][0]["capabilities"][-1] == "vision"
    for part, extra in ((film_part(), "video"), (file_part(), "pdf")):
        response = server.post(CHAT, {"messages": [said(part)]})
        assert response.status_code == 400
        assert f"Install 'flashdraft[{extra}]'" in response.json()["error"]["message"]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [said(film_part(data_url(b"x", "video/mp4")))]}, "It is no MP4, MOV, WebM"),
    (CHAT, {"messages": [said(film_part(PDF_URL))]}, "must be 'data:video/mp4;base64,'"),
    (CHAT, {"messages": [said(film_part("https://example.com/a.mp4"))]}, "send the film itself"),
    (CHAT, {"messages": [said(film_part("file:///etc/passwd"))]}, "nothing else is opened here"),
    (CHAT, {"messages": [said(film_part(""))]}, "url: it is empty"),
    (CHAT, {"messages": [said(film_part(fps=2))]}, "video_url.fps"),
    (CHAT, {"messages": [said({"type": "video_url"})]}, "video_url is missing"),
    (CHAT, {"messages": [said({"type": "file"})]}, "file is missing"),
    (CHAT, {"messages": [said({"type": "file", "file": {}})]}, "file_data is missing"),
    (CHAT, {"messages": [said({"type": "file", "file": {"file_id": "f"}})]}, "stores no files"),
    (CHAT, {"messages": [said(file_part(surprise=1))]}, "file.surprise"),
    (CHAT, {"messages": [said(file_part(max_soft_tokens=3))]}, "file.max_soft_tokens"),
    (CHAT, {"messages": [said(file_part(FILM_URL))]}, "must be 'data:application/pdf;base64,'"),
    (CHAT, {"messages": [said(file_part(data_url(b"x", "application/pdf")))]}, "It is no PDF"),
    (
        CHAT,
        {"messages": [said(file_part(data_url(pdf(trailer=ENCRYPTED), "application/pdf")))]},
        "It is encrypted",
    ),
    (CHAT, {"messages": [said(file_part(), role="system"), said(TEXT)]}, "files stand in messages"),
    (CHAT, {"messages": [said(film_part(), role="assistant"), said(TEXT)]}, "role 'assistant'"),
    (CHAT, {"messages": [said({**TEXT, "file": {"file_data": PDF_URL}})]}, "has no meaning"),
    (CHAT, {"messages": [said({"type": "text", "text": "<|video|>"})]}, "1 places for 0 films"),
    (RESPONSES, input_file(file_id="f"), "stores no files"),
    (RESPONSES, input_file(filename="a.pdf"), "file_data is missing"),
    (RESPONSES, input_file(file_data=PDF_URL, file_url="https://x"), "file_url has no meaning"),
    (RESPONSES, input_file(file_url="https://x/a.pdf"), "send the PDF itself"),
    (
        RESPONSES,
        {"input": [said({"type": "input_file", "file_data": PDF_URL}, role="system")]},
        "role system",
    ),
    (MESSAGES, {"messages": [said(block("@@@@"))], "max_tokens": 4}, "is no base64"),
    (MESSAGES, {"messages": [said({"type": "document"})], "max_tokens": 4}, "source is missing"),
    (
        MESSAGES,
        {"messages": [said({**block(), "type": "image"})], "max_tokens": 4},
        "source.media_type is 'application/pdf', which has no meaning for type 'image'",
    ),
    (
        MESSAGES,
        {
            "messages": [
                said({"type": "document", "source": {"type": "text", "data": "some words"}})
            ],
            "max_tokens": 4,
        },
        "it must be 'base64' or 'url'",
    ),
    (MESSAGES, {"messages": [said(block(), role="assistant")], "max_tokens": 4}, "'document'"),
    (
        MESSAGES,
        {"messages": [said({**TEXT, "title": "x"})], "max_tokens": 4},
        "title has no meaning",
    ),
]


@pytest.mark.parametrize(("path", "body", "words"), REFUSED)
def test_what_cannot_be_taken_is_refused_in_words(
    path: str, body: dict[str, Any], words: str
) -> None:
    server = Seeing("x")
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"]
    assert server.engine.requests == []


def test_a_request_has_at_most_so_many_pictures_in_all() -> None:
    """A page counts as a picture, and a film as eight."""
    server = Seeing("x", max_pictures=9)
    ten = data_url(pdf([(30, 40)] * 10), "application/pdf")
    for parts, words in (
        ([film_part(), film_part()], "past the 9 pictures that a request may have (it has 16; a"),
        ([file_part(ten)], "It has 10 pages; at most 9 are taken here"),
        ([file_part(), file_part(ten)], "It has 10 pages; at most 7 are taken here"),
        ([film_part(), file_part()], "It has 2 pages; at most 1 are taken here"),
    ):
        response = server.post(CHAT, {"messages": [said(*parts)]})
        assert response.status_code == 400, response.text
        assert words in response.json()["error"]["message"]
    nine = data_url(pdf([(30, 40)] * 9), "application/pdf")
    last = said(file_part(nine, max_soft_tokens=70))
    assert server.post(CHAT, {"messages": [last]}).status_code == 200
    assert len(server.engine.requests[0].pictures) == 9


def test_an_address_is_fetched_where_its_host_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def fetch(self: Any, url: str, kind: Any) -> bytes:
        asked.append(f"{kind.noun} {url}")
        return {FILM: FILM_BYTES, PDF: PAGES}[kind]

    monkeypatch.setattr("flashdraft.media.sources.MediaFetcher.fetch", fetch)
    server = Seeing("x", allow_media_domains=("example.com",))
    url = "https://example.com/a"
    source = {"type": "url", "url": url}
    for path, body in (
        (CHAT, {"messages": [said(film_part(url))]}),
        (RESPONSES, input_file(file_url=url)),
        (MESSAGES, {"messages": [said({"type": "document", "source": source})], "max_tokens": 4}),
    ):
        assert server.post(path, body).status_code == 200
    assert asked == [f"film {url}", f"PDF {url}", f"PDF {url}"]
    assert [len(one.pictures) for one in server.engine.requests] == [3, 2, 2]


def test_films_and_pdfs_may_be_longer_than_texts() -> None:
    server = Seeing("x", max_body_bytes=4000)
    long = base64_of(bytes(9000))
    for path, body in (
        (CHAT, {"messages": [said(film_part(f"data:video/mp4;base64,{long}"))]}),
        (CHAT, {"messages": [said(file_part(f"data:application/pdf;base64,{long}"))]}),
        (RESPONSES, input_file(file_data=f"data:application/pdf;base64,{long}")),
        (MESSAGES, {"messages": [said(block(long))], "max_tokens": 4}),
    ):
        response = server.post(path, body)
        assert response.status_code == 400 and "It is no " in response.text
    for part in (file_part(filename="x" * 9000), {**film_part(), "text": "x" * 9000}):
        response = server.post(CHAT, {"messages": [said(part)]})
        assert "past the 4000 characters that a body may have besides" in response.text


def opener(**settings: Any) -> PictureOpener:
    class Counter:
        def picture_opened(self, num_tokens: int) -> None: ...

        def picture_refused(self) -> None: ...

    return PictureOpener(ServerSettings(**settings), Counter())


def conversation(*parts: tuple[kinds.Kind, str]) -> list[dict[str, Any]]:
    content = [
        media_part(kind, SentText(url), f"content[{n}]") for n, (kind, url) in enumerate(parts)
    ]
    return [{"role": "user", "content": content}]


def test_their_memory_has_a_limit_and_is_given_back() -> None:
    page, frame = 3 * 560 * CELL**2, 3 * 70 * CELL**2
    small = opener(max_picture_memory_bytes=len(FILM_URL) + 32 * frame - 1)
    with pytest.raises(CapacityError, match="bytes that they may|that they may have"):
        asyncio.run(small.open(conversation((FILM, FILM_URL)), make_vision()))
    roomy = opener(max_picture_memory_bytes=len(PDF_URL) + page)  # for one page
    with pytest.raises(CapacityError, match="that they may have"):
        asyncio.run(roomy.open(conversation((PDF, PDF_URL)), make_vision()))
    large = opener(max_picture_memory_bytes=len(PDF_URL) + 2 * page)
    opened = asyncio.run(large.open(conversation((PDF, PDF_URL)), make_vision()))
    assert large._memory.num_bytes == sum(len(one.pixels) for one in opened.pictures) > 0
    del opened
    for one in (small, roomy, large):
        assert_given_back(one)


def test_pictures_do_not_wait_for_films_and_time_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on, threads = threading.Event(), list[str]()

    def open_slowly(data: bytes, cell: int) -> Any:
        threads.append(threading.current_thread().name)
        goes_on.wait(20)
        raise AssertionError("nobody waits for it")

    monkeypatch.setattr(opening, "open_film", open_slowly)
    one = opener(picture_timeout_s=1.0)
    picture = conversation((kinds.PICTURE, data_url(png())))

    async def run() -> None:
        waiting = [
            asyncio.create_task(one.open(conversation((FILM, FILM_URL)), make_vision()))
            for _ in range(3)
        ]
        await asyncio.sleep(0.1)
        assert len((await one.open(picture, make_vision())).pictures) == 1
        for task in waiting:
            with pytest.raises(CapacityError, match="could not be opened within 1 s"):
                await task
        goes_on.set()

    asyncio.run(run())
    assert len(threads) == 1 and "flashdraft-films" in threads[0]
    assert one._memory.num_bytes == 0


def test_a_film_of_another_level_is_another_film() -> None:
    server = Seeing("x", "y")
    other = data_url(film([grey(9)] * 3, fps=1), "video/mp4")
    for url in (FILM_URL, other):
        assert server.post(CHAT, {"messages": [said(film_part(url))]}).status_code == 200
    first, second = server.engine.requests
    assert list(first.prompt_ids) == list(second.prompt_ids)
    assert {one.picture.key for one in first.pictures}.isdisjoint(
        one.picture.key for one in second.pictures
    )
