"""Regeneration: the target's own answers, all of them, once each, whatever interrupts."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashdraft import LLM, SamplingParams
from flashdraft.errors import CapacityError, TrainingError
from flashdraft.interrupts import terminate_as_interrupt
from flashdraft.kernels.kinds import Scheme, WeightOptions
from flashdraft.train.data import regenerate as module
from flashdraft.train.data.answers import AnswerSet, fingerprint
from flashdraft.train.data.decode import BulkDecoder
from flashdraft.train.data.prompts import Prompt
from flashdraft.train.data.regenerate import find_loop, load_target, prompt_ids, regenerate
from flashdraft.train.data.settings import AnswerSettings
from flashdraft.train.lock import sole_writer
from tests.tiny import make_tiny_checkpoint

PROMPTS = [Prompt.of(f"the fox {i} and the dog", "odd" if i % 2 else "even") for i in range(12)]
SETTINGS = AnswerSettings(max_tokens=24, max_prompt_tokens=60)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load_target(make_tiny_checkpoint(tmp_path_factory.mktemp("tiny")), "cpu", "float32")


def by_prompt(found: AnswerSet) -> dict[tuple[int, ...], list[list[int]]]:
    examples: dict[tuple[int, ...], list[list[int]]] = {}
    for i in range(len(found)):
        prompt, answer = found.example(i)
        examples.setdefault(tuple(prompt.tolist()), []).append(answer.tolist())
    return examples


def test_greedy_answers_are_the_engines(llm: LLM, tmp_path: Path) -> None:
    report = regenerate(llm, PROMPTS, tmp_path / "a", SETTINGS, num_slots=5)
    found = AnswerSet.read(tmp_path / "a")
    assert report.num_answers == len(found) == 12 and bool(found.greedy.all())
    assert report.answer_tokens == found.num_answer_tokens
    assert sorted(found.source(i) for i in range(12)) == ["even"] * 6 + ["odd"] * 6
    answers = by_prompt(found)
    full = LLM(llm.model, draft=None, device="cpu", dtype="float32")
    prompts = [full.chat_prompt(list(p.messages)) for p in PROMPTS]
    expected = full.generate(prompts, SamplingParams(24))
    for prompt, generation in zip(prompts, expected, strict=True):
        assert answers[tuple(prompt)] == [generation.token_ids]


def test_a_finished_run_has_nothing_to_do(llm: LLM, tmp_path: Path) -> None:
    regenerate(llm, PROMPTS, tmp_path, SETTINGS)
    files = sorted(tmp_path.iterdir())
    report = regenerate(llm, PROMPTS, tmp_path, SETTINGS)
    assert (report.num_found, report.num_answers) == (12, 0)
    assert sorted(tmp_path.iterdir()) == files


def test_one_folder_has_the_answers_of_one_format(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of a CPU cannot quantise so; what they say they do is what is recorded."""
    regenerate(llm, PROMPTS[:2], tmp_path / "plain", SETTINGS)
    monkeypatch.setattr(llm.kernels, "quantize", Scheme.INT4)
    monkeypatch.setattr(llm.kernels, "quantize_head", Scheme.INT8)
    regenerate(llm, PROMPTS[:2], tmp_path / "coded", SETTINGS)
    with pytest.raises(TrainingError, match="quantize: None there, int4 now; quantize_head: None"):
        regenerate(llm, PROMPTS[:2], tmp_path / "plain", SETTINGS)
    monkeypatch.undo()
    with pytest.raises(TrainingError, match="quantize: int4 there, None now"):
        regenerate(llm, PROMPTS[:2], tmp_path / "coded", SETTINGS)
    found = AnswerSet.read([tmp_path / "plain", tmp_path / "coded"]).authors
    formats = {WeightOptions(), WeightOptions("int4", "int8")}
    assert {author.formats for author in found} == formats


def test_an_interrupted_run_goes_on(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = AnswerSettings(
        max_tokens=24, max_prompt_tokens=60, answers_per_prompt=2, greedy_share=0.5
    )
    regenerate(llm, PROMPTS, tmp_path / "whole", settings)
    run = BulkDecoder.run

    def interrupted(self: BulkDecoder, jobs: Any) -> Iterator[Any]:
        for number, made in enumerate(run(self, jobs)):
            if number == 7:
                raise KeyboardInterrupt
            yield made

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(BulkDecoder, "run", interrupted)
        regenerate(llm, PROMPTS, tmp_path / "torn", settings, num_slots=4)
    assert len(AnswerSet.read(tmp_path / "torn")) == 7
    report = regenerate(llm, PROMPTS, tmp_path / "torn", settings)
    assert (report.num_planned, report.num_found, report.num_answers) == (24, 7, 17)
    torn = by_prompt(AnswerSet.read(tmp_path / "torn"))
    whole = by_prompt(AnswerSet.read(tmp_path / "whole"))
    assert {p: sorted(a) for p, a in torn.items()} == {p: sorted(a) for p, a in whole.items()}


def stop_after(count: int, failure: Any) -> Any:
    """A decoder's `run` that calls `failure` after so many answers."""
    run = BulkDecoder.run

    def stopped(self: BulkDecoder, jobs: Any) -> Iterator[Any]:
        for number, made in enumerate(run(self, jobs)):
            if number == count:
                failure()
            yield made

    return stopped


def test_sigterm_saves_and_says_so(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stopped = stop_after(7, lambda: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(BulkDecoder, "run", stopped)
    with terminate_as_interrupt(), pytest.raises(KeyboardInterrupt):
        regenerate(llm, PROMPTS, tmp_path, SETTINGS, num_slots=4)
    assert len(AnswerSet.read(tmp_path)) == 7
    assert f"7 of 12 answers are saved in {tmp_path}. Run the same command again" in caplog.text


def test_a_full_disk_says_what_is_lost_and_an_error_loses_nothing(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def full(*_: object, **__: object) -> None:
        tries.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    def fail() -> None:
        raise CapacityError("no memory")

    with monkeypatch.context() as patch, pytest.raises(CapacityError):
        patch.setattr(BulkDecoder, "run", stop_after(5, fail))
        regenerate(llm, PROMPTS, tmp_path, SETTINGS)
    monkeypatch.setattr("flashdraft.train.data.answer_writer.save_file", full)
    with pytest.raises(TrainingError, match="7 new answers are lost, 5 are kept"):
        regenerate(llm, PROMPTS, tmp_path, SETTINGS)
    assert len(tries) == 1, "what failed is not tried once more behind the message's back"


def test_other_prompts_or_settings_need_another_folder(llm: LLM, tmp_path: Path) -> None:
    regenerate(llm, PROMPTS[:2], tmp_path, SETTINGS)
    with pytest.raises(TrainingError, match="prompts"):
        regenerate(llm, PROMPTS[:3], tmp_path, SETTINGS)
    with pytest.raises(TrainingError, match="max_tokens: 24 there, 25 now"):
        regenerate(llm, PROMPTS[:2], tmp_path, AnswerSettings(25, 60))


def test_sampled_answers_differ_and_shares_are_kept(llm: LLM, tmp_path: Path) -> None:
    settings = AnswerSettings(24, 60, answers_per_prompt=3, greedy_share=0.5, seed=4)
    regenerate(llm, PROMPTS, tmp_path, settings)
    found = AnswerSet.read(tmp_path)
    assert len(found) == 36
    assert 1 <= int(found.greedy.sum()) <= 11
    assert set(found.temperatures[~found.greedy].tolist()) == {np.float32(0.7), 1.0}
    assert all(len({*map(tuple, answers)}) == 3 for answers in by_prompt(found).values())


def test_long_and_refused_prompts_are_counted(llm: LLM, tmp_path: Path) -> None:
    odd = Prompt(({"role": "user", "content": 5},), "bad")
    torn = Prompt.of("half a pair: \ud83d")
    prompts = [*PROMPTS[:2], Prompt.of("the fox " * 100), odd, torn]
    report = regenerate(llm, prompts, tmp_path, SETTINGS)
    assert (report.num_answers, report.num_left_out) == (2, 3)
    assert (report.num_too_long, report.num_refused, report.num_not_text) == (1, 1, 1)
    assert "1 longer than --max-prompt-tokens 60, 1 refused" in report.describe_left_out(SETTINGS)


def test_thinking_needs_a_template_that_knows_it(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="enable_thinking"):
        regenerate(llm, PROMPTS, tmp_path, AnswerSettings(thinking=("on", "off")))


def test_thinking_on_and_off(tmp_path: Path) -> None:
    llm = load_target(make_tiny_checkpoint(tmp_path / "tiny"), "cpu", "float32")
    assert llm.tokenizer is not None
    llm.tokenizer = llm.tokenizer.with_template(
        "{{ messages[0]['content'] }}{% if enable_thinking %} think{% endif %}"
    )
    settings = AnswerSettings(8, 60, thinking=("on", "off"))
    regenerate(llm, PROMPTS[:2], tmp_path / "a", settings)
    found = AnswerSet.read(tmp_path / "a")
    on, off = (prompt_ids(llm.tokenizer, PROMPTS[0], mode) for mode in ("on", "off"))
    assert on != off and {tuple(on), tuple(off)} <= by_prompt(found).keys()


def test_a_model_without_a_template(llm: LLM, tmp_path: Path, monkeypatch: Any) -> None:
    assert llm.tokenizer is not None
    monkeypatch.setattr(llm, "tokenizer", llm.tokenizer.with_template(None))
    with pytest.raises(TrainingError, match="no chat template"):
        regenerate(llm, PROMPTS, tmp_path, SETTINGS)


def test_a_folder_that_another_run_writes_is_left_alone(llm: LLM, tmp_path: Path) -> None:
    with sole_writer(tmp_path), pytest.raises(TrainingError, match="is being written by process"):
        regenerate(llm, PROMPTS, tmp_path, SETTINGS)
    assert list(tmp_path.iterdir()) == []
    assert regenerate(llm, PROMPTS, tmp_path, SETTINGS).num_answers > 0


def test_no_room_on_the_disk(llm: LLM, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(TrainingError, match="free some room"):
        regenerate(llm, PROMPTS, tmp_path, SETTINGS)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"greedy_share": 1.5},
        {"temperatures": ()},
        {"temperatures": (0.0,)},
        {"thinking": ("maybe",)},
        {"loops": "ignore"},
    ],
)
def test_settings_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(TrainingError):
        AnswerSettings(**bad)


START = list(range(1000, 1100))


@pytest.mark.parametrize("period", [1, 3, 16, 60, 128])
def test_loops_are_found(period: int) -> None:
    repeated = list(range(period)) * (300 // period + 2)
    assert find_loop(START + repeated[:300]) == (100, period)


@pytest.mark.parametrize(
    "ids",
    [[], [1], [7] * 60, START, START + [7] * 63, START + [7] * 200 + [8], list(range(70)) * 2],
)
def test_what_is_no_loop(ids: list[int]) -> None:
    loop = find_loop(ids)
    assert loop == ((0, 70) if len(ids) == 140 else None)


@pytest.mark.parametrize(("loops", "length"), [("keep", 90), ("cut", 10 + 32), ("drop", None)])
def test_what_becomes_of_a_loop(
    llm: LLM, tmp_path: Path, monkeypatch: Any, loops: str, length: int | None
) -> None:
    run = BulkDecoder.run

    def looping(self: BulkDecoder, jobs: Any) -> Iterator[Any]:
        for made in run(self, jobs):
            ids = np.asarray([*range(20, 30), *([4, 5] * 40)], dtype=np.int32)
            yield made._replace(token_ids=ids, ended=False)

    monkeypatch.setattr(BulkDecoder, "run", looping)
    prompts = PROMPTS[:3]
    report = regenerate(llm, prompts, tmp_path, AnswerSettings(90, 60, loops=loops))
    assert report.num_looped == 3
    if length is None:
        assert list(tmp_path.iterdir()) == []
    else:
        assert AnswerSet.read(tmp_path).answer_lengths.tolist() == [length] * 3


def test_fingerprints_tell_checkpoints_apart(tmp_path: Path) -> None:
    one = make_tiny_checkpoint(tmp_path / "one")
    same = make_tiny_checkpoint(tmp_path / "same")
    other = make_tiny_checkpoint(tmp_path / "other", "qwen3")
    assert fingerprint(str(one)) == fingerprint(str(same)) != fingerprint(str(other))
