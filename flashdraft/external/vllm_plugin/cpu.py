"""Three faults of vLLM on a CPU, which only show with a drafter, mended.

1. A request's temperature and top_p are spread over its draft rows by a kernel for whole numbers;
   the fractions' result goes into a copy that is thrown away, and what was in the memory before
   is taken for the temperature.
2. With top_k and no top_p, a step without draft rows (every prefill) takes the maximum of nothing,
   and the engine dies.
3. The context's keys of all the drafter's layers are normed in one call with a weight for each
   layer; the CPU's kernel takes the first layer's weight for all, and drafts get worse.

The first two are replaced before the worker looks them up, since plugins are loaded first; the
third in the model at hand (draft_model.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

KERNELS = "vllm.utils.cpu_triton_utils"
SAMPLER = "vllm.v1.sample.ops.topk_topp_sampler"


def mend() -> None:
    """Replace the sampler's two functions; a second call finds them replaced."""
    kernels: Any = importlib.import_module(KERNELS)
    sampler: Any = importlib.import_module(SAMPLER)
    if kernels._expand_kernel_impl is not expand_rows:
        kernels._expand_kernel_impl = expand_rows
    if not isinstance(sampler.apply_top_k_only, RowsOrNothing):
        sampler.apply_top_k_only = RowsOrNothing(sampler.apply_top_k_only)


def expand_rows(
    output: Tensor,
    values: Tensor,
    ends: Tensor,
    replace_from: float,
    replace_to: float,
    max_rows: int | None = None,
) -> None:
    """Write each request's value into all its rows, of whatever dtype; `ends` counts rows."""
    counts = torch.diff(ends.long(), prepend=ends.new_zeros(1, dtype=torch.long))
    values = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    rows = torch.repeat_interleave(values, counts)
    output[: rows.shape[0]] = rows


class RowsOrNothing:
    """A function of logits and something for each of their rows that is spared the empty case."""

    def __init__(self, function: Callable[[Tensor, Any], Tensor]) -> None:
        self._function = function

    def __call__(self, logits: Tensor, per_row: Any) -> Tensor:
        return self._function(logits, per_row) if logits.shape[0] else logits


def mend_context_norm(model: Any) -> None:
    """Let vLLM's inner drafter model norm each layer's keys by that layer's weight."""
    model._normalize_context_k = partial(norm_context_keys, model)


def norm_context_keys(model: Any, keys: Tensor) -> Tensor:
    """RMS norm of [num_layers, num_rows, num_kv_heads, head_dim]."""
    wide = keys.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + model._rms_norm_eps)
    return (scaled * model._k_norm_weights[:, None, None].float()).to(keys.dtype)
