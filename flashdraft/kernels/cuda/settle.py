# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Keys and values of an accepted path (kernels/settle.py), moved in one launch for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.settle import PagedTensor, Settled

CHUNK = 256  # words of a token that a program moves
WORD = 4  # bytes


class Table(NamedTuple):
    """Where everything lies."""

    facts: _Facts
    page_size: int
    most_words: int  # of a token


class _Facts(NamedTuple):
    """[stored] int64 each. A captured launch goes on reading them."""

    addresses: Tensor
    pools: Tensor
    words: Tensor  # of a token


def make_table(stored: Sequence[PagedTensor]) -> Table:
    """What `settle` must know of caches, which stay where they are."""
    assert all(cache.is_contiguous() for cache, _ in stored)
    sizes = [cache.stride(1) * cache.itemsize for cache, _ in stored]
    assert all(size % WORD == 0 for size in sizes)
    pairs = zip(stored, sizes, strict=True)
    facts = [(one.cache.data_ptr(), one.pool, size // WORD) for one, size in pairs]
    columns = torch.tensor(facts, dtype=torch.int64, device=stored[0].cache.device).T.contiguous()
    return Table(_Facts(*columns), stored[0].cache.shape[1], max(sizes) // WORD)


def settle(table: Table, moves: Settled) -> None:
    """A program for each slot and chunk of a layer's tokens."""
    num_slots, num_places = moves.path.shape
    _settle[(len(table.facts.pools), num_slots, triton.cdiv(table.most_words, CHUNK))](
        table.facts,
        moves,
        table.page_size,
        moves.path.stride(0),
        moves.places.stride(0),
        NUM_PLACES=num_places,
        PLACES=triton.next_power_of_2(num_places),
        CHUNK=CHUNK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["page_size", "path_stride", "place_stride"])
def _settle(
    table: _Facts,
    moves: Settled,
    page_size: tl.tensor,
    path_stride: tl.tensor,
    place_stride: tl.tensor,
    NUM_PLACES: tl.constexpr,
    PLACES: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    one, slot = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, PLACES)
    path = tl.load(moves.path + slot * path_stride + place, mask=place < NUM_PLACES, other=0)
    is_moved = path > place
    if tl.sum(is_moved.to(tl.int32), 0) == 0:
        return
    start = tl.load(moves.starts + slot).to(tl.int64)
    rows = moves.places + tl.load(table.pools + one) * place_stride + start
    source = tl.load(rows + path, mask=is_moved, other=0)
    target = tl.load(rows + place, mask=is_moved, other=0)
    words = tl.load(table.words + one)
    memory = tl.load(table.addresses + one).to(tl.pointer_type(tl.int32))
    column = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    real = is_moved[:, None] & (column < words)[None, :]
    values = tl.load(memory + source[:, None] * words + column[None, :], mask=real, other=0)
    tl.debug_barrier()  # what is written may be what another thread is to read
    tl.store(memory + target[:, None] * words + column[None, :], values, mask=real)
