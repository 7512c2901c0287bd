"""The nouns everything else speaks of: requests, settings, results, statistics. No torch."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Self

from flashdraft.errors import RequestError, quoted
from flashdraft.habits import ExplainsItems, explained_class
from flashdraft.markup import answer_html

MAX_ANSWERS = 1024  # to one prompt
VERSION = "0.2.0"  # pyproject.toml reads it here
_SHOWN = 60  # characters of a text in a repr


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
    ("n", lambda v: _is_int(v) and 1 <= v <= MAX_ANSWERS, f"an integer from 1 to {MAX_ANSWERS}"),
    (
        "max_tokens",
        lambda v: v is None or (_is_int(v) and v >= 1),
        "an integer of at least 1, or None (to the end of the context)",
    ),
    ("temperature", _between(0, 100), "a finite number between 0 (greedy) and 100"),
    ("top_p", lambda v: _is_finite(v) and 0 < v <= 1, "above 0 and at most 1"),
    ("top_k", lambda v: _is_int(v) and v >= 0, "0 or -1 (off), or a positive integer"),
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
    (
        "prompt_logprobs",
        lambda v: v is None or (_is_int(v) and 0 <= v <= 20),
        "None or an integer between 0 and 20",
    ),
)


@explained_class("SamplingParams(…)")
@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when to stop. The default is greedy."""

    max_tokens: int | None = 256  # None = to the end of the context
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off, and so is -1
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
    logprobs: int | None = None  # None = off; k = the chosen token's and the k most likely ones'
    n: int = 1  # answers to each prompt; the engine sees one request for each
    prompt_logprobs: int | None = None  # None = off; k = the prompt's tokens' and the k likeliest's

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if type(self.top_k) is int and self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        for name, holds, limit in _RULES:
            value = getattr(self, name)
            if not holds(value):
                raise RequestError(f"{name} is {value!r}; it must be {limit}.")
        most = math.inf if self.max_tokens is None else self.max_tokens
        if not (_is_int(self.min_tokens) and 0 <= self.min_tokens <= most):
            raise RequestError(
                f"min_tokens is {self.min_tokens!r}; it must be an integer between 0 and "
                f"max_tokens ({self.max_tokens})."
            )
        if self.n > 1 and self.is_greedy:
            raise RequestError(
                f"n is {self.n} and temperature 0, which is greedy: all answers would be the same. "
                "Set a temperature, or leave n out."
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def answer_seeds(first: int | None, count: int) -> list[int]:
    """The seeds of several answers to one prompt: first, first + 1, …; without a first a fresh one.

    Each is within the 64 bits that a seed may have.
    """
    begin = random.getrandbits(62) if first is None else first
    return [(begin + number + 2**63) % 2**64 - 2**63 for number in range(count)]


GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "choice", "lark")


@dataclass(frozen=True)
class GrammarSpec:
    """What an answer's text must match; made by `json`, `regex`, `choice` or `lark`.

    It is compiled where the engine runs. `text` is the schema as JSON text, the regular expression,
    a JSON list of strings, or a Lark grammar; it is empty for "json_object".
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

    @classmethod
    def json(cls, schema: Any = None) -> Self:
        """JSON that fits a schema: a mapping, its JSON text, or a class with `model_json_schema`.

        Such classes are pydantic's models. Without a schema any object will do. An object that
        declares its properties ends after them, as in the server.
        """
        if schema is None:
            return cls("json_object")
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str):
            return cls("json_schema", schema)
        if not isinstance(schema, Mapping | bool):
            raise RequestError(
                f"The schema is {quoted(schema)}; it must be a mapping, its JSON text, or a class "
                "with model_json_schema(), as pydantic's models have."
            )
        return cls("json_schema", _json_text("schema", schema))

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """A text that a regular expression matches from its beginning to its end."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Self:
        """One of several texts."""
        if not _is_list(choices) or not all(isinstance(one, str) and one for one in choices):
            raise RequestError(
                f"choices is {quoted(choices)}; it must be a list of non-empty strings."
            )
        return cls("choice", _json_text("choices", list(choices)))

    @classmethod
    def lark(cls, grammar: str) -> Self:
        """A text of a grammar in Lark's notation, whose first rule is `start`."""
        return cls("lark", grammar)


def _json_text(name: str, value: Any) -> str:
    try:
        return json.dumps(dict(value) if isinstance(value, Mapping) else value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"The {name} cannot be written as JSON: {error}.") from None


@dataclass(frozen=True, repr=False)
class Picture:
    """A picture, or a frame of a film, as a vision tower takes it: upright, opaque, resized.

    What stands for it in a prompt are `num_tokens` placeholders. The key tells it from every other
    one: a hash of its pixels, its size, and how they were made.
    """

    pixels: bytes  # red, green, blue of every pixel, row after row from the top
    width: int
    height: int
    num_tokens: int
    key: bytes  # sha256

    def __repr__(self) -> str:
        return f"Picture({self.width}x{self.height}, {self.num_tokens} tokens)"


class PlacedPicture(NamedTuple):
    """A picture in a prompt: its placeholders are the tokens start : end."""

    start: int
    picture: Picture

    @property
    def end(self) -> int:
        return self.start + self.picture.num_tokens


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
    pictures: tuple[PlacedPicture, ...] = ()  # by their place; none overlaps another
    shows_trees: bool = False  # its events tell what steps verified beside their chains


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
    depths: tuple[int, ...] = ()  # as verify_lengths: those that could follow one another
    num_branches: int = 0  # of the draft tokens: those not of their tree's chain
    num_branches_accepted: int = 0


@dataclass
class GenerationStats:
    """Statistics of one request. `histogram[n]` counts decode steps that committed n tokens.

    `slots_verified[k]` counts the decode steps that sent draft slot k+1 to the target,
    `slots_accepted[k]` those of them in which it was accepted.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    picture_tokens: int = 0  # prompt tokens that stand for pictures
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
    branches: int = 0  # of the drafted tokens: those not of their tree's chain
    branches_accepted: int = 0

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


class ToolCall(NamedTuple):
    """A function that the model wants to have called."""

    name: str
    text: str  # its arguments as JSON

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments as Python's values."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"The arguments of {self.name} cannot be read: {error}; .text has them as written."
            ) from None


class ChatParts(NamedTuple):
    """An answer of a chat, taken apart."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]


@dataclass(repr=False)
class Generation(ExplainsItems):
    """A finished answer. `token_ids` include the stop token, `text` does not.

    `text` is everything that was written. After a chat `content` is what is meant for the reader,
    `reasoning` what the model thought before, `calls` the functions it wants to have called.
    """

    _habits: ClassVar[str] = "generation.…"

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: GenerationStats
    logprobs: list[TokenLogprob] | None = None
    drafted: list[bool] = field(default_factory=list)  # per token: drafted, or the target's own
    error: str | None = None
    # one for each token of the prompt, None for the first, which follows nothing
    prompt_logprobs: list[TokenLogprob | None] | None = None
    others: list[Generation] = field(default_factory=list)  # with n > 1: the answers 2 to n
    parts: ChatParts | None = None  # None: it is no chat's
    text_ends: list[int] = field(default_factory=list)  # per token: where its text ends in `text`

    @property
    def content(self) -> str:
        """The text without thoughts and calls."""
        return self.text if self.parts is None else self.parts.content

    @property
    def reasoning(self) -> str:
        """What the model thought before it answered; "" where it did not."""
        return "" if self.parts is None else self.parts.reasoning

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The functions that the model wants to have called."""
        return () if self.parts is None else self.parts.calls

    def parsed(self, model: Any = None) -> Any:
        """The content as JSON: Python's values, or an instance of a pydantic class."""
        try:
            value = json.loads(self.content)
        except (ValueError, RecursionError) as error:
            is_cut = self.finish_reason is FinishReason.LENGTH
            remedy = "it was cut, raise max_tokens" if is_cut else "ask with GrammarSpec.json(…)"
            raise RequestError(f"The answer is no JSON ({error}): {remedy}.") from None
        if model is None:
            return value
        if not hasattr(model, "model_validate_json"):
            raise RequestError(
                f"parsed() was given {quoted(model)}; it takes a class with model_validate_json(), "
                "as pydantic's models have, or nothing."
            )
        return model.model_validate_json(self.content)

    @property
    def pieces(self) -> list[tuple[str, bool | None]]:
        """The text in pieces: (text, whether it was drafted), None where that is not known."""
        if not self.text_ends:
            return [(self.text, None)] if self.text else []
        ends = [0, *(min(end, len(self.text)) for end in self.text_ends[:-1]), len(self.text)]
        found: list[tuple[str, bool | None]] = []
        for (begin, end), drafted in zip(pairwise(ends), self.drafted, strict=False):
            text = self.text[begin:end]
            if found and found[-1][1] is drafted:
                found[-1] = (found[-1][0] + text, drafted)
            elif text:
                found.append((text, drafted))
        return found

    def __repr__(self) -> str:
        shown = self.text if len(self.text) <= _SHOWN else self.text[:_SHOWN] + "…"
        return f"Generation({shown!r}, {', '.join(self._facts())})"

    def _repr_html_(self) -> str:
        rest = [f"({number}) {one.text}" for number, one in enumerate(self.others, 2)]
        later = [("\n\n" + text, None) for text in rest]
        return answer_html([*self.pieces, *later], " · ".join(self._facts()))

    def _facts(self) -> list[str]:
        """Why it ended, and what it cost, in a few words each."""
        stats, count = self.stats, len(self.token_ids)
        facts = [self.finish_reason.value if self.error is None else f"error: {self.error}"]
        facts.append(f"{count} token{'' if count == 1 else 's'}")
        if stats.steps:
            facts.append(f"{stats.mean_accepted_length:.2f} a step")
        if stats.decode_s > 0:
            facts.append(f"{stats.tokens_per_s:.0f} tok/s")
        if self.calls:
            facts.append(f"calls {', '.join(call.name for call in self.calls)}")
        if self.others:
            facts.append(f"and {len(self.others)} other{'' if len(self.others) == 1 else 's'}")
        return facts


class ShownTree(NamedTuple):
    """The draft tokens that a step verified, of which some are branches, and the way through them.

    They are numbered from 1 on, parents before children; 0 is the token before all of them.
    """

    at: int  # tokens of the event before the step's
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]  # the accepted ones, in order


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
    trees: tuple[ShownTree, ...] = ()  # of steps with branches, where the request asks
