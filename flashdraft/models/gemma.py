"""Gemma 3 and 4, dense and mixture of experts (26B-A4B); Gemma 4's tower for pictures is vision/.

What differs from the Llama family: sandwich norms, a RoPE for each kind of layers, a scaled
embedding; in Gemma 3 norms that count from one. In Gemma 4 a scalar per layer on the residual
stream, value norms, full layers that share one projection for key and value, proportional RoPE
there, a soft-capped head, and experts that run beside the dense MLP; in its small models (E2B, E4B)
inputs of every layer's own, and layers that read the keys and values of an earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flashdraft.kernels.interface import HeadProducts, Kernels, Mixture, Residual, RopeTable
from flashdraft.models.config.layers import ExpertsConfig, PerLayerConfig
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.layers import (
    Attention,
    ForwardBatch,
    GatedMLP,
    LayerCache,
    PictureRows,
    Projected,
    RopeTables,
    TargetOutput,
    VisionTower,
    Vocabulary,
    check_taps,
    load_experts,
    load_matrix,
    load_mlp,
    load_norm,
    load_vector,
)
from flashdraft.models.vision.tower import Gemma4VisionTower
from flashdraft.models.weights import Weights


def load_mixture(
    weights: Weights,
    prefix: str,
    config: ModelConfig,
    inner: int,
    experts: ExpertsConfig,
    kernels: Kernels,
) -> Mixture:
    """A layer's MLP, router and experts."""
    hidden, count = config.hidden_size, experts.num_experts

    def norm(name: str) -> Tensor:
        return load_norm(weights, f"{prefix}.{name}", hidden, config, kernels)

    sizes = hidden, inner
    dense_gate_up, dense_down = load_mlp(weights, f"{prefix}.mlp", *sizes, kernels)
    router = weights.take_matrix(f"{prefix}.router.proj.weight", (count, hidden), kernels.device)
    scale = weights.take(f"{prefix}.router.per_expert_scale", (count,))
    gate_up, down = load_experts(weights, f"{prefix}.experts", config, kernels)
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
        expert_gate_up=gate_up,
        expert_down=down,
        activation=config.activation,
        eps=config.norm_eps,
    )


class GemmaLayer:
    """Attention and MLP, each between two norms; experts beside the MLP where there are any.

    A layer takes the residual stream as a sum that is still to be made, and hands on another: its
    first linear adds up, and norms, what it reads.
    """

    def __init__(
        self,
        weights: Weights,
        index: int,
        config: ModelConfig,
        kernels: Kernels,
        source: GemmaLayer | None = None,
    ) -> None:
        prefix, hidden = f"model.layers.{index}", config.hidden_size
        layer = config.layers[index]

        def norm(name: str) -> Tensor:
            return load_norm(weights, f"{prefix}.{name}.weight", hidden, config, kernels)

        self._input_norm = norm("input_layernorm")
        self._post_attention_norm = norm("post_attention_layernorm")
        self._post_mlp_norm = norm("post_feedforward_layernorm")
        self._scalar: Tensor | None = None
        if config.layer_scalars:
            self._scalar = load_vector(weights, f"{prefix}.layer_scalar", 1, kernels)
        self.attention: Attention = Attention(
            weights,
            f"{prefix}.self_attn",
            config,
            layer,
            kernels,
            None if source is None else source.attention,
        )
        self._inputs: LayerInputs | None = None
        if config.per_layer is not None:
            self._inputs = LayerInputs(weights, prefix, config, config.per_layer, kernels)
        self._mixture: Mixture | None = None
        inner = layer.intermediate_size
        if config.experts is not None:
            self._mixture = load_mixture(weights, prefix, config, inner, config.experts, kernels)
            self._dense_norm = norm("post_feedforward_layernorm_1")
            self._experts_norm = norm("post_feedforward_layernorm_2")
        else:
            self._pre_mlp_norm = norm("pre_feedforward_layernorm")
            self._mlp = GatedMLP(
                weights, f"{prefix}.mlp", hidden, inner, config.activation, kernels
            )
        self._eps = config.norm_eps
        self._kernels = kernels

    def __call__(
        self,
        residual: Residual,
        batch: ForwardBatch,
        cache: LayerCache,
        rope: RopeTable,
        projected: Projected,
        brought: Tensor | None,
    ) -> tuple[Tensor, Residual]:
        """The stream before this layer, and after it; `brought` is what the tokens have for it."""
        kernels, eps = self._kernels, self._eps
        before, mixed = self.attention.of_residual(
            residual, self._input_norm, eps, batch, cache, rope, projected
        )
        attended = Residual(before, [(mixed, self._post_attention_norm)])
        if self._mixture is None:
            x, dense = self._mlp.of_residual(attended, self._pre_mlp_norm, eps)
            after = Residual(x, [(dense, self._post_mlp_norm)])
        else:
            x, dense, experts = kernels.mixture(attended, self._mixture)
            deltas = [(dense, self._dense_norm), (experts, self._experts_norm)]
            after = Residual(x, deltas, self._post_mlp_norm)
        if self._inputs is not None and brought is not None:
            after = self._inputs.add(after, brought, eps)
        return before, replace(after, scalar=self._scalar)


class LayerInputs:
    """How what a token brings to a layer joins the stream: gated by it, projected, normed."""

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        config: ModelConfig,
        inputs: PerLayerConfig,
        kernels: Kernels,
    ) -> None:
        hidden, width = config.hidden_size, inputs.width
        gate = {f"{prefix}.per_layer_input_gate.weight": (width, hidden)}
        projection = {f"{prefix}.per_layer_projection.weight": (hidden, width)}
        self._gate = load_matrix(weights, gate, kernels)
        self._projection = load_matrix(weights, projection, kernels)
        name = f"{prefix}.post_per_layer_input_norm.weight"
        self._norm = load_norm(weights, name, hidden, config, kernels)
        self._activation = config.activation
        self._kernels = kernels

    def add(self, residual: Residual, brought: Tensor, eps: float) -> Residual:
        """The stream with this behind it."""
        kernels = self._kernels
        stream, _ = kernels.residual_norms(residual, [], eps)
        both = torch.cat([kernels.linear(stream, self._gate), brought], dim=1)
        joined = kernels.linear(kernels.gated(both, self._activation), self._projection)
        return Residual(stream, [(joined, self._norm)])


class TokenInputs:
    """What tokens bring to every layer: a row of a large table, and a part of their embedding."""

    def __init__(
        self, weights: Weights, config: ModelConfig, inputs: PerLayerConfig, kernels: Kernels
    ) -> None:
        self._shape = (len(config.layers), inputs.width)
        hidden, total = config.hidden_size, len(config.layers) * inputs.width
        table, shape = "model.embed_tokens_per_layer.weight", (config.vocab_size, total)
        matrix = weights.take_matrix(table, shape, kernels.device)
        self._table = kernels.pack_embedding(matrix, None)
        projection = {"model.per_layer_model_projection.weight": (total, hidden)}
        self._projection = load_matrix(weights, projection, kernels)
        name = "model.per_layer_projection_norm.weight"
        self._norm = load_norm(weights, name, inputs.width, config, kernels)
        # rounded to the model's dtype first, as the table's scale is
        self._table_scale = torch.tensor(inputs.width**0.5, dtype=kernels.dtype)
        self._scale, self._eps, self._kernels = hidden**-0.5, config.norm_eps, kernels
        self._pad = inputs.pad_token

    def __call__(self, token_ids: Tensor, embedded: Tensor, pictures: PictureRows | None) -> Tensor:
        """[num_rows, num_layers, width]; `embedded` has the features of pictures."""
        kernels, (count, width) = self._kernels, self._shape
        if pictures is not None:
            token_ids = token_ids.masked_fill(pictures.is_picture, self._pad)
        rows = kernels.embed(token_ids, self._table) * self._table_scale
        parts = (kernels.linear(embedded, self._projection) * self._scale).view(-1, width)
        normed = kernels.rms_norm(parts, self._norm, self._eps).view(-1, count * width)
        return ((normed + rows) * 2**-0.5).view(-1, count, width)


class GemmaTarget:
    """Gemma's text decoder, and what turns pictures into its rows."""

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
        self._layers: list[GemmaLayer] = []
        for index, layer in enumerate(config.layers):
            source = None if layer.kv_source is None else self._layers[layer.kv_source]
            self._layers.append(GemmaLayer(weights, index, config, kernels, source))
        self._inputs: TokenInputs | None = None
        if config.per_layer is not None:
            self._inputs = TokenInputs(weights, config, config.per_layer, kernels)
        self._places = config.cache_places
        self._norm = load_norm(weights, "model.norm.weight", config.hidden_size, config, kernels)
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
        brought = None
        if self._inputs is not None:
            brought = self._inputs(token_ids, x, batch.pictures)
        residual, projected = Residual(x), Projected()
        tables = self._ropes.tables(batch.end_position)
        streams: dict[int, Tensor] = {}  # after the layers that are tapped
        for index, layer in enumerate(self._layers):
            before, residual = layer(
                residual,
                batch,
                batch.caches[self._places[index]],
                tables[index],
                projected,
                None if brought is None else brought[:, index],
            )
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
