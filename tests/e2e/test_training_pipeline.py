"""`flashdraft train` from a tiny random target alone to a drafter that the engine runs."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashdraft import LLM, SamplingParams
from flashdraft.cli import build_parser
from flashdraft.errors import CheckpointError, RequestError, TrainingError
from flashdraft.kernels.interface import Kernels
from flashdraft.kernels.kinds import AS_STORED, Scheme, WeightOptions
from flashdraft.kernels.select import select_kernels
from flashdraft.models.drafter.loading import save_drafter
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.train import pipeline
from flashdraft.train.data.answers import fingerprint
from flashdraft.train.data.regenerate import load_target
from flashdraft.train.evaluate import Evaluation
from flashdraft.train.fit.plot import read_log
from flashdraft.train.fit.schedule import TrainConfig
from flashdraft.train.fit.state import latest, read_state
from flashdraft.train.initial import new_drafter
from flashdraft.train.job import TrainingJob
from flashdraft.train.pipeline import train_drafter
from flashdraft.train.stages import answering, training
from tests.tiny import CONFIGS, END_OF_TURN, make_tiny_checkpoint

ROOT = Path(__file__).parents[2]
SMALL = ["--layers", "2", "--block-size", "4", "--rows", "256", "--blocks", "32"]
SMALL += ["--lr", "5e-3", "--log-every", "5", "--evaluate-every", "10", "--device", "cpu"]
ANSWERING = ["--max-tokens", "24", "--max-prompt-tokens", "128"]

SCRIPT = """
import sys
from flashdraft.cli import build_parser
arguments = build_parser().parse_args(sys.argv[1:])
sys.exit(arguments.run(arguments))
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talking_checkpoint(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    words = ("quick", "brown", "fox", "lazy", "dog", "tree")
    texts = [f"{a} {b} {a}?" for a in words for b in words]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def make_talking_checkpoint(folder: Path) -> Path:
    """The tiny target with a head of its own that writes letters and sometimes ends its turn."""
    make_tiny_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tokenizer = Tokenizer.from_checkpoint(folder)
    assert tokenizer is not None
    texts = [tokenizer.decode([index]) for index in range(config["vocab_size"])]
    spoken = [text.strip().isascii() and text.strip().isalpha() for text in texts]
    spoken[END_OF_TURN] = True
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    head = 0.6 * torch.randn(tensors["model.embed_tokens.weight"].shape, generator=generator)
    head[END_OF_TURN] *= 2  # most turns end soon
    tensors["lm_head.weight"] = head * torch.tensor(spoken).unsqueeze(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def run_command(*arguments: object) -> dict[str, Any]:
    """What `flashdraft train … --json FILE` writes."""
    out = Path(str(arguments[arguments.index("--out") + 1])).with_suffix(".json")
    answering = [] if "--answers" in arguments else ANSWERING
    flags = [*map(str, arguments), *SMALL, *answering, "--json", str(out)]
    parsed = build_parser().parse_args(["train", *flags])
    assert parsed.run(parsed) == 0
    content: dict[str, Any] = json.loads(out.read_text())
    return content


def wait_for_log(process: subprocess.Popen[bytes], out: Path, num_rows: int) -> None:
    """Return when the running command has logged so much."""
    deadline = time.monotonic() + 120
    while len(read_log(out / "run")) < num_rows:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def test_from_the_target_alone_to_a_drafter_that_drafts(target: Path, tmp_path: Path) -> None:
    begin = time.perf_counter()
    out = tmp_path / "out"
    arguments = (target, "--out", out, "--synth-count", 40, "--steps", 30)
    result = run_command(*arguments)
    assert time.perf_counter() - begin < 120
    assert len((out / "prompts.jsonl").read_text().splitlines()) == 40
    rows = [row for row in read_log(out / "run") if "loss" in row]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert (out / "run" / "plot.svg").is_file()
    assert result["held_out"]["accepted_length"] >= 1.0
    assert result["held_out"]["by_source"].keys() == {"synth"}
    stored = json.loads((out / "drafter" / "flashdraft.json").read_text())
    assert stored["data"] == result["data"] and len(stored["data"][0]["sha256"]) == 64
    assert stored["recipe"]["train"]["steps"] == 30
    config = json.loads((out / "drafter" / "config.json").read_text())
    assert config["dflash_config"]["any_width"]  # half of the blocks were cut

    # the engine loads it, and its answers stay the target's own
    llm = LLM(target, draft=out / "drafter", verify=3, device="cpu", dtype="float32")
    plain = LLM(target, draft=None, device="cpu", dtype="float32")
    params = SamplingParams(max_tokens=24)
    prompt = llm.chat_prompt([{"role": "user", "content": "the old tree"}])
    drafted = llm.generate([prompt], params)[0]
    assert drafted.token_ids == plain.generate([prompt], params)[0].token_ids
    assert drafted.stats.drafted > 0

    # the same command again has nothing left to do
    before = (out / "drafter" / "model.safetensors").read_bytes()
    run_command(*arguments)
    assert (out / "drafter" / "model.safetensors").read_bytes() == before


def test_own_prompts_then_own_answers_then_an_existing_drafter(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    first = run_command(target, "--out", tmp_path / "a", "--prompts", prompts, "--epochs", 8)
    assert not (tmp_path / "a" / "prompts.jsonl").exists()
    answers = ("--answers", tmp_path / "a" / "answers")
    again = run_command(target, "--out", tmp_path / "b", *answers, "--epochs", 8)
    assert again["data"] == first["data"]
    assert again["held_out"] == first["held_out"]
    job = TrainingJob(
        target=str(target),
        out=tmp_path / "c",
        answers=(str(tmp_path / "a" / "answers"),),
        init_from=first["drafter"],
        device="cpu",
        train=TrainConfig(steps=5, rows=256, blocks=32, log_every=1),
    )
    train_drafter(job)
    fresh, warm = read_log(tmp_path / "b" / "run")[0], read_log(tmp_path / "c" / "run")[0]
    assert warm["loss"] < fresh["loss"]


def test_a_head_is_added_to_a_drafter_and_a_worse_one_is_not_written(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run_command(target, "--out", tmp_path / "plain", "--prompts", prompts, "--steps", 8)
    settings = TrainConfig(rows=256, blocks=32, learning_rate=5e-3, steps=8, log_every=4)
    job = TrainingJob(
        str(target),
        tmp_path / "headed",
        answers=(str(tmp_path / "plain" / "answers"),),
        init_from=plain["drafter"],
        head="markov",
        head_rank=8,
        held_out=3,
        device="cpu",
        train=settings,
    )
    same = {"accepted_length": 99.0}
    folder = tmp_path / "headed" / "drafter"
    results = iter([same, {"accepted_length": 98.0}, same, same])
    monkeypatch.setattr(training.Training, "_evaluate", lambda self, step: dict(next(results)))
    with pytest.raises(TrainingError, match="it is worse, and was not written"):
        train_drafter(job)
    assert not folder.exists()
    result = train_drafter(dataclasses.replace(job, out=tmp_path / "again"))
    assert result["before"] == same
    written = json.loads((tmp_path / "again" / "drafter" / "config.json").read_text())
    assert written["dflash_config"]["markov_rank"] == 8
    with LLM(str(target), draft=result["drafter"], device="cpu") as llm:
        greedy = SamplingParams(max_tokens=16)
        drafted = llm.generate(["quick fox?"], greedy)[0]
        with LLM(str(target), draft=None, device="cpu") as other:
            assert other.generate(["quick fox?"], greedy)[0].token_ids == drafted.token_ids


def test_a_state_goes_on_with_other_data_and_says_so(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    """Weights alone, from before the decay; with too few cut blocks for `any_width`."""
    run_command(target, "--out", tmp_path / "a", "--prompts", prompts, "--steps", 20)
    state = tmp_path / "a" / "run" / "state-00000016"
    job = TrainingJob(
        target=str(target),
        out=tmp_path / "b",
        answers=(str(tmp_path / "a" / "answers"),),
        init_from=str(state),
        held_out=5,
        device="cpu",
        train=TrainConfig(steps=5, rows=128, blocks=16, log_every=1, short_share=0.1),
    )
    result = train_drafter(job)
    origin = {"name": state.name, "fingerprint": fingerprint(str(state))}
    assert result["recipe"]["init_from"] == origin
    assert result["target"]["dtype"] == "float32"
    losses = [read_log(tmp_path / name / "run")[0]["loss"] for name in ("a", "b")]
    assert losses[1] < losses[0]
    config = json.loads((tmp_path / "b" / "drafter" / "config.json").read_text())
    assert config["block_size"] == 4 and "any_width" not in config["dflash_config"]

    with pytest.raises(TrainingError, match="dtype = 'float32', this one has 'bfloat16'"):
        train_drafter(dataclasses.replace(job, dtype="bfloat16"))


def test_the_formats_of_the_targets_weights_are_recorded_and_not_mixed(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, but for the arithmetic: a CPU's kernels that say they quantise."""

    def select(device: Any, dtype: str, weights: WeightOptions = AS_STORED) -> Kernels:
        kernels = select_kernels(device, dtype)
        if weights.quantize == "int4":
            kernels.quantize, kernels.quantize_head = Scheme.INT4, Scheme.INT8
        return kernels

    def load(model: Path, device: Any, dtype: str, weights: WeightOptions) -> LLM:
        llm = load_target(model, device, dtype)
        if weights.quantize == "int4":
            llm.kernels.quantize, llm.kernels.quantize_head = Scheme.INT4, Scheme.INT8
        return llm

    monkeypatch.setattr(pipeline, "select_kernels", select)
    monkeypatch.setattr(answering, "load_target", load)
    options = ("--prompts", prompts, "--steps", 2)
    result = run_command(target, "--out", tmp_path / "a", *options, "--quantize", "int4")
    said = {"quantize": "int4", "quantize_head": "int8"}
    assert said.items() <= result["target"].items()
    state = latest(tmp_path / "a" / "run")
    assert state is not None and said.items() <= read_state(state).settings.items()
    with pytest.raises(TrainingError, match="quantize: int4 there, None now"):
        run_command(target, "--out", tmp_path / "a", *options)
    answers = ("--answers", tmp_path / "a" / "answers", "--steps", 2)
    with pytest.raises(TrainingError, match="Give --quantize int4 --quantize-head int8 as then"):
        run_command(target, "--out", tmp_path / "b", *answers)
    again = run_command(target, "--out", tmp_path / "b", *answers, "--quantize", "int4")
    assert again["data"] == result["data"]


@pytest.mark.parametrize("family", [family for family in CONFIGS if family != "llama"])
def test_every_family_can_be_a_target(family: str, prompts: Path, tmp_path: Path) -> None:
    """From prompts to an exported drafter that the family then drafts with, to the same tokens."""
    target = make_tiny_checkpoint(tmp_path / "target", family)
    options = ("--prompts", prompts, "--steps", 5)
    result = run_command(target, "--out", tmp_path / "out", *options)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    answers = []
    for draft in (None, result["drafter"]):
        with LLM(target, draft=draft, verify=3, device="cpu", dtype="float32") as llm:
            answers.append(llm.generate([[5, 6, 7]], params)[0])
    assert answers[1].stats.drafted > 0 == answers[0].stats.drafted
    assert answers[1].token_ids == answers[0].token_ids


def test_excluded_prompts_are_not_answered(target: Path, prompts: Path, tmp_path: Path) -> None:
    rows = prompts.read_text().splitlines()
    (tmp_path / "test.jsonl").write_text("\n".join(rows[:8]) + "\n")
    arguments = ("--prompts", prompts, "--exclude", tmp_path / "test.jsonl", "--steps", 1)
    result = run_command(target, "--out", tmp_path / "out", *arguments)
    data = result["data"][0]
    assert data["num_answers"] + data["held_out"] == len(rows) - 8


def test_an_interrupted_command_resumes(target: Path, prompts: Path, tmp_path: Path) -> None:
    options = ("--prompts", prompts, "--steps", 40, "--save-every", 0)
    out, whole = tmp_path / "out", tmp_path / "whole"
    command = [sys.executable, "-c", SCRIPT, "train", target, "--out", out, *options]
    command += [*SMALL, *ANSWERING]
    process = subprocess.Popen(list(map(str, command)), cwd=ROOT)
    try:
        wait_for_log(process, out, 2)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    finally:
        process.kill()
    stopped = latest(out / "run")
    assert stopped is not None and 10 <= read_state(stopped).step < 40
    run_command(target, "--out", out, *options)
    run_command(target, "--out", whole, *options)
    files = [folder / "drafter" / "model.safetensors" for folder in (out, whole)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_goes_on(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = (target, "--out", out, "--prompts", prompts, "--save-every", 0, "--steps")
    command = [sys.executable, "-c", SCRIPT, "train", *options, 1_000_000]
    command += [*SMALL, *ANSWERING]
    process = subprocess.Popen(list(map(str, command)), cwd=ROOT)
    try:
        wait_for_log(process, out, 2)
        with pytest.raises(TrainingError, match=rf"/out is being .* by process {process.pid} "):
            run_command(*options, 1)
        wait_for_log(process, out, len(read_log(out / "run")) + 2)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    finally:
        process.kill()
    steps = [row["step"] for row in read_log(out / "run") if "loss" in row]
    assert steps == sorted(set(steps)), "one run's rows alone"
    stopped = latest(out / "run")
    assert stopped is not None and read_state(stopped).step >= steps[-1]


def test_the_held_out_answers_are_walked_to_their_limit(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine drafts no further than an answer's limit, so the evaluation must know it."""
    limits, evaluate = [], training.evaluate_offline

    def record(*arguments: Any, max_tokens: int | None = None, **options: Any) -> Evaluation:
        limits.append(max_tokens)
        return evaluate(*arguments, max_tokens=max_tokens, **options)

    monkeypatch.setattr(training, "evaluate_offline", record)
    run_command(target, "--out", tmp_path / "out", "--prompts", prompts, "--steps", 1)
    assert set(limits) == {24}  # --max-tokens of ANSWERING


def test_torchrun_trains_in_two_processes_and_writes_once(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    script, out = tmp_path / "run.py", tmp_path / "out"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [script, "train", target, "--out", out, "--prompts", prompts, "--steps", 10]
    command += [*SMALL, *ANSWERING]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(list(map(str, command)), check=True, env=environment, cwd=ROOT, timeout=240)
    rows = [row["step"] for row in read_log(out / "run") if "loss" in row]
    assert rows == [5, 10]
    record = json.loads((out / "drafter" / "flashdraft.json").read_text())
    assert record["held_out"]["accepted_length"] >= 1.0


def test_a_drafter_of_another_target_is_refused_with_both_shapes(
    target: Path, tmp_path: Path
) -> None:
    raw = json.loads((target / "config.json").read_text())
    other = make_tiny_checkpoint(tmp_path / "other")
    (other / "config.json").write_text(json.dumps(raw | {"hidden_size": 48}))
    config = open_checkpoint(other).config
    save_drafter(new_drafter(config, mask_token_id=0, layers=1), tmp_path / "drafter")
    job = TrainingJob(str(target), tmp_path / "out", init_from=str(tmp_path / "drafter"))
    with pytest.raises(CheckpointError, match=r"hidden size is 48, the target's is 32"):
        train_drafter(job)
    assert not (tmp_path / "out").exists(), "refused before anything was done"


def test_answers_of_another_target_are_refused(target: Path, prompts: Path, tmp_path: Path) -> None:
    run_command(target, "--out", tmp_path / "a", "--prompts", prompts, "--steps", 1)
    small = make_talking_checkpoint(tmp_path / "small")
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    tensors = load_file(small / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:100].clone()
    save_file(tensors, small / "model.safetensors", metadata={"format": "pt"})
    answers = (str(tmp_path / "a" / "answers"),)
    with pytest.raises(TrainingError, match=r"vocabulary of .* has 100: they are another target's"):
        train_drafter(TrainingJob(str(small), tmp_path / "b", answers=answers, device="cpu"))


def test_contradictions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="layers cannot be chosen with init_from"):
        TrainingJob("target", tmp_path, init_from="drafter", layers=3)
    with pytest.raises(RequestError, match="prompts and exclude would not be used"):
        TrainingJob("target", tmp_path, answers=("a",), prompts=("p",))
