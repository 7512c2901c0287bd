"""Fields that hold a picture, in whichever API: its text, and how many tokens it may take.

A picture comes as text of megabytes, and a body is kept as long as its answer takes: the text is
held apart from the body, which forgets it when the picture is opened. Nothing is decoded here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import PlainValidator, WithJsonSchema

from flashdraft.media.sizes import BUDGETS

_BUDGET_OF_DETAIL = {"low": BUDGETS[0], "high": BUDGETS[3]}  # auto: the checkpoint's own


class SentText:
    """The text of a picture, until somebody takes it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __len__(self) -> int:
        return len(self._text)

    @property
    def is_data_url(self) -> bool:
        return self._text[:5].lower() == "data:"

    @property
    def is_address(self) -> bool:
        return self._text[:8].lower().startswith(("http://", "https://"))

    def take(self) -> str:
        """The text, which is forgotten here."""
        text, self._text = self._text, ""
        return text


def _held(value: Any) -> SentText:
    if not isinstance(value, str):
        raise ValueError("it must be a string")
    if not value:
        raise ValueError("it is empty; it must hold a file")
    return SentText(value)


PictureText = Annotated[SentText, PlainValidator(_held), WithJsonSchema({"type": "string"})]
Detail = Literal["auto", "low", "high"]
Budget = Literal[70, 140, 280, 560, 1120]


def budget_of(detail: Detail | None, max_soft_tokens: Budget | None) -> int | None:
    """How many tokens a picture may take; None: as the checkpoint has it."""
    return max_soft_tokens or _BUDGET_OF_DETAIL.get(detail or "auto")
