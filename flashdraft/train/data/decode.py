"""Plain decoding of very many prompts, for data: no text, no drafts, nearly no work on the host.

A fixed number of slots, each with its own stretch of the cache. All slots advance together, on a
GPU by replaying one CUDA graph; the host looks only every few steps, takes finished answers out and
fills their slots again. Tokens are those the engine would choose: greedily, or by the same noise
keyed by seed and position. For single requests, streams and drafting there is the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashdraft.core import SamplingParams
from flashdraft.engine.sampling.process import BROKEN_LOGITS
from flashdraft.engine.streams import Graphs
from flashdraft.errors import CapacityError, TrainingError
from flashdraft.kernels.draw.rule import DrawnRows, HeadProducts, SlotRequest, SlotSettings
from flashdraft.kernels.interface import PageView
from flashdraft.models.layers import ForwardBatch, LayerCache, Target

PAGE_SIZE = 64
STEPS_BETWEEN_LOOKS = 16  # a finished slot idles half of this on average
MAX_PREFILL_ROWS = 16384
MOST_SLOTS = {"cuda": 2048, "cpu": 16}
MEMORY_SHARE = 0.6  # of a GPU's free memory
CPU_BYTES = 10**9
MAX_LOGITS_BYTES = 2 * 10**9


class Job(NamedTuple):
    """A prompt to be continued; `key` is the caller's own."""

    key: int
    prompt_ids: Sequence[int]
    temperature: float = 0.0  # 0 = greedy
    seed: int = 0


class Continuation(NamedTuple):
    """What came out: the stop token is included where one ended it."""

    job: Job
    token_ids: NDArray[np.int32]
    ended: bool  # by a stop token, not by max_tokens


class BulkDecoder:
    """Continues prompts of up to `max_prompt` tokens by up to `max_tokens`, `num_slots` at once."""

    def __init__(
        self,
        target: Target,
        *,
        max_prompt: int,
        max_tokens: int,
        stop_ids: Collection[int],
        num_slots: int | None = None,
    ) -> None:
        max_position = target.config.max_position
        if max_prompt + max_tokens > max_position:
            raise TrainingError(
                f"Prompts of {max_prompt} tokens with answers of {max_tokens} do not fit the "
                f"target's {max_position} positions; lower one of the two."
            )
        self.max_prompt, self.max_tokens = max_prompt, max_tokens
        self._target, self._device = target, target.kernels.device
        self._stop_ids = frozenset(stop_ids)
        self._capacity = -(-(max_prompt + max_tokens) // PAGE_SIZE) * PAGE_SIZE
        self.num_slots = num_slots or _default_slots(target, self._capacity)
        self._jobs: list[Job | None] = [None] * self.num_slots
        self._ready: deque[Job] = deque()
        self.graphs: Graphs[str] = Graphs(self._device)
        try:
            self._make_cache()
            self._make_state()
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise CapacityError(
                f"{self.num_slots} slots of {self._capacity} tokens do not fit in memory ({error});"
                " use fewer slots or shorter answers."
            ) from error

    @torch.no_grad()
    def run(self, jobs: Iterable[Job]) -> Iterator[Continuation]:
        """Continue every job, in about the order given; results come in the order they end.

        While the device works, the next jobs are drawn from the iterable and results handed out.
        """
        source = iter(jobs)
        finished: list[Continuation] = []
        try:
            while True:
                self._draw_jobs(source)
                yield from finished
                finished = self._take_finished()
                self._admit()
                if all(job is None for job in self._jobs):
                    break
                for _ in range(STEPS_BETWEEN_LOOKS):
                    self.graphs.call("advance", self._advance)
            yield from finished
        finally:  # also where the caller has had enough
            self._jobs = [None] * self.num_slots
            self._ready.clear()
            self._active.fill_(False)

    # -- the device's side ---------------------------------------------------------------------

    def _make_cache(self) -> None:
        kernels, num_pages = self._target.kernels, self.num_slots * self._capacity // PAGE_SIZE
        self._storage = []
        for layer in self._target.config.cached_layers:
            shape = (2, num_pages, PAGE_SIZE, layer.num_kv_heads, layer.head_dim)
            # zeros, not empty: a masked key must never be NaN
            one = torch.zeros(shape, device=kernels.device, dtype=kernels.dtype)
            self._storage.append((one[0], one[1]))

    def _make_state(self) -> None:
        count, device = self.num_slots, self._device

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        slots = torch.arange(count, device=device)
        pages_each = self._capacity // PAGE_SIZE
        pages = torch.arange(count * pages_each, dtype=torch.int32, device=device)
        self._table = pages.view(count, pages_each)
        self._first_place = slots * self._capacity  # of each slot in the cache
        self._row_starts = torch.arange(count + 1, dtype=torch.int32, device=device)
        self._last = zeros(count, dtype=torch.int64)  # the newest token, not yet in the cache
        self._lengths = zeros(count, dtype=torch.int32)  # tokens in the cache
        self._active = zeros(count, dtype=torch.bool)
        self._num_out = zeros(count, dtype=torch.int64)
        # the last column takes what idle slots write
        self._out = zeros(count, self.max_tokens + 1, dtype=torch.int64)
        self._slots = slots
        vocab_size = self._target.config.vocab_size
        self._settings = SlotSettings.allocate(count, vocab_size, device, has_tables=False)
        self._unsound = zeros(dtype=torch.bool)
        self._is_stop = zeros(vocab_size, dtype=torch.bool)
        self._is_stop[sorted(self._stop_ids)] = True

    def _advance(self) -> None:
        positions = self._lengths.long()
        view = PageView(
            query_start=self._row_starts,
            context_lens=self._lengths,
            block_table=self._table,
            slots=self._first_place + positions,
            page_size=PAGE_SIZE,
            max_query_len=1,
            max_key_len=self._capacity,
        )
        hidden = self._forward(self._last, positions, view)
        tokens = self._choose(self._target.head(hidden), self._slots, positions + 1, self._active)
        grows = self._active
        column = self._num_out.masked_fill(~grows, self.max_tokens)
        self._out.scatter_(1, column.unsqueeze(1), tokens.unsqueeze(1))
        self._last.copy_(torch.where(grows, tokens, self._last))
        self._lengths += grows
        self._num_out += grows
        self._active &= ~(self._is_stop[tokens] | (self._num_out >= self.max_tokens))

    def _forward(self, tokens: Tensor, positions: Tensor, view: PageView) -> Tensor:
        caches = [LayerCache(key, value, view) for key, value in self._storage]
        return self._target.forward(tokens, ForwardBatch(positions, self._capacity, caches)).hidden

    def _choose(
        self, head: HeadProducts, slots: Tensor, positions: Tensor, matters: Tensor
    ) -> Tensor:
        """The next token of every row, which is one of these slots: [num_rows] int64."""
        rows = DrawnRows(slots, positions, totals=False)
        tokens = self._target.kernels.draw(head, self._settings, rows).tokens
        self._unsound |= ((tokens < 0) & matters).any()
        return tokens.clamp_min(0)

    # -- the host's side -----------------------------------------------------------------------

    def _draw_jobs(self, source: Iterator[Job]) -> None:
        """Have enough jobs at hand for the next look."""
        vocab_size = self._target.config.vocab_size
        while len(self._ready) <= self.num_slots // 4:
            job = next(source, None)
            if job is None:
                return
            if not 0 < len(job.prompt_ids) <= self.max_prompt:
                raise TrainingError(
                    f"A prompt has {len(job.prompt_ids)} tokens; the limit here is "
                    f"{self.max_prompt}, and at least 1."
                )
            if not 0 <= min(job.prompt_ids) <= max(job.prompt_ids) < vocab_size:
                raise TrainingError(
                    f"A prompt holds token {max(job.prompt_ids)}; the target's vocabulary ends at "
                    f"{vocab_size - 1}. Was it made by another model's tokenizer?"
                )
            self._ready.append(job)

    def _take_finished(self) -> list[Continuation]:
        """Wait for the device, and empty the slots that are done."""
        if all(job is None for job in self._jobs):
            return []
        active = self._active.cpu().numpy()
        if bool(self._unsound):
            raise TrainingError(f"The target's logits hold NaN or infinity. {BROKEN_LOGITS}")
        done = [s for s, job in enumerate(self._jobs) if job is not None and not active[s]]
        if not done:
            return []
        where = torch.tensor(done, device=self._device)
        counts = self._num_out[where].cpu().tolist()
        rows = self._out[where].to(torch.int32).cpu().numpy()
        finished = []
        for slot, row, count in zip(done, rows, counts, strict=True):
            job = self._jobs[slot]
            assert job is not None
            ended = int(row[count - 1]) in self._stop_ids
            finished.append(Continuation(job, row[:count].copy(), ended))
            self._jobs[slot] = None
        return finished

    def _admit(self) -> None:
        """Fill free slots with waiting jobs: their prompts in passes of limited size."""
        free = deque(slot for slot, job in enumerate(self._jobs) if job is None)
        while free and self._ready:
            slots: list[int] = []
            num_rows = 0
            while free and self._ready:
                length = len(self._ready[0].prompt_ids)
                if slots and num_rows + length > MAX_PREFILL_ROWS:
                    break
                num_rows += length
                slots.append(free.popleft())
                self._jobs[slots[-1]] = self._ready.popleft()
            self._prefill(slots)

    def _prefill(self, slots: list[int]) -> None:
        """Compute the prompts of these slots' jobs and their first tokens."""
        jobs = [job for slot in slots if (job := self._jobs[slot]) is not None]
        prompts = [np.asarray(job.prompt_ids, dtype=np.int64) for job in jobs]
        lengths = np.asarray([len(prompt) for prompt in prompts])
        ends = np.cumsum(lengths)
        positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        places = positions + np.repeat(np.asarray(slots) * self._capacity, lengths)
        where = self._put(np.asarray(slots))
        view = PageView(
            query_start=self._put(np.concatenate([[0], ends]).astype(np.int32)),
            context_lens=torch.zeros(len(slots), dtype=torch.int32, device=self._device),
            block_table=self._table[where],
            slots=self._put(places),
            page_size=PAGE_SIZE,
            max_query_len=int(lengths.max()),
            max_key_len=int(lengths.max()),
        )
        tokens = self._put(np.concatenate(prompts))
        hidden = self._forward(tokens, self._put(positions), view)
        self._settings.set(
            {
                slot: SlotRequest(SamplingParams(temperature=job.temperature), job.seed, ())
                for slot, job in zip(slots, jobs, strict=True)
            }
        )
        tokens = self._choose(
            self._target.head(hidden[self._put(ends - 1)]),
            where,
            self._put(lengths),
            torch.ones_like(where, dtype=torch.bool),
        )
        self._lengths[where] = self._put(lengths.astype(np.int32))
        self._last[where] = tokens
        self._out[where, 0] = tokens
        self._num_out[where] = 1
        self._active[where] = ~self._is_stop[tokens] & (self.max_tokens > 1)

    def _put(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def bytes_per_slot(target: Target, capacity: int) -> int:
    """Memory of keys and values of one slot."""
    per_token = sum(
        2 * layer.num_kv_heads * layer.head_dim for layer in target.config.cached_layers
    )
    return capacity * per_token * target.kernels.dtype.itemsize


def _default_slots(target: Target, capacity: int) -> int:
    device = target.kernels.device
    budget = float(CPU_BYTES)
    if device.type == "cuda":
        budget = torch.cuda.mem_get_info(device)[0] * MEMORY_SHARE
    fits = int(budget // bytes_per_slot(target, capacity))
    logits_fit = MAX_LOGITS_BYTES // (4 * target.config.vocab_size)
    most = MOST_SLOTS.get(device.type, MOST_SLOTS["cpu"])
    if fits < 1:
        raise CapacityError(
            f"One slot of {capacity} tokens takes {bytes_per_slot(target, capacity) / 1e9:.2f} GB, "
            f"and {budget / 1e9:.2f} GB may be used; shorten prompts and answers."
        )
    return max(1, min(most, fits, logits_fit))
