"""What slots have to grow trees from, the trees by hand, and drafters' rows for `Kernels.offer`."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from flashdraft.engine.policy.verify import BUCKET_EDGES
from flashdraft.kernels.draw import reference
from flashdraft.kernels.draw.rule import MAX_TOP, Draw, DrawnRows, SlotSettings
from flashdraft.kernels.interface import Kernels
from flashdraft.kernels.nodes import TreeNodes
from flashdraft.kernels.tree import (
    BEYOND,
    BRANCH,
    NUM_PROPOSERS,
    NUM_SOURCES,
    SEEDED_FROM,
    Offered,
)
from tests.drawn import Rows, make_rows

VOCABULARY = 60
FEW = [0.25, 0.5, 0.5, 1.0]  # chances whose products are often equal


def make_offered(
    seed: int,
    num_slots: int,
    width: int,
    count: int,
    device: torch.device | None = None,
    has_rivals: bool = True,
    num_before: int = 1,
) -> Offered:
    """Chains that end early, that are not among the offers, that have no branches; many equals.

    Rival chains leave them early, late or never, for tokens that may be offered. With more than one
    list of offers to a place they are those of a drafter with a head.
    """
    random = np.random.default_rng(seed)
    shape, lists = (num_slots, width), (num_slots, width, num_before)
    orders = np.argsort(random.random((*lists, VOCABULARY)), axis=3)
    every, sure = orders[..., :count], -np.sort(-random.random((*lists, count)), axis=3)
    others = every[:, :, 0]
    if seed % 3 == 0:
        sure = np.round(sure * 4) / 4
    sure[random.random(sure.shape) < 0.1] = 0.0
    tokens = random.integers(0, VOCABULARY, shape)
    confidence = random.choice([0.005, 0.3, 0.45, 0.9, 1.0], shape)
    if count:  # as a drafter's own
        is_offered = random.random(shape) < 0.7
        first = random.integers(0, 2, shape) % count
        tokens = np.where(
            is_offered, np.take_along_axis(others, first[..., None], 2)[..., 0], tokens
        )
    confidence[random.random(shape) < 0.1] = 0.0
    rivals = np.where(random.random(shape) < 0.6, tokens, random.integers(0, VOCABULARY, shape))
    if count:
        is_offered = random.random(shape) < 0.3
        rivals = np.where(is_offered, others[..., seed % count], rivals)
    surety = random.choice([0.35, 0.45, 0.95], (num_slots, 1)) * np.ones(shape)
    surety[random.random(shape) < 0.1] = 0.0
    few = width if has_rivals else 0
    branches = random.choice([0, 1, 1, 8], num_slots)
    cells = NUM_SOURCES, len(BUCKET_EDGES) + 1
    chances = random.choice(FEW, cells) if seed % 2 else random.random(cells)
    if seed % 5 == 0:
        chances = np.sort(chances, axis=1)
    if seed % 7 == 0:
        chances[random.random(cells) < 0.1] = 0.0
    lengths = random.integers(0, 50, num_slots)
    ends = lengths + random.choice([0, 2, 3, 2 + width // 2, 1 + width, 1000, 1000], num_slots)
    arrays: Sequence[tuple[object, torch.dtype]] = [
        (tokens, torch.int64),
        (confidence, torch.float32),
        (random.integers(0, NUM_PROPOSERS, num_slots), torch.int64),
        (rivals[:, :few], torch.int64),
        (surety[:, :few], torch.float32),
        (every, torch.int64),
        (sure, torch.float32),
        (random.integers(0, num_before, every.shape), torch.int64),
        (random.integers(0, num_before, shape), torch.int64),
        (random.integers(0, num_before, shape), torch.int64),
        (branches, torch.int32),
        (lengths, torch.int32),
        (ends, torch.int64),
        (chances, torch.float32),
        (BUCKET_EDGES, torch.float32),
    ]
    return Offered(*(torch.tensor(one, dtype=dtype, device=device) for one, dtype in arrays))


class Drawn(NamedTuple):
    """What `offer` is told of rows."""

    draw: Draw
    settings: SlotSettings
    rows: DrawnRows

    def to(self, device: torch.device) -> Drawn:
        batch = Rows(self.draw.logit, self.settings, self.rows, []).to(device)
        return Drawn(Draw(*(one.to(device) for one in self.draw)), batch.settings, batch.rows)


class Node(NamedTuple):
    """A node by hand."""

    token: int
    parent: int
    depth: int
    confidence: float
    survival: float
    source: int
    is_chain: bool
    is_rival: bool
    number: int = 0  # whose list of offers follows it, if it is on neither chain


class Child(NamedTuple):
    """What may follow a node."""

    token: int
    confidence: float
    chance: float
    source: int
    is_chain: bool = False
    is_rival: bool = False
    number: int = 0


class _Slot:
    """What one slot has to grow a tree from."""

    def __init__(self, offered: Offered, slot: int) -> None:
        self._chances, self._edges = offered.chances.tolist(), offered.edges.tolist()
        self._source = int(offered.sources[slot])
        # the anchor is none of what the cache holds, and something is left for the target to say
        depth = max(0, int(offered.ends[slot]) - int(offered.lengths[slot]) - 2)
        self._chain, rival = (
            list(zip(tokens[slot].tolist(), confidence[slot].tolist(), strict=True))[:depth]
            for tokens, confidence in (offered[:2], offered[3:5])
        )
        self.has_branches = int(offered.branches[slot]) > 0
        self._rival = rival if self.has_branches else []
        self._others = [
            [list(zip(*row, strict=True)) for row in zip(*rows, strict=True)]
            for rows in zip(*(one[slot].tolist() for one in offered[5:8]), strict=True)
        ]
        self._before = list(zip(*(one[slot].tolist() for one in offered[8:10]), strict=True))

    def _child(self, token: int, confidence: float, source: int) -> list[Child]:
        """None where it has no chance."""
        bucket = sum(confidence >= edge for edge in self._edges)
        chance = self._chances[source][bucket] if confidence > 0 else 0.0
        if source in (BRANCH, BEYOND):
            chance = min(float(np.float32(confidence) * np.float32(chance)), 1.0)
        return [Child(token, confidence, chance, source)] if chance > 0 else []

    def children(self, place: int, is_chain: bool, is_rival: bool, number: int) -> list[Child]:
        """Of a parent at a place, on one of the chains or both, those that there are."""
        if place == len(self._chain):
            return []
        chain, rival, others = list[Child](), list[Child](), list[Child]()
        if is_chain:
            chain = self._child(*self._chain[place], self._source)
        if is_rival and place < len(self._rival):
            own, sure = self._rival[place]
            if sure > 0 and chain and chain[0].token == own:
                chain = [chain[0]._replace(is_rival=True)]
            else:
                source = 1 - self._source + NUM_PROPOSERS * is_chain
                rival = [one._replace(is_rival=True) for one in self._child(own, sure, source)]
        if self.has_branches:
            source = BRANCH if is_chain or is_rival else BEYOND
            taken = {one.token for one in (*chain, *rival)}
            before = self._before[place]
            which = before[0] if is_chain else before[1] if is_rival else number
            for token, sure, own in self._others[place][which]:
                found = [] if token in taken else self._child(token, sure, source)
                others += [one._replace(number=own) for one in found]
        waits = [rank for rank, one in enumerate(others) if rival and one.chance <= rival[0].chance]
        first = waits[0] if waits else len(others)
        chain = [one._replace(is_chain=True) for one in chain]
        return [*chain, *others[:first], *rival, *others[first:]]


def grow_by_hand(offered: Offered, slot: int, num_nodes: int) -> list[Node]:
    """The rule as it is told, with a heap."""
    here, nodes = _Slot(offered, slot), [Node(0, -1, 0, 1.0, 1.0, 0, True, True)]
    heap = list[tuple[float, int, int, int, list[Child]]]()
    num_pushed = 0

    def push(parent: int, children: list[Child], limit: float) -> None:
        nonlocal num_pushed
        if children:
            alive = min(nodes[parent].survival * children[0].chance, limit)
            heapq.heappush(heap, (-alive, nodes[parent].depth, num_pushed, parent, children))
            num_pushed += 1

    def add(parent: int, child: Child, alive: float) -> list[Child]:
        depth, ways = nodes[parent].depth + 1, (child.is_chain, child.is_rival, child.number)
        nodes.append(Node(child.token, parent, depth, child.confidence, alive, child.source, *ways))
        return here.children(depth, *ways)

    children = here.children(0, True, True, 0)
    if num_nodes >= SEEDED_FROM or not here.has_branches:
        waiting = list[tuple[int, list[Child]]]()
        while children and children[0].is_chain and len(nodes) <= num_nodes:
            row = len(nodes) - 1
            waiting.append((row, children[1:]))
            children = add(row, children[0], nodes[row].survival * children[0].chance)
        waiting.append((len(nodes) - 1, children))
        for row, children in waiting:
            push(row, children, math.inf)
    else:
        push(0, children, math.inf)
    while heap and len(nodes) <= num_nodes:
        negative, _, _, parent, children = heapq.heappop(heap)
        push(len(nodes), add(parent, children[0], -negative), -negative)
        push(parent, children[1:], -negative)
    return nodes[1 : 1 + num_nodes]


def as_nodes(trees: Sequence[Sequence[Node]], num_nodes: int) -> TreeNodes:
    """Trees by hand as kernels tell them."""
    found: list[list[tuple[float, ...]]] = []
    for tree in trees:
        nothing = Node(0, 0, 1, 0.0, 0.0, 0, False, False)
        filled = [*tree, *[nothing] * (num_nodes - len(tree))]
        words = [1]
        for row, node in enumerate(filled, start=1):
            words.append(words[node.parent] | 1 << row)
        found.append(
            [
                (one.token, one.parent, as_signed(word), one.depth, *one[3:6])
                for one, word in zip(filled, words[1:], strict=True)
            ]
        )
    dtypes = *[torch.int64] * 3, torch.int32, torch.float32, torch.float64, torch.int32
    columns = [[[node[k] for node in tree] for tree in found] for k in range(len(dtypes))]
    return TreeNodes(
        *(
            torch.tensor(column, dtype=dtype).view(len(trees), num_nodes)
            for column, dtype in zip(columns, dtypes, strict=True)
        )
    )


def as_signed(word: int) -> int:
    return word - (word >> 63 << 64)


def make_drawn(seed: int, vocab_size: int = 90, **fixed: Any) -> Drawn:
    """Rows, plain and hostile, from which was drawn; with a few likeliest tokens or all of them."""
    logprobs = MAX_TOP if seed % 2 else 5
    batch = make_rows(seed, vocab_size, num_slots=7, logprobs=logprobs, **fixed)
    return Drawn(reference.draw(*batch.drawable), batch.settings, batch.rows)


def assert_equal(found: TreeNodes, expected: TreeNodes) -> None:
    for name, one, other in zip(TreeNodes._fields, found, expected, strict=True):
        assert one.dtype == other.dtype, name
        assert torch.equal(one.cpu(), other), (name, one, other)


def grow_by(kernels: Kernels, offered: Offered, num_nodes: int) -> TreeNodes:
    """Trees of a backend, in memory that held something else."""
    slots, device = len(offered.tokens), offered.tokens.device
    nodes = TreeNodes.allocate(slots, num_nodes, device)
    if device.type != "meta":
        for one in nodes:
            one.fill_(7)
    kernels.grow(offered, nodes)
    return nodes
