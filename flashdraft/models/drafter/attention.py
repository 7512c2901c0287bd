"""The drafter's attention without a cache: for training, and as the reference in tests.

The visibility rule is written here once, elementwise. On a CPU it makes a dense mask for torch's
own attention; on a GPU flex attention evaluates it inside the tiles that a list names. Rows of many
documents may lie side by side. The engine's paged attention is in kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from flashdraft.kernels.interface import RopeTable
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.model import AUTOGRAD, Drafter
from flashdraft.models.rope import rotate

TILE = 128  # rows and keys that flex attention skips or computes together

Mask = Tensor | BlockMask
_Sees = Callable[[Tensor, Tensor], Tensor]
"""(numbers of rows, numbers of keys: context rows first, then the blocks' rows) -> seen or not."""


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


@dataclass(frozen=True)
class BlockLayout:
    """Where blocks stand among the context rows of one or many documents.

    A document's context rows lie side by side in order, so that a distance between rows is one
    between positions. Block b begins at the context row anchors[b] and sees the rows starts[b] ..
    anchors[b] - 1, never another block. `widths`, if given, is how many of a block's rows count:
    the others are seen by nobody.
    """

    num_context: int
    block_rows: int
    starts: Tensor  # [num_blocks] int64
    anchors: Tensor  # [num_blocks] int64; for masks of tiles: ascending
    widths: Tensor | None = None  # [num_blocks] int64

    def masks(self, config: DrafterConfig) -> tuple[Mask, ...]:
        """One mask per layer, in the form that `attend` wants on this device."""
        build = self.tile_mask if self.anchors.device.type == "cuda" else self.dense_mask
        kinds = list(zip(config.causal, config.windows, strict=True))
        made = {kind: build(*kind) for kind in dict.fromkeys(kinds)}
        return tuple(made[kind] for kind in kinds)

    def dense_mask(self, causal: bool, window: int | None) -> Tensor:
        """[num_rows, num_context + num_rows] bool."""
        num_rows = self.anchors.shape[0] * self.block_rows
        rows = torch.arange(num_rows, device=self.anchors.device)
        keys = torch.arange(self.num_context + num_rows, device=self.anchors.device)
        return self._rule(causal, window)(rows.unsqueeze(1), keys)

    def tile_mask(self, causal: bool, window: int | None) -> BlockMask:
        """The same rule for flex attention, with the list of tiles in which anything is seen."""
        sees = self._rule(causal, window)

        def mask_mod(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return sees(row, key)

        num_rows = self.anchors.shape[0] * self.block_rows
        counts, indices = _list_tiles(self._tiles(window))
        return BlockMask.from_kv_blocks(
            counts[None, None],
            indices[None, None],
            BLOCK_SIZE=(TILE, TILE),
            mask_mod=mask_mod,
            seq_lengths=(num_rows, self.num_context + num_rows),
        )

    def _rule(self, causal: bool, window: int | None) -> _Sees:
        num_context, block_rows = self.num_context, self.block_rows
        starts, anchors, widths = self.starts, self.anchors, self.widths

        def sees(row: Tensor, key: Tensor) -> Tensor:
            block, place = row // block_rows, row % block_rows
            anchor = anchors[block]
            context = visible_context(anchor + place, anchor, key, window) & (key >= starts[block])
            # context keys come out as blocks before the first one: they are in nobody's
            key_block, key_place = (
                (key - num_context) // block_rows,
                (key - num_context) % block_rows,
            )
            own = (key_block == block) & visible_block(place, key_place, causal, window)
            if widths is not None:
                own = own & (key_place < widths[block])
            return context | own

        return sees

    def _tiles(self, window: int | None) -> Tensor:
        """[tiles of rows, tiles of keys] bool: where any row of the tile may see any key of it.

        From ranges alone: the context between the first start and the last anchor of a tile's
        blocks, and its own rows.
        """
        device, num_rows = self.anchors.device, self.anchors.shape[0] * self.block_rows
        first_row = torch.arange(0, num_rows, TILE, device=device).unsqueeze(1)
        last_row = (first_row + TILE - 1).clamp(max=num_rows - 1)
        first_block, last_block = first_row // self.block_rows, last_row // self.block_rows
        first_key = torch.arange(0, self.num_context + num_rows, TILE, device=device)
        last_key = first_key + TILE - 1
        low = self.starts[first_block]
        if window is not None:
            low = torch.maximum(low, self.anchors[first_block] - window + 1)
        context = (last_key >= low) & (first_key < self.anchors[last_block])
        # whole blocks: those that straddle the tile's edge are seen from both sides
        own_low = self.num_context + first_block * self.block_rows
        own_high = self.num_context + (last_block + 1) * self.block_rows
        return context | ((last_key >= own_low) & (first_key < own_high))


def _list_tiles(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles of keys each tile of rows has, and which: theirs first, in order."""
    count = tiles.shape[1]
    columns = torch.arange(count, device=tiles.device, dtype=torch.int32)
    order = torch.where(tiles, columns, columns + count).sort(dim=1).values % count
    return tiles.sum(1, dtype=torch.int32), order.contiguous()


class BlockAttention:
    """An `Attend` over context rows, for any number of blocks that ignore each other.

    context [num_context, hidden_size] are `Drafter.context` rows; cos and sin are of the positions
    of the context rows and then of the blocks' rows; masks are those of a `BlockLayout`.
    """

    def __init__(
        self, drafter: Drafter, context: Tensor, rope: RopeTable, masks: Sequence[Mask]
    ) -> None:
        self._drafter = drafter
        self._context = context
        self._rope = rope
        self._masks = masks

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        config, parameters = self._drafter.config, self._drafter.layer(layer).self_attn
        cos, sin, num_context = self._rope.cos, self._rope.sin, self._context.shape[0]
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        query, block_kv = heads[:, : config.num_heads], heads[:, config.num_heads :]
        context_kv = self._drafter.context_kv(layer, self._context)
        context_kv = context_kv.view(num_context, -1, config.head_dim)
        key, value = torch.cat([context_kv, block_kv]).chunk(2, dim=1)
        query = AUTOGRAD.rms_norm(query, parameters.q_norm.weight, config.norm_eps)
        key = AUTOGRAD.rms_norm(key, parameters.k_norm.weight, config.norm_eps)
        query = rotate(query, cos[num_context:], sin[num_context:])
        key = rotate(key, cos, sin)
        mixed = _attend(query, key, value, self._masks[layer], config.head_dim**-0.5)
        return mixed.flatten(1)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float) -> Tensor:
    """Rows of heads in and out, [num_rows, heads, head_dim]; grouped heads are not repeated."""
    # [1, heads, num_rows, head_dim]
    q, k, v = (heads.transpose(0, 1).unsqueeze(0) for heads in (query, key, value))
    if isinstance(mask, BlockMask):
        run: Any = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
        mixed = run(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
    else:
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
        )
    return mixed.squeeze(0).transpose(0, 1)


@functools.cache  # not at import: the compiler takes seconds to load
def _compiled_flex() -> Callable[..., Any]:
    """Flex attention for code that is not compiled itself: as it is, it computes every score."""
    return torch.compile(flex_attention, dynamic=False)


def attend_sequence(
    drafter: Drafter, context: Tensor, positions: Tensor, rope: RopeTable
) -> BlockAttention:
    """Attention over one sequence: context rows of the positions 0, 1, …, and any blocks.

    positions [num_blocks, block_rows] are the blocks' own, each starting at its anchor.
    """
    num_context, anchors = context.shape[0], positions[:, 0]
    layout = BlockLayout(num_context, positions.shape[1], torch.zeros_like(anchors), anchors)
    places = torch.cat([torch.arange(num_context, device=anchors.device), positions.flatten()])
    table = RopeTable(rope.cos[places], rope.sin[places])
    return BlockAttention(drafter, context, table, layout.masks(drafter.config))
