"""Appends answers to a folder, in shards that are complete or not there.

It knows neither models nor tokenizers: whose answers they are is regenerate.py's business, what a
shard holds is said in answers.py.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from flashdraft.errors import TrainingError
from flashdraft.files import put_in_place
from flashdraft.kernels.kinds import WeightOptions
from flashdraft.train.data.answers import (
    COLUMNS,
    FORMAT_VERSION,
    SHARD_GLOB,
    Answer,
    read_shard,
)
from flashdraft.train.lock import make_folder

MAX_UINT16_VOCAB = 65536
FLUSH_EVERY_S = 60.0  # so much work at most is lost by a kill or a power cut


class AnswerWriter:
    """Appends answers to a folder, a shard at a time; nothing that is on disk is ever rewritten.

    The folder belongs to one target, one list of prompts and one group of settings, its `identity`:
    whoever comes with another is refused, for the rows would not mean the same. `tokenizer` is a
    digest of the target's own and `formats` what its weights were held in, kept for whoever trains
    another target on the answers, or the same in other bits.
    """

    def __init__(
        self,
        folder: str | Path,
        vocab_size: int,
        identity: Mapping[str, Any],
        shard_size: int,
        tokenizer: str | None = None,
        formats: WeightOptions | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._identity = json.dumps(identity, sort_keys=True)
        self._shard_size = shard_size
        self._about_target = {"vocab_size": str(vocab_size)}
        if tokenizer is not None:
            self._about_target["tokenizer"] = tokenizer
        if formats is not None:
            self._about_target["formats"] = json.dumps(formats)
        self._flushed_at = time.monotonic()
        self.has_failed = False  # what waits could not be written
        self._token_dtype = torch.uint16 if vocab_size <= MAX_UINT16_VOCAB else torch.int32
        self._waiting: list[Answer] = []
        self._done: set[tuple[int, int]] = set()
        self.bytes_written = 0  # of tokens, in this run; those that still wait are counted
        make_folder(self.folder)
        shards = sorted(self.folder.glob(SHARD_GLOB))
        for shard in shards:
            tensors, meta = read_shard(shard)
            if meta["identity"] != self._identity:
                raise TrainingError(
                    f"{self.folder} holds answers made from other prompts, by another target or "
                    f"with other settings ({_difference(meta['identity'], self._identity)}); use "
                    "another folder, or delete this one."
                )
            indices, variants = tensors["prompt_index"].tolist(), tensors["variant"].tolist()
            self._done.update(zip(indices, variants, strict=True))
        self._next_shard = int(shards[-1].stem.split("-")[1]) + 1 if shards else 0

    def done(self) -> set[tuple[int, int]]:
        """(prompt index, variant) of every answer that is already on disk."""
        return set(self._done)

    def append(self, answer: Answer) -> None:
        """Take an answer; a full shard is written at once, any other after a minute."""
        self._waiting.append(answer)
        num_tokens = len(answer.prompt_ids) + len(answer.answer_ids)
        self.bytes_written += num_tokens * self._token_dtype.itemsize
        is_old = time.monotonic() - self._flushed_at >= FLUSH_EVERY_S
        if len(self._waiting) >= self._shard_size or is_old:
            self.flush()

    def flush(self) -> None:
        """Write what waits as a shard of its own."""
        if not self._waiting:
            return
        answers, path = self._waiting, self.folder / f"answers-{self._next_shard:05d}.safetensors"
        names = sorted({answer.source for answer in answers})
        place = {name: i for i, name in enumerate(names)}
        flat = np.concatenate([np.asarray(ids) for a in answers for ids in a[:2]]).astype(np.int32)
        values: dict[str, list[Any]] = {
            "prompt_lengths": [len(a.prompt_ids) for a in answers],
            "answer_lengths": [len(a.answer_ids) for a in answers],
            "prompt_index": [a.prompt_index for a in answers],
            "variant": [a.variant for a in answers],
            "source": [place[a.source] for a in answers],
            "temperature": [a.temperature for a in answers],
            "ended": [a.ended for a in answers],
        }
        tensors = {name: torch.tensor(values[name], dtype=kind) for name, kind in COLUMNS.items()}
        tensors["tokens"] = torch.from_numpy(flat).to(self._token_dtype)
        metadata = {
            "format": FORMAT_VERSION,
            "identity": self._identity,
            "sources": json.dumps(names),
            **self._about_target,
        }
        try:
            _write_shard(path, tensors, metadata)
        except (OSError, SafetensorError) as error:
            self.has_failed = True
            full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
            reason = "the disk is full" if full else str(error)
            raise TrainingError(
                f"{path} cannot be written: {reason}. {len(answers)} new answers are lost, "
                f"{len(self._done)} are kept in the folder: make room and run the same command "
                "again to go on from there."
            ) from None
        self._done.update((a.prompt_index, a.variant) for a in answers)
        self._waiting = []
        self._next_shard += 1
        self._flushed_at = time.monotonic()


def _write_shard(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    part = path.with_name(path.name + ".part")
    try:
        save_file(tensors, part, metadata=metadata)
        put_in_place(part, path)
    except BaseException:  # an interrupt too: nothing half-written stays
        part.unlink(missing_ok=True)
        raise


def _difference(theirs: str, ours: str) -> str:
    """Which parts of two identities differ, and how."""
    left, right = json.loads(theirs), json.loads(ours)
    keys = [key for key in sorted({*left, *right}) if left.get(key) != right.get(key)]
    return "; ".join(f"{key}: {left.get(key)} there, {right.get(key)} now" for key in keys)
