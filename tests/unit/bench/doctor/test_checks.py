"""Doctor's checks of kernels, law, accepted length and expected ranges, each made to fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashdraft.bench.doctor import checks as doctor_checks
from flashdraft.bench.doctor.checks import (
    check_accepted,
    check_environment,
    check_kernels,
    check_law,
    first_difference,
)
from flashdraft.bench.doctor.expected import Expected, expected_range, right_config, target_of
from flashdraft.bench.doctor.probe import Accepted
from flashdraft.bench.doctor.replay import Trial, TrialComparison
from flashdraft.bench.doctor.report import OK, PROBLEM, WARNING
from flashdraft.core import FinishReason, Generation, GenerationStats, TokenLogprob
from flashdraft.kernels.select import select_kernels
from flashdraft.kernels.torch_backend import TorchKernels
from flashdraft.models.sources import DEFAULT_MODEL, default_drafter

EXPECTED = Expected(3.0, 6.0, (0.6, 0.4), "for a test", is_known=True)


def answer(
    tokens: list[int], histogram: dict[int, int] | None = None, margin: float | None = None
) -> Generation:
    """A finished answer; with a margin between every token's two best logprobs."""
    logprobs = None
    if margin is not None:
        top = ((7, -0.5), (8, -0.5 - margin))
        logprobs = [TokenLogprob(-0.5, top) for _ in tokens]
    stats = GenerationStats(histogram=histogram or {})
    return Generation("", tokens, FinishReason.LENGTH, stats, logprobs)


def test_accepted_pools_steps_and_counts_positions() -> None:
    accepted = Accepted.of([answer([], {1: 2, 3: 1}), answer([], {2: 1})])
    assert (accepted.num_steps, accepted.num_tokens) == (4, 7)
    assert accepted.length == 7 / 4
    assert accepted.by_position == (0.5, 0.25)
    assert Accepted.of([answer([])]).length == 0.0


def test_the_law_holds_or_is_a_problem_on_a_cpu() -> None:
    same = check_law("greedy", [answer([1, 2])], [answer([1, 2])], on_gpu=False)
    assert same.status == OK and "2 tokens" in same.text
    parted = check_law("greedy", [answer([1, 2])], [answer([1, 3])], on_gpu=False)
    assert parted.status == PROBLEM and parted.remedy is not None
    # a near tie is no excuse where arithmetic is exact
    tie = check_law("greedy", [answer([1, 2], margin=0.0)], [answer([1, 3])], on_gpu=False)
    assert tie.status == PROBLEM


@pytest.mark.parametrize(("margin", "status"), [(0.1, OK), (0.5, PROBLEM)])
def test_on_a_gpu_answers_may_part_at_a_near_tie_only(margin: float, status: str) -> None:
    plain, drafted = answer([1, 2, 4], margin=margin), answer([1, 3, 4])
    assert check_law("greedy", [plain], [drafted], on_gpu=True).status == status
    place, found = first_difference(plain, drafted)
    assert place == 1 and found == pytest.approx(margin)


def test_drawn_answers_that_part_on_a_gpu_are_counted() -> None:
    plain = [answer([1, 2], margin=3.0), answer([1, 2], margin=3.0)]
    one, both = [answer([1, 2]), answer([1, 3])], [answer([1, 3]), answer([1, 3])]
    assert check_law("seeded", plain, one, on_gpu=True, is_drawn=True).status == OK
    assert check_law("seeded", plain, both, on_gpu=True, is_drawn=True).status == WARNING
    assert check_law("seeded", plain, one, on_gpu=False, is_drawn=True).status == PROBLEM


def test_answers_that_were_cut_are_compared_as_far_as_they_go() -> None:
    assert first_difference(answer([1, 2, 3]), answer([1, 2])) == (2, None)
    cut = check_law("greedy", [answer([])], [answer([1])], on_gpu=False)
    assert cut.status == WARNING


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_kernels_of_this_machine_agree(dtype: str) -> None:
    findings = check_kernels(select_kernels("cpu", dtype))
    assert [finding.status for finding in findings] == [OK]


def test_a_kernel_that_is_wrong_is_named() -> None:
    class Wrong(TorchKernels):
        def gated(self, gate_up: Tensor, activation: object) -> Tensor:
            return super().gated(gate_up, activation) * 1.01  # type: ignore[arg-type]

    (finding,) = check_kernels(Wrong(torch.device("cpu"), torch.float32))
    assert finding.status == PROBLEM and "gated is off" in finding.text
    assert " linear is off" not in finding.text


def test_a_kernel_whose_rows_are_not_alone_is_a_problem() -> None:
    class Together(TorchKernels):
        def linear(self, x: Tensor, weight: Tensor) -> Tensor:
            return super().linear(x, weight) * (1 + 1e-6 * len(x))

    findings = check_kernels(Together(torch.device("cpu"), torch.float32))
    assert [finding.status for finding in findings] == [OK, PROBLEM]
    assert "depends on the other rows" in findings[1].text


def test_an_installation_without_native_kernels_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = TorchKernels(torch.device("cpu"), torch.float32)
    monkeypatch.setattr(doctor_checks.cpu_backend, "available", lambda: False)
    warned = [f for f in check_environment(kernels) if f.status == WARNING]
    assert any("compiler" in (finding.remedy or "") for finding in warned)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4096)
    assert any("4096 threads" in finding.text for finding in check_environment(kernels))


def accepted(length: float, shares: tuple[float, ...], tokens: int = 500) -> Accepted:
    return Accepted(length, shares, tokens, int(tokens / length) if length else 0)


def test_accepted_length_is_held_against_its_range() -> None:
    good = check_accepted(accepted(4.0, (0.8, 0.6)), EXPECTED, "greedy")
    assert [finding.status for finding in good] == [OK, OK]
    low = check_accepted(accepted(2.0, (0.7, 0.1)), EXPECTED, "greedy")
    assert [finding.status for finding in low] == [PROBLEM, WARNING]
    assert "low at 2," in low[1].text
    few = check_accepted(accepted(2.0, (0.7, 0.6), tokens=40), EXPECTED, "greedy")
    assert few[0].status == WARNING and "few" in (few[0].remedy or "")
    none = check_accepted(Accepted.of([answer([])]), EXPECTED, "greedy")
    assert [finding.status for finding in none] == [PROBLEM]
    cut = Generation("", [], FinishReason.CANCELLED, GenerationStats(), None)
    [late] = check_accepted(Accepted.of([cut]), EXPECTED, "greedy")
    assert late.status == WARNING and "not enough time to judge" in late.text
    assert late.remedy == "raise --seconds"


def test_fewer_prompts_are_held_against_less(tmp_path: Path) -> None:
    folder = shipped(tmp_path / "copy")
    for count, low in ((8, 3.3), (4, 2.9), (2, 2.3), (1, 1.5)):
        here = expected_range(str(folder), folder, 0.0, count)
        # one prompt's mean deviates by 1.4 from another's
        assert here.low == pytest.approx(low, abs=0.05)
        assert (f"with only {count} asked" in here.rationale) == (count < 8)
    two, eight = (expected_range("unknown", tmp_path, 0.0, count) for count in (2, 8))
    assert two.low < eight.low and two.by_position[0] < eight.by_position[0]
    [judged, _] = check_accepted(accepted(2.5, (0.6,) * 4), here, "greedy")
    assert judged.status == OK and "with only 1 asked" in judged.text
    drawn = expected_range("unknown", tmp_path, 1.0, 1)
    assert drawn.low == 1.2 and "with only 1 asked" in drawn.rationale


def shipped(folder: Path) -> Path:
    return Path(shutil.copytree(str(default_drafter(DEFAULT_MODEL)), folder))


def test_the_shipped_drafter_is_known_wherever_its_files_lie(tmp_path: Path) -> None:
    folder = shipped(tmp_path / "copy")
    here = expected_range(str(folder), folder, 0.0)
    assert here.is_known and 3.0 < here.low < 4.3 < here.high
    assert target_of(str(folder), folder) == DEFAULT_MODEL
    drawn = expected_range(str(folder), folder, 1.0)
    assert drawn.low < here.low and "drawn" in drawn.rationale
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [2, 9, 15, 21, 28]
    (folder / "config.json").write_text(json.dumps(config))
    right = right_config(str(folder), folder)
    assert right is not None and right.tap_layers == (1, 8, 14, 20, 27)


def test_other_drafters_get_what_their_record_or_drafters_in_general_say(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    record = {"target": {"name": "x/y"}, "held_out": {"accepted_length_pooled": 5.0}}
    (recorded / "flashdraft.json").write_text(json.dumps(record))
    assert expected_range("recorded", recorded, 0.0).low == pytest.approx(3.5)
    assert target_of("recorded", recorded) == "x/y"
    unknown = expected_range("unknown", tmp_path, 0.0)
    assert not unknown.is_known and unknown.low == 2.0
    assert right_config("unknown", tmp_path) is None and target_of("unknown", tmp_path) is None
    published = expected_range("z-lab/Qwen3-8B-DFlash-b16", tmp_path, 0.0)
    assert published.is_known and 3.0 < published.low < 6.5


def test_a_comparison_tells_a_small_gain_from_none() -> None:
    noise = torch.rand(200, generator=torch.Generator().manual_seed(3))
    base = Trial(noise.round() * 4, noise * 4)
    assert TrialComparison.of(base, base).deviations == 0.0
    better = TrialComparison.of(base, Trial(base.runs, base.scores + 0.2 * noise))
    assert better.deviations > 4 and better.gain > 1.02
    assert TrialComparison.of(Trial(base.runs, base.scores + 0.2 * noise), base).deviations < -4
