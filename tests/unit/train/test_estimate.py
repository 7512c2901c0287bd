"""What a run will take, counted from shapes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from flashdraft.errors import TrainingError
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.model import Drafter
from flashdraft.train.estimate import batch_flops, check_disk, drafter_parameters, estimate
from flashdraft.train.fit.schedule import TrainConfig
from flashdraft.train.initial import drafter_config
from tests.tiny import CONFIGS

CPU = torch.device("cpu")
TARGET = ModelConfig.from_hf(CONFIGS["llama"])
DRAFTER = drafter_config(TARGET, mask_token_id=0, layers=2, block_size=4)


@pytest.mark.parametrize("family", CONFIGS)
def test_parameters_are_counted_exactly(family: str) -> None:
    config = drafter_config(ModelConfig.from_hf(CONFIGS[family]), mask_token_id=0, layers=3)
    with torch.device("meta"):
        drafter = Drafter(config)
    assert drafter_parameters(config) == sum(p.numel() for p in drafter.parameters())


def test_epochs_processes_and_accumulation_divide_the_batches() -> None:
    config = TrainConfig(epochs=3, accumulation=2)
    sizes = {"num_examples": 10, "answer_tokens": 1000, "num_batches": 80, "device": CPU}
    alone = estimate(DRAFTER, TARGET, config, **sizes)
    assert alone.steps == 120
    assert alone.seconds == pytest.approx(120 * alone.step_s)
    assert estimate(DRAFTER, TARGET, config, **sizes, world=4).steps == 30
    budget = dataclasses.replace(config, minutes=5)
    assert estimate(DRAFTER, TARGET, budget, **sizes).seconds == 300
    assert estimate(DRAFTER, TARGET, budget, **sizes).steps is None
    assert "as many steps as fit" in " ".join(estimate(DRAFTER, TARGET, budget, **sizes).describe())


def test_work_grows_with_rows_and_blocks() -> None:
    one = batch_flops(DRAFTER, TARGET, rows=100, blocks=10)
    assert batch_flops(DRAFTER, TARGET, rows=200, blocks=20) == 2 * one
    head = 4 * DRAFTER.vocab_size * DRAFTER.hidden_size * 10 * 3
    assert one > head


def test_a_full_disk_is_refused_before_the_start(tmp_path: Path) -> None:
    check_disk(tmp_path / "not" / "yet", 0.001)
    with pytest.raises(TrainingError, match=r"needs about 1000000000\.00 GB .* are free"):
        check_disk(tmp_path, 1e9)
