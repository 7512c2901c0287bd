"""The block drafter: one forward pass, for training and for inference alike.

`Drafter` holds the parameters, named as in z-lab's checkpoints, and differentiates; `PackedDrafter`
holds the same weights in a kernel backend's format. Both run `_run_layer` below over their own
operations. A drafter with convolutions needs to know every row's place in its block. What a head
makes of slots is heads.py's. Attention (norms of q and k, rotation, cache, mask) is passed in as
`attend`: paged in the engine, attention.py's in training and tests. Files are loading.py's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashdraft.kernels.convolution import Convolution, convolve
from flashdraft.kernels.draw.rule import MAX_TOP, DrawnRows, SlotSettings
from flashdraft.kernels.interface import HeadProducts, Kernels, QKVSpec
from flashdraft.kernels.kinds import Activation
from flashdraft.kernels.paths import PathScores, list_candidates
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.head_config import ConvolutionConfig
from flashdraft.models.drafter.heads import (
    CandidateSelector,
    ConfidenceHead,
    MarkovHead,
    make_head,
    score_paths,
)
from flashdraft.models.rope import Rope

Attend = Callable[[int, Tensor], Tensor]
"""(layer, rows of [q heads | k heads | v heads]) -> [num_rows, num_heads * head_dim]."""

# the residual stream, and the last sublayer's output not yet added to it (None before layer 0)
_Stream = tuple[Tensor, Tensor | None]
_Layer = Callable[[_Stream, Callable[[Tensor], Tensor], Tensor | None], _Stream]


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

    def convolve(self, x: Tensor, convolution: Convolution) -> Tensor: ...


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

    def convolve(self, x: Tensor, convolution: Convolution) -> Tensor:
        return convolve(x, convolution)


AUTOGRAD = AutogradOperations()


@dataclass(frozen=True)
class _ConvolutionWeights:
    """The convolutions before and behind one sublayer, whose kernels come of its input."""

    base: Tensor  # [2, taps, hidden_size]
    projection: Any

    def prepare(
        self, operations: Operations, x: Tensor, places: Tensor
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The sublayer's input, and what becomes of its output."""
        before, behind = operations.linear(x, self.projection).chunk(2, dim=1)
        prepared = operations.convolve(x, Convolution(self.base[0], before, places))
        last = Convolution(self.base[1], behind, places)
        return prepared, partial(operations.convolve, convolution=last)


@dataclass(frozen=True)
class _LayerWeights:
    """One layer's weights; the matrices in whatever format the operations take."""

    input_norm: Tensor
    qkv: Any
    output: Any
    mlp_norm: Tensor
    gate_up: Any
    down: Any
    attention_conv: _ConvolutionWeights | None
    mlp_conv: _ConvolutionWeights | None


def _run_layer(
    operations: Operations,
    weights: _LayerWeights,
    eps: float,
    stream: _Stream,
    attend: Callable[[Tensor], Tensor],
    places: Tensor | None,
) -> _Stream:
    """Pre-norm attention and pre-norm SwiGLU; every addition is fused with the norm after it."""
    hidden, pending = stream
    if pending is None:
        normed = operations.rms_norm(hidden, weights.input_norm, eps)
    else:
        hidden, normed = operations.add_rms_norm(hidden, pending, weights.input_norm, eps)
    normed, finish = _convolved(operations, weights.attention_conv, normed, places)
    mixed = operations.linear(attend(operations.linear(normed, weights.qkv)), weights.output)
    hidden, normed = operations.add_rms_norm(hidden, finish(mixed), weights.mlp_norm, eps)
    normed, finish = _convolved(operations, weights.mlp_conv, normed, places)
    gated = operations.gated_linear(normed, weights.gate_up, Activation.SILU)
    return hidden, finish(operations.linear(gated, weights.down))


def _convolved(
    operations: Operations, weights: _ConvolutionWeights | None, x: Tensor, places: Tensor | None
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A sublayer's input, and what becomes of its output."""
    if weights is None:
        return x, lambda output: output
    assert places is not None, "a drafter with convolutions is told where blocks begin"
    return weights.prepare(operations, x, places)


def _run_layers(
    layers: Iterable[_Layer], embeddings: Tensor, attend: Attend, places: Tensor | None
) -> tuple[Tensor, Tensor]:
    stream: _Stream = (embeddings, None)
    for index, layer in enumerate(layers):
        stream = layer(stream, partial(attend, index), places)
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


class _ConvolutionParameters(nn.Module):
    def __init__(self, config: ConvolutionConfig, hidden_size: int) -> None:
        super().__init__()
        kernels = 2 * config.num_taps * (hidden_size // config.group_size)
        self.base_kernel = nn.Parameter(torch.empty(2, config.num_taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, kernels, bias=False)

    @torch.no_grad()
    def begin(self) -> None:
        """Change nothing at first."""
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def weights(
        self, matrix: Callable[..., Any], vector: Callable[[Tensor], Tensor]
    ) -> _ConvolutionWeights:
        return _ConvolutionWeights(vector(self.base_kernel), matrix(self.kernel_projection.weight))


def _weights_of(
    convolution: _ConvolutionParameters | None,
    matrix: Callable[..., Any],
    vector: Callable[[Tensor], Tensor],
) -> _ConvolutionWeights | None:
    return None if convolution is None else convolution.weights(matrix, vector)


class DrafterLayer(nn.Module):
    """One layer's parameters, under their names in the checkpoint."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = _AttentionParameters(config)
        self.mlp = _MLPParameters(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size)
        self.attention_conv = self.mlp_conv = None
        if config.convolution is not None:
            self.attention_conv, self.mlp_conv = (
                _ConvolutionParameters(config.convolution, config.hidden_size) for _ in range(2)
            )
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
            attention_conv=_weights_of(self.attention_conv, matrix, vector),
            mlp_conv=_weights_of(self.mlp_conv, matrix, vector),
        )

    def context_matrices(self) -> tuple[Tensor, Tensor]:
        """The projections of the context: the layer's own for keys and values."""
        return self.self_attn.k_proj.weight, self.self_attn.v_proj.weight

    def forward(
        self, stream: _Stream, attend: Callable[[Tensor], Tensor], places: Tensor | None
    ) -> _Stream:
        weights = self.weights(matrix=lambda *parts: parts, vector=lambda weight: weight)
        return _run_layer(AUTOGRAD, weights, self._eps, stream, attend, places)


_BEGINNERS = (_ConvolutionParameters, MarkovHead, CandidateSelector, ConfidenceHead)


class Drafter(nn.Module):
    """The drafter's parameters, and its differentiable forward pass."""

    d2t: Tensor | None
    markov_head: MarkovHead | None
    candidate_selector: CandidateSelector | None
    confidence_head: ConfidenceHead | None

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
        self.markov_head = self.candidate_selector = self.confidence_head = None
        if config.head is not None:
            sizes = hidden, config.vocab_size, reduced or config.vocab_size
            head = make_head(config.head, *sizes)
            name = "markov_head" if isinstance(head, MarkovHead) else "candidate_selector"
            setattr(self, name, head)
            if config.head.has_confidence:
                self.confidence_head = ConfidenceHead(config.head, hidden)
        for module in self.modules():
            if isinstance(module, _BEGINNERS):
                module.begin()

    @property
    def path_head(self) -> MarkovHead | CandidateSelector | None:
        """What chooses among the slots' candidates."""
        return self.markov_head or self.candidate_selector

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

    def forward(self, embeddings: Tensor, attend: Attend, places: Tensor | None = None) -> Tensor:
        """Block rows in, final normed hidden rows out; `places` are the rows' in their blocks."""
        hidden, pending = _run_layers(self.layers, embeddings, attend, places)
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
        self._path_head = copy.deepcopy(drafter.path_head)
        self._confidence = copy.deepcopy(drafter.confidence_head)
        for module in (self._path_head, self._confidence):
            if module is not None:
                module.to(kernels.device, kernels.dtype).requires_grad_(False)
        self._draft_ids = self._invert() if config.head is not None else None

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

    def forward(self, embeddings: Tensor, attend: Attend, places: Tensor | None = None) -> Tensor:
        """Block rows in, final normed hidden rows out; `places` are the rows' in their blocks."""
        hidden, pending = _run_layers(self._layers, embeddings, attend, places)
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

    @property
    def num_candidates(self) -> int:
        """The likeliest tokens of a slot that the head scores; 0 = there is no head."""
        return 0 if self.config.head is None else self.config.head.num_candidates

    @torch.no_grad()
    def score_paths(self, hidden: Tensor, anchors: Tensor, candidates: Tensor) -> PathScores:
        """What the head says of slots' candidates, each behind those of the slot before.

        hidden [blocks, slots, hidden_size], anchors [blocks] and candidates [blocks, slots, count]
        in the target's ids; of what is none (below 0) scores say nothing. Rows of all slots come.
        """
        assert self._path_head is not None, "a drafter without a head has no paths"
        ids = candidates.clamp(min=0)
        first = anchors.view(-1, 1, 1).expand(-1, 1, ids.shape[2])
        before = torch.cat([first, ids[:, :-1]], dim=1)
        if self._draft_ids is not None:
            ids = self._draft_ids[ids]
        scores = score_paths(self._path_head, self._confidence, hidden, before, ids)
        sure = None if scores.sure is None else scores.sure.flatten(0, 1)
        return PathScores(scores.added.flatten(0, 1), sure)

    @torch.no_grad()
    def choose_path(
        self,
        hidden: Tensor,
        logits: Tensor,
        settings: SlotSettings,
        anchor: int,
        first_position: int,
    ) -> tuple[list[int], list[float]]:
        """One request's tokens by the head, each behind the one before it, and its confidence.

        hidden and logits, over the target's vocabulary, are rows of the slots in order; settings
        are the request's, as slot 0's. A batch is told the same where steps run on a device.
        """
        place = torch.arange(len(hidden), device=hidden.device)
        rows = DrawnRows(torch.zeros_like(place), first_position + place)
        wide = replace(settings, num_top=torch.full_like(settings.num_top, MAX_TOP))
        drawn = self.kernels.draw(logits, wide, rows)
        candidates = list_candidates(drawn, self.num_candidates)
        anchors, ids = torch.full_like(place[:1], anchor), candidates.tokens.unsqueeze(0)
        scores = self.score_paths(hidden.unsqueeze(0), anchors, ids)
        offers = self.kernels.offer_paths(candidates, scores, settings, rows, 1)
        tokens, confidence = self.kernels.follow(offers, len(hidden))
        return tokens[0].tolist(), confidence[0].tolist()

    def _invert(self) -> Tensor | None:
        """The drafter's ids for the target's, where it has ids of its own."""
        size = self.config.draft_vocab_size
        if size is None:
            return None
        ids = torch.arange(size, device=self.kernels.device)
        return torch.zeros(
            self.config.vocab_size, dtype=torch.int64, device=ids.device
        ).index_copy_(0, self.target_ids(ids), ids)

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
