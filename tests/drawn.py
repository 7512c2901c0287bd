"""Rows to draw from, plain and hostile, for the tests of every implementation of the draw."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashdraft.core import SamplingParams
from flashdraft.kernels.draw.rule import Draw, DrawnRows, SlotRequest, SlotSettings
from tests.tree_rows import ancestors_of, as_word, random_tree

CPU = torch.device("cpu")
WIDTH = 4  # draft tokens of a slot, or as many as are rows

TEMPERATURES = (0.0, 1e-9, 1e-4, 0.3, 0.7, 1.0, 1.0, 1.7, 90.0)
TOP_KS = (0, 0, 1, 2, 5, 20, 64, 300)
TOP_PS = (1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999999)
MIN_PS = (0.0, 0.0, 0.0, 1e-6, 0.02, 0.5, 1.0)
PENALISED = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 1.9}


@dataclass(frozen=True)
class Rows:
    """A batch, and the requests that its slots were set from."""

    logits: Tensor
    settings: SlotSettings
    rows: DrawnRows
    requests: list[SlotRequest]

    @property
    def drawable(self) -> tuple[Tensor, SlotSettings, DrawnRows]:
        return self.logits, self.settings, self.rows

    def to(self, device: torch.device) -> Rows:
        tensors = {
            field.name: value.to(device)
            for field in fields(SlotSettings)
            if isinstance(value := getattr(self.settings, field.name), Tensor)
        }
        moved = {
            field.name: value.to(device)
            for field in fields(DrawnRows)
            if isinstance(value := getattr(self.rows, field.name), Tensor)
        }
        return replace(
            self,
            logits=self.logits.to(device),
            settings=replace(self.settings, **tensors),
            rows=replace(self.rows, **moved),
        )

    def alone(self, row: int) -> Rows:
        """One of the rows by itself."""
        one = slice(row, row + 1)
        cut = {
            name: value[one]
            for name in ("owner", "positions", "ancestors", "mask_of")
            if (value := getattr(self.rows, name)) is not None
        }
        return replace(self, logits=self.logits[one], rows=replace(self.rows, **cut))

    def history(self, row: int) -> list[int]:
        """The output tokens that a row follows."""
        followed, ancestors, slot = self.rows.followed, self.rows.ancestors, self.owners[row]
        assert followed is not None and ancestors is not None
        word = int(ancestors[row])
        drafts = [one for j, one in enumerate(followed[slot].tolist()) if word >> (j + 1) & 1]
        return [*self.requests[slot].output_ids, *drafts]

    def committed(self) -> Rows:
        """The same, where every row has a slot of its own, which has put out the row's path."""
        requests = [
            self.requests[slot]._replace(output_ids=self.history(row))
            for row, slot in enumerate(self.owners)
        ]
        settings = SlotSettings.allocate(len(requests), self.settings.vocab_size, CPU)
        settings.set(dict(enumerate(requests)))
        rows = replace(self.rows, owner=torch.arange(len(requests)), followed=None, ancestors=None)
        return Rows(self.logits, settings, rows, requests)

    def tempted(self) -> Rows:
        """The same rows, each of which likes best what it follows last, if not by much."""
        logits = torch.randn(self.logits.shape, generator=torch.Generator().manual_seed(0))
        for row, x in enumerate(logits):
            last = self.history(row)[-1]
            if 0 <= last < len(x):
                x[last] = x.max() + 0.5
        return replace(self, logits=logits)

    @property
    def owners(self) -> list[int]:
        owners: list[int] = self.rows.owner.tolist()
        return owners


def random_params(random: np.random.Generator, vocab_size: int, **fixed: Any) -> SamplingParams:
    """Settings of all kinds; what is fixed is left so."""
    some: dict[str, Any] = {
        "temperature": float(random.choice(TEMPERATURES)),
        "top_k": int(random.choice([*TOP_KS, vocab_size - 1, vocab_size, vocab_size + 5])),
        "top_p": float(random.choice(TOP_PS)),
        "min_p": float(random.choice(MIN_PS)),
        "logprobs": random.choice(np.array([None, 0, 1, 5, 20])),
    }
    if random.random() < 0.4:
        some["repetition_penalty"] = float(random.choice([1.0, 1.3, 0.5]))
        some["presence_penalty"] = float(random.choice([0.0, 0.7, -1.5]))
        some["frequency_penalty"] = float(random.choice([0.0, 0.31, -0.2]))
    if random.random() < 0.3:
        ids = random.integers(0, vocab_size, 5).tolist()
        some["logit_bias"] = {token: float(random.normal() * 20) for token in ids}
    if random.random() < 0.3:
        some["min_tokens"] = int(random.integers(1, 9))
    return SamplingParams(**(some | fixed))


def random_logits(random: np.random.Generator, num_rows: int, vocab_size: int) -> Tensor:
    """Rows of many shapes, one after the other; some hold no token at all."""
    rows = random.normal(size=(num_rows, vocab_size)).astype(np.float32)
    for number, row in enumerate(rows):
        kind = number % 14
        if kind in (0, 1, 2):
            row *= (3.0, 0.3, 12.0)[kind]
        elif kind == 3:
            row[:] = np.round(row * 2)  # full of ties
        elif kind == 4:
            row[:] = 1.5
        elif kind == 5:
            row[random.random(vocab_size) < 0.9] = -math.inf
            row[random.integers(vocab_size)] = 0.0
        elif kind == 6:
            row[:] = -math.inf
            row[random.integers(vocab_size)] = -3.0
        elif kind == 7:
            row *= 1e37
        elif kind == 8:
            row[:] = 1e-6 * np.round(row) - 0.0
            row[::3] = -0.0
        elif kind == 9:
            row[:] = np.sort(row)[::-1] * 4  # the likeliest side by side
        elif kind == 10:
            row[random.integers(vocab_size)] = random.choice(
                np.array([math.nan, math.inf, -math.inf], dtype=np.float32)
            )
        elif kind == 11:
            row *= 0.0 if random.random() < 0.5 else 0.02
        elif kind == 12 and random.random() < 0.3:
            row[:] = -math.inf
    return torch.from_numpy(rows)


def random_masks(random: np.random.Generator, count: int, vocab_size: int) -> Tensor:
    """Allow everything, half, a few, one or nothing."""
    shares = random.choice(np.array([1.0, 0.5, 0.5, 0.02, 0.0]), count)
    allowed = random.random((count, vocab_size)) < shares[:, None]
    return pack_masks(allowed)


def pack_masks(allowed: np.ndarray[Any, Any]) -> Tensor:
    num_words = -(-allowed.shape[1] // 32)
    bits = np.zeros((len(allowed), num_words * 32), dtype=np.uint8)
    bits[:, : allowed.shape[1]] = allowed
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def make_rows(
    seed: int,
    vocab_size: int,
    num_slots: int = 28,
    rows_each: int = 2,
    masked: bool = False,
    depth: int | None = None,
    **fixed: Any,
) -> Rows:
    """A batch of slots with random settings, each with several rows behind draft tokens.

    The rows of a slot follow one another, or they are some tree that is no deeper than `depth`.
    """
    random = np.random.default_rng(seed)
    settings = SlotSettings.allocate(num_slots, vocab_size, CPU)
    requests = [
        SlotRequest(
            random_params(random, vocab_size, **fixed),
            seed=int(random.integers(-(2**63), 2**63 - 1)),
            prompt_ids=random.integers(0, vocab_size, 7).tolist(),
            stop_ids=random.integers(0, vocab_size, 3).tolist(),
            output_ids=random.integers(0, vocab_size, 6).tolist(),
        )
        for _ in range(num_slots)
    ]
    settings.set(dict(enumerate(requests)))
    num_rows = num_slots * rows_each
    owner = np.repeat(np.arange(num_slots), rows_each)
    place = np.tile(np.arange(rows_each), num_slots)
    starts = np.array([len(one.prompt_ids) + len(one.output_ids) for one in requests])
    order = random.permutation(num_rows)
    owner, place = owner[order], place[order]
    chain = range(rows_each - 1)
    trees = [
        chain if depth is None else random_tree(rows_each, depth, seed + slot)
        for slot in range(num_slots)
    ]
    paths = [ancestors_of(trees[slot])[own] for slot, own in zip(owner, place, strict=True)]
    depths = np.array([len(path) - 1 for path in paths])
    tokens = random.integers(-1, vocab_size + 1, (num_slots, max(WIDTH, rows_each - 1)))
    masks, mask_of = None, None
    if masked:  # fewer than rows: some share one, and some have none
        masks = random_masks(random, 1 + num_rows // 2, vocab_size)
        mask_of = torch.from_numpy(random.integers(-len(masks) // 2, len(masks), num_rows))
        mask_of = mask_of.clamp(min=-1)
    rows = DrawnRows(
        owner=torch.from_numpy(owner),
        positions=torch.from_numpy(starts[owner] + depths),
        followed=torch.from_numpy(tokens),
        ancestors=torch.tensor([as_word(path) for path in paths]),
        masks=masks,
        mask_of=mask_of,
    )
    return Rows(random_logits(random, num_rows, vocab_size), settings, rows, requests)


def siblings() -> tuple[Rows, list[int]]:
    """A tree whose rows see the same logits, and what is drawn: the best that they do not follow.

    Behind the anchor stand 5 and 3, behind 5 stands 3; 5 is the best, then 3, then 1.
    """
    settings = SlotSettings.allocate(1, 7, CPU)
    settings.set({0: SlotRequest(SamplingParams(presence_penalty=2.0), 0, ())})
    rows = DrawnRows(
        owner=torch.zeros(4, dtype=torch.int64),
        positions=torch.tensor([0, 1, 1, 2]),
        followed=torch.tensor([[5, 3, 3]]),
        ancestors=torch.tensor([0b1, 0b11, 0b101, 0b1011]),
    )
    logits = torch.tensor([0.0, 1.0, 0.0, 1.1, 0.0, 1.2, 0.0]).repeat(4, 1)
    return Rows(logits, settings, rows, []), [5, 3, 5, 1]


def assert_equal(found: Draw, expected: Draw) -> None:
    """Bit for bit, but for the total, which each implementation adds up in its own order."""
    found = Draw(*(one.cpu() for one in found))
    expected = Draw(*(one.cpu() for one in expected))
    wrong = (found.tokens != expected.tokens).nonzero().squeeze(1).tolist()
    assert not wrong, [
        (row, int(found.tokens[row]), int(expected.tokens[row])) for row in wrong[:10]
    ]
    assert torch.equal(found.logit, expected.logit)
    assert torch.equal(found.top_ids, expected.top_ids)
    assert torch.equal(found.top_logits, expected.top_logits)
    sound = expected.tokens >= 0
    torch.testing.assert_close(
        found.log_total[sound], expected.log_total[sound], rtol=1e-6, atol=1e-6
    )
