"""Where a run's weights come from: a drafter, or a state of another run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from flashdraft.errors import CheckpointError, TrainingError
from flashdraft.models.drafter.loading import save_drafter
from flashdraft.models.drafter.model import Drafter
from flashdraft.models.layers import Target
from flashdraft.train.data.answers import fingerprint
from flashdraft.train.fit.schedule import TrainConfig
from flashdraft.train.fit.state import RunState, build_optimizers, save_state
from flashdraft.train.origin import load_origin, read_origin_config
from tests.unit.train.tiny_run import tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def drafter(target: Target) -> Drafter:
    return tiny_drafter(target, seed=5)


@pytest.fixture
def state(drafter: Drafter, tmp_path: Path) -> Path:
    settings = {"drafter": drafter.config.to_hf()}
    stored = RunState(16, 1.0, None, settings, {})
    return save_state(tmp_path / "run", stored, drafter, build_optimizers(drafter, TrainConfig()))


def test_a_state_is_taken_like_a_checkpoint(
    target: Target, drafter: Drafter, state: Path, tmp_path: Path
) -> None:
    save_drafter(drafter, tmp_path / "drafter", torch.float32)
    for folder in (state, tmp_path / "drafter"):
        found = load_origin(folder, target.config)
        assert read_origin_config(folder) == found.config == drafter.config
        for ours, theirs in zip(found.parameters(), drafter.parameters(), strict=True):
            assert torch.equal(ours, theirs) and ours.requires_grad
    assert fingerprint(str(state)) != fingerprint(str(tmp_path / "drafter"))


def test_a_moved_state_needs_no_other_name(target: Target, state: Path, tmp_path: Path) -> None:
    shutil.copytree(state, tmp_path / "carried")
    assert load_origin(tmp_path / "carried", target.config).config.block_size == 4


def test_a_state_of_another_target_is_refused(target: Target, state: Path) -> None:
    wider = dataclasses.replace(target.config, hidden_size=48)
    with pytest.raises(CheckpointError, match="hidden size is 32, the target's is 48"):
        load_origin(state, wider)


def test_broken_states_are_named(target: Target, state: Path) -> None:
    with pytest.raises(TrainingError, match=r"name one of its states, such as .*state-00000016"):
        read_origin_config(state.parent)
    (state / "state.safetensors").write_bytes(b"nonsense")
    with pytest.raises(TrainingError, match="state-00000016 cannot be read"):
        load_origin(state, target.config)
    content = json.loads((state / "state.json").read_text())
    for drafter in (None, {"hidden_size": 32}):
        content["settings"] = {"drafter": drafter} if drafter else {}
        (state / "state.json").write_text(json.dumps(content))
        with pytest.raises(TrainingError, match="does not say what its drafter is"):
            read_origin_config(state)
    (state / "state.json").unlink()
    with pytest.raises(TrainingError, match="state-00000016 cannot be read"):
        read_origin_config(state)
