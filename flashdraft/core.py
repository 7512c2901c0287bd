"""The nouns everything else speaks of: requests, settings, results, statistics. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from flashdraft.errors import RequestError

VERSION = "0.2.0"  # pyproject.toml reads it here


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context's end
    CANCELLED = "cancelled"
    ERROR = "error"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -math.inf < value < math.inf  # unlike isfinite this takes an integer of any size


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _between(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: _is_finite(value) and low <= value <= high


_is_bias = _between(-1e6, 1e6)  # far beyond any logit, and no sum of two overflows


# What every field of SamplingParams must satisfy, and how a message says it.
_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("max_tokens", lambda v: _is_int(v) and v >= 1, "an integer of at least 1"),
    ("temperature", _between(0, 100), "a finite number between 0 (greedy) and 100"),
    ("top_p", lambda v: _is_finite(v) and 0 < v <= 1, "above 0 and at most 1"),
    ("top_k", lambda v: _is_int(v) and v >= 0, "0 (off) or a positive integer"),
    ("min_p", _between(0, 1), "between 0 and 1"),
    (
        "repetition_penalty",
        _between(0.01, 100),
        "a finite number between 0.01 and 100 (1 = off)",
    ),
    ("presence_penalty", _between(-100, 100), "a finite number between -100 and 100 (0 = off)"),
    ("frequency_penalty", _between(-100, 100), "a finite number between -100 and 100 (0 = off)"),
    (
        "logit_bias",
        lambda v: (
            isinstance(v, Mapping)
            and all(_is_int(t) and t >= 0 and _is_bias(bias) for t, bias in v.items())
        ),
        "a mapping from token ids to numbers between -1000000 and 1000000",
    ),
    (
        "seed",
        lambda v: v is None or (_is_int(v) and -(2**63) <= v < 2**63),
        "a 64-bit integer (left out: a fresh one)",
    ),
    (
        "stop",
        lambda v: _is_list(v) and all(isinstance(s, str) and s for s in v),
        "a string or a list of non-empty strings",
    ),
    (
        "stop_token_ids",
        lambda v: _is_list(v) and all(_is_int(t) and t >= 0 for t in v),
        "a list of token ids",
    ),
    ("ignore_eos", lambda v: isinstance(v, bool), "True or False"),
    (
        "logprobs",
        lambda v: v is None or (_is_int(v) and 0 <= v <= 20),
        "None or an integer between 0 and 20",
    ),
)


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
        for name, holds, limit in _RULES:
            value = getattr(self, name)
            if not holds(value):
                raise RequestError(f"{name} is {value!r}; it must be {limit}.")
        if not (_is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens):
            raise RequestError(
                f"min_tokens is {self.min_tokens!r}; it must be an integer between 0 and "
                f"max_tokens ({self.max_tokens})."
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "choice", "lark")


@dataclass(frozen=True)
class GrammarSpec:
    """What an answer's text must match; it is compiled where the engine runs.

    `text` is the schema as JSON text, the regular expression, a JSON list of strings, or a Lark
    grammar; it is empty for "json_object".
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            kinds = ", ".join(GRAMMAR_KINDS)
            raise RequestError(f"A grammar's kind is {self.kind!r}; it must be one of {kinds}.")
        if not isinstance(self.text, str):
            raise RequestError(f"A grammar's text is {self.text!r:.200}; it must be a string.")
        if (self.kind == "json_object") != (self.text == ""):
            rule = "must be empty" if self.kind == "json_object" else "must not be empty"
            raise RequestError(
                f"The text of a {self.kind} grammar is {self.text!r:.200}; it {rule}."
            )


@dataclass(frozen=True)
class Request:
    """One prompt to continue."""

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    seed: int  # params.seed, or a fresh one: fixed when the request is made, so replays agree
    verify: int | None = None  # a fixed verify length; None = the policy chooses
    grammar: GrammarSpec | None = None  # what the answer's text must match
    prompt_logprobs: int | None = None  # None = off; n = the prompt's tokens' and the n likeliest's


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
    # what the policy chose the step for, and what it thought of one without drafts
    expected_tokens: float = 0.0
    expected_s: float = 0.0
    plain_tokens: float = 0.0
    plain_s: float = 0.0


@dataclass
class GenerationStats:
    """Statistics of one request. `histogram[n]` counts decode steps that committed n tokens.

    `slots_verified[k]` counts the decode steps that sent draft slot k+1 to the target,
    `slots_accepted[k]` those of them in which it was accepted.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    steps: int = 0  # decode steps
    drafted: int = 0
    accepted: int = 0
    decode_tokens: int = 0  # tokens committed by decode steps
    histogram: dict[int, int] = field(default_factory=dict)
    slots_verified: list[int] = field(default_factory=list)
    slots_accepted: list[int] = field(default_factory=list)
    preemptions: int = 0
    queue_s: float = 0.0  # from arrival until it was first admitted
    prefill_s: float = 0.0  # from then to the first token, without the drafter's part
    drafter_prefill_s: float = 0.0  # the drafter's context of the prompt, before or after that
    ttft_s: float = 0.0
    decode_s: float = 0.0  # from the first token to the last
    # what its decode steps were expected to bring and take, all requests of a step together, and
    # what the same steps would have without drafts
    expected_tokens: float = 0.0
    expected_s: float = 0.0
    plain_tokens: float = 0.0
    plain_s: float = 0.0

    def expect(self, step: StepStats) -> None:
        """Add what was expected of a decode step."""
        self.expected_tokens += step.expected_tokens
        self.expected_s += step.expected_s
        self.plain_tokens += step.plain_tokens
        self.plain_s += step.plain_s

    @property
    def mean_accepted_length(self) -> float:
        """Tokens committed by decode steps ÷ decode steps; the prefill's token is not in it."""
        return self.decode_tokens / self.steps if self.steps else 0.0

    @property
    def buckets(self) -> dict[str, float]:
        """Every second from arrival to the last token, each in one bucket."""
        before = self.queue_s + self.prefill_s + self.drafter_prefill_s
        return {
            "queue_s": self.queue_s,
            "prefill_s": self.prefill_s,
            "drafter_prefill_s": self.drafter_prefill_s,
            "decode_s": self.ttft_s + self.decode_s - before,
        }

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
    # one for each token of the prompt, None for the first, which follows nothing
    prompt_logprobs: list[TokenLogprob | None] | None = None


@dataclass(frozen=True)
class TokenEvent:
    """Tokens committed to one request by one step; the last event carries the `Generation`.

    `pieces` is `text` cut where special tokens stood, with their ids in place: a parser must see a
    special token as what it is, never as text that looks like one. A special token comes once all
    text before it has come; a stop token does not come at all.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str  # what may be shown now (a possible stop string's start is held back)
    drafted: tuple[bool, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    generation: Generation | None = None
    pieces: tuple[str | int, ...] = ()
