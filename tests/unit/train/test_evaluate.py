"""Accepted length: the walk by hand, and offline equals online."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from flashdraft.core import Request, SamplingParams
from flashdraft.engine.config import EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.errors import TrainingError
from flashdraft.models.drafter.head_config import HEADS
from flashdraft.models.drafter.model import Drafter, PackedDrafter
from flashdraft.models.layers import Target
from flashdraft.train.data.answers import Answer, AnswerSet
from flashdraft.train.evaluate import (
    Evaluation,
    RequestResult,
    TaskResult,
    drafting_engine,
    evaluate_offline,
    evaluate_online,
)
from flashdraft.train.fit.batches import BatchPlan
from flashdraft.train.fit.step import TrainingStep
from flashdraft.train.initial import add_head
from tests import zoo

MAX_TOKENS = 37
SIZES = {"max_rows": 192, "num_blocks": 20}


@pytest.fixture(scope="module")
def target() -> Target:
    return zoo.tiny_target("llama", zoo.kernels("float32"), taps=(0, 2))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(4, zoo.VOCAB, int(random.integers(2, 25))).tolist() for _ in range(12)]


@pytest.fixture(scope="module")
def answers(target: Target, prompts: list[list[int]]) -> AnswerSet:
    """The target's own greedy answers; some end by themselves, the others at MAX_TOKENS."""
    engine = Engine(target, config=EngineConfig(verify=0, ngram=False))
    params = SamplingParams(max_tokens=MAX_TOKENS)
    requests = [Request(str(i), prompt, params, 0) for i, prompt in enumerate(prompts)]
    done = zoo.run(engine, requests, check=False)
    lengths = [len(generation.token_ids) for generation in done.values()]
    assert min(lengths) < MAX_TOKENS == max(lengths), "answers must end in both ways"
    return AnswerSet.from_answers(
        [
            Answer(prompt, done[str(i)].token_ids, source="even" if i % 2 == 0 else "odd")
            for i, prompt in enumerate(prompts)
        ]
    )


def make_step(
    target: Target, answers: AnswerSet, train_steps: int, head: str | None = None
) -> TrainingStep:
    torch.manual_seed(6)
    drafter = Drafter(zoo.tiny_drafter(zoo.kernels("torch"), 8).config)
    if head is not None:
        drafter = add_head(drafter, head, 6)
    step = TrainingStep(drafter, target, max_rows=SIZES["max_rows"])
    plan = BatchPlan(answers, **SIZES, block_size=8, seed=0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for epoch in range(train_steps):
        for batch in plan.batches(epoch):
            step.backward(batch)
            optimizer.step()
            optimizer.zero_grad()
    return step


@pytest.mark.parametrize(
    ("train_steps", "head"), [(0, None), (12, None), *((12, head) for head in HEADS)]
)
def test_offline_equals_online(
    target: Target,
    answers: AnswerSet,
    prompts: list[list[int]],
    train_steps: int,
    head: str | None,
) -> None:
    """A random drafter, and one that learnt the answers somewhat; with a head, by its paths."""
    step = make_step(target, answers, train_steps, head)
    offline = evaluate_offline(step, answers, **SIZES, max_tokens=MAX_TOKENS)
    sources = [answers.source(i) for i in range(len(answers))]
    engine = drafting_engine(target, step.drafter, max_batch=5)
    online = evaluate_online(engine, prompts, sources, max_tokens=MAX_TOKENS)
    assert offline == online
    assert offline.tasks() == online.tasks()
    assert set(offline.tasks()) == {"even", "odd"}
    if train_steps:
        assert offline.overall().pooled > 1.5
        assert max(length for r in offline.requests for length in r.histogram) > 3


def test_steps_and_tokens_add_up(target: Target, answers: AnswerSet) -> None:
    result = evaluate_offline(make_step(target, answers, 0), answers, **SIZES)
    tokens = [request.tokens for request in result.requests]
    assert tokens == (answers.answer_lengths - 1).tolist()


def test_a_short_verify_length_caps_every_step(target: Target, answers: AnswerSet) -> None:
    step = make_step(target, answers, 12)
    result = evaluate_offline(step, answers, **SIZES, verify=2)
    assert max(length for request in result.requests for length in request.histogram) == 3


@pytest.mark.parametrize("any_width", [False, True])
def test_offline_equals_online_at_a_short_verify_length(
    target: Target, answers: AnswerSet, prompts: list[list[int]], any_width: bool
) -> None:
    """A drafter of any width drafts in a cut block, which may say something else."""
    step = make_step(target, answers, 3)
    step.drafter.config = dataclasses.replace(step.drafter.config, any_width=any_width)
    offline = evaluate_offline(step, answers, **SIZES, max_tokens=MAX_TOKENS, verify=2)
    config = EngineConfig(verify=2, ngram=False, max_batch=5)
    engine = Engine(target, PackedDrafter(step.drafter, target.kernels), config)
    sources = [answers.source(i) for i in range(len(answers))]
    assert offline == evaluate_online(engine, prompts, sources, max_tokens=MAX_TOKENS)


def test_an_answer_whose_loop_was_cut_counts_as_looped(target: Target, answers: AnswerSet) -> None:
    """Neither ended nor at its limit: what is left of the loop is too short to be found again."""
    ends = {"ended": (True, 40), "cut": (False, 40), "at the limit": (False, MAX_TOKENS)}
    stored = AnswerSet.from_answers(
        [
            Answer([5, 6], [7 + i % 30 for i in range(length)], source=name, ended=ended)
            for name, (ended, length) in ends.items()
        ]
    )
    step = make_step(target, answers, 0)
    limit = 41
    found = evaluate_offline(step, stored, **SIZES, max_tokens=limit)
    assert [request.looped for request in found.requests] == [False, True, True]
    found = evaluate_offline(step, stored.select([2]), **SIZES, max_tokens=MAX_TOKENS)
    assert not found.requests[0].looped


def test_tasks_by_hand() -> None:
    requests = [
        RequestResult("a", {1: 2, 4: 2}, looped=False),  # 10 tokens in 4 steps
        RequestResult("a", {4: 1}, looped=True),
        RequestResult("b", {}, looped=False),  # its answer was one token
    ]
    evaluation = Evaluation(requests)
    assert evaluation.tasks()["a"] == TaskResult(2, 3.25, 2.8, [0.6, 0.6, 0.6])
    assert evaluation.tasks(with_loops=False)["a"] == TaskResult(1, 2.5, 2.5, [0.5, 0.5, 0.5])
    assert evaluation.overall() == evaluation.tasks()["a"]
    assert evaluation.tasks()["b"] == TaskResult(0, 0.0, 0.0, [])


def test_bad_input(target: Target, answers: AnswerSet) -> None:
    step = make_step(target, answers, 0)
    with pytest.raises(TrainingError, match="more rows"):
        evaluate_offline(step, answers, max_rows=16, num_blocks=4)
    sampled = AnswerSet.from_answers([Answer([5, 6], [7, 8], temperature=0.8)])
    with pytest.raises(TrainingError, match="sampled"):
        evaluate_offline(step, sampled, **SIZES)
