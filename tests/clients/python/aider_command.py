"""aider, asked a question and told to change a file; a model that edits must stand behind it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import asked

BEFORE = 'def greet():\n    print("hello")\n'
OPTIONS = [
    "--yes-always",
    "--no-git",
    "--no-pretty",
    "--no-auto-lint",
    "--no-show-model-warnings",
    "--no-check-update",
    "--no-show-release-notes",
    "--analytics-disable",
    "--no-gitignore",
    "--no-detect-urls",
    "--map-tokens",
    "0",
]


def aider(folder: str, *words: str) -> str:
    command = [Path(sys.executable).with_name("aider"), "--model", f"openai/{asked.MODEL}"]
    address = ["--openai-api-base", f"{asked.URL}/v1", "--openai-api-key", asked.KEY]
    done = subprocess.run(
        [*command, *address, *OPTIONS, *words],
        cwd=folder,
        env=os.environ | {"HOME": folder},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def ask(*words: str) -> str:
    """The answer to a question, between the lines that aider prints before and after it."""
    with tempfile.TemporaryDirectory() as folder:
        said = aider(folder, "--chat-mode", "ask", "--message", asked.QUESTION, *words)
    lines = said.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("Repo-map:"))
    last = next(n for n, line in enumerate(lines) if line.startswith("Tokens:"))
    return "\n".join(lines[first + 1 : last]).strip()


def text() -> str:
    return ask("--no-stream")


def printed() -> str:
    return ask("--stream")


def edit() -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "greeting.py")
        path.write_text(BEFORE, encoding="utf-8")
        wish = "Let it say goodbye."
        aider(folder, "--edit-format", "diff", "--message", wish, "greeting.py")
        return path.read_text(encoding="utf-8")


asked.report(text=text, printed=printed, edit=edit)
