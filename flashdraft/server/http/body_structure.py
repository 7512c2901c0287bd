"""How many things a body may be made of: counted before anything looks at what they are.

A body of megabytes can be a million small values, and a schema complains of each that is wrong:
seconds in which no other request goes on. So values are counted in the bytes before they are
parsed, and the entries of lists and objects before they are validated. A body may be longer for its
pictures, and for nothing else: all other text is counted too. None of this knows an API: the names
of the fields are the same in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flashdraft.server.http.field_errors import FieldError
from flashdraft.server.settings import ServerSettings

MAX_VALUES = 100_000  # of JSON in a body: parsing that many takes some tens of milliseconds
MAX_TOKEN_VALUES = 524_288  # where a body is a list of token ids, which are parsed faster
MAX_FIELDS = 256  # of an object that the server reads
MAX_PARTS = 1024  # of a message; and of every other list
MAX_PARTS_IN_ALL = 8192
MAX_TOOLS = 512
MAX_PROMPTS = 128
MAX_CHOICES = 1024
MAX_STOP_TOKEN_IDS = 1024

TOKEN_PATHS = ("/v1/completions", "/detokenize")
PICTURE_PATHS = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/api/generate",
    "/tokenize",
)
_TOKEN_FIELDS = ("prompt", "tokens")  # of those; schemas stop at their first wrong entry
# What these hold is the client's own, and no schema complains of it; where it is itself a JSON
# schema, its size is checked later.
_CLIENTS_OWN = frozenset(
    [
        "annotations",
        "arguments",
        "audio",
        "betas",
        "caller",
        "citations",
        "client_metadata",
        "context_management",
        "diagnostics",
        "function_call",
        "guided_json",
        "input_examples",
        "input_schema",
        "json",
        "logprobs",
        "metadata",
        "parameters",
        "prediction",
        "provider_specific_fields",
        "reasoning_details",
        "schema",
        "thinking_blocks",
        "allowed_callers",
    ]
)
_FEW_VALUES = 8
_QUOTE = ord('"')


def without_strings(body: bytes) -> bytes:
    """A JSON text without its strings; it needs not be valid. Other threads go on meanwhile."""
    if b"\\" in body:  # in this order: a backslash that is itself escaped escapes nothing
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = np.frombuffer(body, np.uint8)
    is_inside = np.cumsum(text == _QUOTE, dtype=np.uint8) & 1
    return text[is_inside == 0].tobytes()


def count_values(text: bytes) -> int:
    """At least as many as the JSON values of a text: one after each comma and opening bracket."""
    return 1 + text.count(b",") + text.count(b"[") + text.count(b"{")


def check_structure(body: Any, settings: ServerSettings) -> None:
    """Refuse a parsed body with too many entries somewhere; FieldError names the place."""
    if not isinstance(body, Mapping):
        return
    limits = {
        "messages": settings.max_messages,
        "input": settings.max_messages,
        "tools": MAX_TOOLS,
        "stop": settings.max_stop,
        "stop_sequences": settings.max_stop,
        "stop_token_ids": MAX_STOP_TOKEN_IDS,
        "logit_bias": settings.max_logit_bias,
        "guided_choice": MAX_CHOICES,
    }
    _check_count(body, "", MAX_FIELDS)
    counter = _EntryCounter(settings.max_body_bytes)
    for name, value in body.items():
        if isinstance(value, str):
            counter.add_text(value, name)
        if name in _TOKEN_FIELDS:
            if isinstance(value, list) and value and isinstance(value[0], list | str):
                _check_count(value, name, MAX_PROMPTS)
            continue
        if name in limits and isinstance(value, list | dict):
            _check_count(value, name, limits[name])
        if name != "logit_bias":
            counter.add(value, name, name, name in limits)


class _EntryCounter:
    """Counts the parts and JSON values of a body, and its text apart from pictures."""

    def __init__(self, max_text: int) -> None:
        self._num_parts = 0
        self._num_values = 0
        self._num_characters = 0
        self._max_text = max_text

    def add_text(self, text: str, place: str) -> None:
        """Count a text that is no picture."""
        self._num_characters += len(text)
        if self._num_characters > self._max_text:
            raise FieldError(
                place,
                f"{place} is past the {self._max_text} characters that a body may have besides its "
                "pictures. Shorten it.",
            )

    def add(self, value: Any, name: str, place: str, is_checked: bool = False) -> None:
        """Count what a field holds; the depth of a body has a limit, so this may go down it."""
        if name == "arguments" and isinstance(value, str):  # JSON within JSON, parsed later
            text = value.encode("utf-8", "surrogatepass")
            count = count_values(text)
            is_few = count <= _FEW_VALUES  # not worth the look at what stands in strings
            self._count_values(count if is_few else count_values(without_strings(text)), place)
        if not isinstance(value, list | dict):
            return
        self._count_values(len(value), place)
        # `input` is a conversation at the top, and the arguments of a call within one; `format` is
        # a schema at the top, where Ollama has it
        is_clients_own = name in _CLIENTS_OWN or (name == "input" and place != "input")
        is_clients_own |= name == place == "format"
        if not is_clients_own and not is_checked:
            _check_count(value, place, MAX_PARTS if isinstance(value, list) else MAX_FIELDS)
        if name in ("content", "output") and isinstance(value, list):
            self._num_parts += len(value)
            if self._num_parts > MAX_PARTS_IN_ALL:
                raise FieldError(
                    place,
                    f"{place} is past the {MAX_PARTS_IN_ALL} parts that all messages may have "
                    "together. Send fewer.",
                )
        if is_clients_own:
            self._add_clients_own(value, place)
        elif isinstance(value, dict):
            for key, one in value.items():
                if isinstance(one, str) and not _is_picture(key, name):
                    self.add_text(one, f"{place}.{key:.40}")
                if key == "arguments" or isinstance(one, list | dict):
                    self.add(one, key, f"{place}.{key:.40}")
        else:
            for number, one in enumerate(value):
                if isinstance(one, str) and name != "images":
                    self.add_text(one, f"{place}[{number}]")
                if isinstance(one, list | dict):
                    self.add(one, "", f"{place}[{number}]")

    def _add_clients_own(self, value: list[Any] | dict[str, Any], place: str) -> None:
        waiting: list[Any] = [value]
        while waiting:
            one = waiting.pop()
            children = one.values() if isinstance(one, dict) else one
            self._count_values(len(children), place)
            for child in children:
                if isinstance(child, str):
                    self.add_text(child, place)
            waiting += [child for child in children if isinstance(child, list | dict)]

    def _count_values(self, count: int, place: str) -> None:
        self._num_values += count
        if self._num_values > MAX_VALUES:
            raise FieldError(
                place,
                f"{place} is past the {MAX_VALUES} JSON values that a body may have. Send fewer.",
            )


def _is_picture(name: str, parent: str) -> bool:
    """Whether a text is where the APIs have pictures; what holds none there is refused later."""
    if name in ("data", "url"):
        return parent in ("image_url", "video_url", "source")
    return name in ("image_url", "file_data")


def _check_count(value: Sequence[Any] | Mapping[str, Any], place: str, limit: int) -> None:
    if len(value) > limit:
        is_object = isinstance(value, Mapping) and place != "logit_bias"
        unit = "fields" if is_object else "entries"
        where = place or "The body"
        raise FieldError(place, f"{where} has {len(value)} {unit}; at most {limit}. Send fewer.")
