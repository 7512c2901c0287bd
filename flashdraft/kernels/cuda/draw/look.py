# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Logits as the rule sees them: adjusted by a slot's settings, and scaled. Triton, CUDA only."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.cuda.dense.logits import finish
from flashdraft.kernels.cuda.draw.arithmetic import order
from flashdraft.kernels.draw import rule

BIASED = tl.constexpr(rule.BIASED)
PENALISED = tl.constexpr(rule.PENALISED)
STOPS_LATE = tl.constexpr(rule.STOPS_LATE)
USES_FACTS = tl.constexpr(rule.USES_FACTS)
PROMPT = tl.constexpr(rule.PROMPT)
STOP = tl.constexpr(rule.STOP)
COUNT = tl.constexpr(rule.COUNT)
LOWEST_TEMPERATURE = tl.constexpr(rule.LOWEST_TEMPERATURE)
LOWEST_FLOAT = tl.constexpr(torch.finfo(torch.float32).min)


class Look(NamedTuple):
    """What a kernel looks at: rows of a head's products, and their slots' settings (rule.py)."""

    products: Tensor
    multiplier: Tensor | None  # [1] float32, both: what is None costs nothing
    softcap: Tensor | None
    forbidden: Tensor | None  # [vocab] uint8
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    least: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    free_from: Tensor
    noise: Tensor
    num_top: Tensor
    flags: Tensor
    facts: Tensor
    bias: Tensor
    owner: Tensor
    positions: Tensor
    followed: Tensor  # unread without drafts
    ancestors: Tensor
    masks: Tensor  # unread without masks
    mask_of: Tensor


def make_look(head: rule.HeadProducts, settings: rule.SlotSettings, rows: rule.DrawnRows) -> Look:
    """The tensors behind a draw, which lie in memory row after row."""
    unread, products, banned = rows.owner, head.products.contiguous(), head.forbidden
    assert all(
        one is None or one.is_contiguous()
        for one in (rows.followed, rows.ancestors, rows.masks, rows.mask_of, banned)
    )
    return Look(
        products,
        None if head.multiplier == 1.0 else _on_device(head.multiplier, products.device),
        None if head.softcap is None else _on_device(head.softcap, products.device),
        None if banned is None else banned.view(torch.uint8),
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.least,
        settings.repetition,
        settings.presence,
        settings.frequency,
        settings.free_from,
        settings.noise,
        settings.num_top,
        settings.flags,
        settings.facts,
        settings.bias,
        rows.owner,
        rows.positions,
        unread if rows.followed is None else rows.followed,
        unread if rows.ancestors is None else rows.ancestors,
        unread if rows.masks is None else rows.masks,
        unread if rows.mask_of is None else rows.mask_of,
    )


@functools.lru_cache(maxsize=64)
def _on_device(number: float, device: torch.device) -> Tensor:
    """Sent once: a graph could not."""
    return torch.tensor([number], device=device)


@triton.jit
def load_raw(look: tl.tensor, row: tl.tensor, ids: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    """Logits in float32; -inf behind the vocabulary, and +inf for NaN, which is as bad."""
    real = ids < vocab_size
    x = tl.load(look.products + row * vocab_size + ids, mask=real, other=float("-inf"))
    multiplier = 1.0 if look.multiplier is None else tl.load(look.multiplier)
    if look.softcap is None:
        x = finish(x, multiplier, 1.0, False)
    else:
        x = tl.where(real, finish(x, multiplier, tl.load(look.softcap), True), float("-inf"))
    x = tl.where(x != x, float("inf"), x)
    if look.forbidden is not None:
        banned = tl.load(look.forbidden + ids, mask=real, other=1)
        x = tl.where(banned != 0, float("-inf"), x)
    return x


@triton.jit
def is_adjusted(look: tl.tensor, row: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    """Whether `adjust` may change anything in a row."""
    changes = tl.load(look.flags + tl.load(look.owner + row)) != 0
    if MASKED:
        changes = changes | (tl.load(look.mask_of + row) >= 0)
    return changes


@triton.jit
def adjust(
    look: tl.tensor,
    row: tl.tensor,
    x: tl.tensor,
    ids: tl.tensor,
    vocab_size: tl.tensor,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Steps 1 to 4 of the rule. Rows follow draft tokens if WIDTH, and may have masks if MASKED."""
    real = ids < vocab_size
    if MASKED:
        mask = tl.load(look.mask_of + row)
        if mask >= 0:
            num_words = (vocab_size + 31) // 32
            words = tl.load(look.masks + mask * num_words + (ids >> 5), mask=real, other=0)
            x = tl.where(((words >> (ids & 31)) & 1) != 0, x, float("-inf"))
    slot = tl.load(look.owner + row)
    flags = tl.load(look.flags + slot)
    if (flags & BIASED) != 0:
        x = x + tl.load(look.bias + slot * vocab_size + ids, mask=real, other=0.0)
    if (flags & USES_FACTS) != 0:
        facts = tl.load(look.facts + slot * vocab_size + ids, mask=real, other=0)
        is_early = tl.load(look.positions + row) < tl.load(look.free_from + slot)
        waits = is_early & ((flags & STOPS_LATE) != 0)
        x = tl.where(((facts & STOP) != 0) & waits, float("-inf"), x)
        if (flags & PENALISED) != 0:
            counts = facts & COUNT
            if WIDTH > 0:
                drafted = look.followed + slot * WIDTH
                left = (tl.load(look.ancestors + row) >> 1) & ((1 << WIDTH) - 1)  # never below 0
                while left != 0:
                    if (left & 1) != 0:
                        counts += (ids == tl.load(drafted)).to(tl.int32)
                    left >>= 1
                    drafted += 1
            repetition = tl.load(look.repetition + slot)
            y = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
            y = tl.where((counts > 0) | ((facts & PROMPT) != 0), y, x)
            y = y - counts.to(tl.float32) * tl.load(look.frequency + slot)
            x = tl.where(counts > 0, y - tl.load(look.presence + slot), y)
    return x


@triton.jit
def scale(look: tl.tensor, row: tl.tensor, x: tl.tensor, peak: tl.tensor) -> tl.tensor:
    """Step 5: adjusted logits relative to their largest."""
    heat = tl.load(look.temperature + tl.load(look.owner + row))
    return tl.div_rn(x - peak, tl.maximum(heat, LOWEST_TEMPERATURE)) + 0.0


@triton.jit
def least_key(look: tl.tensor, slot: tl.tensor) -> tl.tensor:
    """The order of the least scaled logit that min-p lets pass; -inf never passes.

    Where a mask leaves few tokens, all others would be kept for the last places of a top-k.
    """
    return order(tl.maximum(tl.load(look.least + slot), LOWEST_FLOAT))


@triton.jit
def load_scaled(
    look: tl.tensor,
    row: tl.tensor,
    ids: tl.tensor,
    peak: tl.tensor,
    vocab_size: tl.tensor,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Logits after step 5; -inf behind the vocabulary."""
    x = load_raw(look, row, ids, vocab_size)
    x = adjust(look, row, x, ids, vocab_size, WIDTH, MASKED)
    return scale(look, row, x, peak)
