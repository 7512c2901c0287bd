"""Pictures in a conversation: taken out for the template, put into their places in the prompt.

A template writes one placeholder for a picture; in the prompt stand a begin marker, a placeholder
for each of the picture's tokens, and an end marker. It knows no template and opens nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flashdraft.core import Picture, PlacedPicture
from flashdraft.errors import RequestError
from flashdraft.models.config.vision import VisionTokens

NO_SIGHT = (
    "The model sees no pictures: it has no vision tower, or was loaded without it. Send text alone."
)


class PicturePrompt(NamedTuple):
    """A prompt's token ids, and the pictures in it by their place."""

    token_ids: list[int]
    pictures: tuple[PlacedPicture, ...] = ()


class GivenPicture(NamedTuple):
    """A picture as a checked message has it; `budget` None: as many tokens as is usual."""

    image: Any  # bytes, a data: URL, a path, or a PIL image
    budget: int | None


class TakenPictures(NamedTuple):
    """A conversation whose pictures are bare parts, `{"type": "image"}`, and they, in order."""

    messages: list[dict[str, Any]]
    pictures: list[GivenPicture]


def take_pictures(messages: Sequence[Mapping[str, Any]]) -> TakenPictures:
    """Take the pictures out of a conversation that `check_messages` has checked."""
    bare, pictures = list[dict[str, Any]](), list[GivenPicture]()
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list):
            bare.append(dict(message))
            continue
        parts = []
        for part in content:
            if part["type"] == "image":
                pictures.append(GivenPicture(part["image"], part.get("max_soft_tokens")))
                part = {"type": "image"}
            parts.append(part)
        bare.append({**message, "content": parts})
    return TakenPictures(bare, pictures)


def check_places(token_ids: Sequence[int], num_pictures: int, tokens: VisionTokens) -> None:
    """Refuse a prompt that has not one placeholder for each of so many pictures."""
    if tokens.video is not None and tokens.video in token_ids:
        raise RequestError(
            "The conversation's text holds the model's own mark for a film, and films are not read "
            "yet. Spell the mark in another way."
        )
    num_places = list(token_ids).count(tokens.picture)
    if num_places > num_pictures:
        raise RequestError(
            f"The prompt has {num_places} places for {num_pictures} pictures: a text in the "
            "conversation holds the model's own mark for a picture. Spell the mark in another way."
        )
    if num_places < num_pictures:
        raise RequestError(
            f"The prompt has {num_places} places for {num_pictures} pictures: the model's chat "
            "template leaves pictures out where they stand. Put all of them into user messages."
        )


def place_pictures(
    token_ids: Sequence[int], pictures: Sequence[Picture], tokens: VisionTokens
) -> PicturePrompt:
    """The prompt with every placeholder grown to its picture's tokens and markers.

    RequestError where there are more or fewer placeholders than pictures.
    """
    check_places(token_ids, len(pictures), tokens)
    grown, placed, left = list[int](), list[PlacedPicture](), iter(pictures)
    for token in token_ids:
        if token != tokens.picture:
            grown.append(token)
            continue
        picture = next(left)
        grown.append(tokens.begin)
        placed.append(PlacedPicture(len(grown), picture))
        grown += [tokens.picture] * picture.num_tokens
        grown.append(tokens.end)
    return PicturePrompt(grown, tuple(placed))
