"""The reference backend: plain torch, on any device. Every other backend is tested against it.

On the CPU each row is computed by itself, which keeps the exactness contract (interface.py) at the
price of speed: this is what runs where the native kernels could not be built.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashdraft.kernels.composed import ComposedKernels
from flashdraft.kernels.interface import (
    MAX_TREE,
    Heads,
    Kernels,
    KeyRebuild,
    PagedKeys,
    PageView,
    WholeSequences,
)
from flashdraft.kernels.kinds import Activation
from flashdraft.kernels.quantized import LARGEST_FP8, Matrix, join_floats

FP8 = torch.float8_e4m3fn  # of a cache in 8 bits
MAX_FLASH_DIM = 256


class TorchKernels(ComposedKernels):
    """Reference kernels in float32, bfloat16 or float16."""

    name = "torch"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.weight_dtype = str(dtype).removeprefix("torch.")
        self._row_by_row = device.type == "cpu"

    def _rows(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply a row-wise function: one row at a time on the CPU, all at once elsewhere."""
        if not self._row_by_row or x.shape[0] < 2:
            return function(x)
        return torch.cat([function(x[i : i + 1]) for i in range(x.shape[0])])

    def pack(self, *parts: Matrix, quantize: bool = True) -> Any:
        return join_floats(parts, self.device, self.dtype)

    def pack_embedding(self, matrix: Matrix, head: Any | None) -> Any:
        return self.pack(matrix) if head is None else head  # a packed head is the table itself

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        return self._rows(lambda rows: F.linear(rows, weight), x)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        def norm(rows: Tensor) -> Tensor:
            y = rows.float()
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
            return (y if weight is None else y * weight.float()).to(rows.dtype)

        return self._rows(norm, x.reshape(-1, x.shape[-1])).view(x.shape)

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + delta
        return total, self.rms_norm(total, weight, eps)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        def gate(rows: Tensor) -> Tensor:
            left, right = rows.chunk(2, dim=-1)
            if activation is Activation.SILU:
                return F.silu(left) * right
            return F.gelu(left, approximate="tanh") * right

        return self._rows(gate, gate_up)

    def prepare_qkv(
        self,
        qkv: Tensor,
        heads: Heads,
        key_cache: Tensor | None,
        value_cache: Tensor,
        slots: Tensor,
    ) -> Tensor:
        spec, rope, positions = heads.spec, heads.rope, heads.positions
        rows = qkv.view(qkv.shape[0], -1, spec.head_dim)
        query = rows[:, : spec.num_heads]
        key = rows[:, spec.num_heads : spec.num_heads + spec.num_kv_heads]
        value = key if spec.share_kv else rows[:, spec.num_heads + spec.num_kv_heads :]
        if spec.q_norm is not None and spec.num_heads:
            query = self.rms_norm(query, spec.q_norm, spec.eps)
        if spec.v_norm:
            value = self.rms_norm(value, None, spec.eps)
        _write_slots(value_cache, slots, value)
        cos, sin = rope.cos[positions].unsqueeze(1), rope.sin[positions].unsqueeze(1)
        if key_cache is not None:
            if spec.k_norm is not None:
                key = self.rms_norm(key, spec.k_norm, spec.eps)
            _write_slots(key_cache, slots, _rotate(key, cos, sin))
        return _rotate(query, cos, sin)

    def attention(self, query: Tensor, keys: PagedKeys) -> Tensor:
        view, scale = keys.view, keys.scale
        starts, contexts = view.query_start.tolist(), view.context_lens.tolist()
        outputs = []
        for s, context in enumerate(contexts):
            rows = query[starts[s] : starts[s + 1]]
            if rows.shape[0] == 0:
                continue
            num_keys = context + rows.shape[0]
            values = _read_pages(keys.value_cache, view, s, num_keys)
            if keys.rebuild is None:
                assert keys.key_cache is not None, "neither keys nor how to make them"
                found = _read_pages(keys.key_cache, view, s, num_keys)
            else:
                positions = _key_positions(keys, range(starts[s], starts[s + 1]), context)
                found = _rebuild_keys(values, positions, keys.rebuild, query.dtype)
            visible = _visible(keys, s, range(starts[s], starts[s + 1]), context)
            if self._row_by_row:
                for i in range(rows.shape[0]):
                    outputs.append(_attend_row(rows[i], found, values, visible[i], scale))
            else:
                outputs.append(_attend(rows, found, values, visible, scale))
        merged = torch.cat(outputs) if outputs else query
        return merged.reshape(query.shape[0], query.shape[1] * query.shape[2])

    def attend_whole(
        self, qkv: Tensor, heads: Heads, sequences: WholeSequences, scale: float
    ) -> Tensor:
        return attend_whole(self, qkv, heads, sequences, scale)

    def softmax(self, x: Tensor) -> Tensor:
        return self._rows(lambda rows: rows.float().softmax(-1), x)

    def finish_logits(
        self,
        products: Tensor,
        multiplier: float = 1.0,
        softcap: float | None = None,
        forbidden: Tensor | None = None,
    ) -> Tensor:
        logits = products.float()
        if multiplier != 1.0:
            logits = logits * multiplier
        if softcap is not None:
            logits = self._rows(lambda rows: torch.tanh(rows / softcap) * softcap, logits)
        return logits if forbidden is None else logits.masked_fill(forbidden, -math.inf)

    def argmax(self, x: Tensor) -> Tensor:
        return x.argmax(-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    left, right = x[..., :half].float(), x[..., half:].float()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


def _write_slots(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Store rows in the cache's dtype; 8 bits hold the largest value they can for a larger one."""
    if cache.dtype == FP8:  # what a plain cast makes of the others depends on torch's version
        rows = rows.clamp(-LARGEST_FP8, LARGEST_FP8)
    cache.view(-1, *cache.shape[2:])[slots] = rows.to(cache.dtype)


def _read_pages(cache: Tensor, view: PageView, s: int, num_keys: int) -> Tensor:
    """Keys or values 0 .. num_keys - 1 of sequence s in float32, which holds them exactly.

    A view where its pages lie in a row and the cache is in float32 itself.
    """
    num_pages = -(-num_keys // view.page_size)
    pages = view.block_table[s, :num_pages].long().clamp(min=0)
    tokens = cache.view(-1, *cache.shape[2:])
    if cache.device.type == "cpu" and num_pages:
        first = int(pages[0])
        if torch.equal(pages, torch.arange(first, first + num_pages)):
            return tokens[first * view.page_size : first * view.page_size + num_keys].float()
    return cache[pages].view(-1, *cache.shape[2:])[:num_keys].float()


def attend_whole(
    kernels: Kernels, qkv: Tensor, heads: Heads, sequences: WholeSequences, scale: float
) -> Tensor:
    """`Kernels.attend_whole`: no sequence changes another's bits."""
    rows, spec = qkv.shape[0], heads.spec
    assert spec.num_kv_heads == spec.num_heads
    keys, values = (qkv.new_empty(rows, 1, spec.num_heads, spec.head_dim) for _ in range(2))
    slots = torch.arange(rows, device=qkv.device)
    query = kernels.prepare_qkv(qkv, heads, keys, values, slots)
    if _has_flash(query):
        return _flash(query, keys.squeeze(1), values.squeeze(1), sequences, scale).flatten(1)
    mixed = torch.empty_like(query)
    starts = sequences.starts.tolist() if sequences.known is None else sequences.known
    for start, end in zip(starts, starts[1:], strict=False):
        # [1, heads, rows, head_dim]
        q, k, v = (
            part[start:end].transpose(0, 1).unsqueeze(0)
            for part in (query, keys.squeeze(1), values.squeeze(1))
        )
        if qkv.device.type == "cpu":  # whose kernel goes by where a sequence lies in memory
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        found = F.scaled_dot_product_attention(q, k, v, scale=scale)
        mixed[start:end] = found.squeeze(0).transpose(0, 1)
    return mixed.flatten(1)


def _has_flash(query: Tensor) -> bool:
    """Whether torch attends to many sequences at once, whose starts lie on the device."""
    is_half, head_dim = query.dtype in (torch.bfloat16, torch.float16), query.shape[-1]
    fits = is_half and head_dim % 8 == 0 and head_dim <= MAX_FLASH_DIM
    return fits and _can_flash(query.device)


@functools.cache
def _can_flash(device: torch.device) -> bool:
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _flash(
    query: Tensor, keys: Tensor, values: Tensor, sequences: WholeSequences, scale: float
) -> Tensor:
    """Attention of [num_rows, heads, head_dim], each row's by its sequence alone."""
    starts, longest = sequences.starts, sequences.longest
    lengths = starts, starts, longest, longest  # of queries and of keys
    dropout, causal, return_mask = 0.0, False, False
    found = torch.ops.aten._flash_attention_forward(
        query, keys, values, *lengths, dropout, causal, return_mask, scale=scale
    )
    attended: Tensor = found[0]
    return attended


def _key_positions(keys: PagedKeys, rows: range, context: int) -> Tensor:
    """Where the keys stand that a sequence of these rows sees."""
    positions = torch.arange(context + len(rows), device=keys.value_cache.device)
    if keys.mask.trees is not None:
        positions[context:] = context + keys.mask.trees.depths[rows.start : rows.stop]
    return positions


def _rebuild_keys(
    values: Tensor, positions: Tensor, rebuild: KeyRebuild, dtype: torch.dtype
) -> Tensor:
    """The keys of these values in float32, rounded to the dtype where `prepare_qkv` rounds."""
    cos, sin = (table[positions].unsqueeze(1) for table in (rebuild.rope.cos, rebuild.rope.sin))
    normed = (values * rebuild.weight.float()).to(dtype)
    return _rotate(normed, cos, sin).float()


def _visible(keys: PagedKeys, s: int, rows: range, context: int) -> Tensor:
    """[rows, context + rows] bool: which keys each row of sequence s sees."""
    mask, window, device = keys.mask, keys.window, keys.value_cache.device
    own = torch.arange(context, context + len(rows), device=device).unsqueeze(1)
    index = torch.arange(context + len(rows), device=device)
    seen = torch.ones(len(rows), context + len(rows), dtype=torch.bool, device=device)
    if mask.causal:
        last = own if mask.ahead is None else own + mask.ahead[rows.start : rows.stop, None]
        seen = index <= last
    if mask.trees is not None:
        ancestors, depths = (
            one[rows.start : rows.stop, None] for one in (mask.trees.ancestors, mask.trees.depths)
        )
        bits = ancestors >> (index - context).clamp(0, MAX_TREE - 1) & 1
        seen = seen & ((bits > 0) | (index < context) | (index >= context + MAX_TREE))
        own = context + depths
    if window is not None:
        seen = seen & (own - index < window)
        if not mask.causal:
            seen = seen & (index - own < window)
    return seen


def _attend_row(row: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    """One row over just the keys it sees, so that its arithmetic depends on nothing else."""
    if not bool(visible.all()):
        index = visible.nonzero().squeeze(1)
        low, high = int(index[0]), int(index[-1]) + 1
        if high - low == index.shape[0]:
            keys, values = keys[low:high], values[low:high]
        else:
            keys, values = keys[index], values[index]
    everything = torch.ones(1, keys.shape[0], dtype=torch.bool, device=row.device)
    return _attend(row.unsqueeze(0), keys, values, everything, scale)


def _attend(rows: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    num_rows, num_heads, head_dim = rows.shape
    num_kv = keys.shape[1]
    grouped = rows.float().view(num_rows, num_kv, num_heads // num_kv, head_dim)
    query = grouped.permute(1, 2, 0, 3).reshape(num_kv, -1, head_dim)  # [kv, group * rows, dim]
    scores = torch.bmm(query, keys.permute(1, 2, 0)) * scale  # [kv, group * rows, keys]
    scores = scores.view(num_kv, -1, num_rows, keys.shape[0])
    scores = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    out = torch.bmm(scores.view(num_kv, -1, keys.shape[0]), values.transpose(0, 1))
    out = out.view(num_kv, -1, num_rows, head_dim).permute(2, 0, 1, 3)
    return out.reshape(num_rows, num_heads * head_dim).to(rows.dtype)
