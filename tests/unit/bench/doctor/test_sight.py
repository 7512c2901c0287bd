"""What doctor says of pictures: nothing, that they are seen, or why they are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashdraft.bench.doctor import sight
from flashdraft.bench.doctor.report import OK, PROBLEM, WARNING
from flashdraft.bench.doctor.sight import check_sight
from flashdraft.errors import CapacityError
from tests.seeing_checkpoint import BUDGET, make_seeing_checkpoint
from tests.tiny import make_tiny_checkpoint


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_seeing_checkpoint(tmp_path_factory.mktemp("seeing") / "tiny"))


def test_a_model_without_a_tower_is_no_case(tmp_path: Path) -> None:
    assert check_sight(str(make_tiny_checkpoint(tmp_path, "llama"))) == []


def test_a_model_that_sees_opens_a_picture(seeing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = check_sight(seeing)  # the tests have what films and PDFs need
    assert found.status == OK and f"{BUDGET} tokens a picture" in found.text
    monkeypatch.setattr(sight, "is_readable", lambda kind: False)
    _, missing = check_sight(seeing)
    assert missing.text == "films and PDFs will be refused"
    assert missing.remedy == "to read them, pip install 'flashdraft[video,pdf]'"


def test_what_cannot_be_opened_is_a_problem(seeing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise CapacityError("A process was stopped when it began.")

    monkeypatch.setattr(sight, "open_picture", fail)
    (found,) = check_sight(seeing)
    assert found.status == PROBLEM and "was stopped when it began" in found.text


def test_a_tower_that_cannot_be_run_is_told(seeing: str, tmp_path: Path) -> None:
    for file in Path(seeing).iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["model_type"] = "clip_vision_model"
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    (found,) = check_sight(str(tmp_path))
    assert found.status == WARNING and "clip_vision_model" in str(found.remedy)
