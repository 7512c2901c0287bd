"""Writing answers and JSON: whole or not at all, and checked before the model is loaded."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flashdraft.errors import RequestError
from flashdraft.files import write_whole

STDOUT = "-"
PROSE_SUFFIXES = frozenset({"", ".log", ".markdown", ".md", ".rst", ".txt"})  # others hold code
_OPENS = re.compile(r"(?P<indent> *)(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*)")
# what fences call a language where it is not the suffix itself
_LANGUAGES = {
    "bash": ("sh", "shell"),
    "cc": ("cpp", "c++"),
    "cpp": ("c++", "cc"),
    "cs": ("csharp", "c#"),
    "h": ("c", "cpp", "c++"),
    "hpp": ("cpp", "c++"),
    "htm": ("html",),
    "html": ("htm", "xhtml"),
    "js": ("javascript", "jsx", "node"),
    "json": ("jsonc", "json5"),
    "jsx": ("javascript", "js"),
    "kt": ("kotlin",),
    "markdown": ("md",),
    "md": ("markdown",),
    "mjs": ("javascript", "js"),
    "ps1": ("powershell",),
    "py": ("python", "python3"),
    "rb": ("ruby",),
    "rs": ("rust",),
    "sh": ("bash", "shell", "zsh"),
    "svg": ("xml", "html"),
    "tex": ("latex",),
    "ts": ("typescript", "tsx"),
    "tsx": ("typescript", "ts"),
    "yaml": ("yml",),
    "yml": ("yaml",),
}


class FilePart(NamedTuple):
    """What of an answer goes into a file, and what that is in words."""

    text: str
    says: str


class _Block(NamedTuple):
    """A fenced code block: its language as the fence has it, its text, and all that it takes."""

    language: str
    text: str
    num_lines: int  # with its fences


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


def part_for_file(answer: str, path: Path) -> FilePart:
    """What belongs in the file: the code block of its language, else the answer as it is.

    A block that names no language counts where there is no other, and an answer that is one block
    is that block, whatever it names; in prose only a block of the file's own language.
    """
    suffix = path.suffix.lower().removeprefix(".")
    names = (suffix, *_LANGUAGES.get(suffix, ()))
    blocks = _fenced_blocks(answer)
    ours = [block for block in blocks if suffix and block.language in names]
    is_prose = path.suffix.lower() in PROSE_SUFFIXES
    if not ours and not is_prose and len(blocks) == 1:
        is_all = blocks[0].num_lines == len(answer.strip().split("\n"))
        ours = [block for block in blocks if is_all or not block.language]
    if ours:
        text = ours[0].text
        which = "the code block" if len(ours) == 1 else f"the first of {len(ours)} code blocks"
        count = len(text.splitlines())
        says = f"{which} of the answer, {count} line{'' if count == 1 else 's'}"
    else:
        text = answer
        says = "the whole answer"
        says += "" if is_prose else f", in which no code block is {suffix}"
    return FilePart(text if text.endswith("\n") or not text else text + "\n", says)


def _fenced_blocks(text: str) -> list[_Block]:
    """The fenced code blocks of an answer; the last one may lack its end, cut short."""
    blocks: list[_Block] = []
    lines = text.strip().split("\n")
    start = 0
    while start < len(lines):
        opens = _OPENS.fullmatch(lines[start].rstrip())
        if opens is None:
            start += 1
            continue
        language = (opens["info"].split() or [""])[0].lower().strip("{}.,:")
        end = _end_of_block(lines, start + 1, opens["fence"], language in ("md", "markdown"))
        body = [_without_indent(line, len(opens["indent"])) for line in lines[start + 1 : end]]
        after = min(end + 1, len(lines))
        blocks.append(_Block(language, "\n".join(body), after - start))
        start = after
    return blocks


def _without_indent(line: str, width: int) -> str:
    """A line of a block whose fence is indented, as in a list."""
    return line[width:] if line[:width] == " " * width else line.lstrip(" ")


def _end_of_block(lines: list[str], start: int, fence: str, may_nest: bool) -> int:
    """The line that closes a block; Markdown in a block may have blocks of its own."""
    depth = 0
    for number in range(start, len(lines)):
        if _closes(lines[number], fence):
            if depth == 0:
                return number
            depth -= 1
        elif may_nest and (inner := _OPENS.fullmatch(lines[number].rstrip())) and inner["info"]:
            depth += 1
    return len(lines)


def _closes(line: str, fence: str) -> bool:
    """A closing fence: the opening one's character, at least as often, and nothing else."""
    stripped = line.strip()
    return len(stripped) >= len(fence) and set(stripped) == {fence[0]}
