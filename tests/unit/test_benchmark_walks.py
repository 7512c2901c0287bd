"""Walks through trees: measured, tilted and prescribed, and what a real tree makes of them."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import h200_inject
from benchmarks.h200_inject import PrescribedWalks, find_path
from benchmarks.tree_length import compare
from benchmarks.walks import Walks, describe
from flashdraft.core import Request, SamplingParams
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.drafts import chain_of
from flashdraft.engine.engine import Engine
from flashdraft.kernels.accept import find_agreed, walk
from flashdraft.kernels.nodes import TreeNodes, make_chain
from tests import zoo
from tests.laid_out import make_nodes

CPU = torch.device("cpu")
SMALL = {(0, 0): 40.0, (0, 1): 20.0, (1, 1): 10.0, (1, 3): 15.0, (2, 2): 5.0, (4, 4): 10.0}
LARGE = {(0, 0): 30.0, (0, 2): 30.0, (1, 1): 5.0, (1, 4): 20.0, (3, 3): 5.0, (7, 7): 10.0}
WALKS = Walks({15: SMALL, 31: LARGE})


# -- walks ---------------------------------------------------------------------------------------


def test_a_document_has_walks_by_kind_task_and_tree(tmp_path: Path) -> None:
    path = tmp_path / "walks.json"
    tasks = {"one": {"15": {"0,1": 3, "2,2": 1}, "31": {"2,5": 1}}, "two": {"15": {"0,1": 4}}}
    path.write_text(json.dumps({"walks": {"greedy": tasks, "sampled": {}}}))
    walks = Walks.read(path, "greedy")
    assert walks.by_size == {15: {(0, 1): 7, (2, 2): 1}, 31: {(2, 5): 1}}
    assert walks.chain_mean == 3.0 and walks.mean(31) == 6.0 and walks.mean(15) == 2.125
    assert describe([(2, 5), (0, 1), (0, 1)]) == {"0,1": 2, "2,5": 1}


@pytest.mark.parametrize("wanted", [1.5, 2.15, 4.2, 7.9])
def test_a_tilt_gives_the_chain_its_mean_and_trees_what_follows(wanted: float) -> None:
    tilted = WALKS.tilted(wanted)
    assert tilted.chain_mean == pytest.approx(wanted, abs=1e-6)
    # weights go by the chain alone, and by the same rule for every pair
    steepness = math.log(tilted.largest[1, 4] / tilted.largest[0, 2] * 30 / 20)
    for size, counts in WALKS.by_size.items():
        found = tilted.by_size[size]
        assert sum(found.values()) == pytest.approx(1.0)
        weights = {pair: n * math.exp(steepness * pair[0]) for pair, n in counts.items()}
        for pair, weight in weights.items():
            assert found[pair] == pytest.approx(weight / sum(weights.values()))


def test_what_no_tilt_can_do_is_refused() -> None:
    with pytest.raises(ValueError, match="no tilt makes a chain of 9"):
        WALKS.tilted(9.0)


# -- what is prescribed --------------------------------------------------------------------------


def by_hand(nodes: TreeNodes, slot: int, count: int, leaves: int, length: int) -> int:
    """The word of the path, of a slot whose first nodes count."""
    parents = nodes.parents[slot].tolist()
    chain = chain_of(parents[: int((nodes.confidence[slot] > 0).sum())])
    paths = [[0]]
    for parent in parents[:count]:
        paths.append([*paths[parent], len(paths)])
    deep = max(len(path) for path in paths if len(path) <= 1 + length)
    fitting = [path for path in paths if len(path) == deep]
    best = min(fitting, key=lambda path: abs(sum(row in chain for row in path[1:]) - leaves))
    return sum(1 << row for row in best) - (1 << 64 if 63 in best else 0)


@pytest.mark.parametrize("num_nodes", [1, 15, 63])
def test_paths_are_those_of_the_rule(num_nodes: int) -> None:
    for seed in range(30):
        nodes = make_nodes(seed, 4, num_nodes, 9)
        there = (nodes.confidence > 0).sum(1)
        counts = torch.tensor([there[0], there[1] // 2, there[2], 0])
        is_node = torch.arange(num_nodes) < counts.unsqueeze(1)
        leaves = torch.tensor([[0], [1], [seed % 4], [2]])
        length = leaves + torch.tensor([[seed % 5], [2], [seed % 9], [3]])
        found = find_path(nodes, is_node, leaves, length).tolist()
        told = torch.cat([counts.unsqueeze(1), leaves, length], dim=1).tolist()
        assert found == [by_hand(nodes, slot, *one) for slot, one in enumerate(told)]


def everybody(nodes: TreeNodes) -> tuple[Tensor, Tensor, Tensor]:
    """Samples that agree with nobody, where rows begin, and all nodes."""
    num_slots, num_nodes = nodes.tokens.shape
    samples = torch.full((num_slots * (1 + num_nodes) + 1 + num_nodes,), -1)
    samples[: num_slots * (1 + num_nodes)] = 999
    starts = torch.arange(num_slots) * (1 + num_nodes)
    return samples, starts, nodes.confidence > 0


def wide_tree(num_slots: int, num_nodes: int) -> TreeNodes:
    """Nodes in order of their depth, each with two children."""
    parents = [node // 2 for node in range(num_nodes)]
    words, depths = [1], [0]
    for row, parent in enumerate(parents, start=1):
        words.append(words[parent] | 1 << row)
        depths.append(depths[parent] + 1)
    columns = torch.arange(num_nodes), torch.tensor(parents), torch.tensor(words[1:])
    tokens, tree, ancestors = (one.repeat(num_slots, 1) for one in columns)
    sure = torch.ones(num_slots, num_nodes)
    deep = torch.tensor(depths[1:], dtype=torch.int32).repeat(num_slots, 1)
    return TreeNodes(tokens, tree, ancestors, deep, sure, sure.double(), torch.zeros_like(deep))


@pytest.mark.parametrize("are_trees", [False, True])
def test_a_chain_follows_its_law(are_trees: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an engine with chains, whatever trees would do; the numbers come round and never end."""
    monkeypatch.setattr(h200_inject, "NUM_DRAWS", 1024)
    walks = WALKS.tilted(4.2)
    accept = PrescribedWalks(walks, are_trees, 3, CPU, seed=0)
    tokens, sure = torch.arange(45).view(3, 15), torch.ones(3, 15)
    nodes, lengths = make_chain(tokens, sure, sure.double()), []
    for _ in range(1024):
        samples, starts, is_node = everybody(nodes)
        decided = accept(samples, starts, nodes, is_node)
        assert torch.equal(find_agreed(samples, starts, nodes), decided)
        assert bool((samples[-16:] == -1).all())
        lengths.append(walk(decided, nodes, is_node, 15).num_accepted)
    found = 1 + torch.stack(lengths).double().mean(0)
    wanted = walks.mean(15) if are_trees else 4.2
    assert found.tolist() == pytest.approx([wanted] * 3, rel=0.03)
    assert torch.equal(accept(*again(nodes)), (2 << lengths[0]) - 1)
    some = torch.stack(lengths[:48]).double().mean(0) + 1
    assert some.tolist() == pytest.approx([wanted] * 3, rel=0.1)  # evenly spread


def again(nodes: TreeNodes) -> tuple[Tensor, Tensor, TreeNodes, Tensor]:
    samples, starts, is_node = everybody(nodes)
    return samples, starts, nodes, is_node


@pytest.mark.parametrize(("num_nodes", "mean"), [(0, 1.0), (15, 2.5), (23, 3.5), (31, 4.5)])
def test_a_tree_is_walked_as_trees_of_its_size_are(num_nodes: int, mean: float) -> None:
    walks = Walks({15: {(0, 1): 1.0, (1, 2): 1.0}, 31: {(0, 3): 1.0, (1, 4): 1.0}})
    accept = PrescribedWalks(walks, True, 2, CPU, seed=1)
    nodes, total = wide_tree(2, 31), torch.zeros(2)
    for _ in range(1024):
        samples, starts, is_node = everybody(nodes)
        is_node[:, num_nodes:] = False
        decided = accept(samples, starts, nodes, is_node)
        found = walk(decided, nodes, is_node, 15)
        for slot, path in enumerate(found.path.tolist()):
            count = int(found.num_accepted[slot])
            assert [int(nodes.depths[slot, row - 1]) for row in path[1 : 1 + count]] == [
                *range(1, 1 + count)
            ]
            for place in range(count):
                token = nodes.tokens[slot, path[place + 1] - 1]
                assert samples[starts[slot] + path[place]] == token
            if count:
                assert sum(row in (1, 3, 7, 15, 31) for row in path[1:]) == (count in (2, 4))
        total += found.num_accepted
    assert (1 + total / 1024).tolist() == pytest.approx([mean] * 2, rel=0.03)


# -- engines -------------------------------------------------------------------------------------


def build(tree: int | None) -> Engine:
    target = zoo.tiny_target("gemma4", zoo.kernels("float32"), taps=(0, 2))
    drafter = zoo.tiny_drafter(target.kernels, 8)
    chains = {"verify": 7, "run_ahead": True} if tree is None else {"tree": tree}
    config = EngineConfig(ngram=False, cache=CacheOptions(cache_gb=0.01), **chains)
    walks = Walks({size: {(0, 2): 3.0, (1, 1): 1.0, (3, 5): 1.0} for size in (15, 31)})
    accept = PrescribedWalks(walks, tree is not None, 16, CPU, seed=2)
    return Engine(target, drafter, config, accept=accept)


@pytest.mark.parametrize("tree", [None, 15, 31])
def test_an_engine_goes_where_it_is_told(tree: int | None) -> None:
    engine, seen = build(tree), list[tuple[int, int]]()
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    for name in range(3):
        engine.submit(Request(str(name), [9, 8, 7 + name], params, seed=name))
    while engine.has_work:
        engine.step()
        lengths, whole = engine.last_step.verify_lengths, tree or 7
        seen += [one for one, n in zip(engine.last_walks, lengths, strict=True) if n == whole]
    assert len(seen) > 12
    if tree is None:
        assert {*seen} <= {(0, 0), (1, 1), (3, 3)}
    else:
        paths = {1, 2, 5} if tree == 31 else {*range(1, 6)}  # a few nodes may be no chain so deep
        assert {length for _, length in seen} <= paths
        assert any(d < length for d, length in seen)


@pytest.mark.parametrize("tree", [None, 31])
def test_committed_text_is_what_the_cache_holds(tree: int | None) -> None:
    """After paths that left the chain were moved to where a chain's would lie."""
    engine = build(tree)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    answer = zoo.run(engine, [Request("first", [9, 8, 7], params, seed=0)])["first"]
    assert answer.stats.accepted > 20
    more = SamplingParams(max_tokens=8, ignore_eos=True)
    again = Request("again", [9, 8, 7, *answer.token_ids], more, seed=0, verify=0)
    cached = zoo.run(engine, [again])["again"]
    assert cached.stats.cached_tokens >= 48
    engine.forget_prefixes()
    assert zoo.run(engine, [again])["again"].token_ids == cached.token_ids


def test_walks_of_real_trees_are_measured() -> None:
    """Of steps with room for a whole tree, as it was told how far to go."""
    target = zoo.tiny_target("gemma4", zoo.kernels("float32"), taps=(0, 2))
    drafter = zoo.tiny_drafter(target.kernels, 8)
    configs = {
        "chain": EngineConfig(verify=7, run_ahead=True, ngram=False),
        "tree 15": EngineConfig(tree=15, ngram=False),
    }
    accepts = {name: PrescribedWalks(WALKS, name != "chain", 16, CPU, seed=3) for name in configs}
    engines = {
        name: Engine(target, drafter, config, accept=accepts[name])
        for name, config in configs.items()
    }
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    row, walks = compare(engines, [[5, 6], [7, 8, 9]], params)
    assert [*row] == ["requests", "chain", "tree 15"] and [*walks] == ["15"]
    counts = Counter({tuple(map(int, pair.split(","))): n for pair, n in walks["15"].items()})
    assert all(d <= length for d, length in counts) and any(d < length for d, length in counts)
    rate = 1 + sum(length * n for (_, length), n in counts.items()) / counts.total()
    assert rate == pytest.approx(WALKS.mean(15), rel=0.1)
    assert counts.total() > 40 and row["tree 15"]["accepted_length"] > 1.5
