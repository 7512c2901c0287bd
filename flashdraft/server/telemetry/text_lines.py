"""The server's log in words, for somebody who watches: a line a request, further ones indented.

Whatever clients send is escaped: nothing in it moves the cursor, ends a line or looks like one.
"""

from __future__ import annotations

import contextlib
import sys
from datetime import datetime
from typing import Any

from flashdraft.errors import printable

IN_WORDS = "--log-in-words"  # the option by which the engine's process is told
_LEFT = (None, "ClientDisconnectedError", "CancelledError")  # errors of streams nobody reads
_INDENT = "    "
_PAGE_FILES = "/page/"


def write_in_words(content: dict[str, Any]) -> None:
    """Print a record of the log on stdout; the files of the page would bury all others."""
    if str(content.get("route")).startswith(_PAGE_FILES) and content["status"] in (200, 304):
        return
    with contextlib.suppress(OSError):  # the reader of the log has gone; the server goes on
        print(in_words(content), flush=True, file=sys.stdout)


def in_words(content: dict[str, Any]) -> str:
    """A record of the log for people: its local time, what it is, and what came of it."""
    at = datetime.fromisoformat(content["time"]).astimezone()
    parts = _request(content) if content["event"] == "request" else _message(content)
    lines = [f"{at:%H:%M:%S}  {'  '.join(map(_on_one_line, parts))}"]
    if content.get("body") is not None:
        lines.append(_INDENT + _on_one_line(content["body"]))
    for line in str(content.get("exception", "")).splitlines():
        lines.append(_INDENT + _on_one_line(line))
    return "\n".join(lines)


def _request(content: dict[str, Any]) -> list[str]:
    error = content.get("error")
    outcome = str(content["status"])
    if not content["complete"]:
        outcome = "client left" if error in _LEFT else f"{content['status'] or 'no answer'}, broken"
    place = content["route"] or content.get("path", "")
    parts = [f"{content['method']} {place}", outcome, f"{content['duration_s']:.2f} s"]
    if "completion_tokens" in content:
        parts.append(f"{content['prompt_tokens']} + {content['completion_tokens']} tokens")
    if content.get("tokens_per_s"):
        parts.append(f"{content['tokens_per_s']:.1f} tok/s")
        parts.append(f"accepted length {content['mean_accepted_length']:.2f}")
    if error not in _LEFT:
        parts.append(str(error))
    return parts


def _message(content: dict[str, Any]) -> list[str]:
    who = "engine " if content.get("process") == "engine" else ""
    return [f"{who}{content.get('level', '')}", content.get("message", "")]


def _on_one_line(text: str) -> str:
    return printable(text).replace("\n", "\\n")
