"""What a run learns from and is judged by, and whose it is: the answers, and the target's name.

A run goes on, and a drafter is recorded, under the identity that is made here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdraft.kernels.interface import Kernels
from flashdraft.kernels.select import WeightFormats
from flashdraft.models.loading import Checkpoint
from flashdraft.train.data.answers import AnswerSet
from flashdraft.train.data.regenerate import fingerprint
from flashdraft.train.job import TrainingJob, check_authors, held_out_count


@dataclass(frozen=True)
class Material:
    """Answers on disk, read and divided; no prompt of `held_out` is in `answers`."""

    answers: AnswerSet
    held_out: AnswerSet  # greedy, and no longer than a batch
    digest: str  # of both together
    target: dict[str, str]  # name and fingerprint
    dtype: str  # the target's
    formats: WeightFormats
    origin: str | None  # the name of the drafter that the run starts from

    @classmethod
    def read(cls, job: TrainingJob, checkpoint: Checkpoint, kernels: Kernels) -> Material:
        """The answers of the job; those that its target did not write are refused."""
        everything = AnswerSet.read(job.answers or (job.out / "answers",))
        formats = WeightFormats.of(kernels)
        check_authors(job, everything, checkpoint, formats)
        count = held_out_count(job, len(everything))
        answers, held_out = everything.split(count, job.train.seed)
        fits = held_out.starts.diff() <= job.train.rows
        return cls(
            answers,
            held_out.select(held_out.greedy & fits),
            digest=everything.digest(),
            target={"name": Path(job.target).name, "fingerprint": fingerprint(job.target)},
            dtype=str(kernels.dtype).removeprefix("torch."),
            formats=formats,
            origin=job.init_from and Path(job.init_from).name,
        )

    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on, the drafter's shape apart."""
        return {
            "target": self.target,
            "dtype": self.dtype,
            **self.formats._asdict(),
            "data": self.digest,
            "init_from": self.origin,
        }
