"""Drafts under a grammar: what the rule draws from masked rows, as far as candidates tell."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch

from flashdraft.core import Request, SamplingParams
from flashdraft.engine.draft.candidates import GUESSED, Candidates
from flashdraft.engine.draft.guided import MOST_GUIDED, NUM_OPTIONS, Growth, draft_within
from flashdraft.engine.drafts import (
    BEYOND_SOURCE,
    BLOCK_SOURCE,
    BRANCH_SOURCE,
    NGRAM_SOURCE,
    Draft,
    chain_of,
)
from flashdraft.engine.policy.verify import BUCKET_EDGES
from flashdraft.engine.sampling.grammar import Constraint
from flashdraft.engine.sampling.mask import apply_masks
from flashdraft.kernels.draw import reference
from flashdraft.kernels.draw.rule import (
    MAX_TOP,
    Draw,
    DrawnRows,
    SlotRequest,
    SlotSettings,
    has_penalties,
)
from flashdraft.kernels.tree import BEYOND, BRANCH, NUM_SOURCES, Offered, grow, offer
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


# -- trees -----------------------------------------------------------------------------------------


SOURCES = {BLOCK_SOURCE: 0, BRANCH_SOURCE: BRANCH, BEYOND_SOURCE: BEYOND}


def table_of(seed):
    """Chances by source and bucket, as a device has them, and as the host asks for them."""
    source = np.random.default_rng(seed)
    table = source.uniform(0.4, 1.0, (NUM_SOURCES, len(BUCKET_EDGES) + 1)).astype(np.float32)

    def chance(name, confidence):
        number, sure = SOURCES[name], np.float32(confidence)
        rate = table[number, np.searchsorted(np.float32(BUCKET_EDGES), sure, side="right")]
        return float(min(sure * rate, 1.0) if number >= BRANCH else rate)

    return torch.from_numpy(table), chance


def offered_of(candidates, request, history, table):
    """What a device would grow trees from, of the same rows."""
    place, tensors = torch.arange(WIDTH), map(torch.from_numpy, dataclasses.astuple(candidates))
    rows = DrawnRows(torch.zeros_like(place), len(PROMPT) + len(history) + place)
    offers = offer(Draw(*tensors), settings_of(request, history), rows, NUM_OPTIONS)
    none = torch.zeros(1, 0)
    return Offered(
        offers.tokens[:, 0].unsqueeze(0),
        offers.confidence[:, 0].unsqueeze(0),
        torch.zeros(1, dtype=torch.int64),
        none.long(),
        none,
        offers.tokens.view(1, WIDTH, 1, -1),
        offers.confidence.view(1, WIDTH, 1, -1),
        torch.zeros(1, WIDTH, 1, NUM_OPTIONS, dtype=torch.int64),
        torch.zeros(1, WIDTH, dtype=torch.int64),
        torch.zeros(1, WIDTH, dtype=torch.int64),
        torch.ones(1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([1000]),
        table,
        torch.tensor(BUCKET_EDGES),
    )


@pytest.mark.parametrize("settings", SETTINGS[:6], ids=str)
def test_where_everything_is_allowed_it_is_the_device_s_tree(settings):
    constraint = constraint_of(lambda tokens: (set(range(zoo.VOCAB)) - {EOS}, False))
    sizes = set()
    for seed in range(12):
        logits = torch.randn(WIDTH, zoo.VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
        logits[:, EOS] = -30.0
        request, (table, chance) = request_of(seed, **settings), table_of(seed)
        candidates = candidates_of(logits, request, [])
        num_nodes = (1, 4, MOST_GUIDED)[seed % 3]
        growth = Growth(num_nodes, chance)
        draft = draft_within(constraint, request, [], candidates, growth)
        nodes = grow(offered_of(candidates, request, [], table), num_nodes)
        assert draft.tokens == nodes.tokens[0].tolist()
        assert draft.parents == nodes.parents[0].tolist()
        assert draft.confidence == pytest.approx(nodes.confidence[0].tolist(), rel=1e-4)
        assert [SOURCES[one] for one in draft.node_sources] == nodes.sources[0].tolist()
        sizes.add(draft.depth)
    assert len(sizes) > 3


def paths_of(draft):
    """The tokens that lead to every row."""
    paths = [()]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_node_is_allowed_where_it_is_and_its_first_way_is_the_chain(settings):
    """Whatever a chain would be: a tree has as much of it as it finds worth its nodes."""
    branches = 0
    for seed in range(20):
        request, logits = request_of(seed, **settings), rows_of(seed)
        candidates, (_, chance) = candidates_of(logits, request, []), table_of(seed)
        growth = Growth(MOST_GUIDED, chance)
        tree = draft_within(constraint_of(maze), request, [], candidates, growth)
        chain = draft_within(constraint_of(maze), request, [], candidates)
        paths = paths_of(tree)
        assert len(set(paths)) == len(paths) == 1 + MOST_GUIDED
        for path in paths[1:]:
            assert path[-1] in maze(list(path[:-1]))[0]
            assert len(maze(list(path[:-1]))[0]) > 1 or tree.confidence[paths.index(path) - 1] == 1
        first = [tree.tokens[row - 1] for row in chain_of(tree.parents)[1:]]
        assert first == chain.tokens[: len(first)]
        branches += tree.num_branches
    assert branches > 50


def test_a_smaller_tree_is_the_beginning_of_a_larger_one():
    for seed in range(10):
        request, (_, chance) = request_of(seed, temperature=0.8 * (seed % 2)), table_of(seed)
        candidates = candidates_of(rows_of(seed), request, [])
        growth = Growth(MOST_GUIDED, chance)
        draft = draft_within(constraint_of(maze), request, [], candidates, growth)
        assert all(parent <= row for row, parent in enumerate(draft.parents))
        small = draft_within(constraint_of(maze), request, [], candidates, Growth(5, chance))
        assert small.tokens == draft.tokens[:5] and small.parents == draft.parents[:5]


def test_a_known_chain_goes_first_and_the_drafter_s_tokens_stand_beside_it():
    request = request_of()
    candidates = candidates_of(rows_of(3), request, []).undrawn
    anything = constraint_of(lambda tokens: (set(LIKELY) | {60, 61}, False))
    known = Draft([60, 61, 60], [0.9, 0.9, 0.0], NGRAM_SOURCE)
    growth = Growth(9, lambda source, sure: sure)
    draft = draft_within(anything, request, [], candidates, growth, known)
    rows = chain_of(draft.parents)[1:]
    assert [draft.tokens[row - 1] for row in rows][:2] == [60, 61]
    assert [draft.node_sources[row - 1] for row in rows][:3] == [NGRAM_SOURCE] * 2 + [BLOCK_SOURCE]
    assert {*draft.node_sources} >= {NGRAM_SOURCE, BRANCH_SOURCE}
    forbids = constraint_of(lambda tokens: (set(LIKELY) | ({60} if not tokens else set()), False))
    cut = draft_within(forbids, request, [], candidates, growth, known)
    assert 61 not in cut.tokens and cut.tokens[0] == 60 and len(cut.tokens) == 9


class CountingGrammar(zoo.TokenGrammar):
    """Counts what its matchers are asked."""

    def start(self):
        matcher, self.asked = super().start(), Counter()
        for name in ("advance", "rollback", "allowed", "forced"):
            setattr(matcher, name, self._counted(name, getattr(matcher, name)))
        return matcher

    def _counted(self, name, real):
        def call(*arguments):
            self.asked[name] += 1
            return real(*arguments)

        return call


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.5}])
def test_a_tree_asks_its_grammar_a_bounded_number_of_things(settings):
    """However the grammar refuses: by nodes and depths, not by tokens or candidates."""
    most = Counter()
    for seed in range(40):
        request, (_, chance) = request_of(seed, **settings), table_of(seed)
        likely = range(10, 10 + (MAX_TOP, 40)[seed % 2])  # of which the grammar allows but some
        candidates = candidates_of(rows_of(seed, likely), request, [])
        grammar = CountingGrammar(maze)
        constraint = Constraint(grammar, (EOS,), 0, zoo.VOCAB)
        draft = draft_within(constraint, request, [], candidates, Growth(MOST_GUIDED, chance))
        most |= grammar.asked
        before = grammar.asked["allowed"]
        rows = constraint.masks([], draft.tokens, draft.parents)
        assert len(rows) == 1 + MOST_GUIDED == grammar.asked["allowed"], "none is made twice"
        assert before <= MOST_GUIDED
    assert most["allowed"] <= MOST_GUIDED and most["forced"] <= MOST_GUIDED
    # every node opened tries its first token, and once more perhaps; each popped one goes there
    tries, moves = 3 * MOST_GUIDED, 2 * MOST_GUIDED
    assert most["advance"] <= tries + moves * WIDTH and most["rollback"] <= tries + moves


def test_where_a_matcher_breaks_the_tree_is_what_there_was():
    request = request_of()
    candidates, growth = candidates_of(rows_of(6), request, []), Growth(9, lambda _, sure: sure)
    broken = constraint_of(maze, breaks_at=3)
    draft = draft_within(broken, request, [], candidates, growth)
    assert draft.depth <= 3 and len(draft.parents) == len(draft.tokens) < 9
    assert draft_within(broken, request, [], candidates, growth).tokens == []
