"""`flashdraft bench --url`: what it records of a server, and how it waits for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashdraft.bench.report.reading import read_document
from flashdraft.cli import main
from tests.unit.bench.run.openai_server import OpenAIServer, stream_of

QUICK = ("--max-tokens", "8", "--num-prompts", "1", "--concurrency", "1")
TASKS = ("--tasks", "sample-arithmetic")


@pytest.mark.parametrize(
    ("kind", "flags", "verify"),
    [
        ("vllm", (), "the server's"),
        ("someone", (), "the server's"),
        ("flashdraft", (), "auto"),
        ("flashdraft", ("--verify", "3"), 3),
    ],
)
def test_the_verify_length_is_only_ours_to_tell(
    kind: str, flags: tuple[str, ...], verify: object, tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    with OpenAIServer(kind) as server:
        main(["bench", "--url", server.url, *QUICK, *TASKS, *flags, "--json", str(path)])
    assert read_document(path)["settings"]["verify"] == verify


def test_a_server_that_is_loading_is_told_once_where_no_terminal_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashdraft.bench.run.served.POLL_S", 0.01)
    with OpenAIServer() as server:

        def status() -> int:
            return 503 if server.paths.count("/v1/models") < 4 else 200

        always = property(lambda _: status())  # a property goes before what instances hold
        monkeypatch.setattr(OpenAIServer, "models_status", always, raising=False)
        assert main(["bench", "--url", server.url, *QUICK, *TASKS]) == 0
    err = capsys.readouterr().err
    assert err.count("is still loading") == 1 and "no OpenAI endpoint" not in err


def test_a_run_without_an_answer_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    with OpenAIServer() as server:
        server.script = [stream_of({"error": {"message": "no such adapter"}})]
        assert main(["bench", "--url", server.url, *QUICK, *TASKS]) == 2
    err = capsys.readouterr().err
    assert err.count("sample-arithmetic, concurrency 1, draft") == 1
    assert err.count("no such adapter") == 1 and err.count("Nothing was measured") == 1
    assert "1 prompts" not in err
