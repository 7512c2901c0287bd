"""Why a pair accepts little: six causes, each found by an experiment or by looking, none guessed.

An experiment undoes one thing and runs the pair again. What the pair does as it stands is measured
before (examination.py); running it is probe.py's and replay.py's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from flashdraft.bench.doctor.drafter import inspect_config, try_configs
from flashdraft.bench.doctor.probe import Patient, Probe, accepted_by
from flashdraft.bench.doctor.report import (
    CLEAR_GAIN,
    QUANTISED,
    SCALE,
    TAPS,
    TEMPERATURE,
    TEMPLATE,
    THINKING,
    Cause,
    Measured,
)
from flashdraft.bench.doctor.target import find_low_precision, find_other_weights


@dataclass(frozen=True)
class Examination:
    """The causes, likeliest first, and those that time did not suffice to judge."""

    causes: list[Cause]
    skipped: list[str]


def find_causes(patient: Patient, measured: Measured, deadline: float) -> Examination:
    """Try the causes, cheap ones first; trials that take long only while nothing is found.

    No trial may use more than half of the time that is left, so that the next ones get their turn.
    """
    if patient.drafter is None:
        return Examination([], [])
    causes = inspect_config(patient)
    skipped: list[str] = []

    def half() -> float:
        now = time.monotonic()
        return now + (deadline - now) / 2

    def attempt(
        name: str, find: Callable[[], list[Cause] | None], needs_figure: bool = True
    ) -> None:
        is_possible = measured.greedy.is_known or not needs_figure
        found = find() if is_possible and time.monotonic() <= deadline else None
        if found is None:
            skipped.append(name)
        else:
            causes.extend(found)

    attempt(TEMPERATURE, lambda: _temperature(patient, measured))
    attempt(THINKING, lambda: _thinking(patient, measured, half()))
    attempt(TEMPLATE, lambda: _template(patient, measured, half(), is_explained=bool(causes)))
    may_be_low = measured.is_low or not measured.greedy.is_known
    if not causes and may_be_low:
        attempt(QUANTISED, lambda: find_other_weights(patient, measured, half()))
    if not causes:
        trial = partial(try_configs, patient, measured, deadline, skipped)
        attempt(f"{SCALE}, {TAPS}", trial, needs_figure=False)
    if not causes and may_be_low:
        attempt(QUANTISED, lambda: find_low_precision(patient, measured, deadline))
    causes.sort(key=lambda cause: (not cause.is_certain, -cause.gain))
    return Examination(causes, list(dict.fromkeys(skipped)))


def _probe(patient: Patient) -> Probe:
    return Probe(patient.target, patient.drafter, patient.cache)


# -- how the pair is asked -------------------------------------------------------------------------


def _temperature(patient: Patient, measured: Measured) -> list[Cause] | None:
    sampled = measured.sampled
    if sampled is not None and not sampled.is_known:
        return None
    if sampled is None or sampled.length >= measured.expected_here.low or measured.is_low:
        return []
    return [
        Cause(
            TEMPERATURE,
            f"at temperature {patient.mode.temperature:g} {sampled.length:.2f} tokens a step are "
            f"accepted, greedy {measured.greedy.length:.2f}: the target draws tokens that nothing "
            "can foresee",
            "lower the temperature (most models recommend 1 or less), or add top_p or min_p; "
            "drafting still costs nothing, as verify 'auto' shortens the draft",
            sampled.length,
            measured.greedy.length,
        )
    ]


def _template(
    patient: Patient, measured: Measured, deadline: float, is_explained: bool
) -> list[Cause] | None:
    tokenizer, mode = patient.tokenizer, patient.mode
    if mode.template is None:
        return _own_template(patient, measured)
    if tokenizer.chat_template is None:
        return []
    own = patient.prompts(replace(mode, template=None))
    if own == list(measured.prompts):
        return []
    special = {token for prompt in own for token in prompt} & tokenizer.special_ids
    missing = special - {token for prompt in measured.prompts for token in prompt}
    if not missing and (is_explained or not measured.is_low):
        return []
    after = accepted_by(_probe(patient), own, deadline)
    cause = Cause(
        TEMPLATE,
        "the prompts are not in the model's chat format",
        "leave --template out, or give the template that the checkpoint carries",
        is_certain=bool(missing),
    )
    if after is None and not missing:
        return None
    if after is not None:
        text = (
            f"{cause.text}: with the checkpoint's own template {after.length:.2f} tokens a step "
            f"are accepted, with this one {measured.greedy.length:.2f}"
        )
        cause = replace(cause, text=text, before=measured.greedy.length, after=after.length)
    if missing:
        names = ", ".join(tokenizer.decode([token], skip_special=False) for token in missing)
        return [replace(cause, text=f"{cause.text}; it lacks the special tokens {names}")]
    return [cause] if cause.gain >= CLEAR_GAIN else []


def _own_template(patient: Patient, measured: Measured) -> list[Cause]:
    """Without another template to compare with: does the checkpoint's own mark its turns?"""
    tokenizer = patient.tokenizer
    if not measured.is_low or not tokenizer.special_ids:
        return []
    if any(token in tokenizer.special_ids for prompt in measured.prompts for token in prompt):
        return []
    what = "has no chat template" if tokenizer.chat_template is None else "marks no turns"
    return [
        Cause(
            TEMPLATE,
            f"the checkpoint {what}: its prompts hold none of the tokenizer's "
            f"{len(tokenizer.special_ids)} special tokens",
            "take chat_template.jinja or tokenizer_config.json from the original model, or give "
            "its template with --template",
            is_certain=True,
        )
    ]


def _thinking(patient: Patient, measured: Measured, deadline: float) -> list[Cause] | None:
    if not measured.is_low:
        return []
    now = patient.mode.thinking
    other = patient.prompts(replace(patient.mode, thinking=not now))
    if other == list(measured.prompts):  # the template knows no such switch
        return []
    after = accepted_by(_probe(patient), other, deadline)
    if after is None:
        return None
    here, there = ("with", "without") if now else ("without", "with")
    cause = Cause(
        THINKING,
        f"{there} thinking {after.length:.2f} tokens a step are accepted, {here} it "
        f"{measured.greedy.length:.2f}: the drafter was trained on text {there} thinking",
        f"ask {there} thinking (enable_thinking={str(not now).lower()} in the chat template), or "
        "use a drafter that was trained on both: flashdraft train makes one",
        measured.greedy.length,
        after.length,
    )
    return [cause] if cause.gain >= CLEAR_GAIN else []
