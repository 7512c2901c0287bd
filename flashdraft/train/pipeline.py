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
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from flashdraft.errors import CapacityError, TrainingError
from flashdraft.kernels.interface import Kernels
from flashdraft.kernels.select import WeightFormats, select_kernels
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.loading import save_drafter
from flashdraft.models.drafter.model import Drafter
from flashdraft.models.loading import Checkpoint, loading_progress, open_checkpoint
from flashdraft.models.registry import build_target
from flashdraft.models.sources import resolve_source
from flashdraft.train.data.answers import AnswerSet, fingerprint
from flashdraft.train.data.prompts import Prompt, drop_overlapping, read_prompts, read_texts
from flashdraft.train.data.regenerate import load_target, regenerate
from flashdraft.train.data.settings import SynthSettings
from flashdraft.train.data.synth import synthesize
from flashdraft.train.estimate import check_disk, estimate
from flashdraft.train.evaluate import Evaluation, evaluate_offline
from flashdraft.train.export import provenance, write_provenance
from flashdraft.train.fit.batches import BatchPlan
from flashdraft.train.fit.loop import LogRow, Trainer
from flashdraft.train.fit.plot import LOG_NAME
from flashdraft.train.fit.step import TrainingStep
from flashdraft.train.initial import calibrate, new_drafter
from flashdraft.train.job import (
    TrainingJob,
    check_authors,
    check_held_out,
    held_out_count,
    plan_drafter,
)
from flashdraft.train.lock import make_folder, sole_writer
from flashdraft.train.origin import load_origin

_PATIENCE = timedelta(days=7)  # processes wait for the first one to make the data
_ANY_WIDTH_SHARE = 0.25  # of the blocks cut short: with fewer a cut block drafts worse than a whole


def train_drafter(
    job: TrainingJob,
    *,
    note: Callable[[str], None] = lambda text: None,
    report: Callable[[LogRow], None] = lambda row: None,
) -> dict[str, Any]:
    """Do what is still to be done; return what came of it (on the first process, {} elsewhere)."""
    checkpoint = open_checkpoint(resolve_source(job.target).path)
    planned = plan_drafter(job, checkpoint)  # refused before hours of work, not after
    with processes(job.device) as (rank, device):
        kernels = select_kernels(
            device,
            _dtype(job, device),
            quantize=job.quantize,
            quantize_head=job.quantize_head,
        )
        make_folder(job.out)
        with sole_writer(job.out) if rank == 0 else nullcontext():
            if rank == 0 and not job.answers:
                make_answers(job, kernels, note)
            if dist.is_initialized():
                dist.barrier()
            said = note if rank == 0 else lambda text: None
            return _Run(job, checkpoint, planned, kernels, rank, said).train(report)


def make_answers(job: TrainingJob, kernels: Kernels, note: Callable[[str], None]) -> None:
    """Have the target answer the prompts, its own where none are given."""
    forbidden = read_texts(job.exclude)
    prompts: list[Prompt] = []
    for name in job.prompts:
        prompts += read_prompts(name)
    kept = drop_overlapping(prompts, forbidden)
    if prompts and not kept:
        raise TrainingError(
            f"All of the {len(prompts)} prompts share 13 words with those to be excluded; give "
            "others, or leave --exclude out."
        )
    check_held_out(job, len(kept) if job.prompts else job.synth_count)
    dtype = _dtype(job, kernels.device)
    llm = load_target(job.target, kernels.device, dtype, job.quantize, job.quantize_head)
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
        f"answers: {done.num_found} found, {done.num_answers} new, {done.tokens_per_s:.0f} tok/s; "
        f"left out: {done.describe_left_out(job.answering)}"
    )
    if done.num_found + done.num_answers == 0:
        raise TrainingError(
            f"None of the {len(kept)} prompts could be answered: "
            f"{done.describe_left_out(job.answering)}. Raise --max-prompt-tokens, or give others."
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
        planned: DrafterConfig,
        kernels: Kernels,
        rank: int,
        note: Callable[[str], None],
    ) -> None:
        self._job, self._checkpoint, self._kernels = job, checkpoint, kernels
        self._planned, self._rank, self._note = planned, rank, note
        everything = AnswerSet.read(job.answers or (job.out / "answers",))
        self._formats = WeightFormats.of(kernels)
        check_authors(job, everything, checkpoint, self._formats)
        self._digest = everything.digest()
        self._target = {"name": Path(job.target).name, "fingerprint": fingerprint(job.target)}
        self._origin = job.init_from and Path(job.init_from).name
        self._dtype = str(kernels.dtype).removeprefix("torch.")
        count = held_out_count(job, len(everything))
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
                "dtype": self._dtype,
                **self._formats._asdict(),
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
            drafter = load_origin(resolve_source(job.init_from).path, target)
        else:
            planned = self._planned
            drafter = new_drafter(
                target,
                mask_token_id=planned.mask_token_id,
                layers=planned.num_layers,
                block_size=planned.block_size,
                taps=planned.tap_layers,
                seed=job.train.seed,
            )
        any_width = job.train.short_share >= _ANY_WIDTH_SHARE
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
        origin = None
        if job.init_from is not None:
            origin = {"name": self._origin, "fingerprint": fingerprint(job.init_from)}
        recipe = {
            "init_from": origin,
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
        target = {**self._target, "dtype": self._dtype, **self._formats._asdict()}
        record = provenance(target=target, data=[data], recipe=recipe, held_out=results)
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
