"""What to train, from what, and where to; and what of it can be refused before hours of work."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch

from flashdraft.errors import RequestError, TrainingError
from flashdraft.kernels.kinds import AS_STORED, WeightOptions
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.opening import check_fit
from flashdraft.models.loading import Checkpoint
from flashdraft.models.sources import resolve_source
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.train.data.answers import AnswerSet, Author, fingerprint, tokenizer_digest
from flashdraft.train.data.settings import AnswerSettings
from flashdraft.train.fit.schedule import TrainConfig
from flashdraft.train.initial import (
    BLOCK_SIZE,
    HEAD_RANK,
    NUM_LAYERS,
    choose_mask_token,
    drafter_config,
    with_head,
)
from flashdraft.train.origin import read_origin_config

MOST_HELD_OUT = 256
HELD_OUT_SHARE = 0.05
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingJob:
    """What to train, from what, and where to."""

    target: str
    out: Path
    prompts: tuple[str, ...] = ()  # none = the target writes `synth_count` of them
    answers: tuple[str, ...] = ()  # none = the target answers the prompts
    exclude: tuple[str, ...] = ()  # files of prompts that no training prompt may overlap
    init_from: str | None = None  # a drafter, or a state of another run
    layers: int | None = None
    block_size: int | None = None
    taps: tuple[int, ...] | None = None
    mask_token: int | None = None
    head: str | None = None  # markov or selector, added to the drafter that the run starts from
    head_rank: int = HEAD_RANK
    synth_count: int = 20_000
    held_out: int | None = None  # prompts; None = a twentieth, at most 256
    device: str = "auto"
    dtype: str = "auto"  # of the target; bfloat16 on a GPU, float32 on a CPU
    weights: WeightOptions = AS_STORED  # what the target's float weights become on a GPU
    train: TrainConfig = field(default_factory=TrainConfig)
    answering: AnswerSettings = field(default_factory=AnswerSettings)

    def __post_init__(self) -> None:
        shape = ("layers", "block_size", "taps", "mask_token")
        given = [name for name in shape if getattr(self, name) is not None]
        if self.init_from is not None and given:
            raise RequestError(
                f"{', '.join(given)} cannot be chosen with init_from: the drafter's shape is that "
                f"of {self.init_from}."
            )
        if self.answers and (self.prompts or self.exclude):
            raise RequestError(
                "answers are given, so prompts and exclude would not be used; leave them out, or "
                "leave the answers out to have the prompts answered."
            )
        if self.synth_count < 1:
            raise RequestError(f"synth_count is {self.synth_count}; it must be at least 1.")
        if self.held_out is not None and self.held_out < 0:
            raise RequestError(f"held_out is {self.held_out}; it must be at least 0.")

    def dtype_on(self, device: torch.device) -> str:
        """The target's dtype on a device, where none was asked for too."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if device.type == "cuda" else "float32"


def plan_drafter(job: TrainingJob, checkpoint: Checkpoint) -> DrafterConfig:
    """The shape of the drafter that the job asks for; refused where it cannot be."""
    target = checkpoint.config
    if job.init_from is not None:
        config = read_origin_config(resolve_source(job.init_from).path)
        check_fit(config, target)
        return config if job.head is None else with_head(config, job.head, job.head_rank)
    mask = job.mask_token
    if mask is None:
        mask = choose_mask_token(target, Tokenizer.from_checkpoint(checkpoint.path))
    config = drafter_config(
        target,
        mask_token_id=mask,
        layers=NUM_LAYERS if job.layers is None else job.layers,
        block_size=BLOCK_SIZE if job.block_size is None else job.block_size,
        taps=job.taps,
    )
    return config if job.head is None else with_head(config, job.head, job.head_rank)


def held_out_count(job: TrainingJob, num_prompts: int) -> int:
    """How many prompts are kept out of training."""
    if job.held_out is not None:
        return job.held_out
    return min(MOST_HELD_OUT, max(1, int(num_prompts * HELD_OUT_SHARE)))


def check_held_out(job: TrainingJob, num_prompts: int) -> None:
    """Refuse to hold out all prompts, before they are answered."""
    count = held_out_count(job, num_prompts)
    if count >= num_prompts:
        raise TrainingError(
            f"{count} prompts are to be held out of {num_prompts}; hold out at most "
            f"{max(0, num_prompts - 1)} (--held-out), or give more prompts."
        )


def check_authors(
    job: TrainingJob, answers: AnswerSet, checkpoint: Checkpoint, formats: WeightOptions
) -> None:
    """Refuse answers in another target's tokens, or of this one in other bits than `formats`.

    Those that another target wrote are warned of.
    """
    vocab_size = checkpoint.config.vocab_size
    remedy = "Leave --answers out to make new ones, or name the target that wrote them."
    largest = int(answers.tokens.max())
    if largest >= vocab_size:
        raise TrainingError(
            f"The answers hold token {largest}, and the vocabulary of {job.target} has "
            f"{vocab_size}: they are another target's. {remedy}"
        )
    tokenizer = Tokenizer.from_checkpoint(checkpoint.path)
    ours = Author(
        Path(job.target).name,
        fingerprint(job.target),
        vocab_size,
        None if tokenizer is None else tokenizer_digest(tokenizer),
    )
    for author in sorted(answers.authors, key=str):
        name = author.name or "another target"
        if author.vocab_size not in (None, vocab_size):
            raise TrainingError(
                f"The answers were written by {name}, whose vocabulary has {author.vocab_size} "
                f"tokens; that of {ours.name} has {vocab_size}. {remedy}"
            )
        if author.tokenizer and ours.tokenizer and author.tokenizer != ours.tokenizer:
            raise TrainingError(
                f"The answers were written by {name}, whose tokenizer is not that of {ours.name}: "
                f"the same tokens are other words to it. {remedy}"
            )
        if author.formats not in (None, formats):
            given = author.formats.flags() or "neither --quantize nor --quantize-head"
            raise TrainingError(
                f"The answers were written by {name} with its weights {author.formats.describe()}, "
                f"and here the drafter would learn from weights {formats.describe()}. Give {given} "
                "as then, or leave --answers out to make new ones."
            )
        if author.fingerprint not in (None, ours.fingerprint):
            log.warning(
                "The answers were written by %s (%.8s), not by %s (%.8s). A drafter is accepted "
                "less often where its target would have written something else; leave --answers "
                "out to have them written anew.",
                name,
                author.fingerprint,
                ours.name,
                ours.fingerprint,
            )
