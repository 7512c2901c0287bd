"""Pictures, films and PDFs that are named in a terminal: their files, read once, and their parts.

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
from flashdraft.media.kinds import FILM, PDF, PICTURE, Kind, kind_of
from flashdraft.media.limits import MAX_PAGES
from flashdraft.media.pictures import (
    PictureRules,
    file_bytes,
    open_film,
    open_page,
    open_picture,
)
from flashdraft.media.sizes import BUDGETS

_FLAGS = {"image": PICTURE, "pdf": PDF, "video": FILM}
_TRIED = PictureRules(cell=48, budget=BUDGETS[0])  # any will do to see whether a file opens


class PictureFile(NamedTuple):
    """A picture's file as it was when it was read, and the most tokens the picture may take.

    It may be a film's or a PDF's, too: then the tokens are those of each page.
    """

    path: Path  # absolute
    data: bytes
    budget: int | None = None  # None: as many as is usual for the model
    kind: Kind = PICTURE

    def part(self, *, named: bool = False) -> dict[str, Any]:
        """Its part of a message's content, with the file's name or what was in it."""
        name = self.kind.part
        part = {"type": name, name: str(self.path) if named else self.data}
        return part if self.budget is None else {**part, "max_soft_tokens": self.budget}


def content_of(
    text: str, pictures: Sequence[PictureFile], *, named: bool = False
) -> str | list[dict[str, Any]]:
    """A message's content: pictures first, as models are used to, then the text."""
    if not pictures:
        return text
    return [*(one.part(named=named) for one in pictures), {"type": "text", "text": text}]


def read_picture(
    name: str | Path, budget: int | None = None, kind: Kind | None = PICTURE
) -> PictureFile:
    """Read a picture's file, a film's or a PDF's; RequestError where there is none.

    `kind` None: the content says what it is.
    """
    checked_text(str(name), f"The name of a {(kind or PICTURE).noun}'s file")
    try:
        path = Path(name).expanduser().absolute()
    except RuntimeError as error:  # of a user who is not there
        raise RequestError(f"{quoted(str(name))} is no name of a file: {error}.") from None
    data = file_bytes(path, kind or PICTURE)
    kind = kind or kind_of(data)
    return PictureFile(path, data, None if kind is FILM else budget, kind)


def pictures_of(arguments: argparse.Namespace) -> list[PictureFile]:
    """What --image, --pdf and --video name, read and opened once.

    So all is known before a model is loaded.
    """
    pictures = list[PictureFile]()
    for flag, kind in _FLAGS.items():
        for name in getattr(arguments, flag):
            if arguments.no_vision:
                raise RequestError(f"--{flag} needs what --no-vision leaves out; drop one.")
            one = read_picture(name, picture_budget(arguments), kind)
            pictures.append(one)
            try:
                _try(one)
            except RequestError as error:
                raise RequestError(f"--{flag} {quoted(str(one.path))}: {error}") from None
    return pictures


def check_picture_flags(arguments: argparse.Namespace) -> None:
    """Refuse what does not go with --raw, or with no picture."""
    for flag in _FLAGS:
        if arguments.raw and getattr(arguments, flag):
            raise RequestError(
                f"--{flag} needs the chat template, which --raw leaves out; drop one."
            )
    if arguments.image_tokens is not None and not (arguments.image or arguments.pdf):
        raise RequestError("--image-tokens is for pictures; add --image FILE, or drop it.")


def _try(one: PictureFile) -> None:
    if one.kind is FILM:
        open_film(one.data, _TRIED.cell)
    elif one.kind is PDF:
        open_page(one.data, 0, MAX_PAGES, _TRIED)
    else:
        open_picture(one.data, _TRIED)


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
