"""The real `flashdraft serve` on a tiny random checkpoint: processes, signals, sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flashdraft.cli import main
from flashdraft.core import SamplingParams
from flashdraft.llm import LLM
from tests.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.alone  # it measures milliseconds of a server and its engine

PROMPT = "the quick brown fox"
START_S = 60
LONG = 900  # tokens; the tiny model's context holds 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("served") / "tiny")


@dataclass
class Running:
    """A server's process, and what it has said so far."""

    process: subprocess.Popen[str]
    port: int
    log: Path

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            if body is None:
                connection.request("GET", path)
            else:
                headers = {"Content-Type": "application/json"}
                connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read().decode()
            is_json = "json" in (response.headers["Content-Type"] or "")
            return response.status, json.loads(text) if is_json else text

    def completion(self, **fields: Any) -> dict[str, Any]:
        return {"model": "tiny", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, **fields}

    def open(self, **fields: Any) -> socket.socket:
        """Send a completion over a raw socket."""
        body = json.dumps(self.completion(**fields))
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
            f"\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        return connection

    def metric(self, name: str) -> float:
        _, page = self.ask("/metrics")
        found = re.search(rf"^flashdraft_{re.escape(name)} (\S+)$", page, re.MULTILINE)
        return float(found[1]) if found else 0.0

    @property
    def engine_pid(self) -> int:
        """The engine's process: the server's one child that is a worker."""
        (pid,) = [pid for pid in self.children if runs(pid, "flashdraft.server.process.worker")]
        return pid

    @property
    def children(self) -> list[int]:
        """The server's processes: the engine's, and those of the tokenizer."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        children = " ".join((task / "children").read_text() for task in tasks.iterdir())
        return [pid for pid in map(int, children.split()) if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def runs(pid: int, module: str) -> bool:
    try:
        return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def read_to_end(connection: socket.socket) -> str:
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        piece = connection.recv(1 << 16)
        if not piece:
            break
        data += piece
    return data.decode()


@contextlib.contextmanager
def serving(folder: Path, tmp_path: Path, *flags: str) -> Iterator[Running]:
    log, errors = tmp_path / "out.log", tmp_path / "err.log"
    command = [sys.executable, "-m", "flashdraft", "serve", str(folder), "--port", "0"]
    with log.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(
            [*command, "--dtype", "float32", "--max-batch", "4", *flags],
            stdout=out,
            stderr=err,
            text=True,
            start_new_session=True,
        )
    try:
        until(lambda: "Serving" in errors.read_text() or process.poll() is not None, START_S)
        found = re.search(r"Serving \S+ on http://127\.0\.0\.1:(\d+)", errors.read_text())
        assert found, errors.read_text()
        yield Running(process, int(found[1]), log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(folder, tmp_path_factory.mktemp("server")) as running:
        yield running


def test_answers_are_those_of_the_model(server: Running, folder: Path) -> None:
    expected = LLM(str(folder), dtype="float32").generate(
        PROMPT, SamplingParams(max_tokens=30, ignore_eos=True)
    )[0]
    assert server.ask("/health")[0] == 200
    for verify in (None, 0, 4):
        extension = {} if verify is None else {"flashdraft": {"verify": verify}}
        status, answer = server.ask(
            "/v1/completions", server.completion(max_tokens=30, **extension)
        )
        assert status == 200
        assert answer["choices"][0]["text"] == expected.text
        assert answer["usage"]["completion_tokens"] == 30
        assert (answer["flashdraft"]["drafted"] == 0) or verify != 0


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_frees_the_engine(server: Running, stream: bool) -> None:
    before = server.metric('generations_total{finish_reason="cancelled"}')
    connections = [server.open(max_tokens=LONG, stream=stream) for _ in range(6)]
    until(lambda: server.metric("requests_running") > 0)
    for connection in connections:
        connection.close()
    until(lambda: server.metric('generations_total{finish_reason="cancelled"}') >= before + 4)
    until(lambda: server.metric("requests_running") + server.metric("requests_waiting") == 0)
    assert server.metric("cache_pages_used") == 0
    assert server.ask("/v1/completions", server.completion(max_tokens=3))[0] == 200


def test_ten_megabytes_are_refused_and_the_answer_is_heard(server: Running) -> None:
    status, answer = server.ask("/v1/completions", {"prompt": "x" * 10_000_000})
    assert status == 413 and "bytes" in answer["error"]["message"]


def test_small_answers_come_at_once(server: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    seconds = []
    with contextlib.closing(connection):
        for _ in range(15):
            began = time.monotonic()
            connection.request("GET", "/version")
            connection.getresponse().read()
            seconds.append(time.monotonic() - began)
    assert sorted(seconds)[7] < 0.03  # a delayed acknowledgement takes 0.04 s


def test_a_prompt_beyond_the_context_is_refused(server: Running) -> None:
    body = server.completion(prompt=[5] * 100_000)
    status, answer = server.ask("/v1/completions", body)
    assert status == 400 and "context" in answer["error"]["message"]


def test_a_killed_engine_ends_streams_cleanly_and_comes_back(server: Running) -> None:
    connection = server.open(max_tokens=LONG, stream=True)
    until(lambda: b"data:" in connection.recv(1 << 16))
    pid = server.engine_pid
    os.kill(pid, signal.SIGKILL)
    rest = read_to_end(connection)
    assert '"error"' in rest and "started again" in rest
    connection.close()
    assert server.ask("/health")[0] in (503, 200)
    until(lambda: server.ask("/health")[0] == 200, START_S)
    assert server.engine_pid != pid
    assert server.ask("/v1/completions", server.completion(max_tokens=3))[0] == 200
    assert server.metric("engine_restarts_total") == 1


def test_a_stopped_engine_is_told_in_time_and_goes_on_with_what_it_had(server: Running) -> None:
    connection = server.open(max_tokens=LONG, stream=True)
    until(lambda: b"data:" in connection.recv(1 << 16))
    pid = server.engine_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: server.ask("/health")[0] == 503, 5.0)
        assert server.ask("/health")[1]["status"] == "unresponsive"
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: server.ask("/health")[0] == 200, 2.0)
    assert "[DONE]" in read_to_end(connection)
    connection.close()
    assert server.engine_pid == pid


def test_silent_sockets_lock_nobody_out(server: Running) -> None:
    with contextlib.ExitStack() as opened:
        for number in range(520):
            silent = socket.create_connection(("127.0.0.1", server.port), timeout=30)
            opened.enter_context(silent)
            if number % 2:
                silent.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
        assert server.ask("/health")[0] == 200
        assert server.ask("/v1/completions", server.completion(max_tokens=3))[0] == 200


def test_the_log_holds_lines_of_json_without_prompts(server: Running) -> None:
    for nonsense in (b"\x16\x03\r\n\r\n", b"GET /health HTTP/1.1\r\nUpgrade: websocket\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(nonsense + b"Host: localhost\r\nConnection: upgrade\r\n\r\n")
            assert connection.recv(1 << 16)

    def answered() -> list[dict[str, object]]:
        whole = server.log.read_text().rpartition("\n")[0].splitlines()
        return [line for line in map(json.loads, whole) if line.get("route") == "/v1/completions"]

    before = len(answered())
    server.ask("/v1/completions", server.completion(max_tokens=3))
    until(lambda: len(answered()) > before)  # it is written once the answer is on its way
    assert {"id", "route", "status", "duration_s"} <= answered()[-1].keys()
    said = server.log.with_name("err.log").read_text().splitlines()
    assert [line.split()[0] for line in said if "engine" not in line] == ["Loading", "Serving"]
    assert "fox" not in server.log.read_text()


def test_sigint_to_the_group_is_the_fronts_and_drains(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path) as running:
        engine = running.engine_pid
        answers: list[tuple[int, Any]] = []
        body = running.completion(max_tokens=LONG)
        threads = [
            threading.Thread(target=lambda: answers.append(running.ask("/v1/completions", body)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        until(lambda: running.metric("requests_running") == 4)
        os.killpg(running.process.pid, signal.SIGINT)  # as a terminal's Ctrl-C
        until(lambda: _status_or_gone(running) != 200)
        for thread in threads:
            thread.join(30)
        assert [status for status, _ in answers] == [200] * 4
        assert {answer["usage"]["completion_tokens"] for _, answer in answers} == {LONG}
        assert running.process.wait(20) == 0
        until(lambda: not is_alive(engine))


def test_a_second_signal_ends_at_once_and_leaves_nobody(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path) as running:
        engine = running.engine_pid
        with running.open(max_tokens=LONG, stream=True) as stalled:
            until(lambda: running.metric("requests_running") == 1)
            os.kill(engine, signal.SIGSTOP)  # an answer that would never end
            running.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            assert running.process.poll() is None
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(5) == 128 + signal.SIGTERM
            assert stalled
        until(lambda: not is_alive(engine))


def test_sigterm_finishes_a_list_longer_than_what_runs_together(
    folder: Path, tmp_path: Path
) -> None:
    with serving(folder, tmp_path) as running:
        body = running.completion(prompt=[PROMPT] * 40, max_tokens=40)
        answers: list[tuple[int, Any]] = []
        asking = threading.Thread(
            target=lambda: answers.append(running.ask("/v1/completions", body))
        )
        asking.start()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        with socket.create_connection(("127.0.0.1", running.port), timeout=30) as arriving:
            arriving.sendall(f"{head}Content-Length: 500\r\n\r\n{{".encode())
            until(lambda: running.metric("requests_running") == 4)
            running.process.send_signal(signal.SIGTERM)
            told = "".join(iter(lambda: arriving.recv(1 << 16).decode(), ""))
        assert told.startswith("HTTP/1.1 503") and "retry-after" in told.lower()
        assert '"error"' in told
        asking.join(60)
        status, answer = answers[0]
        assert status == 200 and len(answer["choices"]) == 40
        assert answer["usage"]["completion_tokens"] == 40 * 40
        assert running.process.wait(20) == 0
        assert "Traceback" not in running.log.read_text()


def test_an_engine_that_dies_again_and_again_ends_the_server_with_an_error(
    folder: Path, tmp_path: Path
) -> None:
    with serving(folder, tmp_path) as running:
        killed: set[int] = set()

        def kill() -> bool:
            with contextlib.suppress(OSError, ValueError):
                pid = running.engine_pid
                if pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            return running.process.poll() is not None

        until(kill, 120)
        assert running.process.returncode == 2
        lines = [json.loads(line) for line in running.log.read_text().splitlines()]
        errors = [line for line in lines if line.get("level") == "error"]
        assert len(errors) == 1 and "given up" in errors[0]["message"]
        said = running.log.with_name("err.log").read_text()
        assert said.count("given up") == 1 and "started again" not in said


# -- what ends before the model is loaded ----------------------------------------------------------


def test_a_busy_port_is_one_line_before_the_model_loads(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "no-such-model", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert str(port) in error and "--port" in error and error.count("\n") == 1


def test_other_hosts_need_a_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASHDRAFT_API_KEY", raising=False)
    assert main(["serve", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "--api-key" in capsys.readouterr().err


def test_an_unknown_model_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", str(tmp_path / "nothing"), "--port", "0"]) == 2
    assert "nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-batch", "0"),
        ("--max-context", "1"),
        ("--cache-gb", "0"),
        ("--draft", "nowhere/x"),
        ("--dtype", "x12"),
        ("--quantize", "int4"),
    ],
)
def test_a_wrong_flag_is_known_before_anything_is_loaded(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
    value: str,
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the model was being loaded")

    monkeypatch.setattr("flashdraft.cli.commands.serve._load_tokenizer", fail)
    assert main(["serve", str(folder), "--port", "0", "--device", "cpu", flag, value]) == 2
    error = capsys.readouterr().err
    assert value in error and error.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_loads_is_heard_at_once(
    folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    errors = tmp_path / "err.log"
    command = [sys.executable, "-m", "flashdraft", "serve", str(folder), "--port", "0"]
    with errors.open("w") as err:
        process = subprocess.Popen(command, stderr=err, text=True, start_new_session=True)
    try:
        until(lambda: "Loading" in errors.read_text(), START_S)
        time.sleep(0.2)  # the engine's process imports torch for longer than that
        assert "Serving" not in errors.read_text()
        process.send_signal(number)
        began = time.monotonic()
        assert process.wait(10) == 0
        assert time.monotonic() - began < 5
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
    assert errors.read_text().splitlines()[-1] == "Stopped before the model was loaded."


def test_a_model_that_does_not_load_is_an_error_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_checkpoint(tmp_path / "damaged")
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])  # the engine's process is the one that reads it
    assert main(["serve", str(folder), "--port", "0"]) == 2
    assert weights.name in capsys.readouterr().err


def _status_or_gone(running: Running) -> int:
    try:
        return running.ask("/health")[0]
    except (OSError, http.client.HTTPException):
        return 0
