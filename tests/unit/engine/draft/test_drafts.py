"""Drafts as trees: what is the chain's, how deep they are, and what of them is left by a cut."""

from __future__ import annotations

from flashdraft.engine.drafts import BEYOND_SOURCE, BLOCK_SOURCE, BRANCH_SOURCE, Draft, chain_of

# the anchor's children are tokens 0 and 2, of 0 tokens 1 and 4, of 1 token 3, of 2 token 5
TREE = Draft([5, 6, 7, 8, 9, 4], [0.9, 0.8, 0.2, 0.7, 0.1, 0.3], BLOCK_SOURCE, [0, 1, 0, 2, 1, 3])


def test_the_first_child_of_the_chain_s_end_goes_on_with_it():
    chain, branch = BLOCK_SOURCE, BRANCH_SOURCE
    assert TREE.sources == [chain, chain, branch, chain, branch, BEYOND_SOURCE]
    assert Draft([5, 6], [0.9, 0.8], chain).sources == [chain, chain]
    assert chain_of(TREE.parents) == [0, 1, 2, 4]


def test_what_is_not_of_the_chain_is_counted():
    assert TREE.num_branches == 3 and TREE.cut(4).num_branches == 1
    assert TREE.num_off_chain([1, 2, 4]) == 0
    assert TREE.num_off_chain([1, 5]) == 1 and TREE.num_off_chain([3, 6]) == 2
    chain = Draft([5, 6], [0.9, 0.8], BLOCK_SOURCE)
    assert chain.num_branches == chain.num_off_chain([1, 2]) == 0


def test_a_tree_is_as_deep_as_its_longest_path():
    assert TREE.depth == 3
    assert TREE.cut(3).depth == 2
    assert TREE.cut(0).depth == 0
    assert Draft([5, 6], [0.9, 0.8], BLOCK_SOURCE).depth == 2


def test_a_cut_tree_is_a_tree():
    cut = TREE.cut(4)
    assert cut == Draft([5, 6, 7, 8], [0.9, 0.8, 0.2, 0.7], BLOCK_SOURCE, [0, 1, 0, 2])
