"""How one model sees the pictures of conversations: it opens them, and keeps the last ones.

What a picture is decoded and resized with is the media package's. The pictures of a conversation,
its films and PDFs too, come again with each of its turns; those that are kept need not be opened
again.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from flashdraft.chat.pictures import GivenPicture
from flashdraft.core import Picture
from flashdraft.media.decoding import rest
from flashdraft.media.kinds import FILM, PDF
from flashdraft.media.limits import MAX_PAGES, page_budget
from flashdraft.media.pictures import (
    Frame,
    PictureRules,
    file_bytes,
    open_film,
    open_page,
    open_picture,
    picture_bytes,
)
from flashdraft.models.config.vision import VisionConfig, VisionTokens

_Opened = TypeVar("_Opened", Picture, tuple[Picture, ...], tuple[Frame, ...])
MAX_KEPT_BYTES = 64 * 2**20  # of pixels: some thirty pictures of the usual size


class Sight:
    """Opens pictures as one model's tower takes them. Threads may share it."""

    def __init__(
        self,
        vision: VisionConfig,
        open_one: Callable[[bytes, PictureRules], Picture] = open_picture,
    ) -> None:
        self._vision = vision
        self._open_one = open_one
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def tokens(self) -> VisionTokens:
        """What stands for a picture in the model's prompts."""
        return self._vision.tokens

    def open(self, given: GivenPicture) -> Picture:
        """The picture, resized to as many tokens as it may take; RequestError in words."""
        if isinstance(given.image, Picture):  # a page
            return given.image
        data = picture_bytes(given.image)
        budget = self._vision.default_budget if given.budget is None else given.budget
        rules = PictureRules(self._vision.cell, budget)
        return self._remembered((_hash(data), budget), lambda: self._open_one(data, rules))

    def film(self, given: Any) -> tuple[Frame, ...]:
        """Frames from all of a film; like `open`."""
        data = file_bytes(given, FILM)
        return self._remembered((_hash(data), "film"), lambda: open_film(data, self._vision.cell))

    def pages(self, given: GivenPicture) -> tuple[Picture, ...]:
        """All pages of a PDF; like `open`."""
        data = file_bytes(given.image, PDF)
        rules = PictureRules(
            self._vision.cell, page_budget(self._vision.default_budget, given.budget)
        )
        return self._remembered((_hash(data), "pages", rules), lambda: _open_pages(data, rules))

    def _remembered(self, key: Hashable, make: Callable[[], _Opened]) -> _Opened:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                found: _Opened = self._kept[key]
                return found
        made = make()
        with self._lock:
            self._kept[key] = made
            size = sum(map(_num_bytes, self._kept.values()))
            while size > MAX_KEPT_BYTES and len(self._kept) > 1:
                _, forgotten = self._kept.popitem(last=False)
                size -= _num_bytes(forgotten)
        return made

    def close(self) -> None:
        """Let go of the pictures, and of processes that wait for more."""
        with self._lock:
            self._kept.clear()
        rest()


def _open_pages(data: bytes, rules: PictureRules) -> tuple[Picture, ...]:
    first, num_pages = open_page(data, 0, MAX_PAGES, rules)
    others = (open_page(data, page, MAX_PAGES, rules).picture for page in range(1, num_pages))
    return (first, *others)


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _num_bytes(opened: Picture | tuple[Picture | Frame, ...]) -> int:
    if isinstance(opened, Picture):
        return len(opened.pixels)
    pictures = (one if isinstance(one, Picture) else one.picture for one in opened)
    return sum(len(picture.pixels) for picture in pictures)
