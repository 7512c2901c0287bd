"""Attention over pages, by the faster of two ways. It only chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashdraft.kernels.cuda.attention.few_rows import MAX_MEETINGS, attend_few
from flashdraft.kernels.cuda.attention.paged import paged_attention
from flashdraft.kernels.cuda.dense.rows import prepare_heads
from flashdraft.kernels.cuda.plan import DeviceLimits, plan_attention, plan_exact_attention
from flashdraft.kernels.interface import Heads, PagedKeys


def make_meetings(device: torch.device) -> Tensor:
    """Where blocks of one launch meet: zeros before the first call, and of no other use."""
    return torch.zeros(MAX_MEETINGS, device=device, dtype=torch.int32)


def attention(
    query: Tensor, keys: PagedKeys, limits: DeviceLimits, exact: bool, side: Any = None
) -> Tensor:
    """`Kernels.attention`; parts of a view take turns, or run side by side on a second stream.

    Memory is safe, since both streams meet here.
    """
    make_plan = plan_exact_attention if exact else plan_attention
    parts = [replace(keys, view=view) for view in keys.view.parts or (keys.view,)]
    num_rows, num_heads, head_dim = query.shape
    output = query.new_empty(num_rows, num_heads * head_dim)
    first, *others = [(part, make_plan(query, part, limits), output) for part in parts]
    if side is None or not others:
        for part in (first, *others):
            paged_attention(query, *part)
        return output
    main = torch.cuda.current_stream(query.device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        paged_attention(query, *first)
    for part in others:
        paged_attention(query, *part)
    main.wait_stream(side)
    return output


def attend(
    qkv: Tensor,
    heads: Heads,
    keys: PagedKeys,
    meetings: Tensor,
    limits: DeviceLimits,
    exact: bool,
    side: Any = None,
) -> Tensor:
    """`Kernels.attend`; `meetings` from `make_meetings`, `side` as for `attention`."""
    if not exact:
        mixed = attend_few(qkv, heads, keys, meetings, limits)
        if mixed is not None:
            return mixed
    query = prepare_heads(qkv, heads, keys.key_cache, keys.value_cache, keys.view.slots)
    return attention(query, keys, limits, exact, side)
