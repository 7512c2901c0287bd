"""`flashdraft bench` as it is run: in this process, at a server, interrupted, with bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flashdraft.bench.report.reading import read_document
from flashdraft.bench.results import Measurement
from flashdraft.bench.run.local import LocalRunner
from flashdraft.bench.run.measure import OnReply
from flashdraft.bench.run.measure import Run as BenchRun
from flashdraft.cli import main
from tests.tiny import make_tiny_checkpoint
from tests.unit.bench.run.openai_server import OpenAIServer, answer, chunk, stream_of

COMMAND = [sys.executable, "-m", "flashdraft", "bench"]
QUICK = ("--max-tokens", "12", "--num-prompts", "2", "--concurrency", "1,2")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process: exit code, stdout, stderr."""

    def run_command(*argv: str) -> tuple[int, str, str]:
        code = main(["bench", *argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


def in_process(folder: str) -> tuple[str, ...]:
    return ("--model", folder, "--draft", "ngram", "--verify", "4", "--dtype", "float32")


def test_a_run_in_this_process(run: Run, folder: str, tmp_path: Path) -> None:
    path, report = tmp_path / "results.json", tmp_path / "report"
    tasks = ("--tasks", "sample-arithmetic,sample-chat", "--json", str(path))
    code, out, err = run(*in_process(folder), *QUICK, *tasks, "--report", str(report))
    assert code == 0 and "sample-arithmetic" in out and f"wrote {path}" in err
    document = read_document(path)
    assert not document["is_partial"] and document["problems"] == []
    cells = [(row["task"], row["concurrency"], row["mode"]) for row in document["rows"]]
    assert cells == [
        ("sample-arithmetic", 1, "plain"),
        ("sample-arithmetic", 1, "draft"),
        ("sample-arithmetic", 2, "draft"),
        ("sample-arithmetic", 2, "plain"),
        ("sample-chat", 1, "draft"),
        ("sample-chat", 1, "plain"),
        ("sample-chat", 2, "plain"),
        ("sample-chat", 2, "draft"),
    ]
    for task, by_concurrency in document["identical"].items():
        assert by_concurrency == {c: {"same": 2, "total": 2} for c in "12"}, task
        assert set(document["speedup"][task]) == {"1", "2"}
    for row in document["rows"]:
        seconds = sum(one[0] for one in row["requests"])
        assert sum(row["buckets"].values()) == pytest.approx(seconds, abs=1e-3)
        assert len(row["requests"]) == (4 if row["task"] == "sample-chat" else 2)
    assert document["settings"]["warm_up_prompts"] == 3
    assert str(tmp_path) not in path.read_text() and "/" not in document["settings"]["model"]
    assert (report / "report.html").is_file()
    code, out, _ = run("compare", str(path), str(path))
    assert code == 0 and "sample-chat" in out


def test_json_on_stdout_is_one_object(run: Run, folder: str, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.txt"
    prompts.write_text("the quick fox\nthe lazy dog\n")
    flags = ("--prompts", str(prompts), "--json", "--repeats", "2", "--concurrency", "2")
    code, out, err = run(*in_process(folder), *flags, "--max-tokens", "8")
    document = json.loads(out)
    assert code == 0 and "mine" in err
    assert document["settings"]["tasks"] == ["mine"]
    assert [len(row["requests"]) for row in document["rows"]] == [4, 4]
    assert document["identical"] == {"mine": {"2": {"same": 4, "total": 4}}}


def test_plain_decoding_alone_has_plain_rows(run: Run, folder: str) -> None:
    flags = ("--model", folder, "--dtype", "float32", "--draft", "none", "--json")
    code, out, _ = run(*flags, *QUICK, "--tasks", "sample-arithmetic")
    document = json.loads(out)
    assert code == 0 and {row["mode"] for row in document["rows"]} == {"plain"}
    assert document["speedup"] == {} and document["settings"]["draft"] == "none"


def test_a_task_files_broken_lines_and_accuracy(run: Run, folder: str, tmp_path: Path) -> None:
    rows = ['{"prompt": "What is one and one?", "answer": "2"}', "{broken"]
    (tmp_path / "gsm8k_test.jsonl").write_text("\n".join(rows))
    flags = ("--data", str(tmp_path), "--tasks", "gsm8k", "--accuracy", "--json")
    code, out, err = run(*in_process(folder), *flags, *QUICK)
    document = json.loads(out)
    assert code == 0 and "1 of 2 lines of gsm8k_test.jsonl are broken" in err
    assert all(row["accuracy"]["total"] == 1 for row in document["rows"])


def test_a_server_of_another_make(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with OpenAIServer("someone", models=["their-model"]) as server:
        server.script = [answer("Hello", " world", tokens=5, pause_s=0.01)]
        flags = ("--tasks", "sample-chat", "--json", str(path))
        code, out, err = run("--url", server.url + "/v1", *QUICK, *flags)
    document = read_document(path)
    assert code == 0 and "their-model" in out and server.url in err
    assert {row["mode"] for row in document["rows"]} == {"draft"}
    assert document["settings"]["engine"] == "http" and document["environment"]["dtype"] is None
    assert any("no metrics" in one for one in document["problems"])
    assert any("--plain-url" in one for one in document["problems"])
    assert document["rows"][0]["output_tokens"] == 20  # two prompts, two turns, five tokens


def test_a_server_that_fails_now_and_then_gives_partial_results(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with OpenAIServer() as server:
        before = [answer("a")] * (3 + 2 + 1)  # warm-up, priming, and one answer of the first row
        server.script = [*before, stream_of(chunk("b", None)), answer("a")]
        flags = ("--tasks", "sample-arithmetic", "--json", str(path))
        code, out, _ = run("--url", server.url, *QUICK, *flags)
    document = read_document(path)
    assert code == 1 and document["is_partial"] and "PARTIAL" in out
    assert document["rows"][0]["num_prompts"] == 1
    assert "1 of 2 prompts got no answer" in out.replace("\n", " ")


def test_nothing_measured_is_an_error(run: Run) -> None:
    with OpenAIServer() as server:
        server.script = [stream_of({"error": {"message": "no such adapter"}})]
        code, out, err = run("--url", server.url, *QUICK, "--tasks", "sample-chat")
    assert code == 2 and out == ""
    assert "Nothing was measured" in err and "no such adapter" in err


def test_memory_that_runs_out_keeps_the_finished_rows(
    run: Run, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = LocalRunner.run

    def run_out(self: LocalRunner, run: BenchRun, on_reply: OnReply) -> Measurement:
        if run.concurrency == 2 and not run.is_warm_up:
            raise RuntimeError("CUDA out of memory.\nTried to allocate 2 GiB")
        return measure(self, run, on_reply)

    monkeypatch.setattr(LocalRunner, "run", run_out)
    path = tmp_path / "results.json"
    flags = ("--tasks", "sample-arithmetic", "--json", str(path))
    code, out, err = run(*in_process(folder), *QUICK, *flags)
    document = read_document(path)
    assert code == 1 and document["is_partial"] and len(document["rows"]) == 2
    assert "CUDA out of memory. Tried" in document["problems"][-1]
    assert "CUDA out of memory" in out and "Traceback" not in out + err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tasks", ","), "No task is named"),
        (("--report", "/dev/null/report"), "--report"),
        (("--url", "http://127.0.0.1:9"), "cannot be reached"),
        (("--plain-url", "http://127.0.0.1:9"), "--plain-url is the baseline of --url"),
        (("--api-key", "x"), "--api-key is for --url"),
        (("--url", "http://127.0.0.1:9", "--dtype", "int8"), "--dtype is for the server"),
        (("--tasks", "gsm8k"), "--data"),
        (("--tasks", "nonsense"), "There is no task 'nonsense'"),
        (("--data", "nowhere"), "no folder"),
        (("--prompts", "nothing.txt"), "cannot be read"),
        (("--num-prompts", "0"), "--num-prompts is 0"),
        (("--repeats", "-1"), "--repeats is -1"),
        (("--json", "no/such/folder.json"), "there is no folder"),
        (("compare", "absent.json", "absent.json"), "absent.json cannot be read"),
    ],
)
def test_bad_input_is_refused_before_anything_is_loaded(
    run: Run, flags: tuple[str, ...], message: str
) -> None:
    begin = time.monotonic()
    code, out, err = run(*flags)
    assert code == 2 and out == "" and message in err and "Traceback" not in err
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("flags", [("--concurrency", "1,x"), ("--concurrency", "0")])
def test_a_wrong_list_is_refused_by_the_parser(run: Run, flags: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(*flags)
    assert exit_.value.code == 2


def test_ctrl_c_keeps_the_finished_rows(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with OpenAIServer() as server:
        before = [answer("a")] * (3 + 2 + 2)  # warm-up, priming, and the first row
        server.script = [*before, answer(*"abcdefgh", pause_s=0.2)]
        flags = ("--url", server.url, "--tasks", "sample-arithmetic", "--json", str(path))
        process = subprocess.Popen(
            [*COMMAND, *flags, *QUICK],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        deadline = time.monotonic() + 120
        while not path.exists() or len(server.questions) < 8:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    document = read_document(path)
    assert document["is_partial"] and len(document["rows"]) == 1
    assert "Interrupted in sample-arithmetic, concurrency 2, draft" in document["problems"][-1]
    assert "PARTIAL" in out


@pytest.mark.weights
@pytest.mark.timeout(600)
def test_the_default_pair_on_the_samples(run: Run) -> None:
    flags = ("--tasks", "sample-docstring", "--num-prompts", "3", "--concurrency", "2", "--json")
    code, out, _ = run(*flags, "--max-tokens", "40", "--verify", "7")
    document = json.loads(out)
    assert code == 0 and document["settings"]["model"] == "smollm2-135m"
    assert document["identical"]["sample-docstring"]["2"] == {"same": 3, "total": 3}
    plain, drafted = sorted(document["rows"], key=lambda row: row["mode"], reverse=True)
    assert plain["mean_accepted_length"] == 1.0 and plain["accepted_by_position"] == []
    assert drafted["mean_accepted_length"] > 1.5
    assert len(drafted["accepted_by_position"]) == 7
    assert drafted["buckets"]["drafter_prefill_s"] > 0 == plain["buckets"]["drafter_prefill_s"]
