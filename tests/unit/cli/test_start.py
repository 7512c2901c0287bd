"""The command line starts fast: help, mistakes, `plan`, `models` and `list` load no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

import flashdraft
from flashdraft.cli import COMMANDS, OTHER_NAMES, build_parser, commands, flags
from tests.tiny import make_tiny_checkpoint, make_tiny_drafter
from tests.unit.models.gguf.factory import LLAMA, Types, random_values, write_gguf
from tests.unit.models.packed.test_compressed import write_model

# runs a command as its script does, then says which modules were loaded for it
DRIVER = """
import json, sys
from flashdraft.cli import main
try:
    code = main(sys.argv[2:])
except SystemExit as end:
    code = end.code
with open(sys.argv[1], "w") as report:
    json.dump([code, sorted(name for name in sys.modules if "." not in name)], report)
"""
WRONG = {  # what is typed, and what is said to it
    "genrate": "generate",
    "--versoin": "Did you mean --version?",
    "plan --gpuu h200": "--gpu",
    "models --jsn": "--json",
    "pull": "What is missing: MODEL",
    "rm": "What is missing: NAME",
    "list --jsn": "--json",
    "generate hello --temprature 1": "--temperature",
    "serve --prot 80": "--port",
    "train x --out y --leyers 2": "--layers",
    "bench --tsaks gsm8k": "--tasks",
    "doctor --seconsd 3": "--seconds",
    "synth --cuont 3": "--count",
    "export x --out y --layuot zlab": "--layout",
    "connect --clinet curl": "--client",
    "plan --api-key x": "one of serve, connect, bench",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_tiny_checkpoint(folder / "tiny")
    make_tiny_drafter(folder / "drafter")
    (folder / "few_bits").mkdir()
    write_model(folder / "few_bits", "gemma4_moe", "int4")
    tensors = {"token_embd.weight": random_values(96, 64)}
    tensors |= {f"blk.{index}.attn_norm.weight": random_values(64) for index in range(2)}
    write_gguf(folder / "tiny.gguf", "llama", LLAMA, tensors, {"token_embd.weight": Types.Q4_0})
    return folder


def start(folder: Path, words: list[str]) -> tuple[int, set[str], str]:
    """The exit code of a command, the packages that it loaded, and what it said."""
    report = folder / "report.json"
    command = [sys.executable, "-c", DRIVER, str(report), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert report.exists(), done.stderr
    code, packages = json.loads(report.read_text())
    report.unlink()
    return code, set(packages), done.stdout + done.stderr


@pytest.mark.parametrize(
    "typed",
    [
        "--version",
        "--help",
        *(f"{name} --help" for name in COMMANDS),
        "bench compare --help",
        "plan google/gemma-4-31B-it --gpu h200",
        "plan google/gemma-4-26B-A4B-it --gpu rtx5090 --json",
        "plan",
        "plan tiny --draft drafter --gpu h100 --context 64",
        "plan few_bits --gpu h100 --context 64",
        "plan tiny.gguf --gpu h100 --context 16",
        "models",
        "models --json",
        "list",
        "list --json",
        "completion bash",
    ],
)
def test_loads_no_torch(folder: Path, typed: str) -> None:
    code, packages, said = start(folder, typed.split())
    assert (code, said.splitlines()[:1] != []) == (0, True), said
    assert not {"torch", "numpy", "tokenizers", "llguidance"} & packages


@pytest.mark.parametrize("typed", WRONG)
def test_mistakes_load_no_torch(folder: Path, typed: str) -> None:
    code, packages, said = start(folder, typed.split())
    assert code == 2 and WRONG[typed] in said, said
    assert "torch" not in packages


def test_the_version_loads_nothing_but_the_frame(folder: Path) -> None:
    _, packages, said = start(folder, ["--version"])
    assert said == f"flashdraft {flashdraft.__version__}\n"
    assert not packages & {"huggingface_hub", "safetensors", "asyncio", "tqdm"}


def test_the_table_of_commands_is_that_of_the_modules() -> None:
    declared = {module.name for module in iter_modules(flags.__path__)}
    assert declared == COMMANDS.keys()
    for name in COMMANDS:
        assert callable(import_module(f"{flags.__name__}.{name}").add_arguments)
        assert callable(import_module(f"{commands.__name__}.{name}").run)


def test_the_help_has_a_line_for_every_command() -> None:
    shown = build_parser().format_help()
    for name, text in COMMANDS.items():
        names = [name, *(f"({one})" for one in OTHER_NAMES.get(name, ()))]
        assert any(line.split() == [*names, *text.split()] for line in shown.splitlines()), name


def test_the_package_loads_torch_with_its_llm() -> None:
    script = (
        "import sys, flashdraft; assert 'torch' not in sys.modules; "
        "assert {'LLM', 'SamplingParams', '__version__'} <= set(dir(flashdraft)); "
        "from flashdraft import LLM, SamplingParams; assert 'torch' in sys.modules; "
        "assert flashdraft.LLM is LLM is sys.modules['flashdraft.llm'].LLM"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_the_plugin_of_vllm_loads_no_torch_of_ours() -> None:
    script = (
        "import sys; from flashdraft.external.vllm_plugin import register; "
        "assert callable(register); assert not {'torch', 'flashdraft.llm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
