"""Gemma 4, dense (31B) and mixture of experts (26B-A4B), text.

What differs from the Llama family: sandwich norms, a scalar per layer on the residual stream, value
norms, full layers that share one projection for key and value, proportional RoPE there, a scaled
embedding, a soft-capped head, and experts that run beside the dense MLP.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashdraft.kernels.interface import Kernels, RopeTable
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
        scale = load_vector(weights, f"{prefix}.router.scale", hidden, kernels)
        self._router_scale = scale * torch.tensor(hidden**-0.5, dtype=scale.dtype)
        self._router = kernels.pack(
            weights.take(f"{prefix}.router.proj.weight", (count, hidden)), quantize=False
        )
        self._expert_scale = weights.take(f"{prefix}.router.per_expert_scale", (count,)).to(
            kernels.device, torch.float32
        )
        gate_up = weights.take(f"{prefix}.experts.gate_up_proj", (count, 2 * inner, hidden))
        down = weights.take(f"{prefix}.experts.down_proj", (count, hidden, inner))
        self._gate_up = [kernels.pack(one) for one in gate_up.to(kernels.device)]
        self._down = [kernels.pack(one) for one in down.to(kernels.device)]
        self._norm = load_vector(
            weights, f"{prefix}.pre_feedforward_layernorm_2.weight", hidden, kernels
        )
        self._num_chosen = experts.num_chosen
        self._config = config
        self._kernels = kernels

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen experts of every row and their weights: [rows, k] int64 and float32."""
        kernels = self._kernels
        routed = kernels.rms_norm(x, None, self._config.norm_eps) * self._router_scale
        chances = kernels.softmax(kernels.linear(routed, self._router))
        weights, chosen = chances.topk(self._num_chosen, dim=-1)
        total = weights[:, 0]
        for place in range(1, self._num_chosen):  # a fixed order of addition
            total = total + weights[:, place]
        return chosen, weights / total.unsqueeze(-1) * self._expert_scale[chosen]

    def __call__(self, x: Tensor) -> Tensor:
        chosen, weights = self.route(x)
        normed = self._kernels.rms_norm(x, self._norm, self._config.norm_eps)
        return self._kernels.experts(
            normed, self._gate_up, self._down, chosen, weights, self._config.activation
        )


class Gemma4Layer:
    """Attention and MLP, each between two norms; experts beside the MLP where there are any."""

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
        self, x: Tensor, batch: ForwardBatch, cache: LayerCache, rope: RopeTable
    ) -> Tensor:
        kernels, eps = self._kernels, self._eps
        normed = kernels.rms_norm(x, self._input_norm, eps)
        mixed = self._attention(normed, batch, cache, rope)
        mixed = kernels.rms_norm(mixed, self._post_attention_norm, eps)
        x, normed = kernels.add_rms_norm(x, mixed, self._pre_mlp_norm, eps)
        y = self._mlp(normed)
        if self._experts is not None:
            dense = kernels.rms_norm(y, self._dense_norm, eps)
            y = dense + kernels.rms_norm(self._experts(x), self._experts_norm, eps)
        return (x + kernels.rms_norm(y, self._post_mlp_norm, eps)) * self._scalar


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
        x = self.embed(token_ids)
        tables = self._ropes.tables(batch.end_position)
        taps: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            x = layer(x, batch, batch.caches[index], tables[index])
            if index in self.tap_layers:
                taps[index] = x
        tapped = torch.cat([taps[i] for i in self.tap_layers], dim=-1) if taps else None
        return TargetOutput(x, tapped)

    def embed(self, token_ids: Tensor, scale: float | None = None) -> Tensor:
        return self._vocabulary.embed(token_ids, scale)

    def logits(self, hidden: Tensor) -> Tensor:
        normed = self.kernels.rms_norm(hidden, self._norm, self.config.norm_eps)
        logits = self.unembed(normed).float()
        if self.config.logit_softcap is None:
            return logits
        return self.kernels.softcap(logits, self.config.logit_softcap)

    def unembed(self, normed: Tensor) -> Tensor:
        return self._vocabulary.unembed(normed)
