"""The block drafter at work: its context in the paged cache, and one pass per block.

Context keys and values come from the target's tapped hidden states. Taps of committed tokens are
buffered per sequence and folded into the cache in one pass when a draft needs them, so a request
that does not draft pays nothing. A block's own keys and values are written beyond the committed
length and overwritten by the next fold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from flashdraft.engine.cache.pages import PageBook
from flashdraft.engine.cache.storage import KVCache, Rows, Span
from flashdraft.engine.config import MAX_BUFFERED, MAX_VERIFY
from flashdraft.engine.drafts import BLOCK_SOURCE, Draft
from flashdraft.engine.policy.costs import DraftCost
from flashdraft.engine.sampling.process import RequestSampler, draft_rows
from flashdraft.engine.scheduler import Work
from flashdraft.engine.sequence import Sequence as RunningSequence
from flashdraft.engine.streams import Mark
from flashdraft.kernels.interface import BIDIRECTIONAL, CAUSAL, HeadProducts, Heads, PagedKeys
from flashdraft.models.drafter.model import Attend, PackedDrafter
from flashdraft.models.layers import LayerCache, Target


class BlockProposer:
    """Drafts a block of tokens in one forward pass of the drafter."""

    def __init__(
        self, drafter: PackedDrafter, target: Target, cache: KVCache, book: PageBook
    ) -> None:
        self.drafter = drafter
        self._target = target
        self._cache = cache
        self._book = book
        self._first_layer = len(target.config.cached_layers)  # the drafter's follow the target's
        self._buffered: dict[RunningSequence, list[Tensor]] = {}

    @property
    def max_drafts(self) -> int:
        return min(self.drafter.config.num_slots, MAX_VERIFY)

    def buffer(self, sequence: RunningSequence, taps: Tensor | None) -> None:
        assert taps is not None, "the target was built without this drafter's taps"
        self._buffered.setdefault(sequence, []).append(taps)

    def forget(self, sequence: RunningSequence) -> None:
        self._buffered.pop(sequence, None)

    def fold(self, sequences: Sequence[RunningSequence]) -> None:
        behind = [s for s in sequences if s in self._buffered]
        if not behind:
            return
        taps = torch.cat([piece for s in behind for piece in self._buffered.pop(s)])
        spans = [Span(s, s.num_folded, s.num_cached - s.num_folded) for s in behind]
        prompts = [s for s in behind if s.num_folded < s.num_prompt]
        begin = Mark(self._target.kernels.device) if prompts else None
        self.write_context(taps, self._cache.rows(self._book, spans))
        if begin is not None:
            seconds = partial(_seconds, begin, Mark(self._target.kernels.device))
            for sequence in prompts:
                sequence.prompt_folds.append(seconds)
        for sequence in behind:
            sequence.num_folded = sequence.num_cached

    def write_context(self, taps: Tensor, rows: Rows) -> None:
        """Write the drafter's keys and values of rows that the target has computed."""
        kernels, table = self._target.kernels, self.drafter.rope.table(rows.end_position)
        keys_values = self.drafter.context_kv(self.drafter.context(taps))
        for index, layer in enumerate(self._layers(rows)):
            kernels.prepare_qkv(
                keys_values[index],
                Heads(self.drafter.context_spec(index), table, rows.positions),
                layer.key,
                layer.value,
                layer.view.slots,
            )

    def fold_overdue(self, sequences: Sequence[RunningSequence]) -> None:
        self.fold([s for s in sequences if s.num_cached - s.num_folded >= MAX_BUFFERED])

    def propose(
        self,
        works: Sequence[Work],
        samplers: Sequence[RequestSampler],
        limits: Sequence[int],
    ) -> list[Draft]:
        if not works:
            return []
        self.fold([work.sequence for work in works])
        config, device = self.drafter.config, self._target.kernels.device
        ids: list[int] = []
        slots: list[int] = []  # rows that draft what is wanted
        counts: list[int] = []  # how many of them each work has
        spans: list[Span] = []
        for work, limit in zip(works, limits, strict=True):
            num_slots = min(work.room, self.max_drafts)
            counts.append(min(limit, num_slots))
            if config.any_width:  # others draft worse in a cut block: all of it, some are picked
                num_slots = counts[-1]
            first = len(ids) + config.first_row
            slots += range(first, first + counts[-1])
            num_masked = num_slots + config.first_row - 1
            ids += [work.sequence.tokens[-1]] + [config.mask_token_id] * num_masked
            spans.append(Span(work.sequence, work.start, 1 + num_masked))
        rows = self._cache.rows(self._book, spans)
        places = torch.tensor([i for span in spans for i in range(span.count)], device=device)
        hidden = self.run_blocks(torch.tensor(ids, device=device), rows, places)
        hidden = hidden[torch.tensor(slots, device=device)]
        logits = self.widen(self.drafter.logits(self._target, hidden))
        if config.head is None:
            return self._pick(works, samplers, counts, logits)
        return self._pick_paths(
            works, samplers, torch.split(hidden, counts), torch.split(logits, counts)
        )

    def measure(self, batch_sizes: Sequence[int], repeats: int = 3) -> DraftCost:
        times: dict[int, float] = {}
        one_slot = math.inf  # seconds of a single sequence's pass that drafts one token
        for turn in range(repeats + 1):
            for size in batch_sizes:
                seconds = self._time(size, self.max_drafts)
                if seconds is not None and turn > 0:  # the first one warms up
                    times[size] = min(seconds, times.get(size, seconds))
            one_slot = min(self._time(1, 1) or math.inf, one_slot)
        share = 0.0
        if self.max_drafts > 1 and 1 in times:
            slot_s = max(0.0, times[1] - one_slot) / (self.max_drafts - 1)
            share = min(1.0, slot_s * self.max_drafts / times[1])
        return DraftCost(times, share, self.max_drafts)

    def _time(self, num_sequences: int, limit: int) -> float | None:
        """Seconds of one pass, nothing kept; None if the cache has no room for it."""
        scratch = [RunningSequence.scratch() for _ in range(num_sequences)]
        vocab, device = self._target.config.vocab_size, self._target.kernels.device
        sampler = RequestSampler(scratch[0].request.params, 0, vocab, (), (), device)
        for sequence in scratch:
            self._book.open(sequence, sequence.tokens)
        seconds = None
        if all(self._book.reserve(sequence, 1 + self.max_drafts) for sequence in scratch):
            works = [Work(sequence, 0, 1, self.max_drafts) for sequence in scratch]
            begin = time.perf_counter()
            self.propose(works, [sampler] * num_sequences, [limit] * num_sequences)
            seconds = time.perf_counter() - begin
        for sequence in scratch:
            self._book.close(sequence)
        return seconds

    def run_blocks(self, token_ids: Tensor, rows: Rows, places: Tensor) -> Tensor:
        """The drafter's pass over the rows of some blocks: their final hidden rows.

        `places` are the rows' in their blocks.
        """
        embeddings = self.drafter.embed(self._target, token_ids)
        return self.drafter.forward(embeddings, self._attend(rows), places)

    def _attend(self, rows: Rows) -> Attend:
        """Attention of block rows over the paged context and their own block."""
        kernels, drafter = self._target.kernels, self.drafter
        table, layers = drafter.rope.table(rows.end_position), self._layers(rows)

        def attend(index: int, qkv: Tensor) -> Tensor:
            layer, spec = layers[index], drafter.qkv_spec(index)
            return kernels.attend(
                qkv,
                Heads(spec, table, rows.positions),
                PagedKeys(
                    layer.key,
                    layer.value,
                    layer.view,
                    scale=spec.head_dim**-0.5,
                    window=drafter.config.windows[index],
                    mask=CAUSAL if drafter.config.causal[index] else BIDIRECTIONAL,
                ),
            )

        return attend

    def _layers(self, rows: Rows) -> list[LayerCache]:
        last = self._first_layer + self.drafter.config.num_layers
        return self._cache.layers(rows.views, self._first_layer, last)

    def head(self, hidden: Tensor) -> Tensor | HeadProducts:
        """What the drafter says of the target's vocabulary, to be drawn from."""
        head = self.drafter.head(self._target, hidden)
        if self.drafter.config.draft_vocab_size is None:
            return head
        return self.widen(self.drafter.kernels.finish_logits(*head))

    def widen(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary, from those over it or a reduced one."""
        size = self.drafter.config.draft_vocab_size
        if size is None:
            return logits
        ids = self.drafter.target_ids(torch.arange(size, device=logits.device))
        wide = logits.new_full((logits.shape[0], self._target.config.vocab_size), -math.inf)
        return wide.index_copy_(1, ids, logits)

    def _pick(
        self,
        works: Sequence[Work],
        samplers: Sequence[RequestSampler],
        counts: Sequence[int],
        logits: Tensor,
    ) -> list[Draft]:
        """Draft tokens by each request's own settings and noise, and the drafter's confidence."""
        kernels, place, picked = self._target.kernels, 0, []
        for work, sampler, count in zip(works, samplers, counts, strict=True):
            rows = logits[place : place + count]
            place += count
            history = work.sequence.output_ids
            picked.append(draft_rows(rows, sampler, history, work.start + 1, kernels))
        if any(sampler.constraint is not None for sampler in samplers):
            logits = torch.cat([drafted.logits for drafted in picked])
        tokens = torch.cat([drafted.tokens for drafted in picked])
        if not len(tokens):
            return [Draft([], [], BLOCK_SOURCE) for _ in works]
        chances = kernels.softmax(logits)
        # NaN of a broken drafter is no confidence at all; the target refuses its tokens
        confidence = chances.gather(1, tokens.unsqueeze(1)).squeeze(1).nan_to_num(0.0).tolist()
        ids, place, drafts = tokens.tolist(), 0, []
        for drafted in picked:
            end = place + len(drafted.tokens)
            drafts.append(Draft(ids[place:end], confidence[place:end], BLOCK_SOURCE))
            place = end
        return drafts

    def _pick_paths(
        self,
        works: Sequence[Work],
        samplers: Sequence[RequestSampler],
        hidden: Sequence[Tensor],
        logits: Sequence[Tensor],
    ) -> list[Draft]:
        """The same by the drafter's head; a way through a grammar is made without it."""
        drafts = []
        for work, sampler, own, rows in zip(works, samplers, hidden, logits, strict=True):
            if sampler.constraint is not None or not len(rows):
                drafts += self._pick([work], [sampler], [len(rows)], rows)
                continue
            settings = sampler.settings_after(work.sequence.output_ids)
            anchor = work.sequence.tokens[-1]
            path = self.drafter.choose_path(own, rows, settings, anchor, work.start + 1)
            drafts.append(Draft(*path, BLOCK_SOURCE))
        return drafts


def _seconds(begin: Mark, end: Mark) -> float:
    end.wait()  # for nothing, where a later result has been read
    return begin.seconds_until(end)
