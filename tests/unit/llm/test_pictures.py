"""Conversations with pictures in Python: what reaches the engine, from every form, in both LLMs."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from PIL import Image

from flashdraft import LLM, AsyncLLM, SamplingParams
from flashdraft.chat.sight import Sight
from flashdraft.core import Picture, Request
from flashdraft.engine.engine import Engine
from flashdraft.errors import ContextLengthError, RequestError
from flashdraft.kernels.interface import Kernels
from flashdraft.media.pictures import PictureRules
from flashdraft.models.config.vision import VisionTokens
from flashdraft.models.pairs import OpenPair
from tests.tiny import VOCAB_SIZE, make_tiny_checkpoint, make_tiny_tokenizer
from tests.unit.chat.picture_factory import (
    NO_TOOLS,
    PICTURE_MARKS,
    open_by_name,
    vision_config,
)

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cache_gb": 0.01, "draft": None}
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
MARKS = [3, 4, 5, 6]  # their ids
WIDE, TALL = b"640x480", b"300x400"  # 63 and 63 tokens of 70
URL = "data:image/png;base64," + base64.b64encode(TALL).decode()


class FakeTower:
    """Features of a picture by its first pixel."""

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size

    def encode(self, pictures: Sequence[Picture]) -> list[torch.Tensor]:
        return [
            torch.full((one.num_tokens, self._hidden_size), one.pixels[0] / 255) for one in pictures
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("target"), "gemma4")
    tokenizer = make_tiny_tokenizer(PICTURE_MARKS)
    assert [tokenizer.token_to_id(mark) for mark in PICTURE_MARKS] == MARKS
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": NO_TOOLS}))
    return folder


@pytest.fixture
def seeing(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every target has a tower, and what is opened is a size in words; what was opened."""
    original, opened = OpenPair.build, list[bytes]()

    def build(self: OpenPair, kernels: Kernels, label: str) -> Any:
        target, drafter = original(self, kernels, label)
        vision = replace(vision_config(VisionTokens(*MARKS)), default_budget=70)
        target.config = replace(target.config, vision=vision)
        target.vision = FakeTower(target.config.hidden_size)
        return target, drafter

    def open_one(data: bytes, rules: PictureRules) -> Picture:
        opened.append(data)
        return open_by_name(data, rules)

    monkeypatch.setattr(OpenPair, "build", build)
    monkeypatch.setattr("flashdraft.llm.asking.Sight", lambda vision: Sight(vision, open_one))
    return opened


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    original, found = Engine.submit, list[Request]()

    def submit(self: Engine, request: Request) -> None:
        found.append(request)
        original(self, request)

    monkeypatch.setattr(Engine, "submit", submit)
    return found


@pytest.fixture
def llm(folder: Path, seeing: list[bytes]) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as llm:
        yield llm


def asked(*images: Any, **more: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": one, **more} for one in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "the fox"}]}]


def test_a_chat_sends_the_engine_the_pictures_in_their_places(
    llm: LLM, submitted: list[Request]
) -> None:
    messages = asked(WIDE, URL)
    assert llm.sees_pictures
    answer = llm.chat(messages, SHORT)
    (request,) = submitted
    assert answer.stats.prompt_tokens == len(request.prompt_ids)
    assert request.prompt_ids == llm.chat_prompt(messages)
    first, second = request.pictures
    assert (first.picture.num_tokens, second.picture.num_tokens) == (63, 63)
    for placed in request.pictures:
        around = request.prompt_ids[placed.start - 1 : placed.end + 1]
        assert around == [3, *[4] * 63, 5]
    assert first.picture.key != second.picture.key and first.end < second.start
    assert llm.chat_pictures(messages) == request.pictures
    assert llm.chat_pictures([{"role": "user", "content": "no picture"}]) == ()


def test_streams_and_several_answers_have_them_too(llm: LLM, submitted: list[Request]) -> None:
    list(llm.stream(asked(WIDE), SHORT))
    llm.chat(asked(WIDE), replace(SHORT, n=2, temperature=1.0))
    assert [len(request.pictures) for request in submitted] == [1, 1, 1]
    llm.generate("the fox", SHORT)
    assert submitted[-1].pictures == ()


def test_a_conversation_opens_its_pictures_once(llm: LLM, seeing: list[bytes]) -> None:
    messages = asked(WIDE)
    for _ in range(2):
        answer = llm.chat(messages, SHORT)
        messages += [{"role": "assistant", "content": answer.content}, *asked(WIDE, TALL)]
    assert seeing == [WIDE, TALL]
    llm.chat(asked(WIDE, max_soft_tokens=140), SHORT)
    assert seeing == [WIDE, TALL, WIDE]


def test_a_prompt_that_has_grown_too_long_is_refused_with_numbers(llm: LLM) -> None:
    count = len(llm.chat_prompt(asked(*[WIDE] * 20)))
    assert count > llm.engine.max_context
    with pytest.raises(ContextLengthError, match=f"has {count} tokens; the context holds"):
        llm.chat(asked(*[WIDE] * 20), SHORT)


def test_a_file_and_its_refusal(llm: LLM, tmp_path: Path, submitted: list[Request]) -> None:
    (tmp_path / "wide").write_bytes(WIDE)
    llm.chat(asked(tmp_path / "wide", str(tmp_path / "wide")), SHORT)
    (request,) = submitted
    assert len({one.picture.key for one in request.pictures}) == 1
    with pytest.raises(RequestError, match="none.png.* cannot be read"):
        llm.chat(asked(tmp_path / "none.png"), SHORT)


def test_a_real_picture_is_one_in_every_form(
    folder: Path,
    seeing: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    submitted: list[Request],
) -> None:
    monkeypatch.setattr("flashdraft.llm.asking.Sight", Sight)
    image = Image.new("RGB", (120, 160), (200, 30, 30))
    image.save(tmp_path / "red", "PNG")
    data = (tmp_path / "red").read_bytes()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    with LLM(folder, **OPTIONS) as llm:
        llm.chat(asked(image, data, url, tmp_path / "red"), SHORT)
        with pytest.raises(RequestError, match="^Picture 2 of 2: "):
            llm.chat(asked(data, data[:60]), SHORT)
    (request,) = submitted
    assert [one.picture.num_tokens for one in request.pictures] == [63] * 4
    assert len({one.picture.key for one in request.pictures}) == 1


def test_a_model_without_a_tower_says_so(folder: Path, submitted: list[Request]) -> None:
    with LLM(folder, **OPTIONS) as blind:
        assert not blind.sees_pictures
        with pytest.raises(RequestError, match="The model sees no pictures.* Send text alone"):
            blind.chat(asked("no-such-file.png"), SHORT)
    assert submitted == []


@pytest.mark.parametrize("vision", [1, None, "no"])
def test_vision_is_a_switch(vision: Any) -> None:
    with pytest.raises(RequestError, match="vision is .*; it must be True or False"):
        LLM("no-such-model", vision=vision)


@pytest.mark.parametrize("vision", [True, False])
def test_the_tower_is_loaded_unless_it_is_left_out(
    monkeypatch: pytest.MonkeyPatch, vision: bool
) -> None:
    given: list[Any] = []

    def open_nothing(*arguments: Any) -> None:
        given.extend(arguments)
        raise RequestError("seen")

    monkeypatch.setattr("flashdraft.llm.loaded.open_pair", open_nothing)
    for mmproj, named in ((None, None), (Path("mmproj.gguf"), "mmproj.gguf")):
        with pytest.raises(RequestError, match="seen"):
            LLM("no-such-model", vision=vision, mmproj=mmproj, **OPTIONS)
        assert given == ["no-such-model", None, vision, named, None]  # and no adapter
        given.clear()
    with pytest.raises(RequestError, match="mmproj is 3; it must be a name or a path"):
        LLM("no-such-model", vision=vision, mmproj=cast(Any, 3), **OPTIONS)


def test_an_event_loop_goes_on_while_pictures_are_opened(
    folder: Path, seeing: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_open = threading.Event()

    def open_late(data: bytes, rules: PictureRules) -> Picture:
        assert may_open.wait(30)
        return open_by_name(data, rules)

    monkeypatch.setattr("flashdraft.llm.asking.Sight", lambda vision: Sight(vision, open_late))

    async def main() -> None:
        async with AsyncLLM(folder, **OPTIONS) as llm:
            task = asyncio.create_task(llm.chat(asked(WIDE), SHORT))
            began = time.monotonic()
            await asyncio.sleep(0.1)
            assert not task.done() and time.monotonic() - began < 20
            may_open.set()
            assert (await task).stats.prompt_tokens > 63

    asyncio.run(main())


def test_closing_ends_the_processes_that_opened(
    folder: Path, seeing: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    rested: list[bool] = []
    monkeypatch.setattr("flashdraft.chat.sight.rest", lambda: rested.append(True))
    with LLM(folder, **OPTIONS):
        assert not rested
    assert rested == [True]
