"""The nouns everything else speaks of: requests, settings, results, statistics. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from flashdraft.errors import RequestError


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context's end
    CANCELLED = "cancelled"
    ERROR = "error"


def _require(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise RequestError(f"{name} is {value!r}; it must be {limit}.")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when to stop. The default is greedy."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    seed: int | None = None  # None = a fresh one for each request
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None = off; n = the chosen token's and the n most likely ones'

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        _require(
            _is_int(self.max_tokens) and self.max_tokens >= 1,
            "max_tokens",
            self.max_tokens,
            "an integer of at least 1",
        )
        for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            _require(_is_finite(getattr(self, name)), name, getattr(self, name), "a finite number")
        _require(
            0.0 <= self.temperature <= 100.0,
            "temperature",
            self.temperature,
            "between 0 (greedy) and 100",
        )
        _require(
            _is_finite(self.top_p) and 0.0 < self.top_p <= 1.0,
            "top_p",
            self.top_p,
            "above 0 and at most 1",
        )
        _require(
            _is_int(self.top_k) and self.top_k >= 0,
            "top_k",
            self.top_k,
            "0 (off) or a positive integer",
        )
        _require(
            _is_finite(self.min_p) and 0.0 <= self.min_p <= 1.0,
            "min_p",
            self.min_p,
            "between 0 and 1",
        )
        _require(
            0.0 < self.repetition_penalty <= 100.0,
            "repetition_penalty",
            self.repetition_penalty,
            "above 0 and at most 100 (1 = off)",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-100.0 <= value <= 100.0, name, value, "between -100 and 100 (0 = off)")
        _require(
            _is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"between 0 and max_tokens ({self.max_tokens})",
        )
        _require(
            self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**63),
            "seed",
            self.seed,
            "a 64-bit integer, or None for a fresh one",
        )
        _require(
            all(isinstance(s, str) and s for s in self.stop),
            "stop",
            self.stop,
            "a list of non-empty strings",
        )
        _require(
            all(_is_int(t) and t >= 0 for t in self.stop_token_ids),
            "stop_token_ids",
            self.stop_token_ids,
            "a list of token ids",
        )
        _require(
            all(_is_int(t) and t >= 0 and _is_finite(b) for t, b in self.logit_bias.items()),
            "logit_bias",
            self.logit_bias,
            "a mapping from token ids to finite numbers",
        )
        _require(
            self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= 20),
            "logprobs",
            self.logprobs,
            "None or between 0 and 20",
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class Request:
    """One prompt to continue."""

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    seed: int  # params.seed, or a fresh one: fixed when the request is made, so replays agree
    verify: int | None = None  # a fixed verify length; None = the policy chooses


class TokenLogprob(NamedTuple):
    """The target's own log-probability of an emitted token, and of the most likely ones."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first


@dataclass
class StepStats:
    """What one engine step did."""

    num_decoding: int = 0  # requests that made a decode step
    num_prefill_tokens: int = 0
    num_drafted: int = 0  # draft tokens sent to the target
    num_accepted: int = 0
    verify_lengths: tuple[int, ...] = ()  # one per decoding request
    draft_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0


@dataclass
class GenerationStats:
    """Statistics of one request. `histogram[n]` counts decode steps that committed n tokens."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    steps: int = 0  # decode steps
    drafted: int = 0
    accepted: int = 0
    decode_tokens: int = 0  # tokens committed by decode steps
    histogram: dict[int, int] = field(default_factory=dict)
    preemptions: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens committed by decode steps ÷ decode steps; the prefill's token is not in it."""
        return self.decode_tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0


@dataclass
class Generation:
    """A finished answer. `token_ids` include the stop token, `text` does not."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: GenerationStats
    logprobs: list[TokenLogprob] | None = None
    drafted: list[bool] = field(default_factory=list)  # per token: drafted, or the target's own
    error: str | None = None


@dataclass(frozen=True)
class TokenEvent:
    """Tokens committed to one request by one step; the last event carries the `Generation`."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str  # what may be shown now (a possible stop string's start is held back)
    drafted: tuple[bool, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    generation: Generation | None = None
