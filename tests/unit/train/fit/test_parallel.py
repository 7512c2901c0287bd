"""Several processes train as one does with their batches in one step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
import torch.multiprocessing as mp

from flashdraft.train.fit.plot import read_log
from flashdraft.train.fit.schedule import TrainConfig
from flashdraft.train.fit.state import load_tensors, states
from tests.unit.train.tiny_run import tiny_drafter, tiny_target, tiny_trainer, train_in_process

CONFIG = TrainConfig(
    learning_rate=5e-3, warmup_steps=2, rows=54, blocks=8, steps=6, log_every=2, save_every=0
)


def test_two_processes_equal_one_that_accumulates(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    alone = tiny_drafter(target)
    config = dataclasses.replace(CONFIG, accumulation=2)
    trainer = tiny_trainer(target, alone, config, tmp_path / "one")
    assert len(trainer._plan) % 2 == 0, "an epoch ends with a step, in one process as in two"
    trainer.run()
    meeting = f"file://{tmp_path / 'meeting'}"
    arguments = (2, meeting, str(tmp_path), str(tmp_path / "two"), CONFIG)
    mp.spawn(train_in_process, arguments, nprocs=2)
    last = states(tmp_path / "two")[-1]
    assert last.name == "state-00000006"
    together = tiny_drafter(target)
    optimizers = tiny_trainer(target, together, CONFIG, tmp_path / "none")._optimizers
    load_tensors(last, together, optimizers)
    for (name, ours), theirs in zip(alone.named_parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-6, msg=name)
    rates = [[row["learning_rate"] for row in read_log(tmp_path / n)] for n in ("one", "two")]
    assert rates[0] == rates[1]
