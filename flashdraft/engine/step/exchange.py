"""What host and device exchange at the seams of a step: drafts, how many count, and masks.

All of it lives in fixed buffers, which the pieces of a step read and write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashdraft.engine.drafts import BLOCK_SOURCE, DEVICE_SOURCES, Draft
from flashdraft.engine.step.guide import DeviceDraft, StepGuide
from flashdraft.engine.step.result import SCORE_COLUMNS, read_candidates
from flashdraft.engine.step.shape import StepShape
from flashdraft.kernels.layout import count_up


class Exchange:
    """Drafts by slot, and which tokens each row of the target may become."""

    def __init__(
        self,
        num_slots: int,
        width: int,
        num_guided: int,
        vocab_size: int,
        device: torch.device,
        send: Callable[[NDArray[np.int64]], Tensor],
    ) -> None:
        """`num_guided`: rows of a slot that may have a mask; 0 = there are no grammars."""

        def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._device, self._send, self._num_guided = device, send, num_guided
        self.drafts = integers(num_slots, width)
        self.confidence = torch.zeros(num_slots, width, device=device)
        self.sources = integers(num_slots)  # of the drafts: numbers of DEVICE_SOURCES
        self.counts = integers(num_slots)  # draft tokens verified, where the host says so
        # of a drafter's rows, where there may be grammars: what those pick from
        self._offered = integers(num_slots if num_guided else 0, width, SCORE_COLUMNS)
        # the first mask allows nothing; whoever has none is allowed everything
        num_masks = 1 + num_slots * num_guided
        self.masks = integers(num_masks, -(-vocab_size // 32), dtype=torch.int32)
        self._mask_index = integers(num_slots, num_guided).fill_(-1)
        self.is_masked = False  # in the step that runs

    def offer(self, scores: Tensor) -> None:
        """The scores of a drafter's rows: [slots, width, SCORE_COLUMNS]."""
        if len(self._offered):
            self._offered[: scores.shape[0], : scores.shape[1]] = scores

    def before_verify(self, shape: StepShape, guide: StepGuide) -> Mapping[int, Draft]:
        """Take the host's drafts, or wait for the device's and have grammars pick from them.

        Returns the drafts of those whose tokens the host must know; grammars' are put nowhere yet.
        """
        if guide.given is None:
            return self._fit(shape, guide)
        self._give(shape, guide.given)
        return guide.given

    def before_draw(self, guide: StepGuide, drafts: Mapping[int, Draft]) -> None:
        """Masks of the rows that drafts lead to; no way leads to the guided slots' other rows."""
        places, masks = guide.masks(drafts)
        count = len(places)
        self.unmask()
        self.is_masked = True
        sent = torch.from_numpy(masks)
        if self._device.type == "cuda":
            sent = sent.pin_memory().to(self._device, non_blocking=True)
        self.masks[1 : 1 + count] = sent
        self._mask_index.index_fill_(0, self._send(np.asarray(guide.slots, dtype=np.int64)), 0)
        where = self._send(places.T.copy())
        self._mask_index[where[0], where[1]] = 1 + count_up(count, self._device)

    def unmask(self) -> None:
        """From now on everything is allowed."""
        if self.is_masked:
            self._mask_index.fill_(-1)
        self.is_masked = False

    def forget_drafts(self) -> None:
        """There are none in the next step."""
        self.confidence.zero_()

    @property
    def may_mask(self) -> bool:
        """Whether there may be grammars."""
        return len(self.masks) > 1

    def mask_of(self, owner: Tensor, place: Tensor) -> Tensor:
        """Which of `masks` rows have, -1 for none: of their slots, and their places among these."""
        return self._mask_index[owner, place.clamp(0, self._num_guided - 1)]

    def _give(self, shape: StepShape, given: Mapping[int, Draft]) -> None:
        if not shape.width:
            self.counts.zero_()
            return
        tokens = np.zeros((shape.batch, shape.width), dtype=np.int64)
        confidence = np.zeros((shape.batch, shape.width))
        counts = np.zeros((shape.batch, 1), dtype=np.int64)
        for slot, draft in given.items():
            counts[slot] = count = len(draft.tokens)
            tokens[slot, :count], confidence[slot, :count] = draft.tokens, draft.confidence
        if self._device.type == "cpu":
            self.counts.numpy()[: shape.batch] = counts[:, 0]
            self.drafts.numpy()[: shape.batch, : shape.width] = tokens
            self.confidence.numpy()[: shape.batch, : shape.width] = confidence
            return
        sent = self._send(np.concatenate([counts, tokens, confidence.view(np.int64)], axis=1))
        self.counts[: shape.batch] = sent[:, 0]
        self.drafts[: shape.batch, : shape.width] = sent[:, 1 : 1 + shape.width]
        chances = sent[:, 1 + shape.width :].contiguous().view(torch.float64)
        self.confidence[: shape.batch, : shape.width] = chances

    def _fit(self, shape: StepShape, guide: StepGuide) -> dict[int, Draft]:
        slots: Sequence[int] = list(guide.decoding)
        if not slots or not shape.width:
            return {}
        chosen, width = self._send(np.asarray(slots, dtype=np.int64)), shape.width
        guide.look_ahead()  # the device drafts meanwhile
        sources = self.sources[chosen].unsqueeze(1).expand(-1, width)
        chances = self.confidence[chosen, :width].double().view(torch.int64)
        own = torch.stack([sources, chances, self.drafts[chosen, :width]], dim=2)
        words = torch.cat([own, self._offered[chosen, :width]], dim=2).cpu().numpy()
        found = zip(slots, map(_read, words), strict=True)
        most = max(1, shape.num_rows - len(slots))  # beside the anchors
        return {slot: guide.fit(slot, drafted, most) for slot, drafted in found}

    def put_chains(self, drafts: Mapping[int, Draft]) -> None:
        """Put chains, which are all as long as what was filled in, in the place of the device's."""
        chosen = self._send(np.asarray([*drafts], dtype=np.int64))
        ids = np.asarray([one.tokens for one in drafts.values()], dtype=np.int64)
        surety = np.asarray([one.confidence for one in drafts.values()], dtype=np.float64)
        width = ids.shape[1]
        self.drafts[chosen, :width] = self._send(ids)
        sent = self._send(surety.view(np.int64))
        self.confidence[chosen, :width] = sent.view(torch.float64).float()


def _read(rows: NDArray[np.int64]) -> DeviceDraft:
    """What the device drafted for a slot: its source, its confidence, its tokens and scores."""
    source, tokens = DEVICE_SOURCES[rows[0, 0]], rows[:, 2].tolist()
    candidates = read_candidates(rows[:, 2], rows[:, 3:])
    if source == BLOCK_SOURCE:
        return DeviceDraft(tokens, candidates)
    chances = np.ascontiguousarray(rows[:, 1]).view(np.float64)
    return DeviceDraft(tokens, candidates.undrawn, Draft(tokens, chances.tolist(), source))
