"""The `openai` and `anthropic` clients show pictures to `flashdraft serve` and a tiny Gemma 4."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from flashdraft.media.sizes import cells_of
from tests.e2e.test_serve_process import Running, serving
from tests.seeing_checkpoint import BUDGET, CELL, make_seeing_checkpoint
from tests.seeing_gguf import make_seeing_gguf
from tests.unit.media.film_files import filled, film, grey, pdf
from tests.unit.server.seeing import base64_of, data_url, png

ASKED = "the quick brown"
GREEN, BLUE = png(color="green"), png(color="blue")  # whose answers can be read
NUM_TOKENS = cells_of(64, 48, BUDGET, CELL).num_tokens + 2  # with the marks around them

GREEDY: Any = {"extra_body": {"temperature": 0}}  # anthropic's client has no word for it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_checkpoint(tmp_path_factory.mktemp("seeing") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
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


def block(picture: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(picture)}
    return {"type": "image", "source": source}


def blocks(picture: bytes) -> Any:
    """The same question as Anthropic has it."""
    return [{"role": "user", "content": [block(picture), {"type": "text", "text": ASKED}]}]


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def test_the_answer_is_about_the_picture_that_was_shown(by_openai: openai.OpenAI) -> None:
    texts = [text_of(ask(by_openai, picture)) for picture in (GREEN, BLUE, GREEN, None, BLUE)]
    assert texts[0] == texts[2] and texts[1] == texts[4]
    assert len({*texts}) == 3 and all(texts)


def test_a_gguf_model_with_its_mmproj_file_answers_alike(
    by_openai: openai.OpenAI, folder: Path, tmp_path: Path
) -> None:
    model = make_seeing_gguf(folder, tmp_path / "gguf")
    tower = model.with_name("mmproj-tiny-f32.gguf").rename(tmp_path / "tower.gguf")
    flags = ("--draft", "ngram", "--mmproj", str(tower), "--served-model-name", "tiny")
    with serving(model, tmp_path, *flags) as running:
        url = f"http://127.0.0.1:{running.port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            for picture in (GREEN, BLUE, None):
                ours, theirs = (
                    ask(one, picture, max_soft_tokens=BUDGET) for one in (client, by_openai)
                )
                assert text_of(ours) == text_of(theirs)
                assert ours.usage.prompt_tokens == theirs.usage.prompt_tokens


def test_a_small_model_sees_with_its_own_tower(tmp_path: Path) -> None:
    folder = make_seeing_checkpoint(tmp_path / "tiny", small=True)
    with serving(folder, tmp_path, "--draft", "ngram") as running:
        url = f"http://127.0.0.1:{running.port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            texts = [text_of(ask(client, picture)) for picture in (GREEN, BLUE, GREEN, None)]
    assert texts[0] == texts[2] and len({*texts}) == 3


def test_a_pictures_tokens_are_counted_and_found_again(by_openai: openai.OpenAI) -> None:
    plain = ask(by_openai, None).usage.prompt_tokens
    first = ask(by_openai, png(color="orange"))
    assert first.usage.prompt_tokens == plain + NUM_TOKENS
    again = ask(by_openai, png(color="orange"))
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert text_of(again) == text_of(first)
    more = ask(by_openai, GREEN, max_soft_tokens=140).usage.prompt_tokens
    assert more - plain - 2 == cells_of(64, 48, 140, CELL).num_tokens


def test_the_responses_api_shows_pictures_too(by_openai: openai.OpenAI) -> None:
    content: Any = [
        {"type": "input_image", "image_url": data_url(GREEN), "detail": "auto"},
        {"type": "input_text", "text": ASKED},
    ]
    answer = by_openai.responses.create(
        model="tiny",
        input=[{"role": "user", "content": content}],
        temperature=0,
        max_output_tokens=24,
        extra_body={"ignore_eos": True},
    )
    assert answer.output_text == text_of(ask(by_openai, GREEN))


def test_anthropics_client_shows_pictures_and_counts_them(
    by_anthropic: anthropic.Anthropic, by_openai: openai.OpenAI
) -> None:
    messages: Any = blocks(GREEN)
    answer = by_anthropic.messages.create(model="tiny", max_tokens=8, messages=messages)
    counted = by_anthropic.messages.count_tokens(model="tiny", messages=messages)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == ask(by_openai, GREEN).usage.prompt_tokens


def test_streams_are_about_the_picture_too(
    by_openai: openai.OpenAI, by_anthropic: anthropic.Anthropic
) -> None:
    settings: Any = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = text_of(ask(by_openai, GREEN))
    chunks = by_openai.chat.completions.create(
        messages=question(GREEN), max_tokens=24, stream=True, **settings
    )
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == whole
    shown = {"type": "input_image", "image_url": data_url(GREEN), "detail": "auto"}
    said = [{"role": "user", "content": [shown, {"type": "input_text", "text": ASKED}]}]
    events = by_openai.responses.create(input=said, max_output_tokens=24, stream=True, **settings)
    deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
    assert "".join(deltas) == whole
    asked: Any = {"model": "tiny", "max_tokens": 24, "messages": blocks(GREEN), **GREEDY}
    with by_anthropic.messages.stream(**asked) as stream:
        streamed = "".join(stream.text_stream)
    assert whole.startswith(streamed) and streamed  # it ends where the model does


Ask = Callable[[openai.OpenAI, anthropic.Anthropic, bytes], tuple[str, int]]


def returned_in_chat(
    by_openai: openai.OpenAI, by_anthropic: anthropic.Anthropic, picture: bytes
) -> tuple[str, int]:
    """An answer to a tool's picture, and the tokens of its prompt."""
    shown = {"type": "image_url", "image_url": {"url": data_url(picture)}}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: Any = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [shown]},
    ]
    answer = by_openai.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=24
    )
    assert answer.usage is not None
    return text_of(answer), answer.usage.prompt_tokens


def returned_in_responses(
    by_openai: openai.OpenAI, by_anthropic: anthropic.Anthropic, picture: bytes
) -> tuple[str, int]:
    shown = {"type": "input_image", "image_url": data_url(picture), "detail": "auto"}
    said: Any = [
        {"role": "user", "content": ASKED},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [shown]},
    ]
    answer = by_openai.responses.create(
        model="tiny", input=said, temperature=0, max_output_tokens=24
    )
    assert answer.usage is not None
    return answer.output_text, answer.usage.input_tokens


def returned_in_messages(
    by_openai: openai.OpenAI, by_anthropic: anthropic.Anthropic, picture: bytes
) -> tuple[str, int]:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [block(picture)]}
    messages: Any = [
        {"role": "user", "content": ASKED},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}],
        },
        {"role": "user", "content": [result]},
    ]
    answer = by_anthropic.messages.create(model="tiny", messages=messages, max_tokens=24, **GREEDY)
    counted = by_anthropic.messages.count_tokens(model="tiny", messages=messages)
    return "".join(one.text for one in answer.content if one.type == "text"), counted.input_tokens


@pytest.mark.parametrize(
    "ask_about", [returned_in_chat, returned_in_responses, returned_in_messages]
)
def test_a_picture_that_a_tool_returns_is_seen(
    ask_about: Ask, by_openai: openai.OpenAI, by_anthropic: anthropic.Anthropic
) -> None:
    green, blue, again, large = (
        ask_about(by_openai, by_anthropic, picture)
        for picture in (GREEN, BLUE, GREEN, png(200, 40, "green"))
    )
    assert green == again
    assert green[0] != blue[0] and green[1] == blue[1]
    assert large[1] - green[1] == cells_of(200, 40, BUDGET, CELL).num_tokens + 2 - NUM_TOKENS


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
    for wrong in (b"no picture", GREEN[:40]):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(by_openai, wrong)
        assert caught.value.param == "messages[0].content[0].image_url.url"
    assert ask(by_openai, GREEN).usage.completion_tokens == 24


def test_the_server_says_that_it_sees(server: Running) -> None:
    _, models = server.ask("/v1/models")
    assert "vision" in models["data"][0]["capabilities"]
    assert server.metric('pictures_total{outcome="opened"}') > 0
