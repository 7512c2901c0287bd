"""Drafts under a grammar: the likeliest ways through it, of tokens that a drafter offers.

The host walks what candidates.py offers through the grammar, the likeliest node of a tree first; a
chain is a tree of which every node has one child at most. A draft may be a guess: only what the
target draws must be exact. No torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from flashdraft.core import Request
from flashdraft.engine.draft.candidates import Candidates, Option, Ranking
from flashdraft.engine.drafts import BEYOND_SOURCE, BLOCK_SOURCE, BRANCH_SOURCE, Draft
from flashdraft.engine.sampling.grammar import Constraint

MOST_GUIDED = 15  # nodes of a tree: every one takes the host a while, and the target waits
NUM_OPTIONS = 8  # behind a node, as a device's trees have


@dataclass(frozen=True)
class Growth:
    """How a draft becomes a tree."""

    num_nodes: int
    chance: Callable[[str, float], float]  # that the target agrees, by source and confidence

    def __post_init__(self) -> None:
        assert 0 < self.num_nodes <= MOST_GUIDED


def draft_within(
    constraint: Constraint,
    request: Request,
    history: Sequence[int],
    candidates: Candidates,
    growth: Growth | None = None,
    known: Draft | None = None,
) -> Draft:
    """A draft that the grammar lets through, after the output tokens `history`: a chain, or a tree.

    Row j of the candidates stands for all nodes that are j + 1 deep. Behind a node comes what the
    grammar forces, which is sure, and nothing else; or else what was drawn, if it is allowed, and
    the best of the others that are; at last one of another row. A way ends with a stop token, or
    where no candidate is allowed. On the way that a chain `known` goes its tokens come first.

    A tree has the nodes that the target is likeliest to agree with all the way, the likeliest
    first, as trees of a device do. The grammar is asked for one mask a node at most, where it
    refuses something; and of its tokens three are tried at most, each from another place.
    """
    walk = _Walk(constraint, Ranking(request, history, candidates, _options(growth)), growth, known)
    with constraint.guard():
        constraint.seek(history)
        walk.run()
    return walk.draft


def _options(growth: Growth | None) -> int:
    return 1 if growth is None else NUM_OPTIONS


@dataclass(eq=False)
class _Node:
    """A place in the grammar that a draft leads to, and what may come there."""

    row: int
    tokens: tuple[int, ...]  # that lead to it
    survival: float
    is_chain: bool  # every node on the way is its parent's first
    is_known: bool  # the known chain leads here
    forced: list[int] = field(default_factory=list)  # of what was forced before, what is left
    options: list[Option] = field(default_factory=list)  # that were not taken yet
    is_masked: bool = False  # the options are what the grammar allows
    children: set[int] = field(default_factory=set)


class _Walk:
    """A tree that grows."""

    def __init__(
        self,
        constraint: Constraint,
        ranking: Ranking,
        growth: Growth | None,
        known: Draft | None,
    ) -> None:
        self._constraint, self._ranking, self._growth, self._known = (
            constraint,
            ranking,
            growth,
            known,
        )
        self._source = BLOCK_SOURCE if known is None else known.source
        self._most = ranking.depth if growth is None else growth.num_nodes
        self._frontier: list[tuple[float, int, int, _Node]] = []
        self._num_pushed = 0
        self._tokens: list[int] = []
        self._confidence: list[float] = []
        self._parents: list[int] = []
        self._sources: list[str] = []

    @property
    def draft(self) -> Draft:
        """As far as it has grown."""
        tokens, confidence = self._tokens, self._confidence
        if self._growth is None:
            return Draft(tokens, confidence, self._source)
        return Draft(tokens, confidence, self._source, self._parents, self._sources)

    def run(self) -> None:
        """From the place where the constraint is."""
        root = _Node(0, (), 1.0, is_chain=True, is_known=self._known is not None)
        self._open(root)
        self._offer(root, 1.0)
        while self._frontier and len(self._tokens) < self._most:
            negative, _, _, node = heapq.heappop(self._frontier)
            self._constraint.go_back(node.tokens)
            option = node.options.pop(0)
            if self._constraint.take(option.token):
                child = self._add(node, option, -negative)
                if len(self._tokens) < self._most and not self._ends_with(option.token):
                    self._open(child)
                    self._offer(child, -negative)
            elif not node.is_masked:
                self._mask(node)
            if self._growth is not None:
                self._offer(node, -negative)

    def _ends_with(self, token: int) -> bool:
        return token in self._constraint.stop_ids or self._constraint.is_over()

    def _open(self, node: _Node) -> None:
        """Find what may come at a node, where the constraint is; the first of it is sure to."""
        place = len(node.tokens)
        if place == self._ranking.depth:
            return
        node.forced = node.forced or self._constraint.forced()
        if node.forced:  # surer than anything that the drafter says
            node.options = [Option(node.forced[0], 1.0)]
        else:
            node.options = self._ranking.offered(place)
            if (known := self._known_at(node)) is not None:
                others = [one for one in node.options if one.token != known.token]
                node.options = [known, *others]
        if not node.options or not self._constraint.take(node.options[0].token):
            self._mask(node)

    def _known_at(self, node: _Node) -> Option | None:
        place, known = len(node.tokens), self._known
        if known is None or not node.is_known or place >= len(known.tokens):
            return None
        sure = known.confidence[place]
        return Option(known.tokens[place], sure) if sure > 0.0 else None

    def _mask(self, node: _Node) -> None:
        """Something was refused: the grammar says what is allowed, where the constraint is."""
        found = self._ranking.within(self._constraint.allowed(), node.tokens)
        node.options = [one for one in found if one.token not in node.children]
        node.is_masked, node.forced = True, []

    def _offer(self, node: _Node, limit: float) -> None:
        """Have the node's next child compete with those of all others."""
        growth = self._growth
        if growth is not None:  # a device's numbers are short
            node.options = [one for one in node.options if np.float32(one.confidence) > 0.0]
        if not node.options:
            return
        worth = limit
        if growth is not None:
            option = node.options[0]
            worth = node.survival * growth.chance(self._source_of(node, option), option.confidence)
        self._num_pushed += 1
        entry = -min(worth, limit), len(node.tokens), self._num_pushed, node
        heapq.heappush(self._frontier, entry)

    def _add(self, node: _Node, option: Option, survival: float) -> _Node:
        self._tokens.append(option.token)
        self._confidence.append(option.confidence)
        self._parents.append(node.row)
        self._sources.append(self._source_of(node, option))
        child = _Node(
            len(self._tokens),
            (*node.tokens, option.token),
            survival,
            is_chain=node.is_chain and not node.children,
            is_known=self._known_at(node) == option,
            forced=node.forced[1:],
        )
        node.children.add(option.token)
        return child

    def _source_of(self, node: _Node, option: Option) -> str:
        """By whose word an option would be there."""
        if not node.is_chain:
            source = BEYOND_SOURCE
        elif node.children:
            source = BRANCH_SOURCE
        else:
            is_known = node.forced or self._known_at(node) == option
            source = self._source if is_known else BLOCK_SOURCE
        return source
