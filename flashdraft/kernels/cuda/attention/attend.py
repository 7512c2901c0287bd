"""Attention over pages, by the faster of two ways. It only chooses."""

from __future__ import annotations

from torch import Tensor

from flashdraft.kernels.cuda.attention.few_rows import attend_few
from flashdraft.kernels.cuda.attention.paged import paged_attention
from flashdraft.kernels.cuda.dense.rows import prepare_heads
from flashdraft.kernels.cuda.plan import DeviceLimits, plan_attention, plan_exact_attention
from flashdraft.kernels.interface import Heads, PagedKeys


def attention(query: Tensor, keys: PagedKeys, limits: DeviceLimits, exact: bool) -> Tensor:
    """`Kernels.attention`."""
    make_plan = plan_exact_attention if exact else plan_attention
    return paged_attention(query, keys, make_plan(query, keys, limits))


def attend(
    qkv: Tensor,
    heads: Heads,
    keys: PagedKeys,
    meetings: Tensor,
    limits: DeviceLimits,
    exact: bool,
) -> Tensor:
    """`Kernels.attend`; `meetings` as in few_rows.py."""
    if not exact:
        mixed = attend_few(qkv, heads, keys, meetings, limits)
        if mixed is not None:
            return mixed
    query = prepare_heads(qkv, heads, keys.key_cache, keys.value_cache, keys.view.slots)
    return attention(query, keys, limits, exact)
