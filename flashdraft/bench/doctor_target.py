"""Is the target another than the drafter was trained for: other weights, or fewer bits?"""

from __future__ import annotations

import math
from dataclasses import replace

from flashdraft.bench.doctor_probe import Accepted, Patient, Probe, accepted_by, drafter_for
from flashdraft.bench.doctor_replay import agreement
from flashdraft.bench.doctor_report import CLEAR_GAIN, QUANTISED, Cause, Measured
from flashdraft.bench.expected import target_of
from flashdraft.llm import LLM
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.sources import known_models, resolve_source

_GROUP = 32  # neighbouring weights that a format quantises together, at the least
_FULL_GROUP = 24  # distinct values among so many: more levels than a group can show
_FEW_BITS = 3.5  # drafters are known to lose much on targets of 3 bits and less


def find_other_weights(patient: Patient, measured: Measured, deadline: float) -> list[Cause] | None:
    """The target against the one that the drafter was trained for, if that is another.

    None, here and below, where the time did not suffice to tell.
    """
    assert patient.folder is not None and patient.llm.drafter_name is not None
    trained_for = target_of(patient.llm.drafter_name, patient.folder)
    if trained_for is None or trained_for == patient.llm.model:
        return []
    bits = weight_bits(patient.llm.model)
    origin = f"the drafter was trained for {trained_for}"
    if bits is not None:
        origin += f", and this target's weights have about {bits:.1f} bits"
    cause = Cause(
        QUANTISED,
        origin,
        f"use {trained_for} or a format of more bits, or train a drafter on this very target with "
        "flashdraft train",
    )
    if not _is_here(trained_for):
        # nothing to run against: the stored bits alone must tell
        text = f"{origin}; {trained_for} is not on this machine to compare with"
        return [replace(cause, text=text)] if bits is not None and bits < _FEW_BITS else []
    accepted, agreed = _run_reference(patient, measured, trained_for, "auto", deadline)
    if accepted is None:
        return None
    text = (
        f"{origin}; {trained_for} itself chooses {agreed:.0%} of this target's tokens, and accepts "
        f"{accepted.length:.2f} tokens a step where this one has {measured.greedy.length:.2f}"
    )
    cause = replace(cause, text=text, before=measured.greedy.length, after=accepted.length)
    return [cause] if cause.gain >= CLEAR_GAIN else []


def find_low_precision(patient: Patient, measured: Measured, deadline: float) -> list[Cause] | None:
    """The same weights without rounding to 8 bits."""
    if "int8" not in patient.llm.kernels.name:
        return []
    accepted, agreed = _run_reference(patient, measured, patient.llm.model, "float32", deadline)
    if accepted is None:
        return None
    text = (
        f"in float32 {accepted.length:.2f} tokens a step are accepted, in "
        f"{patient.llm.kernels.name} {measured.greedy.length:.2f}; both choose the same token in "
        f"{agreed:.0%} of places"
    )
    cause = Cause(QUANTISED, text, "use --dtype float32", measured.greedy.length, accepted.length)
    return [cause] if cause.gain >= CLEAR_GAIN else []


def _run_reference(
    patient: Patient, measured: Measured, model: str, dtype: str, deadline: float
) -> tuple[Accepted | None, float]:
    """Another target with the same drafter: what it accepts, and how far it agrees with ours."""
    assert patient.folder is not None
    llm = LLM(
        model,
        draft=patient.folder,
        verify=0,
        device=patient.llm.kernels.device,
        dtype=dtype,
        max_batch=1,
        max_context=64,
    )
    probe = Probe(llm.engine.target, drafter_for(llm, patient.folder))
    accepted = accepted_by(probe, measured.prompts, deadline)
    counts = [
        agreement(llm.engine.target, prompt, answer.token_ids)
        for prompt, answer in zip(measured.prompts, measured.answers, strict=True)
        if answer.token_ids
    ]
    total = sum(count for _, count in counts)
    return accepted, sum(agreed for agreed, _ in counts) / max(1, total)


def weight_bits(model: str) -> float | None:
    """Bits of a quantised weight, by the distinct values among neighbours; None if it is not."""
    checkpoint = open_checkpoint(resolve_source(model).path)
    name = f"model.layers.{len(checkpoint.config.layers) // 2}.mlp.down_proj.weight"
    if name not in set(checkpoint.source.names()):
        return None
    rows = checkpoint.source.read(name)[:64].float()
    groups = rows[:, : rows.shape[1] // _GROUP * _GROUP].reshape(-1, _GROUP)
    most = max((len(set(group)) for group in groups.tolist()), default=_GROUP)
    return math.log2(most) if most < _FULL_GROUP else None


def _is_here(name: str) -> bool:
    """Whether a model can be opened without fetching anything."""
    return any(model.name == name and model.cached for model in known_models())
