"""Which target would suit a drafter better: the one it knows, or more bits, the most that fit."""

from __future__ import annotations

from dataclasses import replace

from flashdraft.bench.doctor.probe import Patient
from flashdraft.bench.plan.gpus import RUNTIME_BYTES
from flashdraft.bench.plan.machine import this_machine
from flashdraft.bench.plan.pairs import find_pair
from flashdraft.bench.plan.plan import make_plan
from flashdraft.errors import FlashdraftError
from flashdraft.kernels.kinds import WeightOptions
from flashdraft.kernels.select import weights_of


def better_target(
    patient: Patient,
    trained_for: str,
    trained_in: WeightOptions,
    bits: float | None,
) -> str:
    """The target as the drafter knows it; more bits, the most that fit; or another drafter."""
    model, kernels = patient.llm.model, patient.llm.kernels
    options = [] if trained_for == model else [f"use {trained_for}"]
    if any(trained_in):
        options.append(f"give {trained_in.flags()} as in training")
    # what a file has rounded no flag brings back
    better = None if kernels.quantize is None or bits is None else _better_format(patient, bits)
    if better is not None:
        options.append(better)
    elif trained_for != model:
        options.append("a format of more bits")
    words = ["flashdraft train", model, weights_of(kernels).flags(), "--out FOLDER"]
    options.append(f"train a drafter on this very target: {' '.join(filter(None, words))}")
    return f"{', or '.join(options)}; flashdraft plan {model} says which formats fit"


def _better_format(patient: Patient, bits: float) -> str | None:
    """The most exact format that this GPU holds, where the target is in one of fewer bits."""
    try:
        card = this_machine()
        # what is taken now is mostly this very pair, which would make room
        card = replace(card, free_bytes=max(card.free_bytes, card.memory_bytes - RUNTIME_BYTES))
        pair = find_pair(patient.llm.model, patient.llm.drafter_name or "none")
        plan = make_plan(pair, card, cache=patient.cache)
    except FlashdraftError:  # sizes that plan does not know, a driver that says nothing
        return None
    best = next((fit.form for fit in plan.fits if fit.fits and fit.form.bits > bits), None)
    if best is None:
        return None
    return f"use {' '.join(best.flags)}" if best.flags else "leave --quantize out (bf16 fits here)"
