"""One training step's arithmetic: blocks through the drafter, the loss, and its gradients.

A block's input is what the engine gives the drafter (engine/draft/block.py): the anchor's token and
mask tokens, at the anchor's position and after, over the context strictly before the anchor. A
drafter's head learns beside it, from the likeliest tokens of every slot behind the true one before.
The optimizer, the schedule and the data are others' business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashdraft.errors import UnsupportedModelError
from flashdraft.kernels.interface import RopeTable
from flashdraft.models.drafter.attention import BlockAttention, BlockLayout, Mask
from flashdraft.models.drafter.heads import score_paths
from flashdraft.models.drafter.model import Drafter
from flashdraft.models.layers import Target
from flashdraft.models.rope import Rope
from flashdraft.train.fit.batches import NO_LABEL, PackedBatch
from flashdraft.train.fit.features import TargetFeatures
from flashdraft.train.fit.loss import (
    Head,
    RowLosses,
    candidate_logits,
    head_argmax,
    head_loss,
    head_top,
    path_loss,
    slot_weights,
    with_labels,
)


@dataclass(frozen=True)
class StepReport:
    """What a step found, on the device: reading a value waits for it."""

    loss: Tensor  # 0-dim, without `scale`
    slot_correct: Tensor  # [block_size - 1] int64: likeliest tokens that are the label
    slot_count: Tensor  # [block_size - 1] int64: labels
    slot_chance: Tensor  # [block_size - 1] float32: sum of the labels' probabilities


class TrainingStep:
    """A drafter in training beside its frozen target."""

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        *,
        max_rows: int,
        compile: bool = False,
        chunk_rows: int = 4096,
    ) -> None:
        if drafter.lm_head is not None:
            raise UnsupportedModelError(
                f"The drafter has a reduced vocabulary of {drafter.config.draft_vocab_size}, which "
                "cannot be trained here; use a drafter with the target's whole vocabulary."
            )
        config = drafter.config
        if config.from_anchor or (config.head is not None and config.head.has_confidence):
            what = "drafts from its anchor" if config.from_anchor else "has a confidence head"
            raise UnsupportedModelError(
                f"The drafter {what}, which cannot be trained here; begin with a plain drafter and "
                "--head."
            )
        self.drafter = drafter
        self.target = target
        self.features = TargetFeatures(target, max_rows)
        self._chunk_rows = chunk_rows
        self._rope = Rope(drafter.config.rope, target.kernels.device)
        self._head = _read_head(drafter, target)
        self._run: Callable[..., Tensor] = self._hidden
        if compile:
            self._run = torch.compile(self._hidden, dynamic=False, fullgraph=True)

    def backward(
        self, batch: PackedBatch, taps: Tensor | None = None, scale: float = 1.0
    ) -> StepReport:
        """Add the gradients of scale * loss to the parameters' own."""
        taps = self.features.run(batch) if taps is None else taps
        hidden = self._forward(batch, taps, batch.widths)
        labels = batch.labels
        path = self.drafter.config.head
        num_likeliest = 0 if path is None else path.num_candidates
        rows = head_loss(hidden, labels.flatten(), self._head, self._chunk_rows, num_likeliest)
        loss = _weigh(rows, labels)
        if path is not None:
            rows = self._follow_labels(batch, hidden, rows.likeliest)
            loss = loss + _weigh(rows, labels)
        torch.autograd.backward(loss * scale)
        is_labelled = labels != NO_LABEL
        correct = (rows.best.view(labels.shape) == labels) & is_labelled
        chance = rows.chance.view(labels.shape)
        return StepReport(loss.detach(), correct.sum(0), is_labelled.sum(0), chance.sum(0))

    def _follow_labels(self, batch: PackedBatch, hidden: Tensor, likeliest: Tensor) -> RowLosses:
        """What the drafter's head would choose in every slot, behind the true tokens."""
        labels, head = batch.labels, self.drafter.path_head
        assert head is not None
        anchors = batch.token_ids[batch.anchors].unsqueeze(1)
        before = torch.cat([anchors, labels[:, :-1].clamp(min=0)], dim=1).view(-1, 1, 1)
        candidates = with_labels(likeliest, labels.flatten())
        with self._casting(hidden.device):
            added = score_paths(head, None, hidden.unsqueeze(1), before, candidates.unsqueeze(1))
        logits = candidate_logits(hidden, candidates, self._head)
        return path_loss(logits + added.added[:, 0, 0], candidates, labels.flatten())

    @torch.no_grad()
    def predict(
        self,
        batch: PackedBatch,
        taps: Tensor | None = None,
        widths: Tensor | None = None,
    ) -> Tensor:
        """The likeliest draft tokens of every block, [num_blocks, block_size - 1].

        `widths` [num_blocks] are the rows that count, where a block is cut short.
        """
        taps = self.features.run(batch) if taps is None else taps
        hidden = self._forward(batch, taps, widths)
        if self.drafter.config.head is not None:
            return self._follow(batch, hidden, self.drafter.config.head.num_candidates)
        return head_argmax(hidden, self._head, self._chunk_rows).view(batch.labels.shape)

    def _follow(self, batch: PackedBatch, hidden: Tensor, count: int) -> Tensor:
        """The path that the drafter's head chooses in every block, as engines do."""
        head, shape = self.drafter.path_head, batch.labels.shape
        assert head is not None
        likeliest = head_top(hidden, self._head, count, self._chunk_rows)
        logits = candidate_logits(hidden, likeliest, self._head).view(*shape, count)
        candidates = likeliest.view(*shape, count)
        anchors = batch.token_ids[batch.anchors].view(-1, 1, 1).expand(-1, 1, count)
        before = torch.cat([anchors, candidates[:, :-1]], dim=1)
        with self._casting(hidden.device):
            added = score_paths(head, None, hidden.view(*shape, -1), before, candidates).added
        number = anchors.new_zeros(len(candidates), 1)
        path = []
        for slot in range(shape[1]):
            behind = added[:, slot].gather(1, number.unsqueeze(2).expand(-1, 1, count)).squeeze(1)
            number = (logits[:, slot] + behind).argmax(1, keepdim=True)
            path.append(candidates[:, slot].gather(1, number))
        return torch.cat(path, dim=1)

    def _casting(self, device: torch.device) -> torch.autocast:
        """The drafter's products in the target's dtype."""
        dtype = self.target.kernels.dtype
        return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    def _forward(self, batch: PackedBatch, taps: Tensor, widths: Tensor | None = None) -> Tensor:
        """Final hidden rows of the masked slots, [num_blocks * (block_size - 1), hidden_size]."""
        config, anchors = self.drafter.config, batch.anchors
        assert batch.block_size == config.block_size, "the batch was made for another block size"
        first = batch.positions[anchors]
        offsets = torch.arange(config.block_size, device=anchors.device)
        ids = torch.full_like(first.unsqueeze(1) + offsets, config.mask_token_id)
        ids[:, 0] = batch.token_ids[anchors]
        places = torch.cat([batch.positions, (first.unsqueeze(1) + offsets).flatten()])
        table = self._rope.table(max(batch.lengths) + config.block_size)
        layout = BlockLayout(
            len(batch.token_ids), config.block_size, anchors - first, anchors, widths
        )
        with torch.no_grad():
            embeddings = self.drafter.embed(self.target, ids.flatten())
        return self._run(
            taps,
            embeddings,
            table.cos[places],
            table.sin[places],
            layout.masks(config),
            offsets.repeat(len(anchors)),
        )

    def _hidden(
        self,
        taps: Tensor,
        embeddings: Tensor,
        cos: Tensor,
        sin: Tensor,
        masks: Sequence[Mask],
        places: Tensor,
    ) -> Tensor:
        """The part that is compiled: every shape in it is the same in all batches of a run."""
        drafter = self.drafter
        with self._casting(taps.device):
            attend = BlockAttention(drafter, drafter.context(taps), RopeTable(cos, sin), masks)
            hidden = drafter(embeddings, attend, places)
        blocks = hidden.unflatten(0, (-1, drafter.config.block_size))
        return blocks[:, 1:].flatten(0, 1)  # the anchor's own row predicts nothing


def _weigh(rows: RowLosses, labels: Tensor) -> Tensor:
    """The loss of rows, of which each counts as its slot does."""
    weights = slot_weights(rows.chance.view(labels.shape), labels)
    return (rows.loss.view(labels.shape) * weights).sum() / weights.sum().clamp(min=1e-6)


def _read_head(drafter: Drafter, target: Target) -> Head:
    """The target's head as a plain matrix, whatever its backend keeps it in."""
    kernels, config = target.kernels, drafter.config
    with torch.no_grad():
        unit = torch.eye(config.hidden_size, device=kernels.device, dtype=kernels.dtype)
        weight = target.unembed(unit).T.contiguous()
    return Head(weight, config.output_multiplier, config.logit_softcap)
