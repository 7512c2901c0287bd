"""Writing answers and JSON: whole or not at all, and checked before the model is loaded."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashdraft.errors import RequestError
from flashdraft.files import write_whole

STDOUT = "-"
PROSE_SUFFIXES = frozenset({"", ".log", ".markdown", ".md", ".rst", ".txt"})  # others hold code
_FENCED = re.compile(r"(?P<fence>`{3,}|~{3,})[^\n`]*\n(?P<body>.*)", re.DOTALL)


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before any work is done for it."""
    if path.is_dir():
        raise RequestError(f"{path} is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise RequestError(f"{path} cannot be written: there is no folder {path.parent}.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RequestError(f"{path} cannot be written: permission denied.")


def write_text(path: Path, text: str) -> None:
    """Write a file through a temporary one beside it: readers see the old or the new, whole."""
    check_writable(path)
    target = path.resolve()  # through a link, to the file it names
    try:
        if target.exists() and not target.is_file():  # a device or a pipe takes what it is given
            target.write_text(text, encoding="utf-8")
            return
        write_whole(target, text)
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror or error}.") from None


def write_json(destination: str, content: Mapping[str, Any]) -> None:
    """Print one JSON object, or write it to a file."""
    text = json.dumps(content) + "\n"
    if destination == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_text(Path(destination), text)


def text_for_file(answer: str, path: Path) -> str:
    """What belongs in the file: for code, the content of the one fenced block the answer is."""
    text = answer
    if path.suffix.lower() not in PROSE_SUFFIXES:
        block = fenced_block(answer)
        text = answer if block is None else block
    return text if text.endswith("\n") or not text else text + "\n"


def fenced_block(text: str) -> str | None:
    """The content of a text that is one fenced code block; one cut short may lack its end."""
    match = _FENCED.fullmatch(text.strip())
    if match is None:
        return None
    lines = match["body"].splitlines()
    fence = match["fence"]
    ends = [n for n, line in enumerate(lines) if _closes(line, fence)]
    if not ends:
        return match["body"]
    if ends[0] != len(lines) - 1:
        return None
    return "\n".join(lines[:-1])


def _closes(line: str, fence: str) -> bool:
    """A closing fence: the opening one's character, at least as often, and nothing else."""
    stripped = line.strip()
    return len(stripped) >= len(fence) and set(stripped) == {fence[0]}
