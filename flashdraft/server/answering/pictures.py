"""The pictures of a conversation: found, fetched where that is allowed, opened off the event loop.

Knows no API's shape: an API makes parts of `picture_part`. Few pictures are opened at once, one of
a request at a time; those that wait, and those that were opened for a request that goes on, have a
limit of memory together. How long a file is that must be fetched nobody knows before: few of them
are fetched or wait to be opened.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from flashdraft.chat.pictures import PicturePrompt, place_pictures
from flashdraft.core import Picture
from flashdraft.errors import CapacityError, RequestError
from flashdraft.media.pictures import PictureRules, open_picture
from flashdraft.media.sources import MediaFetcher, read_data_url
from flashdraft.server.answering.needs import PictureCounter
from flashdraft.server.http.errors import FieldError
from flashdraft.server.http.picture_fields import SentText
from flashdraft.server.process.wire import Vision
from flashdraft.server.settings import ServerSettings

OPEN_AT_ONCE = 2  # pictures; the others wait
FETCH_AT_ONCE = 8  # addresses, opened too: whoever waits for a slow host keeps no processor busy
_KIND, _SENT = "image", "image"  # a part's type, and where it has the picture


@dataclass(frozen=True, eq=False)
class SentPicture:
    """A picture as a client sent it."""

    text: SentText
    place: str  # the field that holds it
    is_bare: bool  # base64 alone; else a data: URL or an address
    budget: int | None  # of tokens; None: as the checkpoint has it


def picture_part(
    text: SentText, place: str, budget: int | None = None, *, is_bare: bool = False
) -> dict[str, Any]:
    """The part of a message that is a picture; its text is opened later."""
    return {"type": _KIND, _SENT: SentPicture(text, place, is_bare, budget)}


class OpenedPictures(NamedTuple):
    """A conversation whose pictures are open: what the template is given, and what goes in."""

    messages: Sequence[Mapping[str, Any]]
    pictures: tuple[Picture, ...]

    def place(self, token_ids: list[int], vision: Vision | None) -> PicturePrompt:
        """The prompt with every picture in its place."""
        if vision is None:
            return PicturePrompt(token_ids, ())
        return place_pictures(token_ids, self.pictures, vision.tokens)


class PictureOpener:
    """Opens the pictures of all requests of one server."""

    def __init__(self, settings: ServerSettings, counter: PictureCounter) -> None:
        self._settings = settings
        self._counter = counter
        self._memory = PictureMemory(settings.max_picture_memory_bytes)
        self._fetcher = MediaFetcher(settings.allow_media_domains)
        self._openers = ThreadPoolExecutor(OPEN_AT_ONCE, "flashdraft-pictures")
        self._fetchers = ThreadPoolExecutor(FETCH_AT_ONCE, "flashdraft-fetches")
        self._fetched = asyncio.Semaphore(FETCH_AT_ONCE)  # files until they are opened

    async def open(
        self, messages: Sequence[Mapping[str, Any]], vision: Vision | None
    ) -> OpenedPictures:
        """Open the pictures of a conversation, in its order.

        Raises FieldError for one that cannot be, and CapacityError where there is no room or time.
        """
        sent = list(_sent(messages))
        if not sent:
            return OpenedPictures(messages, ())
        try:
            vision = self._check(sent, vision)
            pictures = await self._open_in_time(sent, vision)
        except RequestError:
            self._counter.picture_refused()
            raise
        keys = {id(one): picture.key for one, picture in zip(sent, pictures, strict=True)}
        return OpenedPictures([_opened(message, keys) for message in messages], pictures)

    def _check(self, sent: Sequence[SentPicture], vision: Vision | None) -> Vision:
        first, limit = sent[0], self._settings.max_pictures
        if vision is None:
            raise FieldError(
                first.place,
                f"{first.place} is a picture, and the model takes none. Send text only, or ask a "
                "server whose /v1/models lists vision among the capabilities.",
            )
        if len(sent) > limit:
            place = sent[limit].place
            raise FieldError(
                place,
                f"{place} is past the {limit} pictures that a request may have (it has "
                f"{len(sent)}). Send fewer, or start the server with a higher --max-pictures.",
            )
        for one in sent:
            if one.is_bare and one.text.is_data_url:
                raise FieldError(
                    one.place,
                    f"{one.place} is a data: URL; it is base64 alone here. Leave out its head, up "
                    "to the comma.",
                )
            if one.is_bare or one.text.is_data_url:
                continue
            if not (one.text.is_address and self._settings.allow_media_domains):
                raise FieldError(
                    one.place,
                    f"{one.place} is no data: URL with base64, and nothing else is opened here: "
                    "send the picture itself (the operator may have addresses of single hosts "
                    "fetched, with --allow-media-domain).",
                )
        return vision

    async def _open_in_time(
        self, sent: Sequence[SentPicture], vision: Vision
    ) -> tuple[Picture, ...]:
        limit_s = self._settings.picture_timeout_s
        all_rules = [PictureRules(vision.cell, one.budget or vision.default_budget) for one in sent]
        most = sum(3 * rules.budget * rules.cell**2 for rules in all_rules)
        pictures: list[Picture] = []
        with self._memory.hold(most + sum(len(one.text) for one in sent)):
            try:
                async with asyncio.timeout(limit_s):
                    for one, rules in zip(sent, all_rules, strict=True):
                        pictures.append(await self._open(one, rules))
                        self._counter.picture_opened(pictures[-1].num_tokens)
            except TimeoutError:
                raise CapacityError(
                    f"The pictures could not be opened within {limit_s:g} s. Send fewer or smaller "
                    "ones, or try again later."
                ) from None
        for picture in pictures:
            self._memory.keep(picture)
        return tuple(pictures)

    async def _open(self, sent: SentPicture, rules: PictureRules) -> Picture:
        """One picture; a thread that has not begun is not begun for who has left."""
        loop = asyncio.get_running_loop()
        try:
            if sent.is_bare or sent.text.is_data_url:
                return await loop.run_in_executor(self._openers, _decode, sent, rules)
            async with self._fetched:
                fetch = self._fetcher.fetch
                data = await loop.run_in_executor(self._fetchers, fetch, sent.text.take())
                return await loop.run_in_executor(self._openers, open_picture, data, rules)
        except RequestError as error:
            raise FieldError(sent.place, f"{sent.place} cannot be taken. {error}") from None


class PictureMemory:
    """The memory of pictures that wait to be opened, and of those that are open."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        # a picture's end may come while this very thread holds the lock
        self._lock = threading.RLock()

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        """So many bytes within this block. Raises CapacityError where there is no room."""
        if self.num_bytes + count > self._max_bytes:
            raise CapacityError(
                f"The pictures of requests have {self.num_bytes} bytes of the {self._max_bytes} "
                f"that they may have, and this request's may need {count}. Try again later."
            )
        self._add(count)
        try:
            yield
        finally:
            self._add(-count)

    def keep(self, picture: Picture) -> None:
        """Count a picture for as long as anybody has it."""
        self._add(len(picture.pixels))
        weakref.finalize(picture, self._add, -len(picture.pixels))

    def _add(self, count: int) -> None:
        with self._lock:
            self.num_bytes += count


def _sent(messages: Sequence[Mapping[str, Any]]) -> Iterator[SentPicture]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part["type"] == _KIND:
                yield part[_SENT]


def _opened(message: Mapping[str, Any], keys: Mapping[int, bytes]) -> Mapping[str, Any]:
    """A message for the template: where pictures stand counts there, not what they show."""
    content = message.get("content")
    if not isinstance(content, list) or all(part["type"] != _KIND for part in content):
        return message
    parts = [
        {"type": _KIND, _SENT: keys[id(part[_SENT])]} if part["type"] == _KIND else part
        for part in content
    ]
    return {**message, "content": parts}


def _decode(sent: SentPicture, rules: PictureRules) -> Picture:
    text = sent.text.take()
    url = f"data:image/png;base64,{text}" if sent.is_bare else text  # the content says what it is
    del text
    data = read_data_url(url)
    del url
    return open_picture(data, rules)
