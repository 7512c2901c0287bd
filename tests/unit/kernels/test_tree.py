"""Trees of draft tokens: candidates by the draw's own noise, and the likeliest nodes of all."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from flashdraft.kernels.draw.arithmetic import gumbel
from flashdraft.kernels.draw.noise import host_keys_from, host_random_bits_at
from flashdraft.kernels.draw.rule import LOWEST_TEMPERATURE, Draw
from flashdraft.kernels.nodes import MAX_NODES, TreeNodes
from flashdraft.kernels.tree import (
    BEYOND,
    BRANCH,
    DOUBT,
    MAX_OFFERS,
    NUM_PROPOSERS,
    NUM_SOURCES,
    SEEDED_FROM,
    Offered,
    grow,
    offer,
)
from tests.grown import Drawn, Node, as_nodes, assert_equal, grow_by_hand, make_drawn, make_offered

NUM_CASES = 300
FREE = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
PLAIN = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


# -- what is offered -------------------------------------------------------------------------------


def offer_by_hand(drawn: Drawn, row: int, count: int) -> tuple[list[int], list[float]]:
    draw, settings, rows = drawn
    token, slot = int(draw.tokens[row]), int(rows.owner[row])
    if token < 0:
        return [0] * count, [0.0] * count
    tops = zip(draw.top_ids[row].tolist(), draw.top_logits[row].tolist(), strict=True)
    found = [(token, float(draw.logit[row])), *(one for one in tops if one[0] not in (-1, token))]
    ids, logits = np.array([one[0] for one in found]), np.float32([one[1] for one in found])
    heat = np.float32(settings.temperature[slot])
    with np.errstate(over="ignore"):
        if heat > 0:
            key = host_keys_from(
                settings.noise[slot : slot + 1].numpy(), rows.positions[row].numpy()
            )
            scaled = (logits - logits.max()) / np.maximum(heat, np.float32(LOWEST_TEMPERATURE))
            scores = (scaled + gumbel(host_random_bits_at(key, ids))) / np.float32(DOUBT)
            weights = np.exp(scores.astype(np.float64) - scores.max())
            sure = weights / weights.sum()
            order = [0, *(1 + np.argsort(-scores[1:], kind="stable")).tolist()]
        else:
            sure = np.minimum(np.exp(logits.astype(np.float64) - float(draw.log_total[row])), 1.0)
            order = list(range(len(ids)))
    spare = max(0, count - len(ids))
    order = order[:count]
    return [*ids[order].tolist(), *[0] * spare], [*sure[order].tolist(), *[0.0] * spare]


@pytest.mark.parametrize("count", [1, 8, MAX_OFFERS])
@pytest.mark.parametrize("seed", range(6))
def test_offers_are_those_by_hand(seed: int, count: int) -> None:
    drawn = make_drawn(seed)
    offers = offer(*drawn, count)
    for row in range(len(drawn.draw.tokens)):
        tokens, confidence = offer_by_hand(drawn, row, count)
        assert offers.tokens[row].tolist() == tokens
        assert offers.confidence[row].tolist() == pytest.approx(confidence, rel=2e-6, abs=1e-7)
    assert offers.tokens.dtype == torch.int64 and offers.confidence.dtype == torch.float32


def test_what_is_drawn_freely_is_surest_for_the_noise_is_the_draw_s_own() -> None:
    drawn = make_drawn(3, temperature=1.0, **FREE, **PLAIN, logit_bias={}, min_tokens=0)
    offers = offer(*drawn, MAX_OFFERS)
    is_top = (drawn.draw.top_ids == drawn.draw.tokens.unsqueeze(1)).any(1) & (
        drawn.draw.tokens >= 0
    )
    assert is_top.sum() > 4
    assert (offers.confidence[is_top, 0] == offers.confidence[is_top].amax(1)).all()
    assert offers.confidence[is_top].sum(1).sub(1).abs().max() < 1e-5
    others = offers.confidence[:, 1:]
    assert (others[:, 1:] <= others[:, :-1]).all()


def test_nothing_is_sure_where_there_is_no_token_or_no_number() -> None:
    drawn = make_drawn(1, temperature=0.0, **PLAIN)
    unknown = drawn.draw._replace(log_total=torch.full_like(drawn.draw.log_total, math.nan))
    offers = offer(unknown, *drawn[1:], 8)
    assert not offers.confidence.any()
    assert torch.equal(offers.tokens, offer(*drawn, 8).tokens) and offers.tokens.any()
    nobody = Draw(*(one.clone() for one in drawn.draw))
    nobody.tokens.fill_(-1)  # the rest says nothing
    assert not any(one.any() for one in offer(nobody, *drawn[1:], 8))


# -- trees -----------------------------------------------------------------------------------------


def random_case(seed: int) -> tuple[Offered, int]:
    chance = random.Random(seed)
    width, count, num_nodes = chance.randint(1, 15), chance.randint(0, 8), chance.randint(1, 63)
    has_rivals = chance.random() < 0.7
    num_slots, num_before = chance.randint(1, 5), chance.choice([1, 1, 2, 9])
    offered = make_offered(seed, num_slots, width, count, None, has_rivals, num_before)
    return offered, num_nodes


def by_hand(offered: Offered, num_nodes: int) -> list[list[Node]]:
    return [grow_by_hand(offered, slot, num_nodes) for slot in range(len(offered.tokens))]


def check_tree(tree: TreeNodes, width: int, num_nodes: int) -> None:
    """What is true of one slot's tree, whatever it was grown from."""
    is_there = tree.confidence > 0
    assert torch.equal(is_there, tree.survival > 0)
    assert is_there.tolist() == sorted(is_there.tolist(), reverse=True), "nodes come first"
    rows = [{0}]
    for row, parent in enumerate(tree.parents.tolist(), start=1):
        assert 0 <= parent < row
        rows.append(rows[parent] | {row})
        word = int(tree.ancestors[row - 1])
        assert rows[row] == {one for one in range(64) if word >> one & 1}
        assert tree.depths[row - 1] == len(rows[row]) - 1 <= max(width, 1)
    siblings = list(
        zip(tree.parents[is_there].tolist(), tree.tokens[is_there].tolist(), strict=True)
    )
    assert len(set(siblings)) == len(siblings)
    assert not (tree.tokens[~is_there].any() or tree.parents[~is_there].any())


@pytest.mark.parametrize("first", range(0, NUM_CASES, 50))
def test_trees_are_those_by_hand(first: int) -> None:
    for seed in range(first, first + 50):
        offered, num_nodes = random_case(seed)
        found, trees = grow(offered, num_nodes), by_hand(offered, num_nodes)
        assert_equal(found, as_nodes(trees, num_nodes))
        for slot, tree in enumerate(trees):
            one = TreeNodes(*(column[slot] for column in found))
            check_tree(one, offered.tokens.shape[1], num_nodes)
            is_free = [num_nodes < SEEDED_FROM or not node.is_chain for node in tree]
            survival = one.survival[: len(tree)][torch.tensor(is_free, dtype=torch.bool)]
            assert (survival[1:] <= survival[:-1]).all(), "survival rises"


def test_fewer_nodes_are_the_first_of_more() -> None:
    for seed in range(8):
        offered = make_offered(seed, 4, 9, 5)
        for few, many in ((3, SEEDED_FROM - 1), (SEEDED_FROM, MAX_NODES)):
            whole = grow(offered, many)
            assert_equal(grow(offered, few), TreeNodes(*(one[:, :few] for one in whole)))


def offer_three(branches: int) -> Offered:
    """A chain of 5, 6 and offers 5, 7 and 8, 9; a confidence is its own chance, nearly."""
    edges = torch.arange(1, 20) / 20
    chances = (torch.arange(20) / 20 + 0.025).repeat(NUM_SOURCES, 1)
    chances[[BRANCH, BEYOND]] = 1.0  # all of it comes true
    return Offered(
        tokens=torch.tensor([[5, 6]]),
        confidence=torch.tensor([[0.6, 0.5]]),
        sources=torch.tensor([0]),
        rival_tokens=torch.zeros(1, 0, dtype=torch.int64),
        rival_confidence=torch.zeros(1, 0),
        other_tokens=torch.tensor([[[[5, 7]], [[8, 9]]]]),
        other_confidence=torch.tensor([[[[0.62, 0.25]], [[0.8, 0.15]]]]),
        other_numbers=torch.zeros(1, 2, 1, 2, dtype=torch.int64),
        chain_before=torch.zeros(1, 2, dtype=torch.int64),
        rival_before=torch.zeros(1, 2, dtype=torch.int64),
        branches=torch.tensor([branches], dtype=torch.int32),
        lengths=torch.tensor([10], dtype=torch.int32),
        ends=torch.tensor([1000]),
        chances=chances,
        edges=edges,
    )


def told(nodes: TreeNodes) -> list[tuple[int, ...]]:
    """Token, parent and depth of those that are there."""
    columns = (
        one[nodes.confidence > 0].tolist() for one in (nodes.tokens, nodes.parents, nodes.depths)
    )
    return list(zip(*columns, strict=True))


def test_the_likeliest_come_first_and_no_later_than_what_leads_to_them() -> None:
    # 8 follows 5 with .8, but is 6's next sibling: it waits for it
    best = [(5, 0, 1), (6, 1, 2), (8, 1, 2), (7, 0, 1), (8, 4, 2), (9, 1, 2), (9, 4, 2)]
    nodes = grow(offer_three(1), 9)
    assert told(nodes) == best
    assert nodes.survival[0, 2] == nodes.survival[0, 1]
    assert told(grow(offer_three(1), 3)) == best[:3]
    assert nodes.ancestors[0].tolist() == [3, 7, 11, 17, 49, 67, 145, 257, 513]


def test_with_many_nodes_the_chain_comes_first_and_limits_nothing() -> None:
    offered = offer_three(1)
    offered.confidence[0, 1] = 0.01
    assert told(grow(offered, SEEDED_FROM - 1))[:3] == [(5, 0, 1), (7, 0, 1), (8, 2, 2)]
    nodes = grow(offered, SEEDED_FROM)
    assert told(nodes)[:3] == [(5, 0, 1), (6, 1, 2), (8, 1, 2)]
    assert nodes.survival[0, 2] > nodes.survival[0, 1]


@pytest.mark.parametrize("num_nodes", [2, 5, 20, MAX_NODES])
@pytest.mark.parametrize("seed", range(4))
def test_without_branches_there_is_the_chain_alone(seed: int, num_nodes: int) -> None:
    offered = make_offered(seed, 6, 9, 4)
    offered.branches.zero_()
    bare = offered._replace(
        rival_tokens=offered.rival_tokens[:, :0],
        rival_confidence=offered.rival_confidence[:, :0],
        other_tokens=offered.other_tokens[..., :0],
        other_confidence=offered.other_confidence[..., :0],
        other_numbers=offered.other_numbers[..., :0],
    )
    found = grow(offered, num_nodes)
    assert_equal(grow(bare, num_nodes), found)
    assert_equal(found, as_nodes(by_hand(offered, num_nodes), num_nodes))
    left = (offered.ends - offered.lengths - 2).clamp(min=0, max=num_nodes)
    ends = torch.minimum((offered.confidence > 0).cumprod(1).sum(1), left)
    assert torch.equal((found.confidence > 0).sum(1), ends) or seed == 0  # whose chances may be 0


def test_nodes_beside_the_chain_have_chances_of_their_own() -> None:
    offered = offer_three(1)
    offered.chances[BRANCH], offered.chances[BEYOND] = 0.5, 0.25
    alive = grow(offered, 9).survival[0]
    assert alive[0] == pytest.approx(0.625) and alive[1] == pytest.approx(0.625 * 0.525)
    assert alive[2] == pytest.approx(0.625 * 0.8 * 0.5)  # 8 behind 5
    assert alive[3] == pytest.approx(0.25 * 0.5)  # 7
    assert alive[4] == pytest.approx(0.625 * 0.15 * 0.5)  # 9 behind 5
    assert alive[5] == pytest.approx(0.25 * 0.5 * 0.8 * 0.25)  # 8 behind 7
    offered.chances[BRANCH] = 2.0  # more comes true than is said, but no more than all
    assert grow(offered, 9).survival[0, 1:4].tolist() == pytest.approx([0.5] + [0.625 * 0.525] * 2)


def test_where_the_chain_ends_others_go_on() -> None:
    offered = offer_three(1)
    offered.confidence[0, 1] = 0.0
    assert told(grow(offered, 20))[:2] == [(5, 0, 1), (8, 1, 2)]
    offered.confidence.zero_()
    assert told(grow(offered, 20))[:2] == [(5, 0, 1), (8, 1, 2)]  # offered, too
    offered.other_confidence.zero_()
    nodes = grow(offered, 20)
    assert told(nodes) == [] and nodes.ancestors[0].tolist() == [1 | 2 << i for i in range(20)]


@pytest.mark.parametrize("num_nodes", [9, SEEDED_FROM])
def test_nothing_is_deeper_than_the_end_with_the_target_s_own_token_behind(num_nodes: int) -> None:
    offered, depths = with_rival(offer_three(1), [4, 3], 0.45), []
    for left in range(5):  # tokens of the answer, behind the anchor
        offered.ends[0] = 10 + 1 + left
        depths.append(sorted(depth for _, _, depth in told(grow(offered, num_nodes))))
    assert depths[:2] == [[], []] and depths[2] == [1, 1, 1]
    assert set(depths[3]) == {1, 2} and depths[3] == depths[4]


def with_rival(offered: Offered, tokens: list[int], confidence: float) -> Offered:
    return offered._replace(
        rival_tokens=torch.tensor([tokens]),
        rival_confidence=torch.full((1, len(tokens)), confidence),
    )


def words_of(nodes: TreeNodes) -> list[int]:
    return nodes.sources[nodes.confidence > 0].tolist()


def test_a_rival_chain_joins_where_it_leaves_the_chain() -> None:
    offered = with_rival(offer_three(1), [5, 4], 0.45)
    chain, leaves = 0, 1 + NUM_PROPOSERS
    nodes = grow(offered, 4)  # 5 is on both: one node
    assert told(nodes) == [(5, 0, 1), (6, 1, 2), (8, 1, 2), (4, 1, 2)]
    assert words_of(nodes) == [chain, chain, BRANCH, leaves]
    assert nodes.survival[0, 3] == pytest.approx(0.625 * 0.475)
    assert nodes.confidence[0, 3] == pytest.approx(0.45)
    offered.chances[leaves] = 0.9  # by its own chance: now before what is offered
    assert told(grow(offered, 4)) == [(5, 0, 1), (6, 1, 2), (4, 1, 2), (8, 1, 2)]
    offered.chances[leaves] = 0.2
    assert told(grow(offered, 6))[2:] == [(8, 1, 2), (7, 0, 1), (8, 4, 2), (4, 1, 2)]


def test_a_rival_chain_goes_on_by_its_own_word_and_has_branches() -> None:
    offered = with_rival(offer_three(1), [4, 3], 0.45)
    offered.chances[1], offered.chances[1 + NUM_PROPOSERS] = 0.95, 0.5
    offered.chances[BEYOND] = 0.01
    nodes = grow(offered, 5)
    assert told(nodes) == [(5, 0, 1), (4, 0, 1), (3, 2, 2), (8, 2, 2), (6, 1, 2)]
    assert words_of(nodes) == [0, 1 + NUM_PROPOSERS, 1, BRANCH, 0]
    assert nodes.survival[0].tolist() == pytest.approx(
        [0.625, 0.5, 0.5 * 0.95, 0.5 * 0.8, 0.625 * 0.525]
    )
    offered.rival_confidence[0, 1] = 0.0  # it ends: what is offered there follows
    assert told(grow(offered, 3)) == [(5, 0, 1), (4, 0, 1), (8, 2, 2)]


def test_a_rival_s_token_is_offered_once() -> None:
    offered = with_rival(offer_three(1), [7, 8], 0.95)
    nodes = grow(offered, 20)
    assert sorted(told(nodes)) == sorted(
        [(5, 0, 1), (7, 0, 1), (6, 1, 2), (8, 1, 2), (9, 1, 2), (8, 3, 2), (9, 3, 2)]
    )


def test_the_same_chain_twice_is_one_and_without_branches_there_is_no_other() -> None:
    alone = grow(offer_three(1), 20)
    assert_equal(grow(with_rival(offer_three(1), [5, 6], 0.95), 20), alone)
    other = with_rival(offer_three(0), [4, 3], 0.95)
    assert told(grow(other, 20)) == [(5, 0, 1), (6, 1, 2)]


def test_a_rival_may_go_on_where_the_chain_ends() -> None:
    offered = with_rival(offer_three(1), [5, 6], 0.95)
    offered.confidence[0, 1] = 0.0
    nodes = grow(offered, 2)
    assert told(nodes) == [(5, 0, 1), (6, 1, 2)]
    assert words_of(nodes) == [0, 1 + NUM_PROPOSERS]


def test_there_may_be_nothing_to_draft() -> None:
    def empty(*shape: int) -> Tensor:
        return torch.zeros(shape)

    offered = make_offered(0, 3, 1, 2)._replace(
        tokens=empty(3, 0).long(),
        confidence=empty(3, 0),
        rival_tokens=empty(3, 0).long(),
        rival_confidence=empty(3, 0),
        other_tokens=empty(3, 0, 1, 2).long(),
        other_confidence=empty(3, 0, 1, 2),
        other_numbers=empty(3, 0, 1, 2).long(),
        chain_before=empty(3, 0).long(),
        rival_before=empty(3, 0).long(),
    )
    assert not grow(offered, 4).confidence.any()
