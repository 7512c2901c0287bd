"""The training stage: from answers on disk to a trained drafter in memory, and its judgement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from flashdraft.errors import CapacityError
from flashdraft.kernels.interface import Kernels
from flashdraft.models.drafter.model import Drafter
from flashdraft.models.loading import Checkpoint
from flashdraft.train.estimate import check_disk, estimate
from flashdraft.train.evaluate import evaluate_offline
from flashdraft.train.fit.batches import BatchPlan
from flashdraft.train.fit.loop import LogRow, Trainer
from flashdraft.train.fit.step import TrainingStep
from flashdraft.train.job import TrainingJob
from flashdraft.train.stages.material import Material
from flashdraft.train.stages.start import fit_to_target, make_step


class Training:
    """A run of the trainer; under torchrun, this process's part of it."""

    def __init__(
        self,
        job: TrainingJob,
        checkpoint: Checkpoint,
        material: Material,
        kernels: Kernels,
        note: Callable[[str], None],
    ) -> None:
        self._job, self._checkpoint, self._material = job, checkpoint, material
        self._kernels, self._note = kernels, note
        self.before: dict[str, Any] | None = None  # of the drafter that the run starts from

    def run(self, drafter: Drafter, report: Callable[[LogRow], None]) -> LogRow:
        """Train the drafter in place; return the last results."""
        job, config, material = self._job, self._job.train, self._material
        plan = BatchPlan(
            material.answers,
            max_rows=config.rows,
            num_blocks=config.blocks,
            block_size=drafter.config.block_size,
            seed=config.seed,
            short_share=config.short_share,
        )
        self._estimate(drafter, plan)
        step = make_step(job, self._checkpoint, drafter, self._kernels)
        if job.init_from is None:
            fit_to_target(step, plan, self._checkpoint)
        elif len(material.held_out) and not (dist.is_initialized() and dist.get_rank()):
            self.before = self._evaluate(step)
            self._note(f"accepted length, held out, before: {self.before['accepted_length']:.3f}")
        trainer = Trainer(
            drafter,
            step,
            plan,
            config,
            job.out / "run",
            identity={**material.identity(), "drafter": drafter.config.to_hf()},
            evaluate=(lambda: self._evaluate(step)) if len(material.held_out) else None,
            report=report,
        )
        try:
            return trainer.run()
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"A batch of {config.rows} rows and {config.blocks} blocks does not fit in memory "
                f"({error}); halve --rows and --blocks and double --accumulation."
            ) from error

    def _estimate(self, drafter: Drafter, plan: BatchPlan) -> None:
        answers = self._material.answers
        expected = estimate(
            drafter.config,
            self._checkpoint.config,
            self._job.train,
            num_examples=len(answers),
            answer_tokens=answers.num_answer_tokens,
            num_batches=len(plan),
            device=self._kernels.device,
            world=dist.get_world_size() if dist.is_initialized() else 1,
        )
        for line in expected.describe():
            self._note(line)
        self._note(f"held out: {len(self._material.held_out)} prompts with greedy answers")
        check_disk(self._job.out, expected.disk_gb)

    def _evaluate(self, step: TrainingStep) -> dict[str, Any]:
        config, held_out = self._job.train, self._material.held_out
        found = evaluate_offline(
            step,
            held_out,
            max_rows=config.rows,
            num_blocks=config.blocks,
            max_tokens=held_out.max_tokens,
        )
        return found.summary()
