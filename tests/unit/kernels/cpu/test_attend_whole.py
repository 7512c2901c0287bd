"""Attention of whole sequences without a cache: by the rule, and each sequence by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashdraft.kernels.interface import Heads, Kernels, QKVSpec, RopeTable, WholeSequences
from tests import zoo

STARTS = (0, 5, 135, 135, 136, 169)  # one of them has no rows


def heads_of(num_heads: int, dim: int, num_rows: int) -> tuple[Tensor, Heads]:
    torch.manual_seed(dim)
    angles = torch.randn(num_rows, dim // 2)
    norms = [1.0 + 0.2 * torch.randn(dim) for _ in range(2)]
    spec = QKVSpec(num_heads, num_heads, dim, 1e-6, *norms, v_norm=True)
    rope = RopeTable(angles.cos(), angles.sin())
    return torch.randn(num_rows, spec.width), Heads(spec, rope, torch.arange(num_rows))


def expected(qkv: Tensor, heads: Heads) -> Tensor:
    """Of one sequence, in float64."""
    spec, rows = heads.spec, qkv.shape[0]
    q, k, v = qkv.double().view(rows, 3, spec.num_heads, spec.head_dim).unbind(1)
    normed = [x * (x.square().mean(-1, keepdim=True) + spec.eps).rsqrt() for x in (q, k, v)]
    cos, sin = (table[heads.positions].double().unsqueeze(1) for table in vars(heads.rope).values())

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        assert weight is not None
        left, right = (x * weight).chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    query, key = turned(normed[0], spec.q_norm), turned(normed[1], spec.k_norm)
    weights = torch.einsum("ihd,jhd->hij", query, key).mul(0.3).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, normed[2]).flatten(1)


def sequences(*starts: int, longest: int, is_known: bool) -> WholeSequences:
    there = torch.tensor(starts, dtype=torch.int32)
    return WholeSequences(there, longest, starts if is_known else None)


@pytest.mark.parametrize("backend", ["float32", "torch"])
@pytest.mark.parametrize(("num_heads", "dim"), [(3, 72), (2, 24), (1, 20)])
@pytest.mark.parametrize("is_known", [True, False])
def test_every_row_sees_its_sequence_alone(
    is_known: bool, backend: str, num_heads: int, dim: int
) -> None:
    kernels: Kernels = zoo.kernels(backend)
    qkv, heads = heads_of(num_heads, dim, STARTS[-1])
    longest = 130 if is_known else STARTS[-1]  # who does not know the starts knows their end
    all_of_them = sequences(*STARTS, longest=longest, is_known=is_known)
    together = kernels.attend_whole(qkv, heads, all_of_them, 0.3)
    for start, end in zip(STARTS, STARTS[1:], strict=False):
        if start == end:
            continue
        own = Heads(heads.spec, heads.rope, heads.positions[start:end])
        itself = sequences(0, end - start, longest=end - start, is_known=True)
        alone = kernels.attend_whole(qkv[start:end].clone(), own, itself, 0.3)
        assert torch.equal(alone, together[start:end])
        assert (alone - expected(qkv[start:end], own)).abs().max() < 1e-5
