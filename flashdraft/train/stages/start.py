"""What a run starts with: a drafter, new or another run's, and the target beside it."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashdraft.kernels.interface import Kernels
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.model import Drafter
from flashdraft.models.loading import Checkpoint, loading_progress
from flashdraft.models.registry import build_target
from flashdraft.models.sources import resolve_source
from flashdraft.train.fit.batches import BatchPlan
from flashdraft.train.fit.step import TrainingStep
from flashdraft.train.initial import add_head, calibrate, new_drafter
from flashdraft.train.job import TrainingJob
from flashdraft.train.origin import load_origin

_ANY_WIDTH_SHARE = 0.25  # of the blocks cut short: with fewer a cut block drafts worse than a whole


def make_drafter(
    job: TrainingJob, checkpoint: Checkpoint, planned: DrafterConfig, device: torch.device
) -> Drafter:
    """The drafter before the first step, in float32; a new one is still to be fitted."""
    if job.init_from is not None:
        drafter = load_origin(resolve_source(job.init_from).path, checkpoint.config)
    else:
        drafter = new_drafter(
            checkpoint.config,
            mask_token_id=planned.mask_token_id,
            layers=planned.num_layers,
            block_size=planned.block_size,
            taps=planned.tap_layers,
            seed=job.train.seed,
        )
    if job.head is not None:
        drafter = add_head(drafter, job.head, job.head_rank)
    any_width = job.train.short_share >= _ANY_WIDTH_SHARE
    drafter.config = replace(drafter.config, any_width=any_width)
    return drafter.to(device, torch.float32)


def make_step(
    job: TrainingJob, checkpoint: Checkpoint, drafter: Drafter, kernels: Kernels
) -> TrainingStep:
    """The target, read and frozen, and the drafter that learns beside it."""
    with loading_progress(checkpoint.source, job.target) as on_read:
        target = build_target(
            checkpoint.config, checkpoint.source, kernels, drafter.config.tap_layers, on_read
        )
    compile = job.train.compile and kernels.device.type == "cuda"
    return TrainingStep(drafter, target, max_rows=job.train.rows, compile=compile)


def fit_to_target(step: TrainingStep, plan: BatchPlan, checkpoint: Checkpoint) -> None:
    """Bring a new drafter to the scale of the target's features, by the first batch of them."""
    batch = next(plan.batches(0)).to(step.target.kernels.device)
    taps = step.features.run(batch)[: sum(batch.lengths)]
    calibrate(step.drafter, taps, checkpoint.source.read("model.norm.weight"))
