"""Films and PDFs in Python, through a tiny Gemma 4: one answer, however it is computed."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashdraft import LLM, SamplingParams
from flashdraft.errors import RequestError
from flashdraft.media.sizes import cells_of
from tests.seeing_checkpoint import CELL, make_seeing_checkpoint
from tests.unit.media.film_files import filled, film, grey, pdf

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cache_gb": 0.02}
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
FILM = film(5, fps=1)
OTHER = film([grey(200)] * 5, fps=1)
PAGES = pdf([(300, 400)] * 2, [filled(1, 0, 0), filled(0, 0, 1)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_checkpoint(tmp_path_factory.mktemp("seeing") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, draft=None, **OPTIONS) as llm:
        yield llm


def asked(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "the quick brown"}]}]


def shown(data: bytes, **more: Any) -> list[dict[str, Any]]:
    return asked({"type": "video", "video": data, **more})


def document(**more: Any) -> list[dict[str, Any]]:
    return asked({"type": "pdf", "pdf": PAGES, **more})


def test_a_film_is_the_frames_that_the_model_gets(llm: LLM) -> None:
    placed = llm.chat_pictures(shown(FILM))
    ids = llm.chat_prompt(shown(FILM))
    assert len(placed) == 5
    for one in placed:
        assert set(ids[one.start : one.end]) == {504}
        assert (ids[one.start - 1], ids[one.end]) == (499, 502)
        assert one.picture.num_tokens == cells_of(96, 72, 70, CELL).num_tokens
    before = [llm.tokenizer.decode(ids[end + 1 : one.start - 1]) for end, one in pairs(placed)]
    assert before == [f" 00:0{number} " for number in range(1, 5)]
    assert llm.chat(shown(FILM), PARAMS).stats.picture_tokens == 5 * placed[0].picture.num_tokens


def pairs(placed: Any) -> Any:
    return [(one.end, other) for one, other in zip(placed, placed[1:], strict=False)]


@pytest.mark.parametrize("make", [shown, None], ids=["film", "PDF"])
def test_drafted_is_plain_and_cached_is_cold(llm: LLM, folder: Path, make: Any) -> None:
    messages = document(max_soft_tokens=70) if make is None else shown(FILM)
    with LLM(folder, draft=None, **OPTIONS) as cold:
        expected = cold.chat(messages, PARAMS)
        assert expected.stats.cached_tokens == 0
    for _ in range(2):
        answer = llm.chat(messages, PARAMS)
        assert answer.token_ids == expected.token_ids
    assert answer.stats.cached_tokens > 0
    with LLM(folder, draft="ngram", **OPTIONS) as drafted:
        assert drafted.chat(messages, PARAMS).token_ids == expected.token_ids


def test_another_film_of_the_same_size_finds_nothing_of_the_first(llm: LLM) -> None:
    first, other = llm.chat(shown(FILM), PARAMS), llm.chat(shown(OTHER), PARAMS)
    assert first.stats.prompt_tokens == other.stats.prompt_tokens
    assert other.stats.cached_tokens < 16
    assert first.token_ids != other.token_ids


def test_every_form_is_the_same(llm: LLM, tmp_path: Path) -> None:
    for data, kind, media_type, forms in (
        (FILM, "video", "video/mp4", [{"type": "video_url", "video_url": {"url": "URL"}}]),
        (
            PAGES,
            "pdf",
            "application/pdf",
            [
                {"type": "file", "file": {"filename": "a.pdf", "file_data": "URL"}},
                {"type": "input_file", "filename": "a.pdf", "file_data": "URL"},
            ],
        ),
    ):
        path = tmp_path / kind
        path.write_bytes(data)
        url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
        written = [json.loads(json.dumps(form).replace('"URL"', json.dumps(url))) for form in forms]
        own = [{"type": kind, kind: one} for one in (data, path, str(path), url)]
        prompts = [llm.chat_prompt(asked(part)) for part in (*own, *written)]
        keys = [
            [one.picture.key for one in llm.chat_pictures(asked(part))] for part in (*own, *written)
        ]
        assert all(one == prompts[0] for one in prompts) and all(one == keys[0] for one in keys)


def test_pages_are_pictures_in_their_order(llm: LLM) -> None:
    red, blue = llm.chat_pictures(document())
    count = cells_of(300, 400, 560, CELL).num_tokens
    assert red.picture.num_tokens == blue.picture.num_tokens == count
    assert red.picture.pixels[:3] == b"\xff\0\0" and blue.picture.pixels[:3] == b"\0\0\xff"
    ids = llm.chat_prompt(document())
    assert set(ids[red.start : red.end]) == {500}


def test_what_is_wrong_is_said(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="A film cannot be taken. It is no MP4, MOV, WebM or M"):
        llm.chat(shown(b"broken"), PARAMS)
    with pytest.raises(RequestError, match="none.pdf.* cannot be read"):
        llm.chat(asked({"type": "pdf", "pdf": tmp_path / "none.pdf"}), PARAMS)
    many = pdf([(9, 9)] * 65)
    with pytest.raises(RequestError, match="It has 65 pages; at most 64 are taken here"):
        llm.chat(asked({"type": "pdf", "pdf": many}), PARAMS)
    assert llm.chat(shown(FILM), PARAMS).token_ids
