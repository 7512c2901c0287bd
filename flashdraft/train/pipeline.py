"""From a target alone to a drafter, in one folder: prompts, answers, training, and the result.

    out/prompts.jsonl   what the target was asked, where no prompts were given
    out/answers/        what it wrote
    out/run/            log, plot and states
    out/drafter/        the drafter, in z-lab's layout, with its provenance

Every stage finds what it has done before, so the same call goes on after an interrupt; a second
call at the same time is refused. Under torchrun the first process makes the data and all train.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from flashdraft.errors import CapacityError, RequestError, TrainingError
from flashdraft.kernels.interface import Kernels
from flashdraft.kernels.select import select_kernels
from flashdraft.models.drafter import Drafter
from flashdraft.models.drafter_loading import (
    check_fit,
    load_drafter,
    read_drafter_config,
    save_drafter,
)
from flashdraft.models.loading import Checkpoint, loading_progress, open_checkpoint
from flashdraft.models.registry import build_target
from flashdraft.models.sources import resolve_source
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.train.answers import AnswerSet
from flashdraft.train.batches import BatchPlan
from flashdraft.train.estimate import check_disk, estimate
from flashdraft.train.evaluate import Evaluation, evaluate_offline
from flashdraft.train.export import provenance, write_provenance
from flashdraft.train.initial import (
    BLOCK_SIZE,
    NUM_LAYERS,
    calibrate,
    choose_mask_token,
    new_drafter,
)
from flashdraft.train.lock import make_folder, sole_writer
from flashdraft.train.loop import LogRow, Trainer
from flashdraft.train.plot import LOG_NAME
from flashdraft.train.prompts import Prompt, drop_overlapping, read_prompts, read_texts
from flashdraft.train.regenerate import AnswerSettings, fingerprint, load_target, regenerate
from flashdraft.train.schedule import TrainConfig
from flashdraft.train.step import TrainingStep
from flashdraft.train.synth import SynthSettings, synthesize

MOST_HELD_OUT = 256
HELD_OUT_SHARE = 0.05
_PATIENCE = timedelta(days=7)  # processes wait for the first one to make the data


@dataclass(frozen=True)
class TrainingJob:
    """What to train, from what, and where to."""

    target: str
    out: Path
    prompts: tuple[str, ...] = ()  # none = the target writes `synth_count` of them
    answers: tuple[str, ...] = ()  # none = the target answers the prompts
    exclude: tuple[str, ...] = ()  # files of prompts that no training prompt may overlap
    init_from: str | None = None
    layers: int | None = None
    block_size: int | None = None
    taps: tuple[int, ...] | None = None
    mask_token: int | None = None
    synth_count: int = 20_000
    held_out: int | None = None  # prompts; None = a twentieth, at most 256
    device: str = "auto"
    dtype: str = "auto"  # of the target; bfloat16 on a GPU, float32 on a CPU
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


def train_drafter(
    job: TrainingJob,
    *,
    note: Callable[[str], None] = lambda text: None,
    report: Callable[[LogRow], None] = lambda row: None,
) -> dict[str, Any]:
    """Do what is still to be done; return what came of it (on the first process, {} elsewhere)."""
    checkpoint = open_checkpoint(resolve_source(job.target).path)
    if job.init_from is not None:  # refused before hours of work, not after
        check_fit(read_drafter_config(resolve_source(job.init_from).path), checkpoint.config)
    make_folder(job.out)
    with (
        processes(job.device) as (rank, device),
        sole_writer(job.out) if rank == 0 else nullcontext(),
    ):
        kernels = select_kernels(device, _dtype(job, device))
        if rank == 0 and not job.answers:
            make_answers(job, kernels, note)
        if dist.is_initialized():
            dist.barrier()
        return _Run(job, checkpoint, kernels, rank, note if rank == 0 else lambda text: None).train(
            report
        )


def make_answers(job: TrainingJob, kernels: Kernels, note: Callable[[str], None]) -> None:
    """Have the target answer the prompts, its own where none are given."""
    forbidden = read_texts(job.exclude)
    prompts: list[Prompt] = []
    for name in job.prompts:
        prompts += read_prompts(name)
    llm = load_target(job.target, kernels.device, _dtype(job, kernels.device))
    if not job.prompts:
        file = job.out / "prompts.jsonl"
        note(f"prompts: {job.synth_count} of the target's own, in {file}")
        synthesize(
            llm, file, job.synth_count, SynthSettings(seed=job.train.seed), exclude=forbidden
        )
        prompts = read_prompts(file)[: job.synth_count]
    kept = drop_overlapping(prompts, forbidden)
    note(f"answers: to {len(kept)} prompts ({len(prompts) - len(kept)} excluded), in {job.out}")
    done = regenerate(llm, kept, job.out / "answers", job.answering)
    note(
        f"answers: {done.num_found} found, {done.num_answers} new ({done.num_too_long} prompts too "
        f"long, {done.num_refused} refused by the template), {done.tokens_per_s:.0f} tok/s"
    )
    del llm
    gc.collect()
    if kernels.device.type == "cuda":
        torch.cuda.empty_cache()


class _Run:
    """The training stage: everything from answers on disk to a drafter on disk."""

    def __init__(
        self,
        job: TrainingJob,
        checkpoint: Checkpoint,
        kernels: Kernels,
        rank: int,
        note: Callable[[str], None],
    ) -> None:
        self._job, self._checkpoint, self._kernels = job, checkpoint, kernels
        self._rank, self._note = rank, note
        everything = AnswerSet.read(job.answers or (job.out / "answers",))
        largest = int(everything.tokens.max())
        if largest >= checkpoint.config.vocab_size:
            raise TrainingError(
                f"The answers hold token {largest}, and the vocabulary of {job.target} has "
                f"{checkpoint.config.vocab_size}: they are another target's. Leave --answers out "
                "to make new ones."
            )
        self._digest = everything.digest()
        self._target = {"name": Path(job.target).name, "fingerprint": fingerprint(job.target)}
        self._origin = job.init_from and Path(job.init_from).name
        count = job.held_out
        if count is None:
            count = min(MOST_HELD_OUT, max(1, int(len(everything) * HELD_OUT_SHARE)))
        self._answers, held_out = everything.split(count, job.train.seed)
        fits = held_out.starts.diff() <= job.train.rows
        self._held_out = held_out.select(held_out.greedy & fits)

    def train(self, report: Callable[[LogRow], None]) -> dict[str, Any]:
        job, config = self._job, self._job.train
        drafter = self._drafter()
        plan = BatchPlan(
            self._answers,
            max_rows=config.rows,
            num_blocks=config.blocks,
            block_size=drafter.config.block_size,
            seed=config.seed,
            short_share=config.short_share,
        )
        self._estimate(drafter, plan)
        with loading_progress(self._checkpoint.source, job.target) as on_read:
            target = build_target(
                self._checkpoint.config,
                self._checkpoint.source,
                self._kernels,
                drafter.config.tap_layers,
                on_read,
            )
        on_gpu = self._kernels.device.type == "cuda"
        step = TrainingStep(
            drafter,
            target,
            max_rows=config.rows,
            compile=config.compile and on_gpu,
        )
        if job.init_from is None:
            batch = next(plan.batches(0)).to(self._kernels.device)
            taps = step.features.run(batch)[: sum(batch.lengths)]
            calibrate(drafter, taps, self._checkpoint.source.read("model.norm.weight"))
        trainer = Trainer(
            drafter,
            step,
            plan,
            config,
            job.out / "run",
            identity={
                "target": self._target,
                "data": self._digest,
                "init_from": self._origin,
                "drafter": drafter.config.to_hf(),
            },
            evaluate=(lambda: summarise(self._evaluate(step))) if len(self._held_out) else None,
            report=report,
        )
        try:
            results = trainer.run()
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"A batch of {config.rows} rows and {config.blocks} blocks does not fit in memory "
                f"({error}); halve --rows and --blocks and double --accumulation."
            ) from error
        return self._finish(drafter, results) if self._rank == 0 else {}

    def _drafter(self) -> Drafter:
        job, target = self._job, self._checkpoint.config
        if job.init_from is not None:
            drafter = load_drafter(resolve_source(job.init_from).path, target)
        else:
            mask = job.mask_token
            if mask is None:
                tokenizer = Tokenizer.from_checkpoint(self._checkpoint.path)
                mask = choose_mask_token(target, tokenizer)
            drafter = new_drafter(
                target,
                mask_token_id=mask,
                layers=NUM_LAYERS if job.layers is None else job.layers,
                block_size=BLOCK_SIZE if job.block_size is None else job.block_size,
                taps=job.taps,
                seed=job.train.seed,
            )
        any_width = job.train.short_share > 0
        drafter.config = replace(drafter.config, any_width=any_width)
        return drafter.to(self._kernels.device, torch.float32)

    def _estimate(self, drafter: Drafter, plan: BatchPlan) -> None:
        expected = estimate(
            drafter.config,
            self._checkpoint.config,
            self._job.train,
            num_examples=len(self._answers),
            answer_tokens=self._answers.num_answer_tokens,
            num_batches=len(plan),
            device=self._kernels.device,
            world=dist.get_world_size() if dist.is_initialized() else 1,
        )
        for line in expected.describe():
            self._note(line)
        self._note(f"held out: {len(self._held_out)} prompts with greedy answers")
        check_disk(self._job.out, expected.disk_gb)

    def _evaluate(self, step: TrainingStep) -> Evaluation:
        config = self._job.train
        return evaluate_offline(
            step,
            self._held_out,
            max_rows=config.rows,
            num_blocks=config.blocks,
            max_tokens=self._held_out.max_tokens,
        )

    def _finish(self, drafter: Drafter, results: LogRow) -> dict[str, Any]:
        job, folder = self._job, self._job.out / "drafter"
        recipe = {
            "init_from": self._origin,
            "train": asdict(job.train),
            "answering": None if job.answers else asdict(job.answering),
        }
        data = {
            "sha256": self._digest,
            "num_answers": len(self._answers),
            "answer_tokens": self._answers.num_answer_tokens,
            "held_out": len(self._held_out),
            "sources": list(self._answers.source_names),
        }
        record = provenance(target=self._target, data=[data], recipe=recipe, held_out=results)
        try:
            save_drafter(drafter, folder)
            write_provenance(folder, record)
        except (OSError, SafetensorError) as error:
            raise TrainingError(
                f"The drafter cannot be written to {folder}: {error}. The run's last state is kept;"
                " make room and run the same command again."
            ) from None
        return {"drafter": str(folder), "log": str(job.out / "run" / LOG_NAME), **record}


def summarise(found: Evaluation) -> LogRow:
    """What a log says of an evaluation: means over requests, and all of them pooled."""
    overall, without_loops = found.overall(), found.overall(with_loops=False)
    return {
        "accepted_length": overall.mean,
        "accepted_length_pooled": overall.pooled,
        "accepted_length_without_loops": without_loops.mean,
        "acceptance": [round(share, 4) for share in overall.acceptance],
        "by_source": {source: task.mean for source, task in found.tasks().items()},
        "num_requests": overall.num_requests,
    }


@contextmanager
def processes(device: str) -> Iterator[tuple[int, torch.device]]:
    """This process's rank and device: torchrun's, or 0 and the one that was asked for."""
    found = select_kernels(device, "auto").device
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0, found
        return
    if found.type == "cuda":
        found = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(found)
    backend = "nccl" if found.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=_PATIENCE)
    try:
        yield dist.get_rank(), found
    finally:
        dist.destroy_process_group()


def _dtype(job: TrainingJob, device: torch.device) -> str:
    if job.dtype != "auto":
        return job.dtype
    return "bfloat16" if device.type == "cuda" else "float32"
