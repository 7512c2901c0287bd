"""Runs the target over a step's work: known and draft tokens of all sequences in one pass."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashdraft.core import TokenLogprob
from flashdraft.engine.cache.pages import PageBook
from flashdraft.engine.cache.storage import HostRows, KVCache, Span
from flashdraft.engine.drafts import Draft
from flashdraft.engine.scheduler import Work
from flashdraft.engine.sequence import Sequence as RunningSequence
from flashdraft.engine.step.forward_graphs import ForwardGraphs
from flashdraft.engine.step.score import score_prompt
from flashdraft.models.layers import ForwardBatch, Target, TargetOutput


@dataclass(frozen=True)
class Verified:
    """The target's word on a step: logits where a token comes out, and the tapped hidden states."""

    logits: Tensor  # [rows that emit, vocab_size] float32
    offsets: list[int]  # work i owns logits offsets[i] : offsets[i + 1]
    taps: Tensor | None  # [all rows, num_taps * hidden_size]
    row_offsets: list[int]  # work i owns rows row_offsets[i] : row_offsets[i + 1]
    scores: list[list[TokenLogprob]]  # of work i's prompt, where it asked for them


class Runner:
    """The target with its cache."""

    def __init__(
        self,
        target: Target,
        cache: KVCache,
        book: PageBook,
        graphs: ForwardGraphs | None = None,
    ) -> None:
        self._target = target
        self._graphs = graphs
        self._cache = cache
        self._book = book
        self._num_layers = len(target.config.layers)

    def verify(self, works: Sequence[Work], drafts: Sequence[Draft | None]) -> Verified:
        """One forward pass over every work's known tokens followed by its draft tokens."""
        tokens: list[int] = []
        spans: list[Span] = []
        wanted: list[int] = []  # rows whose logits are needed
        offsets = [0]
        for work, draft in zip(works, drafts, strict=True):
            known = work.sequence.tokens[work.start : work.start + work.num_tokens]
            drafted = draft.tokens if draft is not None else []
            if work.emits:
                last = len(tokens) + len(known) - 1
                wanted.extend(range(last, last + 1 + len(drafted)))
            tokens += known + drafted
            spans.append(Span(work.sequence, work.start, len(known) + len(drafted)))
            offsets.append(len(wanted))
        rows = self._cache.host_rows(self._book, spans)
        output = self._forward(tokens, rows)
        device = self._target.kernels.device
        hidden, row_offsets = output.hidden, rows.offsets.tolist()
        scores = [
            score_prompt(self._target, work, hidden[first : first + work.num_tokens])
            for work, first in zip(works, row_offsets[:-1], strict=True)
        ]
        if len(wanted) < len(tokens):
            hidden = hidden[torch.tensor(wanted, device=device, dtype=torch.int64)]
        logits = self._target.logits(hidden) if wanted else hidden.new_zeros(0, 0)
        return Verified(logits, offsets, output.taps, row_offsets, scores)

    def _forward(self, tokens: list[int], rows: HostRows) -> TargetOutput:
        if self._graphs is not None and self._graphs.takes(rows):
            return self._graphs.forward(tokens, rows)
        placed = self._cache.place(rows)
        layers = self._cache.layers(placed.views, 0, self._num_layers)
        batch = ForwardBatch(placed.positions, placed.end_position, layers)
        return self._target.forward(torch.tensor(tokens, device=self._target.kernels.device), batch)

    def measure(self, widths: Sequence[int], repeats: int = 5) -> dict[int, float]:
        """Seconds of a step over n rows, for each n: the fastest of a few, nothing kept.

        The widths take turns, so that a busy moment of the machine does not hit one of them alone.
        """
        times: dict[int, float] = {}
        for turn in range(repeats + 1):
            for width in widths:
                scratch = RunningSequence.scratch(width)
                self._book.open(scratch, scratch.tokens)
                if self._book.reserve(scratch, width):
                    draft = Draft([0] * (width - 1), [])
                    seconds = self._time(Work(scratch, 0, 1, emits=True), draft)
                    if turn > 0:  # the first one warms up
                        times[width] = min(seconds, times.get(width, seconds))
                self._book.close(scratch)
        return times

    def _time(self, work: Work, draft: Draft) -> float:
        begin = time.perf_counter()
        self._target.kernels.argmax(self.verify([work], [draft]).logits).tolist()
        return time.perf_counter() - begin
