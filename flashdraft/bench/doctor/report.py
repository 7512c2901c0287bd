"""What doctor says: findings, causes, and the report that holds them. It measures nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flashdraft.bench.doctor.expected import Expected
from flashdraft.bench.doctor.probe import Accepted
from flashdraft.bench.doctor.settings import Settings
from flashdraft.bench.doctor.weights import PairWeights
from flashdraft.core import Generation

FORMAT = "flashdraft-doctor/1"
OK, WARNING, PROBLEM = "ok", "warning", "problem"
THINKING, SCALE, TAPS = "thinking mismatch", "embedding scale", "shifted taps"
QUANTISED, TEMPLATE, TEMPERATURE = "quantised target", "wrong template", "temperature"
CLEAR_GAIN = 1.25  # other text accepts otherwise: so much more than before is no accident


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    area: str  # environment, pictures, kernels, law, trees, accepted length, cause or files
    status: str  # ok, warning or problem
    text: str
    remedy: str | None = None


@dataclass(frozen=True)
class Cause:
    """What keeps the accepted length down, how it was found, and what to do."""

    name: str
    text: str
    remedy: str
    before: float | None = None  # accepted length as it is, in the experiment's own measure
    after: float | None = None  # and with the cause undone
    is_certain: bool = False  # seen in the files, whatever it does to the accepted length

    @property
    def gain(self) -> float:
        """How many times more is accepted once it is undone."""
        if self.before is None or self.after is None:
            return 1.0
        return self.after / max(1.0, self.before)


@dataclass(frozen=True)
class Measured:
    """What doctor knows of the pair before it looks for causes."""

    prompts: Sequence[Sequence[int]]
    greedy: Accepted
    sampled: Accepted | None  # at the user's own temperature
    answers: Sequence[Generation]  # greedy, plain or drafted: whichever got further
    expected: Expected  # greedy
    expected_here: Expected  # at the user's temperature

    @property
    def has_basis(self) -> bool:
        """Whether there is anything to reason from: a figure, or some text of the target."""
        return self.greedy.is_known or any(answer.token_ids for answer in self.answers)

    @property
    def is_low(self) -> bool:
        """Whether greedy decoding alone accepts too little, as far as it got."""
        return self.greedy.is_known and self.greedy.length < self.expected.low


@dataclass(frozen=True)
class FileCheck:
    """One file of the pair, read whole. Digests are "sha256:…", or "git:…" as git has files."""

    role: str  # target or drafter
    file: str
    num_bytes: int
    digest: str
    expected: str | None  # None where nobody knows
    is_sound: bool | None  # None likewise


@dataclass
class Report:
    """Everything doctor found."""

    settings: Settings
    drafter: str | None = None
    weights: PairWeights | None = None
    findings: list[Finding] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    accepted: Accepted | None = None  # in the user's own mode
    expected: Expected | None = None
    seconds: float = 0.0
    not_judged: str | None = None  # what kept the pair from being judged, if something did
    files: list[FileCheck] | None = None  # where they alone were asked for

    @property
    def has_problems(self) -> bool:
        return any(finding.status == PROBLEM for finding in self.findings)

    @property
    def is_healthy(self) -> bool:
        return self.not_judged is None and not self.has_problems

    def to_json(self) -> dict[str, Any]:
        """One JSON object; lists are in the report's own order, causes likeliest first."""
        settings = dataclasses.asdict(self.settings)
        mode, cache, _ = settings.pop("mode"), settings.pop("cache"), settings.pop("weights")
        stored = {name: cache[name] for name in ("kv_dtype", "kv_keys")}
        mode["template"] = "given" if mode["template"] is not None else "own"
        return {
            "format": FORMAT,
            "is_healthy": self.is_healthy,
            "not_judged": self.not_judged,
            "settings": {
                **settings,
                **self.settings.weights._asdict(),
                **stored,
                **mode,
                "drafter": self.drafter,
            },
            "weights": None if self.weights is None else self.weights.to_json(),
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "causes": [dataclasses.asdict(cause) for cause in self.causes],
            "accepted": None if self.accepted is None else dataclasses.asdict(self.accepted),
            "expected": None if self.expected is None else dataclasses.asdict(self.expected),
            "files": None if self.files is None else [dataclasses.asdict(f) for f in self.files],
            "seconds": round(self.seconds, 2),
        }
