"""Requests of every kind at once: a fixed mix of them, a driver, and what must come of it.

The law over all of them: together, drafted, interrupted, each has the answer that it has alone
without drafts.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashdraft.core import (
    FinishReason,
    Generation,
    GrammarSpec,
    Request,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
)
from flashdraft.engine.engine import Engine
from tests import zoo

# What a request may have; how many of them it has is drawn.
KINDS = (
    "logprobs",
    "prompt_logprobs",
    "penalties",
    "logit_bias",
    "min_tokens",
    "grammar",
    "seed",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "verify",
    "stop",
    "stop_token_ids",
    "cancelled",
    "repeats",
)
SAMPLED = {"seed", "temperature", "top_k", "top_p", "min_p"}
# The first half of the requests has none of these.
LATE_KINDS = ("prompt_logprobs", "verify")
GROUP = 32
SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 2**32, 1)
CANCEL_AFTER = (0, 1, 2, 3, 5, 9)
PHRASES = GrammarSpec("lark", "phrases")
LETTERS = "abcde"
MAX_PROMPT, MAX_TOKENS = 60, 32
CHECK_EVERY = 4  # steps


@dataclass(frozen=True)
class MixedRequest:
    """A request, the step before which it comes, and after how many tokens it is cancelled."""

    request: Request
    arrives_at: int
    cancel_after: int | None = None

    @property
    def kinds(self) -> set[str]:
        """Those of KINDS that it is of, by what it asks for."""
        request, params = self.request, self.request.params
        prompt = list(request.prompt_ids)
        penalties = (
            params.repetition_penalty - 1.0,
            params.presence_penalty,
            params.frequency_penalty,
        )
        asks_for = {
            "logprobs": params.logprobs is not None,
            "prompt_logprobs": request.prompt_logprobs is not None,
            "penalties": any(penalties),
            "logit_bias": bool(params.logit_bias),
            "min_tokens": params.min_tokens > 0,
            "grammar": request.grammar is not None,
            "seed": params.seed is not None,
            "temperature": not params.is_greedy,
            "top_k": params.top_k > 0,
            "top_p": params.top_p < 1.0,
            "min_p": params.min_p > 0.0,
            "verify": request.verify is not None,
            "stop": bool(params.stop),
            "stop_token_ids": bool(params.stop_token_ids),
            "cancelled": self.cancel_after is not None,
            "repeats": len(set(zip(prompt, prompt[1:], strict=False))) < len(prompt) // 2,
        }
        return {kind for kind in KINDS if asks_for[kind]}


class Letters:
    """A decoder of one letter per token, out of few: stop strings of several tokens come up."""

    def push_pieces(self, ids: Sequence[int]) -> list[str | int]:
        return [LETTERS[token % len(LETTERS)] for token in ids]

    def flush_pieces(self) -> list[str | int]:
        return []


def compile_phrases(spec: GrammarSpec) -> zoo.TokenGrammar:
    """The grammar of the mix."""
    return zoo.TokenGrammar(zoo.phrases)


def mixed_requests(count: int = 64, seed: int = 5, grammars: bool = True) -> list[MixedRequest]:
    """Requests of every kind and of many together, in the order in which they come."""
    source = random.Random(seed)
    shared = _prompt(source, MAX_PROMPT)
    mixed: list[MixedRequest] = []
    arrives_at = 0
    for i in range(count):
        kinds = _kinds(source, i, grammars)
        request = _request(source, f"r{i}", kinds, shared)
        cancel_after = source.choice(CANCEL_AFTER) if "cancelled" in kinds else None
        mixed.append(MixedRequest(request, arrives_at, cancel_after))
        arrives_at += source.choice((0, 0, 1, 1, 3))
    return mixed


def _kinds(source: random.Random, place: int, grammars: bool) -> set[str]:
    """One to eight kinds; the kinds take turns as the first, so that none is rare."""
    left_out = set() if grammars else {"grammar"}
    has_late_kinds = place // GROUP % 2 == 1
    if not has_late_kinds:
        left_out.update(LATE_KINDS)
    able = [kind for kind in KINDS if kind not in left_out]
    kinds = {able[place % len(able)], *source.sample(able, source.randrange(1, 7))}
    if has_late_kinds and place % 3 == 0:
        kinds.add(source.choice(LATE_KINDS))
    return kinds | {"temperature"} if kinds & SAMPLED else kinds


def _prompt(source: random.Random, length: int) -> list[int]:
    return [source.randrange(4, zoo.VOCAB) for _ in range(length)]


def _request(source: random.Random, name: str, kinds: set[str], shared: Sequence[int]) -> Request:
    length = source.choice((1, 2, 15, 16, 17, 33, 50))
    prompt = _prompt(source, length)
    if "repeats" in kinds:  # what n-grams live on
        prompt = (prompt[: source.choice((2, 3, 7))] * MAX_PROMPT)[: max(length, 12)]
    elif source.random() < 0.4:  # what the prefix cache lives on
        prompt = [*shared[: source.choice((16, 32, 40))], *prompt[:5]]
    seed = source.choice(SEEDS) if "seed" in kinds else source.randrange(1000)
    return Request(
        name,
        prompt,
        SamplingParams(**_settings(source, kinds, seed)),
        seed,
        verify=source.choice((0, 1, 3, 15)) if "verify" in kinds else None,
        grammar=PHRASES if "grammar" in kinds else None,
        prompt_logprobs=source.choice((0, 1, 5)) if "prompt_logprobs" in kinds else None,
    )


def _settings(source: random.Random, kinds: set[str], seed: int) -> dict[str, Any]:
    """Of the sampling, by kind; all are drawn, so that a kind more changes nothing else."""
    penalties = {
        "repetition_penalty": source.choice((1.0, 1.3, 0.8)),
        "presence_penalty": source.choice((0.7, -0.3)),
        "frequency_penalty": source.choice((0.0, 0.4)),
    }
    bias = {token: source.choice((-100.0, -1.5, 2.0)) for token in source.sample(range(67), 5)}
    stops = ["".join(source.choices(LETTERS, k=source.choice((2, 3)))) for _ in range(2)]
    by_kind: dict[str, dict[str, Any]] = {
        "logprobs": {"logprobs": source.choice((0, 1, 3, 20))},
        "penalties": penalties,
        "logit_bias": {"logit_bias": bias},
        "min_tokens": {"min_tokens": source.randrange(3, 14)},
        "seed": {"seed": seed},
        "temperature": {"temperature": source.choice((0.3, 0.8, 1.0, 1.5))},
        "top_k": {"top_k": source.choice((1, 5, 20))},
        "top_p": {"top_p": source.choice((0.5, 0.9, 0.99))},
        "min_p": {"min_p": source.choice((0.02, 0.1))},
        "stop": {"stop": stops},
        "stop_token_ids": {"stop_token_ids": source.sample(range(4, zoo.VOCAB), 3)},
    }
    settings: dict[str, Any] = {
        "max_tokens": source.randrange(14, MAX_TOKENS + 1),
        "ignore_eos": source.random() < 0.3,
    }
    for kind in KINDS:
        if kind in kinds:
            settings |= by_kind.get(kind, {})
    return settings


class _Stream:
    """What a request's events have brought so far."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.text = ""

    def add(self, event: TokenEvent) -> None:
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs or ()
        self.text += event.text
        whole = event.generation
        if whole is not None:  # it says at the end what it has said all along
            assert whole.token_ids == self.token_ids and whole.text == self.text
            assert (whole.logprobs or []) == self.logprobs
            assert len(whole.drafted) == len(whole.token_ids)


def run_mixed(engine: Engine, requests: Sequence[MixedRequest]) -> dict[str, Generation]:
    """Submit, cancel and step, each at its time, until everybody has an answer."""
    waiting = sorted(requests, key=lambda one: -one.arrives_at)
    cancel_after = {one.request.id: one.cancel_after for one in requests}
    streams: defaultdict[str, _Stream] = defaultdict(_Stream)
    done: dict[str, Generation] = {}
    for step in range(10_000):
        if not waiting and not engine.has_work:
            engine.check_integrity()
            return done
        fresh: list[str] = []
        while waiting and waiting[-1].arrives_at <= step:
            request = waiting.pop().request
            engine.submit(request)
            fresh.append(request.id)
        for name in fresh:
            if cancel_after[name] == 0:
                engine.cancel(name)
        for event in engine.step():
            name, stream = event.request_id, streams[event.request_id]
            stream.add(event)
            if event.generation is not None:
                assert name not in done
                done[name] = event.generation
            elif (limit := cancel_after[name]) is not None and len(stream.token_ids) >= limit:
                engine.cancel(name)
        if step % CHECK_EVERY == 0:
            engine.check_integrity()
    raise AssertionError("the engine did not finish")


def run_alone(engine: Engine, requests: Sequence[MixedRequest]) -> dict[str, Generation]:
    """Everybody's whole answer, one request after the other."""
    answers: dict[str, Generation] = {}
    for one in requests:
        answers |= zoo.run(engine, [one.request], check=False)
    return answers


def assert_lawful(
    requests: Sequence[MixedRequest],
    together: dict[str, Generation],
    alone: dict[str, Generation],
    tolerance: float = 0.0,
) -> None:
    """Everybody has the answer it has alone; who was cancelled has its beginning.

    Log-probabilities may differ by the tolerance, nothing else by anything.
    """
    assert together.keys() == alone.keys() == {one.request.id for one in requests}
    for one in requests:
        name = one.request.id
        mine, whole = together[name], alone[name]
        count, text = len(mine.token_ids), len(mine.text)
        scored = len(mine.prompt_logprobs or [])
        if mine.finish_reason is FinishReason.CANCELLED:
            assert one.cancel_after is not None and count >= one.cancel_after, name
            assert mine.text[: len(whole.text)] == whole.text[:text], name
        else:  # an end may come before there was anything to cancel
            assert mine.finish_reason is whole.finish_reason, name
            assert (count, mine.text) == (len(whole.token_ids), whole.text), name
            assert scored == len(whole.prompt_logprobs or []), name
            assert mine.error == whole.error, name
        assert mine.token_ids == whole.token_ids[:count], name
        for own, other, length in (
            (mine.logprobs, whole.logprobs, count),
            (mine.prompt_logprobs, whole.prompt_logprobs, scored),
        ):
            assert (own is None) == (other is None), name
            assert _are_close(own or [], (other or [])[:length], tolerance), name


def _are_close(
    mine: Sequence[TokenLogprob | None], theirs: Sequence[TokenLogprob | None], tolerance: float
) -> bool:
    return [_ids(one) for one in mine] == [_ids(one) for one in theirs] and all(
        abs(x - y) <= tolerance
        for one, other in zip(mine, theirs, strict=True)
        for x, y in zip(_values(one), _values(other), strict=True)
    )


def _ids(one: TokenLogprob | None) -> list[int] | None:
    return None if one is None else [token for token, _ in one.top]


def _values(one: TokenLogprob | None) -> list[float]:
    return [] if one is None else [one.logprob, *(value for _, value in one.top)]


def engine_of(model: Any, drafter: Any, config: Any) -> Engine:
    """An engine whose text is letters, and whose grammars are phrases."""
    return Engine(model, drafter, config, new_decoder=Letters, grammar_compiler=compile_phrases)
