"""Several loads, one after the other, offered to one server: rows and problems as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flashdraft.bench.traffic.driver import run_load
from flashdraft.bench.traffic.load import OfferedLoad
from flashdraft.bench.traffic.outcome import Goal, LoadRecord, describe_row, tell_problems
from flashdraft.bench.traffic.questions import Questions
from flashdraft.bench.traffic.wire import Door
from flashdraft.errors import EngineLostError

MOST_WARM_UPS = 8
PLACES = 10_000_000  # numbers of questions that a load has for itself: no prefix may be known


@dataclass
class Offer:
    """What is offered, and what came of it so far."""

    questions: Questions
    loads: Sequence[OfferedLoad]
    limit_s: float  # of one request
    slo_ttft_s: float | None = None  # what makes a request a good one
    slo_gap_s: float | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    is_partial: bool = False

    @property
    def num_warm_ups(self) -> int:
        """Requests before each load that are not counted."""
        most = max((load.clients or MOST_WARM_UPS for load in self.loads), default=1)
        return min(most, MOST_WARM_UPS)

    def run(
        self,
        is_interrupted: Callable[[], bool],
        on_progress: Callable[[str], None],
        on_row: Callable[[], None],
    ) -> None:
        """Every load in turn; `on_row` is called after each. What stops it is in the problems."""
        door = Door.find(self.questions.served.endpoint)
        self.problems += self.questions.problems()
        for number, load in enumerate(self.loads):
            warm_ups, questions = (
                replace(self.questions, first=(2 * number + place) * PLACES) for place in (0, 1)
            )
            self._warm_up(door, warm_ups, is_interrupted)
            if is_interrupted():
                self.is_partial = True
                self.problems.append(f"{load.label}: not measured; the run was interrupted.")
                return
            record = LoadRecord(load)
            run_load(
                door,
                questions,
                record,
                self.limit_s,
                is_interrupted,
                lambda one: on_progress(_progress(one)),
            )
            if not any(one.is_answered for one in record.outcomes):
                reason = next((one.error for one in record.outcomes if one.error), record.stopped)
                raise EngineLostError(f"{load.label}: no request was answered; {reason}.")
            self._add(record)
            on_row()
            if record.stopped is not None:
                return

    def _warm_up(
        self, door: Door, questions: Questions, is_interrupted: Callable[[], bool]
    ) -> None:
        """Some requests at once, so that no load pays for what a server does but once."""
        count = self.num_warm_ups
        load = OfferedLoad(clients=count, num_requests=count)
        run_load(door, questions, LoadRecord(load), self.limit_s, is_interrupted)

    def _add(self, record: LoadRecord) -> None:
        row = describe_row(record, Goal(self.slo_ttft_s, self.slo_gap_s))
        self.rows.append(row)
        self.problems += tell_problems(row, record.stopped)
        self.is_partial |= record.stopped is not None or row["num_failed"] > 0


def _progress(record: LoadRecord) -> str:
    """How far a load is, in a line."""
    failed = sum(one.error is not None for one in record.outcomes)
    parts = [
        record.load.label,
        f"{record.num_sent} sent",
        f"{record.num_in_flight} in flight",
        f"{len(record.outcomes) - failed} answered",
        *([f"{failed} failed"] if failed else []),
    ]
    return "  ".join(parts)
