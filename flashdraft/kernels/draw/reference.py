"""The rule in plain torch: on any device, without waiting for it, so that a graph can hold it.

It sorts whole rows, whatever their slots ask for: what others must equal, and what draws where
Triton is missing.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from flashdraft.kernels.draw.arithmetic import gumbel, weigh
from flashdraft.kernels.draw.noise import keys_from, random_bits
from flashdraft.kernels.draw.rule import (
    BIASED,
    COUNT,
    LOWEST_TEMPERATURE,
    MAX_TOP,
    NO_TOKEN,
    PENALISED,
    PROMPT,
    STOP,
    STOPS_LATE,
    Draw,
    DrawnRows,
    SlotSettings,
)

MAX_CELLS = 1 << 24  # logits that are looked at together: some 2 GB are in use then


def draw(logits: Tensor, settings: SlotSettings, rows: DrawnRows) -> Draw:
    """`Kernels.draw`."""
    num_rows, vocab_size = logits.shape
    step = max(1, MAX_CELLS // vocab_size)
    parts = [
        _draw_part(logits[first : first + step], settings, _cut_rows(rows, first, first + step))
        for first in range(0, max(num_rows, 1), step)
    ]
    return parts[0] if len(parts) == 1 else Draw(*map(torch.cat, zip(*parts, strict=True)))


def _cut_rows(rows: DrawnRows, first: int, end: int) -> DrawnRows:
    return replace(
        rows,
        owner=rows.owner[first:end],
        positions=rows.positions[first:end],
        ancestors=None if rows.ancestors is None else rows.ancestors[first:end],
        mask_of=None if rows.mask_of is None else rows.mask_of[first:end],
    )


def _draw_part(logits: Tensor, settings: SlotSettings, rows: DrawnRows) -> Draw:
    raw = logits.to(torch.float32)
    adjusted = adjust(raw, settings, rows)
    peak = adjusted.amax(1, keepdim=True)
    sound = raw.amax(1).isfinite() & peak.squeeze(1).isfinite()  # NaN is the largest of all
    temperature = settings.temperature[rows.owner]
    heat = temperature.clamp(min=LOWEST_TEMPERATURE).unsqueeze(1)
    scaled = (adjusted - peak) / heat + 0.0  # + 0.0: there is one zero
    keys = keys_from(settings.noise[rows.owner], rows.positions).unsqueeze(1)
    noise = gumbel(random_bits(keys, raw.shape[1], raw.device))
    rivals = (scaled + noise).masked_fill(~_kept(scaled, settings, rows), -math.inf)
    tokens = torch.where(temperature > 0, rivals.argmax(1), adjusted.argmax(1))
    logit = raw.gather(1, tokens.unsqueeze(1)).squeeze(1)
    top_ids, top_logits = _largest(raw)
    num_top = settings.num_top[rows.owner].unsqueeze(1)
    has_top = torch.arange(MAX_TOP, device=raw.device) < num_top
    has_top = has_top & sound.unsqueeze(1) & (top_logits > -math.inf)
    return Draw(
        tokens.masked_fill(~sound, NO_TOKEN),
        logit.masked_fill(~sound, -math.inf),
        raw.double().logsumexp(1).float(),
        top_ids.masked_fill(~has_top, NO_TOKEN),
        top_logits.masked_fill(~has_top, -math.inf),
    )


def adjust(raw: Tensor, settings: SlotSettings, rows: DrawnRows) -> Tensor:
    """Steps 1 to 4 of the rule on float32 rows [rows, vocab]."""
    owner, x = rows.owner, raw
    flags = settings.flags[owner].unsqueeze(1)
    if rows.masks is not None and rows.mask_of is not None:
        allowed = _allowed(rows.masks[rows.mask_of.clamp(min=0)], raw.shape[1])
        x = x.masked_fill(~allowed & (rows.mask_of >= 0).unsqueeze(1), -math.inf)
    if not len(settings.facts):  # nobody's settings adjust anything
        return x
    x = torch.where((flags & BIASED).ne(0), x + settings.bias[owner], x)
    facts = settings.facts[owner]
    is_early = rows.positions < settings.free_from[owner]
    waits = (flags & STOPS_LATE).ne(0) & is_early.unsqueeze(1)
    x = x.masked_fill(waits & (facts & STOP).ne(0), -math.inf)
    counts = (facts & COUNT) + _draft_counts(settings, rows)
    repetition, presence, frequency = (
        one[owner].unsqueeze(1)
        for one in (settings.repetition, settings.presence, settings.frequency)
    )
    seen = (counts > 0) | (facts & PROMPT).ne(0)
    y = torch.where(x > 0, x / repetition, x * repetition)
    y = torch.where(seen, y, x)
    y = y - counts.to(torch.float32) * frequency
    y = torch.where(counts > 0, y - presence, y)
    return torch.where((flags & PENALISED).ne(0), y, x)


def _allowed(masks: Tensor, vocab_size: int) -> Tensor:
    """[rows, vocab] bool from masks [rows, words] int32."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    return ((masks.unsqueeze(2) >> bits) & 1).ne(0).flatten(1)[:, :vocab_size]


def _draft_counts(settings: SlotSettings, rows: DrawnRows) -> Tensor:
    """How often each token is among the draft tokens a row follows: [rows, vocab] int32."""
    shape = len(rows.owner), settings.vocab_size
    counts = torch.zeros(shape, dtype=torch.int32, device=rows.owner.device)
    if rows.followed is None or rows.ancestors is None:
        return counts
    tokens = rows.followed[rows.owner]
    bit = torch.arange(1, 1 + tokens.shape[1], device=tokens.device)
    real = ((rows.ancestors.unsqueeze(1) >> bit) & 1).ne(0)
    real &= (tokens >= 0) & (tokens < settings.vocab_size)
    return counts.scatter_add_(1, tokens * real, real.to(torch.int32))


def _kept(scaled: Tensor, settings: SlotSettings, rows: DrawnRows) -> Tensor:
    """Step 6: which tokens pass the filters, [rows, vocab] bool."""
    ranked, order = scaled.sort(dim=1, descending=True, stable=True)
    place = torch.arange(ranked.shape[1], device=ranked.device)
    kept = ranked >= settings.least[rows.owner].unsqueeze(1)
    kept &= place < settings.top_k[rows.owner].unsqueeze(1)
    weights = weigh(ranked).masked_fill(~kept, 0)
    top_p = settings.top_p[rows.owner].unsqueeze(1)
    reached = (weights.cumsum(1) - weights).double()  # by the tokens before
    share = weights.sum(1, keepdim=True).double() * top_p
    kept &= (reached < share) | (top_p >= 1.0)
    return torch.zeros_like(kept).scatter_(1, order, kept)


def _largest(raw: Tensor) -> tuple[Tensor, Tensor]:
    """The MAX_TOP likeliest ids of every row and their logits; -inf where a row has fewer."""
    num_rows, vocab_size = raw.shape
    bits = (raw + 0.0).view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # as the values are
    columns = torch.arange(vocab_size, device=raw.device)
    tagged = (ordered << 32) | (vocab_size - 1 - columns)
    count = min(MAX_TOP, vocab_size)
    ids = vocab_size - 1 - (tagged.topk(count, dim=1).values & 0xFFFFFFFF)
    logits = raw.gather(1, ids)
    if count < MAX_TOP:
        missing = num_rows, MAX_TOP - count
        ids = torch.cat([ids, ids.new_full(missing, NO_TOKEN)], 1)
        logits = torch.cat([logits, logits.new_full(missing, -math.inf)], 1)
    return ids, logits
