"""Programs that talk to a server: how their settings read, and where they look for them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from flashdraft.server.settings import ServerSettings

DEFAULT_URL = f"http://{ServerSettings.host}:{ServerSettings.port}"


NO_KEY = "none"  # clients insist on a key; a server without one takes any


@dataclass(frozen=True)
class Server:
    """What a client has to know. `url` has no path of the API in it."""

    url: str
    model: str
    api_key: str
    max_context: int | None = None


class Client(NamedTuple):
    """A program that talks to the server: how its settings read, and where it looks for them."""

    title: str
    settings: Callable[[Server], str]
    path: str  # from the working directory
    use: str


def _openai(server: Server) -> str:
    return f"""\
from openai import OpenAI

client = OpenAI(base_url={json.dumps(server.url + "/v1")}, api_key={json.dumps(server.api_key)})
stream = client.chat.completions.create(
    model={json.dumps(server.model)},
    messages=[{{"role": "user", "content": "Why is the sky blue?"}}],
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
"""


def _curl(server: Server) -> str:
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "stream": True,
    }
    lines = [
        f"curl --no-buffer {shlex.quote(server.url + '/v1/chat/completions')}",
        "--header 'Content-Type: application/json'",
        f"--data {shlex.quote(json.dumps(body))}",
    ]
    if server.api_key != NO_KEY:
        lines.insert(1, f"--header {shlex.quote('Authorization: Bearer ' + server.api_key)}")
    return " \\\n  ".join(lines) + "\n"


def _claude_code(server: Server) -> str:
    names = (
        "ANTHROPIC_MODEL",
        "ANTHROPIC_DEFAULT_OPUS_MODEL",
        "ANTHROPIC_DEFAULT_SONNET_MODEL",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL",  # titles and other small jobs
    )
    address = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_AUTH_TOKEN": server.api_key}
    return json.dumps({"env": address | dict.fromkeys(names, server.model)}, indent=2) + "\n"


def _continue(server: Server) -> str:
    # a JSON string is a YAML string too, whatever is in it
    return f"""\
name: flashdraft
version: 0.0.1
schema: v1
models:
  - name: {json.dumps("flashdraft " + server.model)}
    provider: openai
    model: {json.dumps(server.model)}
    apiBase: {json.dumps(server.url + "/v1")}
    apiKey: {json.dumps(server.api_key)}
    roles: [chat, edit, apply]
"""


def _open_webui(server: Server) -> str:
    return f"""\
OPENAI_API_BASE_URL={server.url}/v1
OPENAI_API_KEY={server.api_key}
ENABLE_OLLAMA_API=false
"""


CLIENTS = {
    "openai": Client(
        "OpenAI SDK for Python", _openai, "flashdraft_openai.py", "python flashdraft_openai.py"
    ),
    "curl": Client("curl", _curl, "flashdraft_curl.sh", "sh flashdraft_curl.sh"),
    "claude-code": Client(
        "Claude Code", _claude_code, ".claude/settings.local.json", "claude, in this folder"
    ),
    "continue": Client(
        "Continue",
        _continue,
        ".continue/models/flashdraft.yaml",
        "in this folder; or copy the entry under `models` into your config.yaml",
    ),
    "open-webui": Client(
        "Open WebUI",
        _open_webui,
        "open-webui.env",
        "docker run --env-file open-webui.env …, or export them before `open-webui serve`; in a "
        "container 127.0.0.1 is the container itself: use the host's name",
    ),
}
