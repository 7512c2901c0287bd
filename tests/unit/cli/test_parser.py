"""What was typed wrongly is answered in words: one line, the flag as typed, what was meant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashdraft.bench.plan.gpus import find_card
from flashdraft.cli import build_parser, main
from flashdraft.cli.parser import in_flags
from flashdraft.errors import CapacityError, CheckpointError, did_you_mean
from tests.tiny import make_tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run: a tiny model, and files that are none."""
    folder = tmp_path_factory.mktemp("wrong")
    make_tiny_checkpoint(folder / "tiny")
    (folder / "empty").mkdir()
    (folder / "bad.jsonl").write_text("{bad\n")
    (folder / "bad.json").write_text("[1, 2")
    (folder / "none.jsonl").write_text("")
    (folder / "odd.jsonl").write_text('{"prompt": 5}\n')
    (folder / "bytes.jsonl").write_bytes(b"\xff\xfe\n")
    return folder


def complaint(
    words: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> str:
    """What a wrong command line is answered with: one line, status 2, nothing on stdout."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    argv = [word.replace("~", " ") for word in words.split()]
    try:
        code: object = main(["" if word == "''" else word for word in argv])
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "", captured
    assert captured.err.startswith("flashdraft: error: ") and captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("modles", "no command 'modles'. Did you mean models?"),
        ("bench --taks gsm8k", "has no option --taks. Did you mean --tasks NAMES?"),
        ("gen", "Did you mean generate?"),
        ("doctor --verify-files folder", "does not take 'folder'; a model is named by --model"),
        ("bench compre a b", "Did you mean compare?"),
        ("generate x --modle y", "no option --modle. Did you mean --model NAME?"),
        ("generate x --temp 1", "Did you mean --temperature X?"),
        ("generate x --temperture=1", "Did you mean --temperature X?"),
        ("serve --max_batch 2", "Did you mean --max-batch N?"),
        ("plan --quantize int4", "no option --quantize; it is one of generate,"),
        ("plan --model x", "no option --model; name MODEL without one"),
        ("plan --modle x", "no option --modle; name MODEL without one"),
        ("train --target x --out y", "name TARGET without one"),
        ("models extra", "does not take 'extra'"),
        ("serve a b", "does not take 'b'"),
        ("serve --engine vlm", "Did you mean vllm?"),
        ("bench --sampling gredy", "Did you mean greedy?"),
        ("generate x --dtype bf16", "--dtype is 'bf16'; it must be one of auto, float32, bfloat16"),
        ("generate x --dtype bf16", "Did you mean bfloat16?"),
        ("doctor --dtype FP32", "Did you mean float32?"),
        (
            "chat --device gpu",
            "--device is 'gpu'; it must be auto, cpu or cuda. Did you mean cuda?",
        ),
        ("synth --model x --out y --count 1 --device cuda:x", "--device is 'cuda:x'"),
        ("train x --out y --quantize int", "Did you mean int4 or int8?"),
        ("export x --out y --quantize-head fp9", "Did you mean fp8?"),
        (
            "plan --kv-dtype fp",
            "--kv-dtype is 'fp'; it must be one of auto, fp8. Did you mean fp8?",
        ),
        ("plan --kv-keys none", "--kv-keys is 'none'; it must be one of stored, rebuilt."),
        ("pull", "What is missing: MODEL. It reads: flashdraft pull MODEL."),
        ("rm", "What is missing: NAME. It reads: flashdraft rm NAME."),
        ("synth", "What is missing: --model, --out, --count. It reads: flashdraft synth --model"),
        ("export x", "What is missing: --out or --check."),
        ("pull --drfat none", "Did you mean --draft DRAFTER?"),
        ("--verison", "has no option --verison. Did you mean --version?"),
        ("-v", "has no option -v. Did you mean --version?"),
        ("generate x -m tiny", "Did you mean --model NAME?"),
        ("generate why is it", "does not take 'is'; put a prompt of several words in quotes"),
        ("serve x --json", "no option --json; it is one of generate, models"),
        ("download x", "Did you mean pull?"),
        ("remove x", "Did you mean rm?"),
        ("ls", "Did you mean list?"),
        ("rnu", "Did you mean run?"),
        ("ps", "Did you mean list?"),
        ("serve x --max-model-len 9", "Did you mean --max-context N?"),
        ("serve x --gpu-memory-utilization 0.9", "Did you mean --cache-gb"),
        ("serve x --max-num-seqs 9", "Did you mean --max-batch"),
        ("generate x --ctx-size 9", "Did you mean --max-context N?"),
        ("generate x --n-predict=9", "Did you mean --max-tokens N?"),
        ("generate x -n 9", "Did you mean --max-tokens N?"),
        ("generate x -ngl 99", "Did you mean --device"),
        ("chat x --repeat-penalty 2", "Did you mean --repetition-penalty X?"),
        ("serve -hf org/name", "flashdraft serve has no option -hf; name MODEL without one"),
        ("generate x --frequency_penalty 1", "Did you mean --frequency-penalty X?"),
        ("completion bsh", "Did you mean bash?"),
        ("export x --check --out y", "do not go together; drop one."),
        ("train x --out y --epochs 1 --steps 2", "do not go together; drop one."),
        ("generate x --model", "--model needs a value: --model NAME."),
        ("generate x -o", "--output needs a value: --output FILE."),
        ("generate x --top-k many", "--top-k is 'many'; it must be a whole number."),
        ("generate x --top-k 1.5", "--top-k is '1.5'; it must be a whole number."),
        ("generate x --top-p ''", "--top-p is ''; it must be a number."),
        ("plan --gpu h20", "Did you mean h200? For another one give --memory and --bandwidth."),
        ("plan --gpu h2oo", "Did you mean h200? For another one give --memory"),
        ("plan --gpu 6000", "Did you mean a6000 or rtxpro6000 or 6000ada?"),
        ("plan --gpu 5900", "Did you mean 5090?"),
        ("plan --gpu rtx~6000", "Did you mean rtx6000ada?"),
        ("plan --gpu ''", "The GPU '' is not known; known are"),
    ],
)
def test_wrong_words_are_answered_with_what_was_meant(
    words: str,
    said: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert said in complaint(words, folder, capsys, monkeypatch)


VALUES = {
    "generate x --model tiny": (
        "--max-tokens 0",
        "--temperature nan",
        "--temperature -1",
        "--top-p inf",
        "--top-k -3",
        "--min-p 7",
        "--repetition-penalty 0",
        "--presence-penalty 1e9",
        "--frequency-penalty nan",
        "--seed 99999999999999999999999999",
        "--stop ''",
        "--max-context 0",
        "--max-context 99999999999999999999",
        "--cache-gb -1",
        "--cache-gb nan",
        "--cache-gb 1e300",
        "--cache-gb 1e-12",
        "--verify 99",
        "--verify -1",
        "--device cuda:99",
        "--device cpu --quantize int4",
    ),
    "serve tiny": (
        "--port 99999",
        "--port -1",
        "--max-queue -1",
        "--max-pictures -1",
        "--max-batch 0",
        "--max-batch 999999999999999999999",
        "--max-context -1",
        "--cache-gb nan",
        "--host 0.0.0.0",
        "--allow-origin *",
    ),
    "bench --model tiny": (
        "--num-prompts 0",
        "--max-tokens -1",
        "--repeats -1",
        "--data nosuch",
        "--report bad.json/x",
        "--concurrency 0",
    ),
    "plan": ("--context -5", "--concurrency 0", "--memory nan", "--memory 24 --bandwidth -1"),
    "doctor --model tiny": ("--seconds nan", "--temperature nan"),
    "train nosuch --out new": (
        "--epochs nan",
        "--minutes -1",
        "--steps 0",
        "--lr nan",
        "--seed 99999999999999999999999",
        "--held-out -1",
        "--synth-count 0",
        "--max-tokens 0",
        "--max-prompt-tokens 0",
        "--greedy-share 2",
        "--answers-per-prompt 0",
        "--thinking maybe",
        "--rows 0",
        "--blocks -1",
        "--short-share nan",
        "--accumulation 0",
        "--weight-decay -1",
        "--clip 0",
        "--warmup-steps -1",
        "--decay-share 3",
        "--log-every 0",
        "--evaluate-every -1",
        "--save-every -1",
        "--keep-last 0",
    ),
    "synth --model tiny --out new.jsonl": ("--count 0", "--count 1 --slots 0"),
}


@pytest.mark.parametrize(
    ("command", "flags"), [(command, one) for command, all_ in VALUES.items() for one in all_]
)
def test_a_wrong_value_is_refused_in_the_name_of_its_flag(
    command: str,
    flags: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = complaint(f"{command} {flags}", folder, capsys, monkeypatch)
    flag = re.findall(r"--[a-z-]+", flags)[-1]
    assert f"error: {flag}" in said
    assert not re.search(r"\b[a-z]+_[a-z]+\b|\bNone\b|\w=", said), said


FILES = {
    "bench --model tiny --prompts": ("nosuch", "empty", "bad.jsonl", "bytes.jsonl", "odd.jsonl"),
    "train tiny --out new --prompts": ("nosuch", "bad.jsonl", "bytes.jsonl", "none.jsonl"),
    "train tiny --out new --answers": ("nosuch", "bad.json"),
    "synth --model nosuch --count 1 --out": ("empty", "none/x.jsonl"),
    "synth --model nosuch --count 1 --out new.jsonl --exclude": ("nosuch", "bytes.jsonl"),
    "bench compare bad.json": ("bad.json", "empty", "nosuch"),
    "doctor --model tiny --template": ("nosuch", "empty", "bytes.jsonl"),
    "generate x --json": ("empty", "none/x.json"),
    "generate x --draft none --model": ("nosuch", "empty", "bad.json", "''"),
    "plan": ("nosuch", "empty", "bad.json"),
    "export": ("empty --check", "bad.json --check", "empty --out bad.json"),
    "connect --url": ("http://[bad", "''", "http://127.0.0.1:1"),
    "bench --url": ("http://[bad", "http://127.0.0.1:1"),
}


@pytest.mark.parametrize(
    ("command", "file"), [(command, one) for command, all_ in FILES.items() for one in all_]
)
def test_a_file_or_an_address_that_is_none_is_one_line(
    command: str,
    file: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "Errno" not in complaint(f"{command} {file}", folder, capsys, monkeypatch)


@pytest.mark.parametrize("name", ["5090", "RTX 5090", "rtx5090", "GeForce RTX 5090"])
def test_a_card_may_be_named_in_short(name: str) -> None:
    assert find_card(name).title == "RTX 5090 (32 GB)"


FLAGS = {"max_context": "--max-context", "cache_gb": "--cache-gb", "model": "--model"}
FLAGS |= {"verify": "--verify", "device": "--device", "learning_rate": "--lr"}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("max_context is 0; it must be None or 2.", "--max-context is 0; it must be 2."),
        ("Lower max_context or cache_gb.", "Lower --max-context or --cache-gb."),
        ("Use device='cpu'.", "Use --device cpu."),
        ("verify is 99; it must be None ('auto') or 1.", "--verify is 99; it must be auto or 1."),
        ("learning_rate is nan; no.", "--lr is nan; no."),
        ("The model is large; verify it.", "The model is large; verify it."),
        ("my/max_context.json, 'max_context'", "my/max_context.json, 'max_context'"),
    ],
)
def test_names_of_arguments_become_flags(said: str, told: str) -> None:
    assert in_flags(CapacityError(said), FLAGS) == told


def test_what_a_checkpoint_says_is_not_said_of_flags() -> None:
    said = "config.json: max_context is 3."
    assert in_flags(CheckpointError(said), FLAGS) == said


def test_nothing_is_suggested_for_what_is_close_to_nothing() -> None:
    assert did_you_mean("zzz", ["models", "plan"]) == did_you_mean("", ["models"]) == ""


def test_no_command_takes_half_a_flag() -> None:
    parser = build_parser()
    assert parser.commands and not any(one.allow_abbrev for one in parser.commands.values())
