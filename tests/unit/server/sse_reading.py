"""Reads a streamed answer back into its events."""

from __future__ import annotations

import json
from typing import Any


def read_events(text: str) -> list[tuple[str | None, Any]]:
    """Every event's name and data; "[DONE]" stays text."""
    events = []
    for chunk in text.strip().split("\n\n"):
        name, data = None, None
        for line in chunk.splitlines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                data = line.removeprefix("data: ")
        if data is not None:
            events.append((name, data if data == "[DONE]" else json.loads(data)))
    return events


def read_chunks(text: str) -> list[Any]:
    """The data of an OpenAI stream that ended well, without its last word."""
    events = [data for _, data in read_events(text)]
    assert events[-1] == "[DONE]"
    return events[:-1]
