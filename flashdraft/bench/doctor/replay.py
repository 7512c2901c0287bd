"""What a drafter would have drafted at many places of texts that are already written.

The target reads each text once and hands out all layers that any trial wants; a trial is then the
drafter's own pass over blocks, so that two configs are compared at the very same places. It decodes
nothing and knows no prompts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashdraft.bench.doctor.probe import tapped
from flashdraft.kernels.interface import PageView, RopeTable
from flashdraft.models.drafter.attention import BlockAttention, BlockLayout
from flashdraft.models.drafter.model import Drafter
from flashdraft.models.layers import ForwardBatch, LayerCache, Target, TargetOutput
from flashdraft.models.rope import Rope

_PAGE_SIZE = 16
_SLOTS = 6  # of a block, from its first: most of a block's worth is decided there
_UNKNOWN = -30.0  # logit of what a reduced vocabulary lacks: no draft, and no infinite score
_STRIDE = 3  # places of a text between two anchors
_TIMED_ROWS = 16
_LOGITS_ROWS = 64  # at a time: logits are wide


@dataclass(frozen=True)
class Text:
    """A prompt with its answer, and what the target's layers made of it."""

    ids: Tensor  # [num_tokens]
    num_prompt: int
    layers: dict[int, Tensor]  # by layer: [num_tokens, hidden_size]


@dataclass(frozen=True)
class Trial:
    """How one drafter did at every anchor, [num_anchors] each."""

    runs: Tensor  # draft tokens in a row that equal the text's own
    scores: Tensor  # the same in expectation, were drafts drawn: the smoother measure

    @classmethod
    def joined(cls, trials: Sequence[Trial]) -> Trial:
        """One drafter's trials on several texts as one."""
        return cls(
            torch.cat([trial.runs for trial in trials]),
            torch.cat([trial.scores for trial in trials]),
        )


@dataclass(frozen=True)
class TrialComparison:
    """Two trials at the same places.

    Lengths are agreed draft tokens and the bonus token, in the mean. Scores tell small differences
    apart with far fewer anchors than lengths do, so they decide.
    """

    before: float
    after: float
    gain: float  # how many times more, by the scores
    deviations: float  # of the scores' difference, in its own standard errors

    @classmethod
    def of(cls, before: Trial, after: Trial) -> TrialComparison:
        difference = after.scores - before.scores
        mean, spread = float(difference.mean()), float(difference.std())
        return cls(
            before=1 + float(before.runs.mean()),
            after=1 + float(after.runs.mean()),
            gain=(1 + float(after.scores.mean())) / (1 + float(before.scores.mean())),
            deviations=mean / spread * math.sqrt(len(difference)) if spread > 0 else 0.0,
        )


@torch.no_grad()
def read_text(
    target: Target, prompt: Sequence[int], answer: Sequence[int], layers: Sequence[int]
) -> Text:
    """Run the target over a text once, keeping the outputs of some layers."""
    ids = torch.tensor([*prompt, *answer], device=target.kernels.device)
    taps = _run(tapped(target, layers), ids).taps
    assert taps is not None, "layers were asked for"
    return Text(ids, len(prompt), dict(zip(layers, taps.chunk(len(layers), dim=-1), strict=True)))


@torch.no_grad()
def agreement(target: Target, prompt: Sequence[int], answer: Sequence[int]) -> tuple[int, int]:
    """How many tokens of an answer are those that this target finds likeliest, of how many."""
    ids = torch.tensor([*prompt, *answer], device=target.kernels.device)
    hidden = _run(target, ids).hidden[len(prompt) - 1 : -1].contiguous()
    pieces = torch.split(hidden, _LOGITS_ROWS)
    chosen = torch.cat([target.kernels.argmax(target.logits(rows)) for rows in pieces])
    return int((chosen == ids[len(prompt) :]).sum()), len(answer)


def seconds_per_row(target: Target, ids: Sequence[int], most_seconds: float) -> float:
    """Of a pass over many rows together, if that costs no more than so much; else over two.

    Kernels that take rows one by one (plain torch on a CPU) need as long for each of many.
    """

    def time_rows(rows: Sequence[int]) -> float:
        begin = time.monotonic()
        agreement(target, rows[:1], rows[1:])
        return (time.monotonic() - begin) / len(rows)

    few, many = ids[:2], ids[:_TIMED_ROWS]
    single = min(time_rows(few) for _ in range(2))  # the first pass may wait for the disk
    return time_rows(many) if len(many) * single <= most_seconds else single


def _run(target: Target, ids: Tensor) -> TargetOutput:
    """A pass over one text, with a cache for nobody else."""
    device, dtype, count = target.kernels.device, target.kernels.dtype, len(ids)
    num_pages = -(-count // _PAGE_SIZE)
    view = PageView(
        query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
        context_lens=torch.zeros(1, dtype=torch.int32, device=device),
        block_table=torch.arange(num_pages, dtype=torch.int32, device=device).unsqueeze(0),
        slots=torch.arange(count, device=device),
        page_size=_PAGE_SIZE,
        max_query_len=count,
        max_key_len=count,
    )
    caches = []
    for layer in target.config.cached_layers:
        shape = (2, num_pages, _PAGE_SIZE, layer.num_kv_heads, layer.head_dim)
        keys, values = torch.zeros(shape, device=device, dtype=dtype)
        caches.append(LayerCache(keys, values, view))
    return target.forward(ids, ForwardBatch(torch.arange(count, device=device), count, caches))


@torch.no_grad()
def try_drafter(target: Target, drafter: Drafter, texts: Sequence[Text]) -> Trial:
    """Draft at the anchors of all texts."""
    rope = Rope(drafter.config.rope, target.kernels.device)
    return Trial.joined([_try_on(target, drafter, rope, text) for text in texts])


def _try_on(target: Target, drafter: Drafter, rope: Rope, text: Text) -> Trial:
    num_slots, shift = min(_SLOTS, drafter.config.num_slots), 1 - drafter.config.first_row
    # every label lies in the text, so that all anchors count the same slots
    last = len(text.ids) - num_slots
    anchors = torch.arange(text.num_prompt, last, _STRIDE, device=text.ids.device)
    if not len(anchors):
        return Trial(torch.zeros(0), torch.zeros(0))
    hidden = _draft(target, drafter, rope, text, anchors, num_slots)
    runs, scores = torch.zeros(len(anchors)), torch.zeros(len(anchors))
    agreed = torch.ones(len(anchors), dtype=torch.bool)
    reached = torch.ones(len(anchors))
    for slot in range(1, 1 + num_slots):  # one slot at a time: logits are wide
        labels = text.ids[anchors + slot]
        logits = drafter.logits(target, hidden[:, slot - shift].contiguous())
        if drafter.d2t is not None:
            known = torch.arange(len(drafter.d2t), device=logits.device) + drafter.d2t
            wide = logits.new_full((len(logits), target.config.vocab_size), _UNKNOWN)
            logits = wide.index_copy_(1, known, logits)
        chances = logits.softmax(-1).gather(1, labels.unsqueeze(1)).squeeze(1)
        agreed &= (target.kernels.argmax(logits) == labels).cpu()
        runs += agreed
        reached *= chances.cpu()
        scores += reached
    return Trial(runs, scores)


def _draft(
    target: Target, drafter: Drafter, rope: Rope, text: Text, anchors: Tensor, num_slots: int
) -> Tensor:
    """The drafter's final hidden rows of a block at every anchor, [anchors, rows, hidden]."""
    config, device, count = drafter.config, text.ids.device, len(text.ids)
    # only a drafter that was trained on shorter blocks drafts the same in a cut one
    rows = config.first_row + num_slots if config.any_width else config.block_size
    positions = anchors.unsqueeze(1) + torch.arange(rows, device=device)
    ids = torch.full_like(positions, config.mask_token_id)
    ids[:, 0] = text.ids[anchors]
    layout = BlockLayout(count, rows, torch.zeros_like(anchors), anchors)
    kinds = list(zip(config.causal, config.windows, strict=True))
    made = {kind: layout.dense_mask(*kind) for kind in dict.fromkeys(kinds)}
    table = rope.table(count + rows)
    places = torch.cat([torch.arange(count, device=device), positions.flatten()])
    attend = BlockAttention(
        drafter,
        drafter.context(torch.cat([text.layers[tap] for tap in config.tap_layers], dim=-1)),
        RopeTable(table.cos[places], table.sin[places]),
        [made[kind] for kind in kinds],
    )
    own = (positions - anchors.unsqueeze(1)).flatten()
    hidden: Tensor = drafter(drafter.embed(target, ids.flatten()), attend, own)
    return hidden.view(len(anchors), rows, -1)
