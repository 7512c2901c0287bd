"""Pictures that are named in a terminal: their files, read once, and the parts they become.

A file is read when it is named; what becomes of it afterwards changes no conversation.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flashdraft.cli.input import checked_text
from flashdraft.errors import RequestError, quoted
from flashdraft.media.pictures import PictureRules, open_picture, picture_bytes
from flashdraft.media.sizes import BUDGETS

_TRIED = PictureRules(cell=48, budget=BUDGETS[0])  # any will do to see whether a file opens


class PictureFile(NamedTuple):
    """A picture's file as it was when it was read, and the most tokens the picture may take."""

    path: Path  # absolute
    data: bytes
    budget: int | None = None  # None: as many as is usual for the model

    def part(self, *, named: bool = False) -> dict[str, Any]:
        """Its part of a message's content, with the file's name or what was in it."""
        part = {"type": "image", "image": str(self.path) if named else self.data}
        return part if self.budget is None else {**part, "max_soft_tokens": self.budget}


def content_of(
    text: str, pictures: Sequence[PictureFile], *, named: bool = False
) -> str | list[dict[str, Any]]:
    """A message's content: pictures first, as models are used to, then the text."""
    if not pictures:
        return text
    return [*(one.part(named=named) for one in pictures), {"type": "text", "text": text}]


def read_picture(name: str | Path, budget: int | None = None) -> PictureFile:
    """Read a picture's file; RequestError where there is none."""
    checked_text(str(name), "The name of a picture's file")
    try:
        path = Path(name).expanduser().absolute()
    except RuntimeError as error:  # of a user who is not there
        raise RequestError(f"{quoted(str(name))} is no name of a file: {error}.") from None
    return PictureFile(path, picture_bytes(path), budget)


def pictures_of(arguments: argparse.Namespace) -> list[PictureFile]:
    """What --image names, read and opened once, so that all is known before a model is loaded."""
    if arguments.image and arguments.no_vision:
        raise RequestError("--image needs what --no-vision leaves out; drop one.")
    pictures = [read_picture(name, picture_budget(arguments)) for name in arguments.image]
    for one in pictures:
        try:
            open_picture(one.data, _TRIED)
        except RequestError as error:
            raise RequestError(f"--image {quoted(str(one.path))}: {error}") from None
    return pictures


def picture_budget(arguments: argparse.Namespace) -> int | None:
    """What --image-tokens says."""
    given: str | None = arguments.image_tokens
    return None if given is None else int(given)


def typed_path(text: str) -> Path:
    """A path as it was typed, or dragged into the terminal, which quotes it."""
    words = [text]
    if not os.path.exists(text):
        try:
            words = shlex.split(text)
        except ValueError:  # a quote that is part of the name
            words = [text]
    return Path(words[0] if len(words) == 1 else text)
