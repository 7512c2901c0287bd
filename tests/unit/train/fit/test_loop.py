"""The training loop: it learns, resumes exactly, ends by the clock, and stops when asked."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from flashdraft.errors import TrainingError
from flashdraft.models.drafter.model import Drafter
from flashdraft.models.layers import Target
from flashdraft.train.fit.plot import LOG_NAME, PLOT_NAME, read_log
from flashdraft.train.fit.schedule import TrainConfig
from flashdraft.train.fit.state import Gradient, latest, read_state, states
from tests.unit.train.tiny_run import tiny_answers, tiny_drafter, tiny_target, tiny_trainer

CONFIG = TrainConfig(
    learning_rate=5e-3,
    warmup_steps=2,
    rows=64,
    blocks=8,
    steps=10,
    log_every=2,
    evaluate_every=0,
    save_every=3,  # within an epoch of four batches
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


def weights(drafter: Drafter) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in drafter.parameters()])


def train(target: Target, config: TrainConfig, folder: Path, **options: Any) -> Drafter:
    drafter = tiny_drafter(target)
    tiny_trainer(target, drafter, config, folder, **options).run()
    return drafter


def test_overfits_one_batch(target: Target, tmp_path: Path) -> None:
    # all answers fit the one batch, and all their anchors the blocks
    config = dataclasses.replace(
        CONFIG, learning_rate=1e-2, rows=80, blocks=44, steps=120, log_every=10
    )
    train(target, config, tmp_path, answers=tiny_answers(4))
    rows = read_log(tmp_path)
    assert rows[0]["loss"] > 3 > 0.2 > rows[-1]["loss"]
    assert min(rows[-1]["slot_accuracy"]) > 0.95
    assert rows[-1]["epoch"] == 120


@pytest.mark.parametrize("accumulation", [1, 3])
def test_resumed_equals_uninterrupted(target: Target, tmp_path: Path, accumulation: int) -> None:
    config = dataclasses.replace(CONFIG, accumulation=accumulation)
    whole = train(target, config, tmp_path / "whole")

    class Crash(Exception):
        pass

    def crash(row: dict[str, Any]) -> None:
        if row["step"] == 6:
            raise Crash

    with pytest.raises(Crash):  # after the state of step 3
        train(target, config, tmp_path / "parts", report=crash)
    assert [path.name for path in states(tmp_path / "parts")] == ["state-00000003"]
    resumed = train(target, config, tmp_path / "parts")
    assert torch.equal(weights(resumed), weights(whole))
    logs = [read_log(tmp_path / name) for name in ("whole", "parts")]
    rates = [[(row["step"], row["learning_rate"]) for row in log] for log in logs]
    assert rates[0] == rates[1]
    # the row of step 4 is a mean since the last one: of step 4 alone in the resumed run
    losses = [[row["loss"] for row in log if row["step"] != 4] for log in logs]
    assert losses[0] == losses[1]


def test_a_finished_run_is_only_read_again(target: Target, tmp_path: Path) -> None:
    results = []
    for value in (2.0, 99.0):
        drafter = tiny_drafter(target)
        evaluate = {"accepted_length": value}.copy
        trainer = tiny_trainer(target, drafter, CONFIG, tmp_path, evaluate=evaluate)
        results.append((trainer.run(), weights(drafter)))
    assert results[0][0] == results[1][0] == {"step": 10, "accepted_length": 2.0}
    assert torch.equal(results[0][1], results[1][1])


def test_interrupt_saves_and_says_how_to_resume(
    target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def press(row: dict[str, Any]) -> None:
        if row["step"] == 6:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(target, CONFIG, tmp_path / "parts", report=press)
    assert "Run the same command again to resume" in caplog.text
    stopped = latest(tmp_path / "parts")
    assert stopped is not None and 6 <= read_state(stopped).step <= 7
    resumed = train(target, CONFIG, tmp_path / "parts")
    assert torch.equal(weights(resumed), weights(train(target, CONFIG, tmp_path / "whole")))


def test_a_longer_run_goes_on_from_before_the_decay(target: Target, tmp_path: Path) -> None:
    train(target, CONFIG, tmp_path / "parts")
    assert [path.name[-2:] for path in states(tmp_path / "parts")] == ["08", "09", "10"]
    longer = dataclasses.replace(CONFIG, steps=15)
    prolonged = train(target, longer, tmp_path / "parts")
    assert torch.equal(weights(prolonged), weights(train(target, longer, tmp_path / "whole")))


def interrupted_at(step: int, by: signal.Signals = signal.SIGINT) -> Any:
    """What sends this process a signal when that step is logged."""

    def press(row: dict[str, Any]) -> None:
        if row["step"] == step:
            os.kill(os.getpid(), by)

    return press


def test_an_interrupted_prolongation_goes_on_from_where_it_was_saved(
    target: Target, tmp_path: Path
) -> None:
    train(target, CONFIG, tmp_path / "parts")  # states 8 (before the decay), 9 and 10
    longer = dataclasses.replace(CONFIG, steps=19, log_every=1, save_every=0)
    with pytest.raises(KeyboardInterrupt):
        train(target, longer, tmp_path / "parts", report=interrupted_at(9))
    assert [path.name[-2:] for path in states(tmp_path / "parts")] == ["08", "09"]
    for path in states(tmp_path / "parts"):
        assert not read_state(path).is_decaying
    prolonged = train(target, longer, tmp_path / "parts")
    steps = [row["step"] for row in read_log(tmp_path / "parts")]
    assert steps == [2, 4, 6, 8, *range(9, 20)], "no row was lost, none is there twice"
    assert torch.equal(weights(prolonged), weights(train(target, longer, tmp_path / "whole")))


def test_a_shorter_run_that_would_decay_too_late_is_refused(target: Target, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, steps=20)
    train(target, config, tmp_path / "parts")
    kept, log = states(tmp_path / "parts"), read_log(tmp_path / "parts")
    for steps, decay_from in ((10, 8), (18, 14)):
        shorter = dataclasses.replace(CONFIG, steps=steps)
        with pytest.raises(TrainingError, match=rf"step 16, .* of {steps} .* step {decay_from} on"):
            train(target, shorter, tmp_path / "parts")
    brief = dataclasses.replace(CONFIG, steps=None, minutes=1e-4)
    with pytest.raises(TrainingError, match=r"in a run of 0\.0001 the learning rate falls after"):
        train(target, brief, tmp_path / "parts")
    assert (states(tmp_path / "parts"), read_log(tmp_path / "parts")) == (kept, log)
    longer = dataclasses.replace(CONFIG, steps=30)
    prolonged = train(target, longer, tmp_path / "parts")
    assert torch.equal(weights(prolonged), weights(train(target, longer, tmp_path / "whole")))


def test_a_run_without_a_state_before_its_decay_is_not_begun_anew(
    target: Target, tmp_path: Path
) -> None:
    train(target, dataclasses.replace(CONFIG, decay_share=1.0), tmp_path)
    log = read_log(tmp_path)
    with pytest.raises(TrainingError, match="learning rate falls already.*another --out folder"):
        train(target, dataclasses.replace(CONFIG, decay_share=1.0, steps=15), tmp_path)
    assert read_log(tmp_path) == log


def test_sigterm_saves_like_an_interrupt(target: Target, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(target, CONFIG, tmp_path, report=interrupted_at(4, signal.SIGTERM))
    assert [path.name[-2:] for path in states(tmp_path)] == ["03", "04"]


def test_a_log_that_cannot_be_kept_is_said_in_words(target: Target, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="cannot be made"):
        train(target, CONFIG, tmp_path / "file")
    (tmp_path / "new" / LOG_NAME).mkdir(parents=True)
    with pytest.raises(TrainingError, match=rf"{LOG_NAME} cannot be kept"):
        train(target, CONFIG, tmp_path / "new")
    train(target, CONFIG, tmp_path / "old")
    (tmp_path / "old" / LOG_NAME).write_text("no JSON\n")
    with pytest.raises(TrainingError, match=rf"{LOG_NAME} cannot be kept.*same command again"):
        train(target, CONFIG, tmp_path / "old")


def test_other_settings_or_data_are_refused(target: Target, tmp_path: Path) -> None:
    train(target, CONFIG, tmp_path, identity={"data": "abc"})
    with pytest.raises(TrainingError, match=r"started with seed = 0, this one has 1"):
        train(target, dataclasses.replace(CONFIG, seed=1), tmp_path, identity={"data": "abc"})
    with pytest.raises(TrainingError, match=r"data = 'abc', this one has 'xyz'"):
        train(target, CONFIG, tmp_path, identity={"data": "xyz"})


def test_a_broken_state_is_named(target: Target, tmp_path: Path) -> None:
    train(target, CONFIG, tmp_path)
    broken = states(tmp_path)[-1]
    (broken / "state.safetensors").write_bytes(b"nonsense")
    with pytest.raises(TrainingError, match=rf"{broken.name} cannot be read.*Remove that folder"):
        train(target, CONFIG, tmp_path)


def test_a_full_disk_loses_no_earlier_state(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_disk(row: dict[str, Any]) -> None:
        if row["step"] == 6:
            monkeypatch.setattr("flashdraft.train.fit.state.save_file", write_nothing)

    def write_nothing(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(TrainingError, match="No space left.*run the same command again to resume"):
        train(target, CONFIG, tmp_path / "parts", report=fill_disk)
    assert [path.name for path in (tmp_path / "parts").glob("state*")] == ["state-00000003"]
    monkeypatch.undo()
    resumed = train(target, CONFIG, tmp_path / "parts")
    assert torch.equal(weights(resumed), weights(train(target, CONFIG, tmp_path / "whole")))


def test_a_budget_ends_the_run_with_its_decay(target: Target, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, steps=None, minutes=2 / 60, log_every=1, decay_share=0.5)
    train(target, config, tmp_path)
    last = latest(tmp_path)
    assert last is not None
    state = read_state(last)
    assert state.length is not None and state.step == state.length.steps
    assert 1.0 < state.seconds < 4.0
    rates = [row["learning_rate"] for row in read_log(tmp_path)]
    assert rates[state.length.decay_from] == 5e-3 > rates[-1]


def test_accepted_length_is_logged_and_drawn(target: Target, tmp_path: Path) -> None:
    values = iter([1.5, 2.0, 2.5])
    config = dataclasses.replace(CONFIG, evaluate_every=4)
    drafter = tiny_drafter(target)
    trainer = tiny_trainer(
        target, drafter, config, tmp_path, evaluate=lambda: {"accepted_length": next(values)}
    )
    assert trainer.run() == {"step": 10, "accepted_length": 2.5}
    judged = [row for row in read_log(tmp_path) if "accepted_length" in row]
    assert [(row["step"], row["accepted_length"]) for row in judged] == [
        (4, 1.5),
        (8, 2.0),
        (10, 2.5),
    ]
    assert (tmp_path / PLOT_NAME).read_text().count("<polyline") == 2


def test_a_loss_that_is_no_number_ends_the_run(target: Target, tmp_path: Path) -> None:
    drafter = tiny_drafter(target)
    with torch.no_grad():
        drafter.norm.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"loss is nan after step 2; lower --lr"):
        tiny_trainer(target, drafter, CONFIG, tmp_path).run()
    assert states(tmp_path) == []


def test_log_rows_say_what_is_promised(target: Target, tmp_path: Path) -> None:
    train(target, CONFIG, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / LOG_NAME).read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10]
    for row in rows:
        assert len(row["slot_accuracy"]) == 3
        assert row["tokens_per_s"] > 0 and row["gradient_norm"] > 0 and row["steps"] == 10
    assert rows[-1]["remaining_s"] == 0


def test_gradient_is_clipped_as_a_whole() -> None:
    model = torch.nn.Linear(2, 2)
    gradient = Gradient(model)
    (10 * model(torch.ones(2)).sum()).backward()
    norm = gradient.clip(1.0)
    assert norm.item() == pytest.approx(10 * 6**0.5)
    assert model.weight.grad is not None and model.bias.grad is not None
    squares = model.weight.grad.square().sum() + model.bias.grad.square().sum()
    assert squares.sqrt().item() == pytest.approx(1.0, rel=1e-4)
    gradient.zero()
    assert model.bias.grad.abs().max() == 0
