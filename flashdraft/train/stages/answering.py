"""The first stage: prompts, the target's own where none are given, and its answers to them.

What it has written before is found on disk, so the same job goes on after an interrupt.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from flashdraft.errors import TrainingError
from flashdraft.kernels.interface import Kernels
from flashdraft.train.data.prompts import Prompt, drop_overlapping, read_prompts, read_texts
from flashdraft.train.data.regenerate import load_target, regenerate
from flashdraft.train.data.synth import SynthSettings, synthesize
from flashdraft.train.job import TrainingJob, check_held_out


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
    dtype = job.dtype_on(kernels.device)
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
