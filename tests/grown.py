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
from flashdraft.kernels.tree import SEEDED_FROM, Offered
from tests.drawn import Rows, make_rows

NUM_SOURCES = 2
VOCABULARY = 60
FEW = [0.25, 0.5, 0.5, 1.0]  # chances whose products are often equal


def make_offered(
    seed: int, num_slots: int, width: int, count: int, device: torch.device | None = None
) -> Offered:
    """Chains that end early, that are not among the offers, that have no branches; many equals."""
    random = np.random.default_rng(seed)
    shape = num_slots, width
    orders = np.argsort(random.random((*shape, VOCABULARY)), axis=2)
    others, sure = orders[..., :count], -np.sort(-random.random((*shape, count)), axis=2)
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
    branches = random.choice([0, 1, 1, 8], num_slots)
    cells = NUM_SOURCES + 2, len(BUCKET_EDGES) + 1
    chances = random.choice(FEW, cells) if seed % 2 else random.random(cells)
    if seed % 5 == 0:
        chances = np.sort(chances, axis=1)
    if seed % 7 == 0:
        chances[random.random(cells) < 0.1] = 0.0
    arrays: Sequence[tuple[object, torch.dtype]] = [
        (tokens, torch.int64),
        (confidence, torch.float32),
        (random.integers(0, NUM_SOURCES, num_slots), torch.int64),
        (others, torch.int64),
        (sure, torch.float32),
        (branches, torch.int32),
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
    is_chain: bool


Child = tuple[int, float, float, bool]  # token, confidence, chance, whether it is the chain's


class _Slot:
    """What one slot has to grow a tree from."""

    def __init__(self, offered: Offered, slot: int) -> None:
        self._chances, self._edges = offered.chances.tolist(), offered.edges.tolist()
        self._source = int(offered.sources[slot])
        self._chain = list(
            zip(offered.tokens[slot].tolist(), offered.confidence[slot].tolist(), strict=True)
        )
        tokens, sure = offered.other_tokens[slot].tolist(), offered.other_confidence[slot].tolist()
        self._others = [list(zip(*both, strict=True)) for both in zip(tokens, sure, strict=True)]
        self.has_branches = int(offered.branches[slot]) > 0

    def _chance(self, source: int, confidence: float) -> float:
        bucket = sum(confidence >= edge for edge in self._edges)
        return self._chances[source][bucket] if confidence > 0 else 0.0

    def children(self, place: int, is_chain: bool) -> list[Child]:
        """Of a parent at a place, those that there are."""
        if place == len(self._chain):
            return []
        found = list[Child]()
        token, confidence = self._chain[place]
        if is_chain and self._chance(self._source, confidence) > 0:
            found.append((token, confidence, self._chance(self._source, confidence), True))
        if self.has_branches:
            for other, sure in self._others[place]:
                if not (found and found[0][3] and other == token):
                    found.append((other, sure, self._chance(-2 if is_chain else -1, sure), False))
        return [child for child in found if child[2] > 0]


def grow_by_hand(offered: Offered, slot: int, num_nodes: int) -> list[Node]:
    """The rule as it is told, with a heap."""
    here, nodes = _Slot(offered, slot), [Node(0, -1, 0, 1.0, 1.0, True)]
    heap = list[tuple[float, int, int, int, list[Child]]]()
    num_pushed = 0

    def push(parent: int, children: list[Child], limit: float) -> None:
        nonlocal num_pushed
        if children:
            alive = min(nodes[parent].survival * children[0][2], limit)
            heapq.heappush(heap, (-alive, nodes[parent].depth, num_pushed, parent, children))
            num_pushed += 1

    if num_nodes >= SEEDED_FROM or not here.has_branches:
        waiting = list[tuple[int, list[Child]]]()
        while True:
            row = len(nodes) - 1
            children = here.children(nodes[row].depth, True)
            is_next = bool(children) and children[0][3]
            waiting.append((row, children[is_next:]))
            if not is_next or len(nodes) > num_nodes:
                break
            token, confidence, chance, _ = children[0]
            alive = nodes[row].survival * chance
            nodes.append(Node(token, row, row + 1, confidence, alive, True))
        for row, children in waiting:
            push(row, children, math.inf)
    else:
        push(0, here.children(0, True), math.inf)
    while heap and len(nodes) <= num_nodes:
        negative, depth, _, parent, children = heapq.heappop(heap)
        token, confidence, _, is_chain = children[0]
        nodes.append(Node(token, parent, depth + 1, confidence, -negative, is_chain))
        push(len(nodes) - 1, here.children(depth + 1, is_chain), -negative)
        push(parent, children[1:], -negative)
    return nodes[1 : 1 + num_nodes]


def as_nodes(trees: Sequence[Sequence[Node]], num_nodes: int) -> TreeNodes:
    """Trees by hand as kernels tell them."""
    found: list[list[tuple[float, ...]]] = []
    for tree in trees:
        filled = [*tree, *[Node(0, 0, 1, 0.0, 0.0, False)] * (num_nodes - len(tree))]
        words = [1]
        for row, node in enumerate(filled, start=1):
            words.append(words[node.parent] | 1 << row)
        found.append(
            [
                (one.token, one.parent, as_signed(word), one.depth, one.confidence, one.survival)
                for one, word in zip(filled, words[1:], strict=True)
            ]
        )
    dtypes = *[torch.int64] * 3, torch.int32, torch.float32, torch.float64
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
