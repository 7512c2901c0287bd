"""The pictures of a conversation: found, fetched where that is allowed, opened off the event loop.

So are its films and its PDFs, which become pictures, too. Knows no API's shape: an API makes parts
of `media_part`. Few pictures are opened at once, and a request asks for no more at a time; those
that wait, and those that were opened for a request that goes on, have a limit of memory together.
How long a file is that must be fetched nobody knows before: few of them are fetched or wait to be
opened.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from flashdraft.chat.pictures import (
    NO_FILMS,
    Film,
    PicturePrompt,
    place_pictures,
    write_films,
)
from flashdraft.core import Picture
from flashdraft.errors import CapacityError, RequestError
from flashdraft.media.kinds import FILM, KINDS, PDF, PICTURE, Kind
from flashdraft.media.limits import FRAME_BUDGET, NUM_FRAMES, page_budget
from flashdraft.media.pictures import Frame, PictureRules, open_film, open_page, open_picture
from flashdraft.media.sources import MediaFetcher, read_data_url
from flashdraft.server.answering.needs import PictureCounter
from flashdraft.server.http.errors import FieldError
from flashdraft.server.http.picture_fields import SentText
from flashdraft.server.process.wire import Vision
from flashdraft.server.settings import ServerSettings

_Made = TypeVar("_Made")
OPEN_AT_ONCE = 2  # pictures and pages; the others wait
FILMS_AT_ONCE = 1  # they take long: pictures do not wait for them
FETCH_AT_ONCE = 8  # addresses, opened too: whoever waits for a slow host keeps no processor busy
FILM_COUNTS = 8  # among the pictures of a request: for so many tokens, and so much memory
_KINDS = {kind.part: kind for kind in KINDS}  # by a part's type, which is where it has the file


@dataclass(frozen=True, eq=False)
class SentMedia:
    """A picture, a film or a PDF as a client sent it."""

    kind: Kind
    text: SentText
    place: str  # the field that holds it
    is_bare: bool  # base64 alone; else a data: URL or an address
    budget: int | None  # of tokens, for a picture or a page; None: as is usual

    @property
    def has_file(self) -> bool:
        """Whether the file is here; else it is behind an address."""
        return self.is_bare or self.text.is_data_url

    @property
    def count(self) -> int:
        """How many pictures it counts as, at least."""
        return FILM_COUNTS if self.kind is FILM else 1


def media_part(
    kind: Kind, text: SentText, place: str, budget: int | None = None, *, is_bare: bool = False
) -> dict[str, Any]:
    """The part of a message that is a picture, a film or a PDF; its text is opened later."""
    return {"type": kind.part, kind.part: SentMedia(kind, text, place, is_bare, budget)}


def picture_part(
    text: SentText, place: str, budget: int | None = None, *, is_bare: bool = False
) -> dict[str, Any]:
    """The part of a message that is a picture."""
    return media_part(PICTURE, text, place, budget, is_bare=is_bare)


Encode = Callable[[Sequence[str]], list[list[int]]]  # texts to token ids
Opened = tuple[Picture, ...] | Film  # a picture or a PDF's pages; a film's frames


class OpenedPictures(NamedTuple):
    """A conversation whose pictures are open: what the template is given, and what goes in."""

    messages: Sequence[Mapping[str, Any]]
    pictures: tuple[Picture, ...]
    films: tuple[Film, ...] = ()

    def place(
        self, token_ids: list[int], vision: Vision | None, encode: Encode | None = None
    ) -> PicturePrompt:
        """The prompt with every picture in its place; where there are films, `encode` is needed."""
        if vision is None:
            return PicturePrompt(token_ids, ())
        films = [] if encode is None else write_films(self.films, encode)
        return place_pictures(token_ids, self.pictures, vision.tokens, films)


class PictureOpener:
    """Opens the pictures, films and PDFs of all requests of one server."""

    def __init__(self, settings: ServerSettings, counter: PictureCounter) -> None:
        self._settings = settings
        self._counter = counter
        self._memory = PictureMemory(settings.max_picture_memory_bytes)
        self._fetcher = MediaFetcher(settings.allow_media_domains)
        self._openers = ThreadPoolExecutor(OPEN_AT_ONCE, "flashdraft-pictures")
        self._film_openers = ThreadPoolExecutor(FILMS_AT_ONCE, "flashdraft-films")
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
            opened = await self._open_in_time(sent, vision)
        except RequestError:
            self._counter.picture_refused()
            raise
        parts = {id(one): _bare_parts(one, found) for one, found in zip(sent, opened, strict=True)}
        pairs = list(zip(sent, opened, strict=True))
        pictures = tuple(
            one for kind, some in pairs if kind.kind is not FILM for one in _pictures(some)
        )
        films = tuple(_frames(some) for kind, some in pairs if kind.kind is FILM)
        return OpenedPictures([_opened(message, parts) for message in messages], pictures, films)

    def _check(self, sent: Sequence[SentMedia], vision: Vision | None) -> Vision:
        first, limit = sent[0], self._settings.max_pictures
        if vision is None:
            raise FieldError(
                first.place,
                f"{first.place} is a {first.kind.noun}, and the model takes none. Send text only, "
                "or ask a server whose /v1/models lists vision among the capabilities.",
            )
        total, counted = sum(one.count for one in sent), 0
        for one in sent:
            counted += one.count
            if counted > limit:
                as_eight = f"; a film counts as {FILM_COUNTS}" if total > len(sent) else ""
                raise FieldError(
                    one.place,
                    f"{one.place} is past the {limit} pictures that a request may have (it has "
                    f"{total}{as_eight}). Send fewer, or start the server with a higher "
                    "--max-pictures.",
                )
        for one in sent:
            if one.is_bare and one.text.is_data_url:
                raise FieldError(
                    one.place,
                    f"{one.place} is a data: URL; it is base64 alone here. Leave out its head, up "
                    "to the comma.",
                )
            if one.kind is FILM and vision.tokens.video is None:
                raise FieldError(one.place, f"{one.place} is a film. {NO_FILMS}")
            if one.has_file:
                continue
            if not (one.text.is_address and self._settings.allow_media_domains):
                raise FieldError(
                    one.place,
                    f"{one.place} is no data: URL with base64, and nothing else is opened here: "
                    f"send the {one.kind.noun} itself (the operator may have addresses of single "
                    "hosts fetched, with --allow-media-domain).",
                )
        return vision

    async def _open_in_time(self, sent: Sequence[SentMedia], vision: Vision) -> list[Opened]:
        limit_s = self._settings.picture_timeout_s
        all_rules = [_rules(one, vision) for one in sent]
        most = sum(
            3 * rules.budget * rules.cell**2 * (NUM_FRAMES if one.kind is FILM else 1)
            for one, rules in zip(sent, all_rules, strict=True)
        )
        opened, left = list[Opened](), self._settings.max_pictures - sum(one.count for one in sent)
        with ExitStack() as held:
            held.enter_context(self._memory.hold(most + sum(len(one.text) for one in sent)))
            try:
                async with asyncio.timeout(limit_s):
                    for some in _together(list(zip(sent, all_rules, strict=True))):
                        opening = (self._open(*both, left, held) for both in some)
                        for found in await asyncio.gather(*opening, return_exceptions=True):
                            if isinstance(found, BaseException):
                                raise found
                            if some[0][0].kind is PDF:
                                left -= len(found) - 1
                            opened.append(found)
                            for picture in _pictures(found):
                                self._counter.picture_opened(picture.num_tokens)
            except TimeoutError:
                raise CapacityError(
                    f"The pictures could not be opened within {limit_s:g} s. Send fewer or smaller "
                    "ones, or try again later."
                ) from None
        for found in opened:
            for picture in _pictures(found):
                self._memory.keep(picture)
        return opened

    async def _open(
        self, sent: SentMedia, rules: PictureRules, num_left: int, held: ExitStack
    ) -> Opened:
        """One of them; a thread that has not begun is not begun for who has left.

        A PDF may have one page, and `num_left` more.
        """
        try:
            async with nullcontext() if sent.has_file else self._fetched:
                if sent.kind is PICTURE and sent.has_file:  # in one go
                    return (await self._run(_decode, sent, rules),)
                data = await self._file(sent)
                if sent.kind is FILM:
                    loop, opener = asyncio.get_running_loop(), self._film_openers
                    return await loop.run_in_executor(opener, open_film, data, rules.cell)
                if sent.kind is PDF:
                    return await self._pages(data, 1 + num_left, rules, held)
                return (await self._run(open_picture, data, rules),)
        except RequestError as error:
            raise FieldError(sent.place, f"{sent.place} cannot be taken. {error}") from None

    async def _file(self, sent: SentMedia) -> bytes:
        if sent.has_file:
            return await self._run(_read, sent)
        fetch, url = self._fetcher.fetch, sent.text.take()
        return await asyncio.get_running_loop().run_in_executor(
            self._fetchers, fetch, url, sent.kind
        )

    async def _pages(
        self, data: bytes, most: int, rules: PictureRules, held: ExitStack
    ) -> tuple[Picture, ...]:
        """All pages of a PDF, one after another; others' pictures come in between."""
        first, num_pages = await self._run(open_page, data, 0, most, rules)
        held.enter_context(self._memory.hold(3 * rules.budget * rules.cell**2 * (num_pages - 1)))
        pages = [first]
        for page in range(1, num_pages):
            pages.append((await self._run(open_page, data, page, most, rules)).picture)
        return tuple(pages)

    async def _run(self, what: Callable[..., _Made], *given: Any) -> _Made:
        """What a thread does."""
        return await asyncio.get_running_loop().run_in_executor(self._openers, what, *given)


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


def _rules(sent: SentMedia, vision: Vision) -> PictureRules:
    if sent.kind is FILM:
        return PictureRules(vision.cell, FRAME_BUDGET)
    if sent.kind is PDF:
        return PictureRules(vision.cell, page_budget(vision.default_budget, sent.budget))
    return PictureRules(vision.cell, sent.budget or vision.default_budget)


def _together(
    sent: Sequence[tuple[SentMedia, PictureRules]],
) -> Iterator[Sequence[tuple[SentMedia, PictureRules]]]:
    """What is opened at the same time, in order: some pictures, or one film, or one PDF."""
    begin = 0
    while begin < len(sent):
        most = sent[begin : begin + OPEN_AT_ONCE]
        others = (n for n, (one, _) in enumerate(most) if one.kind is not PICTURE)
        count = max(1, next(others, len(most)))
        yield most[:count]
        begin += count


def _sent(messages: Sequence[Mapping[str, Any]]) -> Iterator[SentMedia]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if (kind := part["type"]) in _KINDS:
                yield part[kind]


def _pictures(opened: Opened) -> list[Picture]:
    return [one if isinstance(one, Picture) else one.picture for one in opened]


def _frames(opened: Opened) -> Film:
    return [one for one in opened if isinstance(one, Frame)]


def _bare_parts(sent: SentMedia, opened: Opened) -> list[dict[str, Any]]:
    """What the template is given: where pictures stand counts there, not what they show."""
    keys = [picture.key for picture in _pictures(opened)]
    if sent.kind is FILM:
        return [{"type": FILM.part, FILM.part: keys[0]}]
    return [{"type": PICTURE.part, PICTURE.part: key} for key in keys]


def _opened(
    message: Mapping[str, Any], parts: Mapping[int, list[dict[str, Any]]]
) -> Mapping[str, Any]:
    """A message for the template."""
    content = message.get("content")
    if not isinstance(content, list) or all(part["type"] not in _KINDS for part in content):
        return message
    made = list[dict[str, Any]]()
    for part in content:
        kind = part["type"]
        made += parts[id(part[kind])] if kind in _KINDS else [part]
    return {**message, "content": made}


def _read(sent: SentMedia) -> bytes:
    text = sent.text.take()
    url = sent.kind.example + text if sent.is_bare else text  # the content says what it is
    del text
    return read_data_url(url, sent.kind)


def _decode(sent: SentMedia, rules: PictureRules) -> Picture:
    return open_picture(_read(sent), rules)
