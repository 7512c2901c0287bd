"""A tiny target with answers to learn, for tests of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flashdraft.kernels.select import select_kernels
from flashdraft.models.drafter.model import Drafter
from flashdraft.models.layers import Target
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.registry import build_target
from flashdraft.train.data.answers import Answer, AnswerSet
from flashdraft.train.fit.batches import BatchPlan
from flashdraft.train.fit.loop import Trainer
from flashdraft.train.fit.schedule import TrainConfig
from flashdraft.train.fit.step import TrainingStep
from flashdraft.train.initial import new_drafter
from tests.tiny import VOCAB_SIZE, make_tiny_checkpoint

BLOCK_SIZE = 4


def tiny_target(folder: Path, family: str = "llama") -> Target:
    """The tiny checkpoint as a target with both layers tapped, in float32."""
    checkpoint = open_checkpoint(make_tiny_checkpoint(folder, family))
    kernels = select_kernels("cpu", "float32")
    return build_target(checkpoint.config, checkpoint.source, kernels, (0, 1))


def tiny_drafter(target: Target, seed: int = 0) -> Drafter:
    """A drafter for it."""
    return new_drafter(target.config, mask_token_id=0, layers=2, block_size=BLOCK_SIZE, seed=seed)


def tiny_answers(count: int = 12, seed: int = 0) -> AnswerSet:
    """Answers that a drafter can learn: each counts upwards from where its prompt ends."""
    generator = torch.Generator().manual_seed(seed)
    answers = []
    for number in range(count):
        prompt = torch.randint(3, VOCAB_SIZE, (4 + number % 3,), generator=generator).tolist()
        answer = [3 + (prompt[-1] + k) % (VOCAB_SIZE - 3) for k in range(12)]
        answers.append(Answer(prompt, answer, prompt_index=number, source="count"))
    return AnswerSet.from_answers(answers)


def tiny_trainer(
    target: Target,
    drafter: Drafter,
    config: TrainConfig,
    folder: Path,
    answers: AnswerSet | None = None,
    **options: Any,
) -> Trainer:
    """A trainer over the tiny answers."""
    plan = BatchPlan(
        answers or tiny_answers(),
        max_rows=config.rows,
        num_blocks=config.blocks,
        block_size=BLOCK_SIZE,
        seed=config.seed,
    )
    step = TrainingStep(drafter, target, max_rows=config.rows)
    return Trainer(drafter, step, plan, config, folder, **options)


def train_in_process(
    rank: int, world: int, meeting: str, checkpoint: str, folder: str, config: TrainConfig
) -> None:
    """One of several processes that train together; the first leaves its weights in `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    try:
        target = tiny_target(Path(checkpoint) / str(rank))
        drafter = tiny_drafter(target)
        tiny_trainer(target, drafter, config, Path(folder)).run()
    finally:
        dist.destroy_process_group()
