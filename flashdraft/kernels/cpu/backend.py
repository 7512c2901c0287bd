"""The native CPU backend: the Python face of the C kernels in native/.

This module owns packing, memory and the checks without which a wrong tensor would crash the
process; the arithmetic is in C, built for the level of processors that levels.py chose. It keeps
the exactness contract (interface.py) at full speed. The kernels may be absent (no compiler at
install time): ask `available` first.

The kernels run on a small thread pool of their own (native/pool.h), with as many threads as torch
uses when `CpuKernels` is constructed; call `torch.set_num_threads` before that.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashdraft.kernels.composed import ComposedKernels
from flashdraft.kernels.cpu import levels
from flashdraft.kernels.cpu.weights import FloatWeight, Int8Weight
from flashdraft.kernels.interface import (
    Heads,
    PagedKeys,
    PageView,
    QKVSpec,
    RopeTable,
)
from flashdraft.kernels.kinds import Activation
from flashdraft.kernels.quantized import Matrix, join_floats


def available() -> bool:
    """Whether the native kernels were built for this installation."""
    return levels.chosen() is not None


class CpuKernels(ComposedKernels):
    """Kernels in float32, with weights and linear inputs in 8 bits if `quantize`."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, quantize: bool) -> None:
        level = levels.chosen()
        if level is None:
            raise RuntimeError(
                "The native CPU kernels are not built; install flashdraft where a C compiler is, "
                "or use the torch backend."
            )
        self.weight_dtype = "int8" if quantize else "float32"
        self.name = f"cpu-{self.weight_dtype}"
        who = f"flashdraft's native CPU kernels ({self.name})"
        self.why_no_fp8_cache = (
            f"{who} read float32 only; use a GPU, or dtype='bfloat16', which is plain torch on a "
            "CPU and slow"
        )
        self.why_no_rebuilt_keys = (
            f"{who} read stored keys only; for a Gemma 4 whose full layers share key and value "
            "use a GPU, or dtype='bfloat16', which is plain torch on a CPU and slow; for any other "
            "model"
        )
        self.level = level
        self._native = levels.load(level)
        self._quantize = quantize
        self._threads = torch.get_num_threads()
        self._facts = _Facts()

    def pack(self, *parts: Matrix, quantize: bool = True) -> FloatWeight | Int8Weight:
        weight = join_floats(parts, self.device, self.dtype)
        if self._quantize and quantize:
            return Int8Weight.pack(self._native, weight, self._threads)
        return FloatWeight.pack(self._native, weight)

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        rows, inputs = x.shape
        if inputs != weight.in_features:
            raise ValueError(f"The weight has {weight.in_features} inputs, x has {inputs}.")
        y = torch.empty(rows, weight.out_features)
        weight.multiply(_address(x), y.data_ptr(), rows, self._threads)
        return y

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        out = torch.empty_like(x)
        columns = x.shape[-1]
        scale = 0 if weight is None else _address(weight, size=columns)
        rows = x.numel() // columns
        self._native.rms_norm(_address(x), scale, out.data_ptr(), rows, columns, eps, self._threads)
        return out

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        rows, columns = x.shape
        total, out = torch.empty(rows, columns), torch.empty(rows, columns)
        self._native.add_rms_norm(
            _address(x),
            _address(delta, size=rows * columns),
            _address(weight, size=columns),
            total.data_ptr(),
            out.data_ptr(),
            rows,
            columns,
            eps,
            self._threads,
        )
        return total, out

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        rows, features = gate_up.shape
        if features % 2:
            raise ValueError(
                f"A row of [gate | up] has an even number of features, not {features}."
            )
        columns = features // 2
        out = torch.empty(rows, columns)
        kind = 0 if activation is Activation.SILU else 1
        self._native.gated(_address(gate_up), out.data_ptr(), rows, columns, kind, self._threads)
        return out

    def prepare_qkv(
        self,
        qkv: Tensor,
        heads: Heads,
        key_cache: Tensor | None,
        value_cache: Tensor,
        slots: Tensor,
    ) -> Tensor:
        rows, width = qkv.shape
        assert key_cache is not None, "the engine refuses to rebuild keys on these kernels"
        layer = self._facts.about(heads.spec, _read_spec)
        table = self._facts.about(heads.rope, _read_rope)
        cache_size = key_cache.numel()
        if width != layer.width or layer.dim != 2 * table.half or cache_size % layer.stride:
            raise ValueError(
                f"{layer} does not fit qkv {tuple(qkv.shape)}, {table} and a cache of "
                f"{tuple(key_cache.shape)}."
            )
        query = torch.empty(rows, heads.spec.num_heads, layer.dim)
        self._native.prepare_qkv(
            _address(qkv),
            _address(heads.positions, torch.int64, rows),
            _address(slots, torch.int64, rows),
            _address(key_cache),
            _address(value_cache, size=cache_size),
            query.data_ptr(),
            rows,
            cache_size // layer.stride,
            self._threads,
            *table.arguments,
            *layer.arguments,
        )
        return query

    def attention(self, query: Tensor, keys: PagedKeys) -> Tensor:
        rows, heads, dim = query.shape
        key_cache, view, window, mask = keys.key_cache, keys.view, keys.window, keys.mask
        assert key_cache is not None, "the engine refuses to rebuild keys on these kernels"
        pages, page_size, kv_heads, cache_dim = key_cache.shape
        batch = self._facts.about(view, _read_view)
        if cache_dim != dim or not heads or heads % kv_heads or page_size != view.page_size:
            raise ValueError(
                f"Queries {tuple(query.shape)} and pages of {view.page_size} do not fit a cache of "
                f"{tuple(key_cache.shape)}."
            )
        if window is not None and window < 1:
            raise ValueError(f"The window is {window}; it must be at least 1, or None.")
        ancestors, depths = 0, 0
        if mask.trees is not None:
            ancestors = _address(mask.trees.ancestors, torch.int64, rows)
            depths = _address(mask.trees.depths, torch.int32, rows)
        ahead = 0 if mask.ahead is None else _address(mask.ahead, torch.int32, rows)
        out = torch.empty(rows, heads * dim)
        self._native.attention(
            _address(query),
            _address(key_cache),
            _address(keys.value_cache, size=key_cache.numel()),
            out.data_ptr(),
            rows,
            heads,
            kv_heads,
            dim,
            pages,
            ancestors,
            depths,
            ahead,
            keys.scale,
            window or 0,
            mask.causal,
            self._threads,
            *batch.arguments,
        )
        return out

    def softmax(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._native.softmax(_address(x), out.data_ptr(), *x.shape, self._threads)
        return out

    def finish_logits(
        self,
        products: Tensor,
        multiplier: float = 1.0,
        softcap: float | None = None,
        forbidden: Tensor | None = None,
    ) -> Tensor:
        logits = products if multiplier == 1.0 else products * multiplier
        if softcap is not None:
            out, size = torch.empty_like(logits), logits.shape
            self._native.softcap(_address(logits), out.data_ptr(), *size, softcap, self._threads)
            logits = out
        if forbidden is None:
            return logits
        columns = self._facts.about(forbidden, _read_columns)
        return logits.index_fill_(1, columns, -math.inf)

    def argmax(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], dtype=torch.int64)
        self._native.argmax(_address(x), out.data_ptr(), *x.shape, self._threads)
        return out


def _address(tensor: Tensor, dtype: torch.dtype = torch.float32, size: int | None = None) -> int:
    """Where a tensor's data lies, if it has the layout and the number of elements expected."""
    if (
        tensor.dtype is not dtype
        or not tensor.is_contiguous()
        or not tensor.is_cpu
        or (size is not None and tensor.numel() != size)
    ):
        wanted = "" if size is None else f" of {size} elements"
        raise ValueError(
            f"The CPU kernels need a contiguous {dtype} tensor{wanted} on the CPU, not "
            f"{tuple(tensor.shape)} of {tensor.dtype} with strides {tensor.stride()} on "
            f"{tensor.device}."
        )
    return tensor.data_ptr()


class _Facts:
    """What was read from objects that live for many calls, for as long as each of them lives.

    A decode step makes hundreds of calls of a few microseconds; asking the same tensors for their
    shapes every time would cost more than the small kernels themselves.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def about(self, thing: Any, read: Callable[[Any], Any]) -> Any:
        """read(thing), once for each thing."""
        key = id(thing)
        entry = self._known.get(key)
        if entry is None or entry[0]() is not thing:
            forget = self._known.pop
            entry = (weakref.ref(thing, lambda _: forget(key, None)), read(thing))
            self._known[key] = entry
        return entry[1]


@dataclass(frozen=True)
class _Layer:
    width: int
    dim: int
    stride: int  # floats of one token in a cache
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class _Table:
    half: int
    arguments: tuple[int, ...]


@dataclass(frozen=True)
class _Batch:
    num_seqs: int
    arguments: tuple[int, ...]


def _read_columns(forbidden: Tensor) -> Tensor:
    return forbidden.nonzero().squeeze(1)


def _read_spec(spec: QKVSpec) -> _Layer:
    dim = spec.head_dim
    arguments = (
        0 if spec.q_norm is None else _address(spec.q_norm, size=dim),
        0 if spec.k_norm is None else _address(spec.k_norm, size=dim),
        spec.num_heads,
        spec.num_kv_heads,
        dim,
        int(spec.v_norm),
        int(spec.share_kv),
        spec.eps,
    )
    return _Layer(spec.width, dim, spec.num_kv_heads * dim, arguments)


def _read_rope(rope: RopeTable) -> _Table:
    positions, half = rope.cos.shape
    return _Table(half, (_address(rope.cos), _address(rope.sin, size=positions * half), positions))


def _read_view(view: PageView) -> _Batch:
    num_seqs, table_width = view.block_table.shape
    arguments = (
        _address(view.query_start, torch.int32, num_seqs + 1),
        _address(view.context_lens, torch.int32, num_seqs),
        _address(view.block_table, torch.int32),
        num_seqs,
        table_width,
        view.page_size,
    )
    return _Batch(num_seqs, arguments)
