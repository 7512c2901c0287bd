"""The real command, on a tiny random checkpoint: pipes, files, JSON, signals and a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashdraft.cli import main
from flashdraft.core import SamplingParams
from flashdraft.llm import LLM
from flashdraft.models.sources import DEFAULT_MODEL
from tests.tiny import make_tiny_checkpoint

COMMAND = [sys.executable, "-m", "flashdraft"]
PROMPT = "the quick brown fox"
KEYS = {
    "": {
        *("text", "token_ids", "finish_reason", "sampling"),
        *("usage", "pictures", "speculation", "policy", "timing"),
    },
    "sampling": {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"},
    "usage": {"prompt_tokens", "completion_tokens"},
    "speculation": {
        "steps",
        "drafted",
        "accepted",
        "branches",
        "branches_accepted",
        "mean_accepted_length",
        "histogram",
    },
    "policy": {"expected_tokens", "expected_s", "plain_tokens", "plain_s"},
    "timing": {"ttft_s", "decode_s", "tokens_per_s"},
}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def run(folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command on the tiny model, in this process: exit code, stdout, stderr."""

    def run_command(*argv: str, stdin: str = "", model: str = folder) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = main([*argv, "--model", model, "--dtype", "float32"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


# -- generate ----------------------------------------------------------------------------------


def test_json_has_exactly_the_documented_fields(run: Run, folder: str) -> None:
    code, out, _ = run("generate", PROMPT, "--json", "--max-tokens", "40", "--ignore-eos")
    content = json.loads(out)
    assert code == 0 and set(content) == KEYS[""]
    for name in ("sampling", "usage", "speculation", "policy", "timing"):
        assert set(content[name]) == KEYS[name]
    expected = LLM(folder, dtype="float32", draft=None).chat(
        [{"role": "user", "content": PROMPT}], SamplingParams(max_tokens=40, ignore_eos=True)
    )
    assert content["token_ids"] == expected.token_ids and content["text"] == expected.text
    assert content["finish_reason"] == "length" and content["pictures"] == []
    assert content["usage"] == {
        "prompt_tokens": expected.stats.prompt_tokens,
        "completion_tokens": 40,
    }
    speculation = content["speculation"]
    committed = sum(int(n) * count for n, count in speculation["histogram"].items())
    assert committed == 39  # all but the prefill's token
    assert sum(speculation["histogram"].values()) == speculation["steps"]
    assert speculation["mean_accepted_length"] == committed / speculation["steps"]
    policy = content["policy"]
    assert policy["plain_tokens"] == speculation["steps"] <= policy["expected_tokens"]
    assert 0 < policy["plain_s"] <= policy["expected_s"]


def test_the_answer_streams_to_stdout_and_statistics_to_stderr(run: Run) -> None:
    flags = ("--max-tokens", "24", "--ignore-eos")
    text = json.loads(run("generate", PROMPT, "--json", *flags)[1])["text"]
    code, out, err = run("generate", PROMPT, *flags)
    assert code == 0 and out == text + "\n"
    assert " on cpu · drafted by n-gram lookup" in err
    for figure in ("24 tokens", "tok/s", "time to first token", "steps", "drafted", "accepted"):
        assert figure in err


def test_drafted_and_plain_commands_agree(run: Run) -> None:
    flags = ("--json", "--max-tokens", "60", "--ignore-eos", "--temperature", "0.3", "--seed", "5")
    answers = [
        json.loads(run("generate", PROMPT, *flags, *more)[1])
        for more in (("--draft", "none"), ("--draft", "ngram", "--verify", "4"))
    ]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert answers[0]["speculation"]["drafted"] == 0 < answers[1]["speculation"]["drafted"]


def test_compare_finds_identical_tokens(run: Run) -> None:
    code, out, _ = run("generate", PROMPT, "--compare", "--max-tokens", "40", "--verify", "4")
    assert code == 0 and re.search(r"^tokens +identical$", out, re.MULTILINE)


def test_raw_continues_the_prompt_as_it_is(run: Run, folder: str) -> None:
    code, out, _ = run("generate", "-", "--raw", "--json", "--max-tokens", "8", stdin=PROMPT)
    expected = LLM(folder, dtype="float32").generate(PROMPT, SamplingParams(max_tokens=8))[0]
    assert code == 0 and json.loads(out)["token_ids"] == expected.token_ids


def test_what_is_piped_in_is_the_prompt_or_goes_before_it(run: Run) -> None:
    flags = ("--max-tokens", "12", "--ignore-eos", "--json")
    typed = json.loads(run("generate", f"{PROMPT}\n\nSummarise:", *flags)[1])
    for argv, stdin in ((["Summarise:"], PROMPT + "\n"), ([], f"{PROMPT}\n\nSummarise:\n")):
        assert json.loads(run("generate", *argv, *flags, stdin=stdin)[1])["text"] == typed["text"]
    code, out, err = run("generate")
    assert code == 2 and out == "" and "The prompt is empty" in err


def test_stop_and_system_reach_the_model(run: Run) -> None:
    flags = ("--max-tokens", "40", "--ignore-eos", "--json")
    plain = json.loads(run("generate", PROMPT, *flags)[1])
    stop = plain["text"][5:7]
    stopped = json.loads(run("generate", PROMPT, "--stop", stop, *flags)[1])
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == plain["text"][: plain["text"].index(stop)]
    told = json.loads(run("generate", PROMPT, "--system", "be brief", *flags)[1])
    assert told["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]


def test_the_answer_and_the_json_go_to_files(run: Run, tmp_path: Path) -> None:
    page, report = tmp_path / "index.html", tmp_path / "report.json"
    code, out, err = run(
        "generate", PROMPT, "-o", str(page), "--json", str(report), "--max-tokens", "16"
    )
    assert code == 0 and out == "" and "mean accepted length" in err and str(page) in err
    assert page.read_text(encoding="utf-8").rstrip("\n") == (
        json.loads(report.read_text())["text"].rstrip("\n")
    )
    assert sorted(os.listdir(tmp_path)) == ["index.html", "report.json"]


def test_errors_of_the_engine_are_one_line(run: Run, tmp_path: Path) -> None:
    code, out, err = run("generate", "word " * 200, "--max-context", "64")
    assert code == 2 and out == "" and re.match(r"flashdraft: error: The prompt has \d+ tok", err)
    code, _, err = run("generate", PROMPT, model=str(tmp_path))
    assert code == 2 and "config.json" in err and "Traceback" not in err


def test_a_model_without_template_suggests_raw(run: Run, tmp_path: Path) -> None:
    bare = make_tiny_checkpoint(tmp_path)
    (bare / "tokenizer_config.json").unlink()
    code, _, err = run("generate", PROMPT, model=str(bare))
    assert code == 2 and "--raw" in err
    code, _, err = run("chat", stdin="hello\n", model=str(bare))
    assert code == 2 and "generate --raw" in err
    assert run("generate", PROMPT, "--raw", "--max-tokens", "4", model=str(bare))[0] == 0


def test_a_closed_pipe_is_silent_and_stdin_is_a_prompt(folder: str) -> None:
    argv = [*COMMAND, "generate", "-", "--model", folder, "--max-tokens", "900", "--ignore-eos"]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(PROMPT.encode())
        process.stdin.close()
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


def test_ctrl_c_ends_generate_with_130(folder: str) -> None:
    # the pipe has room for a few words only: the answer cannot be complete when the signal comes
    reader, writer = os.pipe()
    size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    filler = os.write(writer, b"." * (size - 64))
    argv = [*COMMAND, "generate", PROMPT, "--model", folder, "--ignore-eos", "--draft", "none"]
    with (
        subprocess.Popen(
            [*argv, "--max-tokens", "900"],
            stdout=writer,
            stderr=subprocess.PIPE,
            # a shell's background job ignores it, and so would its children
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process,
        open(reader, "rb") as output,
    ):
        os.close(writer)
        count = array("i", [0])
        while count[0] <= filler:
            assert process.poll() is None
            time.sleep(0.02)
            fcntl.ioctl(reader, termios.FIONREAD, count)
        process.send_signal(signal.SIGINT)
        output.read()
        assert process.stderr
        said = process.stderr.read().decode()
        assert "Traceback" not in said and "Interrupted.\n" in said
        assert re.search(r"Interrupted\.\n.* on cpu · plain decoding\n\d+ token", said)
        assert process.wait(timeout=60) == 130


# -- chat --------------------------------------------------------------------------------------


def test_a_piped_chat_remembers(run: Run, tmp_path: Path) -> None:
    lines = ["hello", "again", "/stats", f"/save {tmp_path}/talk.json", "/undo", "/exit", "never"]
    code, out, err = run("chat", "--max-tokens", "12", "--ignore-eos", stdin="\n".join(lines))
    assert code == 0 and "2 answers · 24 tokens" in err and "Took back: again" in err
    messages = json.loads((tmp_path / "talk.json").read_text(encoding="utf-8"))["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    assert "".join(m["content"] + "\n" for m in messages[1::2]) == out


def test_a_long_chat_leaves_out_its_oldest_turns(run: Run) -> None:
    stdin = "\n".join([*["tell me more about the fox"] * 6, "/stats"])
    flags = ("--max-tokens", "24", "--max-context", "160", "--ignore-eos", "--system", "be brief")
    code, _, err = run("chat", *flags, stdin=stdin)
    assert code == 0 and "The context of 160 tokens is full: the oldest" in err
    assert "6 answers · 144 tokens" in err  # none was cut short by the context


def test_an_error_ends_a_piped_chat(run: Run) -> None:
    code, _, err = run("chat", "--max-context", "64", stdin="word " * 200 + "\nhello\n")
    assert code == 2 and "flashdraft: error: The prompt has" in err


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def start(argv: list[str], columns: int = 80, **variables: str) -> Terminal:
        started.append(Terminal(argv, columns, tmp_path, **variables))
        return started[-1]

    yield start
    for one in started:
        one.close()


class Terminal:
    """A command in a pseudo-terminal, and somebody typing."""

    def __init__(self, argv: list[str], columns: int, home: Path, **variables: str) -> None:
        self.seen = self.shown = ""
        primary, secondary = pty.openpty()
        fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm", "FLASHDRAFT_HOME": str(home)}
        for name in ("NO_COLOR", "COLUMNS"):
            environment.pop(name, None)
        environment |= variables
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            argv,
            stdin=secondary,
            stdout=secondary,
            stderr=secondary,
            env=environment,
            start_new_session=True,
        )
        os.close(secondary)
        self._primary = primary

    def type(self, text: str) -> None:
        os.write(self._primary, text.encode())

    def wait_for(self, pattern: str, timeout: float = 90.0) -> str:
        """Read until the pattern shows up; what was seen since the last time."""
        begin = time.monotonic()
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() - begin < timeout, f"{pattern!r} is not in {self.seen!r}"
            self._read()
        seen, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return seen

    def interrupt_until(self, pattern: str) -> None:
        """Ctrl-C until the pattern shows up: Python's input() leaves one that comes between its
        prompt and its reading until the next key is pressed."""
        for _ in range(30):
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(AssertionError):
                self.wait_for(pattern, timeout=3)
                return
        raise AssertionError(f"{pattern!r} is not in {self.shown!r}")

    def wait_to_end(self) -> str:
        """Read until the command has ended; everything that was ever shown."""
        with contextlib.suppress(OSError):  # the other end is closed
            while self._read() or self.process.poll() is None:
                assert time.monotonic() - self.began < 120
        self.process.wait(timeout=60)
        return self.shown

    def _read(self) -> bool:
        if not select.select([self._primary], [], [], 0.2)[0]:
            return False
        piece = os.read(self._primary, 1 << 16).decode("utf-8", errors="replace")
        self.seen += piece
        self.shown += piece
        return True

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._primary)


def test_chat_in_a_terminal(folder: str, terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    argv = [*COMMAND, "chat", "--model", folder, "--max-tokens", "900", "--ignore-eos"]
    user = terminal([*argv, "--max-context", "1000"])
    user.wait_for("/help lists commands")
    user.wait_for("> ")
    user.type("/colour on\n")
    assert "\x1b[36mdrafted" in user.wait_for("chosen by the target")
    user.wait_for("> ")
    user.type("hello\n")
    assert "\x1b[33m" in user.wait_for(r"\x1b7.*accepted length")  # the live line
    user.process.send_signal(signal.SIGINT)
    user.wait_for("interrupted")
    user.wait_for("> ")
    user.type("/nope\n")
    user.wait_for("There is no command /nope")
    user.type("/stats\n")
    user.wait_for(r"1 answer \(1 interrupted\)")
    user.wait_for("> ")
    user.type('"""two\n')
    user.wait_for(r"\.\.\. ")
    user.interrupt_until("What was begun is dropped")
    user.wait_for("> ")
    user.type("/set max-tokens 3\n")
    user.wait_for("> ")
    user.type('"""two\n')
    user.wait_for(r"\.\.\. ")
    user.type('lines"""\n')
    user.wait_for(r"cut off by --max-tokens 3; /set max-tokens 12")
    user.wait_for("> ")
    user.type("\x04")
    assert user.process.wait(timeout=60) == 0
    history = tmp_path / "chat_history"
    assert "/set max-tokens 3" in history.read_text() and history.stat().st_mode & 0o777 == 0o600


def rows(shown: str) -> list[str]:
    """What stood on the screen's rows, each time it was drawn, without colours and moves."""
    return re.sub(r"\x1b(\[[\d;?]*[A-Za-z]|.)", "", shown).replace("\r", "\n").split("\n")


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_what_is_loading_shows_at_once_and_fits(
    folder: str, terminal: Callable[..., Terminal], columns: int
) -> None:
    argv = [*COMMAND, "generate", PROMPT, "--model", folder, "--max-tokens", "8", "--ignore-eos"]
    user = terminal(argv, columns)
    user.wait_for("Loading …")
    before_torch = time.monotonic() - user.began
    shown = user.wait_to_end()
    loading = [row for row in rows(shown) if row.startswith("Loading")]
    assert len(loading) >= 3 and "100%" in loading[-1]
    assert all(len(row) < columns for row in loading)
    assert before_torch < (time.monotonic() - user.began) / 2  # long before the model is there
    assert shown.index("Loading") < shown.index("Cut off by --max-tokens 8")
    last_drawn = shown.rindex("100%")
    assert shown[last_drawn + 4 :].startswith("\r\x1b[K")  # and it is taken away again


@pytest.mark.alone  # a busy neighbour's share of the processor is no part of a start
def test_what_is_loading_shows_within_0_3_seconds(
    folder: str, terminal: Callable[..., Terminal]
) -> None:
    seconds = []
    for _ in range(5):
        user = terminal([*COMMAND, "generate", PROMPT, "--model", folder])
        user.wait_for("Loading …")
        seconds.append(time.monotonic() - user.began)
    assert sorted(seconds)[2] < 0.3


def test_no_colour_means_no_colour(folder: str, terminal: Callable[..., Terminal]) -> None:
    argv = [*COMMAND, "generate", PROMPT, "--model", folder, "--max-tokens", "8"]
    shown = terminal(argv, 80, NO_COLOR="1", TERM="dumb").wait_to_end()
    assert "\x1b" not in shown and "Loading" not in shown and "8 tokens" in shown


def test_a_pipe_gets_nothing_but_the_answer(folder: str) -> None:
    argv = [*COMMAND, "generate", "--model", folder, "--max-tokens", "8", "--ignore-eos"]
    done = subprocess.run(argv, input=PROMPT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("\n")
    assert "Loading" not in done.stderr and "\x1b" not in done.stdout + done.stderr


def test_without_a_prompt_a_terminal_is_told_at_once(terminal: Callable[..., Terminal]) -> None:
    user = terminal([*COMMAND, "generate"], 200)
    assert "flashdraft: error: There is no prompt. Type one: flashdraft" in user.wait_to_end()
    assert user.process.returncode == 2


def test_ctrl_c_in_a_terminal_still_shows_what_was_made(
    folder: str, terminal: Callable[..., Terminal]
) -> None:
    argv = [*COMMAND, "generate", PROMPT, "--model", folder, "--ignore-eos", "--max-tokens", "900"]
    user = terminal([*argv, "--draft", "none"], 80)
    user.wait_for(r"\d+ tokens · .*tok/s")  # the live line
    user.process.send_signal(signal.SIGINT)
    user.wait_for(r"Interrupted\.\r\n.*\r\n\d+ tokens · .* accepted length")
    user.wait_to_end()
    assert user.process.returncode == 130


def test_serve_in_a_terminal_is_for_people(folder: str, terminal: Callable[..., Terminal]) -> None:
    user = terminal([*COMMAND, "serve", folder, "--port", "0", "--dtype", "float32"], 80)
    user.wait_for(r"chat in a browser: http://127\.0\.0\.1:\d+/")
    port = re.search(r":(\d+)/", user.shown)
    assert port is not None and f"flashdraft connect --url http://127.0.0.1:{port[1]}" in (
        user.wait_for("Ctrl-C")
    )
    connection = http.client.HTTPConnection("127.0.0.1", int(port[1]), timeout=60)
    body = json.dumps({"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    assert connection.getresponse().read()
    connection.request("GET", "/nothing%0A12:00:00%20%20GET%20/x%1b[2J")
    connection.getresponse().read()
    connection.close()
    line = user.wait_for(r"POST /v1/completions  200  .* tokens.*accepted length \d\.\d\d")
    assert "{" not in line
    assert "\x1b[2J" not in user.wait_for(r"GET /nothing\\n12:00:00  GET /x\\x1b\[2J  404")
    user.process.send_signal(signal.SIGINT)
    assert "Finishing the running answers" in user.wait_to_end()
    assert user.process.returncode == 0


# -- the default model -------------------------------------------------------------------------


@pytest.mark.weights
def test_the_default_model_answers(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-tokens", "24", "--json"]
    assert main(["generate", "What is the capital of France?", *flags]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "Paris" in answer["text"]
    assert main(["models", "--json"]) == 0
    models = {m["name"]: m for m in json.loads(capsys.readouterr().out)["models"]}
    assert models[DEFAULT_MODEL]["cached"]
