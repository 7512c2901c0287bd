"""Drafts under a grammar: what the rule draws from masked rows, as far as candidates tell."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
import torch

from flashdraft.core import Request, SamplingParams
from flashdraft.engine.draft.guided import GUESSED, Candidates, draft_within
from flashdraft.engine.drafts import BLOCK_SOURCE
from flashdraft.engine.sampling.grammar import Constraint
from flashdraft.engine.sampling.mask import apply_masks
from flashdraft.kernels.draw import reference
from flashdraft.kernels.draw.rule import (
    MAX_TOP,
    DrawnRows,
    SlotRequest,
    SlotSettings,
    has_penalties,
)
from tests import zoo

EOS, WIDTH = 2, 7
LIKELY = range(10, 10 + MAX_TOP)
PROMPT = [5, 11, 9, 14]

SETTINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.9, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
    {"repetition_penalty": 1.5},
    {"temperature": 0.8, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"temperature": 0.8, "repetition_penalty": 1.3, "logit_bias": {12: 3.0, 17: -2.0}},
]


def maze(tokens):
    """Up to eight of the likely tokens may come, often one alone; where, the way there decides."""
    source = random.Random(str(list(tokens)))
    return set(source.sample(LIKELY, source.choice([1, 2, 5, 8]))), False


def constraint_of(rule, stop_ids=(EOS,), **settings):
    return Constraint(zoo.TokenGrammar(rule, **settings), stop_ids, 0, zoo.VOCAB)


def request_of(seed=3, **settings):
    return Request("r", PROMPT, SamplingParams(**settings), seed)


def rows_of(seed, likely=LIKELY):
    """Logits of a drafter that thinks some tokens far likelier than all the others."""
    logits = torch.randn(WIDTH, zoo.VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[:, list(likely)] += 12.0
    return logits


def settings_of(request, output_ids):
    settings = SlotSettings.allocate(1, zoo.VOCAB, torch.device("cpu"))
    params = dataclasses.replace(request.params, logprobs=MAX_TOP)
    settings.set({0: SlotRequest(params, request.seed, PROMPT, (EOS,), output_ids, True)})
    return settings


def candidates_of(logits, request, history):
    """What the device tells of a drafter's rows."""
    place = torch.arange(len(logits))
    rows = DrawnRows(torch.zeros_like(place), len(PROMPT) + len(history) + place)
    drawn = reference.draw(logits, settings_of(request, history), rows)
    names = ("tokens", "logit", "log_total", "top_ids", "top_logits")
    return Candidates(*(getattr(drawn, name).numpy() for name in names))


def rule_of(logits, constraint, request, history, drawn):
    """Every row masked in full, and drawn from after the tokens before it.

    A drawn token that is allowed is as sure as in the whole row, and stays, whatever the filters
    would let in now.
    """
    params, tokens, chances, forced = request.params, [], [], []
    filters = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    constraint.seek(history)
    while len(tokens) < len(logits):
        forced = forced or constraint.forced()
        if forced:
            token, chance = forced.pop(0), 1.0
        else:
            past = [*history, *tokens]
            row = apply_masks(logits[len(tokens) :][:1], [constraint.allowed()])
            where = DrawnRows(torch.tensor([0]), torch.tensor([len(PROMPT) + len(past)]))
            token = int(reference.draw(row, settings_of(request, past), where).tokens)
            first = drawn[len(tokens)]
            keeps = bool(row[0, first] > -math.inf) and not has_penalties(params)
            if keeps and filters:
                token = first
            assert not keeps or token == first
            seen = logits[len(tokens) :] if keeps else row
            chance = float(seen.double().softmax(1)[0, token])
        tokens.append(token)
        chances.append(chance)
        if token in constraint.stop_ids or not constraint.follow(token):
            break
    return tokens, chances


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_it_is_the_rule_where_all_that_is_allowed_is_a_candidate(settings):
    differ = 0
    for seed in range(40):
        request, logits = request_of(seed, **settings), rows_of(seed)
        start = random.Random(str([])).choice(sorted(maze([])[0]))
        history = [[], [start]][seed % 2]
        candidates = candidates_of(logits, request, history)
        draft = draft_within(constraint_of(maze), request, history, candidates)
        drawn = candidates.tokens.tolist()
        tokens, chances = rule_of(logits, constraint_of(maze), request, history, drawn)
        assert draft.tokens == tokens and draft.source == BLOCK_SOURCE
        assert draft.confidence == pytest.approx(chances, abs=1e-4)
        differ += tokens != drawn
    assert differ > 20, "the mask decides nothing"


def test_a_row_is_used_up_by_what_is_forced():
    def rule(tokens):
        return {20} if len(tokens) in (0, 1, 4) else set(LIKELY), False

    request, logits = request_of(), rows_of(1)
    draft = draft_within(constraint_of(rule), request, [], candidates_of(logits, request, []))
    best = logits.argmax(1).tolist()
    assert draft.tokens == [20, 20, best[2], best[3], 20, best[5], best[6]]
    assert [chance == 1.0 for chance in draft.confidence] == [True, True, False, False, True] + [
        False
    ] * 2


def test_it_ends_where_no_candidate_is_allowed():
    def rule(tokens):
        return {0, 1} if len(tokens) == 3 else set(LIKELY), False

    request = request_of()
    candidates = candidates_of(rows_of(2), request, [])
    assert not np.isin(candidates.top_ids, [0, 1]).any()
    draft = draft_within(constraint_of(rule), request, [], candidates)
    assert draft.tokens == candidates.tokens[:3].tolist() and len(draft.confidence) == 3


def test_another_row_helps_out():
    def rule(tokens):
        return {0, 1, 3} if len(tokens) == 3 else set(LIKELY), False

    request, logits = request_of(), rows_of(2)
    logits[4, 0], logits[5, 1] = 12.0, 13.0
    candidates = candidates_of(logits, request, [])
    assert not {0, 1, 3} & {*candidates.top_ids[3].tolist()}
    draft = draft_within(constraint_of(rule), request, [], candidates)
    assert draft.tokens[3] in (0, 1) and draft.confidence[3] == GUESSED
    assert draft.tokens[4:] == candidates.tokens[4:].tolist()


def test_it_ends_with_a_stop_token():
    """Where it may come at all: forced, or the likeliest."""

    def rule(tokens):
        return (set(LIKELY) if len(tokens) < 4 else set()), len(tokens) > 1

    request = request_of()
    logits = rows_of(3)
    candidates = candidates_of(logits, request, [])
    ends = draft_within(constraint_of(rule), request, [], candidates)
    assert ends.tokens == [*candidates.tokens[:4].tolist(), EOS] and ends.confidence[-1] == 1.0
    logits[:, EOS] = 40.0  # at once, were it allowed
    stops = draft_within(constraint_of(rule), request, [], candidates_of(logits, request, []))
    assert stops.tokens == [*ends.tokens[:2], EOS] and 0.99 < stops.confidence[-1] <= 1.0


def test_it_ends_where_the_answer_does_without_a_stop_token():
    constraint = constraint_of(lambda tokens: (set(LIKELY) if len(tokens) < 4 else set(), True), ())
    request = request_of()
    candidates = candidates_of(rows_of(3), request, [])
    for _ in range(2):  # it is no failure, after which nothing would be drafted
        draft = draft_within(constraint, request, [], candidates)
        assert draft.tokens == candidates.tokens[:4].tolist()


def test_a_drawn_token_is_a_candidate_however_unlikely():
    """Noise lifts tokens from behind the likeliest; which one only the whole row tells."""
    request = request_of(seed=5, temperature=1.0)
    logits = torch.zeros(WIDTH, zoo.VOCAB)
    candidates = candidates_of(logits, request, [])
    outside = [
        token not in top for token, top in zip(candidates.tokens, candidates.top_ids, strict=True)
    ]
    assert sum(outside) > 2

    def anything(tokens):
        return set(range(zoo.VOCAB)) - {EOS}, False

    draft = draft_within(constraint_of(anything), request, [], candidates)
    assert draft.tokens == candidates.tokens.tolist()
    assert draft.confidence == pytest.approx([1 / zoo.VOCAB] * WIDTH)


def test_what_noise_lifts_is_not_seen_where_the_drawn_token_is_forbidden():
    request = request_of(seed=5, temperature=1.0)
    candidates = candidates_of(torch.zeros(WIDTH, zoo.VOCAB), request, [])

    def others(tokens):
        return set(range(3, zoo.VOCAB)) - {*candidates.tokens.tolist()}, False

    draft = draft_within(constraint_of(others), request, [], candidates)
    assert all(
        token in top for token, top in zip(draft.tokens, candidates.top_ids.tolist(), strict=True)
    )
    # the rest of the row is likely too, and allowed
    num_allowed = len(others([])[0])
    assert draft.confidence == pytest.approx([1 / num_allowed] * WIDTH, rel=0.2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_offer_nothing(temperature):
    request, logits = request_of(temperature=temperature), rows_of(4)
    logits[2] = math.nan
    logits[4] = -math.inf

    def rule(tokens):
        return {20} if len(tokens) == 2 else set(LIKELY), False

    candidates = candidates_of(logits, request, [])
    draft = draft_within(constraint_of(rule), request, [], candidates)
    assert draft.tokens[2] == 20 and draft.confidence[2] == 1.0
    assert draft.confidence[4] == GUESSED and len(draft.tokens) == WIDTH
    assert all(0.0 < chance <= 1.0 for chance in draft.confidence)
    logits[:] = math.nan
    none = draft_within(constraint_of(rule), request, [], candidates_of(logits, request, []))
    assert none.tokens == []


def test_a_matcher_that_breaks_ends_the_draft():
    constraint = constraint_of(maze, breaks_at=3)
    request = request_of()
    candidates = candidates_of(rows_of(6), request, [])
    assert len(draft_within(constraint, request, [], candidates).tokens) <= 3
    assert draft_within(constraint, request, [], candidates).tokens == []


def test_masks_of_the_way_are_made_once():
    constraint = constraint_of(lambda tokens: (set(LIKELY), False))
    request = request_of()
    draft = draft_within(constraint, request, [], candidates_of(rows_of(7), request, []))
    assert len(constraint.masks([], draft.tokens)) == WIDTH + 1
    assert constraint._grammar.num_masks == WIDTH + 1


def test_no_rows_are_no_draft():
    none = np.zeros(0, dtype=np.int64)
    empty = Candidates(none, none, none, none.reshape(0, MAX_TOP), none.reshape(0, MAX_TOP))
    assert draft_within(constraint_of(maze), request_of(), [], empty).tokens == []
