"""The `openai` and `anthropic` clients show pictures to `flashdraft serve` and a tiny Gemma 4."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from flashdraft.media.sizes import cells_of
from tests.e2e.test_serve_process import Running, serving
from tests.seeing_checkpoint import BUDGET, CELL, make_seeing_checkpoint
from tests.unit.media.film_files import filled, film, grey, pdf
from tests.unit.server.seeing import base64_of, data_url, png

ASKED = "the quick brown"
RED, BLUE = png(color="red"), png(color="blue")
NUM_TOKENS = cells_of(64, 48, BUDGET, CELL).num_tokens + 2  # with the marks around them


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_seeing_checkpoint(tmp_path_factory.mktemp("seeing") / "tiny")
    with serving(folder, tmp_path_factory.mktemp("server"), "--draft", "ngram") as running:
        yield running


@pytest.fixture
def by_openai(server: Running) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def by_anthropic(server: Running) -> Iterator[anthropic.Anthropic]:
    url = f"http://127.0.0.1:{server.port}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def question(picture: bytes | None, **fields: Any) -> Any:
    text = {"type": "text", "text": ASKED}
    if picture is None:
        return [{"role": "user", "content": [text]}]
    shown = {"type": "image_url", "image_url": {"url": data_url(picture), **fields}}
    return [{"role": "user", "content": [shown, text]}]


def ask(client: openai.OpenAI, picture: bytes | None, **fields: Any) -> Any:
    return client.chat.completions.create(
        model="tiny",
        messages=question(picture, **fields),
        temperature=0,
        max_tokens=24,
        extra_body={"ignore_eos": True},
    )


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def test_the_answer_is_about_the_picture_that_was_shown(by_openai: openai.OpenAI) -> None:
    texts = [text_of(ask(by_openai, picture)) for picture in (RED, BLUE, RED, None, BLUE)]
    assert texts[0] == texts[2] and texts[1] == texts[4]
    assert len({*texts}) == 3


def test_a_pictures_tokens_are_counted_and_found_again(by_openai: openai.OpenAI) -> None:
    plain = ask(by_openai, None).usage.prompt_tokens
    first = ask(by_openai, png(color="green"))
    assert first.usage.prompt_tokens == plain + NUM_TOKENS
    again = ask(by_openai, png(color="green"))
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert text_of(again) == text_of(first)
    more = ask(by_openai, RED, max_soft_tokens=140).usage.prompt_tokens
    assert more - plain - 2 == cells_of(64, 48, 140, CELL).num_tokens


def test_the_responses_api_shows_pictures_too(by_openai: openai.OpenAI) -> None:
    content: Any = [
        {"type": "input_image", "image_url": data_url(RED), "detail": "auto"},
        {"type": "input_text", "text": ASKED},
    ]
    answer = by_openai.responses.create(
        model="tiny",
        input=[{"role": "user", "content": content}],
        temperature=0,
        max_output_tokens=24,
        extra_body={"ignore_eos": True},
    )
    assert answer.output_text == text_of(ask(by_openai, RED))


def test_anthropics_client_shows_pictures_and_counts_them(
    by_anthropic: anthropic.Anthropic, by_openai: openai.OpenAI
) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(RED)}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": ASKED}]
    messages: Any = [{"role": "user", "content": content}]
    answer = by_anthropic.messages.create(model="tiny", max_tokens=8, messages=messages)
    counted = by_anthropic.messages.count_tokens(model="tiny", messages=messages)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == ask(by_openai, RED).usage.prompt_tokens


def test_films_and_pdfs_are_shown_too(
    by_openai: openai.OpenAI, by_anthropic: anthropic.Anthropic
) -> None:
    """The answer is about what was sent, whichever client sends it, streamed or not."""
    pages = [pdf([(300, 400)], [filled(red, 0, 0)]) for red in (0, 1)]
    clips = [film([grey(level)] * 3, fps=1) for level in (20, 220)]
    few = {"max_soft_tokens": 70}
    documents = [data_url(one, "application/pdf") for one in pages]
    parts: list[Any] = [{"type": "file", "file": {"file_data": one, **few}} for one in documents]
    parts += [
        {"type": "video_url", "video_url": {"url": data_url(one, "video/mp4")}} for one in clips
    ]
    fields: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
    texts = []
    for part in parts:
        messages: Any = [{"role": "user", "content": [part, {"type": "text", "text": ASKED}]}]
        answer = by_openai.chat.completions.create(messages=messages, max_tokens=24, **fields)
        texts.append(text_of(answer))
        streamed = by_openai.chat.completions.create(
            messages=messages, max_tokens=24, stream=True, **fields
        )
        pieces = [one.choices[0].delta.content or "" for one in streamed if one.choices]
        assert "".join(pieces) == texts[-1]
    assert len(set(texts)) == 4
    file: Any = {"type": "input_file", "file_data": documents[1], "filename": "a.pdf"}
    content = [{**file, **few}, {"type": "input_text", "text": ASKED}]
    asked: Any = [{"role": "user", "content": content}]
    response = by_openai.responses.create(input=asked, max_output_tokens=24, **fields)
    assert response.output_text == texts[1]
    source = {"type": "base64", "media_type": "application/pdf", "data": base64_of(pages[0])}
    blocks: Any = [{"type": "document", "source": source}, {"type": "text", "text": ASKED}]
    counted = by_anthropic.messages.count_tokens(
        model="tiny", messages=[{"role": "user", "content": blocks}]
    )
    plain = ask(by_openai, None).usage.prompt_tokens
    assert counted.input_tokens == plain + cells_of(300, 400, 560, CELL).num_tokens + 2


def test_what_cannot_be_seen_is_refused_by_its_field(by_openai: openai.OpenAI) -> None:
    for wrong in (b"no picture", RED[:40]):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(by_openai, wrong)
        assert caught.value.param == "messages[0].content[0].image_url.url"
    assert ask(by_openai, RED).usage.completion_tokens == 24


def test_the_server_says_that_it_sees(server: Running) -> None:
    _, models = server.ask("/v1/models")
    assert "vision" in models["data"][0]["capabilities"]
    assert server.metric('pictures_total{outcome="opened"}') > 0
