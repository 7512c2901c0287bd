"""`flashdraft connect`: the settings that point common clients at a running server.

It asks the server for its model's name, prints what each client needs, and with --write puts it
where the client looks. It starts no server and changes no other setting of a client.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from flashdraft.cli.arguments import KEY_VARIABLE
from flashdraft.cli.clients import CLIENTS, DEFAULT_URL, NO_KEY, Server
from flashdraft.cli.files import write_text
from flashdraft.errors import RequestError
from flashdraft.files import put_in_place
from flashdraft.server.settings import ServerSettings, is_loopback

TIMEOUT_S = 10.0
MAX_REPLY_BYTES = 1_000_000
CLAUDE_CODE_PROMPT = 20_000  # tokens: about what its own instructions and tools take


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
