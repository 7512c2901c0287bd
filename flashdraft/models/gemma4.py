"""Gemma 4, dense (31B) and mixture of experts (26B-A4B), text.

What differs from the Llama family: sandwich norms, a scalar per layer on the residual stream, value
norms, full layers that share one projection for key and value, proportional RoPE there, a scaled
embedding, a soft-capped head, and experts that run beside the dense MLP.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashdraft.kernels.interface import Best, Choice, Kernels, Residual, RopeTable
from flashdraft.models.config import ExpertsConfig, ModelConfig
from flashdraft.models.layers import (
    Attention,
    ForwardBatch,
    GatedMLP,
    LayerCache,
    RopeTables,
    TargetOutput,
    Vocabulary,
    check_taps,
    load_matrix,
    load_vector,
)
from flashdraft.models.weights import Weights


class Experts:
    """Router and experts: both read the residual stream itself, each through a norm of its own."""

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        config: ModelConfig,
        experts: ExpertsConfig,
        kernels: Kernels,
    ) -> None:
        hidden, inner, count = config.hidden_size, experts.intermediate_size, experts.num_experts
        # The router's own scale, as the weight of its norm.
        self.router_norm = load_vector(weights, f"{prefix}.router.scale", hidden, kernels)
        self.router_norm = self.router_norm * hidden**-0.5
        self.input_norm = load_vector(
            weights, f"{prefix}.pre_feedforward_layernorm_2.weight", hidden, kernels
        )
        router = weights.take_matrix(
            f"{prefix}.router.proj.weight", (count, hidden), kernels.device
        )
        self._router = kernels.pack(router, quantize=False)
        self._expert_scale = weights.take(f"{prefix}.router.per_expert_scale", (count,)).to(
            kernels.device, torch.float32
        )
        gate_up = {f"{prefix}.experts.gate_up_proj": (count, 2 * inner, hidden)}
        down = {f"{prefix}.experts.down_proj": (count, hidden, inner)}
        self._gate_up = load_matrix(weights, gate_up, kernels, kernels.pack_experts)
        self._down = load_matrix(weights, down, kernels, kernels.pack_experts)
        self._num_chosen = experts.num_chosen
        self._activation = config.activation
        self._kernels = kernels

    def choose(self, routed: Tensor) -> Choice:
        """The experts of every row, and their shares; `routed`: the stream after `router_norm`."""
        return self._kernels.route(routed, self._router, self._num_chosen, self._expert_scale)

    def mix(self, normed: Tensor, choice: Choice) -> Tensor:
        """What they say together; `normed` is the stream after `input_norm`."""
        weights = (self._gate_up, self._down)
        return self._kernels.experts(normed, *weights, *choice, self._activation)


class Gemma4Layer:
    """Attention and MLP, each between two norms; experts beside the MLP where there are any.

    A layer takes the residual stream as a sum that is still to be made, and hands on another: its
    first linear adds up, and norms, what it reads.
    """

    def __init__(self, weights: Weights, index: int, config: ModelConfig, kernels: Kernels) -> None:
        prefix, hidden = f"model.layers.{index}", config.hidden_size

        def norm(name: str) -> Tensor:
            return load_vector(weights, f"{prefix}.{name}.weight", hidden, kernels)

        self._input_norm = norm("input_layernorm")
        self._post_attention_norm = norm("post_attention_layernorm")
        self._pre_mlp_norm = norm("pre_feedforward_layernorm")
        self._post_mlp_norm = norm("post_feedforward_layernorm")
        self._scalar = load_vector(weights, f"{prefix}.layer_scalar", 1, kernels)
        self._attention = Attention(
            weights, f"{prefix}.self_attn", config, config.layers[index], kernels
        )
        self._mlp = GatedMLP(
            weights, f"{prefix}.mlp", hidden, config.intermediate_size, config.activation, kernels
        )
        self._experts: Experts | None = None
        if config.experts is not None:
            self._experts = Experts(weights, prefix, config, config.experts, kernels)
            self._dense_norm = norm("post_feedforward_layernorm_1")
            self._experts_norm = norm("post_feedforward_layernorm_2")
        self._eps = config.norm_eps
        self._kernels = kernels

    def __call__(
        self, residual: Residual, batch: ForwardBatch, cache: LayerCache, rope: RopeTable
    ) -> tuple[Tensor, Residual]:
        """The stream before this layer, and after it."""
        kernels, eps = self._kernels, self._eps
        before, mixed = self._attention.of_residual(
            residual, self._input_norm, eps, batch, cache, rope
        )
        attended = Residual(before, [(mixed, self._post_attention_norm)])
        if self._experts is None:
            x, dense = self._mlp.of_residual(attended, self._pre_mlp_norm, eps)
            return before, Residual(x, [(dense, self._post_mlp_norm)], None, self._scalar)
        norms = [self._pre_mlp_norm, self._experts.router_norm, self._experts.input_norm]
        x, normed = kernels.residual_norms(attended, norms, eps)
        dense, experts = self._mix(*normed)
        deltas = [(dense, self._dense_norm), (experts, self._experts_norm)]
        return before, Residual(x, deltas, self._post_mlp_norm, self._scalar)

    def _mix(self, normed: Tensor, to_route: Tensor, to_mix: Tensor) -> tuple[Tensor, Tensor]:
        """The dense MLP's output and the experts'."""
        experts = self._experts
        assert experts is not None
        return self._kernels.both(
            normed.shape[0],
            lambda: self._mlp(normed),
            lambda: experts.choose(to_route),
            lambda choice: experts.mix(to_mix, choice),
        )


class Gemma4Target:
    """Gemma 4's text decoder."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        tap_layers: Sequence[int] = (),
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.tap_layers = check_taps(tap_layers, config)
        self._vocabulary = Vocabulary(weights, config, kernels)
        self._layers = [
            Gemma4Layer(weights, index, config, kernels) for index in range(len(config.layers))
        ]
        self._norm = load_vector(weights, "model.norm.weight", config.hidden_size, kernels)
        self._ropes = RopeTables(config, kernels.device)
        weights.finish()

    def forward(self, token_ids: Tensor, batch: ForwardBatch) -> TargetOutput:
        residual = Residual(self.embed(token_ids))
        tables = self._ropes.tables(batch.end_position)
        streams: dict[int, Tensor] = {}  # after the layers that are tapped
        for index, layer in enumerate(self._layers):
            before, residual = layer(residual, batch, batch.caches[index], tables[index])
            if index - 1 in self.tap_layers:
                streams[index - 1] = before
        x, _ = self.kernels.residual_norms(residual, [], self.config.norm_eps)
        streams[len(self._layers) - 1] = x
        taps = [streams[index] for index in self.tap_layers]
        tapped = torch.cat(taps, dim=-1) if taps else None
        return TargetOutput(x, tapped)

    def prepare_positions(self, num_positions: int) -> None:
        self._ropes.tables(num_positions)

    def embed(self, token_ids: Tensor, scale: float | None = None) -> Tensor:
        return self._vocabulary.embed(token_ids, scale)

    def logits(self, hidden: Tensor) -> Tensor:
        normed = self.kernels.rms_norm(hidden, self._norm, self.config.norm_eps)
        logits = self.unembed(normed).float()
        if self.config.logit_softcap is None:
            return logits
        return self.kernels.softcap(logits, self.config.logit_softcap)

    def greedy(self, hidden: Tensor) -> Best:
        normed = self.kernels.rms_norm(hidden, self._norm, self.config.norm_eps)
        return self._vocabulary.best(normed, softcap=self.config.logit_softcap)

    def unembed(self, normed: Tensor) -> Tensor:
        return self._vocabulary.unembed(normed)

    def unembed_best(self, normed: Tensor, multiplier: float, softcap: float | None) -> Best:
        return self._vocabulary.best(normed, multiplier, softcap)
