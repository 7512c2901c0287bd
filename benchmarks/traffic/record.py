"""What happened: every step, every piece of every answer, with its time. Figures come later."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from flashdraft.core import Generation, StepStats

DRAFTED, PLAIN, MIXED, PROMPT, NOTHING = "drafted", "plain", "mixed", "prompt", "nothing"
STEP_KINDS = (DRAFTED, PLAIN, MIXED, PROMPT, NOTHING)


class Piece(NamedTuple):
    """Tokens that one step brought one request."""

    at: float
    request_id: str
    num_tokens: int


class StepMark(NamedTuple):
    """One call of `Engine.step`."""

    begin: float
    end: float
    kind: str
    num_prompt_tokens: int
    verify_lengths: tuple[int, ...]  # one for each request that decoded
    num_accepted: int
    device_s: float = 0.0  # of the step that was read, where the device keeps time

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def num_rows(self) -> int:
        """Of its pass, but for those of nobody."""
        return self.num_prompt_tokens + len(self.verify_lengths) + sum(self.verify_lengths)


class End(NamedTuple):
    """A request's last event."""

    at: float
    request_id: str
    generation: Generation


@dataclass
class Record:
    """A run as it was, in the order of time."""

    begin: float
    arrivals: dict[str, float] = field(default_factory=dict)  # when each request was due
    pieces: list[Piece] = field(default_factory=list)
    steps: list[StepMark] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)

    @property
    def last(self) -> float:
        return self.steps[-1].end if self.steps else self.begin


def kind_of_step(stats: StepStats) -> str:
    """What a step did: decoding with or without drafts, prompts, both, or nothing."""
    if stats.num_prefill_tokens and stats.num_decoding:
        return MIXED
    if stats.num_prefill_tokens:
        return PROMPT
    if not stats.num_decoding:
        return NOTHING
    return DRAFTED if any(stats.verify_lengths) else PLAIN
