"""Packed batches: rows, anchors and labels, and that they depend on their number alone."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from flashdraft.errors import TrainingError
from flashdraft.train.data.answers import Answer, AnswerSet
from flashdraft.train.fit.batches import NO_LABEL, BatchPlan, PackedBatch, every_block


def make_answers(count: int, longest: int = 40, seed: int = 0) -> AnswerSet:
    """Token 1000 * i + p stands at place p of example i, so that every token tells its home."""
    random = np.random.default_rng(seed)
    answers = []
    for i in range(count):
        prompt, answer = int(random.integers(1, 9)), int(random.integers(1, longest))
        tokens = [1000 * i + place for place in range(prompt + answer)]
        answers.append(Answer(tokens[:prompt], tokens[prompt:]))
    return AnswerSet.from_answers(answers)


def make_plan(answers: AnswerSet, **changes: int) -> BatchPlan:
    sizes = {"max_rows": 128, "num_blocks": 12, "block_size": 5, "seed": 7, **changes}
    return BatchPlan(answers, **sizes)


def check(batch: PackedBatch, answers: AnswerSet, max_rows: int) -> list[int]:
    """Everything that must hold of a batch; returns its examples."""
    num_rows, examples = sum(batch.lengths), []
    assert batch.token_ids.shape == batch.positions.shape == batch.documents.shape == (max_rows,)
    assert (batch.documents[num_rows:] == -1).all() and (
        batch.documents.diff()[: num_rows - 1] >= 0
    ).all()
    for number, length in enumerate(batch.lengths):
        rows = (batch.documents == number).nonzero().flatten()
        tokens = batch.token_ids[rows]
        examples.append(int(tokens[0]) // 1000)
        assert torch.equal(tokens, 1000 * examples[-1] + torch.arange(length))
        assert torch.equal(batch.positions[rows], torch.arange(length))
    assert (batch.anchors.diff() >= 0).all()
    for anchor, labels in zip(batch.anchors.tolist(), batch.labels.tolist(), strict=True):
        document = int(batch.documents[anchor])
        place, end = int(batch.positions[anchor]), batch.lengths[document]
        assert answers.prompt_lengths[examples[document]] <= place <= end - 2
        if labels[0] != NO_LABEL:
            token = int(batch.token_ids[anchor])
            wanted = [token + k if place + k < end else NO_LABEL for k in range(1, len(labels) + 1)]
            assert labels == wanted
        else:
            assert set(labels) == {NO_LABEL}
    return examples


def test_rows_anchors_and_labels() -> None:
    answers = make_answers(30)
    plan = make_plan(answers)
    seen: list[int] = []
    batches = list(plan.batches(epoch=2))
    assert len(batches) == len(plan)
    for batch in batches:
        examples = check(batch, answers, 128)
        assert len(examples) == len(set(examples)), "an answer stands twice in a batch"
        seen += examples
        labelled = batch.anchors[batch.labels[:, 0] != NO_LABEL].tolist()
        assert len(labelled) == len(set(labelled)) == 12, "anchors are drawn without replacement"
    usable = {i for i in range(30) if answers.answer_lengths[i] >= 2}
    assert set(seen) <= usable and len(set(seen)) >= len(usable) - 4
    assert plan.num_documents == len(usable)


def test_a_batch_depends_on_seed_epoch_and_number_alone() -> None:
    plan, again = make_plan(make_answers(30)), make_plan(make_answers(30))
    first = list(plan.batches(3))
    for one, other in zip(first[2:], again.batches(3, skip=2), strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.anchors, other.anchors) and torch.equal(one.labels, other.labels)
    other_seed = next(make_plan(make_answers(30), seed=8).batches(3))
    for other in (next(plan.batches(4)), other_seed):
        assert not torch.equal(first[0].token_ids, other.token_ids)


def test_ranks_share_an_epoch() -> None:
    plan = make_plan(make_answers(30))
    whole = [batch.token_ids for batch in plan.batches(0)]
    ranks = [[batch.token_ids for batch in plan.batches(0, rank, world=2)] for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1]) == -(-len(whole) // 2)
    merged = [tokens for pair in zip(*ranks, strict=True) for tokens in pair]
    assert all(torch.equal(*pair) for pair in zip(whole, merged, strict=False))


def test_few_answers_are_not_repeated_in_a_batch_and_blocks_are_filled_up() -> None:
    answers = make_answers(2, longest=6, seed=1)
    plan = make_plan(answers, num_blocks=64)
    (batch,) = plan.batches(0)
    assert len(check(batch, answers, 128)) == 2
    assert int((batch.labels[:, 0] != NO_LABEL).sum()) == plan.num_anchors < 64
    assert (batch.anchors[plan.num_anchors :] == batch.anchors[plan.num_anchors - 1]).all()


def test_long_answers_are_cut() -> None:
    answers = AnswerSet.from_answers(
        [Answer(range(20), range(20, 200)), Answer(range(140), range(140, 150))]
    )
    plan = make_plan(answers, max_rows=64)
    (batch,) = plan.batches(0)
    assert plan.num_documents == 1 and batch.lengths == [64]
    assert batch.labels.max() <= 63
    with pytest.raises(TrainingError, match="more rows"):
        make_plan(answers, max_rows=16)


def test_anchors_are_uniform_over_the_answers() -> None:
    answers = AnswerSet.from_answers([Answer(range(10), range(10, 61))])
    plan = make_plan(answers, max_rows=64, num_blocks=10)
    anchors = torch.cat([next(plan.batches(epoch)).anchors for epoch in range(500)])
    counts = anchors.bincount(minlength=64)
    assert (counts[:10] == 0).all() and (counts[60:] == 0).all()
    assert counts[10:60].min() > 65 and counts[10:60].max() < 140  # 100 expected


def test_every_block_is_every_place_once() -> None:
    answers = make_answers(20)
    places, examples = [], []
    for chosen, batches in every_block(answers, max_rows=100, num_blocks=16, block_size=5):
        examples += chosen.tolist()
        for batch in batches:
            assert batch.lengths == (answers.starts.diff()[torch.from_numpy(chosen)]).tolist()
            real = batch.labels[:, 0] != NO_LABEL
            places += batch.token_ids[batch.anchors[real]].tolist()
            assert torch.equal(batch.labels[real, 0], batch.token_ids[batch.anchors[real]] + 1)
    expected = [
        1000 * i + place
        for i in range(20)
        for place in range(int(answers.prompt_lengths[i]), int(answers.starts.diff()[i]) - 1)
    ]
    assert places == expected and examples == list(range(20))


def test_a_large_batch_is_made_in_a_moment() -> None:
    random = np.random.default_rng(0)
    answers = AnswerSet.from_answers(
        [Answer(range(100), range(int(random.integers(50, 500)))) for _ in range(400)]
    )
    plan = make_plan(answers, max_rows=32768, num_blocks=4096, block_size=16)
    next(plan.batches(0))
    begin = time.perf_counter()
    batches = list(plan.batches(1))
    assert (time.perf_counter() - begin) / len(batches) < 0.1  # 5 ms on an idle core


def test_some_blocks_are_cut_short_and_predict_nothing_beyond() -> None:
    answers = make_answers(30)
    sizes = {"max_rows": 256, "num_blocks": 64, "block_size": 8, "seed": 5}
    whole = next(BatchPlan(answers, **sizes).batches(0))
    short = next(BatchPlan(answers, **sizes, short_share=0.5).batches(0))
    assert whole.widths is None and short.widths is not None
    assert torch.equal(whole.anchors, short.anchors)
    assert 2 <= short.widths.min() < short.widths.max() == 8
    slots = torch.arange(1, 8)
    is_there = slots < short.widths.unsqueeze(1)
    assert torch.equal(short.labels[is_there], whole.labels[is_there])
    assert (short.labels[~is_there] == NO_LABEL).all()
    assert 0.25 < (short.widths < 8).double().mean() < 0.65
