"""The full-size benchmark in miniature: what it injects, what it counts, how it fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import h200
from benchmarks.gpu_divergence import first_difference
from benchmarks.h200_inject import NUM_DRAWS, PrescribedAcceptance, Routing
from benchmarks.h200_measure import StepMark, Timeline, describe, prefill_flops, run_requests
from benchmarks.h200_models import MODELS, build_pair, count_elements, target_shapes, tiny
from benchmarks.h200_profile import drafter_bytes, target_bytes
from benchmarks.h200_real import count_divergences
from benchmarks.h200_table import markdown, merge_section, read_results
from flashdraft import LLM
from flashdraft.bench.plan.pairs import expected_length
from flashdraft.core import FinishReason, Generation, GenerationStats, Request, SamplingParams
from flashdraft.engine.engine import Engine
from flashdraft.kernels.accept import walk
from flashdraft.kernels.interface import Mixture, Residual
from flashdraft.kernels.kinds import Activation
from flashdraft.kernels.nodes import make_chain
from flashdraft.kernels.torch_backend import TorchKernels
from flashdraft.models.drafter.model import Drafter
from tests.tiny import make_tiny_checkpoint

CPU = torch.device("cpu")
TINY = ["--tiny", "--device", "cpu", "--dtype", "float32", "--concurrency", "1,2"]
# several whole blocks long: a request that ends within a step or two shows no typical one
TINY += ["--new-tokens", "96", "--new-tokens-alone", "96", "--repeats", "1", "--cache-gb", "0.05"]
TINY += ["--step-tokens", "256", "--prefill-chunk", "128", "--contexts", "48,96"]


@pytest.fixture(scope="module", autouse=True)
def few_threads() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.mark.parametrize(
    ("name", "target", "drafter"),
    [("31b", 30_697_345_340, 1_535_967_488), ("26b", 25_233_141_790, 429_689_088)],
)
def test_full_size_models_have_the_published_number_of_parameters(
    name: str, target: int, drafter: int
) -> None:
    model = MODELS[name]
    assert count_elements(target_shapes(model.target_config())) == target
    with torch.device("meta"):
        parameters = Drafter(model.drafter_config()).state_dict()
    assert count_elements({n: tuple(one.shape) for n, one in parameters.items()}) == drafter


@pytest.mark.parametrize("name", MODELS)
def test_random_models_are_complete_and_finite(name: str) -> None:
    pair = build_pair(tiny(MODELS[name]), TorchKernels(CPU, torch.float32), seed=3)
    assert pair.target.tap_layers == pair.drafter.config.tap_layers
    assert pair.plain_target.tap_layers == () and pair.target.tap_layers
    logits = pair.target.logits(torch.randn(3, pair.target.config.hidden_size))
    assert bool(logits.isfinite().all())
    again = build_pair(tiny(MODELS[name]), TorchKernels(CPU, torch.float32), seed=3)
    ids = torch.arange(5)
    assert torch.equal(pair.target.embed(ids), again.target.embed(ids))


def test_acceptance_follows_its_law_and_changes_from_step_to_step() -> None:
    accept = PrescribedAcceptance(0.909, 4, CPU, seed=0)
    sure = torch.ones(3, 15)
    nodes = make_chain(torch.arange(45).view(3, 15), sure, sure.double())
    starts, is_node = torch.tensor([0, 16, 20]), torch.ones(3, 15, dtype=torch.bool)
    is_node[1, 3:] = False

    def steps() -> Tensor:
        decided = accept(torch.full((48,), -1), starts, nodes, is_node)
        return walk(decided, nodes, is_node, 15).num_accepted

    accepted = [steps() for _ in range(NUM_DRAWS)]
    means = torch.stack(accepted).double().mean(0) + 1
    for mean, width in zip(means.tolist(), (15, 3, 15), strict=True):
        assert mean == pytest.approx(expected_length(0.909, width), rel=0.02)
    assert expected_length(0.909, 15) == pytest.approx(8.6, abs=0.05)
    assert expected_length(0.893, 15) == pytest.approx(7.8, abs=0.05)
    assert len({tuple(row.tolist()) for row in accepted[:64]}) > 32
    # the numbers come round again, and never end
    assert torch.equal(steps(), accepted[0])


def test_routing_runs_the_backends_choice_and_spreads_it_if_asked() -> None:
    calls = []

    class Watched(TorchKernels):
        def route(
            self, x: torch.Tensor, router: Any, num_chosen: int, scale: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            calls.append(x.shape[0])
            return super().route(x, router, num_chosen, scale)

    routing = Routing(Watched(CPU, torch.float32), 128, 8, max_rows=64, seed=0)
    x, router, scale = torch.randn(16, 32), torch.zeros(128, 32), torch.ones(128)
    chosen, weights = routing.route(x, router, 8, scale)
    assert len(set(chosen.flatten().tolist())) == 8 == routing.distinct_experts(16)
    routing.is_uniform = True
    chosen, weights = routing.route(x, router, 8, scale)
    assert all(len(set(row)) == 8 for row in chosen.tolist())
    assert torch.equal(weights, torch.full((16, 8), 0.125))
    assert not torch.equal(chosen, routing.route(x, router, 8, scale)[0])
    assert routing.distinct_experts(16) == pytest.approx(128 * (1 - (1 - 8 / 128) ** 16), abs=2)
    assert calls == [16] * 3
    with pytest.raises(ValueError, match="65 rows"):
        routing.route(torch.zeros(65, 32), router, 8, scale)


def test_a_whole_mixture_is_routed_likewise() -> None:
    """By the backend as it is; with uniform routing composed, so that the table's choice counts."""

    class Whole(TorchKernels):
        def mixture(self, residual: Residual, parts: Mixture) -> Any:
            return "the backend's"

        def experts(self, x: torch.Tensor, *inputs: Any) -> torch.Tensor:
            chosen: torch.Tensor = inputs[2]
            return chosen

    routing = Routing(Whole(CPU, torch.float32), 128, 8, max_rows=64, seed=0)
    norm, x = torch.ones(32), torch.randn(1, 32)
    mlp, router = (torch.zeros(64, 32), torch.zeros(32, 32)), torch.zeros(128, 32)
    scale, nothing = torch.ones(128), torch.zeros(0)
    parts = Mixture(
        norm, *mlp, norm, router, 8, scale, norm, nothing, nothing, Activation.SILU, 1e-6
    )
    assert routing.mixture(Residual(x), parts) == "the backend's"  # type: ignore[comparison-overlap]
    routing.is_uniform = True
    _, _, first = routing.mixture(Residual(x), parts)
    _, _, second = routing.mixture(Residual(x), parts)
    assert len(set(first.flatten().tolist())) == 8 and not torch.equal(first, second)


def test_bytes_and_operations_of_the_full_size_models() -> None:
    dense, experts = MODELS["31b"].target_config(), MODELS["26b"].target_config()
    parts = target_bytes(dense, 2, requests=1, context=4096, experts=0)
    assert parts["target_dense"] + parts["target_head"] == pytest.approx(61.4e9, rel=0.001)
    # 50 layers keep 1024 tokens of 16 heads of 256, 10 all of 4 heads of 512; keys and values
    assert parts["target_kv"] == 2 * 2 * (50 * 1024 * 16 * 256 + 10 * 4096 * 4 * 512)
    draft = drafter_bytes(MODELS["31b"].drafter_config(), 2, requests=1, context=4096)
    assert sum(draft.values()) == pytest.approx(6.0e9, rel=0.05)
    one, all_of_them = (
        target_bytes(experts, 2, 1, 0, count)["target_experts"] for count in (8, 128)
    )
    assert all_of_them == 16 * one == pytest.approx(45.7e9, rel=0.001)
    assert prefill_flops(dense, 8192) == pytest.approx(2 * 29.3e9 * 8192, rel=0.1)


def timeline(seconds: list[float], tokens: list[int]) -> Timeline:
    """One request whose steps take so long and commit so many tokens."""
    ends = [sum(seconds[: i + 1]) for i in range(len(seconds))]
    steps = [StepMark(end, n, 1, 0, (n,)) for end, n in zip(ends, tokens, strict=True)]
    steps[-1] = StepMark(ends[-1], tokens[-1], 1, 1, (tokens[-1],))
    stats = GenerationStats(steps=len(tokens) - 1, decode_tokens=sum(tokens[1:]), ttft_s=seconds[0])
    done = Generation("", [0] * sum(tokens), FinishReason.LENGTH, stats)
    return Timeline(0.0, steps, {"r": done})


def test_steady_state_is_the_middle_of_a_run() -> None:
    found = describe(timeline([5.0, 3.0, 0.1, 0.1, 0.1, 0.1, 2.0, 1.0], [1, 9, 4, 4, 4, 4, 9, 5]))
    assert found["step_ms"] == pytest.approx(100.0)
    assert found["tokens_per_step"] == 4.0 and found["steady_tok_s"] == pytest.approx(40.0)
    assert found["tok_s"] == pytest.approx(40 / 11.4, abs=0.1)
    assert found["verify_widths"] == {"4": 4} and found["first_token_s"] == 5.0


def test_a_miniature_run_fills_the_results_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "h200.json"
    assert (
        h200.main(["--model", "26b", "--sections", "ed uniform", *TINY, "--output", str(path)]) == 0
    )
    sections = read_results(path)["sections"]
    assert set(sections) == {"26b load", "26b drafted uniform", "26b fixed uniform"}
    # how much the policy drafts depends on what steps take here and now; a fixed width does not
    assert sections["26b fixed uniform"]["load"]["c=1"]["median"]["accepted_length"] > 1.5
    found = sections["26b drafted uniform"]
    row = found["load"]["c=2"]
    assert "random weights, prescribed acceptance 0.893" in row["conditions"]
    assert "uniform routing" in row["conditions"]
    assert row["median"]["accepted_length"] >= 1.0 and len(row["runs"]) == 3
    assert row["distinct_experts_per_layer"] > 4 and row["bytes"]["total_gb"] > 0
    assert found["profile"]["c=1"]["kernels"][0]["share"] > 0
    assert found["skipped"] == ["profile c=8", "profile c=32"]
    assert found["status"] == "cut short"

    def fail(*_: Any, **__: Any) -> Engine:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("benchmarks.h200_sections.Engine", fail)
    command = ["--model", "31b", "--sections", "fixed,plain", *TINY, "--output", str(path)]
    assert h200.main(command) == 1
    sections = read_results(path)["sections"]
    assert sections["31b plain"]["status"] == sections["31b fixed"]["status"] == "failed"
    assert sections["31b plain"]["error"] == "RuntimeError: out of luck"
    assert sections["26b drafted uniform"] == found  # other sections stay
    assert str(tmp_path) not in json.dumps(sections)


@pytest.mark.parametrize("text", ['{"rows": []}', '{"sections": []}', "[]", "not JSON"])
def test_another_scripts_file_is_refused_before_a_section_runs(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(h200, "Run", lambda *_: pytest.fail("a section would run"))
    path = tmp_path / "kernels.json"
    path.write_text(text)
    for trial in ([], ["--layers", "6"]):
        with pytest.raises(SystemExit):
            h200.main(["--model", "31b", *TINY, *trial, "--output", str(path)])
        assert "kernels.json is no results file of this script" in capsys.readouterr().err
    assert path.read_text() == text


def test_contexts_are_measured_in_miniature(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    assert (
        h200.main(["--model", "31b", "--sections", "contexts", *TINY, "--output", str(path)]) == 0
    )
    rows = read_results(path)["sections"]["31b contexts drafted"]["contexts"]
    assert set(rows) == {"48", "96"}
    assert rows["96"]["prefill_s"] > 0 and set(rows["96"]["verify_widths"]) == {"15"}
    text = markdown(read_results(path))
    assert "mean nothing" in text and "| 96, random weights | " in text


def test_divergences_are_found_with_their_margin(tmp_path: Path) -> None:
    llm = LLM(make_tiny_checkpoint(tmp_path), draft=None, device="cpu", dtype="float32")
    params = SamplingParams(max_tokens=8, logprobs=2, ignore_eos=True)
    requests = [Request(f"p{i}", [5 + i, 6, 7], params, seed=0) for i in range(2)]
    plain = run_requests(llm.engine, requests).generations
    tokens = list(plain["p1"].token_ids)
    tokens[3] += 1
    drafted = plain | {"p1": replace(plain["p1"], token_ids=tokens)}
    found = count_divergences(llm, requests, plain, drafted)
    assert (found["answers"], found["divergences"], found["tokens_compared"]) == (2, 1, 8 + 3)
    _, margin = first_difference(plain["p1"], drafted["p1"])
    assert found["margins"] == [pytest.approx(margin, abs=1e-3)]
    assert count_divergences(llm, requests, plain, plain)["margins"] == []


def test_the_table_says_what_was_missed_and_what_was_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    median = {"tok_s": 470.5, "steady_tok_s": 500.0, "accepted_length": 8.61}
    row = {"median": median | {"verify_widths": {"10": 1, "15": 3}}}
    slow = {"median": median | {"tok_s": 2000.0}}
    record = {"environment": {"tiny": False}, "load": {"c=1": row, "c=8": slow}}
    merge_section(path, "31b drafted", record)
    lines = markdown(read_results(path)).splitlines()
    cells = {tuple(line.split(" | ")[:2]): line for line in lines}
    assert "| ≥ 450 | 384 | 470.5 | 500 | 8.61 | 13.8 |" in cells["| 31B drafted, α 0.909", "1"]
    assert "2000 (missed)" in cells["| 31B drafted, α 0.909", "8"]
    assert "not measured" in cells["| 31B drafted, α 0.909", "32"]
    assert "nothing" not in lines[0]


def test_weights_in_few_bits_have_a_table_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    environment = {"environment": {"tiny": False}}
    median = {"tok_s": 123.5, "accepted_length": 1.0}
    merge_section(path, "31b int4 plain", environment | {"load": {"c=1": {"median": median}}})
    memory = {"peak_gb": 22.5, "device_used_gb": 24.3}
    resident = {"engine": {"max_context": 8192}, "memory": memory}
    merge_section(path, "31b int4 resident", environment | resident)
    merge_section(path, "26b int4 resident", environment | resident | {"memory": {}})
    text = markdown(read_results(path))
    assert "| 31B int4 plain | 1 | ≥ 170 |  | 123.5 (missed) |" in text
    assert "| 31B fp8 plain | 1 | ≥ 110 |  | not measured |" in text
    assert "| 31b int4, random weights, a context of 8192 | ≤ 23 GB | 22.5 GB | 24.3 GB |" in text
    assert "| 31B plain |" not in text and "26b int4, random" not in text
