"""How one model sees the pictures of conversations: it opens them, and keeps the last ones.

What a picture is decoded and resized with is the media package's. The pictures of a conversation
come again with each of its turns; those that are kept need not be opened again.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable

from flashdraft.chat.pictures import GivenPicture
from flashdraft.core import Picture
from flashdraft.media.decoding import rest
from flashdraft.media.pictures import PictureRules, open_picture, picture_bytes
from flashdraft.models.config.vision import VisionConfig, VisionTokens

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
        self._kept: OrderedDict[tuple[bytes, int], Picture] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def tokens(self) -> VisionTokens:
        """What stands for a picture in the model's prompts."""
        return self._vision.tokens

    def open(self, given: GivenPicture) -> Picture:
        """The picture, resized to as many tokens as it may take; RequestError in words."""
        data = picture_bytes(given.image)
        budget = self._vision.default_budget if given.budget is None else given.budget
        key = hashlib.sha256(data).digest(), budget
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        picture = self._open_one(data, PictureRules(self._vision.cell, budget))
        with self._lock:
            self._kept[key] = picture
            size = sum(len(one.pixels) for one in self._kept.values())
            while size > MAX_KEPT_BYTES and len(self._kept) > 1:
                _, forgotten = self._kept.popitem(last=False)
                size -= len(forgotten.pixels)
        return picture

    def close(self) -> None:
        """Let go of the pictures, and of processes that wait for more."""
        with self._lock:
            self._kept.clear()
        rest()
