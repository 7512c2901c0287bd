"""Batches for training: answers packed side by side, anchors drawn anew every epoch.

Everything here is a pure function of (seed, epoch, batch number), so that resuming needs no state
of a random generator. Shapes never change during a run: what is left over is padding that nothing
sees. It knows token ids and lengths, no model.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from flashdraft.errors import TrainingError
from flashdraft.train.data.answers import AnswerSet

NO_LABEL = -100
PREFETCHED = 3  # batches made ahead of their use


@dataclass(frozen=True)
class PackedBatch:
    """Documents side by side, and the blocks that are trained on them."""

    token_ids: Tensor  # [num_rows] int64, 0 where padded
    positions: Tensor  # [num_rows] int64: place in its own document
    documents: Tensor  # [num_rows] int64, ascending; -1 for padding at the end
    lengths: list[int]  # of the documents
    # ascending rows; those beyond what the batch can fill repeat the last one and have no labels
    anchors: Tensor  # [num_blocks] int64
    labels: Tensor  # [num_blocks, block_size - 1] int64: token at anchor + k, NO_LABEL outside
    # [num_blocks] int64: rows of each block that there are; None = all of them
    widths: Tensor | None = None

    @property
    def block_size(self) -> int:
        return self.labels.shape[1] + 1

    def cut(self, widths: Tensor) -> PackedBatch:
        """The same blocks with so many rows each: what is cut off is not seen and not predicted."""
        is_there = torch.arange(1, self.block_size) < widths.unsqueeze(1)
        return replace(self, widths=widths, labels=self.labels.where(is_there, NO_LABEL))

    def to(self, device: torch.device) -> PackedBatch:
        """The batch on a device; from pinned memory without waiting."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> PackedBatch:
        """The batch in pinned memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, move: Callable[[Tensor], Tensor]) -> PackedBatch:
        return replace(
            self,
            token_ids=move(self.token_ids),
            positions=move(self.positions),
            documents=move(self.documents),
            anchors=move(self.anchors),
            labels=move(self.labels),
            widths=None if self.widths is None else move(self.widths),
        )


class BatchPlan:
    """Which answers and which anchors every batch of every epoch has."""

    def __init__(
        self,
        answers: AnswerSet,
        *,
        max_rows: int,
        num_blocks: int,
        block_size: int,
        seed: int,
        short_share: float = 0.0,
    ) -> None:
        self.max_rows = max_rows
        self._short_share = short_share  # of the blocks: cut to a random width, as engines may do
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._seed = seed
        self._documents = documents = _Documents.of(answers, max_rows)
        # an anchor is a token of the answer, and there must be a token after it to predict
        answer_lengths = documents.lengths - documents.prompt_lengths
        self._usable = np.flatnonzero(answer_lengths >= 2)
        self.num_anchors = int((answer_lengths[self._usable] - 1).sum())
        if len(self._usable) == 0:
            raise TrainingError(
                f"None of the {len(answers)} answers has two tokens within the first {max_rows} "
                "rows; give more rows to a batch, or other answers."
            )

    @property
    def num_documents(self) -> int:
        """Answers that are trained on."""
        return len(self._usable)

    def __len__(self) -> int:
        """Batches in an epoch: as many as all rows fill."""
        return -(-int(self._documents.lengths[self._usable].sum()) // self.max_rows)

    def batches(
        self, epoch: int, rank: int = 0, world: int = 1, skip: int = 0
    ) -> Iterator[PackedBatch]:
        """This rank's batches of one epoch, the same number on every rank, less the first `skip`.

        The last batches begin the epoch's order again where the answers do not fill them, and a few
        answers at its end may be left out: other ones in every epoch.
        """
        per_rank = -(-len(self) // world)
        for number, chosen in enumerate(self._packs(epoch, per_rank * world)):
            if number % world == rank and number // world >= skip:
                yield self._build(chosen, np.random.default_rng((self._seed, epoch, 1, number)))

    def _packs(self, epoch: int, count: int) -> Iterator[np.ndarray]:
        """The answers of each batch: in a random order, as many as fit."""
        order = np.random.default_rng((self._seed, epoch, 0)).permutation(self._usable)
        # twice the order: a batch may run over its end, but never holds an answer twice
        ends = np.cumsum(np.tile(self._documents.lengths[order], 2))
        begin = 0
        for _ in range(count):
            filled = ends[begin - 1] if begin else 0
            end = int(np.searchsorted(ends, filled + self.max_rows, side="right"))
            end = min(end, begin + len(order))
            yield order[np.arange(begin, end) % len(order)]
            begin = end % len(order)

    def _build(self, chosen: np.ndarray, random: np.random.Generator) -> PackedBatch:
        rows = _Rows.pack(self._documents, chosen, self.max_rows)
        anchors = _draw(rows.possible_anchors, self.num_blocks, random)
        batch = rows.with_blocks(anchors, self.num_blocks, self.block_size)
        if self._short_share == 0.0:
            return batch
        widths = random.integers(2, self.block_size + 1, self.num_blocks)
        is_whole = random.random(self.num_blocks) >= self._short_share
        return batch.cut(torch.from_numpy(np.where(is_whole, self.block_size, widths)))


def every_block(
    answers: AnswerSet, *, max_rows: int, num_blocks: int, block_size: int
) -> Iterator[tuple[np.ndarray, list[PackedBatch]]]:
    """Blocks at every place of every answer where one can begin, for evaluation.

    Yields the numbers of the examples packed together, and batches that share their rows: all
    anchors in order, `num_blocks` to a batch.
    """
    documents = _Documents.of(answers, max_rows)
    ends = np.cumsum(documents.lengths)
    begin = 0
    while begin < len(documents.lengths):
        filled = ends[begin - 1] if begin else 0
        end = int(np.searchsorted(ends, filled + max_rows, side="right"))
        chosen = np.arange(begin, end)
        rows = _Rows.pack(documents, chosen, max_rows)
        anchors = rows.possible_anchors
        pieces = [anchors[i : i + num_blocks] for i in range(0, len(anchors), num_blocks)]
        yield chosen, [rows.with_blocks(piece, num_blocks, block_size) for piece in pieces]
        begin = end


@dataclass(frozen=True)
class _Documents:
    """All answers as flat arrays; what is longer than a batch is cut."""

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray

    @classmethod
    def of(cls, answers: AnswerSet, max_rows: int) -> _Documents:
        starts = answers.starts.numpy()
        lengths = np.minimum(np.diff(starts), max_rows)
        return cls(answers.tokens.numpy(), starts[:-1], lengths, answers.prompt_lengths.numpy())


@dataclass(frozen=True)
class _Rows:
    """Documents side by side, padded to a fixed number of rows."""

    tokens: np.ndarray
    positions: np.ndarray
    documents: np.ndarray
    lengths: np.ndarray
    possible_anchors: np.ndarray

    @classmethod
    def pack(cls, source: _Documents, chosen: np.ndarray, max_rows: int) -> _Rows:
        lengths = source.lengths[chosen]
        begins = np.concatenate([[0], np.cumsum(lengths)])
        count = int(begins[-1])
        owner = np.repeat(np.arange(len(chosen)), lengths)
        place = np.arange(count) - begins[owner]
        tokens = source.tokens[source.starts[chosen][owner] + place]
        may_anchor = place >= source.prompt_lengths[chosen][owner]
        may_anchor &= place < lengths[owner] - 1  # there is a token to predict

        def pad(values: np.ndarray, filler: int) -> np.ndarray:
            padded = np.full(max_rows, filler, dtype=np.int64)
            padded[:count] = values
            return padded

        anchors = np.flatnonzero(may_anchor)
        return cls(pad(tokens, 0), pad(place, 0), pad(owner, -1), lengths, anchors)

    def with_blocks(self, anchors: np.ndarray, num_blocks: int, block_size: int) -> PackedBatch:
        """The batch of blocks at these rows, filled up to `num_blocks`."""
        rows = anchors[:, None] + np.arange(1, block_size)
        places = np.minimum(rows, len(self.tokens) - 1)
        inside = (rows == places) & (self.documents[places] == self.documents[anchors][:, None])
        labels = np.full((num_blocks, block_size - 1), NO_LABEL, dtype=np.int64)
        labels[: len(anchors)] = np.where(inside, self.tokens[places], NO_LABEL)
        filled = np.pad(anchors, (0, num_blocks - len(anchors)), mode="edge")
        return PackedBatch(
            token_ids=torch.from_numpy(self.tokens),
            positions=torch.from_numpy(self.positions),
            documents=torch.from_numpy(self.documents),
            lengths=self.lengths.tolist(),
            anchors=torch.from_numpy(filled),
            labels=torch.from_numpy(labels),
        )


def _draw(rows: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """Some of the rows, none twice, ascending."""
    if len(rows) <= count:
        return rows
    return np.sort(random.choice(rows, count, replace=False, shuffle=False))


def prefetch(batches: Iterator[PackedBatch], device: torch.device) -> Iterator[PackedBatch]:
    """The batches on the device, made ahead in a thread where the device is not the CPU."""
    if device.type == "cpu":
        yield from batches
        return
    ready: queue.Queue[PackedBatch | Exception | None] = queue.Queue(PREFETCHED)
    stop = threading.Event()

    def put(item: PackedBatch | Exception | None) -> None:
        while not stop.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def produce() -> None:
        try:
            with torch.cuda.device(device):  # a thread begins on the first one
                for batch in batches:
                    put(batch.pin())
                    if stop.is_set():
                        return
            put(None)
        except Exception as error:  # raised where the batch was wanted
            put(error)

    thread = threading.Thread(target=produce, name="batches", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item.to(device)
    finally:
        stop.set()
        thread.join()
