"""Answers on disk: what is written is read, resumed, split fairly, and never lost."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from flashdraft.errors import TrainingError
from flashdraft.kernels.kinds import WeightOptions
from flashdraft.train.data import answer_writer as module
from flashdraft.train.data.answer_writer import AnswerWriter
from flashdraft.train.data.answers import Answer, AnswerSet, Author

IDENTITY = {"target": "tiny", "prompts": "abc", "seed": 0}


def make_answers(count: int, num_sources: int = 2) -> list[Answer]:
    return [
        Answer(
            prompt_ids=[1, 2, i],
            answer_ids=list(range(i % 5 + 1)),
            prompt_index=i,
            variant=i % 2,
            source=f"s{i % num_sources}",
            temperature=0.5 * (i % 2),
            ended=i % 3 == 0,
        )
        for i in range(count)
    ]


def write(
    folder: Path, answers: list[Answer], shard_size: int = 4, vocab: int = 100, **settings: Any
) -> None:
    writer = AnswerWriter(folder, vocab, {**IDENTITY, **settings}, shard_size)
    for answer in answers:
        writer.append(answer)
    writer.flush()


@pytest.mark.parametrize("vocab", [65536, 65537])
def test_what_is_written_is_read(tmp_path: Path, vocab: int) -> None:
    answers = make_answers(10)
    answers[3] = answers[3]._replace(answer_ids=[vocab - 1])
    write(tmp_path, answers, vocab=vocab)
    assert len(list(tmp_path.iterdir())) == 3
    found = AnswerSet.read(tmp_path)
    assert len(found) == 10
    assert found.num_answer_tokens == sum(len(a.answer_ids) for a in answers)
    for i, answer in enumerate(answers):
        prompt, own = found.example(i)
        assert (prompt.tolist(), own.tolist()) == (answer.prompt_ids, answer.answer_ids)
        assert found.source(i) == answer.source
        assert bool(found.greedy[i]) == (answer.temperature == 0)
        assert bool(found.ended[i]) == answer.ended
    assert found.digest() == AnswerSet.from_answers(answers).digest()


def test_the_limit_of_the_answers_is_known(tmp_path: Path) -> None:
    limits = {"a": {"max_tokens": 24}, "b": {"max_tokens": 24}, "c": {"max_tokens": 25}, "old": {}}
    for name, settings in limits.items():
        write(tmp_path / name, make_answers(9), **settings)

    def limit(*names: str) -> int | None:
        return AnswerSet.read([tmp_path / name for name in names]).max_tokens

    assert limit("a") == limit("a", "b") == 24
    assert limit("a", "c") is limit("a", "old") is limit("old") is None
    train, held_out = AnswerSet.read(tmp_path / "a").split(3, seed=0)
    assert train.max_tokens == held_out.max_tokens == 24


def test_several_folders_with_different_sources(tmp_path: Path) -> None:
    write(tmp_path / "a", make_answers(3, 1))
    write(tmp_path / "b", [a._replace(source="other") for a in make_answers(2)])
    found = AnswerSet.read([tmp_path / "a", str(tmp_path / "b")])
    assert [found.source(i) for i in range(5)] == ["s0"] * 3 + ["other"] * 2


def test_select_by_index_and_mask() -> None:
    found = AnswerSet.from_answers(make_answers(6))
    some = found.select([4, 1])
    for place, index in enumerate((4, 1)):
        for mine, theirs in zip(some.example(place), found.example(index), strict=True):
            assert torch.equal(mine, theirs)
    assert len(found.select(found.greedy)) == 3
    assert len(found.select([])) == 0
    assert some.digest() != found.digest()


def test_split_keeps_prompts_apart_and_sources_in_proportion() -> None:
    answers = make_answers(40, 2)
    # every prompt once more, sampled: the held-out one of the two must be the greedy one
    answers += [a._replace(temperature=1.0) for a in answers]
    found = AnswerSet.from_answers([a._replace(temperature=a.temperature * 2) for a in answers])
    train, held_out = found.split(10, seed=3)
    assert len(held_out) == 10 and len(train) == 60
    assert sorted(held_out.source(i) for i in range(10)) == ["s0"] * 5 + ["s1"] * 5
    apart = {tuple(held_out.example(i)[0].tolist()) for i in range(10)}
    assert apart.isdisjoint(tuple(train.example(i)[0].tolist()) for i in range(60))
    even = [i for i in range(10) if int(held_out.example(i)[0][2]) % 2 == 0]
    assert even and all(bool(held_out.greedy[i]) for i in even)
    assert found.split(10, seed=3)[1].digest() == held_out.digest()
    assert found.split(10, seed=4)[1].digest() != held_out.digest()


def test_split_cannot_take_everything() -> None:
    found = AnswerSet.from_answers(make_answers(3))
    with pytest.raises(TrainingError, match="3 prompts are to be held out of 3"):
        found.split(3, seed=0)


def test_a_second_writer_goes_on(tmp_path: Path) -> None:
    answers = make_answers(10)
    write(tmp_path, answers[:6])
    (tmp_path / "answers-00007.safetensors.part").write_bytes(b"torn")  # of a killed run
    writer = AnswerWriter(tmp_path, 100, IDENTITY, 4)
    assert writer.done() == {(a.prompt_index, a.variant) for a in answers[:6]}
    for answer in answers[6:]:
        writer.append(answer)
    assert len(AnswerSet.read(tmp_path)) == 10


def test_another_identity_is_refused_with_the_difference(tmp_path: Path) -> None:
    write(tmp_path, make_answers(2))
    with pytest.raises(TrainingError, match="seed: 0 there, 1 now.*another folder"):
        AnswerWriter(tmp_path, 100, {**IDENTITY, "seed": 1}, 4)


def test_a_full_disk_keeps_what_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = make_answers(8)
    write(tmp_path, answers[:4])
    writer = AnswerWriter(tmp_path, 100, IDENTITY, 4)

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(TrainingError, match="disk is full. 4 new answers are lost, 4 are kept"):
        for answer in answers[4:]:
            writer.append(answer)
    assert writer.has_failed
    assert [path.name for path in tmp_path.iterdir()] == ["answers-00000.safetensors"]
    assert len(AnswerSet.read(tmp_path)) == 4


def test_answers_wait_a_minute_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    writer = AnswerWriter(tmp_path, 100, IDENTITY, 100)
    kept = []
    moments = (10.0, 59.0, 61.0, 62.0, 120.0, 122.0)
    for moment, answer in zip(moments, make_answers(6), strict=True):
        now = moment
        writer.append(answer)
        kept.append(len(writer.done()))
    assert kept == [0, 0, 3, 3, 3, 6]
    assert len(AnswerSet.read(tmp_path)) == 6


def test_who_wrote_the_answers_is_known(tmp_path: Path) -> None:
    write(tmp_path / "old", make_answers(2))
    assert AnswerSet.read(tmp_path / "old").authors == {Author("tiny", None, 100, None)}
    identity = {**IDENTITY, "fingerprint": "ab"}
    writer = AnswerWriter(tmp_path / "new", 101, identity, 1, tokenizer="cd")
    writer.append(make_answers(1)[0])
    found = AnswerSet.read([tmp_path / "old", tmp_path / "new"])
    expected = {Author("tiny", None, 100, None), Author("tiny", "ab", 101, "cd")}
    assert found.authors == found.split(1, 0)[0].authors == expected


@pytest.mark.parametrize(
    ("formats", "said", "flags"),
    [
        (WeightOptions(), "as stored", ""),
        (WeightOptions("fp8", "fp8"), "fp8", "--quantize fp8 --quantize-head fp8"),
        (WeightOptions("int4", "int8"), "int4 (head int8)", "--quantize int4 --quantize-head int8"),
        (WeightOptions(None, "fp8"), "as stored (head fp8)", "--quantize-head fp8"),
    ],
)
def test_the_formats_of_the_targets_weights_are_kept(
    tmp_path: Path, formats: WeightOptions, said: str, flags: str
) -> None:
    writer = AnswerWriter(tmp_path, 100, IDENTITY, 1, formats=formats)
    writer.append(make_answers(1)[0])
    [author] = AnswerSet.read(tmp_path).authors
    assert author.formats == formats
    assert (formats.describe(), formats.flags()) == (said, flags)


def test_damaged_and_missing_shards(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="holds no answers"):
        AnswerSet.read(tmp_path)
    (tmp_path / "answers-00000.safetensors").write_bytes(b"not this")
    with pytest.raises(TrainingError, match="cannot be read.*delete it"):
        AnswerSet.read(tmp_path)
