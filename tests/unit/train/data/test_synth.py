"""Prompts by the target itself: opened at the user's turn, filtered, and the file only grows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashdraft import LLM
from flashdraft.errors import TrainingError
from flashdraft.kernels.kinds import Scheme
from flashdraft.train.data import synth as module
from flashdraft.train.data.decode import Continuation, Job
from flashdraft.train.data.prompts import read_prompts
from flashdraft.train.data.regenerate import load_target
from flashdraft.train.data.settings import SynthSettings
from flashdraft.train.data.synth import is_message, open_user_turn, synthesize
from flashdraft.train.lock import sole_writer
from tests.tiny import END_OF_TURN, make_tiny_checkpoint


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load_target(make_tiny_checkpoint(tmp_path_factory.mktemp("tiny")), "cpu", "float32")


class Scripted:
    """Stands for the decoder: says the given texts in order, and closes the turn."""

    script: list[str] = []
    llm: LLM

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.jobs: list[Job] = []

    def run(self, jobs: Iterable[Job]) -> Iterator[Continuation]:
        assert self.llm.tokenizer is not None
        for text, job in zip(self.script, jobs, strict=False):
            self.jobs.append(job)
            ended = not text.endswith("…")
            ids = [*self.llm.tokenizer.encode(text.removesuffix("…")), END_OF_TURN]
            yield Continuation(job, np.asarray(ids[: len(ids) - 1 + ended], np.int32), ended)


@pytest.fixture
def script(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    monkeypatch.setattr(Scripted, "llm", llm, raising=False)
    monkeypatch.setattr(module, "BulkDecoder", Scripted)
    return Scripted


def test_the_turn_is_opened_by_the_template(llm: LLM) -> None:
    turn = open_user_turn(llm.tokenizer, (0,), "tiny")
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(turn.prefix_ids, skip_special=False) == "<|im_start|>user\n"
    assert turn.stop_ids == {END_OF_TURN, 0}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('no') }}", "does not take a single user message"),
        ("{{ messages[0]['content'] }}<|im_end|>", "begins and ends"),
        ("User: {{ messages[0]['content'] }}", "begins and ends"),
        ("User: hello<|im_end|>", "begins and ends"),
        ("User: {{ messages[0]['content'] * 2 }}<|im_end|>", "begins and ends"),
        ("User: {{ messages[0]['content'] }}\nAssistant:", "plain text"),
    ],
)
def test_templates_that_cannot_be_opened(llm: LLM, template: str | None, message: str) -> None:
    assert llm.tokenizer is not None
    with pytest.raises(TrainingError, match=message):
        open_user_turn(llm.tokenizer.with_template(template), (), "tiny")


def test_only_messages_are_kept(script: type[Scripted], llm: LLM, tmp_path: Path) -> None:
    script.script = [
        "What does the quick brown fox think about?",
        "what does the quick brown fox think about",
        "it never ends and never…",
        "ok",
        "1 + 2 + 3 + 4 + 5 = ?",
        "Что это такое? Расскажи подробнее",
        "a <|im_start|> in the middle of it all",
        "the forbidden fruit of the test",
        "Why do the dogs sleep under the tree?",
    ]
    report = synthesize(llm, tmp_path / "p.jsonl", 2, exclude=["The forbidden fruit of the test!"])
    prompts = read_prompts(tmp_path / "p.jsonl")
    assert [p.text for p in prompts] == [script.script[0], script.script[-1]]
    assert {p.source for p in prompts} == {"synth"}
    assert report.num_drawn == 9 and report.num_kept == 2
    assert report.dropped == {
        "near-duplicate": 1,
        "did not end": 1,
        "length": 1,
        "not a message": 2,
        "special tokens": 1,
        "excluded": 1,
    }


def test_any_language(script: type[Scripted], llm: LLM, tmp_path: Path) -> None:
    script.script = ["Что это такое? Расскажи подробнее"]
    report = synthesize(llm, tmp_path / "p.jsonl", 1, SynthSettings(any_language=True))
    assert report.num_kept == 1


def test_a_file_is_continued(script: type[Scripted], llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    script.script = ["the first of the messages", "the second one is longer"]
    synthesize(llm, path, 2)
    before = path.read_bytes()
    path.write_bytes(before + b'{"prompt": "torn')  # by a kill in the middle of a line
    script.script = ["The first of the messages", "now a third one comes along"]
    report = synthesize(llm, path, 3)
    assert (report.num_found, report.num_kept, report.dropped) == (2, 1, {"near-duplicate": 1})
    assert path.read_bytes().startswith(before)
    draws = [json.loads(line)["draw"] for line in path.read_text().splitlines()]
    assert draws == [0, 1, 3]  # no draw is made twice
    assert synthesize(llm, path, 3).num_drawn == 0


def test_one_file_has_the_prompts_of_one_format(
    script: type[Scripted], llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.jsonl"
    script.script = ["the first of the messages"]
    monkeypatch.setattr(llm.kernels, "quantize", Scheme.FP8)
    synthesize(llm, path, 1)
    assert [json.loads(line)["weights"] for line in path.read_text().splitlines()] == ["fp8"]
    monkeypatch.setattr(llm.kernels, "quantize", None)
    script.script = ["the second one is longer"]
    before = path.read_bytes()
    with pytest.raises(TrainingError, match=r"weights fp8, and now they are as stored; .* another"):
        synthesize(llm, path, 2)
    assert path.read_bytes() == before
    path.write_text('{"prompt": "from before there were formats"}\n')
    assert synthesize(llm, path, 2).num_kept == 1


def test_an_interrupt_says_what_is_saved(
    script: type[Scripted], llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "p.jsonl"
    script.script = ["the first of the messages", "the second one is longer"]
    run = script.run

    def stopped(self: Scripted, jobs: Iterable[Job]) -> Iterator[Continuation]:
        yield from run(self, jobs)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(script, "run", stopped)
        synthesize(llm, path, 5)
    assert f"2 of 5 prompts are saved in {path}. Run the same command again" in caplog.text
    assert len(path.read_text().splitlines()) == 2


def test_a_target_that_writes_no_messages_is_given_up(
    script: type[Scripted], llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 50)
    script.script = ["it never ends…"] * 100
    with pytest.raises(TrainingError, match="does not write user turns"):
        synthesize(llm, tmp_path / "p.jsonl", 2)


@pytest.mark.parametrize("content", [b"no json\n", b'{"text": "a"}\n', b"[]\n"])
def test_a_foreign_file_is_left_alone(llm: LLM, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(TrainingError, match="name another file"):
        synthesize(llm, path, 2)
    assert path.read_bytes() == content


def test_no_folder(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no folder"):
        synthesize(llm, tmp_path / "nowhere" / "p.jsonl", 2)


def test_a_file_that_another_run_writes_is_left_alone(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(torn := b'{"prompt": "half of what the other')
    with sole_writer(path), pytest.raises(TrainingError, match=f"being written by .*{os.getpid()}"):
        synthesize(llm, path, 2)
    assert path.read_bytes() == torn


def test_with_the_real_decoder(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_message", lambda text, any_language: len(text) > 3)
    settings = SynthSettings(temperatures=(3.0,), max_tokens=200, seed=5)
    first = synthesize(llm, tmp_path / "a.jsonl", 4, settings, num_slots=8)
    assert first.num_kept == 4 and first.num_tokens > 0
    synthesize(llm, tmp_path / "b.jsonl", 4, settings, num_slots=8)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    synthesize(llm, tmp_path / "c.jsonl", 4, SynthSettings((3.0,), max_tokens=200, seed=6))
    assert (tmp_path / "c.jsonl").read_bytes() != (tmp_path / "a.jsonl").read_bytes()


@pytest.mark.parametrize("text", ["", "12345", "a\ufffdb c d", "::: --- :::"])
def test_what_is_no_message(text: str) -> None:
    assert not is_message(text, any_language=True)


@pytest.mark.parametrize("bad", [{"min_tokens": 0}, {"max_tokens": 3}, {"temperatures": (0.0,)}])
def test_settings_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(TrainingError):
        SynthSettings(**bad)
