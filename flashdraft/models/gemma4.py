"""Gemma 4, dense (31B) and mixture of experts (26B-A4B); its tower for pictures is vision/.

What differs from the Llama family: sandwich norms, a scalar per layer on the residual stream, value
norms, full layers that share one projection for key and value, proportional RoPE there, a scaled
embedding, a soft-capped head, and experts that run beside the dense MLP.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashdraft.kernels.interface import HeadProducts, Kernels, Mixture, Residual, RopeTable
from flashdraft.models.config.target import ExpertsConfig, ModelConfig
from flashdraft.models.layers import (
    Attention,
    ForwardBatch,
    GatedMLP,
    LayerCache,
    RopeTables,
    TargetOutput,
    VisionTower,
    Vocabulary,
    check_taps,
    load_matrix,
    load_mlp,
    load_vector,
)
from flashdraft.models.vision.tower import Gemma4VisionTower
from flashdraft.models.weights import Weights


def load_mixture(
    weights: Weights,
    prefix: str,
    config: ModelConfig,
    experts: ExpertsConfig,
    kernels: Kernels,
) -> Mixture:
    """A layer's MLP, router and experts."""
    hidden, inner, count = config.hidden_size, experts.intermediate_size, experts.num_experts

    def norm(name: str) -> Tensor:
        return load_vector(weights, f"{prefix}.{name}", hidden, kernels)

    sizes = hidden, config.intermediate_size
    dense_gate_up, dense_down = load_mlp(weights, f"{prefix}.mlp", *sizes, kernels)
    router = weights.take_matrix(f"{prefix}.router.proj.weight", (count, hidden), kernels.device)
    scale = weights.take(f"{prefix}.router.per_expert_scale", (count,))
    gate_up = {f"{prefix}.experts.gate_up_proj": (count, 2 * inner, hidden)}
    down = {f"{prefix}.experts.down_proj": (count, hidden, inner)}
    return Mixture(
        norm=norm("pre_feedforward_layernorm.weight"),
        gate_up=dense_gate_up,
        down=dense_down,
        # The router's own scale, as the weight of its norm.
        router_norm=norm("router.scale") * hidden**-0.5,
        router=kernels.pack(router, quantize=False),
        num_chosen=experts.num_chosen,
        scale=scale.to(kernels.device, torch.float32),
        experts_norm=norm("pre_feedforward_layernorm_2.weight"),
        expert_gate_up=load_matrix(weights, gate_up, kernels, kernels.pack_experts),
        expert_down=load_matrix(weights, down, kernels, kernels.pack_experts),
        activation=config.activation,
        eps=config.norm_eps,
    )


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
        self._post_mlp_norm = norm("post_feedforward_layernorm")
        self._scalar = load_vector(weights, f"{prefix}.layer_scalar", 1, kernels)
        self._attention = Attention(
            weights, f"{prefix}.self_attn", config, config.layers[index], kernels
        )
        self._mixture: Mixture | None = None
        if config.experts is not None:
            self._mixture = load_mixture(weights, prefix, config, config.experts, kernels)
            self._dense_norm = norm("post_feedforward_layernorm_1")
            self._experts_norm = norm("post_feedforward_layernorm_2")
        else:
            self._pre_mlp_norm = norm("pre_feedforward_layernorm")
            self._mlp = GatedMLP(
                weights,
                f"{prefix}.mlp",
                hidden,
                config.intermediate_size,
                config.activation,
                kernels,
            )
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
        if self._mixture is None:
            x, dense = self._mlp.of_residual(attended, self._pre_mlp_norm, eps)
            return before, Residual(x, [(dense, self._post_mlp_norm)], None, self._scalar)
        x, dense, experts = kernels.mixture(attended, self._mixture)
        deltas = [(dense, self._dense_norm), (experts, self._experts_norm)]
        return before, Residual(x, deltas, self._post_mlp_norm, self._scalar)


class Gemma4Target:
    """Gemma 4's text decoder, and what turns pictures into its rows."""

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
        self.vision: VisionTower | None = None
        if config.vision is not None:
            self.vision = Gemma4VisionTower(config.vision, config.hidden_size, weights, kernels)
        weights.finish()

    def forward(self, token_ids: Tensor, batch: ForwardBatch) -> TargetOutput:
        x = self.embed(token_ids)
        if batch.pictures is not None:  # their rows are not scaled as embeddings are
            is_picture = batch.pictures.is_picture.unsqueeze(1)
            x = torch.where(is_picture, batch.pictures.features, x)
        residual = Residual(x)
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

    def head(self, hidden: Tensor) -> HeadProducts:
        normed = self.kernels.rms_norm(hidden, self._norm, self.config.norm_eps)
        return self._vocabulary.head(normed, self.config.logit_softcap)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.kernels.finish_logits(*self.head(hidden))

    def unembed(self, normed: Tensor) -> Tensor:
        return self._vocabulary.unembed(normed)

    @property
    def forbidden(self) -> Tensor | None:
        return self._vocabulary.forbidden
