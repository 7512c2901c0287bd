"""The CUDA backend: Triton where fusing pays, torch for the rest. It only composes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashdraft.kernels.interface import Activation, Best, BlockMask, PageView, QKVSpec, RopeTable
from flashdraft.kernels.torch_backend import TorchKernels
from flashdraft.kernels.triton_attention import paged_attention
from flashdraft.kernels.triton_best import best_columns, best_of_logits
from flashdraft.kernels.triton_experts import mix_one_row
from flashdraft.kernels.triton_experts_plan import plan_exact_experts, plan_experts
from flashdraft.kernels.triton_few_rows import mix_few_rows
from flashdraft.kernels.triton_grouped import mix_rows
from flashdraft.kernels.triton_linear import multiply_rows
from flashdraft.kernels.triton_plan import (
    DeviceLimits,
    plan_attention,
    plan_best,
    plan_exact_attention,
    plan_exact_best,
    plan_exact_linear,
    plan_linear,
)
from flashdraft.kernels.triton_residual import residual_norm_rows
from flashdraft.kernels.triton_routing import choose_rows
from flashdraft.kernels.triton_rows import add_norm_rows, gate_rows, norm_rows, prepare_heads

MAX_TILES = 1 << 15
EXACT_ROWS = 1024
FUSED_HEAD_ROWS = 128  # more of them are multiplied faster by torch, which writes the logits
MAX_LOGITS_BYTES = 300 << 20


class TritonKernels:
    """Triton where it beats torch, on one stream at a time; torch's own operations for the rest.

    No kernel adds by atomics: the same call gives the same bits. But plans depend on the batch, and
    torch's linears choose their kernel by the number of rows, so a row's bits may depend on how
    many others there are. With `exact` they do not: every plan follows from the layer's shape.
    """

    name = "triton"

    def __init__(self, device: torch.device, dtype: torch.dtype, exact: bool = False) -> None:
        self.device = device
        self.dtype = dtype
        self.exact = exact
        self._torch = TorchKernels(device, dtype)
        self._limits = _read_limits(device)
        # Zero between calls; one for each of two linears that may run at the same time.
        self._counters = torch.zeros(2, MAX_TILES, device=device, dtype=torch.int32)
        self._arrivals = self._counters[0]
        self._side: Any = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def _on_device(self) -> contextlib.AbstractContextManager[None]:
        """Triton launches on the thread's current device, which need not be ours."""
        if self.device.type == "cuda":
            return torch.cuda.device(self.device)
        return contextlib.nullcontext()  # Triton's interpreter

    def pack(self, weight: Tensor, quantize: bool = True) -> Any:
        return self._torch.pack(weight, quantize)

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        sizes = (*weight.shape, weight.itemsize, self._limits)
        with self._on_device():
            plan = plan_exact_linear(*sizes) if self.exact else plan_linear(x.shape[0], *sizes)
            if plan is not None and x.shape[0] <= EXACT_ROWS:
                return multiply_rows(x, weight, plan, self._arrivals)
            if plan is not None:  # in pieces: the parts of a cut depth take memory for every row
                pieces = (x[i : i + EXACT_ROWS] for i in range(0, x.shape[0], EXACT_ROWS))
                return torch.cat([multiply_rows(p, weight, plan, self._arrivals) for p in pieces])
        return self._torch.linear(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        with self._on_device():
            return norm_rows(x, weight, eps)

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        with self._on_device():
            return add_norm_rows(x, delta, weight, eps)

    def residual_norms(
        self,
        x: Tensor,
        deltas: Sequence[tuple[Tensor, Tensor]],
        post: Tensor | None,
        scalar: Tensor | None,
        outputs: Sequence[Tensor],
        eps: float,
    ) -> tuple[Tensor, list[Tensor]]:
        with self._on_device():
            return residual_norm_rows(x, deltas, post, scalar, outputs, eps)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        with self._on_device():
            return gate_rows(gate_up, activation)

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
        with self._on_device():
            return prepare_heads(qkv, spec, rope, positions, key_cache, value_cache, slots)

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
        make_plan = plan_exact_attention if self.exact else plan_attention
        plan = make_plan(query, key_cache, view, window, self._limits)
        with self._on_device():
            return paged_attention(
                query, key_cache, value_cache, view, plan, scale=scale, window=window, mask=mask
            )

    def both(
        self, first: Callable[[], Tensor], second: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The second on a stream of its own; memory is safe, since both streams meet here."""
        if self._side is None:
            return first(), second()
        main = torch.cuda.current_stream(self.device)
        self._side.wait_stream(main)
        self._arrivals = self._counters[1]
        try:
            with torch.cuda.stream(self._side):
                beside = second()
        finally:
            self._arrivals = self._counters[0]
        result = first()
        main.wait_stream(self._side)
        return result, beside

    def softmax(self, x: Tensor) -> Tensor:
        return self._torch.softmax(x)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return self._torch.softcap(x, cap)

    def argmax(self, x: Tensor) -> Tensor:
        return self._torch.argmax(x)

    def best_columns(
        self, x: Tensor, weight: Any, multiplier: float = 1.0, softcap: float | None = None
    ) -> Best:
        if self.exact:
            plan = plan_exact_best(weight.itemsize, self._limits)
        else:
            plan = plan_best(x.shape[0], weight.itemsize, self._limits)
        with self._on_device():
            piece = MAX_LOGITS_BYTES // (weight.shape[0] * weight.itemsize)
            if self.exact or x.shape[0] <= FUSED_HEAD_ROWS or piece <= FUSED_HEAD_ROWS:
                return best_columns(x, weight, plan, multiplier, softcap)
            bests = [
                best_of_logits(self._torch.linear(x[i : i + piece], weight), multiplier, softcap)
                for i in range(0, x.shape[0], piece)
            ]
            if len(bests) == 1:
                return bests[0]
            return Best(
                torch.cat([best.index for best in bests]),
                torch.cat([best.logit for best in bests]),
                torch.cat([best.log_total for best in bests]),
            )

    def pack_experts(self, weight: Tensor) -> Tensor:
        return weight.to(self.device, self.dtype).contiguous()

    def choose_experts(
        self, logits: Tensor, num_chosen: int, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        with self._on_device():
            return choose_rows(logits, num_chosen, scale)

    def experts(
        self,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        chosen: Tensor,
        weights: Tensor,
        activation: Activation,
    ) -> Tensor:
        num_rows, num_chosen = chosen.shape
        plan = plan_experts(num_rows, num_chosen, gate_up.shape[0], x.itemsize)
        if self.exact:
            plan = plan_exact_experts(x.itemsize)
        inputs = (x.contiguous(), gate_up, down, chosen, weights, activation, plan)
        with self._on_device():
            if plan.block_m == 0:
                return mix_one_row(*inputs)
            if plan.splits:
                return mix_few_rows(*inputs, self._limits.num_processors)
            return mix_rows(*inputs, self._limits.num_processors)


def _read_limits(device: torch.device) -> DeviceLimits:
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        return DeviceLimits(
            properties.multi_processor_count, properties.shared_memory_per_block_optin
        )
    return DeviceLimits(num_processors=1, shared_bytes=227 * 1024)  # Triton's interpreter
