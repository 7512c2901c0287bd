"""The native CPU backend: the Python face of the C kernels in native/.

This module owns packing, memory and the checks without which a wrong tensor would crash the
process; the arithmetic is in C. It keeps the exactness contract (interface.py) at full speed. The
extension module may be absent (no compiler at install time): ask `available` first.

The kernels run on as many OpenMP threads as torch uses when `CpuKernels` is constructed; call
`torch.set_num_threads` before that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashdraft.kernels.interface import Activation, BlockMask, PageView, QKVSpec, RopeTable
from flashdraft.kernels.torch_backend import mix_experts

try:
    from flashdraft.kernels import _native  # torch is loaded first: both then share one OpenMP
except ImportError:
    _native = None

_BLOCK = 16  # 8-bit inputs per step; BLOCK in native/linear_int8.c
_LARGEST = 127
_MOST_INPUTS = 65536  # a longer sum of 8-bit products could overflow 32 bits


def available() -> bool:
    """Whether the native kernels were built for this installation."""
    return _native is not None


@dataclass(frozen=True)
class FloatWeight:
    """A weight in panels of 8 or 16 outputs: [panels, in, panel] float32, padded with zeros."""

    panels: Tensor
    in_features: int
    out_features: int

    def multiply(self, x: int, y: int, rows: int, threads: int) -> None:
        """y = x @ weight.T for addresses of dense rows."""
        _native.linear_float(
            x, self.panels.data_ptr(), y, rows, self.in_features, self.out_features, threads
        )


@dataclass(frozen=True)
class Int8Weight:
    """A weight in 8 bits with one scale per output and group of inputs.

    panels [panels, padded_in / 4, panel, 4] int8; scale and start [panels, groups, panel]: start is
    -128 * (the group's sum of weights), for processors that multiply unsigned activations.
    """

    panels: Tensor
    scale: Tensor
    start: Tensor
    in_features: int
    out_features: int
    group: int

    def multiply(self, x: int, y: int, rows: int, threads: int) -> None:
        """y = x @ weight.T for addresses of dense rows."""
        _native.linear_int8(
            x,
            self.panels.data_ptr(),
            self.scale.data_ptr(),
            self.start.data_ptr(),
            y,
            rows,
            self.in_features,
            self.out_features,
            self.group,
            threads,
        )


class CpuKernels:
    """Kernels in float32, with weights and linear inputs in 8 bits if `quantize`."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, quantize: bool, group: int | None = None) -> None:
        if _native is None:
            raise RuntimeError(
                "The native CPU kernels are not built; install flashdraft where a C compiler is, "
                "or use the torch backend."
            )
        self.name = "cpu-int8" if quantize else "cpu-float32"
        self._quantize = quantize
        self._group = group
        self._threads = torch.get_num_threads()
        self._facts = _Facts()

    def pack(self, weight: Tensor, quantize: bool = True) -> FloatWeight | Int8Weight:
        weight = weight.detach().to("cpu", torch.float32)
        if self._quantize and quantize:
            return _pack_int8(weight, self._group)
        return _pack_float(weight)

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
        _native.rms_norm(_address(x), scale, out.data_ptr(), rows, columns, eps, self._threads)
        return out

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        rows, columns = x.shape
        total, out = torch.empty(rows, columns), torch.empty(rows, columns)
        _native.add_rms_norm(
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
            raise ValueError(f"A row of [gate | up] has an even number of features, not {features}.")
        columns = features // 2
        out = torch.empty(rows, columns)
        kind = 0 if activation is Activation.SILU else 1
        _native.gated(_address(gate_up), out.data_ptr(), rows, columns, kind, self._threads)
        return out

    def prepare_qkv(
        self,
        qkv: Tensor,
        spec: QKVSpec,
        rope: RopeTable,
        positions: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> Tensor:
        rows, width = qkv.shape
        layer = self._facts.about(spec, _read_spec)
        table = self._facts.about(rope, _read_rope)
        cache_size = key_cache.numel()
        if width != layer.width or layer.dim != 2 * table.half or cache_size % layer.stride:
            raise ValueError(
                f"{layer} does not fit qkv {tuple(qkv.shape)}, {table} and a cache of "
                f"{tuple(key_cache.shape)}."
            )
        query = torch.empty(rows, spec.num_heads, layer.dim)
        _native.prepare_qkv(
            _address(qkv),
            _address(positions, torch.int64, rows),
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

    def attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        view: PageView,
        *,
        scale: float,
        window: int | None,
        mask: BlockMask,
    ) -> Tensor:
        rows, heads, dim = query.shape
        pages, page_size, kv_heads, cache_dim = key_cache.shape
        batch = self._facts.about(view, _read_view)
        if cache_dim != dim or heads % kv_heads or page_size != view.page_size:
            raise ValueError(
                f"Queries {tuple(query.shape)} and pages of {view.page_size} do not fit a cache of "
                f"{tuple(key_cache.shape)}."
            )
        if window is not None and window < 1:
            raise ValueError(f"The window is {window}; it must be at least 1, or None.")
        seen, seen_width = 0, 0
        if mask.explicit is not None:
            seen_width = mask.explicit.shape[-1]
            seen = _address(mask.explicit, torch.bool, batch.num_seqs * seen_width**2)
        out = torch.empty(rows, heads * dim)
        _native.attention(
            _address(query),
            _address(key_cache),
            _address(value_cache, size=key_cache.numel()),
            out.data_ptr(),
            rows,
            heads,
            kv_heads,
            dim,
            pages,
            seen,
            seen_width,
            scale,
            window or 0,
            mask.causal,
            self._threads,
            *batch.arguments,
        )
        return out

    def softmax(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        _native.softmax(_address(x), out.data_ptr(), *x.shape, self._threads)
        return out

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        out = torch.empty_like(x)
        _native.softcap(_address(x), out.data_ptr(), *x.shape, cap, self._threads)
        return out

    def argmax(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], dtype=torch.int64)
        _native.argmax(_address(x), out.data_ptr(), *x.shape, self._threads)
        return out

    def experts(
        self,
        x: Tensor,
        gate_up: list[Any],
        down: list[Any],
        chosen: Tensor,
        weights: Tensor,
        activation: Activation,
    ) -> Tensor:
        return mix_experts(self, x, gate_up, down, chosen, weights, activation)


def _address(tensor: Tensor, dtype: torch.dtype = torch.float32, size: int | None = None) -> int:
    """Where a tensor's data lies, if it has the layout (and number of elements) a kernel expects."""
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


def _in_panels(weight: Tensor) -> Tensor:
    """[out, in] -> [panels, panel, in]: an even number of panels, padded with zeros."""
    padding = -weight.shape[0] % (2 * _native.PANEL)
    return F.pad(weight, (0, 0, 0, padding)).view(-1, _native.PANEL, weight.shape[1])


def _pack_float(weight: Tensor) -> FloatWeight:
    panels = _in_panels(weight).transpose(1, 2).contiguous()
    return FloatWeight(panels, weight.shape[1], weight.shape[0])


def _pack_int8(weight: Tensor, group: int | None) -> Int8Weight:
    """Round to 8 bits, group by group of `group` inputs (None: the whole row is one group)."""
    out_features, in_features = weight.shape
    if in_features > _MOST_INPUTS:
        raise ValueError(f"8-bit weights have at most {_MOST_INPUTS} inputs, not {in_features}.")
    padded_in = in_features + -in_features % _BLOCK
    group = padded_in if group is None else min(group, padded_in)
    padded = F.pad(weight, (0, -in_features % group))  # the last group may be short
    grouped = padded.view(out_features, -1, group)
    scale = grouped.abs().amax(-1) / _LARGEST
    rounded = (grouped / scale.clamp(min=1e-30).unsqueeze(-1)).round_()
    rounded = rounded.clamp_(-_LARGEST, _LARGEST)
    start = rounded.sum(-1).mul_(-128).to(torch.int32)
    values = rounded.to(torch.int8).view(out_features, -1)[:, :padded_in]
    panels = _in_panels(values).view(-1, _native.PANEL, padded_in // 4, 4).transpose(1, 2).contiguous()
    scale = _in_panels(scale).transpose(1, 2).contiguous()
    start = _in_panels(start).transpose(1, 2).contiguous()
    return Int8Weight(panels, scale, start, in_features, out_features, group)
