"""What a user may wish of an outside engine, and what contradicts itself or what was checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from flashdraft.cli import main
from flashdraft.errors import RequestError
from flashdraft.external.command import EngineSettings, Nodes

PLAIN = EngineSettings(host="127.0.0.1", port=8000, served_names=("name",))


def settings(**values: Any) -> EngineSettings:
    return dataclasses.replace(PLAIN, **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tensor_parallel": 0}, "at least 1"),
        ({"dtype": "int8"}, "quantised checkpoint"),
        ({"tensor_parallel": 3, "nodes": Nodes(2, 0, "h:1")}, "multiple of their number"),
        ({"nodes": Nodes(2, 0, "h:1"), "ray_address": "auto"}, "give one"),
        ({"device": "cuda:1", "tensor_parallel": 2}, "one GPU"),
    ],
)
def test_settings_that_contradict_are_refused(values: dict[str, Any], message: str) -> None:
    values = {"tensor_parallel": 2, **values} if "nodes" in values else values
    with pytest.raises(RequestError, match=message):
        settings(**values)


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("--port", "--port"),
        ("--port=9", "--port"),
        ("--por", "--port"),
        ("--host", "--host"),
        ("--ho=0.0.0.0", "--host"),
        ("--api-key", "--api-key"),
        ("--api_key=se-cret", "--api-key"),
        ("--api-k", "--api-key"),
        ("--uds", "--host and --port"),
    ],
)
def test_engine_flags_may_not_undo_what_was_checked(word: str, ours: str) -> None:
    """The engine's parser takes the last of two, and abbreviations."""
    with pytest.raises(RequestError, match=rf"give {ours} before the --") as caught:
        settings(extra=("--seed", "1", word, "9"))
    assert "se-cret" not in str(caught.value)


def test_a_port_for_the_engine_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "google/gemma-4-31B-it", "--engine", "vllm", "--dry-run"]
    assert main([*words, "--", "--port", "9"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and "give --port before the --" in err


def test_engine_flags_that_look_alike_are_passed_on() -> None:
    extra = ("-p", "-", "--api-server-count", "2", "--headless", "--hf-token=--port", "--grpc-port")
    assert settings(extra=extra).extra == extra


@pytest.mark.parametrize("given", [(1, 0, "h:1"), (2, 2, "h:1"), (2, 0, "h"), (2, 0, "h:0")])
def test_nodes_that_cannot_be_are_refused(given: tuple[int, int, str]) -> None:
    with pytest.raises(RequestError):
        Nodes(*given)
