"""Pictures in a conversation: taken out for the template, put into their places in the prompt.

A template writes one placeholder for a picture; in the prompt stand a begin marker, a placeholder
for each of the picture's tokens, and an end marker. For a film it writes one of another kind; in
the prompt stands every frame like a picture, behind its time. The pages of a PDF are pictures. It
knows no template and opens nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flashdraft.core import Picture, PlacedPicture
from flashdraft.errors import RequestError
from flashdraft.media.pictures import Frame
from flashdraft.models.config.vision import VisionTokens

NO_SIGHT = (
    "The model sees no pictures: it has no vision tower, or was loaded without it. Send text alone."
)
NO_FILMS = (
    "The model sees pictures and takes no films: its config.json names no placeholder for them. "
    "Send some of the film's frames as pictures."
)
_MEDIA = ("image", "video", "pdf")  # parts

Film = Sequence[Frame]


class PicturePrompt(NamedTuple):
    """A prompt's token ids, and the pictures in it by their place."""

    token_ids: list[int]
    pictures: tuple[PlacedPicture, ...] = ()


class GivenPicture(NamedTuple):
    """A picture as a checked message has it; `budget` None: as many tokens as is usual."""

    image: Any  # bytes, a data: URL, a path, a PIL image, or what was opened already
    budget: int | None


class TakenPictures(NamedTuple):
    """A conversation whose pictures and films are bare parts, and what they were, in order.

    Bare is `{"type": "image"}`, and `{"type": "video"}`.
    """

    messages: list[dict[str, Any]]
    pictures: list[GivenPicture]
    films: list[Any]  # bytes, data: URLs or paths


class WrittenFrame(NamedTuple):
    """A frame of a film, and the token ids of what stands before it."""

    time_ids: Sequence[int]
    picture: Picture


WrittenFilm = Sequence[WrittenFrame]


def has_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a checked conversation has anything but text."""
    return any(part["type"] in _MEDIA for message in messages for part in _parts(message))


def with_pages(
    messages: Sequence[Mapping[str, Any]], pages: Callable[[GivenPicture], Sequence[Picture]]
) -> list[dict[str, Any]]:
    """A checked conversation in which the pages of each PDF, as pictures, stand in its place."""
    made = list[dict[str, Any]]()
    for message in messages:
        parts = list[Any]()
        for part in _parts(message):
            if part["type"] == "pdf":
                given = GivenPicture(part["pdf"], part.get("max_soft_tokens"))
                parts += [{"type": "image", "image": page} for page in pages(given)]
            else:
                parts.append(part)
        made.append({**message, "content": parts} if parts else dict(message))
    return made


def take_pictures(messages: Sequence[Mapping[str, Any]]) -> TakenPictures:
    """Take pictures and films out of a conversation whose PDFs have become their pages."""
    bare, pictures, films = list[dict[str, Any]](), list[GivenPicture](), list[Any]()
    for message in messages:
        parts = list[Any]()
        for part in _parts(message):
            if part["type"] == "image":
                pictures.append(GivenPicture(part["image"], part.get("max_soft_tokens")))
                part = {"type": "image"}
            elif part["type"] == "video":
                films.append(part["video"])
                part = {"type": "video"}
            elif part["type"] == "pdf":  # a template would drop it
                raise RequestError("A PDF is not opened here; send its pages as pictures.")
            parts.append(part)
        bare.append({**message, "content": parts} if parts else dict(message))
    return TakenPictures(bare, pictures, films)


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else ()


def write_films(
    films: Sequence[Film], encode: Callable[[Sequence[str]], list[list[int]]]
) -> list[list[WrittenFrame]]:
    """Films with their times as token ids: frames are joined by one space, as models know it."""
    texts = [
        [f"{'' if number == 0 else ' '}{frame.time} " for number, frame in enumerate(film)]
        for film in films
    ]
    known = list(dict.fromkeys(text for some in texts for text in some))
    ids = dict(zip(known, encode(known), strict=True))
    return [
        [WrittenFrame(ids[text], frame.picture) for text, frame in zip(some, film, strict=True)]
        for some, film in zip(texts, films, strict=True)
    ]


def check_places(
    token_ids: Sequence[int], num_pictures: int, tokens: VisionTokens, num_films: int = 0
) -> None:
    """Refuse a prompt that has not one placeholder for each of so many pictures and films."""
    ids = list(token_ids)
    _check_count(ids.count(tokens.picture), num_pictures, "picture")
    if tokens.video is not None:
        _check_count(ids.count(tokens.video), num_films, "film")
    elif num_films > 0:
        raise RequestError(NO_FILMS)


def _check_count(num_places: int, num_given: int, noun: str) -> None:
    what = f"The prompt has {num_places} places for {num_given} {noun}s"
    if num_places > num_given:
        raise RequestError(
            f"{what}: a text in the conversation holds the model's own mark for a {noun}. Spell "
            "the mark in another way."
        )
    if num_places < num_given:
        raise RequestError(
            f"{what}: the model's chat template leaves {noun}s out where they stand. Put all of "
            "them into user messages."
        )


def place_pictures(
    token_ids: Sequence[int],
    pictures: Sequence[Picture],
    tokens: VisionTokens,
    films: Sequence[WrittenFilm] = (),
) -> PicturePrompt:
    """The prompt with every placeholder grown to its picture's or its film's tokens and markers.

    RequestError where there are more or fewer placeholders than pictures or films.
    """
    check_places(token_ids, len(pictures), tokens, len(films))
    grown, placed = list[int](), list[PlacedPicture]()
    left, films_left = iter(pictures), iter(films)

    def grow(picture: Picture, placeholder: int) -> None:
        grown.append(tokens.begin)
        placed.append(PlacedPicture(len(grown), picture))
        grown.extend([placeholder] * picture.num_tokens)
        grown.append(tokens.end)

    for token in token_ids:
        if token == tokens.picture:
            grow(next(left), token)
        elif token == tokens.video:
            for frame in next(films_left):
                grown += frame.time_ids
                grow(frame.picture, token)
        else:
            grown.append(token)
    return PicturePrompt(grown, tuple(placed))
