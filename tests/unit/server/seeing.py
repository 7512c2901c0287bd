"""A scripted server whose model takes pictures, and pictures for it."""

from __future__ import annotations

import base64
import dataclasses
import functools
import io
import time
from typing import Any

import tokenizers
from PIL import Image

from flashdraft.models.config.vision import VisionTokens
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.server.answering.pictures import PictureOpener
from flashdraft.server.answering.serving import Serving
from flashdraft.server.app import create_app
from flashdraft.server.process.wire import Vision
from flashdraft.server.settings import ServerSettings
from tests.tiny import make_tiny_tokenizer
from tests.unit.server.asgi_client import call
from tests.unit.server.scripted import MARKS, Scripted, Step

CELL = 6  # pixels: small ones, so that pictures of 1120 tokens are small too
PICTURE_MARKS = ("<|image>", "<|image|>", "<image|>", "<|video|>")
TEMPLATE = (
    "{% for tool in tools or [] %}<|tool>{{ tool.function.name }}<tool|>{% endfor %}"
    "{% for message in messages %}<|turn>{{ message.role }}\n"
    "{% for call in message.tool_calls or [] %}"
    "[{{ call.function.name }}]{% endfor %}"
    "{% if message.role == 'tool' %}{{ message.name }}={% endif %}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content or [] %}"
    "{% if part.type == 'image' %}<|image|>{% elif part.type == 'video' %}<|video|>"
    "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<turn|>\n{% endfor %}<|turn>model\n"
)


@functools.cache
def make_seeing_tokenizer() -> Tokenizer:
    """The scripted servers' tokenizer with the marks of pictures, and a template that has them."""
    backend = make_tiny_tokenizer()
    marks = (*MARKS, *PICTURE_MARKS)
    backend.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in marks])
    return Tokenizer(backend, special_tokens={}, chat_template=TEMPLATE)


def make_vision() -> Vision:
    tokenizer = make_seeing_tokenizer()
    begin, picture, end, video = map(tokenizer.token_id, PICTURE_MARKS)
    assert begin is not None and picture is not None and end is not None
    return Vision(CELL, 280, VisionTokens(begin, picture, end, video))


class Seeing(Scripted):
    """The whole application around a scripted engine whose model takes pictures."""

    def __init__(self, *scripts: Step, **settings: Any) -> None:
        super().__init__(*scripts)
        tokenizer = self.engine.tokenizer = make_seeing_tokenizer()
        self.engine.info = dataclasses.replace(
            self.engine.info, vision=make_vision(), vocab_size=tokenizer.vocab_size
        )
        chosen = ServerSettings(allow_hosts=("*",), **settings)
        self.serving = Serving(self.engine, tokenizer, chosen, self.metrics)
        self.app = create_app(self.serving, lambda line: None)

    def get(self, path: str) -> Any:
        """What a GET answers."""
        return call(self.app, "GET", path, {"host": "test"})


def png(width: int = 64, height: int = 48, color: str = "red") -> bytes:
    """A picture of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64_of(data)}"


def assert_given_back(opener: PictureOpener) -> None:
    """All memory, once threads have let go: the answer is known a moment before."""
    end = time.monotonic() + 5.0
    while opener._memory.num_bytes and time.monotonic() < end:
        time.sleep(0.005)
    assert opener._memory.num_bytes == 0
