"""The drafter's attention without a cache: for training, and as the reference in tests.

The visibility rule is written here once, elementwise, so that a trainer's own attention (a block
mask of flex attention, say) can use the same words. The engine's paged attention is in kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashdraft.kernels.interface import RopeTable
from flashdraft.models.drafter import AUTOGRAD, Drafter
from flashdraft.models.rope import rotate


def visible_context(
    query_position: Tensor, anchor: Tensor, key_position: Tensor, window: int | None
) -> Tensor:
    """Does a block's row see the context key? Only before the anchor, and inside the window."""
    seen = key_position < anchor
    return seen if window is None else seen & (query_position - key_position < window)


def visible_block(
    query_position: Tensor, key_position: Tensor, causal: bool, window: int | None
) -> Tensor:
    """Does a row see a key of its own block?"""
    distance = query_position - key_position
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)


class DenseAttention:
    """An `Attend` over one sequence's context, for any number of blocks that ignore each other.

    context [num_context, hidden_size] are `Drafter.context` rows of the positions 0, 1, …;
    positions [num_blocks, block_rows] are the blocks' own, each starting at its anchor.
    """

    def __init__(
        self, drafter: Drafter, context: Tensor, positions: Tensor, rope: RopeTable
    ) -> None:
        self._drafter = drafter
        self._context = context
        self._positions = positions
        context_positions = torch.arange(context.shape[0], device=context.device)
        self._all_positions = torch.cat([context_positions, positions.flatten()])
        self._cos = rope.cos[self._all_positions]
        self._sin = rope.sin[self._all_positions]
        self._masks: dict[tuple[bool, int | None], Tensor] = {}

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        config, parameters = self._drafter.config, self._drafter.layer(layer).self_attn
        num_context = self._context.shape[0]
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        query, block_kv = heads[:, : config.num_heads], heads[:, config.num_heads :]
        context_kv = self._drafter.context_kv(layer, self._context)
        context_kv = context_kv.view(num_context, -1, config.head_dim)
        key, value = torch.cat([context_kv, block_kv]).chunk(2, dim=1)
        query = AUTOGRAD.rms_norm(query, parameters.q_norm.weight, config.norm_eps)
        key = AUTOGRAD.rms_norm(key, parameters.k_norm.weight, config.norm_eps)
        query = rotate(query, self._cos[num_context:], self._sin[num_context:])
        key = rotate(key, self._cos, self._sin)
        mixed = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),  # [1, heads, rows, head_dim]
            key.transpose(0, 1).unsqueeze(0),
            value.transpose(0, 1).unsqueeze(0),
            attn_mask=self._mask(config.causal[layer], config.windows[layer]),
            scale=config.head_dim**-0.5,
            enable_gqa=True,
        )
        return mixed.squeeze(0).transpose(0, 1).flatten(1)

    def _mask(self, causal: bool, window: int | None) -> Tensor:
        """[num_rows, num_context + num_rows] bool."""
        if (causal, window) not in self._masks:
            self._masks[causal, window] = self._build_mask(causal, window)
        return self._masks[causal, window]

    def _build_mask(self, causal: bool, window: int | None) -> Tensor:
        num_blocks, block_rows = self._positions.shape
        num_context = self._context.shape[0]
        rows = self._positions.flatten().unsqueeze(1)
        anchors = self._positions[:, :1].repeat_interleave(block_rows, dim=0)
        context = visible_context(rows, anchors, self._all_positions[:num_context], window)
        block = torch.arange(num_blocks, device=rows.device).repeat_interleave(block_rows)
        own = block.unsqueeze(1) == block
        own &= visible_block(rows, self._all_positions[num_context:], causal, window)
        return torch.cat([context, own], dim=1)
