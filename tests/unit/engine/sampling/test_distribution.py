"""Drafted sampling draws from the target's own distribution, through the real engine.

A target with a vocabulary of eight answers one prompt under thousands of seeds. The first three
tokens count: the prefill's, and two that are accepted drafts or bonus tokens as it happens. Their
frequencies are compared with the exact distribution, from the target's logits, in float64.

The allowance is 0.01 + the sampling error. Of N exact draws from p, the total variation TV between
frequencies and p has E[TV] <= 1/2 sum_i sqrt(p_i (1 - p_i) / N), and since one draw moves TV by at
most 1/N, P(TV > E[TV] + t) <= exp(-2 N t^2) (McDiarmid). The sampling error is the first bound plus
the t that leaves one chance in a thousand. Seeds are fixed, so the outcome never changes by itself.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import pytest
import torch

from flashdraft.core import GrammarSpec, Request, SamplingParams
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.model import Drafter, PackedDrafter
from flashdraft.models.registry import build_target
from tests import zoo

VOCAB = 8
LENGTH = 3
PROMPT = [4, 5, 1, 6]
NUM_SEEDS = 2000
CONFIG = EngineConfig(
    verify=LENGTH,
    ngram=False,
    cache=CacheOptions(cache_gb=0.01),
    max_batch=64,
    max_step_tokens=1024,
)
PLAIN = dataclasses.replace(CONFIG, verify=0)
SETTINGS = {
    "T 0.5": {"temperature": 0.5},
    "T 1.0": {"temperature": 1.0},
    "T 1.5": {"temperature": 1.5},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "top-k": {"temperature": 1.5, "top_k": 3},
    "top-k and top-p": {"temperature": 1.5, "top_k": 5, "top_p": 0.8},
    "grammar": {"temperature": 1.5},
    "grammar and top-p": {"temperature": 1.5, "top_p": 0.8},
}


def rule(tokens):
    """A grammar in which most tokens exclude some others, and one forces another."""
    if not tokens:
        return {0, 1, 4, 5, 6}, False
    if tokens[-1] == 5:
        return {6}, False
    return ({1, 3, 5, 6, 7} if tokens[-1] % 2 == 0 else {0, 1, 2, 4, 5}), False


def compiler(spec):
    return zoo.TokenGrammar(rule, VOCAB)


@functools.cache
def small_target():
    """Random, with attention that matters and logits of a spread that leaves several choices."""
    config = ModelConfig.from_hf({**zoo.CONFIGS["qwen3"], "vocab_size": VOCAB})
    tensors = zoo.random_tensors(config, seed=2)
    tensors["lm_head.weight"] /= 3.0
    return build_target(config, zoo.Tensors(tensors), zoo.kernels("float32"), (0, 2))


def small_drafter():
    backend = small_target().kernels
    config = dataclasses.replace(zoo.tiny_drafter(backend).config, vocab_size=VOCAB)
    torch.manual_seed(1)
    return PackedDrafter(Drafter(config), backend)


def requests(setting, seeds=range(NUM_SEEDS)):
    params = SamplingParams(max_tokens=LENGTH + 1, ignore_eos=True, **SETTINGS[setting])
    grammar = GrammarSpec("lark", "rule") if "grammar" in setting else None
    return [Request(str(seed), PROMPT, params, seed, grammar=grammar) for seed in seeds]


@functools.cache
def next_logprobs():
    """The target's own log-probabilities of all tokens, after every short continuation."""
    engine = Engine(small_target(), config=PLAIN)
    params = SamplingParams(max_tokens=1, logprobs=VOCAB)
    contexts = [c for n in range(LENGTH) for c in itertools.product(range(VOCAB), repeat=n)]
    asked = [Request(str(c), [*PROMPT, *c], params, 0) for c in contexts]
    answers = zoo.run(engine, asked)
    result = {}
    for context in contexts:
        chances = dict(answers[str(context)].logprobs[0].top)
        result[context] = torch.tensor([chances[i] for i in range(VOCAB)], dtype=torch.float64)
    return result


def next_distribution(context, in_grammar, temperature, top_k=0, top_p=1.0):
    """Softmax at a temperature over the top k, of these over the fewest that reach top p."""
    logits = next_logprobs()[context] / temperature
    if in_grammar:
        allowed = rule(context)[0]
        logits[[token not in allowed for token in range(VOCAB)]] = -math.inf
    chances = logits.softmax(0)
    ranked, order = chances.sort(descending=True, stable=True)
    if top_k:
        ranked[top_k:] = 0.0
    ranked /= ranked.sum()
    ranked[ranked.cumsum(0) - ranked >= top_p] = 0.0
    return torch.zeros(VOCAB, dtype=torch.float64).index_copy_(0, order, ranked / ranked.sum())


def exact_joint(setting):
    """The probability of every answer: [VOCAB] * LENGTH."""
    joint = torch.ones((VOCAB,) * LENGTH, dtype=torch.float64)
    for n in range(LENGTH):
        for context in itertools.product(range(VOCAB), repeat=n):
            after = next_distribution(context, "grammar" in setting, **SETTINGS[setting])
            joint[context] *= after.view(VOCAB, *[1] * (LENGTH - 1 - n))
    assert float(joint.sum()) == pytest.approx(1.0, abs=1e-12)
    return joint


def empirical_joint(generations):
    joint = torch.zeros((VOCAB,) * LENGTH, dtype=torch.float64)
    for generation in generations:
        joint[tuple(generation.token_ids[:LENGTH])] += 1.0 / len(generations)
    return joint


def sampling_error(exact, count):
    expected = 0.5 * float((exact * (1 - exact) / count).sqrt().sum())
    return expected + math.sqrt(math.log(1000) / (2 * count))


def total_variation(one, other):
    return 0.5 * float((one - other).abs().sum())


def views(joint):
    """The distribution of every token, and of the two later ones together."""
    for kept in ((0,), (1,), (2,), (1, 2)):
        others = [axis for axis in range(LENGTH) if axis not in kept]
        yield kept, joint.sum(others)


def plain_engine():
    return Engine(small_target(), config=PLAIN, grammar_compiler=compiler)


def engine_with(proposer, setting):
    if proposer == "block":
        return Engine(small_target(), small_drafter(), CONFIG, grammar_compiler=compiler)
    # right for some seeds, blind for the others: any draft must leave the distribution alone
    few = requests(setting, range(0, NUM_SEEDS, 5))
    answers = {key: g.token_ids for key, g in zoo.run(plain_engine(), few).items()}
    guesses = itertools.cycle(itertools.product(range(VOCAB), repeat=LENGTH))
    for seed in range(NUM_SEEDS):
        answers.setdefault(str(seed), list(next(guesses)))
    proposer = zoo.ScriptedProposer(answers, 0.0, LENGTH)
    return Engine(small_target(), config=CONFIG, proposer=proposer, grammar_compiler=compiler)


@pytest.mark.parametrize(
    ("proposer", "setting"),
    [("script", "T 0.5"), ("script", "T 1.0"), ("script", "T 1.5"), ("script", "top-p")]
    + [("script", "top-k"), ("block", "top-k and top-p")]
    + [("script", "grammar"), ("block", "grammar and top-p")],
)
def test_the_distribution_is_the_targets(proposer, setting):
    engine = engine_with(proposer, setting)
    done = zoo.run(engine, requests(setting), check=False)
    found = empirical_joint(done.values())
    exact = exact_joint(setting)
    for place in (1, 2):
        drafted = sum(generation.drafted[place] for generation in done.values())
        assert NUM_SEEDS / 50 < drafted < NUM_SEEDS * 0.9, "both kinds of token must be seen"
    assert not (found[exact == 0.0] > 0).any(), "a token that the filters exclude"
    for (kept, ours), (_, theirs) in zip(views(found), views(exact), strict=True):
        assert total_variation(ours, theirs) <= 0.01 + sampling_error(theirs, NUM_SEEDS), kept
    bare = zoo.run(plain_engine(), requests(setting, range(200)), check=False)
    assert {k: g.token_ids for k, g in bare.items()} == {k: done[k].token_ids for k in bare}


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("T 1.0", "T 1.5"), ("T 0.5", "T 1.0"), ("T 1.0", "top-p"), ("T 1.5", "grammar")],
)
def test_the_allowance_is_small_enough_to_tell_settings_apart(right, wrong):
    pairs = zip(views(exact_joint(right)), views(exact_joint(wrong)), strict=True)
    for (_, ours), (_, theirs) in pairs:
        assert total_variation(ours, theirs) > 0.01 + sampling_error(theirs, NUM_SEEDS)
