"""What is served, in Ollama's words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flashdraft.core import VERSION
from flashdraft.server.app import create_app
from tests.unit.server.asgi_client import Answer, call
from tests.unit.server.scripted import TEMPLATE, Scripted

HEADERS = {"host": "127.0.0.1:8000", "content-type": "application/json"}


def ask(method: str, path: str, body: Any = None, **settings: Any) -> Answer:
    app = create_app(Scripted("x", **settings).serving, lambda line: None)
    return call(app, method, path, HEADERS, [json.dumps(body).encode() if body else b""])


def test_models_are_listed_with_a_tag() -> None:
    names = ("mine", "org/other", "qwen3:0.6b")
    models = ask("GET", "/api/tags", served_model_names=names).json()["models"]
    assert [one["name"] for one in models] == ["mine:latest", "org/other:latest", "qwen3:0.6b"]
    assert all(one["model"] == one["name"] and len(one["digest"]) == 64 for one in models)
    assert all(one["modified_at"].endswith("Z") for one in models)
    (running,) = ask("GET", "/api/ps").json()["models"]
    assert running["name"] == "tiny:latest" and running["context_length"] == 4096


@pytest.mark.parametrize("body", [{"model": "tiny"}, {"name": "tiny:latest"}, {"verbose": True}])
def test_a_model_is_shown(body: dict[str, Any]) -> None:
    shown = ask("POST", "/api/show", body).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == 4096
    assert shown["template"] == TEMPLATE
    assert shown["parameters"].splitlines() == ["temperature 0.7", "num_predict 1024", "top_k 64"]


def test_another_model_is_not_found() -> None:
    answer = ask("POST", "/api/show", {"model": "llama3"})
    assert answer.status == 404 and "not found" in answer.json()["error"]
    assert ask("POST", "/api/show", {"model": 5}).json().keys() == {"error"}


def test_clients_see_whether_anybody_is_there() -> None:
    version = ask("GET", "/api/version").json()
    assert version["flashdraft"] == VERSION and version["version"].count(".") == 2
    for path in ("/", "/api/version", "/api/tags"):
        assert ask("HEAD", path).status == 200
    wrong = ask("GET", "/api/chat")
    assert wrong.status == 405 and "takes POST" in wrong.json()["error"]
