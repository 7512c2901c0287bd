"""From a target alone to a drafter, in one folder: prompts, answers, training, and the result.

    out/prompts.jsonl   what the target was asked, where no prompts were given
    out/answers/        what it wrote
    out/run/            log, plot and states
    out/drafter/        the drafter, in z-lab's layout, with its provenance

Every stage finds what it has done before, so the same call goes on after an interrupt; a second
call at the same time is refused. Under torchrun the first process makes the data and all train.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flashdraft.kernels.select import select_kernels
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.sources import resolve_source
from flashdraft.train.fit.loop import LogRow
from flashdraft.train.job import (
    TrainingJob,
    plan_drafter,
)
from flashdraft.train.lock import make_folder, sole_writer
from flashdraft.train.stages.answering import make_answers
from flashdraft.train.stages.material import Material
from flashdraft.train.stages.result import refuse_worse, write_result
from flashdraft.train.stages.start import make_drafter
from flashdraft.train.stages.training import Training

_PATIENCE = timedelta(days=7)  # processes wait for the first one to make the data


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
            job.dtype_on(device),
            weights=job.weights,
        )
        make_folder(job.out)
        with sole_writer(job.out) if rank == 0 else nullcontext():
            if rank == 0 and not job.answers:
                make_answers(job, kernels, note)
            if dist.is_initialized():
                dist.barrier()
            said = note if rank == 0 else lambda text: None
            material = Material.read(job, checkpoint, kernels)
            drafter = make_drafter(job, checkpoint, planned, kernels.device)
            training = Training(job, checkpoint, material, kernels, said)
            results = training.run(drafter, report)
            if rank:
                return {}
            refuse_worse(job, training.before, results)
            return write_result(job, material, drafter, results, training.before)


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
