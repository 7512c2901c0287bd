"""Is the target another than the drafter was trained for: other weights, or fewer bits?"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

from flashdraft.bench.doctor.expected import read_provenance, target_of
from flashdraft.bench.doctor.probe import Accepted, Patient, Probe, accepted_by, drafter_for
from flashdraft.bench.doctor.remedy import better_target
from flashdraft.bench.doctor.replay import agreement
from flashdraft.bench.doctor.report import CLEAR_GAIN, QUANTISED, Cause, Measured
from flashdraft.bench.doctor.weights import (
    describe_formats,
    read_weights,
    recorded_formats,
)
from flashdraft.errors import CapacityError
from flashdraft.kernels.kinds import AS_STORED, WeightOptions
from flashdraft.kernels.select import weights_of
from flashdraft.llm import LLM
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.sources import known_models, resolve_source

_GROUP = 32  # neighbouring weights that a format quantises together, at the least
_FULL_GROUP = 24  # distinct values among so many: more levels than a group can show
_FEW_BITS = 3.5  # drafters are known to lose much on targets of 3 bits and less


def find_other_weights(patient: Patient, measured: Measured, deadline: float) -> list[Cause] | None:
    """The target against the one that the drafter was trained for, if that is another.

    The same files in other bits are another target. None, here and below, where the time did not
    suffice to tell.
    """
    assert patient.folder is not None and patient.llm.drafter_name is not None
    trained_for = target_of(patient.llm.drafter_name, patient.folder)
    trained_in = recorded_formats(read_provenance(patient.folder))
    kernels = patient.llm.kernels
    formats = weights_of(kernels)
    if trained_for is None or (trained_for, trained_in) == (patient.llm.model, formats):
        return []
    origin, bits = _origin(patient, trained_for, trained_in)
    cause = Cause(QUANTISED, origin, better_target(patient, trained_for, trained_in, bits))
    reference = None
    is_possible = kernels.device.type == "cuda" or not any(trained_in)
    if is_possible and _is_here(trained_for, patient.llm.model):
        with contextlib.suppress(CapacityError):  # few bits are there because more do not fit
            reference = _run_reference(patient, measured, trained_for, deadline, trained_in)
    if reference is None:
        # nothing to run against: the bits alone must tell
        text = f"{origin}; {trained_for} cannot be run here beside it, to compare with"
        return [replace(cause, text=text)] if bits is not None and bits < _FEW_BITS else []
    accepted, agreed = reference
    if accepted is None:
        return None
    itself = f"{trained_for} itself" if not any(trained_in) else "the one trained for"
    text = (
        f"{origin}; {itself} chooses {agreed:.0%} of this target's tokens, and accepts "
        f"{accepted.length:.2f} tokens a step where this one has {measured.greedy.length:.2f}"
    )
    cause = replace(cause, text=text, before=measured.greedy.length, after=accepted.length)
    return [cause] if cause.gain >= CLEAR_GAIN else []


def _origin(
    patient: Patient, trained_for: str, trained_in: WeightOptions
) -> tuple[str, float | None]:
    """What the drafter knows and what the target is, in words; and the target's bits, if few."""
    target = read_weights(patient).target
    text = f"the drafter was trained for {trained_for}{describe_formats(trained_in)}"
    # what a CPU's kernels round is not this target's own: find_low_precision looks at that
    is_rounded = not target.stored.is_float or patient.llm.kernels.quantize is not None
    bits = weight_bits(patient.llm.model) if target.stored.is_float else None
    if bits is not None:
        return f"{text}, and this target's weights have about {bits:.1f} bits", bits
    if is_rounded and target.is_in_few_bits:
        return (
            f"{text}, and this target is {target.text}: {target.bits:.1f} bits a weight",
            target.bits,
        )
    return f"{text}, and this target is {target.text}", None


def find_low_precision(patient: Patient, measured: Measured, deadline: float) -> list[Cause] | None:
    """The same weights without rounding to 8 bits."""
    if patient.llm.kernels.weight_dtype != "int8":
        return []
    model = patient.llm.model
    accepted, agreed = _run_reference(patient, measured, model, deadline, dtype="float32")
    if accepted is None:
        return None
    text = (
        f"the target is {read_weights(patient).target.text}: in float32 {accepted.length:.2f} "
        f"tokens a step are accepted, so {measured.greedy.length:.2f}; both choose the same token "
        f"in {agreed:.0%} of places"
    )
    remedy = f"use --dtype float32 (flashdraft plan {model} says whether it fits)"
    cause = Cause(QUANTISED, text, remedy, measured.greedy.length, accepted.length)
    return [cause] if cause.gain >= CLEAR_GAIN else []


def _run_reference(
    patient: Patient,
    measured: Measured,
    model: str,
    deadline: float,
    weights: WeightOptions = AS_STORED,
    dtype: str | None = None,
) -> tuple[Accepted | None, float]:
    """Another target with the same drafter: what it accepts, and how far it agrees with ours.

    It computes in the patient's dtype unless told otherwise: not every one reads the same cache.
    """
    assert patient.folder is not None
    kernels = patient.llm.kernels
    if dtype is None:  # few bits have one dtype only
        dtype = "auto" if any(weights) else kernels.weight_dtype
    llm = LLM(
        model,
        draft=patient.folder,
        verify=0,
        device=kernels.device,
        dtype=dtype,
        max_batch=1,
        max_context=64,
        vision=False,
        **weights._asdict(),
    )
    drafter = drafter_for(llm, patient.folder)
    probe = Probe(llm.engine.target, drafter, patient.cache)
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


def _is_here(name: str, model: str) -> bool:
    """Whether a target can be opened without fetching anything; `model` is open already."""
    return name == model or any(one.name == name and one.cached for one in known_models())
