"""The CUDA backend: Triton where fusing pays, torch for the rest. It only composes."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flashdraft.kernels.composed import ComposedKernels
from flashdraft.kernels.cuda import dense_backend, expert_backend, quantized_backend
from flashdraft.kernels.cuda.attention.attend import attend, attention, make_meetings
from flashdraft.kernels.cuda.card import capability_of, read_limits, why_no_fp8
from flashdraft.kernels.cuda.dense.residual import residual_norm_rows
from flashdraft.kernels.cuda.dense.rows import add_norm_rows, gate_rows, norm_rows, prepare_heads
from flashdraft.kernels.cuda.quantized_backend import is_packed
from flashdraft.kernels.interface import (
    Choice,
    Convolution,
    DraftedSlots,
    Draw,
    DrawnRows,
    HeadProducts,
    Heads,
    Mixture,
    Offered,
    Offers,
    PagedKeys,
    PagedTensor,
    PassRows,
    PathOffers,
    PathScores,
    Residual,
    Settled,
    SlotCandidates,
    SlotSettings,
    SlotStates,
    SlotTables,
    TreeNodes,
    Verified,
    WholeSequences,
)
from flashdraft.kernels.kinds import Activation, Scheme
from flashdraft.kernels.quantized import Matrix, Quantized, join_floats
from flashdraft.kernels.torch_backend import TorchKernels, attend_whole

MAX_TILES = 1 << 18
MIN_ROWS_BESIDE = 2  # one row takes less time than a fork and a join
MAX_ROWS_BESIDE = 64  # more rows keep the device busy with one thing at a time
MIN_QUANTIZED_VALUES = 1 << 22


class SideStream:
    """A stream beside the current one, where a device has streams."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, None
        self.is_there = device.type == "cuda"
        if self.is_there:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """What is launched meanwhile runs beside, behind all that was launched before."""
        if self._stream is None:  # it is only compiled for
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What is launched from now on comes behind what runs beside."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class TritonKernels(ComposedKernels):
    """Triton where it beats torch, on one stream at a time; torch's own operations for the rest.

    No kernel adds by atomics: the same call gives the same bits. But plans depend on the batch, and
    torch's linears choose their kernel by the number of rows, so a row's bits may depend on how
    many others there are. With `exact` they do not: every plan follows from the layer's shape.
    """

    name = "triton"
    keeps_quantized = True

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        exact: bool = False,
        quantize: Scheme | None = None,
        quantize_head: Scheme | None = None,
        activations: Scheme | None = None,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.weight_dtype = str(dtype).removeprefix("torch.")
        self.why_no_fp8_cache = why_no_fp8(device)
        self.exact = exact
        self.quantize = quantize  # float weights become this as they are packed
        self.quantize_drafter = Scheme.INT8 if quantize is Scheme.INT4 else quantize
        self.quantize_head = quantize_head or self.quantize_drafter
        self.activations = activations
        self._torch = TorchKernels(device, dtype)
        self._limits = read_limits(device)
        # Zero between calls; one for each of two linears that may run at the same time.
        self._counters = torch.zeros(2, MAX_TILES, device=device, dtype=torch.int32)
        self._arrivals = self._counters[0]
        self.compiles_for = capability_of(device)
        self._is_settled = False  # whether experts were chosen long ago
        self._meetings = make_meetings(device)
        self._side = SideStream(device)

    def _on_device(self) -> contextlib.AbstractContextManager[None]:
        """Triton launches on the thread's current device, which need not be ours."""
        if self.device.type == "cuda":
            return torch.cuda.device(self.device)
        return contextlib.nullcontext()  # Triton's interpreter

    def pack(self, *parts: Matrix, quantize: bool = True) -> Any:
        if not quantize:
            return self._torch.pack(*parts)
        packed = self._pack(parts, self.quantize)
        return quantized_backend.round_before(packed, self.activations)

    def pack_head(self, *parts: Matrix) -> Any:
        return self._pack(parts, self.quantize_head)

    def holds(self, num_values: int) -> bool:
        """Small ones become floats: reading them takes no time, unpacking them would."""
        return self.dtype is torch.bfloat16 and num_values >= MIN_QUANTIZED_VALUES

    def pack_drafter(self, *parts: Matrix) -> Any:
        return self._pack(parts, self.quantize_drafter)

    def _pack(self, parts: Sequence[Matrix], scheme: Scheme | None) -> Any:
        num_values = sum(math.prod(part.shape) for part in parts)
        if self.holds(num_values) and quantized_backend.is_held(parts, scheme):
            return quantized_backend.pack_rows(parts, scheme, self.device)
        return self._torch.pack(*parts)

    def pack_embedding(self, matrix: Matrix, head: Any | None) -> Any:
        if is_packed(head):
            return head
        if isinstance(matrix, Quantized):
            return self._pack([matrix], None)
        return self._torch.pack_embedding(matrix, head)

    def embed(self, token_ids: Tensor, table: Any) -> Tensor:
        if is_packed(table):
            with self._on_device():
                return quantized_backend.look_up(token_ids, table, self.dtype)
        return self._torch.embed(token_ids, table)

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        if isinstance(weight, tuple):  # in different formats
            return torch.cat([self.linear(x, piece) for piece in weight], dim=1)
        settings = (self._arrivals, self._limits, self.exact)
        with self._on_device():
            if is_packed(weight):
                return quantized_backend.multiply(x, weight, *settings)
            found = dense_backend.multiply_floats(x, weight, *settings)
        return self._torch.linear(x, weight) if found is None else found

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
        settings = (self._limits, self._arrivals, self.exact)
        with self._on_device():
            both = quantized_backend.multiply_residual(
                residual, norm, eps, weight, activation, *settings
            )
        if both is not None:
            return both
        return super().residual_linear(residual, norm, eps, weight, activation)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        with self._on_device():
            return gate_rows(gate_up, activation)

    def gated_linear(self, x: Tensor, weight: Any, activation: Activation) -> Tensor:
        if is_packed(weight):
            with self._on_device():
                settings = (self._arrivals, self._limits, self.exact, activation)
                return quantized_backend.multiply(x, weight, *settings)
        return super().gated_linear(x, weight, activation)

    def prepare_qkv(
        self,
        qkv: Tensor,
        heads: Heads,
        key_cache: Tensor | None,
        value_cache: Tensor,
        slots: Tensor,
    ) -> Tensor:
        with self._on_device():
            return prepare_heads(qkv, heads, key_cache, value_cache, slots)

    def attention(self, query: Tensor, keys: PagedKeys) -> Tensor:
        with self._on_device():
            return attention(query, keys, self._meetings, self._limits, self.exact)

    def attend(self, qkv: Tensor, heads: Heads, keys: PagedKeys) -> Tensor:
        with self._on_device():
            how = (self._meetings, self._limits, self.exact)
            return attend(qkv, heads, keys, *how)

    def attend_whole(
        self, qkv: Tensor, heads: Heads, sequences: WholeSequences, scale: float
    ) -> Tensor:
        return attend_whole(self, qkv, heads, sequences, scale)

    def mixture(self, residual: Residual, parts: Mixture) -> tuple[Tensor, Tensor, Tensor]:
        settings = (self._limits, self._arrivals, self.exact)
        if self.activations is not None:  # rows are rounded between norm and product
            return super().mixture(residual, parts)
        with self._on_device():
            found = quantized_backend.mix_residual(residual, parts, *settings)
        return super().mixture(residual, parts) if found is None else found

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
        if not self._side.is_there or not MIN_ROWS_BESIDE <= num_rows <= MAX_ROWS_BESIDE:
            choice, result = choose(), first()
            self._is_settled = True
            try:
                return result, second(choice)
            finally:
                self._is_settled = False
        self._arrivals = self._counters[1]
        try:
            with self._side.running():
                beside = second(choose())
        finally:
            self._arrivals = self._counters[0]
        result = first()
        self._side.join()
        return result, beside

    def softmax(self, x: Tensor) -> Tensor:
        return self._torch.softmax(x)

    def argmax(self, x: Tensor) -> Tensor:
        return self._torch.argmax(x)

    def draw(self, logits: Tensor | HeadProducts, settings: SlotSettings, rows: DrawnRows) -> Draw:
        with self._on_device():
            return dense_backend.draw(logits, settings, rows)

    def offer(self, drawn: Draw, settings: SlotSettings, rows: DrawnRows, count: int) -> Offers:
        with self._on_device():
            return dense_backend.offer(drawn, settings, rows, count)

    def grow(self, offered: Offered, nodes: TreeNodes) -> None:
        with self._on_device():
            dense_backend.grow(offered, nodes)

    def offer_paths(
        self,
        candidates: SlotCandidates,
        scores: PathScores,
        settings: SlotSettings,
        rows: DrawnRows,
        count: int,
    ) -> PathOffers:
        with self._on_device():
            return dense_backend.offer_paths(candidates, scores, settings, rows, count)

    def follow(self, offers: PathOffers, width: int) -> tuple[Tensor, Tensor]:
        with self._on_device():
            return dense_backend.follow(offers, width)

    def convolve(self, x: Tensor, convolution: Convolution) -> Tensor:
        with self._on_device():
            return dense_backend.convolve(x, convolution)

    def share_rows(self, drafted: DraftedSlots, num_rows: int) -> Tensor:
        with self._on_device():
            return dense_backend.share_rows(drafted, num_rows)

    def lay_out(
        self,
        slots: SlotTables,
        nodes: TreeNodes,
        counts: Tensor | None,
        num_rows: int,
        rows: PassRows,
    ) -> None:
        with self._on_device():
            dense_backend.lay_out(slots, nodes, counts, num_rows, rows)

    def advance(
        self,
        slots: SlotStates,
        step: Verified,
        lines: Tensor,
        history: Tensor | None,
        is_given: bool,
    ) -> None:
        with self._on_device():
            dense_backend.advance(slots, step, lines, history, is_given)

    def settler(self, stored: Sequence[PagedTensor]) -> Callable[[Settled], None]:
        return functools.partial(self._settle, dense_backend.make_table(stored))

    def _settle(self, table: Any, moves: Settled) -> None:
        with self._on_device():
            dense_backend.settle(table, moves)

    def finish_logits(
        self,
        products: Tensor,
        multiplier: float = 1.0,
        softcap: float | None = None,
        forbidden: Tensor | None = None,
    ) -> Tensor:
        with self._on_device():
            return dense_backend.finish(products, multiplier, softcap, forbidden)

    def pack_experts(self, weight: Matrix) -> Any:
        is_held = quantized_backend.is_held([weight], self.quantize)
        if self.holds(math.prod(weight.shape)) and is_held:
            return quantized_backend.pack_stack(weight, self.quantize, self.device)
        return join_floats([weight], self.device, self.dtype)

    def choose_experts(self, logits: Tensor, num_chosen: int, scale: Tensor) -> Choice:
        with self._on_device():
            return expert_backend.choose(logits, num_chosen, scale)

    def route(self, x: Tensor, router: Any, num_chosen: int, scale: Tensor) -> Choice:
        settings = (self._arrivals, self.exact)
        with self._on_device():
            found = expert_backend.route(x, router, num_chosen, scale, *settings)
        return super().route(x, router, num_chosen, scale) if found is None else found

    def experts(
        self,
        x: Tensor,
        gate_up: Any,
        down: Any,
        chosen: Tensor,
        weights: Tensor,
        activation: Activation,
    ) -> Tensor:
        settings = (self._arrivals, self._limits, self.exact, self._is_settled)
        with self._on_device():
            return expert_backend.mix_experts(
                x, gate_up, down, (chosen, weights), activation, *settings
            )
