"""Drafts as trees: what is offered beside each slot's chain, and the nodes that a pass verifies.

A chain is a tree of which every node follows the one before it; where an engine has chains alone,
nothing is offered and rows see what came before them. The nodes lie in fixed buffers, which the
pieces of a step read and write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from flashdraft.engine.drafts import NODE_SOURCES, Draft
from flashdraft.engine.policy.verify import BUCKET_EDGES
from flashdraft.engine.step.exchange import Exchange
from flashdraft.engine.step.guide import StepGuide
from flashdraft.engine.step.shape import StepShape
from flashdraft.engine.step.slots import Slots
from flashdraft.kernels.draw.rule import MAX_TOP
from flashdraft.kernels.interface import (
    CAUSAL,
    BlockMask,
    DraftedSlots,
    Draw,
    DrawnRows,
    Kernels,
    Offered,
    PassRows,
    SlotSettings,
    TreeNodes,
    Trees,
)
from flashdraft.kernels.layout import survival
from flashdraft.kernels.nodes import make_chain
from flashdraft.kernels.paths import list_candidates
from flashdraft.models.drafter.model import PackedDrafter

NUM_OFFERS = 8  # of a drafter, for each place of a tree


class Proposed(NamedTuple):
    """A chain for every slot."""

    tokens: Tensor  # [slots, width] int64
    confidence: Tensor  # [slots, width] float32; 0 = it has ended


class DraftTrees:
    """The drafts of all slots."""

    def __init__(
        self,
        kernels: Kernels,
        slots: Slots,
        exchange: Exchange,
        max_width: int,
        num_nodes: int,
        have_branches: bool,
        have_rivals: bool,
        num_scored: int,
    ) -> None:
        """`have_branches`: there may be more than chains; `have_rivals`: of two proposers.

        `num_scored`: of the likeliest tokens of a place, by a drafter's head; 0 = it has none.
        """
        self._kernels, self._slots, self._exchange = kernels, slots, exchange
        self._max_width, self._num_nodes = max_width, num_nodes
        self.have_branches = have_branches
        self.nodes = self._grown = TreeNodes.allocate(slots.count, num_nodes, kernels.device)
        if not have_branches:  # chains are what was drafted: only how likely they are is made
            drafted = {"tokens": exchange.drafts, "confidence": exchange.confidence}
            self.nodes = TreeNodes.allocate(slots.count, num_nodes, kernels.device)
            self.nodes = self.nodes._replace(**drafted, survival=self._grown.survival)
        # how likely the target agrees, by source and confidence
        sizes = len(NODE_SOURCES), len(BUCKET_EDGES) + 1
        self._chances = torch.full(sizes, 0.5, device=kernels.device)
        self._edges = torch.tensor(BUCKET_EDGES, device=kernels.device)
        places = slots.count, max_width
        self._num_candidates = 1 + num_scored if num_scored else 0  # with what was drawn
        offers = *places, 1 + self._num_candidates, NUM_OFFERS if have_branches else 0
        self._others = torch.zeros(offers, dtype=torch.int64, device=kernels.device)
        self._sure = torch.zeros(offers, device=kernels.device)
        self._numbers = torch.zeros_like(self._others)
        self._candidates = self._others.new_zeros(*places, self._num_candidates)
        self._no_head = torch.zeros(places, dtype=torch.int64, device=kernels.device)
        self._has_rivals = have_branches and have_rivals
        width = max_width if self._has_rivals else 0
        self._rivals = torch.zeros(slots.count, width, dtype=torch.int64, device=kernels.device)
        self._surety = torch.zeros(slots.count, width, device=kernels.device)
        self._all_top = torch.full_like(slots.settings.num_top, MAX_TOP)
        self._one_each = torch.ones_like(slots.limits)
        self._blocks: dict[tuple[int, int], TreeNodes] = {}  # of masks, by slots and width

    def set_chances(self, chances: Tensor) -> None:
        """For NODE_SOURCES, by bucket of confidence."""
        self._chances.copy_(chances)

    # -- what a drafter says -------------------------------------------------------------------

    def block(self, batch: int, width: int, mask_token: int) -> TreeNodes:
        """So many masked slots for each, which a drafter fills."""
        if (batch, width) not in self._blocks:
            block = TreeNodes.allocate(batch, width, self._kernels.device)
            block.tokens.fill_(mask_token)
            self._blocks[batch, width] = block
        return self._blocks[batch, width]

    @property
    def settings(self) -> SlotSettings:
        """How a drafter's rows are drawn."""
        settings = self._slots.settings.for_drafts
        if self.have_branches or self._num_candidates:
            return replace(settings, num_top=self._all_top)
        return settings

    def offer_paths(
        self, drafter: PackedDrafter, drawn: Draw, hidden: Tensor, rows: DrawnRows, shape: StepShape
    ) -> Proposed:
        """The chain that a drafter's head makes of what was drawn; the trees take the rest."""
        batch, width, settings = shape.batch, shape.width, self._slots.settings
        candidates = list_candidates(drawn, drafter.num_candidates)
        ids = candidates.tokens.view(batch, width, -1)
        slots = hidden.view(batch, width, -1), self._slots.anchors[:batch]
        scores = drafter.score_paths(*slots, ids)
        count = NUM_OFFERS if self.have_branches else 1
        offers = self._kernels.offer_paths(candidates, scores, settings, rows, count)
        if self.have_branches:
            self._candidates[:batch, :width] = ids
            kept = self._others, self._sure, self._numbers
            for buffer, told in zip(kept, offers, strict=True):
                buffer[:batch, :width] = told.view(batch, width, *told.shape[1:])
            self._sure[:batch, width:] = 0.0
        return Proposed(*self._kernels.follow(offers, width))

    def offer(self, drawn: Draw, rows: DrawnRows, batch: int, width: int) -> Tensor:
        """Take what was drawn of a drafter's rows; how sure it is of the drawn tokens."""
        if not self.have_branches:
            return (drawn.logit - drawn.log_total).exp()
        offers = self._kernels.offer(drawn, self._slots.settings, rows, NUM_OFFERS)
        self._others[:batch, :width] = offers.tokens.view(batch, width, 1, -1)
        self._sure[:batch, :width] = offers.confidence.view(batch, width, 1, -1)
        self._sure[:batch, width:] = 0.0
        return offers.confidence[:, 0]

    def choose(self, first: Proposed, second: Proposed, sources: Tensor) -> Proposed:
        """The chain of every slot: the one of which more tokens are expected.

        `sources` [slots], which hold zeros, are told whose it is. The other one is its rival.
        """
        is_second = self._expected(second, sources + 1) > self._expected(first, sources)
        sources.copy_(is_second)
        is_second = is_second.unsqueeze(1)
        if self._has_rivals:
            batch, width = first.tokens.shape
            self._rivals[:batch, :width] = torch.where(is_second, first.tokens, second.tokens)
            sure = torch.where(is_second, first.confidence, second.confidence)
            self._surety[:batch, :width], self._surety[:batch, width:] = sure, 0.0
        pairs = zip(first, second, strict=True)
        return Proposed(*(torch.where(is_second, other, one) for one, other in pairs))

    def _expected(self, proposed: Proposed, sources: Tensor) -> Tensor:
        """Tokens of every slot's chain that the target is expected to agree with."""
        return survival(proposed.confidence, sources, self._chances, self._edges).sum(1)

    # -- what a pass verifies ------------------------------------------------------------------

    def grow(self, batch: int) -> None:
        """Make trees of what was drafted; where there are none, chains are what was drafted."""
        if self.have_branches:
            self._kernels.grow(self._offered(batch), self._grown.first(batch))

    def before_verify(self, shape: StepShape, guide: StepGuide) -> Mapping[int, Draft]:
        """Let the host have its say on drafts; those whose tokens it must know."""
        drafts = self._exchange.before_verify(shape, guide)
        if guide.given is None and drafts:
            self._put(drafts, guide)
        return drafts

    def _put(self, drafts: Mapping[int, Draft], guide: StepGuide) -> None:
        """Put what grammars made of drafts in the place of the device's, by slot."""
        if not self.have_branches:
            self._exchange.put_chains(drafts)
        else:
            several = drafts.values()
            words = [_pack(one, guide.survival_of(one), self._num_nodes) for one in several]
            chosen = self._slots.send(np.asarray([*drafts], dtype=np.int64))
            sent = self._slots.send(np.stack(words, axis=1))
            for nodes, values in zip(self._grown, sent, strict=True):
                numbers = values.view(torch.float64) if nodes.is_floating_point() else values
                nodes.index_copy_(0, chosen, numbers.to(nodes.dtype))

    def complete(self, shape: StepShape) -> None:
        """Have the nodes of every slot; the first of them are verified."""
        nodes = self._grown.first(shape.batch)
        if shape.width and not shape.is_given:
            if not self.have_branches and not self._is_whole(shape):
                self._kernels.grow(self._offered(shape.batch), nodes)
        elif self.have_branches and shape.width:
            self._take_given(nodes)
        elif self.have_branches:  # nothing was drafted
            nodes.confidence.zero_()
            nodes.survival.zero_()

    def _offered(self, batch: int) -> Offered:
        exchange, slots = self._exchange, self._slots
        chain = exchange.drafts, exchange.confidence, exchange.sources
        rivals, others = (self._rivals, self._surety), (self._others, self._sure, self._numbers)
        own = [one[:batch] for one in (*chain, *rivals, *others)]
        before = [self._before(one[:batch]) for one in (exchange.drafts, self._rivals)]
        told = [one[:batch] for one in (slots.branches, slots.lengths, slots.ends)]
        return Offered(*[*own, *before, *told, self._chances, self._edges])

    def _before(self, chain: Tensor) -> Tensor:
        """Whose list of offers is that of what follows a chain: by the token before, at a place."""
        batch, width = chain.shape
        if not self._num_candidates or not width or not self.have_branches:
            return self._no_head[:batch]
        is_it = self._candidates[:batch, :-1] == chain[:, :-1].unsqueeze(2)
        number = torch.where(is_it.any(2), is_it.to(torch.int8).argmax(2), self._num_candidates)
        return F.pad(number, (1, 0))  # the first follows the anchor, of which every list tells

    def _take_given(self, nodes: TreeNodes) -> None:
        """The host's chains, as sure as they may be."""
        spare, batch = self._num_nodes - self._max_width, len(nodes.tokens)
        drafts, confidence = (
            F.pad(one[:batch], (0, spare))
            for one in (self._exchange.drafts, self._exchange.confidence)
        )
        chain = make_chain(drafts, confidence, confidence.double())
        for one, other in zip(nodes, chain, strict=True):
            one.copy_(other)

    def share(self, shape: StepShape) -> Tensor | None:
        """Rows of every slot; None where all have all of theirs."""
        batch, slots = shape.batch, self._slots
        if shape.is_given:
            return 1 + self._exchange.counts[:batch]
        if self._is_whole(shape):
            return None
        if not shape.width and shape.num_rows == batch:
            return self._one_each[:batch]
        wanted = self.nodes.survival[:batch], slots.limits[:batch], slots.alive[:batch]
        return self._kernels.share_rows(DraftedSlots(*wanted), shape.num_rows)

    def _is_whole(self, shape: StepShape) -> bool:
        """Whether everybody has a row for every node."""
        return shape.num_rows == shape.batch * (1 + self._num_nodes)

    def mask(self, rows: PassRows, num_rows: int) -> BlockMask:
        """What the first rows of a pass see of each other."""
        if not self.have_branches:
            return CAUSAL
        return BlockMask(trees=Trees(rows.ancestors[:num_rows], rows.depths[:num_rows]))


def _pack(draft: Draft, survival: Sequence[float], num_nodes: int) -> NDArray[np.int64]:
    """The nodes of a draft, a row of words for each field of TreeNodes; behind them are none.

    Who has no confidence is none, nor is anybody behind.
    """
    rows = np.arange(1, 1 + num_nodes)
    own, parents = np.int64(1) << rows, np.zeros(num_nodes, dtype=np.int64)
    ancestors, depths = own | 1, np.ones(num_nodes, dtype=np.int64)
    tokens, sources = np.zeros((2, num_nodes), dtype=np.int64)
    sure, alive = np.zeros((2, num_nodes))
    confidence = np.asarray(draft.confidence, dtype=np.float32) > 0.0
    count = int(confidence.cumprod().sum())
    tokens[:count], sure[:count] = draft.tokens[:count], draft.confidence[:count]
    alive[:count] = survival[:count]
    sources[:count] = [NODE_SOURCES.index(one) for one in draft.sources[:count]]
    parents[:count] = range(count) if draft.parents is None else draft.parents[:count]
    for node, parent in enumerate(parents[:count].tolist()):
        if parent:
            ancestors[node] = own[node] | ancestors[parent - 1]
            depths[node] = 1 + depths[parent - 1]
    floats = (one.view(np.int64) for one in (sure, alive))
    return np.stack([tokens, parents, ancestors, depths, *floats, sources])
