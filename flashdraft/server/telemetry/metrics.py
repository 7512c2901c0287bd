"""What the server counts, and when. The form of it is prometheus.py's.

Everything is counted in the event loop's thread. What the engine did is counted from its step
messages, what clients saw from the front's own clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from flashdraft.core import Generation, StepStats, TokenEvent
from flashdraft.engine.config import MAX_VERIFY
from flashdraft.server.telemetry.prometheus import Counter, Gauge, Histogram, Metric, render

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)
_MetricType = TypeVar("_MetricType", bound=Metric)
_LENGTHS = tuple(range(1, MAX_VERIFY + 2))


class Metrics:
    """Every metric of one server."""

    def __init__(self) -> None:
        self._all: list[Metric] = []
        self.requests = self._counter(
            "requests_total", "Requests for answers, by how they ended", "route", "outcome"
        )
        self.responses = self._counter(
            "http_responses_total", "HTTP responses; 499 where the client left", "route", "status"
        )
        self.prompt_tokens = self._counter("prompt_tokens_total", "Tokens of prompts")
        self.completion_tokens = self._counter("completion_tokens_total", "Tokens of answers")
        self.cached_tokens = self._counter(
            "cached_tokens_total", "Tokens of prompts found in the prefix cache"
        )
        self.pictures = self._counter(
            "pictures_total", "Pictures of requests: opened, or refused", "outcome"
        )
        self.picture_tokens = self._counter(
            "picture_tokens_total", "Tokens that pictures take in prompts"
        )
        self.generations = self._counter(
            "generations_total", "Answers that ended, by why", "finish_reason"
        )
        self.preemptions = self._counter(
            "preemptions_total", "Times an answer gave its pages back and waited"
        )
        self.steps = self._counter("engine_steps_total", "Steps of the engine")
        self.step_seconds = self._counter(
            "engine_step_seconds_total", "Time in the steps' phases", "phase"
        )
        self.expected_tokens = self._counter(
            "policy_tokens_total", "Tokens expected of steps: as chosen, and without drafts", "step"
        )
        self.expected_seconds = self._counter(
            "policy_seconds_total", "Time expected of the same steps", "step"
        )
        self.drafts = self._counter("drafts_total", "Drafts sent to the target")
        self.draft_tokens = self._counter("draft_tokens_total", "Draft tokens sent to the target")
        self.accepted_tokens = self._counter("accepted_tokens_total", "Draft tokens accepted")
        self.branch_tokens = self._counter(
            "branch_tokens_total", "Draft tokens sent to the target that were not of a chain"
        )
        self.accepted_branch_tokens = self._counter(
            "accepted_branch_tokens_total", "The same, accepted"
        )
        self.accepted_at = self._counter(
            "accepted_tokens_by_position_total", "Draft tokens accepted, by place", "position"
        )
        self.verify_lengths = self._counter(
            "verify_lengths_total", "Decode steps of an answer, by verify length", "length"
        )
        self.depths = self._counter(
            "draft_depths_total",
            "The same steps, by how many draft tokens could follow one another",
            "depth",
        )
        self.restarts = self._counter("engine_restarts_total", "Restarts of the engine's process")
        self.engine_up = self._gauge("engine_up", "1 while the engine takes requests")
        self.running = self._gauge("requests_running", "Requests in the engine's batch")
        self.waiting = self._gauge("requests_waiting", "Requests that wait for the engine")
        self.pages_used = self._gauge("cache_pages_used", "Pages of the cache that requests hold")
        self.pages_total = self._gauge("cache_pages", "Pages of the cache")
        self.ttft = self._histogram("time_to_first_token_seconds", "Until the first token", _LONG_S)
        self.inter_token = self._histogram(
            "inter_token_seconds", "Between tokens, a step's time shared by its tokens", _SHORT_S
        )
        self.queue_time = self._histogram("queue_seconds", "Until a request's first step", _LONG_S)
        self.duration = self._histogram(
            "request_duration_seconds", "Of answers, from arrival to the last token", _LONG_S
        )
        self.accepted_length = self._histogram(
            "accepted_length", "Tokens committed by an answer's decode step", _LENGTHS
        )

    def finished(self, route: str, outcome: str, generation: Generation | None) -> None:
        """Count a request for an answer; its generation was counted as it came."""
        self.requests.add(1, route, outcome)

    def picture_opened(self, num_tokens: int) -> None:
        """Count a picture that goes into a prompt."""
        self.pictures.add(1, "opened")
        self.picture_tokens.add(num_tokens)

    def picture_refused(self) -> None:
        """Count a picture for which its request is refused."""
        self.pictures.add(1, "refused")

    def observe_step(self, stats: StepStats, gauges: Mapping[str, int]) -> None:
        """Count a step of the engine."""
        self.steps.add(1)
        for phase in ("draft", "verify", "commit"):
            self.step_seconds.add(getattr(stats, f"{phase}_s"), phase)
        self.expected_tokens.add(stats.expected_tokens, "chosen")
        self.expected_tokens.add(stats.plain_tokens, "plain")
        self.expected_seconds.add(stats.expected_s, "chosen")
        self.expected_seconds.add(stats.plain_s, "plain")
        self.drafts.add(sum(length > 0 for length in stats.verify_lengths))
        self.draft_tokens.add(stats.num_drafted)
        self.accepted_tokens.add(stats.num_accepted)
        self.branch_tokens.add(stats.num_branches)
        self.accepted_branch_tokens.add(stats.num_branches_accepted)
        for length in stats.verify_lengths:
            self.verify_lengths.add(1, str(length))
        for depth in stats.depths:
            self.depths.add(1, str(depth))
        self.observe_gauges(gauges)

    def observe_gauges(self, gauges: Mapping[str, int]) -> None:
        """Say how full the engine is."""
        for name, gauge in (
            ("running", self.running),
            ("waiting", self.waiting),
            ("pages_used", self.pages_used),
            ("pages_total", self.pages_total),
        ):
            gauge.set(gauges.get(name, 0))

    def observe_event(self, event: TokenEvent) -> None:
        """Count the tokens of an event, and the answer if it is its end."""
        self.completion_tokens.add(len(event.token_ids))
        for position in range(1, sum(event.drafted) + 1):
            self.accepted_at.add(1, str(position))
        if event.generation is not None:
            self._observe_end(event.generation)

    def _observe_end(self, generation: Generation) -> None:
        stats = generation.stats
        self.generations.add(1, generation.finish_reason.value)
        self.prompt_tokens.add(stats.prompt_tokens)
        self.cached_tokens.add(stats.cached_tokens)
        self.preemptions.add(stats.preemptions)
        for length, count in stats.histogram.items():
            self.accepted_length.observe(length, count)

    def render(self) -> str:
        """The page that /metrics shows."""
        return render(self._all)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return self._add(Counter(f"flashdraft_{name}", text + ".", labels))

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._add(Gauge(f"flashdraft_{name}", text + "."))

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return self._add(Histogram(f"flashdraft_{name}", text + ".", bounds))

    def _add(self, metric: _MetricType) -> _MetricType:
        self._all.append(metric)
        return metric
