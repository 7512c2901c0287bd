"""What accepted length a pair should have on doctor's prompts, and why that much.

The numbers are measured or published; a pair that nobody has measured gets bounds that any drafter
of use keeps. It loads nothing but the small files beside a drafter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashdraft.bench.plan.pairs import ACCEPTED, DRAFTERS
from flashdraft.errors import CheckpointError
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.opening import read_drafter_config
from flashdraft.models.files.opening import read_json
from flashdraft.models.sources import DEFAULT_MODEL, default_drafter, known_models

WEIGHTS, PROVENANCE = "model.safetensors", "flashdraft.json"


@dataclass(frozen=True)
class Expected:
    """Bounds of the accepted length, and the least share of steps that commit slot 1, 2, …"""

    low: float
    high: float
    by_position: tuple[float, ...]
    rationale: str
    is_known: bool  # of this pair, not of drafters in general


# Greedy, 8 prompts of 64 tokens, on a CPU: int8 4.4, float32 4.3, slots 0.74 0.59 0.43 0.34. One
# prompt's mean deviates by 1.4 from another's, so two standard errors over eight are 1.0. The five
# benchmark tasks, of 256 tokens and with loops, lie between 3.6 and 5.7
# (benchmarks/results/h200_accepted_length.json).
_DEFAULT = Expected(
    low=3.3,
    high=6.5,
    by_position=(0.60, 0.42, 0.28, 0.20),
    rationale="4.3 measured on these prompts, less two standard errors over all eight",
    is_known=True,
)
NUM_PROMPTS = 8  # that all ranges here are of
_SPREAD = 1.4 / 4.3  # of one prompt's mean, as above
# Published figures are means over long answers; on eight short ones the default pair keeps 0.75 of
# its own, and from task to task a pair's figures differ by half.
_SHARE_OF_PUBLISHED = 0.6
_SHARE_OF_HELD_OUT = 0.7
# at temperature 1 the default pair keeps 0.63 of its greedy length, and published pairs 0.85
_SHARE_SAMPLED = 0.6
_LEAST_LOW = 1.2  # a step commits one token by itself: less than this is no drafting
_GENERIC = Expected(
    low=2.0,
    high=16.0,
    by_position=(0.5,),
    rationale="a drafter that fits its target gets every other first slot right on easy text",
    is_known=False,
)


def expected_range(
    name: str, folder: Path, temperature: float, num_prompts: int = NUM_PROMPTS
) -> Expected:
    """The range for a drafter, by its name or its files, in one mode and over so many prompts."""
    expected = _greedy_range(name, folder)
    if num_prompts < NUM_PROMPTS:
        share = _less_two_errors(num_prompts) / _less_two_errors(NUM_PROMPTS)
        expected = _lowered(expected, share, f"with only {num_prompts} asked, which tells less")
    if temperature == 0.0:
        return expected
    why = "where tokens are drawn, which is what temperature 1 leaves"
    return _lowered(expected, _SHARE_SAMPLED, why)


def _less_two_errors(num_prompts: int) -> float:
    """What two standard errors over so many prompts leave of their mean."""
    return 1 - 2 * _SPREAD / math.sqrt(num_prompts)


def _lowered(expected: Expected, share: float, why: str) -> Expected:
    return replace(
        expected,
        low=max(_LEAST_LOW, share * expected.low),
        by_position=tuple(share * least for least in expected.by_position),
        rationale=f"{expected.rationale}; {share:.2g} of it {why}",
    )


def _greedy_range(name: str, folder: Path) -> Expected:
    if has_shipped_weights(folder):
        return _DEFAULT
    target = target_of(name, folder)
    known = ACCEPTED.get(target or "")
    if known is not None and name in DRAFTERS:
        return Expected(
            low=max(_GENERIC.low, _SHARE_OF_PUBLISHED * known.value),
            high=_GENERIC.high,
            by_position=_GENERIC.by_position,
            rationale=f"{_SHARE_OF_PUBLISHED:g} of {known.value:g}, {known.origin}",
            is_known=True,
        )
    reached = read_provenance(folder).get("held_out")
    pooled = reached.get("accepted_length_pooled") if isinstance(reached, Mapping) else None
    if isinstance(pooled, int | float) and pooled > 1:
        return Expected(
            low=max(_LEAST_LOW, _SHARE_OF_HELD_OUT * pooled),
            high=_GENERIC.high,
            by_position=(),
            rationale=f"{_SHARE_OF_HELD_OUT:g} of {pooled:.1f}, what its training reached on "
            "answers held out",
            is_known=True,
        )
    return _GENERIC


def has_shipped_weights(folder: Path) -> bool:
    """Whether a drafter's tensors are those of the drafter that comes with the default target."""
    shipped = _shipped_folder()
    ours, theirs = folder / WEIGHTS, None if shipped is None else shipped / WEIGHTS
    if theirs is None or not ours.is_file() or ours.stat().st_size != theirs.stat().st_size:
        return False
    return ours.samefile(theirs) or _digest(ours) == _digest(theirs)


def right_config(name: str, folder: Path) -> DrafterConfig | None:
    """The config that these weights were published with, where that is known."""
    shipped = _shipped_folder()
    if shipped is not None and has_shipped_weights(folder):
        return read_drafter_config(shipped)
    return DrafterConfig.from_hf(DRAFTERS[name]) if name in DRAFTERS else None


def target_of(name: str, folder: Path) -> str | None:
    """The name of the target that a drafter was trained for, where it is recorded or known."""
    for model in known_models():
        if name == model.drafter:
            return model.name
    if has_shipped_weights(folder):
        return DEFAULT_MODEL
    target = read_provenance(folder).get("target")
    recorded = target.get("name") if isinstance(target, Mapping) else None
    return recorded if isinstance(recorded, str) else None


def read_provenance(folder: Path) -> dict[str, Any]:
    """What a drafter's maker wrote beside it; nothing where there is nothing to read."""
    try:
        return read_json(folder / PROVENANCE)
    except CheckpointError:
        return {}


def _shipped_folder() -> Path | None:
    name = default_drafter(DEFAULT_MODEL)
    return None if name is None else Path(name)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
