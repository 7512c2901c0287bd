"""What each ingredient of the default drafter's recipe gives: short training runs, one change each.

    python -m benchmarks.train_ablations --answers GIVEN --answers SYNTH --steps 500 \\
        --continue-from DRAFTER --output benchmarks/results/h200_ablations.json

All runs have the same seed, steps and held-out prompts (in no batch). The `continued` ones start
from the drafter given, where a long run stood before its decay, and decay from there; the others
start from random weights. The same command goes on after the last finished run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.accepted_length import describe_environment, report_progress, write_results
from flashdraft.kernels.interface import Kernels
from flashdraft.kernels.select import select_kernels
from flashdraft.models.drafter.loading import load_drafter
from flashdraft.models.drafter.model import Drafter
from flashdraft.models.loading import Checkpoint, open_checkpoint
from flashdraft.models.registry import build_target
from flashdraft.models.sources import resolve_source
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.train.data.answers import AnswerSet
from flashdraft.train.evaluate import Evaluation, evaluate_offline
from flashdraft.train.fit.batches import BatchPlan
from flashdraft.train.fit.loop import Trainer
from flashdraft.train.fit.schedule import TrainConfig
from flashdraft.train.fit.step import TrainingStep
from flashdraft.train.initial import calibrate, choose_mask_token, new_drafter, spread_taps

SYNTH, REWORDED = "synth", "+reworded"  # how the prompts' sources are named
Wanted = Callable[[str], bool]


@dataclass(frozen=True)
class Variant:
    """One run: what differs from the recipe."""

    wanted: Wanted = lambda source: True  # sources of training prompts
    share: float = 1.0  # of their answers
    layers: int = 5
    taps: int = 5
    continued: bool = False
    train: Mapping[str, Any] = field(default_factory=dict)


VARIANTS = {
    "the recipe": Variant(),
    "rate 6e-3": Variant(train={"learning_rate": 6e-3}),
    "1/16 of the answers": Variant(share=1 / 16),
    "1/64 of the answers": Variant(share=1 / 64),
    "only prompts of the target's own": Variant(wanted=lambda source: source == SYNTH),
    "no prompts of the target's own": Variant(wanted=lambda source: source != SYNTH),
    "no reworded prompts": Variant(wanted=lambda source: not source.endswith(REWORDED)),
    "3 layers": Variant(layers=3),
    "8 layers": Variant(layers=8),
    "3 taps": Variant(taps=3),
    "9 taps": Variant(taps=9),
    "continued: CE": Variant(continued=True, train={"short_share": 0.0}),
    "continued: half of the blocks cut": Variant(continued=True, train={"short_share": 0.5}),
}


class Laboratory:
    """The target and the answers that all runs share."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.model: str = arguments.model
        self.kernels: Kernels = select_kernels(arguments.device, arguments.dtype)
        self.checkpoint: Checkpoint = open_checkpoint(resolve_source(self.model).path)
        self.continue_from: Path | None = arguments.continue_from
        self.config = TrainConfig(
            steps=arguments.steps,
            rows=arguments.rows,
            blocks=arguments.blocks,
            seed=arguments.seed,
            short_share=0.0,
            evaluate_every=0,
            save_every=0,
        )
        everything = AnswerSet.read(arguments.answers)
        self.answers, held_out = everything.split(arguments.held_out, arguments.seed)
        fits = held_out.starts.diff() <= arguments.rows
        self.held_out = held_out.select(held_out.greedy & fits)

    def chosen_answers(self, variant: Variant) -> AnswerSet:
        """The training answers that a variant has."""
        answers = self.answers
        names = [variant.wanted(name) for name in answers.source_names]
        mask = torch.tensor(names)[answers.source_index]
        if variant.share < 1:
            random = np.random.default_rng(self.config.seed)
            mask &= torch.from_numpy(random.random(len(answers)) < variant.share)
        return answers.select(mask)

    def drafter(self, variant: Variant) -> Drafter:
        """Where a variant's run begins."""
        config = self.checkpoint.config
        if variant.continued:
            assert self.continue_from is not None
            drafter = load_drafter(self.continue_from, config)
        else:
            drafter = new_drafter(
                config,
                mask_token_id=choose_mask_token(
                    config, Tokenizer.from_checkpoint(self.checkpoint.path)
                ),
                layers=variant.layers,
                taps=spread_taps(len(config.layers), variant.taps),
                seed=self.config.seed,
            )
        return drafter.to(self.kernels.device, torch.float32)

    def run(self, name: str, variant: Variant) -> dict[str, Any]:
        """Train a variant and judge it."""
        changes = dict(variant.train)
        if variant.continued:  # all of a continued run is decay
            changes = {"decay_share": 1.0, "learning_rate": 4e-3, **changes}
        config = dataclasses.replace(self.config, **changes)
        answers, drafter = self.chosen_answers(variant), self.drafter(variant)
        plan = BatchPlan(
            answers,
            max_rows=config.rows,
            num_blocks=config.blocks,
            block_size=drafter.config.block_size,
            seed=config.seed,
            short_share=config.short_share,
        )
        source, taps = self.checkpoint.source, drafter.config.tap_layers
        target = build_target(self.checkpoint.config, source, self.kernels, taps)
        step = TrainingStep(
            drafter,
            target,
            max_rows=config.rows,
            compile=self.kernels.device.type == "cuda",
        )
        if not variant.continued:
            batch = next(plan.batches(0)).to(self.kernels.device)
            rows = step.features.run(batch)[: sum(batch.lengths)]
            calibrate(drafter, rows, source.read("model.norm.weight"))
        laps: list[tuple[int, float]] = []
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(
                drafter,
                step,
                plan,
                config,
                Path(folder),
                report=lambda row: laps.append((row["step"], row["seconds"])),
            )
            begin = time.perf_counter()
            trainer.run()
            seconds = time.perf_counter() - begin
        found = evaluate_offline(
            step,
            self.held_out,
            max_rows=config.rows,
            num_blocks=config.blocks,
            max_tokens=self.held_out.max_tokens,
        )
        laps = laps or [(0, 0.0)]
        (first, since), (last, until) = laps[0], laps[-1]  # the first lap compiles
        return {
            "name": name,
            "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
            "answers": len(answers),
            "epochs": round(config.steps / len(plan), 3),  # type: ignore[operator]
            "seconds": round(seconds, 1),
            "step_ms": round(1000 * (until - since) / max(1, last - first), 2),
            "held_out": numbers(found),
        }


def numbers(found: Evaluation) -> dict[str, Any]:
    """Accepted length: mean over requests, without loops, pooled; and of groups of sources."""
    overall = found.overall()
    groups: dict[str, list[Any]] = {}
    for request in found.requests:
        groups.setdefault(group_of(request.source), []).append(request)
    return {
        "mean": round(overall.mean, 3),
        "without_loops": round(found.overall(with_loops=False).mean, 3),
        "pooled": round(overall.pooled, 3),
        "groups": {
            group: round(Evaluation(many).overall().mean, 3)
            for group, many in sorted(groups.items())
        },
    }


def group_of(source: str) -> str:
    """Mathematics, code, the target's own prompts, or anything else."""
    if source == SYNTH:
        return SYNTH
    if source.startswith(("gsm8k", "math", "svamp", "llm-adapters", "reasoning-gym")):
        return "mathematics"
    if source.startswith(("pypi", "mb", "leetcode", "gpteacher/codegen")):
        return "code"
    return "other"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Short training runs with one change each.")
    parser.add_argument("names", nargs="*", help="runs to do; default: all of them")
    parser.add_argument("--answers", action="append", required=True, type=Path, metavar="DIR")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--continue-from", type=Path, metavar="DRAFTER")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rows", type=int, default=TrainConfig.rows)
    parser.add_argument("--blocks", type=int, default=TrainConfig.blocks)
    parser.add_argument("--held-out", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--minutes", type=float, help="begin no run after so many")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    begin, arguments = time.perf_counter(), parse_arguments()
    laboratory = Laboratory(arguments)
    settings = {
        "model": arguments.model,
        "steps": arguments.steps,
        "rows": arguments.rows,
        "blocks": arguments.blocks,
        "held_out_prompts": len(laboratory.held_out),
        "seed": arguments.seed,
        "measure": "accepted length, offline, verify 15, held-out training prompts, 256 tokens",
    }
    runs: list[dict[str, Any]] = []
    if arguments.output.is_file():
        stored = json.loads(arguments.output.read_text(encoding="utf-8"))
        runs = stored["runs"] if stored["settings"] == settings else []
    names = arguments.names or [
        name for name, v in VARIANTS.items() if not v.continued or laboratory.continue_from
    ]
    environment = describe_environment("benchmarks.train_ablations", laboratory.kernels.device)
    for name in names:
        if any(run["name"] == name for run in runs):
            continue
        if arguments.minutes and time.perf_counter() - begin > 60 * arguments.minutes:
            break
        runs.append(laboratory.run(name, VARIANTS[name]))
        report_progress(json.dumps(runs[-1]))
        write_results(
            arguments.output, {"environment": environment, "settings": settings, "runs": runs}
        )


if __name__ == "__main__":
    main()
