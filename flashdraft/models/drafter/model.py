"""The block drafter: one forward pass, for training and for inference alike.

`Drafter` holds the parameters, named as in z-lab's checkpoints, and differentiates; `PackedDrafter`
holds the same weights in a kernel backend's format. Both run `_run_layer` below over their own
operations. Attention (norms of q and k, rotation, cache, mask) is passed in as `attend`: paged in
the engine, attention.py's in training and tests. Files are loading.py's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashdraft.kernels.interface import HeadProducts, Kernels, QKVSpec
from flashdraft.kernels.kinds import Activation
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.rope import Rope

Attend = Callable[[int, Tensor], Tensor]
"""(layer, rows of [q heads | k heads | v heads]) -> [num_rows, num_heads * head_dim]."""

# the residual stream, and the last sublayer's output not yet added to it (None before layer 0)
_Stream = tuple[Tensor, Tensor | None]
_Layer = Callable[[_Stream, Callable[[Tensor], Tensor]], _Stream]


class TargetVocabulary(Protocol):
    """What a drafter borrows from its target."""

    def embed(self, token_ids: Tensor, scale: float | None = None) -> Tensor: ...

    def unembed(self, normed: Tensor) -> Tensor: ...

    @property
    def forbidden(self) -> Tensor | None: ...


class Operations(Protocol):
    """The part of a kernel backend that a drafter's layers use."""

    def linear(self, x: Tensor, weight: Any) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...

    def gated_linear(self, x: Tensor, weight: Any, activation: Activation) -> Tensor: ...


class AutogradOperations:
    """The operations for training: differentiable, over tuples of weights stacked by output."""

    def linear(self, x: Tensor, weight: tuple[Tensor, ...]) -> Tensor:
        parts = [F.linear(x, part) for part in weight]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide if weight is None else wide * weight.float()).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + delta
        return total, self.rms_norm(total, weight, eps)

    def gated_linear(self, x: Tensor, weight: tuple[Tensor, ...], activation: Activation) -> Tensor:
        assert activation is Activation.SILU, "drafters are SwiGLU models"
        gate, up = self.linear(x, weight).chunk(2, dim=-1)
        return F.silu(gate) * up


AUTOGRAD = AutogradOperations()


@dataclass(frozen=True)
class _LayerWeights:
    """One layer's weights; the matrices in whatever format the operations take."""

    input_norm: Tensor
    qkv: Any
    output: Any
    mlp_norm: Tensor
    gate_up: Any
    down: Any


def _run_layer(
    operations: Operations,
    weights: _LayerWeights,
    eps: float,
    stream: _Stream,
    attend: Callable[[Tensor], Tensor],
) -> _Stream:
    """Pre-norm attention and pre-norm SwiGLU; every addition is fused with the norm after it."""
    hidden, pending = stream
    if pending is None:
        normed = operations.rms_norm(hidden, weights.input_norm, eps)
    else:
        hidden, normed = operations.add_rms_norm(hidden, pending, weights.input_norm, eps)
    mixed = operations.linear(attend(operations.linear(normed, weights.qkv)), weights.output)
    hidden, normed = operations.add_rms_norm(hidden, mixed, weights.mlp_norm, eps)
    gated = operations.gated_linear(normed, weights.gate_up, Activation.SILU)
    return hidden, operations.linear(gated, weights.down)


def _run_layers(
    layers: Iterable[_Layer], embeddings: Tensor, attend: Attend
) -> tuple[Tensor, Tensor]:
    stream: _Stream = (embeddings, None)
    for index, layer in enumerate(layers):
        stream = layer(stream, partial(attend, index))
    hidden, pending = stream
    assert pending is not None, "a drafter has at least one layer"
    return hidden, pending


class _AttentionParameters(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim)
        self.k_norm = nn.RMSNorm(config.head_dim)


class _MLPParameters(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class DrafterLayer(nn.Module):
    """One layer's parameters, under their names in the checkpoint."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = _AttentionParameters(config)
        self.mlp = _MLPParameters(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size)
        self._eps = config.norm_eps

    def weights(
        self, matrix: Callable[..., Any], vector: Callable[[Tensor], Tensor]
    ) -> _LayerWeights:
        """The layer's weights; `matrix` takes those that share their input and are to be fused."""
        attention, mlp = self.self_attn, self.mlp
        return _LayerWeights(
            input_norm=vector(self.input_layernorm.weight),
            qkv=matrix(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
            output=matrix(attention.o_proj.weight),
            mlp_norm=vector(self.post_attention_layernorm.weight),
            gate_up=matrix(mlp.gate_proj.weight, mlp.up_proj.weight),
            down=matrix(mlp.down_proj.weight),
        )

    def context_matrices(self) -> tuple[Tensor, Tensor]:
        """The projections of the context: the layer's own for keys and values."""
        return self.self_attn.k_proj.weight, self.self_attn.v_proj.weight

    def forward(self, stream: _Stream, attend: Callable[[Tensor], Tensor]) -> _Stream:
        weights = self.weights(matrix=lambda *parts: parts, vector=lambda weight: weight)
        return _run_layer(AUTOGRAD, weights, self._eps, stream, attend)


class Drafter(nn.Module):
    """The drafter's parameters, and its differentiable forward pass."""

    d2t: Tensor | None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.tap_layers) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(hidden)
        reduced = config.draft_vocab_size
        self.lm_head = None if reduced is None else nn.Linear(hidden, reduced, bias=False)
        # target id = draft id + d2t[draft id]
        offsets = None if reduced is None else torch.zeros(reduced, dtype=torch.int64)
        self.register_buffer("d2t", offsets)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def layer(self, index: int) -> DrafterLayer:
        """One layer, with its type."""
        layer = self.layers[index]
        assert isinstance(layer, DrafterLayer)
        return layer

    def embed(self, target: TargetVocabulary, token_ids: Tensor) -> Tensor:
        """Embeddings of a block's tokens, scaled as this drafter was trained."""
        return target.embed(token_ids, self.config.embed_scale)

    def context(self, taps: Tensor) -> Tensor:
        """What every layer sees of the target: [num_rows, hidden_size] from the tapped layers."""
        return AUTOGRAD.rms_norm(self.fc(taps), self.hidden_norm.weight, self.config.norm_eps)

    def context_kv(self, layer: int, context: Tensor) -> Tensor:
        """One layer's [k heads | v heads] of context rows, which skip its input norm."""
        return AUTOGRAD.linear(context, self.layer(layer).context_matrices())

    def forward(self, embeddings: Tensor, attend: Attend) -> Tensor:
        """Block rows in, final normed hidden rows out."""
        hidden, pending = _run_layers(self.layers, embeddings, attend)
        return AUTOGRAD.add_rms_norm(hidden, pending, self.norm.weight, self.config.norm_eps)[1]

    def logits(self, target: TargetVocabulary, hidden: Tensor) -> Tensor:
        """Draft logits, over the target's vocabulary or the drafter's reduced one."""
        raw = target.unembed(hidden) if self.lm_head is None else self.lm_head(hidden)
        logits, cap = raw.float() * self.config.output_multiplier, self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


class PackedDrafter:
    """A drafter for inference: the same forward pass over a kernel backend's packed weights."""

    def __init__(self, drafter: Drafter, kernels: Kernels) -> None:
        self.config = config = drafter.config
        self.kernels = kernels
        self.rope = Rope(config.rope, kernels.device)

        def matrix(*parts: Tensor) -> Any:
            return kernels.pack_drafter(*(part.detach() for part in parts))

        def vector(weight: Tensor) -> Tensor:
            return weight.detach().to(kernels.device, kernels.dtype)

        layers = [drafter.layer(index) for index in range(config.num_layers)]
        self._fc = matrix(drafter.fc.weight)
        self._hidden_norm = vector(drafter.hidden_norm.weight)
        self._layers = [
            partial(_run_layer, kernels, layer.weights(matrix, vector), config.norm_eps)
            for layer in layers
        ]
        self._norm = vector(drafter.norm.weight)
        # every layer's context rows come of one product: k and v of layer 0, of layer 1, …
        self._context = matrix(*(part for layer in layers for part in layer.context_matrices()))
        self._query_norms = [vector(layer.self_attn.q_norm.weight) for layer in layers]
        self._key_norms = [vector(layer.self_attn.k_norm.weight) for layer in layers]
        self._head = None if drafter.lm_head is None else matrix(drafter.lm_head.weight)
        self._offsets = None if drafter.d2t is None else drafter.d2t.to(kernels.device)

    def embed(self, target: TargetVocabulary, token_ids: Tensor) -> Tensor:
        """Embeddings of a block's tokens, scaled as this drafter was trained."""
        return target.embed(token_ids, self.config.embed_scale)

    def context(self, taps: Tensor) -> Tensor:
        """What every layer sees of the target: [num_rows, hidden_size] from the tapped layers."""
        projected = self.kernels.linear(taps, self._fc)
        return self.kernels.rms_norm(projected, self._hidden_norm, self.config.norm_eps)

    def context_kv(self, context: Tensor) -> Tensor:
        """All layers' rows for `context_spec`, [num_layers, num_rows, 2 * kv_heads * head_dim]."""
        rows = self.kernels.linear(context, self._context)
        return rows.view(context.shape[0], self.config.num_layers, -1).transpose(0, 1).contiguous()

    def forward(self, embeddings: Tensor, attend: Attend) -> Tensor:
        """Block rows in, final normed hidden rows out."""
        hidden, pending = _run_layers(self._layers, embeddings, attend)
        return self.kernels.add_rms_norm(hidden, pending, self._norm, self.config.norm_eps)[1]

    def head(self, target: TargetVocabulary, hidden: Tensor) -> HeadProducts:
        """What the drafter says of the target's vocabulary, or of its own reduced one."""
        if self._head is None:
            raw = target.unembed(hidden)
        else:
            raw = self.kernels.linear(hidden, self._head)
        multiplier, softcap = self.config.output_multiplier, self.config.logit_softcap
        return HeadProducts(raw, multiplier, softcap, self._forbidden(target))

    def logits(self, target: TargetVocabulary, hidden: Tensor) -> Tensor:
        """The same as logits, float32; -inf for tokens that no answer has."""
        return self.kernels.finish_logits(*self.head(target, hidden))

    def _forbidden(self, target: TargetVocabulary) -> Tensor | None:
        """The draft tokens that no answer has, [draft vocabulary] bool."""
        forbidden, size = target.forbidden, self.config.draft_vocab_size
        if forbidden is None or size is None:
            return forbidden
        return forbidden[self.target_ids(torch.arange(size, device=forbidden.device))]

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's token ids for ids of the draft vocabulary."""
        return draft_ids if self._offsets is None else draft_ids + self._offsets[draft_ids]

    def qkv_spec(self, layer: int) -> QKVSpec:
        """How a layer's block rows are prepared for attention."""
        return QKVSpec(
            num_heads=self.config.num_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            eps=self.config.norm_eps,
            q_norm=self._query_norms[layer],
            k_norm=self._key_norms[layer],
        )

    def context_spec(self, layer: int) -> QKVSpec:
        """How a layer's context rows are prepared: keys and values, no queries."""
        return replace(self.qkv_spec(layer), num_heads=0, q_norm=None)
