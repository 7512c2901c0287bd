"""Tokens that no answer has, placeholders of media: whatever way an answer is made."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashdraft.core import Generation, GrammarSpec, Request, SamplingParams
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.draft.ngram import NgramIndex
from flashdraft.engine.engine import Engine
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.model import Drafter, PackedDrafter
from flashdraft.models.layers import Target
from flashdraft.models.registry import build_target
from tests import zoo

PLAIN = EngineConfig(verify=0, ngram=False, cache=CacheOptions(cache_gb=0.01), run_ahead=False)
DRAFTED = EngineConfig(verify=5, cache=CacheOptions(cache_gb=0.01), run_ahead=False)
AHEAD = EngineConfig(verify=5, ngram=False, cache=CacheOptions(cache_gb=0.01), run_ahead=True)
SETTINGS = (
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=2.0, top_k=20, top_p=0.95),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, repetition_penalty=0.5),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, logit_bias={7: 50.0, 9: 50.0}),
)


def make_target(family: str, backend: str, forbidden: tuple[int, ...]) -> Target:
    config = replace(ModelConfig.from_hf(zoo.CONFIGS[family]), forbidden_token_ids=forbidden)
    source = zoo.Tensors(zoo.random_tensors(config))
    return build_target(config, source, zoo.kernels(backend), (0, 2))


def requests() -> list[Request]:
    """Prompts with placeholders in them, said again and again."""
    prompt = [5, 7, 9, 11, 7, 9, 11, 7, 9]
    return [Request(f"r{i}", [20 + i, *prompt], one, seed=i) for i, one in enumerate(SETTINGS)]


def tokens(answers: dict[str, Generation]) -> dict[str, list[int]]:
    return {name: answer.token_ids for name, answer in answers.items()}


def favourites(family: str, backend: str) -> tuple[int, ...]:
    """What the model would say, and so what is forbidden: the test would fail without it."""
    said = tokens(zoo.run(Engine(make_target(family, backend, ()), config=PLAIN), requests()))
    return tuple(sorted({7, 9} | {token for ids in said.values() for token in ids[:5]}))


@pytest.mark.parametrize("family", ["llama", "gemma4"])
@pytest.mark.parametrize("backend", ["torch", "float32", "int8"])
def test_no_answer_holds_them_and_drafts_change_nothing(family: str, backend: str) -> None:
    forbidden = favourites(family, backend)
    target = make_target(family, backend, forbidden)
    plain = tokens(zoo.run(Engine(target, config=PLAIN), requests()))
    assert all(len(ids) == 24 and not set(ids) & set(forbidden) for ids in plain.values())
    drafter = zoo.tiny_drafter(target.kernels)
    assert tokens(zoo.run(Engine(target, drafter, DRAFTED), requests())) == plain
    assert tokens(zoo.run(Engine(target, config=DRAFTED), requests())) == plain


@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_steps_on_the_device_hold_none(family: str) -> None:
    forbidden = favourites(family, "float32")
    target = make_target(family, "float32", forbidden)
    plain = tokens(zoo.run(Engine(target, config=PLAIN), requests()))
    for drafter in (None, zoo.tiny_drafter(target.kernels)):
        engine = Engine(target, drafter, AHEAD)
        assert tokens(zoo.run(engine, requests()[:3])) == {
            f"r{i}": plain[f"r{i}"] for i in range(3)
        }
        assert engine._pipeline is not None and engine._pipeline._num_launched > 5


def test_no_drafter_proposes_them() -> None:
    forbidden = tuple(range(0, zoo.VOCAB, 2))
    target = make_target("gemma4", "float32", forbidden)
    whole = zoo.tiny_drafter(target.kernels)
    small = replace(whole.config, draft_vocab_size=20)
    parameters = Drafter(small)
    assert parameters.d2t is not None
    parameters.d2t.copy_(torch.arange(20))  # draft token i is the target's 2 i
    parameters.d2t[::4] += 1
    reduced = PackedDrafter(parameters, target.kernels)
    hidden = torch.randn(200, target.config.hidden_size)
    for drafter in (whole, reduced):
        ahead: Any = Engine(target, drafter, AHEAD)._pipeline
        proposer = ahead._steps.pieces._proposer
        logits = proposer.widen(drafter.logits(target, hidden))
        assert (logits[:, list(forbidden)] == -math.inf).all()
        assert not set(logits.argmax(1).tolist()) & set(forbidden)


def test_a_prompt_that_holds_them_is_not_looked_up_for_them() -> None:
    index = NgramIndex((9,))
    draft = index.propose([1, 2, 3, 4, 9, 5, 1, 2, 3], 5)
    assert draft is not None and draft.tokens == [4] == draft.tokens[: len(draft.confidence)]
    assert NgramIndex((4,)).propose([1, 2, 3, 4, 9, 5, 1, 2, 3], 5) is None


def test_logits_leave_them_out_and_the_others_as_they_are() -> None:
    forbidden = tuple(range(3, zoo.VOCAB, 3))
    for family in ("llama", "gemma4"):
        target = make_target(family, "float32", forbidden)
        free = make_target(family, "float32", ())
        hidden = torch.randn(50, target.config.hidden_size)
        logits = target.logits(hidden)
        allowed = [token for token in range(zoo.VOCAB) if token not in forbidden]
        assert torch.equal(logits[:, allowed], free.logits(hidden)[:, allowed])
        assert (logits[:, list(forbidden)] == -math.inf).all()
        assert target.unembed(hidden).isfinite().all()  # the head itself, as training reads it


def test_logprobs_leave_them_out() -> None:
    forbidden = favourites("gemma4", "float32")
    target = make_target("gemma4", "float32", forbidden)
    params = SamplingParams(max_tokens=6, logprobs=20)
    request = Request("a", [5, 7, 9, 11], params, 0, prompt_logprobs=20)
    answer = zoo.run(Engine(target, config=PLAIN), [request])["a"]
    assert answer.logprobs is not None and answer.prompt_logprobs is not None
    for one in (*answer.logprobs, *answer.prompt_logprobs[1:]):
        assert one is not None and not {token for token, _ in one.top} & set(forbidden)
        assert math.isclose(sum(math.exp(value) for _, value in one.top), 1.0, abs_tol=0.5)
    said = answer.prompt_logprobs[1]
    assert said is not None and said.logprob == -math.inf


def test_a_grammar_that_allows_them_does_not_bring_them_back() -> None:
    forbidden = favourites("gemma4", "float32")
    target = make_target("gemma4", "float32", forbidden)

    def anything(tokens: Any) -> tuple[set[int], bool]:
        return set(range(zoo.VOCAB)), len(tokens) > 12

    grammar = zoo.TokenGrammar(anything)
    plain = None
    for config, drafter in ((PLAIN, None), (DRAFTED, zoo.tiny_drafter(target.kernels))):
        engine = Engine(target, drafter, config, grammar_compiler=lambda spec: grammar)
        found = tokens(
            zoo.run(
                engine, [replace(r, grammar=GrammarSpec("lark", "anything")) for r in requests()]
            )
        )
        assert all(not set(ids) & set(forbidden) for ids in found.values())
        plain = plain or found
        assert found == plain
