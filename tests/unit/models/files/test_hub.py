"""Why the Hub does not deliver, each reason in its own words: fabricated, and over a socket."""

from __future__ import annotations

import http.server
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub import errors as hub_errors

from flashdraft.children import python_command, python_environment
from flashdraft.errors import ModelNotFoundError
from flashdraft.models.files.hub import HubModel, fetch_from_hub

TOKEN = "hf_secret"
NO_MODEL = r"no model 'org/name'.*private.*set HF_TOKEN"
GATED = r"org/name is gated: accept its licence at https.*org/name and set HF_TOKEN"
REFUSED = r"refused the token in HF_TOKEN: it is mistyped, expired or revoked.*settings/tokens"
FORBIDDEN = r"account of the token in HF_TOKEN may not read org/name: accept its licence.*that acc"
HIDDEN = r"no model 'org/name'.*private: .*use a token that may read it in HF_TOKEN"
TOO_OFTEN = r"org/name cannot be fetched.*too often.*\(status 429\)"
UNREACHABLE = "cannot be reached"


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither in the environment nor in a file."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))


def response(status: int, headers: dict[str, str] | None = None) -> Any:
    return SimpleNamespace(status_code=status, headers=headers or {}, request=None, text="")


def refused(status: int, text: str = "x", **headers: str) -> Exception:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return hub_errors.HfHubHTTPError(text, response=response(status, named))


def gated(status: int) -> Exception:
    return hub_errors.GatedRepoError("x", response=response(status))


def absent(status: int) -> Exception:
    return hub_errors.RepositoryNotFoundError("x", response=response(status))


def disabled() -> Exception:
    return hub_errors.DisabledRepoError("it is\ndisabled", response=response(403))


def from_cache(cause: Exception) -> Exception:
    """As the client raises it: no answer from the Hub, and then no file in its cache."""
    error = hub_errors.LocalEntryNotFoundError("x")
    error.__cause__ = cause
    return error


def explained(monkeypatch: pytest.MonkeyPatch, error: Exception) -> str:
    def fail(*_arguments: Any, **_options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    with pytest.raises(ModelNotFoundError) as caught:
        fetch_from_hub(HubModel("org/name", "q4.gguf"))
    assert "org/name" in str(caught.value) and TOKEN not in str(caught.value)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize(
    ("error", "without", "with_token"),
    [
        (gated(401), GATED, REFUSED),
        (gated(403), GATED, FORBIDDEN),
        (refused(403), GATED, FORBIDDEN),
        (refused(401), NO_MODEL, REFUSED),
        (absent(401), NO_MODEL, REFUSED),
        (absent(404), NO_MODEL, HIDDEN),
        (refused(429), TOO_OFTEN + ".*in some minutes, set HF_TOKEN", TOO_OFTEN + r".*minutes, or"),
        (refused(429, Retry_After="90"), TOO_OFTEN + ".*again in 90 s", TOO_OFTEN + ".*in 90 s"),
        (refused(429, Retry_After="Wed, 21 Oct"), TOO_OFTEN + ".*in some minutes", TOO_OFTEN),
        (refused(429, RateLimit='"api";r=0;t=55'), TOO_OFTEN + ".*in 55 s", TOO_OFTEN),
        (refused(503, Retry_After="7"), r"overloaded \(status 503\)\. Try again in 7 s", "503"),
        (refused(500), r"overloaded \(status 500\)\. Try again in some minutes", "500"),
        (disabled(), "could not deliver org/name: DisabledRepoError: it is disabled", "disabled"),
        (refused(418, "a\x1b[31m\nb"), r"could not deliver.*: a\\x1b\[31m b\. Try again", "418|a"),
        (hub_errors.LocalEntryNotFoundError("x"), UNREACHABLE, UNREACHABLE),
        (hub_errors.OfflineModeIsEnabled("x"), UNREACHABLE + ".*HF_HUB_OFFLINE", UNREACHABLE),
        (ConnectionResetError("x"), UNREACHABLE, UNREACHABLE),
        (hub_errors.EntryNotFoundError("x"), r"no file 'q4\.gguf'", "no file"),
        (OSError("disk full"), "OSError: disk full", "disk full"),
    ],
)
def test_each_reason_has_its_own_words(
    monkeypatch: pytest.MonkeyPatch, error: Exception, without: str, with_token: str
) -> None:
    assert re.search(without, explained(monkeypatch, error))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert re.search(with_token, explained(monkeypatch, error))


@pytest.mark.parametrize("error", [refused(429), refused(503), absent(401), disabled()])
def test_what_the_hub_said_counts_though_the_client_looked_into_its_cache(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    assert explained(monkeypatch, from_cache(error)) == explained(monkeypatch, error)


def test_a_token_that_is_stored_or_not_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    assert "the token in the file that `hf auth login` wrote" in explained(
        monkeypatch, refused(401)
    )
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    assert "or set HF_TOKEN" in explained(monkeypatch, refused(401))


# -- the real client against a server of our own -----------------------------------------------

ASK = """
import sys
from flashdraft.errors import ModelNotFoundError
from flashdraft.models.files.hub import HubModel, fetch_from_hub
for place in sys.argv[1:]:
    try:
        fetch_from_hub(HubModel(place))
    except ModelNotFoundError as error:
        print(error)
"""
ANSWERS: dict[str, tuple[int, dict[str, str]]] = {
    "s/429": (429, {"Retry-After": "90"}),
    "s/503": (503, {"Retry-After": "7"}),
    "s/401": (401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
    "s/403": (403, {}),
    "s/gated": (401, {"X-Error-Code": "GatedRepo"}),
    "s/gated403": (403, {"X-Error-Code": "GatedRepo"}),
    "s/404": (404, {"X-Error-Code": "RepoNotFound"}),
}


class Refusing(http.server.BaseHTTPRequestHandler):
    """Answers for a repository with the status that it is named after."""

    def do_GET(self) -> None:
        name = next(name for name in ANSWERS if f"/{name}/" in self.path.replace("?", "/"))
        status, headers = ANSWERS[name]
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("token", [None, TOKEN])
def test_the_real_client_over_http(endpoint: str, tmp_path: Path, token: str | None) -> None:
    proxies = {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_HUB_OFFLINE"}
    environment = {k: v for k, v in python_environment().items() if k.upper() not in proxies}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
    environment |= {} if token is None else {"HF_TOKEN": token}
    command = python_command("-c", ASK, *ANSWERS)
    root = str(Path(__file__).parents[4])
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", root)])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    found = dict(zip(ANSWERS, done.stdout.splitlines(), strict=True))
    assert "too often" in found["s/429"] and "in 90 s" in found["s/429"], done.stderr
    assert "status 503" in found["s/503"] and "in 7 s" in found["s/503"]
    if token is None:
        assert "no model" in found["s/401"] and "no model" in found["s/404"]
        assert all("is gated" in found[name] for name in ("s/403", "s/gated", "s/gated403"))
    else:
        assert all("refused the token" in found[name] for name in ("s/401", "s/gated"))
        assert all("account of the token" in found[name] for name in ("s/403", "s/gated403"))
        assert "no model" in found["s/404"] and token not in done.stdout + done.stderr
