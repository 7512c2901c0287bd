"""What Ollama's clients call a model: `:latest` stands for no tag at all."""

from __future__ import annotations

from flashdraft.errors import quoted
from flashdraft.server.answering.serving import Serving
from flashdraft.server.http.errors import UnknownModelError

LATEST = ":latest"


def listed_name(name: str) -> str:
    """A served name as Ollama lists it: with a tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def asked_name(serving: Serving, given: str | None) -> str:
    """The name that an answer carries; raises UnknownModelError where it is another model's."""
    if not given:
        return listed_name(serving.model_name(None))
    if given.removesuffix(LATEST) not in {one.removesuffix(LATEST) for one in serving.model_names}:
        served = ", ".join(repr(listed_name(one)) for one in serving.model_names)
        raise UnknownModelError(f"model {quoted(given)} not found: it is not served; use {served}.")
    return given
