"""Drafts as trees: what is the chain's, how deep they are, and what of them is left by a cut."""

from __future__ import annotations

from flashdraft.engine.drafts import (
    ASIDE_SOURCES,
    BEYOND_SOURCE,
    BLOCK_SOURCE,
    BRANCH_SOURCE,
    DEVICE_SOURCES,
    NGRAM_SOURCE,
    NODE_SOURCES,
    Draft,
    chain_of,
)
from flashdraft.kernels import tree as rule

# the anchor's children are tokens 0 and 2, of 0 tokens 1 and 4, of 1 token 3, of 2 token 5
SOURCES = [BLOCK_SOURCE, BLOCK_SOURCE, ASIDE_SOURCES[1], BLOCK_SOURCE, BRANCH_SOURCE, NGRAM_SOURCE]
PARENTS = [0, 1, 0, 2, 1, 3]
TREE = Draft([5, 6, 7, 8, 9, 4], [0.9, 0.8, 0.2, 0.7, 0.1, 0.3], BLOCK_SOURCE, PARENTS, SOURCES)


def test_the_first_child_of_the_chain_s_end_goes_on_with_it():
    assert chain_of(TREE.parents) == [0, 1, 2, 4]


def test_what_is_not_of_the_chain_is_counted():
    assert TREE.num_branches == 3 and TREE.cut(4).num_branches == 1
    assert TREE.num_off_chain([1, 2, 4]) == 0
    assert TREE.num_off_chain([1, 5]) == 1 and TREE.num_off_chain([3, 6]) == 2
    chain = Draft([5, 6], [0.9, 0.8], BLOCK_SOURCE)
    assert chain.num_branches == chain.num_off_chain([1, 2]) == 0


def test_a_chain_is_of_one_proposer_and_a_tree_of_several():
    assert TREE.sources == SOURCES
    assert Draft([5, 6], [0.9, 0.8], NGRAM_SOURCE).sources == [NGRAM_SOURCE, NGRAM_SOURCE]


def test_sources_are_counted_as_the_kernels_count_them():
    assert len(NODE_SOURCES) == rule.NUM_SOURCES and len(DEVICE_SOURCES) == rule.NUM_PROPOSERS
    for number, (source, aside) in enumerate(zip(DEVICE_SOURCES, ASIDE_SOURCES, strict=True)):
        assert NODE_SOURCES[number] == source
        assert NODE_SOURCES[number + rule.NUM_PROPOSERS] == aside
    assert (NODE_SOURCES[rule.BRANCH], NODE_SOURCES[rule.BEYOND]) == (BRANCH_SOURCE, BEYOND_SOURCE)


def test_a_tree_is_as_deep_as_its_longest_path():
    assert TREE.depth == 3
    assert TREE.cut(3).depth == 2
    assert TREE.cut(0).depth == 0
    assert Draft([5, 6], [0.9, 0.8], BLOCK_SOURCE).depth == 2


def test_a_cut_tree_is_a_tree():
    cut = TREE.cut(4)
    tokens, confidence = [5, 6, 7, 8], [0.9, 0.8, 0.2, 0.7]
    assert cut == Draft(tokens, confidence, BLOCK_SOURCE, [0, 1, 0, 2], SOURCES[:4])
