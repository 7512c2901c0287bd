"""The building blocks that targets share, written over the kernel interface.

A model here is plain Python over packed weights: no nn.Module, no hooks, no globals. Everything a
forward pass needs besides weights comes in one `ForwardBatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from flashdraft.core import Picture
from flashdraft.errors import CheckpointError, RequestError
from flashdraft.kernels.interface import (
    CAUSAL,
    BlockMask,
    HeadProducts,
    Heads,
    Kernels,
    KeyRebuild,
    PagedKeys,
    PageView,
    QKVSpec,
    Residual,
    RopeTable,
)
from flashdraft.kernels.kinds import Activation
from flashdraft.kernels.quantized import Matrix
from flashdraft.models.config.layers import LayerConfig
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.rope import Rope
from flashdraft.models.weights import Weights


@dataclass(frozen=True)
class LayerCache:
    """One layer's pages and the view that says which of them this batch reads and writes."""

    key: Tensor | None  # [num_pages, page_size, kv_heads, head_dim]; None: made of the values
    value: Tensor
    view: PageView


@dataclass(frozen=True)
class PictureRows:
    """Which rows of a pass are a picture's: all of a picture's rows are in one pass."""

    is_picture: Tensor  # [num_rows] bool
    features: Tensor  # [num_rows, hidden_size]: what such rows have in place of an embedding
    ahead: Tensor  # [num_rows] int32: rows that follow it in its picture; 0 for all others


@dataclass(frozen=True)
class ForwardBatch:
    """Everything a forward pass needs to know about its rows."""

    positions: Tensor  # [num_rows] int64
    end_position: int  # one past the largest position
    caches: Sequence[LayerCache]  # one for each of the config's cached layers
    mask: BlockMask = CAUSAL
    pictures: PictureRows | None = None


@dataclass(frozen=True)
class TargetOutput:
    """The residual stream after the last layer, and the tapped layers' outputs side by side."""

    hidden: Tensor  # [num_rows, hidden_size], before the final norm
    taps: Tensor | None  # [num_rows, num_taps * hidden_size]


class VisionTower(Protocol):
    """What turns pictures into rows of a target."""

    def encode(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """The features of each, [num_tokens, hidden_size of the target], in the kernels' dtype.

        On a CPU those of a picture have the same bits whatever others there are.
        """
        ...


class Target(Protocol):
    """The large model, as the engine sees it."""

    config: ModelConfig
    kernels: Kernels
    tap_layers: tuple[int, ...]
    vision: VisionTower | None  # None: it takes no pictures

    def forward(self, token_ids: Tensor, batch: ForwardBatch) -> TargetOutput: ...

    def prepare_positions(self, num_positions: int) -> None:
        """Make what a forward pass needs for so many positions, so that none makes it later."""
        ...

    def embed(self, token_ids: Tensor, scale: float | None = None) -> Tensor:
        """Input embeddings with the model's own scale, or with the given one."""
        ...

    def head(self, hidden: Tensor) -> HeadProducts:
        """Final norm and head: what the target says of every token, to be drawn from."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """The same as logits, [num_rows, vocab_size] float32."""
        ...

    def unembed(self, normed: Tensor) -> Tensor:
        """The head alone, for a drafter that borrows it."""
        ...

    @property
    def forbidden(self) -> Tensor | None:
        """[vocab_size] bool: tokens that no answer has; None where there are none."""
        ...


class Vocabulary:
    """The embedding table and the head, tied or not."""

    def __init__(self, weights: Weights, config: ModelConfig, kernels: Kernels) -> None:
        shape, name = (config.vocab_size, config.hidden_size), "model.embed_tokens.weight"
        matrix = weights.take_matrix(name, shape, kernels.device)
        self._scale = config.embed_scale
        self._kernels = kernels
        self.forbidden: Tensor | None = None
        if config.forbidden_token_ids:
            ids = torch.tensor(config.forbidden_token_ids, device=kernels.device)
            self.forbidden = torch.zeros(config.vocab_size, dtype=torch.bool, device=ids.device)
            self.forbidden[ids] = True
        if config.tie_embeddings:
            weights.drop("lm_head.weight")
            self._head = pack_named([name], [matrix], kernels.pack_head)
            self._table = kernels.pack_embedding(matrix, self._head)
        else:
            self._table = kernels.pack_embedding(matrix, None)
            self._head = load_matrix(weights, {"lm_head.weight": shape}, kernels, kernels.pack_head)

    def embed(self, token_ids: Tensor, scale: float | None = None) -> Tensor:
        rows = self._kernels.embed(token_ids, self._table)
        factor = self._scale if scale is None else scale
        # the scale is rounded to the model's dtype first, as the checkpoints were trained
        return rows if factor == 1.0 else rows * torch.tensor(factor, dtype=rows.dtype)

    def unembed(self, normed: Tensor) -> Tensor:
        return self._kernels.linear(normed, self._head)

    def head(self, normed: Tensor, softcap: float | None) -> HeadProducts:
        """What is said of every token."""
        return HeadProducts(self.unembed(normed), 1.0, softcap, self.forbidden)


class RopeTables:
    """One growing table for every distinct rotary embedding of a model."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._ropes = {layer.rope: Rope(layer.rope, device) for layer in config.layers}
        self._order = [layer.rope for layer in config.layers]

    def tables(self, end_position: int) -> list[RopeTable]:
        """One table per layer, long enough for positions below `end_position`."""
        tables = {rope: self._ropes[rope].table(end_position) for rope in self._ropes}
        return [tables[rope] for rope in self._order]


Projected = dict["Attention", Tensor]  # raw keys and values of a pass's rows, as projected


class Attention:
    """Fused projection, norms and rotation, paged attention, output projection."""

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        config: ModelConfig,
        layer: LayerConfig,
        kernels: Kernels,
        source: Attention | None = None,
    ) -> None:
        """`source` is that of the layer whose keys and values this one reads, if it has none."""
        dim, hidden = layer.head_dim, config.hidden_size
        parts = {"q": layer.num_heads * dim, "k": layer.num_kv_heads * dim}
        if not layer.share_kv:
            parts["v"] = layer.num_kv_heads * dim
        if source is not None:
            parts = {"q": parts["q"]}
            # some files have them all the same
            weights.drop(*(f"{prefix}.{name}." for name in ("k_proj", "v_proj", "k_norm")))
        fused = {f"{prefix}.{part}_proj.weight": (rows, hidden) for part, rows in parts.items()}
        output = {f"{prefix}.o_proj.weight": (hidden, layer.num_heads * dim)}
        self._qkv = load_matrix(weights, fused, kernels)
        self._output = load_matrix(weights, output, kernels)
        self._qkv_bias: Tensor | None = None
        self._output_bias: Tensor | None = None
        if config.qkv_bias:
            biases = [weights.take(f"{prefix}.{p}_proj.bias", (n,)) for p, n in parts.items()]
            self._qkv_bias = torch.cat(biases).to(kernels.device, kernels.dtype)
        if config.output_bias:
            output_bias = weights.take(f"{prefix}.o_proj.bias", (hidden,))
            self._output_bias = output_bias.to(kernels.device, kernels.dtype)

        def norm(name: str) -> Tensor | None:
            if not config.qk_norm:
                return None
            return load_norm(weights, f"{prefix}.{name}.weight", dim, config, kernels)

        self._spec: QKVSpec = QKVSpec(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=dim,
            eps=config.norm_eps,
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm") if source is None else source._spec.k_norm,
            v_norm=config.v_norm,
            share_kv=layer.share_kv,
        )
        self._scale = config.attention_scale or dim**-0.5
        self._window = layer.window
        is_windowed = layer.window is not None
        self._sees_pictures_whole = config.sees_pictures_whole and is_windowed
        self._num_rotated = -(-layer.rope.rotary_dims // 2)
        self._source = source
        self._kernels = kernels

    def __call__(
        self, x: Tensor, batch: ForwardBatch, cache: LayerCache, rope: RopeTable
    ) -> Tensor:
        return self._attend(self._kernels.linear(x, self._qkv), batch, cache, rope)

    def of_residual(
        self,
        residual: Residual,
        norm: Tensor,
        eps: float,
        batch: ForwardBatch,
        cache: LayerCache,
        rope: RopeTable,
        projected: Projected,
    ) -> tuple[Tensor, Tensor]:
        """The stream, and attention of its norm.

        `projected` has what layers before this one made of the pass, and gets what this one does.
        """
        stream, qkv = self._kernels.residual_linear(residual, norm, eps, self._qkv)
        width = self._spec.num_heads * self._spec.head_dim
        if self._source is None:
            projected[self] = qkv[:, width:]
        else:  # its keys and values are written once more, as they are
            qkv = torch.cat([qkv, projected[self._source]], dim=1)
        return stream, self._attend(qkv, batch, cache, rope)

    def _attend(
        self, qkv: Tensor, batch: ForwardBatch, cache: LayerCache, rope: RopeTable
    ) -> Tensor:
        kernels = self._kernels
        if self._qkv_bias is not None:
            qkv = qkv + self._qkv_bias
        mixed = kernels.attend(
            qkv,
            Heads(self._spec, rope, batch.positions),
            PagedKeys(
                cache.key,
                cache.value,
                cache.view,
                scale=self._scale,
                window=self._window,
                mask=self._mask(batch),
                rebuild=self._rebuild(rope) if cache.key is None else None,
            ),
        )
        out = kernels.linear(mixed, self._output)
        return out if self._output_bias is None else out + self._output_bias

    def _mask(self, batch: ForwardBatch) -> BlockMask:
        if batch.pictures is None or not self._sees_pictures_whole:
            return batch.mask
        return replace(batch.mask, ahead=batch.pictures.ahead)

    def _rebuild(self, rope: RopeTable) -> KeyRebuild:
        spec = self._spec
        assert spec.share_kv and spec.v_norm and spec.k_norm is not None
        return KeyRebuild(spec.k_norm, rope, self._num_rotated)


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation,
        kernels: Kernels,
    ) -> None:
        sizes = hidden_size, intermediate_size
        self._gate_up, self._down = load_mlp(weights, prefix, *sizes, kernels)
        self._activation = activation
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        gated = self._kernels.gated_linear(x, self._gate_up, self._activation)
        return self._kernels.linear(gated, self._down)

    def of_residual(self, residual: Residual, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The stream, and this of its norm."""
        kernels, activation = self._kernels, self._activation
        stream, gated = kernels.residual_linear(residual, norm, eps, self._gate_up, activation)
        return stream, kernels.linear(gated, self._down)


class ExpertsMLP:
    """The chosen experts' sum, in a gated MLP's place."""

    def __init__(
        self, weights: Weights, prefix: str, config: ModelConfig, kernels: Kernels
    ) -> None:
        assert config.experts is not None
        count, hidden = config.experts.num_experts, config.hidden_size
        router = weights.take_matrix(
            f"{prefix}.router.proj.weight", (count, hidden), kernels.device
        )
        self._router = kernels.pack(router, quantize=False)
        self._gate_up, self._down = load_experts(weights, f"{prefix}.experts", config, kernels)
        self._num_chosen = config.experts.num_chosen
        self._scale = torch.ones(count, device=kernels.device)
        self._activation = config.activation
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        kernels = self._kernels
        choice = kernels.route(x, self._router, self._num_chosen, self._scale)
        return kernels.experts(x, self._gate_up, self._down, *choice, self._activation)


def load_experts(
    weights: Weights, prefix: str, config: ModelConfig, kernels: Kernels
) -> tuple[Any, Any]:
    """The [gate | up] and down of all of a layer's experts, packed."""
    assert config.experts is not None
    count, inner = config.experts.num_experts, config.experts.intermediate_size
    gate_up = {f"{prefix}.gate_up_proj": (count, 2 * inner, config.hidden_size)}
    down = {f"{prefix}.down_proj": (count, config.hidden_size, inner)}
    pack = kernels.pack_experts
    return load_matrix(weights, gate_up, kernels, pack), load_matrix(weights, down, kernels, pack)


def load_mlp(
    weights: Weights, prefix: str, hidden_size: int, intermediate_size: int, kernels: Kernels
) -> tuple[Any, Any]:
    """A gated MLP's [gate | up] and down, packed."""
    shape = (intermediate_size, hidden_size)
    fused = {f"{prefix}.{part}_proj.weight": shape for part in ("gate", "up")}
    down = {f"{prefix}.down_proj.weight": (hidden_size, intermediate_size)}
    return load_matrix(weights, fused, kernels), load_matrix(weights, down, kernels)


def load_matrix(
    weights: Weights,
    shapes: Mapping[str, Sequence[int]],
    kernels: Kernels,
    pack: Callable[..., Any] | None = None,
) -> Any:
    """Weights of the same inputs by name, packed as one by `kernels.pack`, or by `pack`."""
    parts = [weights.take_matrix(name, shape, kernels.device) for name, shape in shapes.items()]
    return pack_named(list(shapes), parts, pack or kernels.pack)


def pack_named(names: Sequence[str], parts: Sequence[Matrix], pack: Callable[..., Any]) -> Any:
    """pack(*parts); what a backend has against them is said with their names."""
    try:
        return pack(*parts)
    except (CheckpointError, RequestError) as error:
        raise type(error)(f"Tensor {' and '.join(map(repr, names))}: {error}") from None


def load_norm(
    weights: Weights, name: str, size: int, config: ModelConfig, kernels: Kernels
) -> Tensor:
    """What a norm multiplies by, on the backend's device and in its dtype."""
    weight = weights.take(name, (size,)).float() + config.norm_offset
    return weight.to(kernels.device, kernels.dtype)


def load_vector(weights: Weights, name: str, size: int, kernels: Kernels) -> Tensor:
    """A vector of a checkpoint, on the backend's device and in its dtype."""
    return weights.take(name, (size,)).to(kernels.device, kernels.dtype)


def check_taps(tap_layers: Sequence[int], config: ModelConfig) -> tuple[int, ...]:
    """Tap indices, checked against the model's depth (0-based, the layer's output)."""
    count = len(config.layers)
    for tap in tap_layers:
        if not 0 <= tap < count:
            raise ValueError(f"tap layer {tap} is outside the target's {count} layers")
    return tuple(tap_layers)
