"""A field of a body that is wrong: how that is said, within the schemas and after them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pydantic import BaseModel
from pydantic_core import PydanticCustomError

from flashdraft.errors import RequestError

FIELD = "field"  # the type of a complaint that names a field below its own place


class FieldError(RequestError):
    """A field of the body is wrong; `param` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def complaint(field: str, text: str) -> PydanticCustomError:
    """What a validator of a whole object raises about one of its fields; `text` goes on from it."""
    return PydanticCustomError(FIELD, "{text}", {"field": field, "text": text})


def check_kind(
    part: BaseModel, kind: str, needed: Sequence[str], also: Collection[str] = ()
) -> None:
    """Complain of a part that lacks what its kind needs, or has what its kind has no use for."""
    for name in needed:
        if getattr(part, name) is None:
            raise complaint(name, f"is missing; type {kind!r} needs it.")
    for name in part.model_fields_set.difference(needed, also, ("type",)):
        if getattr(part, name) is not None:
            raise complaint(name, f"has no meaning for type {kind!r}; leave it out.")
