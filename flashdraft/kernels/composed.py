"""The larger operations in terms of a backend's own smaller ones, for backends that fuse nothing.

Every sum has a fixed order, so what is composed of exact operations is exact (interface.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashdraft.kernels.advance import advance
from flashdraft.kernels.convolution import convolve
from flashdraft.kernels.draw import host, reference
from flashdraft.kernels.interface import (
    BIDIRECTIONAL,
    Choice,
    Convolution,
    DraftedSlots,
    Draw,
    DrawnRows,
    HeadProducts,
    Heads,
    Kernels,
    Mixture,
    Offered,
    Offers,
    PagedKeys,
    PagedTensor,
    PageView,
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
from flashdraft.kernels.layout import lay_out, share_rows
from flashdraft.kernels.paths import follow, offer_paths
from flashdraft.kernels.quantized import Matrix, Quantized, join_floats
from flashdraft.kernels.settle import settle
from flashdraft.kernels.tree import grow, offer


def compose_mixture(
    kernels: Kernels, residual: Residual, parts: Mixture
) -> tuple[Tensor, Tensor, Tensor]:
    """`Kernels.mixture`: norms, then the MLP, the choice and the experts."""
    norms, activation = [parts.norm, parts.router_norm, parts.experts_norm], parts.activation
    stream, (x, to_route, to_mix) = kernels.residual_norms(residual, norms, parts.eps)
    experts = parts.expert_gate_up, parts.expert_down
    dense, mixed = kernels.both(
        x.shape[0],
        lambda: kernels.linear(kernels.gated_linear(x, parts.gate_up, activation), parts.down),
        lambda: kernels.route(to_route, parts.router, parts.num_chosen, parts.scale),
        lambda choice: kernels.experts(to_mix, *experts, *choice, activation),
    )
    return stream, dense, mixed


class ComposedKernels(Kernels):
    """A backend that brings the smaller operations."""

    quantize: Scheme | None = None
    quantize_head: Scheme | None = None
    quantize_drafter: Scheme | None = None
    activations: Scheme | None = None
    level: str | None = None
    exact = False
    keeps_quantized = False
    why_no_fp8_cache: str | None = None
    why_no_rebuilt_keys: str | None = None
    compiles_for: tuple[int, int] | None = None

    def holds(self, num_values: int) -> bool:
        return False

    def pack_head(self, *parts: Matrix) -> Any:
        return self.pack(*parts)

    def pack_drafter(self, *parts: Matrix) -> Any:
        return self.pack(*parts)

    def pack_embedding(self, matrix: Matrix, head: Any | None) -> Any:
        return join_floats([matrix], self.device, self.dtype)

    def embed(self, token_ids: Tensor, table: Any) -> Tensor:
        return F.embedding(token_ids, table)

    def residual_norms(
        self, residual: Residual, outputs: Sequence[Tensor], eps: float
    ) -> tuple[Tensor, list[Tensor]]:
        x = residual.x
        if not residual.deltas:
            return x, [self.rms_norm(x, w, eps) for w in outputs]
        (first, weight), *others = residual.deltas
        delta = self.rms_norm(first, weight, eps)
        for other, weight in others:
            delta = delta + self.rms_norm(other, weight, eps)
        if residual.post is not None:
            delta = self.rms_norm(delta, residual.post, eps)
        scalar = residual.scalar
        if scalar is None and outputs:
            stream, normed = self.add_rms_norm(x, delta, outputs[0], eps)
            return stream, [normed, *(self.rms_norm(stream, w, eps) for w in outputs[1:])]
        stream = x + delta if scalar is None else (x + delta) * scalar
        return stream, [self.rms_norm(stream, w, eps) for w in outputs]

    def residual_linear(
        self,
        residual: Residual,
        norm: Tensor,
        eps: float,
        weight: Any,
        activation: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:
        stream, (normed,) = self.residual_norms(residual, [norm], eps)
        if activation is None:
            return stream, self.linear(normed, weight)
        return stream, self.gated_linear(normed, weight, activation)

    def gated_linear(self, x: Tensor, weight: Any, activation: Activation) -> Tensor:
        return self.gated(self.linear(x, weight), activation)

    def attend(self, qkv: Tensor, heads: Heads, keys: PagedKeys) -> Tensor:
        caches = keys.key_cache, keys.value_cache
        return self.attention(self.prepare_qkv(qkv, heads, *caches, keys.view.slots), keys)

    def attend_whole(
        self, qkv: Tensor, heads: Heads, sequences: WholeSequences, scale: float
    ) -> Tensor:
        """Over pages of one row each, which lie as the rows do."""
        rows, spec = qkv.shape[0], heads.spec
        keys, values = (qkv.new_empty(rows, 1, spec.num_kv_heads, spec.head_dim) for _ in range(2))
        view = _pages_of_one(sequences, rows)
        paged = PagedKeys(keys, values, view, scale, None, BIDIRECTIONAL)
        return self.attend(qkv, heads, paged)

    def mixture(self, residual: Residual, parts: Mixture) -> tuple[Tensor, Tensor, Tensor]:
        return compose_mixture(self, residual, parts)

    def both(
        self,
        num_rows: int,
        first: Callable[[], Tensor],
        choose: Callable[[], Choice],
        second: Callable[[Choice], Tensor],
    ) -> tuple[Tensor, Tensor]:
        return first(), second(choose())

    def draw(self, logits: Tensor | HeadProducts, settings: SlotSettings, rows: DrawnRows) -> Draw:
        if isinstance(logits, HeadProducts):
            logits = self.finish_logits(*logits)
        if self.device.type == "cpu":
            return host.draw(logits, settings, rows, self.argmax)
        return reference.draw(logits, settings, rows)

    def offer(self, drawn: Draw, settings: SlotSettings, rows: DrawnRows, count: int) -> Offers:
        return offer(drawn, settings, rows, count)

    def grow(self, offered: Offered, nodes: TreeNodes) -> None:
        for one, other in zip(nodes, grow(offered, nodes.tokens.shape[1]), strict=True):
            one.copy_(other)

    def offer_paths(
        self,
        candidates: SlotCandidates,
        scores: PathScores,
        settings: SlotSettings,
        rows: DrawnRows,
        count: int,
    ) -> PathOffers:
        return offer_paths(candidates, scores, settings, rows, count)

    def follow(self, offers: PathOffers, width: int) -> tuple[Tensor, Tensor]:
        return follow(offers, width)

    def convolve(self, x: Tensor, convolution: Convolution) -> Tensor:
        return convolve(x, convolution)

    def share_rows(self, drafted: DraftedSlots, num_rows: int) -> Tensor:
        return share_rows(drafted, num_rows)

    def lay_out(
        self,
        slots: SlotTables,
        nodes: TreeNodes,
        counts: Tensor | None,
        num_rows: int,
        rows: PassRows,
    ) -> None:
        lay_out(slots, nodes, counts, num_rows, rows)

    def advance(
        self,
        slots: SlotStates,
        step: Verified,
        lines: Tensor,
        history: Tensor | None,
        is_given: bool,
    ) -> None:
        advance(slots, step, lines, history, is_given)

    def settler(self, stored: Sequence[PagedTensor]) -> Callable[[Settled], None]:
        return functools.partial(settle, stored)

    def pack_experts(self, weight: Matrix) -> list[Any]:
        if isinstance(weight, Quantized):  # one at a time: all of them in floats may not fit
            return [self.pack(weight.expert(index)) for index in range(weight.shape[0])]
        return [self.pack(one) for one in weight]

    def choose_experts(self, logits: Tensor, num_chosen: int, scale: Tensor) -> Choice:
        weights, chosen = self.softmax(logits).topk(num_chosen, dim=-1)
        total = weights[:, 0]
        for place in range(1, num_chosen):  # a fixed order of addition
            total = total + weights[:, place]
        return chosen, weights / total.unsqueeze(-1) * scale[chosen]

    def route(self, x: Tensor, router: Any, num_chosen: int, scale: Tensor) -> Choice:
        return self.choose_experts(self.linear(x, router), num_chosen, scale)

    def experts(
        self,
        x: Tensor,
        gate_up: list[Any],
        down: list[Any],
        chosen: Tensor,
        weights: Tensor,
        activation: Activation,
    ) -> Tensor:
        outputs = torch.zeros(*chosen.shape, x.shape[1], device=x.device, dtype=torch.float32)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            hidden = self.gated_linear(x[rows], gate_up[expert], activation)
            outputs[rows, places] = self.linear(hidden, down[expert]).float()
        outputs *= weights.float().unsqueeze(-1)
        total = outputs[:, 0]
        for place in range(1, chosen.shape[1]):  # a fixed order: sum() may choose another one
            total = total + outputs[:, place]
        return total.to(x.dtype)


def _pages_of_one(sequences: WholeSequences, num_rows: int) -> PageView:
    """Sequences whose rows are their pages, without a context."""
    starts, longest, device = sequences.starts, sequences.longest, sequences.starts.device
    first = starts[:-1]
    return PageView(
        query_start=starts,
        context_lens=torch.zeros_like(first),
        block_table=first[:, None] + torch.arange(longest, dtype=torch.int32, device=device),
        slots=torch.arange(num_rows, device=device),
        page_size=1,
        max_query_len=longest,
        max_key_len=longest,
    )
