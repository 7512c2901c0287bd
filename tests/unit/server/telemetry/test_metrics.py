"""The metrics page: its format by Prometheus's rules, and what is counted when."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flashdraft.core import FinishReason, Generation, GenerationStats, StepStats, TokenEvent
from flashdraft.server.telemetry import prometheus
from flashdraft.server.telemetry.metrics import Metrics
from flashdraft.server.telemetry.prometheus import Counter, Gauge, Histogram

SAMPLE = re.compile(
    r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (\S+)'
)


def parse(page: str) -> dict[str, float]:
    """Every sample by its name with labels; checks the format on the way."""
    assert page.endswith("\n")
    samples: dict[str, float] = {}
    kinds: dict[str, str] = {}
    helped: set[str] = set()
    for line in page.splitlines():
        if line.startswith("# HELP "):
            helped.add(line.split()[2])
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in kinds and name in helped
            kinds[name] = kind
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            family = re.sub(r"_(bucket|sum|count)$", "", match[1])
            assert match[1] in kinds or kinds[family] == "histogram", line
            samples[line.rsplit(" ", 1)[0]] = float(match[3])
    return samples


def generation(**stats: Any) -> Generation:
    return Generation("", [1, 2], FinishReason.STOP, GenerationStats(**stats))


def test_the_empty_page_is_valid_and_ours() -> None:
    page = Metrics().render()
    samples = parse(page)
    assert all(name.startswith("flashdraft_") for name in samples)
    assert samples["flashdraft_drafts_total"] == 0


def test_what_is_counted() -> None:
    metrics = Metrics()
    stats = StepStats(2, 0, 5, 3, (5, 0), draft_s=0.25, verify_s=0.5, depths=(4, 0))
    stats.num_branches, stats.num_branches_accepted = 2, 1
    stats.expected_tokens, stats.expected_s, stats.plain_tokens, stats.plain_s = 6.5, 0.7, 2.0, 0.4
    gauges = {"running": 2, "waiting": 1, "pages_used": 7, "pages_total": 10}
    metrics.observe_step(stats, gauges)
    metrics.observe_event(TokenEvent("r", (4, 5, 6, 7), "", (True, True, True, False)))
    ended = generation(prompt_tokens=9, cached_tokens=4, preemptions=1, histogram={4: 2, 1: 1})
    metrics.observe_event(TokenEvent("r", (8,), "", (False,), generation=ended))
    metrics.finished("/v1/completions", "stop", ended)
    metrics.ttft.observe(0.3)
    metrics.inter_token.observe(0.01, 4)
    samples = parse(metrics.render())
    expected = {
        "drafts_total": 1,
        "draft_tokens_total": 5,
        "accepted_tokens_total": 3,
        'accepted_tokens_by_position_total{position="1"}': 1,
        'accepted_tokens_by_position_total{position="3"}': 1,
        'verify_lengths_total{length="0"}': 1,
        'verify_lengths_total{length="5"}': 1,
        'draft_depths_total{depth="4"}': 1,
        "branch_tokens_total": 2,
        "accepted_branch_tokens_total": 1,
        'engine_step_seconds_total{phase="verify"}': 0.5,
        'policy_tokens_total{step="chosen"}': 6.5,
        'policy_tokens_total{step="plain"}': 2.0,
        'policy_seconds_total{step="chosen"}': 0.7,
        'policy_seconds_total{step="plain"}': 0.4,
        "completion_tokens_total": 5,
        "prompt_tokens_total": 9,
        "cached_tokens_total": 4,
        "preemptions_total": 1,
        'generations_total{finish_reason="stop"}': 1,
        'requests_total{route="/v1/completions",outcome="stop"}': 1,
        "requests_running": 2,
        "requests_waiting": 1,
        "cache_pages_used": 7,
        "cache_pages": 10,
        'accepted_length_bucket{le="1"}': 1,
        'accepted_length_bucket{le="4"}': 3,
        "accepted_length_sum": 9,
        "time_to_first_token_seconds_count": 1,
        "inter_token_seconds_count": 4,
    }
    assert {name: samples[f"flashdraft_{name}"] for name in expected} == expected
    assert 'flashdraft_accepted_tokens_by_position_total{position="4"}' not in samples


def test_buckets_are_cumulative_and_inclusive() -> None:
    histogram = Histogram("h", "Sizes.", (1, 2, 4))
    for value in (0, 1, 1.5, 2, 3, 100):
        histogram.observe(value)
    samples = parse(prometheus.render([histogram]))
    counts = [samples[f'h_bucket{{le="{bound}"}}'] for bound in ("1", "2", "4", "+Inf")]
    assert counts == [2, 4, 5, 6] and samples["h_count"] == 6
    assert samples["h_sum"] == 107.5
    assert histogram.mean == pytest.approx(107.5 / 6)


def test_labels_are_escaped_and_bounded() -> None:
    counter = Counter("c", "Help with \\ and \n.", ("who",))
    counter.add(1, 'a"b\\c\nd')
    for number in range(10_000):
        counter.add(1, f"client {number}")
    samples = parse(prometheus.render([counter]))
    assert len(samples) <= prometheus.MAX_SERIES + 1
    assert sum(samples.values()) == 10_001
    assert samples['c{who="other"}'] > 9_000


def test_numbers_are_written_as_prometheus_reads_them() -> None:
    gauge = Gauge("g", "A number.")
    for value, text in ((3.0, "3"), (0.1, "0.1"), (float("inf"), "+Inf"), (float("nan"), "NaN")):
        gauge.set(value)
        assert prometheus.render([gauge]).splitlines()[-1] == f"g {text}"
