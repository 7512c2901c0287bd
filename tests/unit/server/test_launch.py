"""`flashdraft serve` refuses keys and flags that cannot be meant, before anything is loaded."""

from __future__ import annotations

import pytest

from flashdraft.cli import main
from flashdraft.server.settings import ServerSettings

KEY = "FLASHDRAFT_API_KEY"


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the model was being loaded")

    monkeypatch.delenv(KEY, raising=False)
    monkeypatch.setattr("flashdraft.cli.commands.serve._load_tokenizer", fail)


def test_an_empty_key_is_refused_and_not_taken_for_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["serve", "--port", "0", "--api-key", ""]) == 2
    assert "API key is empty" in capsys.readouterr().err
    monkeypatch.setenv(KEY, "")
    assert main(["serve", "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert "API key is empty" in error and KEY in error


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServerSettings] = []

    def remember(settings: ServerSettings) -> None:
        seen.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr("flashdraft.cli.commands.serve._listen", remember)
    monkeypatch.setenv(KEY, "")
    assert main(["serve", "--api-key", "given"]) == 0
    monkeypatch.setenv(KEY, "named")
    assert main(["serve"]) == 0
    monkeypatch.delenv(KEY)
    assert main(["serve"]) == 0
    assert [settings.api_key for settings in seen] == ["given", "named", None]


@pytest.mark.parametrize(
    ("flag", "value"), [("--dtype", "float12"), ("--device", "tpu"), ("--device", "cuda:x")]
)
def test_a_wrong_dtype_or_device_is_known_at_once(
    capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    assert main(["serve", "--port", "0", flag, value]) == 2
    error = capsys.readouterr().err
    assert value in error and "Loading" not in error and error.count("\n") == 1
