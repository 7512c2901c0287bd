"""`llm`, the command line tool, told of the server in extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import asked
from schemas import PERSON_SCHEMA

SETTINGS = f"""\
- model_id: ours
  model_name: {asked.MODEL}
  api_base: {asked.URL}/v1
  api_key_name: ours
  supports_schema: true
  supports_tools: true
"""
FUNCTION = f"""
import json

def get_weather(city: str, days: int) -> str:
    "The weather in a city."
    with open("call.json", "w") as file:
        json.dump(dict(city=city, days=days), file)
    return {asked.WEATHER!r}
"""


def llm(folder: str, *words: str, max_tokens: int = asked.MAX_TOKENS) -> list[str]:
    """What the command printed, in the pieces in which it came."""
    Path(folder, "extra-openai-models.yaml").write_text(SETTINGS, encoding="utf-8")
    command = [Path(sys.executable).with_name("llm"), "-m", "ours", "--key", asked.KEY]
    process = subprocess.Popen(
        [*command, "-o", "max_tokens", str(max_tokens), "--no-log", *words],
        cwd=folder,
        env=os.environ | {"LLM_USER_PATH": folder},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    pieces = []
    while piece := os.read(process.stdout.fileno(), 1 << 16):
        pieces.append(piece.decode())
    complaint = process.stderr.read().decode()
    if process.wait():
        raise RuntimeError(complaint)
    pieces[-1] = pieces[-1].removesuffix("\n")  # the command ends its last line itself
    return [piece for piece in pieces if piece]


def text() -> str:
    with tempfile.TemporaryDirectory() as folder:
        return "".join(llm(folder, asked.QUESTION, "--no-stream"))


def stream() -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        return llm(folder, asked.QUESTION)


def tools() -> dict[str, Any]:
    """The command's own loop; a model that decides to call must stand behind it."""
    words = ["--functions", FUNCTION, asked.WEATHER_QUESTION, "--no-stream"]
    with tempfile.TemporaryDirectory() as folder:
        answer = "".join(llm(folder, *words, max_tokens=asked.MAX_FORM_TOKENS))
        given = Path(folder, "call.json").read_text(encoding="utf-8")
    return asked.called("get_weather", given, answer)


def schema() -> dict[str, Any]:
    words = ["--schema", json.dumps(PERSON_SCHEMA), asked.PERSON_QUESTION]
    with tempfile.TemporaryDirectory() as folder:
        return json.loads("".join(llm(folder, *words, max_tokens=asked.MAX_FORM_TOKENS)))


asked.report(text=text, stream=stream, tools=tools, schema=schema)
