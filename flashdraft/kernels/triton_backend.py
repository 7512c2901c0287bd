"""The CUDA backend: Triton where fusing pays, torch for the rest. It only composes."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from flashdraft.kernels.interface import Activation, BlockMask, PageView, QKVSpec, RopeTable
from flashdraft.kernels.torch_backend import TorchKernels, mix_experts
from flashdraft.kernels.triton_attention import paged_attention
from flashdraft.kernels.triton_plan import DeviceLimits, plan_attention
from flashdraft.kernels.triton_rows import add_norm_rows, gate_rows, norm_rows, prepare_heads


class TritonKernels:
    """Triton attention, norms, gates and q/k/v preparation; torch's own linears and the rest.

    Attention reduces in a fixed order without atomics, but under a plan that depends on the batch,
    and torch's linears choose their kernel by the number of rows: the bits may depend on the width.
    """

    name = "triton"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._torch = TorchKernels(device, dtype)
        self._limits = _read_limits(device)

    def _on_device(self) -> contextlib.AbstractContextManager[None]:
        """Triton launches on the thread's current device, which need not be ours."""
        if self.device.type == "cuda":
            return torch.cuda.device(self.device)
        return contextlib.nullcontext()  # Triton's interpreter

    def pack(self, weight: Tensor, quantize: bool = True) -> Any:
        return self._torch.pack(weight, quantize)

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        return self._torch.linear(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        with self._on_device():
            return norm_rows(x, weight, eps)

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        with self._on_device():
            return add_norm_rows(x, delta, weight, eps)

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
        plan = plan_attention(query, key_cache, view, window, self._limits)
        with self._on_device():
            return paged_attention(
                query, key_cache, value_cache, view, plan, scale=scale, window=window, mask=mask
            )

    def softmax(self, x: Tensor) -> Tensor:
        return self._torch.softmax(x)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return self._torch.softcap(x, cap)

    def argmax(self, x: Tensor) -> Tensor:
        return self._torch.argmax(x)

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


def _read_limits(device: torch.device) -> DeviceLimits:
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        return DeviceLimits(
            properties.multi_processor_count, properties.shared_memory_per_block_optin
        )
    return DeviceLimits(num_processors=1, shared_bytes=227 * 1024)  # Triton's interpreter
