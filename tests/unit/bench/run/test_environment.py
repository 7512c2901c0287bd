"""What the results say of the machine and of the command, and what they keep to themselves."""

from __future__ import annotations

import datetime

import pytest

from flashdraft.bench.run.environment import describe_environment, shown_command, shown_path
from flashdraft.llm import LLM
from tests.bench_document import bench_document
from tests.tiny import make_tiny_checkpoint


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["bench", "--json", "out/a.json"], "flashdraft bench --json out/a.json"),
        (["bench", "--data", "/data/secret/tasks"], "flashdraft bench --data tasks"),
        (["bench", "--data=/data/secret/tasks/"], "flashdraft bench --data=tasks"),
        (["bench", "--json", "../elsewhere/a.json"], "flashdraft bench --json a.json"),
        (["bench", "--url", "http://host:1/v1"], "flashdraft bench --url http://host:1/v1"),
        (["bench", "--api-key", "hush", "--seed", "1"], "flashdraft bench --api-key … --seed 1"),
        (["bench", "--api-key=hush"], "flashdraft bench --api-key=…"),
    ],
)
def test_the_command_shows_neither_folders_nor_keys(arguments: list[str], shown: str) -> None:
    assert shown_command(arguments) == shown


def test_names_that_are_no_paths_stay() -> None:
    assert shown_path("google/gemma-4-31B-it") == "google/gemma-4-31B-it"
    assert shown_path("/models/mine") == "mine"


def test_the_environment_has_the_documented_fields(tmp_path_factory) -> None:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    llm = LLM(folder, dtype="int8", device="cpu")
    found = describe_environment(["bench"], llm)
    assert set(found) == set(bench_document()["environment"])
    assert found["dtype"] == "int8" and found["kernels"] == llm.kernels.name
    assert found["cpu_count"] >= 1 and "cores" in found["device"]
    date = datetime.datetime.fromisoformat(found["date"])
    assert date.utcoffset() == datetime.timedelta(0)
    unknown = describe_environment(["bench"])
    assert set(unknown) == set(found) and unknown["dtype"] is None is unknown["kernels"]
