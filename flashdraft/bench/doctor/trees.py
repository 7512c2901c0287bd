"""Are drafts trees here, do they keep the law, and do they pay? By the engine's own statistics."""

from __future__ import annotations

from collections.abc import Sequence

from flashdraft.bench.doctor.checks import check_law
from flashdraft.bench.doctor.probe import Accepted, Patient, Probe, greedy, is_on_gpu
from flashdraft.bench.doctor.report import OK, WARNING, Finding
from flashdraft.core import Generation

_AREA = "trees"


def examine_trees(
    patient: Patient,
    tree: str | int | None,
    plain: Sequence[Generation],
    chains: Accepted,
    deadline: float,
) -> list[Finding]:
    """Answer the prompts with trees, where they are on, and put them beside plain and chains."""
    if tree is None:
        text = "off: drafts are chains; --tree auto tries branches, and keeps them where they pay"
        return [Finding(_AREA, OK, text)]
    probe = Probe(patient.target, patient.drafter, patient.cache, tree=tree)
    grown = probe.answer(patient.prompts(), greedy(), deadline=deadline)
    law = check_law("greedy, with trees", plain, grown, is_on_gpu(patient.target))
    return [law, *check_trees(tree, grown, chains)]


def check_trees(tree: str | int, grown: Sequence[Generation], chains: Accepted) -> list[Finding]:
    """What trees brought beside the chains; whether they pay is the policy's own choice."""
    every = [answer.stats for answer in grown]
    drafted, branches = (sum(getattr(one, n) for one in every) for n in ("drafted", "branches"))
    accepted = sum(one.accepted for one in every)
    off_chain = sum(one.branches_accepted for one in every)
    found = Accepted.of(grown)
    if not found.num_steps:
        text = f"{tree}: not enough time to judge: no step was made before it ran out"
        return [Finding(_AREA, WARNING, text, "raise --seconds")]
    expected, seconds = (
        sum(getattr(one, f"expected_{n}") for one in every) for n in ("tokens", "s")
    )
    plain, plain_s = (sum(getattr(one, f"plain_{n}") for one in every) for n in ("tokens", "s"))
    if not branches:
        reason = "they do not pay here: the policy verified chains alone"
        reason = reason if tree == "auto" else "no step had a branch"
        text = f"{tree}: on, but {reason}, {found.length:.2f} tokens a step"
        return [Finding(_AREA, OK, text)]
    text = (
        f"{tree}: on, {branches / found.num_steps:.1f} of {drafted / found.num_steps:.1f} draft "
        f"tokens a step are branches, {off_chain} of {accepted} accepted ones lie off the chain; "
        f"{found.length:.2f} tokens a step (chains: {chains.length:.2f})"
    )
    if tree == "auto" and expected and seconds and plain and plain_s:
        text += f", expected {expected / seconds / (plain / plain_s):.2f} times as fast as plain"
    if found.is_cut:  # beginnings beside whole answers say nothing of either
        return [Finding(_AREA, OK, f"{text}; the time ran out before answers ended: not judged")]
    if found.length > chains.length:
        return [Finding(_AREA, OK, text)]
    remedy = "auto leaves out what does not pay" if tree != "auto" else "try --tree off"
    return [Finding(_AREA, WARNING, f"{text}: they bring nothing here", remedy)]
