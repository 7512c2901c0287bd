"""Gemma 4's vision tower: patches through layers, pooled, and projected to a target's width.

It differs from the text layers in that every patch sees every patch of its picture, and that a head
turns by two positions: its first half by the patch's column, its second by the row. In towers of
small models layers' matrices have limits (linears.py). The weights stay in floats on every backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashdraft.core import Picture
from flashdraft.errors import CheckpointError, quoted
from flashdraft.kernels.interface import (
    Heads,
    Kernels,
    QKVSpec,
    Residual,
    RopeTable,
    WholeSequences,
)
from flashdraft.kernels.kinds import Activation
from flashdraft.models.config.rope import RopeConfig
from flashdraft.models.config.vision import LIMITS, VisionConfig
from flashdraft.models.layers import load_vector
from flashdraft.models.rope import Rope
from flashdraft.models.vision.linears import Linears, MatrixLimits, TowerMatrix
from flashdraft.models.vision.patches import Patches, passes
from flashdraft.models.weights import Weights

MAX_PATCHES = 16_384  # of several pictures in a pass

_PREFIX = "model.vision_tower"


@dataclass(frozen=True)
class _Pass:
    """What the layers need to know about the patches of a pass."""

    rope: RopeTable  # a row for every patch
    patches: Tensor  # [num_patches] int64: their own rows
    pictures: WholeSequences


class _Loader:
    """A tower's tensors by name, packed in floats."""

    def __init__(self, weights: Weights, kernels: Kernels) -> None:
        self._weights = weights
        self.kernels = kernels

    def matrix(self, *parts: Tensor) -> object:
        return self.kernels.pack(*parts, quantize=False)

    def take(self, name: str, *shape: int) -> Tensor:
        return self._weights.take(name, shape)

    def matrix_of(self, name: str, rows: int, columns: int, clipped: bool) -> TowerMatrix:
        """A layer's matrix, with its limits where it has some."""
        weight = self.take(f"{name}.linear.weight", rows, columns)
        return TowerMatrix(weight, self._limits(name) if clipped else None)

    def _limits(self, name: str) -> MatrixLimits:
        """Rounded as whatever they limit is."""
        found = [float(self.take(f"{name}.{one}").to(self.kernels.dtype)) for one in LIMITS]
        inputs, products = (found[0], found[1]), (found[2], found[3])
        if not (inputs[0] <= inputs[1] and products[0] <= products[1]):
            raise CheckpointError(
                f"The limits of {quoted(name)} ({', '.join(LIMITS)}) are {found}; each least must "
                "be at most its most. Fetch the checkpoint again."
            )
        return MatrixLimits(inputs, products)

    def vector(self, name: str, size: int) -> Tensor:
        return load_vector(self._weights, name, size, self.kernels)


class _Layer:
    """Attention and MLP, each between two norms."""

    def __init__(self, load: _Loader, index: int, config: VisionConfig) -> None:
        prefix, hidden = f"{_PREFIX}.encoder.layers.{index}", config.hidden_size
        inner, wide = config.num_heads * config.head_dim, config.intermediate_size
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        order = _turned_together(config.head_dim)

        def projection(name: str, rows: int, columns: int) -> TowerMatrix:
            return load.matrix_of(f"{name}_proj", rows, columns, config.clipped)

        def norm(name: str) -> Tensor:
            return load.vector(f"{prefix}.{name}_layernorm.weight", hidden)

        query, key, value = (projection(f"{attention}.{one}", inner, hidden) for one in "qkv")
        turned = [one._replace(weight=_ordered(one.weight, order)) for one in (query, key)]
        self._qkv = Linears(load.kernels, *turned, value)
        self._output = Linears(load.kernels, projection(f"{attention}.o", hidden, inner))
        gate, up = (projection(f"{mlp}.{one}", wide, hidden) for one in ("gate", "up"))
        self._gate_up = Linears(load.kernels, gate, up)
        self._down = Linears(load.kernels, projection(f"{mlp}.down", hidden, wide))
        self._input_norm, self._pre_mlp_norm = norm("input"), norm("pre_feedforward")
        self._post_attention_norm = norm("post_attention")
        self._post_mlp_norm = norm("post_feedforward")
        order = order.to(load.kernels.device)
        q_norm, k_norm = (
            load.vector(f"{attention}.{one}_norm.weight", config.head_dim)[order] for one in "qk"
        )
        self._spec = QKVSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_dim=config.head_dim,
            eps=config.norm_eps,
            q_norm=q_norm,
            k_norm=k_norm,
            v_norm=True,
        )
        self._kernels = load.kernels

    def __call__(self, residual: Residual, batch: _Pass) -> Residual:
        eps = self._spec.eps
        x, qkv = self._qkv.of_residual(residual, self._input_norm, eps)
        heads = Heads(self._spec, batch.rope, batch.patches)
        mixed = self._output(self._kernels.attend_whole(qkv, heads, batch.pictures, 1.0))
        attended = Residual(x, [(mixed, self._post_attention_norm)])
        norm = self._pre_mlp_norm
        x, gated = self._gate_up.of_residual(attended, norm, eps, Activation.GELU_TANH)
        return Residual(x, [(self._down(gated), self._post_mlp_norm)])


class Gemma4VisionTower:
    """Pictures into features, unpadded, several in a pass."""

    def __init__(
        self, config: VisionConfig, target_width: int, weights: Weights, kernels: Kernels
    ) -> None:
        hidden, load = config.hidden_size, _Loader(weights, kernels)
        values = 3 * config.patch_size**2
        embedder = f"{_PREFIX}.patch_embedder"
        self._input = load.matrix(load.take(f"{embedder}.input_proj.weight", hidden, values))
        table = load.take(f"{embedder}.position_embedding_table", 2, config.num_positions, hidden)
        self._of_column, self._of_row = table.to(kernels.device, kernels.dtype)
        self._layers = [_Layer(load, index, config) for index in range(config.num_layers)]
        self._bias: Tensor | None = None
        if config.standardize:
            self._bias = load.vector(f"{_PREFIX}.std_bias", hidden).float()
            self._scale = load.vector(f"{_PREFIX}.std_scale", hidden).float()
        projection = load.take(
            "model.embed_vision.embedding_projection.weight", target_width, hidden
        )
        self._projection = load.matrix(projection)
        # each half of a head turns as a head of its own would
        rope = RopeConfig(config.rope_theta, config.head_dim // 2, config.head_dim // 2)
        angles = Rope(rope, kernels.device).table(config.num_positions)
        self._angles = [each.to(kernels.dtype).float() for each in (angles.cos, angles.sin)]
        self.config, self.device = config, kernels.device
        self._kernels = kernels

    @property
    def is_capturable(self) -> bool:
        """Whether `features` is fit for a CUDA graph: it waits for nothing, and may be padded."""
        kernels = self._kernels
        return kernels.device.type == "cuda" and not kernels.exact and kernels.dtype.itemsize == 2

    def encode(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """The features of each, [num_tokens, target_width]."""
        features: list[Tensor] = []
        for some in passes(pictures, MAX_PATCHES // self.config.pooling**2):
            patches = Patches.of(some, self.config, self.device)
            sizes = [picture.num_tokens for picture in some]
            features += torch.split(self.features(patches), sizes)
        return features

    def features(self, patches: Patches) -> Tensor:
        """[num_tokens, target_width] of whole cells; its work depends on shapes alone."""
        return self._project(self._pool(self._run(patches)))

    def _run(self, patches: Patches) -> Tensor:
        """The stream behind the last layer, [num_patches, hidden_size]."""
        kernels = self._kernels
        shades = (patches.pixels.float() / 255 - 0.5) * 2
        places = self._of_column[patches.columns] + self._of_row[patches.rows]
        x = kernels.linear(shades.to(kernels.dtype), self._input) + places
        cos, sin = (
            torch.cat([each[patches.columns], each[patches.rows]], dim=1) for each in self._angles
        )
        own = torch.arange(len(x), device=kernels.device)
        batch, residual = _Pass(RopeTable(cos, sin), own, patches.pictures), Residual(x)
        for layer in self._layers:
            residual = layer(residual, batch)
        return kernels.residual_norms(residual, [], self.config.norm_eps)[0]

    def _pool(self, x: Tensor) -> Tensor:
        """The mean of every cell's patches, as large as the text's rows are; in float32 within."""
        size = self.config.pooling**2
        cells = x.view(-1, size, x.shape[1])
        total = cells[:, 0].float()
        for index in range(1, size):  # in this order, however many cells there are
            total = total + cells[:, index].float()
        mean = (total / size).to(x.dtype).float() * self.config.hidden_size**0.5
        if self._bias is not None:
            mean = (mean - self._bias) * self._scale
        return mean.to(x.dtype)

    def _project(self, x: Tensor) -> Tensor:
        normed = self._kernels.rms_norm(x, None, self.config.norm_eps)
        return self._kernels.linear(normed, self._projection)


def _turned_together(head_dim: int) -> Tensor:
    """A head's dimensions in an order in which two that turn together are half a head apart.

    They are a quarter apart, within each half.
    """
    quarters = torch.arange(head_dim).view(4, -1)
    return quarters[[0, 2, 1, 3]].flatten()


def _ordered(weight: Tensor, order: Tensor) -> Tensor:
    """Rows of all heads, each head's in this order."""
    return weight.view(-1, len(order), weight.shape[1])[:, order].reshape(weight.shape)
