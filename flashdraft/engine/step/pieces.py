"""The three pieces of a step: draft, verify, draw and accept. Tensors in fixed buffers, no host.

The state of every slot (slots.py), what one piece hands to the next and what the last one writes
down live in buffers, and a piece reads and writes nothing else: so steps follow one another without
the host, and device.py can capture them. Chunks of prompts ride in the target's pass. Where a chunk
ends with the anchor its slot wakes: it decodes from the next step on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashdraft.engine.cache.storage import KVCache, Rows
from flashdraft.engine.draft.block import BlockProposer
from flashdraft.engine.draft.lookup import TokenHistory, look_up
from flashdraft.engine.step.exchange import Exchange
from flashdraft.engine.step.result import SCORE_COLUMNS, StepRecord, empty_lines, pack_scores
from flashdraft.engine.step.shape import (
    LONE_ROWS,
    MANY_ROWS,
    PromptChunk,
    StepShape,
    most_guided,
    most_rows,
)
from flashdraft.engine.step.slots import Slots
from flashdraft.engine.step.trees import DraftTrees, Proposed
from flashdraft.kernels.advance import find_verified
from flashdraft.kernels.interface import (
    BlockMask,
    DrawnRows,
    PassRows,
    Settled,
    SlotTables,
    TreeNodes,
    Verified,
)
from flashdraft.models.layers import ForwardBatch, PictureRows, Target

AcceptFunction = Callable[[Tensor, Tensor, TreeNodes, Tensor], Tensor]
"""(samples [rows], starts [slots], nodes, is_node [slots, nodes]) -> the rows of paths [slots].

Slot s owns the samples from starts[s] on, of its anchor and its nodes in order; is_node says which
are verified. Behind all rows are as many of nobody as one slot may have: who has no rows begins
there. What comes back has a bit for each row on the slot's path, the anchor's lowest, and no row
that is not verified. What the function writes into `samples` is what is committed.
"""


class StepLimits(NamedTuple):
    """What a device has room for."""

    max_batch: int
    max_length: int  # positions of a sequence
    max_prompt_rows: int  # in a step
    max_chunks: int  # likewise
    most_given: int = 0  # draft tokens for each sequence that are not the drafter's
    looks_up: bool = False  # what came before, on the device
    may_be_guided: bool = False  # by grammars
    is_at_once: bool = False  # the host drafts, and reads every step before the next
    num_nodes: int = 0  # of a tree of draft tokens, at most; 0 = chains


class _Woken(NamedTuple):
    """The slots whose prompts end in a step."""

    slots: Tensor
    rows: Tensor  # of the pass: their last ones
    lengths: Tensor  # tokens that the cache then holds


def _no_pictures(num_rows: int) -> None:
    """Of a pass."""


class StepPieces:
    """The pieces over a batch of slots, and the buffers between them."""

    def __init__(
        self,
        target: Target,
        proposer: BlockProposer | None,
        cache: KVCache,
        limits: StepLimits,
        accept: AcceptFunction | None,
        captured: bool,
    ) -> None:
        """`captured` pieces do the same whatever a step is about.

        `accept` decides about acceptance in the target's place.
        """
        self._target, self._proposer, self._cache = target, proposer, cache
        self._device, self._decide = target.kernels.device, accept
        self._num_layers = len(target.config.cached_layers)
        self._captured, self.max_chunks = captured, limits.max_chunks
        self.max_width = proposer.max_drafts if proposer is not None else limits.most_given
        self.num_nodes = max(limits.num_nodes, self.max_width)
        self._settle = target.kernels.settler(cache.stored) if limits.num_nodes else None
        num_pages = -(-max(limits.max_length, MANY_ROWS) // cache.page_size)  # nobody has a table
        history = None
        if limits.looks_up:
            history = TokenHistory(limits.max_batch, limits.max_length, self._device)
        self.slots = Slots(
            limits.max_batch,
            len(cache.windows),
            num_pages,
            target.config.vocab_size,
            self._device,
            history,
        )
        slots = self.slots
        self._tables = SlotTables(
            slots.anchors,
            slots.lengths,
            slots.alive,
            slots.ends,
            slots.tables,
            torch.tensor(cache.scratch_pages, device=self._device),
            cache.page_size,
        )
        # of a pass with chunks of prompts over so many rows; None = it has none
        self.pictures_of: Callable[[int], PictureRows | None] = _no_pictures
        self._make_buffers(limits)
        self.end = limits.max_length  # positions of the pass that is laid out end before it
        self.wants_scores = False  # in the step that runs
        self.taps: Tensor | None = None  # of the last pass, where the host keeps the context up
        if captured:
            # tables of angles grow by moving: they must have their final place before a capture
            target.prepare_positions(limits.max_length)
            if proposer is not None:
                proposer.drafter.rope.table(limits.max_length)

    def _make_buffers(self, limits: StepLimits) -> None:
        """What one piece hands to the next, and the last one to the host."""

        def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        max_batch, width, nobody = limits.max_batch, self.max_width, 1 + self.num_nodes
        num_drafted = max_batch * (1 + width)
        num_decoded = most_rows(max_batch, width, self.num_nodes)
        max_rows = max(num_decoded + limits.max_prompt_rows, LONE_ROWS[-1])
        slots = self.slots
        self._rows = PassRows.allocate(max_rows + nobody, max_batch, slots.num_pools, self._device)
        if self._proposer is not None:
            self._blocks = PassRows.allocate(num_drafted, max_batch, slots.num_pools, self._device)
        # of prompts: one sequence more, whose rows fill up what is left
        self._chunk_start = integers(self.max_chunks + 2, dtype=torch.int32)
        self._chunk_lengths = integers(self.max_chunks + 1, dtype=torch.int32)
        shape = slots.num_pools, self.max_chunks + 1, slots.max_pages
        self._chunk_tables = integers(*shape, dtype=torch.int32)
        self._chunk_tables[:] = self._tables.nowhere.to(torch.int32).view(-1, 1, 1)
        config, kernels = self._target.config, self._target.kernels
        self.hidden = torch.zeros(
            max_rows, config.hidden_size, dtype=kernels.dtype, device=self._device
        )
        num_guided = 0
        if limits.may_be_guided:
            num_guided = most_guided(width, limits.num_nodes)
        self.exchange = Exchange(
            max_batch, width, num_guided, config.vocab_size, self._device, slots.send
        )
        sizes = width, self.num_nodes, limits.num_nodes > 0, limits.looks_up
        num_scored = 0 if self._proposer is None else self._proposer.drafter.num_candidates
        self.trees = DraftTrees(kernels, slots, self.exchange, *sizes, num_scored)
        self._samples = integers(num_decoded + nobody)
        self.lines = empty_lines(max_batch, width, self.num_nodes, self._device)
        self.scores = integers(num_decoded + max_batch, SCORE_COLUMNS)

    # -- draft ---------------------------------------------------------------------------------

    def draft(self, shape: StepShape) -> None:
        """Draft tokens for every slot, and how sure their proposer is of each."""
        batch, width = shape.batch, shape.width
        sources = self.exchange.sources[:batch].zero_()
        chain: Proposed | None = None
        if self._proposer is not None:
            chain = self._drafts_of(shape)
        if self.slots.history is not None:
            found = self._look_up(self.slots.history, batch, width)
            if chain is None:
                chain = found
                sources.fill_(1)
            else:
                chain = self.trees.choose(chain, found, sources)
        assert chain is not None, "somebody proposes"
        self.exchange.drafts[:batch, :width] = chain.tokens
        self.exchange.confidence[:batch, :width] = chain.confidence
        self.exchange.confidence[:batch, width:] = 0.0  # there is none
        self.trees.grow(batch)

    def _look_up(self, history: TokenHistory, batch: int, width: int) -> Proposed:
        """What followed earlier, and nothing for slots that do not decode."""
        lengths, alive = self.slots.lengths[:batch], self.slots.alive[:batch]
        ends = ((lengths + 1) * alive).to(torch.int64)
        known = history.until(self.end)[:batch]
        return Proposed(*look_up(known, ends, width, self._target.forbidden))

    def _drafts_of(self, shape: StepShape) -> Proposed:
        assert self._proposer is not None
        batch, width, drafter = shape.batch, shape.width, self._proposer.drafter
        # a drafter that was not trained on cut blocks drafts worse in them
        first = drafter.config.first_row
        masked = (width if drafter.config.any_width else self.max_width) + first - 1
        num_rows, rows = batch * (1 + masked), self._blocks
        slots, mask_token = self._tables.first(batch), drafter.config.mask_token_id
        block = self.trees.block(batch, masked, mask_token)
        self._target.kernels.lay_out(slots, block, None, num_rows, rows)
        placed = self._place(rows, num_rows, batch, 1 + masked)
        places = rows.behind[:num_rows]
        hidden = self._proposer.run_blocks(rows.tokens[:num_rows], placed, places)
        wanted, owner, positions = (
            one[:num_rows].view(batch, 1 + masked, -1)[:, first : first + width].flatten(0, 1)
            for one in (hidden, rows.owner, rows.positions)
        )
        if drafter.config.from_anchor:  # a row drafts what comes behind it
            positions = positions + 1
        head = self._proposer.head(wanted)
        # penalties are those of what is committed
        drawn_rows = self.describe_free(owner.view(-1), positions.view(-1))
        drawn = self._target.kernels.draw(head, self.trees.settings, drawn_rows)
        self.exchange.offer(pack_scores(drawn).view(batch, width, -1))
        if drafter.config.head is not None:
            return self.trees.offer_paths(drafter, drawn, wanted, drawn_rows, shape)
        tokens, chance = drawn.tokens, self.trees.offer(drawn, drawn_rows, batch, width)
        confidence = chance.nan_to_num(0.0).view(batch, width)
        return Proposed(tokens.clamp(min=0).view(batch, width), confidence)

    # -- verify --------------------------------------------------------------------------------

    def verify(self, shape: StepShape) -> None:
        """The target's pass over anchors and draft tokens."""
        self._lay_out(shape)
        num_rows = shape.num_rows
        most = min(1 + self.num_nodes, num_rows) if shape.width else 1
        placed = self._place(self._rows, num_rows, shape.batch, most)
        mask = self.trees.mask(self._rows, num_rows)
        self.hidden[:num_rows] = self._forward(self._rows.tokens[:num_rows], placed, mask)

    def lay_out_before_chunks(self, shape: StepShape) -> None:
        """The rows of those who decode, in a pass with chunks of prompts behind."""
        if shape.batch:
            self._lay_out(shape)
        else:
            self._rows.query_start.zero_()

    def verify_mixed(self, num_rows: int, num_slots: int, end: int) -> None:
        """The target's pass over whatever is laid out; only the first slots may decode."""
        slots, rows = self.slots, self._rows
        places = rows.places[:, :num_rows]
        views = self._cache.views(
            self._chunk_start,
            self._chunk_lengths,
            self._chunk_tables,
            places,
            num_rows,
            end,
        )
        if num_slots:
            few = self._cache.views(
                rows.query_start[: num_slots + 1],
                slots.lengths[:num_slots],
                slots.tables[:, :num_slots],
                places,
                1 + self.num_nodes,
                end,
            )
            views = [one.followed_by(other) for one, other in zip(few, views, strict=True)]
        placed = Rows(rows.positions[:num_rows], self.end, views, [])
        pictures, mask = self.pictures_of(num_rows), self.trees.mask(rows, num_rows)
        self.hidden[:num_rows] = self._forward(rows.tokens[:num_rows], placed, mask, pictures)

    def lay_out_chunks(self, first: int, size: int, chunks: Sequence[PromptChunk]) -> None:
        """The rows of prompts, from `first` on, and those of nobody up to `size`."""
        assert len(chunks) <= self.max_chunks
        counts = np.asarray([len(chunk.tokens) for chunk in chunks])
        starts = np.asarray([chunk.start for chunk in chunks])
        unused = self.max_chunks - len(chunks)
        ends = first + np.cumsum(counts)
        num_left = size - int(ends[-1])
        ranges = [np.arange(a, a + n) for a, n in zip(starts, counts, strict=True)]
        slots = np.asarray([chunk.slot for chunk in chunks])
        parts = [
            np.concatenate([np.asarray(chunk.tokens) for chunk in chunks]),
            np.concatenate([*ranges, np.arange(num_left)]),
            np.repeat(slots, counts),
            np.concatenate([slots, np.zeros(unused)]),
            np.concatenate([starts, np.zeros(unused)]),
            np.concatenate([[first], ends, np.full(unused, ends[-1]), [size]]),
        ]
        sent = self.slots.send(np.concatenate(parts).astype(np.int64))
        cuts = np.cumsum([len(part) for part in parts])[:-1].tolist()
        tokens, positions, owner, own, lengths, query_start = sent.tensor_split(cuts)
        end, rows = int(ends[-1]), self._rows
        rows.tokens[first:end] = tokens
        rows.tokens[end:size] = 0
        rows.positions[first:size] = positions
        if self.trees.have_branches:  # prompts are in order
            depths = np.concatenate([np.arange(n) for n in (*counts, num_left)])
            rows.ancestors[first:size], rows.depths[first:size] = -1, self.slots.send(depths)
        page_size, tables = self._cache.page_size, self.slots.tables
        pages = tables[:, owner, positions[: end - first] // page_size].to(torch.int64)
        rows.places[:, first:end] = pages * page_size + positions[: end - first] % page_size
        rows.places[:, end:size] = self._tables.nowhere.unsqueeze(1) * page_size
        self._chunk_start.copy_(query_start)
        self._chunk_lengths[: self.max_chunks] = lengths
        self._chunk_tables[:, : self.max_chunks] = tables[:, own]

    def _lay_out(self, shape: StepShape) -> None:
        """The rows of the target's pass: which tokens, where, for whom."""
        self.trees.complete(shape)
        batch, counts = shape.batch, self.trees.share(shape)
        slots, nodes = self._tables.first(batch), self.trees.nodes.first(batch)
        self._target.kernels.lay_out(slots, nodes, counts, shape.num_rows, self._rows)

    def _forward(
        self, tokens: Tensor, placed: Rows, mask: BlockMask, pictures: PictureRows | None = None
    ) -> Tensor:
        """The target's hidden rows; the drafter's context of the same rows is written too."""
        layers = self._cache.layers(placed.views, 0, self._num_layers)
        batch = ForwardBatch(placed.positions, placed.end_position, layers, mask, pictures)
        output = self._target.forward(tokens, batch)
        if self._proposer is None:
            self.taps = None if self._captured else output.taps
        else:
            assert output.taps is not None
            self._proposer.write_context(output.taps, placed)
        return output.hidden

    # -- draw and accept -----------------------------------------------------------------------

    def draw(self, shape: StepShape) -> None:
        """A token from every row, the accepted path of every slot, and where it goes on."""
        # rows that nobody laid out are as they were in another step
        num_rows = shape.num_rows
        rows = PassRows(*(one[..., :num_rows] for one in self._rows))
        described = self._describe(rows.owner, rows.positions + 1, rows.ancestors, rows.behind)
        chosen = self._choose(self.hidden[:num_rows], described, slice(0, num_rows))
        self._samples[:num_rows] = chosen
        self._advance(shape)

    def _advance(self, shape: StepShape) -> None:
        """Keep the accepted path of every slot, write it down, and go on from there."""
        num_rows, width, slots = shape.num_rows, self.max_width, self.slots
        query_start, nodes, decided = self._rows.query_start, self.trees.nodes, None
        samples = self._samples[: num_rows + 1 + self.num_nodes]
        samples[num_rows:] = -1
        if self._decide is not None and width:
            starts, ends = query_start[:-1].to(torch.int64), query_start[1:]
            is_node = find_verified(slots.states, nodes, ends - starts, shape.is_given)
            decided = self._decide(samples, starts, nodes, is_node)
        step = Verified(samples, query_start, nodes, self.exchange.sources, decided)
        history = None if slots.history is None else slots.history.behind_first
        kernels = self._target.kernels
        kernels.advance(slots.states, step, self.lines, history, shape.is_given)
        if self._settle is not None:
            path = self.lines[:, 5 + width : 6 + 2 * width]
            moves = Settled(path, query_start[:-1], self._rows.places, self._tables.nowhere)
            self._settle(moves)

    def wake(self, shape: StepShape, chunks: Sequence[PromptChunk]) -> Tensor:
        """The first tokens of the answers to prompts that end."""
        woken = self._woken_by(shape, chunks)
        if woken is None:
            return self._samples[:0]
        none = torch.zeros_like(woken.slots)
        rows = self._describe(woken.slots, woken.lengths, none, none)
        place = slice(shape.num_rows, shape.num_rows + len(woken.slots))
        first_tokens = self._choose(self.hidden[woken.rows], rows, place)
        self.slots.wake(woken.slots, first_tokens, woken.lengths)
        one_each = torch.ones_like(woken.slots)
        self.slots.settings.count(woken.slots, first_tokens.unsqueeze(1), one_each)
        return first_tokens

    def _woken_by(self, shape: StepShape, chunks: Sequence[PromptChunk]) -> _Woken | None:
        """Who wakes."""
        ends = shape.num_rows + np.cumsum([len(chunk.tokens) for chunk in chunks])
        woken = [
            (chunk.slot, end - 1, chunk.start + len(chunk.tokens))
            for chunk, end in zip(chunks, ends, strict=True)
            if chunk.emits
        ]
        if not woken:
            return None
        return _Woken(*self.slots.send(np.asarray(woken, dtype=np.int64).T.copy()))

    def _choose(self, hidden: Tensor, rows: DrawnRows, place: slice) -> Tensor:
        """The target's token for every row, -1 where there is none; its scores go to `place`."""
        head, settings = self._target.head(hidden), self.slots.settings
        drawn = self._target.kernels.draw(head, settings, rows)
        if self._has_totals:
            self.scores[place] = pack_scores(drawn)
        return drawn.tokens

    def _describe(
        self, owner: Tensor, positions: Tensor, ancestors: Tensor, place: Tensor
    ) -> DrawnRows:
        """Rows of these slots: what they follow, and where they lie among the slot's."""
        exchange, masks, mask_of = self.exchange, None, None
        if exchange.may_mask:
            masks, mask_of = exchange.masks, exchange.mask_of(owner, place)
        followed = self.trees.nodes.tokens
        return DrawnRows(owner, positions, followed, ancestors, masks, mask_of, self._has_totals)

    def describe_free(self, owner: Tensor, positions: Tensor) -> DrawnRows:
        """Rows that follow nothing, and that no grammar has a say on; kernels are those of all."""
        none = torch.zeros_like(owner)
        rows = self._describe(owner, positions, none, none)
        mask_of = None if rows.mask_of is None else torch.full_like(owner, -1)
        return replace(rows, mask_of=mask_of, totals=True)

    @property
    def _has_totals(self) -> bool:
        """Whether tokens are scored: if somebody asks, and by captured draws, which are alike."""
        return self._captured or self.wants_scores

    def record(
        self,
        shape: StepShape,
        first_tokens: Tensor,
        scores: Tensor | None,
        prompt_scores: Sequence[Tensor | None],
        receive: Callable[[Tensor], Tensor],
    ) -> StepRecord:
        """What a step writes down, on its way to the host."""
        return StepRecord(
            receive(self.lines[: shape.batch]),
            receive(first_tokens),
            None if scores is None else receive(scores),
            shape.width,
            [None if one is None else receive(one) for one in prompt_scores],
            self.num_nodes,
            self.trees.have_branches,
        )

    # -- where rows go -------------------------------------------------------------------------

    def _place(self, rows: PassRows, num_rows: int, batch: int, width: int) -> Rows:
        """Rows of the first slots, at most `width` of each."""
        tables, lengths = self.slots.tables[:, :batch], self.slots.lengths[:batch]
        places, start = rows.places[:, :num_rows], rows.query_start[: batch + 1]
        views = self._cache.views(start, lengths, tables, places, width, self.end)
        return Rows(rows.positions[:num_rows], self.end, views, [])
