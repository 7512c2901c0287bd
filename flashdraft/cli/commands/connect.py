"""`flashdraft connect`: the settings that point common clients at a running server.

It asks the server for its model's name, prints what each client needs, and with --write puts it
where the client looks. It starts no server and changes no other setting of a client.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flashdraft.cli.arguments import Commands
from flashdraft.cli.commands.serve import KEY_VARIABLE
from flashdraft.cli.files import write_text
from flashdraft.errors import RequestError
from flashdraft.files import put_in_place
from flashdraft.server.settings import ServerSettings, is_loopback

DEFAULT_URL = f"http://{ServerSettings.host}:{ServerSettings.port}"
TIMEOUT_S = 10.0
MAX_REPLY_BYTES = 1_000_000
NO_KEY = "none"  # clients insist on a key; a server without one takes any
CLAUDE_CODE_PROMPT = 20_000  # tokens: about what its own instructions and tools take


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


def add_command(commands: Commands) -> None:
    """Add `connect` to the command line."""
    parser = commands.add_parser(
        "connect",
        help="print or write the settings of common clients",
        description="Print the settings that point a client at a running server, or write them "
        "where the client looks.",
    )
    parser.add_argument(
        "--client", choices=CLIENTS, metavar="NAME", help=f"one of {', '.join(CLIENTS)}; else all"
    )
    parser.add_argument(
        "--url",
        default=DEFAULT_URL,
        metavar="URL",
        help="the server's address (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"the server's key (default: {KEY_VARIABLE} in the environment)",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="the model's name; else the server is asked"
    )
    parser.add_argument(
        "--write",
        nargs="?",
        const="",
        metavar="PATH",
        help="write the settings of --client to PATH, by default where it looks in this folder",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask the server, then print or write."""
    if arguments.write is not None and arguments.client is None:
        raise RequestError(f"--write needs one --client: {', '.join(CLIENTS)}.")
    url = base_address(arguments.url)
    key = arguments.api_key or os.environ.get(KEY_VARIABLE) or NO_KEY
    ServerSettings(api_key=key)  # the server's own rule on what a key may be
    server = Server(url, arguments.model, key) if arguments.model else ask_server(url, key)
    if arguments.write is not None:
        client = CLIENTS[arguments.client]
        path = Path(arguments.write or client.path)
        write_settings(path, client.settings(server), server)
        print(f"{client.title}: settings written to {path}\nUse: {client.use}")
    else:
        names = [arguments.client] if arguments.client else list(CLIENTS)
        print("\n\n".join(_describe(name, server) for name in names))
    _warn_about_context(arguments.client, server)
    return 0


def base_address(url: str) -> str:
    """The server's address without /v1 or a slash at its end."""
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urllib.parse.urlsplit(text)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_usable &= parts.username is None  # who may ask is the key's matter
        is_usable &= parts.port is None or parts.port > 0
        is_usable &= not parts.query and not parts.fragment
    except ValueError:  # a port that is no number, brackets that hold no address
        is_usable = False
    if not is_usable:
        raise RequestError(f"The address is {url!r}; it must look like {DEFAULT_URL}.")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


def ask_server(url: str, api_key: str) -> Server:
    """The server's own word on what it serves."""
    request = urllib.request.Request(f"{url}/v1/models")
    request.add_header("Authorization", f"Bearer {api_key}")
    host = urllib.parse.urlsplit(url).hostname or ""
    # a proxy of the environment cannot reach this machine's own loopback
    handlers = [urllib.request.ProxyHandler({})] if is_loopback(host) else []
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT_S) as reply:
            return _server_from(json.loads(reply.read(MAX_REPLY_BYTES)), url, api_key)
    except urllib.error.HTTPError as error:
        raise _refusal(url, error.code) from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        reason = getattr(reason, "strerror", None) or reason
        raise RequestError(
            f"No server answers at {url} ({reason}). Start one with `flashdraft serve`, name "
            "another with --url, or give --model to write the settings all the same."
        ) from None
    except (ValueError, LookupError, TypeError):
        raise RequestError(
            f"What answers at {url} lists no models as the OpenAI API does; is it flashdraft?"
        ) from None


def _server_from(reply: Any, url: str, api_key: str) -> Server:
    model = reply["data"][0]
    context = model.get("max_model_len")
    if not isinstance(model["id"], str):
        raise ValueError("the model's id is not a string")
    return Server(url, model["id"], api_key, context if isinstance(context, int) else None)


def _refusal(url: str, status: int) -> RequestError:
    if status in (401, 403):
        return RequestError(
            f"The server at {url} wants another API key; give it with --api-key or {KEY_VARIABLE}."
        )
    if status == 503:
        return RequestError(f"The server at {url} is still starting; try again in a moment.")
    return RequestError(f"The server at {url} answers with status {status}; is it flashdraft?")


def write_settings(path: Path, text: str, server: Server) -> None:
    """Write settings; a JSON file that is there already keeps everything else it says."""
    if path.suffix == ".json" and path.exists():
        text = _merged(path, text)
    elif path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
        raise RequestError(f"{path} exists and says something else; name another file or move it.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{path.parent} cannot be made: {error.strerror or error}.") from None
    if server.api_key == NO_KEY:
        write_text(path, text)
    else:
        _write_secret(path, text)


def _write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner can read, at any moment."""
    try:
        target = path.resolve()
        descriptor, part = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            put_in_place(Path(part), target)
        finally:
            Path(part).unlink(missing_ok=True)
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror or error}.") from None


def _merged(path: Path, text: str) -> str:
    try:
        present = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} is not readable as JSON ({error}); mend or move it.") from None
    if not isinstance(present, dict) or not isinstance(present.get("env", {}), dict):
        raise RequestError(f"{path} does not hold an object with an `env` object; mend or move it.")
    ours = json.loads(text)["env"]
    present["env"] = present.get("env", {}) | ours
    return json.dumps(present, indent=2, ensure_ascii=False) + "\n"


def _describe(name: str, server: Server) -> str:
    client = CLIENTS[name]
    head = f"# {client.title} (--client {name}): {client.path}"
    return f"{head}\n# {client.use}\n{client.settings(server)}".rstrip()


def _warn_about_context(name: str | None, server: Server) -> None:
    context = server.max_context
    if name == "claude-code" and context is not None and context < 2 * CLAUDE_CODE_PROMPT:
        print(
            f"Note: the context of {server.model} is {context:,} tokens; Claude Code alone sends "
            f"some {CLAUDE_CODE_PROMPT:,} before your question."
        )
