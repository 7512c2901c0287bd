"""What is refused, or warned of, before hours of work."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from flashdraft.errors import FlashdraftError, RequestError, TrainingError
from flashdraft.kernels.kinds import WeightOptions
from flashdraft.models.loading import Checkpoint, open_checkpoint
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.train.data.answers import AnswerSet, Author, fingerprint, tokenizer_digest
from flashdraft.train.data.settings import AnswerSettings
from flashdraft.train.job import TrainingJob, check_authors, plan_drafter
from flashdraft.train.pipeline import train_drafter
from flashdraft.train.stages import answering
from tests.tiny import VOCAB_SIZE, make_tiny_checkpoint
from tests.unit.train.tiny_run import tiny_answers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "target"))


def make_job(checkpoint: Checkpoint, out: Path, **options: Any) -> TrainingJob:
    weights = WeightOptions(options.pop("quantize", None), options.pop("quantize_head", None))
    return TrainingJob(str(checkpoint.path), out, device="cpu", weights=weights, **options)


def make_prompts(folder: Path, texts: list[str]) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return str(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"taps": (0, 2)}, r"which has 2, counted from 0"),
        ({"layers": 0}, "number of layers is 0"),
        ({"block_size": 1}, "block_size is 1"),
        ({"mask_token": VOCAB_SIZE}, "lies outside its vocabulary"),
        ({"held_out": 2}, "2 prompts are to be held out of 2; hold out at most 1"),
    ],
)
def test_nothing_is_answered_for_a_job_that_cannot_end_well(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    message: str,
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(answering, "load_target", load)
    prompts = (make_prompts(tmp_path, ["the fox", "the dog"]),)
    with pytest.raises(FlashdraftError, match=message):
        train_drafter(make_job(checkpoint, tmp_path / "out", prompts=prompts, **options))


def test_the_number_held_out_is_checked_for_the_targets_own_prompts(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match="5 prompts are to be held out of 5"):
        train_drafter(make_job(checkpoint, tmp_path / "out", synth_count=5, held_out=5))
    with pytest.raises(RequestError, match="held_out is -1"):
        make_job(checkpoint, tmp_path, held_out=-1)


def test_prompts_that_are_all_left_out_are_counted(checkpoint: Checkpoint, tmp_path: Path) -> None:
    prompts = (make_prompts(tmp_path, ["the fox " * 20, "the dog " * 20, "\ud83d"]),)
    answering = AnswerSettings(max_tokens=8, max_prompt_tokens=8)
    job = make_job(checkpoint, tmp_path / "out", prompts=prompts, answering=answering)
    with pytest.raises(
        TrainingError, match=r"None of the 3 .* 2 longer than --max-prompt-tokens 8, .* 1 not valid"
    ):
        train_drafter(job)
    excluded = dataclasses.replace(job, exclude=prompts)
    with pytest.raises(TrainingError, match="All of the 2 prompts .* --exclude out"):
        file = make_prompts(tmp_path, ["the fox " * 20, "the dog " * 20])
        train_drafter(dataclasses.replace(excluded, prompts=(file,), exclude=(file,)))


def written_by(author: Author) -> AnswerSet:
    return dataclasses.replace(tiny_answers(), authors=frozenset({author}))


def test_answers_in_other_tokens_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    job = make_job(checkpoint, tmp_path)
    with pytest.raises(TrainingError, match=r"by big, whose .* has 999 tokens; that of target has"):
        check_authors(job, written_by(Author("big", "ab", 999)), checkpoint, WeightOptions())
    with pytest.raises(TrainingError, match=r"by odd, whose tokenizer is not that of target"):
        check_authors(
            job, written_by(Author("odd", "ab", VOCAB_SIZE, "cd")), checkpoint, WeightOptions()
        )


def test_answers_of_a_sibling_are_warned_of(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(checkpoint, tmp_path)
    tokenizer = Tokenizer.from_checkpoint(checkpoint.path)
    assert tokenizer is not None
    own = Author("target", fingerprint(job.target), VOCAB_SIZE, tokenizer_digest(tokenizer))
    for silent in (own, Author(), Author("old", None)):
        check_authors(job, written_by(silent), checkpoint, WeightOptions())
    assert caplog.records == []
    check_authors(
        job, written_by(own._replace(name="tuned", fingerprint="ab")), checkpoint, WeightOptions()
    )
    assert "written by tuned (ab), not by target" in caplog.text
    assert "accepted less often" in caplog.text and caplog.records[0].levelname == "WARNING"


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (
            ("int4", "int8"),
            (),
            r"weights int4 \(head int8\), .* weights as stored. Give --quantize",
        ),
        ((), ("int4", "int8"), r"weights as stored, .* int4 \(head int8\). Give neither"),
        (
            ("int4", "int8"),
            ("int4", "fp8"),
            r".* Give --quantize int4 --quantize-head int8 as then",
        ),
        ((None, "fp8"), ("fp8", "fp8"), r"weights as stored \(head fp8\), .* weights fp8\."),
    ],
)
def test_answers_of_the_same_target_in_other_bits_are_refused(
    checkpoint: Checkpoint,
    tmp_path: Path,
    theirs: tuple[str | None, ...],
    ours: tuple[str | None, ...],
    said: str,
) -> None:
    job, theirs, ours = make_job(checkpoint, tmp_path), WeightOptions(*theirs), WeightOptions(*ours)
    author = Author("target", fingerprint(job.target), VOCAB_SIZE, formats=theirs)
    with pytest.raises(TrainingError, match=f"written by target with its {said}"):
        check_authors(job, written_by(author), checkpoint, ours)
    check_authors(job, written_by(author), checkpoint, theirs)
    old = author._replace(formats=None)  # from before formats were recorded
    check_authors(job, written_by(old), checkpoint, ours)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            {"quantize": "int4"},
            "quantize is 'int4', which is for weights on a GPU; the device is the CPU",
        ),
        ({"quantize_head": "fp8"}, "quantize_head is 'fp8', which is for weights on a GPU"),
        ({"quantize": "int3"}, "quantize is 'int3'; it must be one of int4, int8, fp8"),
    ],
)
def test_formats_that_cannot_be_made_are_refused_before_anything_is_done(
    checkpoint: Checkpoint, tmp_path: Path, flags: dict[str, str], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        train_drafter(make_job(checkpoint, tmp_path / "out", synth_count=5, **flags))
    assert not (tmp_path / "out").exists()


def test_the_planned_shape_is_the_one_asked_for(checkpoint: Checkpoint, tmp_path: Path) -> None:
    job = make_job(checkpoint, tmp_path, layers=3, block_size=8, taps=(1,), mask_token=4)
    planned = plan_drafter(job, checkpoint)
    assert (planned.num_layers, planned.block_size, planned.tap_layers) == (3, 8, (1,))
    assert planned.mask_token_id == 4
