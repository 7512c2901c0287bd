"""What a drafter has beyond plain DFlash, by its config: a head over its slots, convolutions.

The keys are those of the published layouts: DFlash 2's of a selector and its convolutions, DSpark's
of a Markov head and a confidence head. No torch: what they compute is heads.py's and model.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashdraft.errors import CheckpointError, UnsupportedModelError, quoted
from flashdraft.models.config.values import WIDTH, ConfigObject, Range

MARKOV, SELECTOR = "markov", "selector"
HEADS = (MARKOV, SELECTOR)
MAX_CANDIDATES = 20  # of a slot: as many as a draw finds
MARKOV_CANDIDATES = 16  # DSpark's files name no number, as they score the whole vocabulary
DEFAULT_RANK = 256
CONVOLUTION_KEYS = ("conv_kernel_size", "conv_group_size")
SELECTOR_KEYS = ("selector_rank", "selector_top_k")
MARKOV_KEYS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
_TAPS, _CANDIDATES = Range(1, 16), Range(1, MAX_CANDIDATES)

Holder = Callable[[str], ConfigObject]
"""Where a key stands."""


@dataclass(frozen=True)
class ConvolutionConfig:
    """Short convolutions over a block's rows, before and behind every sublayer (DFlash 2)."""

    num_taps: int  # rows that are mixed: a row and those just before it in its block
    group_size: int  # channels whose kernels a row changes alike

    def to_hf(self) -> dict[str, Any]:
        return dict(zip(CONVOLUTION_KEYS, (self.num_taps, self.group_size), strict=True))


@dataclass(frozen=True)
class HeadConfig:
    """What scores a slot's candidates by the token before them; see heads.py."""

    kind: str  # of HEADS
    rank: int
    num_candidates: int = MARKOV_CANDIDATES  # the likeliest of a slot, which alone are scored
    is_gated: bool = False  # of a Markov head: by the slot's hidden row
    has_confidence: bool = False  # a second one says how likely the target agrees
    confidence_sees_token: bool = False  # that one looks at the token before too

    def to_hf(self) -> dict[str, Any]:
        """The keys of the published layouts."""
        if self.kind == SELECTOR:
            return dict(zip(SELECTOR_KEYS, (self.rank, self.num_candidates), strict=True))
        kind = "gated" if self.is_gated else "vanilla"
        values = self.rank, kind, self.has_confidence, self.confidence_sees_token
        return dict(zip(MARKOV_KEYS, values, strict=True))


def read_convolution(holder: Holder, hidden_size: int) -> ConvolutionConfig:
    """DFlash 2's convolutions."""
    taps, group = CONVOLUTION_KEYS
    found = ConvolutionConfig(holder(taps).whole(taps, _TAPS), holder(group).whole(group, WIDTH))
    if hidden_size % found.group_size:
        raise CheckpointError(
            f"The drafter's conv_group_size is {found.group_size}; it must divide its hidden size, "
            f"{hidden_size}."
        )
    return found


def read_selector(holder: Holder) -> HeadConfig:
    """DFlash 2's selector."""
    rank, top = SELECTOR_KEYS
    return HeadConfig(
        SELECTOR, holder(rank).whole(rank, WIDTH), holder(top).whole(top, _CANDIDATES)
    )


def read_markov(holder: Holder) -> HeadConfig:
    """DSpark's Markov head, and the confidence head beside it."""
    rank, kind, has_confidence, sees_token = MARKOV_KEYS
    found = holder(kind).word(kind, "vanilla")
    if found not in ("vanilla", "gated"):
        raise UnsupportedModelError(
            f"The drafter's markov_head_type is {quoted(found)}; 'vanilla' and 'gated' are "
            "supported. One whose scores depend on more than the token before has no place here."
        )
    with_confidence = holder(has_confidence).flag(has_confidence, default=True)
    return HeadConfig(
        MARKOV,
        holder(rank).whole(rank, WIDTH, DEFAULT_RANK),
        is_gated=found == "gated",
        has_confidence=with_confidence,
        confidence_sees_token=holder(sees_token).flag(sees_token, default=True) and with_confidence,
    )


def head_shapes(
    head: HeadConfig, hidden_size: int, vocab_size: int, draft_vocab_size: int
) -> dict[str, tuple[int, ...]]:
    """A head's parameters, by their names in checkpoints."""
    rank = head.rank
    if head.kind == SELECTOR:
        return {
            "candidate_selector.predecessor_codebook": (vocab_size, rank),
            "candidate_selector.successor_codebook": (draft_vocab_size, rank),
            "candidate_selector.hidden_projection.weight": (rank, hidden_size),
        }
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (vocab_size, rank),
        "markov_head.markov_w2.weight": (draft_vocab_size, rank),
    }
    if head.is_gated:
        shapes["markov_head.gate_proj.weight"] = rank, hidden_size + rank
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if head.has_confidence:
        seen = hidden_size + (rank if head.confidence_sees_token else 0)
        shapes["confidence_head.proj.weight"] = 1, seen
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes
