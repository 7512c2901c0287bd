"""Does the drafter's config fit its weights: embedding scale and taps?

By looking, where the weights are known; and by drafting with other values at the same places.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from flashdraft.bench.doctor.expected import right_config
from flashdraft.bench.doctor.probe import Patient, are_cut, reconfigured
from flashdraft.bench.doctor.replay import Trial, TrialComparison, read_text, try_drafter
from flashdraft.bench.doctor.report import SCALE, TAPS, Cause, Measured
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.model import Drafter

# on the same text: four standard errors, and two in a hundred to be worth a word
_SURE_DEVIATIONS, _WORTHWHILE = 4.0, 1.02
# anchors: fewer show no effect for sure, and with fewer a gain of 1.05 need not show
_LEAST_ANCHORS, _ENOUGH_ANCHORS = 12, 100
_BETTER = 2.0  # standard errors by which a value must beat a likelier one that would do as well
_HOPELESS = -3.0  # standard errors: a value that does worse so clearly needs no more text
_MIN_ANSWER = 9  # tokens: shorter ones have next to no place to draft at
_SAME_SCALE = 0.02  # bf16 rounds a scale by a part of that


class _Change(NamedTuple):
    """A drafter with one other value in its config."""

    cause: str
    drafter: Drafter
    text: str


def inspect_config(patient: Patient) -> list[Cause]:
    """The drafter's config against the one that its weights were published with, where known."""
    drafter, folder, name = patient.drafter, patient.folder, patient.llm.drafter_name
    assert drafter is not None and folder is not None and name is not None
    known = right_config(name, folder)
    if known is None:
        return []
    causes = []
    if known.tap_layers != drafter.config.tap_layers:
        text = _taps_text(drafter.config.tap_layers, known.tap_layers)
        causes.append(_cause(TAPS, f"{text}, by the config that these weights were published with"))
    now, right = (_scale_of(patient, config) for config in (drafter.config, known))
    if not math.isclose(now, right, rel_tol=_SAME_SCALE):
        text = _scale_text(now, right)
        causes.append(
            _cause(SCALE, f"{text}, by the config that these weights were published with")
        )
    return [replace(cause, is_certain=True) for cause in causes]


def try_configs(
    patient: Patient, measured: Measured, deadline: float, skipped: list[str]
) -> list[Cause]:
    """Draft with other scales and other taps at the same places of the same texts.

    All values take turns on one text after another, so that little time leaves all of them little
    text in place of leaving the last ones none. Adds to `skipped` what was not found on less text
    than more time would have given.
    """
    drafter, target = patient.drafter, patient.target
    assert drafter is not None
    changes = [*_scales(patient, drafter), *_shifts(patient, drafter)]
    layers = {tap for change in changes for tap in change.drafter.config.tap_layers}
    layers |= set(drafter.config.tap_layers)
    pairs = zip(measured.prompts, measured.answers, strict=True)
    written = [pair for pair in pairs if len(pair[1].token_ids) >= _MIN_ANSWER]
    written.sort(key=lambda pair: -len(pair[1].token_ids))  # the most to learn from first
    before: list[Trial] = []
    after: list[list[Trial]] = [[] for _ in changes]
    is_late = False
    for prompt, answer in written:
        if is_late := time.monotonic() > deadline:
            break
        text = read_text(target, prompt, answer.token_ids, sorted(layers))
        before.append(try_drafter(target, drafter, [text]))
        for change, trials in zip(changes, after, strict=True):
            if len(trials) < len(before) - 1 or _is_hopeless(before, trials):
                continue
            if is_late := time.monotonic() > deadline:
                break
            trials.append(try_drafter(target, change.drafter, [text]))
    causes = _judge(changes, before, after)
    is_little = _num_anchors(before) < _ENOUGH_ANCHORS and are_cut(measured.answers)
    if not causes and (is_late or is_little):
        skipped += dict.fromkeys(change.cause for change in changes)
    return causes


def _judge(
    changes: Sequence[_Change], before: Sequence[Trial], after: Sequence[Sequence[Trial]]
) -> list[Cause]:
    """Of each kind the change that clearly drafts better; the likeliest of those that tie."""
    best: dict[str, tuple[Cause, Sequence[Trial]]] = {}
    for change, trials in zip(changes, after, strict=True):
        if _num_anchors(trials) < _LEAST_ANCHORS:
            continue
        found = _compare(before, trials)
        if found.deviations < _SURE_DEVIATIONS or found.gain < _WORTHWHILE:
            continue
        rival = best.get(change.cause)
        if rival is not None and _compare(rival[1], trials).deviations < _BETTER:
            continue
        text = (
            f"{change.text}: drafts at the same places then agree for {found.after:.2f} tokens in "
            f"place of {found.before:.2f}"
        )
        cause = replace(_cause(change.cause, text), before=found.before, after=found.after)
        best[change.cause] = (cause, trials)
    return [cause for cause, _ in best.values()]


def _compare(before: Sequence[Trial], after: Sequence[Trial]) -> TrialComparison:
    """Over the texts that both were tried on."""
    return TrialComparison.of(Trial.joined(before[: len(after)]), Trial.joined(after))


def _is_hopeless(before: Sequence[Trial], after: Sequence[Trial]) -> bool:
    if _num_anchors(after) < _LEAST_ANCHORS:
        return False
    return _compare(before, after).deviations < _HOPELESS


def _num_anchors(trials: Sequence[Trial]) -> int:
    return sum(len(trial.scores) for trial in trials)


def _cause(name: str, text: str) -> Cause:
    key = "input_embedding_scale" if name == SCALE else "target_layer_ids"
    remedy = f"correct {key} in the drafter's config.json, or fetch the drafter again"
    return Cause(name, text, remedy)


def _scale_of(patient: Patient, config: DrafterConfig) -> float:
    return patient.target.config.embed_scale if config.embed_scale is None else config.embed_scale


def _scale_text(now: float, right: float) -> str:
    return f"the drafter embeds with a scale of {now:g}; it was trained with {right:g}"


def _taps_text(now: Sequence[int], right: Sequence[int]) -> str:
    return f"the drafter reads the layers {list(now)}; it was trained with {list(right)}"


def _scales(patient: Patient, drafter: Drafter) -> list[_Change]:
    """Other embedding scales: the target's own, none, the root of the width."""
    now = _scale_of(patient, drafter.config)
    scales = [patient.target.config.embed_scale, 1.0, math.sqrt(drafter.config.hidden_size)]
    return [
        _Change(SCALE, reconfigured(drafter, embed_scale=scale), _scale_text(now, scale))
        for scale in dict.fromkeys(scales)
        if not math.isclose(scale, now, rel_tol=_SAME_SCALE)
    ]


def _shifts(patient: Patient, drafter: Drafter) -> list[_Change]:
    """All taps one layer lower, or one higher."""
    taps, changes = drafter.config.tap_layers, []
    for shift in (-1, 1):
        moved = tuple(tap + shift for tap in taps)
        if min(moved) >= 0 and max(moved) < len(patient.target.config.layers):
            other = reconfigured(drafter, tap_layers=moved)
            changes.append(_Change(TAPS, other, _taps_text(taps, moved)))
    return changes
