"""Predicted steps against published floors, and the laws that a prediction obeys."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plan_check
from flashdraft.bench.plan.gpus import GB, Card, Efficiency, find_card
from flashdraft.bench.plan.pairs import ACCEPTED, expected_length, find_pair
from flashdraft.bench.plan.sizes import (
    FLOAT8,
    GPU_FORMATS,
    StoredFormat,
    count_drafter,
    count_target,
)
from flashdraft.bench.plan.speed import (
    FEW_BITS_SHARES,
    VERIFY_LENGTHS,
    distinct_experts,
    explain,
    predict,
    predict_best,
)

DENSE, MOE = "google/gemma-4-31B-it", "google/gemma-4-26B-A4B-it"
BF16, FP8_HEAD, INT4_HEAD = (
    GPU_FORMATS[0],
    # the published sums leave the drafter in bfloat16
    replace(GPU_FORMATS[2], drafter_bits=16),
    replace(GPU_FORMATS[4], drafter_bits=16),
)
CONTEXTS = (4096, 32768, 262144)
RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"


def bare(bandwidth: float) -> Card:
    """Bandwidth and nothing else."""
    return Card("bare", 0, 0, bandwidth, None, Efficiency(1.0, 1.0, 0.0, False))


def kept_floats(name: str, form: StoredFormat) -> float:
    """Bytes that the published sums do not have: of matrices that are too small to be quantised."""
    return count_target(find_pair(name).target).light * (16 - form.bits) / 8


@pytest.mark.parametrize(
    ("name", "form", "bandwidth", "rates"),
    [
        (DENSE, BF16, 4.3, (69, 66, 51)),
        (DENSE, FP8_HEAD, 4.3, (135, 126, 81)),
        (DENSE, INT4_HEAD, 4.3, (226, 201, 107)),
        (DENSE, BF16, 3.35, (54, 52, 40)),
        (DENSE, INT4_HEAD, 1.79, (94, 84, 45)),
        (MOE, BF16, 4.3, (542, 504, 325)),
        (MOE, FP8_HEAD, 8.0, (1938, 1697, 850)),
        (MOE, INT4_HEAD, 1.79, (643, 531, 222)),
    ],
)
def test_plain_floors(
    name: str, form: StoredFormat, bandwidth: float, rates: tuple[int, ...]
) -> None:
    pair, card = find_pair(name), bare(bandwidth)
    for context, rate in zip(CONTEXTS, rates, strict=True):
        step = predict(pair, card, requests=1, context=context, verify=0, form=form)
        floor = step.floor_s - kept_floats(name, form) / (bandwidth * 1e12)
        assert 1 / floor == pytest.approx(rate, rel=0.002, abs=0.6)
        if form is BF16:
            assert step.step_s == pytest.approx(step.floor_s)


@pytest.mark.parametrize(
    ("name", "form", "verify_gb", "draft_gb", "step_ms"),
    [
        (DENSE, BF16, 61.39, 5.94, (15.9, 16.5, 21.1)),
        (DENSE, FP8_HEAD, 30.70, 4.53, (8.47, 9.04, 13.6)),
        (DENSE, INT4_HEAD, 17.89, 4.53, (5.49, 6.06, 10.65)),
        (MOE, BF16, 34.20, 2.39, (8.58, 8.74, 10.05)),
        (MOE, FP8_HEAD, 17.11, 1.65, (4.43, 4.60, 5.91)),
        (MOE, INT4_HEAD, 9.96, 1.65, (2.77, 2.93, 4.24)),
    ],
)
def test_drafted_floors(
    name: str, form: StoredFormat, verify_gb: float, draft_gb: float, step_ms: tuple[float, ...]
) -> None:
    pair, card = find_pair(name), bare(4.3)
    assert pair.drafter is not None
    # the published sums read a matrix once; the engine keeps some for the context a second time
    copies, floats = 2 * count_drafter(pair.drafter).copies, kept_floats(name, form)
    for context, milliseconds in zip(CONTEXTS, step_ms, strict=True):
        step = predict(pair, card, requests=1, context=context, verify=15, form=form)
        once = 1e3 * (step.floor_s - (copies + floats) / 4.3e12)
        assert once == pytest.approx(milliseconds, rel=0.004, abs=0.01)
    step = predict(pair, card, requests=1, context=4096, verify=15, form=form)
    sizes = {part.name: part.num_bytes / GB for part in step.parts}
    target = sum(sizes.get(part, 0.0) for part in ("layers", "head", "experts"))
    assert target - floats / GB == pytest.approx(verify_gb, abs=0.03)
    drafted = sum(size for part, size in sizes.items() if "draft" in part) - copies / GB
    assert drafted == pytest.approx(draft_gb, abs=0.01)


def test_distinct_experts() -> None:
    experts = find_pair(MOE).target.experts
    assert experts is not None
    published = {1: 8, 2: 15.5, 4: 29.1, 5: 35.3, 8: 51.6, 16: 82.4, 32: 111.8}
    found = {rows: distinct_experts(experts, rows) for rows in published}
    assert found == pytest.approx(published, abs=0.05)


def test_accepted_lengths_and_their_chances() -> None:
    assert ACCEPTED[DENSE].chance == pytest.approx(0.909, abs=5e-4)
    assert ACCEPTED[MOE].chance == pytest.approx(0.893, abs=5e-4)
    for known in ACCEPTED.values():
        assert expected_length(known.chance, known.verify) == pytest.approx(known.value)
    assert expected_length(0.8, 0) == pytest.approx(1.0)


def test_the_default_pairs_accepted_length_is_the_measured_one() -> None:
    tasks = json.loads((RESULTS / "h200_accepted_length.json").read_text())["tasks"]
    means = [task["online"]["all"]["mean"] for task in tasks.values()]
    assert ACCEPTED["smollm2-135m"].value == pytest.approx(sum(means) / len(means), abs=0.05)


def test_the_best_verify_length_is_the_fastest_of_the_engines() -> None:
    card = find_card("h200")
    for name, requests in ((DENSE, 1), (DENSE, 32), (MOE, 1), (MOE, 8)):
        pair = find_pair(name)
        best = predict_best(pair, card, requests=requests, context=4096)
        every = [
            predict(pair, card, requests=requests, context=4096, verify=width).tokens_per_s
            for width in (0, *VERIFY_LENGTHS)
        ]
        assert best.verify in VERIFY_LENGTHS and best.tokens_per_s == max(every) > every[0]


def test_poor_drafts_are_verified_short_and_hopeless_ones_not_at_all() -> None:
    card, pair = find_card("h200"), find_pair(MOE)
    assert pair.accepted is not None
    lengths = []
    for value in (7.8, 3.0, 1.05):
        one = replace(pair, accepted=replace(pair.accepted, value=value))
        lengths.append(predict_best(one, card, requests=1, context=4096).verify)
    assert lengths[0] > lengths[1] > lengths[2] == 0
    unknown = replace(pair, accepted=None)
    assert predict_best(unknown, card, requests=1, context=4096).verify == 0


def test_the_formula_adds_up() -> None:
    card, pair = find_card("h200"), find_pair(DENSE)
    step = predict(pair, card, requests=8, context=4096, verify=15)
    assert step.reading_s == pytest.approx(step.num_bytes / (0.91 * 4.8e12))
    assert step.kernels_s == pytest.approx(step.num_kernels * 3.2e-6)
    assert 0 < step.arithmetic_s < step.operations / (0.7 * 989e12)
    lines = explain(step, card)
    assert f"{step.num_bytes / GB:.2f} GB ÷ (0.91 × 4.8 TB/s)" in lines[0]
    assert f"8 × 8.60 tokens ÷ {1e3 * step.step_s:.2f} ms" in lines[-1]
    slow = predict(pair, replace(card, tflops=None), requests=8, context=4096, verify=15)
    assert slow.arithmetic_s == pytest.approx(0.0)


def test_few_bits_are_read_at_shares_of_their_own() -> None:
    card, pair = find_card("h200"), find_pair(DENSE)
    assert [form.is_measured for form in GPU_FORMATS] == [True, False, True, True, False]
    four, eight = FEW_BITS_SHARES.values()
    for form in GPU_FORMATS[1:]:
        step = predict(pair, card, requests=1, context=4096, verify=15, form=form)
        cache = sum(part.num_bytes for part in step.parts if "cache" in part.name)
        layers = next(part.num_bytes for part in step.parts if part.name == "layers")
        coded, share = step.num_bytes - cache - layers, four if form.bits < 5 else eight
        times = layers / share + coded / eight + cache / 0.91
        assert step.reading_s == pytest.approx(times / 4.8e12)
        (reading, *_) = explain(step, card)
        assert f"÷ ({share:g} × 4.8 TB/s) + " in reading and "÷ (0.78 × 4.8 TB/s)" in reading
        assert f"{cache / GB:.2f} GB ÷ (0.91 × 4.8 TB/s)" in reading
        one = predict(pair, card, requests=1, context=4096, verify=0, form=form)
        assert one.reading_s == pytest.approx(one.num_bytes / (0.91 * 4.8e12))  # one row


@pytest.mark.parametrize("name", [DENSE, MOE])
def test_kernels_over_few_bits_are_fewer_and_longer(name: str) -> None:
    card, pair = find_card("h200"), find_pair(name)

    def count(form: StoredFormat, requests: int) -> float:
        step = predict(pair, card, requests=requests, context=4096, verify=0, form=form)
        kernel_us = 3.2 if form is BF16 else 1.3 * 3.2
        assert step.kernels_s == pytest.approx(step.num_kernels * kernel_us / 1e6)
        assert f" × {kernel_us:.3g} µs = " in explain(step, card)[2]
        return step.num_kernels

    for form in GPU_FORMATS[1:]:
        assert count(form, 1) < count(form, 2) == count(form, 8) < count(BF16, 1)
    assert count(BF16, 1) == count(BF16, 8)
    four, eight = (next(form for form in GPU_FORMATS if form.bits == bits) for bits in (4.5, 8))
    assert (count(four, 1) < count(eight, 1)) is (name is MOE)  # fp8 experts are composed


def test_an_fp8_cache_is_half_read_and_not_measured() -> None:
    card, pair = find_card("h200"), find_pair(DENSE)
    narrow = replace(BF16, cache_dtype=FLOAT8)
    assert not narrow.is_measured
    wide, half = (
        predict(pair, card, requests=2, context=32768, verify=0, form=form)
        for form in (BF16, narrow)
    )
    cache = next(part.num_bytes for part in wide.parts if part.name == "cache")
    assert wide.num_bytes - half.num_bytes == pytest.approx(cache / 2)


def row(step_ms: float, requests: int, rows: float, rate: float) -> dict[str, Any]:
    median = {"step_ms": step_ms, "rows_per_step": rows, "steady_tok_s": rate, "tok_s": rate}
    return {"requests": requests, "prompt_tokens": 128, "new_tokens": 384, "median": median}


# figures of steps that were measured on an H200
MEASURED: dict[str, Any] = {
    "31b plain": {"load": {"c=1": row(15.957, 1, 1.0, 62.7), "c=8": row(16.597, 8, 8.0, 482.0)}},
    "31b drafted": {"load": {"c=1": row(17.95, 1, 16.0, 528.0), "c=8": row(22.97, 8, 128, 2985.4)}},
    "26b plain degenerate": {
        "load": {"c=1": row(3.2, 1, 1.0, 312.5) | {"distinct_experts_per_layer": 8.0}}
    },
    "26b drafted uniform": {
        "load": {"c=1": row(10.329, 1, 15.8, 666.6) | {"distinct_experts_per_layer": 83.6}}
    },
    "31b contexts plain": {
        "contexts": {"32768": row(16.956, 1, 1.0, 59.0)["median"] | {"context": 32768}}
    },
}


def test_predictions_are_near_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = {"31b load": {"model": {}}, "smollm2 tasks": {}, "26b tiny": {"environment": {}}}
    results = {"sections": MEASURED | extra}
    checks = plan_check.check_predictions(results)
    assert len(checks) == 7
    assert max(abs(check.step_error) for check in checks) < 0.05
    assert [check.verify for check in checks] == [0, 0, 15, 15, 0, 15, 0]
    path = tmp_path / "h200.json"
    path.write_text(json.dumps(results))
    assert plan_check.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "| 31b plain | c=1 | 0 | 16.1" in out and "7 rows" in out
    assert plan_check.main([str(tmp_path / "none.json")]) == 2
    path.write_text(json.dumps({"sections": extra}))
    assert plan_check.main([str(path)]) == 2
    path.write_text("{")
    assert plan_check.main([str(path)]) == 2
    assert "is no results file of benchmarks.h200" in capsys.readouterr().err
