"""`flashdraft doctor`: is this pair healthy here, and if it accepts little, why.

It orders the checks and spends the time; what each looks at stands in checks.py and
causes.py. It prints nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable

from flashdraft.bench.doctor.causes import Examination, find_causes
from flashdraft.bench.doctor.checks import (
    check_accepted,
    check_environment,
    check_kernels,
    check_law,
)
from flashdraft.bench.doctor.expected import expected_range
from flashdraft.bench.doctor.probe import (
    MAX_TOKENS,
    Accepted,
    Patient,
    Probe,
    greedy,
    is_on_gpu,
)
from flashdraft.bench.doctor.replay import seconds_per_row
from flashdraft.bench.doctor.report import OK, PROBLEM, WARNING, Finding, Measured, Report
from flashdraft.bench.doctor.settings import Settings
from flashdraft.bench.doctor.sight import check_sight
from flashdraft.bench.doctor.trees import examine_trees
from flashdraft.bench.doctor.weights import read_weights, schemes_in_use
from flashdraft.core import Generation, SamplingParams
from flashdraft.engine.config import MAX_VERIFY

# Of the time, when plain and drafted decoding end. Plain goes first: it is cheap, no drafter slows
# it down, and the causes are found on its text. What is left of the whole is for the causes.
_GREEDY_SHARES, _SEEDED_SHARES = (0.2, 0.4), (0.5, 0.6)
_READING_SHARE = 0.2  # no step may take longer: the first one reads all prompts, and is not cut
_TREES_SHARE = 0.1  # where they are on
_CAUSES_SHARE = 1 / 3  # theirs even if a slow step ran past the end of its share
_TIMING_SHARE = 0.05  # for the time of a row, which says how many prompts may be asked
_LAW_TEMPERATURE, _LAW_PROMPTS, _LAW_TOKENS = 0.8, 4, 32  # where nobody asked for a temperature


def examine(settings: Settings, on_progress: Callable[[str], None] = lambda _: None) -> Report:
    """Load the pair and run every check; `on_progress` hears what is being done."""
    on_progress(f"loading {settings.model}")
    begin = time.monotonic()
    patient = Patient.load(settings)
    report = examine_patient(patient, settings, on_progress)
    report.seconds = time.monotonic() - begin
    return report


def examine_patient(
    patient: Patient, settings: Settings, on_progress: Callable[[str], None] = lambda _: None
) -> Report:
    """Run every check on a pair that is loaded."""
    begin = time.monotonic()
    report = Report(settings, patient.llm.drafter_name)
    on_progress("checking the machine and the kernels")
    report.findings += check_environment(patient.llm.kernels, patient.cache)
    report.weights = read_weights(patient)
    report.findings.append(Finding("environment", OK, report.weights.text))
    report.findings += check_sight(settings.model)
    schemes = schemes_in_use(patient.llm.kernels, report.weights.target.stored)
    patient = _affordable(patient, report)
    report.findings += check_kernels(patient.llm.kernels, schemes, patient.cache)
    on_progress("decoding plainly and drafted")
    measured = _measure(patient, report, begin) if patient.num_prompts else None
    if measured is not None:
        on_progress("looking for causes")
        reserved = time.monotonic() + _CAUSES_SHARE * settings.seconds
        deadline = max(begin + settings.seconds, reserved)
        if not measured.has_basis:
            deadline = 0.0  # an experiment would have nothing to be compared with
        _explain(report, find_causes(patient, measured, deadline))
    report.seconds = time.monotonic() - begin
    return report


def _affordable(patient: Patient, report: Report) -> Patient:
    """The patient with as many prompts as this CPU reads in their share of the time."""
    if is_on_gpu(patient.target) or not _drafts(patient):
        return patient
    prompts, seconds = patient.prompts(), report.settings.seconds
    row = seconds_per_row(patient.target, prompts[0], _TIMING_SHARE * seconds)
    # what has been read is decoded too, a block at a time
    needed = [(len(prompt) + MAX_VERIFY + 1) * row for prompt in prompts]
    fitting = sum(total <= _READING_SHARE * seconds for total in itertools.accumulate(needed))
    if fitting < len(prompts):
        text = f"a token takes {row:.2g} s here: {fitting} of {len(prompts)} prompts fit"
        wanted = math.ceil(sum(needed[: fitting + 1]) / _READING_SHARE)
        remedy = f"give --seconds {wanted} or more"
        report.findings.append(Finding("environment", WARNING, text, remedy))
    if not fitting:
        report.not_judged = "no prompt can be read in this time"
    return dataclasses.replace(patient, num_prompts=fitting)


def _drafts(patient: Patient) -> bool:
    return patient.drafter is not None or patient.llm.engine.config.ngram


def _measure(patient: Patient, report: Report, begin: float) -> Measured | None:
    """The law, greedy and seeded, and the accepted length; None without a drafter."""
    looks_up = patient.drafter is None and patient.llm.engine.config.ngram
    probe = Probe(patient.target, patient.drafter, patient.cache, ngram=looks_up)
    prompts = patient.prompts()
    if probe.verify == 0:
        report.findings.append(Finding("law", OK, "plain decoding only: there is nothing drafted"))
        return None
    gpu = is_on_gpu(patient.target)

    def both(
        params: SamplingParams, count: int, shares: tuple[float, float]
    ) -> tuple[list[Generation], list[Generation]]:
        watched = dataclasses.replace(params, logprobs=2) if gpu else params
        asked = prompts[:count]
        first, second = (begin + share * report.settings.seconds for share in shares)
        plain = probe.answer(asked, watched, drafted=False, deadline=first)
        return plain, probe.answer(asked, params, deadline=second)

    plain, drafted = both(greedy(), len(prompts), _GREEDY_SHARES)
    report.findings.append(check_law("greedy", plain, drafted, gpu))
    temperature = patient.mode.temperature
    if temperature:
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature)
        seeded, drawn = both(params, len(prompts), _SEEDED_SHARES)
    else:
        params = SamplingParams(max_tokens=_LAW_TOKENS, temperature=_LAW_TEMPERATURE)
        seeded, drawn = both(params, _LAW_PROMPTS, _SEEDED_SHARES)
    label = f"seeded, temperature {params.temperature:g}"
    report.findings.append(check_law(label, seeded, drawn, gpu, is_drawn=True))
    pairs = zip([*plain, *seeded], [*drafted, *drawn], strict=True)
    if not any(one.token_ids and other.token_ids for one, other in pairs):
        report.not_judged = "no token was compared"
    if patient.folder is None or patient.llm.drafter_name is None:
        text = "n-gram lookup drafts, which has no expected accepted length"
        report.findings.append(Finding("accepted length", OK, text))
        return None
    name, folder = patient.llm.drafter_name, patient.folder
    tree, now = report.settings.tree, time.monotonic()
    deadline = now + _TREES_SHARE * report.settings.seconds
    report.findings += examine_trees(patient, tree, plain, Accepted.of(drafted), deadline)
    measured = Measured(
        prompts,
        Accepted.of(drafted),
        Accepted.of(drawn) if temperature else None,
        [max(two, key=lambda one: len(one.token_ids)) for two in zip(plain, drafted, strict=True)],
        expected_range(name, folder, 0.0, len(prompts)),
        expected_range(name, folder, temperature, len(prompts)),
    )
    report.accepted, report.expected = measured.sampled or measured.greedy, measured.expected_here
    if report.not_judged is None and not report.accepted.num_steps and report.accepted.is_cut:
        report.not_judged = "no drafted step was counted"
    how = f"temperature {temperature:g}" if temperature else "greedy"
    how += ", thinking" if patient.mode.thinking else ""
    report.findings += check_accepted(report.accepted, report.expected, how)
    return measured


def _explain(report: Report, examination: Examination) -> None:
    """Every cause as a problem; and if nothing explains what was found, that is said."""
    report.causes = examination.causes
    for cause in examination.causes:
        text = f"{cause.name}: {cause.text}"
        report.findings.append(Finding("cause", PROBLEM, text, cause.remedy))
    if examination.skipped:
        text = f"too little time to judge: {', '.join(examination.skipped)}"
        report.findings.append(Finding("cause", WARNING, text, "give more time with --seconds"))
    if examination.causes or examination.skipped:
        return
    if report.is_healthy:
        report.findings.append(Finding("cause", OK, "none of the known faults was found"))
        return
    text = (
        "none of the known causes explains it: the drafter may be unfinished, or trained for "
        "another target"
    )
    if report.weights is not None and report.weights.target.is_in_few_bits:
        text += f" or for more than the {report.weights.target.bits:.1f} bits of this one's weights"
    report.findings.append(
        Finding(
            "cause",
            WARNING,
            text,
            "compare with flashdraft bench, or train a drafter with flashdraft train",
        )
    )
