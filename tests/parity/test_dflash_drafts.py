"""An exported drafter in the reference package's hands: it drafts what our engine drafts.

make_dflash_drafts.py recorded it. `flashdraft export` wrote the shipped drafter, the reference
(PyPI `dflash` 0.1.0) loaded that folder by its own from_pretrained, no tensor missing and none left
over, and answered prompts by its own loop on the default target in float32, a cache and several
tokens a step. Here the export is made again and must be the same bytes, and our engine must draft
the same tokens in every step, the cut blocks at the answer's limit too, and give the same answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flashdraft.cli import main as flashdraft
from flashdraft.core import Request, SamplingParams
from flashdraft.engine.draft.proposer import GuardedProposer
from flashdraft.engine.drafts import Draft
from flashdraft.engine.scheduler import Work
from flashdraft.kernels.select import select_kernels
from flashdraft.models.drafter.loading import load_drafter
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.registry import build_target
from flashdraft.models.sources import default_drafter, resolve_source
from flashdraft.train.evaluate import drafting_engine
from tests import zoo

MODEL = "smollm2-135m"
DOCUMENT = json.loads((Path(__file__).parent / "dflash_0_1_0_drafts.json").read_text())


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "drafter"
    assert flashdraft(["export", str(default_drafter(MODEL)), "--out", str(folder)]) == 0
    return folder


def test_the_recording_is_of_this_drafter(exported: Path) -> None:
    for name, recorded in DOCUMENT["files"].items():
        assert hashlib.sha256((exported / name).read_bytes()).hexdigest() == recorded, (
            f"{name} as exported is not the one that the reference was given: regenerate the "
            f"recording with {DOCUMENT['made_by']}"
        )


def test_the_recording_means_something() -> None:
    """Several steps a prompt, drafts that are right and wrong, a cut block at the limit."""
    cases = DOCUMENT["cases"]
    steps = [block for case in cases for block in case["drafts"]]
    committed = sum(len(case["answer"]) - 1 for case in cases)
    assert len(cases) >= 8 and all(len(case["drafts"]) > 1 for case in cases)
    assert 2.0 < committed / len(steps) < 15.0
    assert len({len(block) for block in steps}) > 1


@pytest.mark.weights
@pytest.mark.timeout(600)
def test_the_engine_drafts_what_the_reference_drafts(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_the_recording_is_of_this_drafter(exported)  # its message before any other
    drafted: dict[str, list[list[int]]] = {}
    propose = GuardedProposer.propose

    def record(self: GuardedProposer, works: Sequence[Work], *options: Any) -> list[Draft]:
        drafts = propose(self, works, *options)
        for work, draft in zip(works, drafts, strict=True):
            drafted.setdefault(work.sequence.request.id, []).append(draft.tokens)
        return drafts

    monkeypatch.setattr(GuardedProposer, "propose", record)
    checkpoint = open_checkpoint(resolve_source(MODEL).path)
    drafter = load_drafter(exported, checkpoint.config)
    kernels = select_kernels("cpu", "float32")
    target = build_target(checkpoint.config, checkpoint.source, kernels, drafter.config.tap_layers)
    # a bonus token may come after the last draft token here; there it counts against the limit
    params = SamplingParams(max_tokens=DOCUMENT["new_tokens"] + 1)
    cases = {str(number): case for number, case in enumerate(DOCUMENT["cases"])}
    requests = [Request(name, case["prompt"], params, 0) for name, case in cases.items()]
    answers = zoo.run(drafting_engine(target, drafter), requests, check=False)
    for name, case in cases.items():
        assert drafted[name] == case["drafts"], f"prompt {name}"
        assert answers[name].token_ids[: DOCUMENT["new_tokens"]] == case["answer"], f"prompt {name}"
