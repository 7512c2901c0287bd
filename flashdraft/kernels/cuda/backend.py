"""The CUDA backend: Triton where fusing pays, torch for the rest. It only composes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashdraft.kernels.activation import Activation
from flashdraft.kernels.composed import compose_mixture
from flashdraft.kernels.cuda.attention.few_rows import MAX_MEETINGS, attend_few
from flashdraft.kernels.cuda.attention.paged import paged_attention
from flashdraft.kernels.cuda.dense.best import best_columns, best_of_logits
from flashdraft.kernels.cuda.dense.linear import multiply_rows
from flashdraft.kernels.cuda.dense.residual import residual_norm_rows
from flashdraft.kernels.cuda.dense.rows import add_norm_rows, gate_rows, norm_rows, prepare_heads
from flashdraft.kernels.cuda.experts.few_rows import mix_few_rows
from flashdraft.kernels.cuda.experts.grouped import mix_rows
from flashdraft.kernels.cuda.experts.one_row import mix_one_row
from flashdraft.kernels.cuda.experts.plan import plan_exact_experts, plan_experts
from flashdraft.kernels.cuda.experts.quantized_one_row import mix_row
from flashdraft.kernels.cuda.experts.routing import choose_rows, route_rows
from flashdraft.kernels.cuda.plan import (
    DeviceLimits,
    plan_attention,
    plan_best,
    plan_exact_attention,
    plan_exact_best,
    plan_exact_linear,
    plan_linear,
)
from flashdraft.kernels.cuda.quantized.few_rows import multiply_normed
from flashdraft.kernels.cuda.quantized.layout import PackedWeight
from flashdraft.kernels.cuda.quantized.linear import dequantize
from flashdraft.kernels.cuda.quantized_backend import (
    FEW_EXPERT_ROWS,
    is_held,
    look_up,
    mix,
    multiply,
    pack_rows,
    pack_stack,
)
from flashdraft.kernels.interface import (
    Best,
    BlockMask,
    Choice,
    KeyRebuild,
    Mixture,
    PageView,
    QKVSpec,
    Residual,
    RopeTable,
)
from flashdraft.kernels.quantized import Matrix, Quantized, join_floats
from flashdraft.kernels.schemes import Scheme
from flashdraft.kernels.torch_backend import TorchKernels

MAX_TILES = 1 << 18
MIN_ROWS_BESIDE = 2  # one row takes less time than a fork and a join
MAX_ROWS_BESIDE = 64  # more rows keep the device busy with one thing at a time
EXACT_ROWS = 1024
MAX_ROUTED_ROWS = 4  # estimated: more of them keep two launches busy
FUSED_HEAD_ROWS = 128  # more of them are multiplied faster by torch, which writes the logits
MIN_QUANTIZED_VALUES = 1 << 22
MAX_LOGITS_BYTES = 300 << 20


class TritonKernels:
    """Triton where it beats torch, on one stream at a time; torch's own operations for the rest.

    No kernel adds by atomics: the same call gives the same bits. But plans depend on the batch, and
    torch's linears choose their kernel by the number of rows, so a row's bits may depend on how
    many others there are. With `exact` they do not: every plan follows from the layer's shape.
    """

    name = "triton"

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        exact: bool = False,
        quantize: Scheme | None = None,
        quantize_head: Scheme | None = None,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.exact = exact
        self.quantize = quantize  # float weights become this as they are packed
        self.quantize_drafter: Scheme | None = Scheme.INT8 if quantize is Scheme.INT4 else quantize
        self.quantize_head = quantize_head or self.quantize_drafter
        self._torch = TorchKernels(device, dtype)
        self._limits = _read_limits(device)
        # Zero between calls; one for each of two linears that may run at the same time.
        self._counters = torch.zeros(2, MAX_TILES, device=device, dtype=torch.int32)
        self._arrivals = self._counters[0]
        self._is_settled = False  # whether experts were chosen long ago
        self._meetings = torch.zeros(MAX_MEETINGS, device=device, dtype=torch.int32)
        self._side: Any = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def _on_device(self) -> contextlib.AbstractContextManager[None]:
        """Triton launches on the thread's current device, which need not be ours."""
        if self.device.type == "cuda":
            return torch.cuda.device(self.device)
        return contextlib.nullcontext()  # Triton's interpreter

    def pack(self, *parts: Matrix, quantize: bool = True) -> Any:
        return self._pack(parts, self.quantize) if quantize else self._torch.pack(*parts)

    def pack_head(self, *parts: Matrix) -> Any:
        return self._pack(parts, self.quantize_head)

    def holds(self, num_values: int) -> bool:
        """Small ones become floats: reading them takes no time, unpacking them would."""
        return self.dtype is torch.bfloat16 and num_values >= MIN_QUANTIZED_VALUES

    def pack_drafter(self, *parts: Matrix) -> Any:
        return self._pack(parts, self.quantize_drafter)

    def _pack(self, parts: Sequence[Matrix], scheme: Scheme | None) -> Any:
        num_values = sum(math.prod(part.shape) for part in parts)
        if self.holds(num_values) and is_held(parts, scheme):
            return pack_rows(parts, scheme, self.device)
        return self._torch.pack(*parts)

    def pack_embedding(self, matrix: Matrix, head: Any | None) -> Any:
        if isinstance(head, PackedWeight):
            return head
        if isinstance(matrix, Quantized):
            return self._pack([matrix], None)
        return self._torch.pack_embedding(matrix, head)

    def embed(self, token_ids: Tensor, table: Any) -> Tensor:
        if isinstance(table, PackedWeight):
            with self._on_device():
                return look_up(token_ids, table, self.dtype)
        return self._torch.embed(token_ids, table)

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        if isinstance(weight, tuple):  # in different formats
            return torch.cat([self.linear(x, piece) for piece in weight], dim=1)
        if isinstance(weight, PackedWeight):
            with self._on_device():
                return multiply(x, weight, self._arrivals, self._limits, self.exact)
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
        self, residual: Residual, outputs: Sequence[Tensor], eps: float
    ) -> tuple[Tensor, list[Tensor]]:
        if not residual.deltas:
            return residual.x, [self.rms_norm(residual.x, weight, eps) for weight in outputs]
        with self._on_device():
            return residual_norm_rows(residual, outputs, eps)

    def residual_linear(
        self,
        residual: Residual,
        norm: Tensor,
        eps: float,
        weight: Any,
        activation: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:
        if isinstance(weight, PackedWeight) and not self.exact:
            counts = self._arrivals
            with self._on_device():
                both = multiply_normed(
                    residual, norm, eps, weight, self._limits, counts, activation
                )
            if both is not None:
                return both
        stream, (normed,) = self.residual_norms(residual, [norm], eps)
        if activation is None:
            return stream, self.linear(normed, weight)
        return stream, self.gated_linear(normed, weight, activation)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        with self._on_device():
            return gate_rows(gate_up, activation)

    def gated_linear(self, x: Tensor, weight: Any, activation: Activation) -> Tensor:
        if isinstance(weight, PackedWeight):
            with self._on_device():
                return multiply(x, weight, self._arrivals, self._limits, self.exact, activation)
        return self.gated(self.linear(x, weight), activation)

    def prepare_qkv(
        self,
        qkv: Tensor,
        spec: QKVSpec,
        rope: RopeTable,
        positions: Tensor,
        key_cache: Tensor | None,
        value_cache: Tensor,
        slots: Tensor,
    ) -> Tensor:
        with self._on_device():
            return prepare_heads(qkv, spec, rope, positions, key_cache, value_cache, slots)

    def attention(
        self,
        query: Tensor,
        key_cache: Tensor | None,
        value_cache: Tensor,
        view: PageView,
        *,
        scale: float,
        window: int | None,
        mask: BlockMask,
        rebuild: KeyRebuild | None = None,
    ) -> Tensor:
        make_plan = plan_exact_attention if self.exact else plan_attention
        plan = make_plan(query, value_cache, view, window, self._limits, rebuild)
        with self._on_device():
            return paged_attention(
                query,
                key_cache,
                value_cache,
                view,
                plan,
                scale=scale,
                window=window,
                mask=mask,
                rebuild=rebuild,
            )

    def attend(
        self,
        qkv: Tensor,
        spec: QKVSpec,
        rope: RopeTable,
        positions: Tensor,
        key_cache: Tensor | None,
        value_cache: Tensor,
        view: PageView,
        *,
        scale: float,
        window: int | None,
        mask: BlockMask,
        rebuild: KeyRebuild | None = None,
    ) -> Tensor:
        if not self.exact and rebuild is None:
            inputs = (qkv, spec, rope, positions, key_cache, value_cache, view)
            counts, limits = self._meetings, self._limits
            with self._on_device():
                mixed = attend_few(*inputs, counts, limits, scale=scale, window=window, mask=mask)
            if mixed is not None:
                return mixed
        query = self.prepare_qkv(qkv, spec, rope, positions, key_cache, value_cache, view.slots)
        return self.attention(
            query,
            key_cache,
            value_cache,
            view,
            scale=scale,
            window=window,
            mask=mask,
            rebuild=rebuild,
        )

    def mixture(self, residual: Residual, parts: Mixture) -> tuple[Tensor, Tensor, Tensor]:
        if not self.exact:
            with self._on_device():
                found = mix_row(residual, parts, self._limits, self._arrivals)
            if found is not None:
                return found
        return compose_mixture(self, residual, parts)

    def both(
        self,
        num_rows: int,
        first: Callable[[], Tensor],
        choose: Callable[[], Choice],
        second: Callable[[Choice], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The second on a stream of its own; memory is safe, since both streams meet here.

        One row has its turns: what was chosen before the first is known long before the second,
        which can so ask for its weights at once.
        """
        if self._side is None or not MIN_ROWS_BESIDE <= num_rows <= MAX_ROWS_BESIDE:
            choice, result = choose(), first()
            self._is_settled = True
            try:
                return result, second(choice)
            finally:
                self._is_settled = False
        main = torch.cuda.current_stream(self.device)
        self._side.wait_stream(main)
        self._arrivals = self._counters[1]
        try:
            with torch.cuda.stream(self._side):
                beside = second(choose())
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
        self,
        x: Tensor,
        weight: Any,
        multiplier: float = 1.0,
        softcap: float | None = None,
        forbidden: Tensor | None = None,
    ) -> Best:
        piece = max(1, MAX_LOGITS_BYTES // (weight.shape[0] * x.itemsize))
        are_few = self.exact or x.shape[0] <= FUSED_HEAD_ROWS or piece <= FUSED_HEAD_ROWS
        with self._on_device():
            if are_few and not isinstance(weight, PackedWeight):
                if self.exact:
                    plan = plan_exact_best(weight.itemsize, self._limits)
                else:
                    plan = plan_best(x.shape[0], weight.itemsize, self._limits)
                return best_columns(x, weight, plan, multiplier, softcap, forbidden)
            bests = [
                best_of_logits(
                    self.linear(x[i : i + piece], weight), multiplier, softcap, forbidden
                )
                for i in range(0, max(1, x.shape[0]), piece)
            ]
            if len(bests) == 1:
                return bests[0]
            return Best(
                torch.cat([best.index for best in bests]),
                torch.cat([best.logit for best in bests]),
                torch.cat([best.log_total for best in bests]),
            )

    def pack_experts(self, weight: Matrix) -> Any:
        if self.holds(math.prod(weight.shape)) and is_held([weight], self.quantize):
            return pack_stack(weight, self.quantize, self.device)
        return join_floats([weight], self.device, self.dtype)

    def choose_experts(self, logits: Tensor, num_chosen: int, scale: Tensor) -> Choice:
        with self._on_device():
            return choose_rows(logits, num_chosen, scale)

    def route(self, x: Tensor, router: Any, num_chosen: int, scale: Tensor) -> Choice:
        if self.exact or x.shape[0] > MAX_ROUTED_ROWS or not isinstance(router, Tensor):
            return self.choose_experts(self.linear(x, router), num_chosen, scale)
        with self._on_device():
            return route_rows(x, router, num_chosen, scale, self._arrivals)

    def experts(
        self,
        x: Tensor,
        gate_up: Any,
        down: Any,
        chosen: Tensor,
        weights: Tensor,
        activation: Activation,
    ) -> Tensor:
        num_rows, num_chosen = chosen.shape
        x = x.contiguous()
        are_few = num_rows <= FEW_EXPERT_ROWS or self.exact
        if are_few and isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight):
            inputs = (x, gate_up, down, chosen, weights, activation)
            with self._on_device():
                return mix(*inputs, self._arrivals, self._limits, self.exact, self._is_settled)
        plan = plan_experts(num_rows, num_chosen, gate_up.shape[0], x.itemsize)
        if self.exact:
            plan = plan_exact_experts(x.itemsize)
        routed, processors = (chosen, weights, activation, plan), self._limits.num_processors
        with self._on_device():
            if plan.block_m and not plan.splits:
                return mix_rows(x, gate_up, down, *routed, processors, self._expert_floats)
            gate_up, down = self._expert_floats(gate_up), self._expert_floats(down)
            if plan.splits:
                return mix_few_rows(x, gate_up, down, *routed, processors)
            return mix_one_row(x, gate_up, down, *routed)

    def _expert_floats(self, weight: Any) -> Tensor:
        """All experts of a layer as floats: for prompts the arithmetic is what costs."""
        if isinstance(weight, PackedWeight):
            return dequantize(weight, self.dtype)
        found: Tensor = weight
        return found


def _read_limits(device: torch.device) -> DeviceLimits:
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        return DeviceLimits(
            properties.multi_processor_count,
            properties.shared_memory_per_block_optin,
            properties.major,
        )
    return DeviceLimits(num_processors=1, shared_bytes=227 * 1024)  # Triton's interpreter
