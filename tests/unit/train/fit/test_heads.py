"""Heads in training: they begin as nothing, are learnt beside the drafter, and a run goes on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from flashdraft.errors import RequestError, TrainingError, UnsupportedModelError
from flashdraft.models.drafter.head_config import HEADS, MARKOV, SELECTOR
from flashdraft.models.drafter.model import Drafter
from flashdraft.models.layers import Target
from flashdraft.train.fit.batches import NO_LABEL, BatchPlan
from flashdraft.train.fit.loss import path_loss, with_labels
from flashdraft.train.fit.plot import read_log
from flashdraft.train.fit.schedule import TrainConfig
from flashdraft.train.fit.step import TrainingStep
from flashdraft.train.initial import add_head, with_head
from flashdraft.train.job import TrainingJob
from flashdraft.train.stages.result import refuse_worse
from tests.unit.train.tiny_run import (
    BLOCK_SIZE,
    tiny_answers,
    tiny_drafter,
    tiny_target,
    tiny_trainer,
)

CONFIG = TrainConfig(rows=80, blocks=44, steps=6, save_every=3, log_every=2, learning_rate=1e-2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


def headed(target: Target, kind: str) -> Drafter:
    return add_head(tiny_drafter(target), kind, 8)


def train(target: Target, kind: str, config: TrainConfig, folder: Path, **options: Any) -> Drafter:
    drafter = headed(target, kind)
    tiny_trainer(target, drafter, config, folder, answers=tiny_answers(4), **options).run()
    return drafter


@pytest.mark.parametrize("kind", HEADS)
def test_a_new_head_says_nothing(target: Target, kind: str) -> None:
    plan = BatchPlan(tiny_answers(4), max_rows=80, num_blocks=44, block_size=BLOCK_SIZE, seed=0)
    batch = next(plan.batches(0))
    plain, drafter = tiny_drafter(target), headed(target, kind)
    found = [TrainingStep(one, target, max_rows=80).predict(batch) for one in (plain, drafter)]
    assert torch.equal(*found)
    assert drafter.config.head is not None and drafter.config.head.kind == kind
    assert (drafter.config.convolution is not None) == (kind == SELECTOR)


@pytest.mark.parametrize("kind", HEADS)
def test_overfits_one_batch(target: Target, kind: str, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, steps=100, save_every=0, log_every=10)
    drafter = train(target, kind, config, tmp_path)
    rows = read_log(tmp_path)
    assert rows[0]["loss"] > 4 > 0.4 > rows[-1]["loss"]
    assert min(rows[-1]["slot_accuracy"]) > 0.95
    head = drafter.path_head
    assert head is not None
    assert all(parameter.abs().max() > 0 for parameter in head.parameters()), "all of it learns"


@pytest.mark.parametrize("kind", HEADS)
def test_resumed_equals_uninterrupted(target: Target, kind: str, tmp_path: Path) -> None:
    whole = train(target, kind, CONFIG, tmp_path / "whole")

    class Crash(Exception):
        pass

    def crash(row: dict[str, Any]) -> None:
        if row["step"] == 4:
            raise Crash

    with pytest.raises(Crash):  # after the state of step 3
        train(target, kind, CONFIG, tmp_path / "parts", report=crash)
    resumed = train(target, kind, CONFIG, tmp_path / "parts")
    for name, parameter in whole.named_parameters():
        assert torch.equal(dict(resumed.named_parameters())[name], parameter), name


def test_the_true_token_takes_the_last_one_s_place() -> None:
    candidates = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7]])
    labels = torch.tensor([6, 9, NO_LABEL])
    assert with_labels(candidates, labels).tolist() == [[5, 6, 7], [5, 6, 9], [5, 6, 7]]


def test_the_loss_among_candidates_is_cross_entropy() -> None:
    scores = torch.randn(3, 4, requires_grad=True)
    candidates = torch.tensor([[5, 6, 7, 8]] * 3)
    rows = path_loss(scores, candidates, torch.tensor([8, 5, NO_LABEL]))
    expected = torch.nn.functional.cross_entropy(scores[:2], torch.tensor([3, 0]), reduction="none")
    torch.testing.assert_close(rows.loss[:2], expected)
    torch.testing.assert_close(rows.chance[:2], (-expected).exp().detach())
    assert rows.loss[2] == rows.chance[2] == rows.best[2] == 0
    rows.loss.sum().backward()
    assert scores.grad is not None and scores.grad[2].abs().max() == 0


def test_what_cannot_have_a_head_is_refused(target: Target) -> None:
    drafter = headed(target, MARKOV)
    with pytest.raises(RequestError, match="has a markov head already"):
        with_head(drafter.config, SELECTOR, 8)
    with pytest.raises(RequestError, match="multiple of 16"):
        with_head(dataclasses.replace(tiny_drafter(target).config, hidden_size=40), SELECTOR, 8)
    with pytest.raises(RequestError, match="at least 1"):
        with_head(tiny_drafter(target).config, MARKOV, 0)
    with pytest.raises(RequestError, match="markov, selector"):
        with_head(tiny_drafter(target).config, "other", 8)
    drafter.config = dataclasses.replace(drafter.config, from_anchor=True)
    with pytest.raises(UnsupportedModelError, match="anchor"):
        TrainingStep(drafter, target, max_rows=80)


def test_a_worse_drafter_is_not_written() -> None:
    job = TrainingJob("target", Path("out"), init_from="origin")
    refuse_worse(job, None, {"accepted_length": 1.0})
    refuse_worse(job, {"accepted_length": 2.0}, {"accepted_length": 2.0})
    refuse_worse(job, {"accepted_length": 2.0}, {})
    with pytest.raises(TrainingError, match=r"1\.900, that of origin.* 2\.000"):
        refuse_worse(job, {"accepted_length": 2.0}, {"accepted_length": 1.9})
