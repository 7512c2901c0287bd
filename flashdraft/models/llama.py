"""The Llama family, with Qwen2, Qwen3 and Mistral: they differ by flags of the config alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashdraft.kernels.interface import HeadProducts, Kernels, RopeTable
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.layers import (
    Attention,
    ExpertsMLP,
    ForwardBatch,
    GatedMLP,
    LayerCache,
    RopeTables,
    TargetOutput,
    VisionTower,
    Vocabulary,
    check_taps,
    load_norm,
)
from flashdraft.models.weights import Weights


class LlamaLayer:
    """Pre-norm attention, pre-norm MLP or experts.

    A layer takes the residual stream and the last sublayer's output not yet added to it: so every
    addition is fused with the norm that follows it.
    """

    def __init__(self, weights: Weights, index: int, config: ModelConfig, kernels: Kernels) -> None:
        prefix = f"model.layers.{index}"
        hidden = config.hidden_size
        self._input_norm, self._mlp_norm = (
            load_norm(weights, f"{prefix}.{name}_layernorm.weight", hidden, config, kernels)
            for name in ("input", "post_attention")
        )
        layer = config.layers[index]
        self._attention = Attention(weights, f"{prefix}.self_attn", config, layer, kernels)
        self._mlp: GatedMLP | ExpertsMLP
        if config.experts is None:
            sizes = hidden, layer.intermediate_size
            self._mlp = GatedMLP(weights, f"{prefix}.mlp", *sizes, config.activation, kernels)
        else:
            self._mlp = ExpertsMLP(weights, prefix, config, kernels)
        self._eps = config.norm_eps
        self._kernels = kernels

    def __call__(
        self,
        x: Tensor,
        pending: Tensor | None,
        batch: ForwardBatch,
        cache: LayerCache,
        rope: RopeTable,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's whole input, and its output in two parts still to be added."""
        kernels, whole = self._kernels, x
        if pending is None:
            normed = kernels.rms_norm(x, self._input_norm, self._eps)
        else:
            whole, normed = kernels.add_rms_norm(x, pending, self._input_norm, self._eps)
        mixed = self._attention(normed, batch, cache, rope)
        x, normed = kernels.add_rms_norm(whole, mixed, self._mlp_norm, self._eps)
        return whole, x, self._mlp(normed)


class LlamaTarget:
    """A decoder of the Llama family."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        tap_layers: Sequence[int] = (),
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.vision: VisionTower | None = None
        self.tap_layers = check_taps(tap_layers, config)
        self._vocabulary = Vocabulary(weights, config, kernels)
        self._layers = [
            LlamaLayer(weights, index, config, kernels) for index in range(len(config.layers))
        ]
        self._norm = load_norm(weights, "model.norm.weight", config.hidden_size, config, kernels)
        self._ropes = RopeTables(config, kernels.device)
        weights.finish()

    def forward(self, token_ids: Tensor, batch: ForwardBatch) -> TargetOutput:
        x = self.embed(token_ids)
        pending: Tensor | None = None
        tables = self._ropes.tables(batch.end_position)
        taps: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            whole, x, pending = layer(x, pending, batch, batch.caches[index], tables[index])
            if index - 1 in self.tap_layers:  # a layer's input is the output of the one before it
                taps[index - 1] = whole
        if pending is not None:
            x = x + pending
        taps[len(self._layers) - 1] = x
        tapped = [taps[index] for index in self.tap_layers]
        return TargetOutput(x, torch.cat(tapped, dim=-1) if tapped else None)

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
