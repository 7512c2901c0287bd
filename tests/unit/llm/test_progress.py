"""The bar of a batch: on terminals of any width, and nowhere else unless it is asked for."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashdraft import LLM, SamplingParams
from flashdraft.errors import RequestError
from flashdraft.llm import progress
from tests.tiny import make_tiny_checkpoint

NUM_PROMPTS = 200
SCRIPT = """
import sys
from flashdraft import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", dtype="float32", cache_gb=0.02, draft="ngram", verify=4)
params = SamplingParams(max_tokens=12, ignore_eos=True)
found = llm.generate([f"the fox {number}" for number in range(200)], params)
print(len(found), len({one.text for one in found}) > 1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("target"), "qwen3")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu", dtype="float32", cache_gb=0.02, draft="ngram", verify=4)


def on_a_terminal(folder: Path, columns: int, **environment: str) -> tuple[str, str]:
    """What a batch writes to a terminal on stderr, and to a pipe on stdout."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError as error:  # the other end is closed
            assert error.errno == errno.EIO
            break
        if not data:
            break
        shown += data
    os.close(ours)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, shown
    *_, answering = shown.decode().rpartition("\x1b[K")  # the line of what is loading goes before
    return answering, out.decode()


def width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in text)


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_a_bar_fits_the_terminal(folder: Path, columns: int) -> None:
    shown, out = on_a_terminal(folder, columns)
    assert out.split() == [str(NUM_PROMPTS), "True"]
    frames = [frame for frame in re.split(r"[\r\n]+", shown) if frame.strip()]
    assert all(width(frame) <= columns for frame in frames), max(frames, key=width)
    last = frames[-1]
    assert re.search(r"\b200/200\b.*\d+ tok/s, \d\.\d\d a step", last), last
    assert ("Answering: 100%" in last) == (columns >= 70)
    assert last.count("█") >= 8, "the bar itself has room"
    assert shown.count("\n") == 1 and shown.endswith("\n"), "one line, which stays"
    assert "\x1b" not in shown, "neither colours nor moves"


def test_without_colours_it_is_the_same(folder: Path) -> None:
    shown, _ = on_a_terminal(folder, 80, NO_COLOR="1")
    assert "200/200" in shown and "\x1b" not in shown


def test_a_terminal_that_redraws_nothing_gets_nothing(folder: Path) -> None:
    shown, out = on_a_terminal(folder, 80, TERM="dumb")
    assert (
        "Answering" not in shown
        and "/200" not in shown
        and out.split() == [str(NUM_PROMPTS), "True"]
    )


def test_nothing_is_written_to_a_pipe(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, timeout=120
    )
    assert done.stderr == "" and done.stdout.split() == [str(NUM_PROMPTS), "True"]


# -- in this process -------------------------------------------------------------------------------

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


class Terminal(io.StringIO):
    """A stderr that says it is one."""

    def isatty(self) -> bool:
        return True


class Hung(Terminal):
    """Its window has been closed."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def watch(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Put a terminal in stderr's place; in the test itself, for pytest replaces it before."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def test_one_prompt_has_no_bar_and_several_answers_to_it_neither(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = watch(monkeypatch)
    llm.generate("a", PARAMS)
    llm.generate("a", SamplingParams(n=3, temperature=1.0, max_tokens=6))
    llm.chat([{"role": "user", "content": "a"}], PARAMS)
    list(llm.stream("a", PARAMS))
    assert terminal.getvalue() == ""
    llm.chat([[{"role": "user", "content": "a"}]] * 2, PARAMS)
    assert "2/2" in terminal.getvalue()


def test_it_can_be_switched_off(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watch(monkeypatch)
    assert len(llm.generate(["a", "b"], PARAMS, use_tqdm=False)) == 2
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("broken", [Hung(), None, "closed"])
def test_a_terminal_that_has_gone_costs_no_answers(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, broken: Any
) -> None:
    monkeypatch.setattr(progress, "REFRESH_S", 0.0)
    stream = Terminal() if broken == "closed" else broken
    if broken == "closed":
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    assert len(llm.generate(["a", "b"], PARAMS)) == 2


class Counting:
    """A class of the user's own, like tqdm's."""

    made: list[Counting] = []

    def __init__(self, **settings: Any) -> None:
        self.settings, self.num, self.postfixes, self.is_closed = settings, 0, [], False
        Counting.made.append(self)

    def update(self, count: int) -> None:
        self.num += count

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.postfixes.append(text)

    def refresh(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


def test_a_class_of_ones_own_counts_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REFRESH_S", 0.0)
    Counting.made.clear()
    llm.generate(["a", "b", "c"], PARAMS, use_tqdm=Counting)
    llm.generate("a", PARAMS, use_tqdm=Counting)
    three, one = Counting.made
    assert (three.num, three.settings["total"], three.is_closed) == (3, 3, True)
    assert (one.num, one.settings["total"], one.is_closed) == (1, 1, True)
    assert re.fullmatch(r"\d+ tok/s, \d\.\d\d a step", three.postfixes[-1])
    assert len(three.postfixes) > 3


def test_the_accepted_length_is_that_of_the_answers(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    Counting.made.clear()
    found = llm.generate(["the dog the dog", "a fox"], PARAMS, use_tqdm=Counting)
    tokens = sum(one.stats.decode_tokens for one in found)
    steps = sum(one.stats.steps for one in found)
    assert f"{tokens / steps:.2f} a step" in Counting.made[0].postfixes[-1]


def test_a_bar_of_a_batch_that_fails_is_closed(llm: LLM) -> None:
    Counting.made.clear()
    with pytest.raises(RequestError):
        llm.generate(["a", ""], PARAMS, use_tqdm=Counting)
    assert [bar.is_closed for bar in Counting.made] == [True]
    assert not llm.engine.has_work


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_anything_else_is_refused(llm: LLM, value: Any) -> None:
    with pytest.raises(RequestError, match=f"use_tqdm is {value!r}; it must be True, False or"):
        llm.generate(["a", "b"], PARAMS, use_tqdm=value)


def test_a_notebook_without_widgets_gets_a_line_of_text(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    kernel = SimpleNamespace(IPKernelApp=SimpleNamespace(initialized=lambda: True))
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setitem(sys.modules, "ipykernel.kernelapp", kernel)
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    llm.generate(["a", "b"], PARAMS)
    assert "2/2" in stream.getvalue() and "a step" in stream.getvalue()
