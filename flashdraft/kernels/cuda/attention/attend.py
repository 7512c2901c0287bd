"""Attention over pages, by the fastest of three ways. It only chooses."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flashdraft.kernels.cuda.attention.few_rows import MAX_MEETINGS, attend_few
from flashdraft.kernels.cuda.attention.many_rows import MAX_PLACES, attend_many
from flashdraft.kernels.cuda.attention.paged import paged_attention
from flashdraft.kernels.cuda.dense.rows import prepare_heads
from flashdraft.kernels.cuda.plan import DeviceLimits, plan_attention, plan_exact_attention
from flashdraft.kernels.interface import Heads, PagedKeys


def make_meetings(device: torch.device) -> Tensor:
    """Where blocks of one launch meet: zeros before the first call, and of no other use.

    Both ways have places of their own: `attend_few` counts on, `attend_many` leaves zeros behind.
    """
    return torch.zeros(MAX_MEETINGS + MAX_PLACES, device=device, dtype=torch.int32)


def attention(
    query: Tensor, keys: PagedKeys, meetings: Tensor, limits: DeviceLimits, exact: bool
) -> Tensor:
    """`Kernels.attention`; `meetings` from `make_meetings`."""
    if not exact:
        found = attend_many(query, keys, meetings[MAX_MEETINGS:], limits)
        if found is not None:
            return found
    make_plan = plan_exact_attention if exact else plan_attention
    num_rows, num_heads, head_dim = query.shape
    output = query.new_empty(num_rows, num_heads * head_dim)
    for view in keys.view.parts or (keys.view,):
        part = replace(keys, view=view)
        paged_attention(query, part, make_plan(query, part, limits), output)
    return output


def attend(
    qkv: Tensor,
    heads: Heads,
    keys: PagedKeys,
    meetings: Tensor,
    limits: DeviceLimits,
    exact: bool,
) -> Tensor:
    """`Kernels.attend`; `meetings` from `make_meetings`."""
    if not exact:
        found = attend_few(qkv, heads, keys, meetings, limits)
        if found is not None:
            return found
    query = prepare_heads(qkv, heads, keys.key_cache, keys.value_cache, keys.view.slots)
    return attention(query, keys, meetings, limits, exact)
