"""`flashdraft bench --rate` and `--clients`: files, exit codes, wrong flags, documented fields."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashdraft.cli import main
from tests.unit.bench.run.openai_server import OpenAIServer, answer, refuse

ROOT = Path(__file__).parents[4]
TASKS = ("--tasks", "sample-arithmetic")


def test_loads_are_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plot, page = (tmp_path / name for name in ("load.json", "load.svg", "load.html"))
    with OpenAIServer("flashdraft") as server:
        server.script = [answer("a", "b", "c", counts=[1, 2, 3], pause_s=0.005)]
        command = ["bench", "--url", server.url, "--clients", "1,3", *TASKS, "--num-prompts", "6"]
        command += ["--slo-ttft", "5", "--slo-gap", "5", "--json", str(path)]
        assert main([*command, "--plot", str(plot)]) == 0
        assert main([*command, "--plot", str(page), "--rate", "100", "--duration", "5"]) == 0
        assert all("temperature" not in one for one in server.questions)
    assert plot.read_text().startswith("<svg") and page.read_text().startswith("<!doctype html>")
    document = json.loads(path.read_text())
    assert [row["load"] for row in document["rows"]] == ["100 requests/s", "1 client", "3 clients"]
    assert all(row["num_answered"] == 6 for row in document["rows"])
    assert all(row["output_tokens"] == 36 for row in document["rows"])
    assert not document["is_partial"] and document["settings"]["sampling"] == "the server's"
    out = capsys.readouterr().out
    assert "3 clients" in out and "100 %" in out


def test_every_field_of_the_document_is_documented(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    with OpenAIServer() as server:
        command = ["bench", "--url", server.url, "--clients", "1", "--num-prompts", "2"]
        assert main([*command, "--prompt-tokens", "5-9", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    text = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    section = text.partition("### A server under load")[2].partition("\n## ")[0]
    named = set(re.findall(r"\w+", section))
    (row,) = document["rows"]
    for fields in (document, document["settings"], row, row["curves"], row["timeline"][0]):
        assert fields.keys() <= named, fields.keys() - named


def test_failures_make_the_results_partial(capsys: pytest.CaptureFixture[str]) -> None:
    with OpenAIServer() as server:
        server.script = [answer("ok"), answer("ok"), refuse(500, "broken"), answer("ok")]
        command = ["bench", "--url", server.url, "--clients", "1", "--num-prompts", "3", *TASKS]
        assert main([*command, "--json"]) == 1
    found = capsys.readouterr()
    document = json.loads(found.out)
    assert document["is_partial"] and document["rows"][0]["errors"] == {"HTTP 500: broken": 1}
    assert "1 of 3 requests failed" in " ".join(found.err.split())


def test_a_server_that_answers_nothing_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with OpenAIServer() as server:
        server.script = [refuse(500, "broken")]
        command = ["bench", "--url", server.url, "--clients", "1", "--num-prompts", "2", *TASKS]
        assert main(command) == 2
    assert "no request was answered; HTTP 500: broken" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--clients 2", "--url"),
        ("--url x --clients 0", "--clients"),
        ("--url x --clients 99999", "--clients"),
        ("--url x --rate 0", "--rate"),
        ("--url x --rate 1,x", "--rate"),
        ("--url x --rate inf", "--rate"),
        ("--url x --rate 1 --burstiness 0.0001", "--burstiness"),
        ("--url x --rate 1 --prompt-tokens 9-3", "--prompt-tokens"),
        ("--url x --rate 1 --slo-gap nan", "--slo-gap"),
        ("--url x --rate 1 --duration -1", "--duration"),
        ("--url x --rate 1 --concurrency 2", "--concurrency"),
        ("--url x --rate 1 --report there", "--report"),
        ("--url x --rate 1 --plain-url y", "--plain-url"),
        ("--url x --rate 1 --accuracy", "--accuracy"),
        ("--url x --rate 1 --plot nosuch/x.svg", "nosuch"),
        ("--url x --duration 5", "--duration"),
        ("--slo-ttft 5", "--slo-ttft"),
        ("--url x --timeout 5", "--timeout"),
    ],
)
def test_wrong_flags_are_refused_by_name(
    flags: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flashdraft.cli.bench.traffic.find_server", lambda *_: pytest.fail("a server was asked")
    )
    try:
        code = main(["bench", *flags.split()])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_gives_the_partial_report(number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    with OpenAIServer() as server:
        server.script = [answer("a", "b", pause_s=0.02)]
        command = [sys.executable, "-m", "flashdraft", "bench", "--url", server.url, *TASKS]
        command += ["--clients", "2", "--duration", "120", "--json", str(path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        deadline = time.monotonic() + 60
        while len(server.questions) < 12 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(number)
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 130 and out.startswith("PARTIAL") and "Interrupted" in out
    (row,) = json.loads(path.read_text())["rows"]
    assert row["num_answered"] > 2 and row["window_s"] < 60
