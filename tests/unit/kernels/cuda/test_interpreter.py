"""The Triton kernels on the CPU, in Triton's interpreter, against the torch reference.

Triton reads TRITON_INTERPRET when it is imported, so all checks run in one other process, which is
this file as a script; each test then looks at its own result. bfloat16 is left to the GPU tests:
the interpreter multiplies its bits as integers and rounds to it by cutting.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdraft.kernels.cuda.plan import AttentionPlan
from flashdraft.kernels.interface import (
    BIDIRECTIONAL,
    CAUSAL,
    BlockMask,
    Heads,
    PagedKeys,
    PageView,
    QKVSpec,
    RopeTable,
    Trees,
    WholeSequences,
)
from flashdraft.kernels.kinds import Activation
from flashdraft.kernels.torch_backend import TorchKernels
from tests.interpreted import judge, report
from tests.picture_rows import Pictures, attend_densely, find_seen, see_pictures
from tests.tree_rows import make_trees, random_tree

CPU = torch.device("cpu")
NARROW = AttentionPlan(block_m=16, block_n=16, num_warps=4, num_stages=1)
WIDE = AttentionPlan(block_m=64, block_n=64, num_warps=4, num_stages=1)


@dataclass(frozen=True)
class Case:
    """A batch for attention: query rows and earlier keys of every sequence, and the rest."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: tuple[int, int] = (2, 1)
    head_dim: int = 16
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    mask: str = "causal"
    plan: AttentionPlan = NARROW
    pictures: Pictures = ()


def split(num_splits: int, split_keys: int, plan: AttentionPlan = NARROW) -> AttentionPlan:
    return plan._replace(num_splits=num_splits, split_keys=split_keys)


def spread(num_splits: int) -> AttentionPlan:
    return NARROW._replace(num_splits=num_splits, split_keys=16, spread=True)


MIXED = Case(rows=(1, 7, 0, 3), contexts=(33, 0, 5, 70))
TWO = {"rows": (1, 30, 0, 3), "contexts": (33, 4, 5, 20), "pictures": [(1, 2, 11), (1, 15, 13)]}
PICTURES = {
    "picture at the beginning": Case((20,), (0,), window=6, pictures=[(0, 0, 9)]),
    "picture at the end": Case((20,), (5,), window=6, pictures=[(0, 8, 12)]),
    "pictures beside others": Case(**TWO, window=16),
    "pictures, wide tiles": Case(**TWO, window=16, plan=WIDE),
    "pictures longer than the window": Case(**TWO, window=5, heads=(4, 2)),
    "pictures, no window": Case(**TWO, heads=(3, 1), page_size=32),
    "split, pictures": Case(**TWO, window=16, plan=split(4, 16)),
    "spread, pictures": Case(**TWO, window=16, plan=spread(3)),
}
ATTENTION: dict[str, Case] = {
    "decode": Case((1,), (40,), heads=(3, 1)),
    "first token": Case((1,), (0,)),
    "prefill over several tiles": Case((21,), (0,)),
    "pairs straddle tiles": Case((11,), (5,), heads=(6, 2)),
    "more heads in a group than in a tile": Case((2,), (9,), heads=(24, 1)),
    "no groups": Case((2, 2), (17, 3), heads=(2, 2)),
    "mixed batch": MIXED,
    "mixed batch, wide tiles": replace(MIXED, plan=WIDE),
    "many sequences": Case((1,) * 131, tuple(i % 5 for i in range(131)), heads=(1, 1)),
    "padded head": replace(MIXED, head_dim=20),
    "small head": replace(MIXED, head_dim=8),
    "large pages": replace(MIXED, page_size=32),
    "float16": replace(MIXED, dtype=torch.float16),
    "bidirectional": replace(MIXED, mask="bidirectional"),
    "tree": replace(MIXED, mask="tree"),
    "window": replace(MIXED, window=20),
    "window of one": replace(MIXED, window=1),
    "window, bidirectional": replace(MIXED, window=4, mask="bidirectional"),
    "window, tree": replace(MIXED, window=5, mask="tree"),
    "split": Case((3, 1), (60, 2), plan=split(4, 16)),
    "split, more than eight": Case((1,), (150,), plan=split(11, 16)),
    "split, window": Case((2, 3), (90, 20), window=30, plan=split(4, 16)),
    "split, bidirectional window": Case(
        (5,), (70,), window=20, mask="bidirectional", plan=split(4, 16)
    ),
    "split, tree": Case((9,), (45,), mask="tree", plan=split(4, 16)),
    "spread, short and long": Case((3, 1, 2), (2, 60, 200), plan=spread(4)),
    "spread, fewer keys than splits": Case((1, 2), (0, 5), plan=spread(4)),
    "spread, window": Case((2, 3, 1), (90, 3, 40), window=30, plan=spread(3)),
    "spread, bidirectional window": Case(
        (5, 2), (70, 1), window=20, mask="bidirectional", plan=spread(3)
    ),
    "spread, tree": Case((9, 3), (45, 0), mask="tree", plan=spread(4)),
    "split, float16": Case((2,), (100,), dtype=torch.float16, plan=split(3, 64, WIDE)),
    **PICTURES,
}


def make_batch(case: Case) -> tuple[Tensor, Tensor, Tensor, PageView]:
    """Queries and pages in random order. What no row may see is NaN, its page numbers nonsense."""
    lengths = [rows + context for rows, context in zip(case.rows, case.contexts, strict=True)]
    num_pages = [-(-length // case.page_size) for length in lengths]
    free = torch.randperm(sum(num_pages) + 2).tolist()
    shape = (len(free), case.page_size, case.heads[1], case.head_dim)
    keys = torch.full(shape, float("nan"), dtype=case.dtype)
    values = keys.clone()
    table = torch.full((len(case.rows), max(num_pages) + 1), -3, dtype=torch.int32)
    for s, length in enumerate(lengths):
        table[s, : num_pages[s]] = torch.tensor([free.pop() for _ in range(num_pages[s])])
        seen = 0 if case.window is None else max(0, case.contexts[s] - case.window + 1)
        for j in range(seen, length):
            place = (table[s, j // case.page_size], j % case.page_size)
            keys[place], values[place] = torch.randn(2, *shape[2:]).to(case.dtype)
        table[s, : seen // case.page_size] = 2**31 - 1
    query = torch.randn(sum(case.rows), case.heads[0], case.head_dim).to(case.dtype)
    view = PageView(
        query_start=torch.tensor([0, *itertools.accumulate(case.rows)], dtype=torch.int32),
        context_lens=torch.tensor(case.contexts, dtype=torch.int32),
        block_table=table,
        slots=torch.empty(0, dtype=torch.int64),
        page_size=case.page_size,
        max_query_len=max(case.rows),
        max_key_len=max(lengths),
    )
    return query, keys, values, view


def make_mask(case: Case) -> BlockMask:
    if case.pictures:
        return see_pictures(case.rows, case.pictures)
    if case.mask == "tree":
        trees = [random_tree(rows, 4, seed) for seed, rows in enumerate(case.rows)]
        return BlockMask(trees=make_trees(case.rows, trees))
    return CAUSAL if case.mask == "causal" else BIDIRECTIONAL


def check_attention(case: Case) -> None:
    from flashdraft.kernels.cuda.attention.paged import paged_attention

    query, keys, values, view = make_batch(case)
    rule: dict[str, Any] = {"scale": 0.3, "window": case.window, "mask": make_mask(case)}
    found = paged_attention(query, PagedKeys(keys, values, view, **rule), case.plan)
    safe = replace(view, block_table=view.block_table.clamp(0, keys.shape[0] - 1))
    expected = TorchKernels(CPU, torch.float32).attention(
        query.float(),
        PagedKeys(keys.float().nan_to_num(), values.float().nan_to_num(), safe, **rule),
    )
    assert found.dtype == case.dtype
    tolerance = 2e-6 if case.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def check_pictures(plan: AttentionPlan) -> None:
    """By the rule of pictures itself; other rules give others; zeros give what no rule gives."""
    from flashdraft.kernels.cuda.attention.paged import paged_attention

    case = Case(**TWO, window=5, plan=plan, heads=(1, 1))
    query, keys, values, view = make_batch(case)
    given = PagedKeys(keys, values, view, 0.3, case.window, CAUSAL)

    def attend(mask: BlockMask) -> Tensor:
        return paged_attention(query, replace(given, mask=mask), plan)

    def expect(pictures: Pictures, is_even: bool = False) -> Tensor:
        lengths = enumerate(zip(case.rows, case.contexts, strict=True))
        seen = [find_seen(s, *pair, pictures, case.window, is_even) for s, pair in lengths]
        return attend_densely(query, given, seen)

    found = attend(make_mask(case))
    torch.testing.assert_close(found, expect(case.pictures), atol=2e-6, rtol=2e-6)
    assert not torch.allclose(found, expect([]), atol=1e-3)
    assert not torch.allclose(found, expect(case.pictures, is_even=True), atol=1e-3)
    assert torch.equal(attend(see_pictures(case.rows, [])), attend(CAUSAL))


def check_parts(window: int | None, pictures: Pictures = (), mask: str = "causal") -> None:
    """Two launches over some of the sequences each, with plans of their own, are one over all."""
    from flashdraft.kernels.cuda.attention.paged import paged_attention

    case = replace(MIXED, rows=(1, 3, 0, 20, 0), contexts=(33, 70, 5, 40, 0), window=window)
    case = replace(case, pictures=pictures, mask=mask)
    query, keys, values, view = make_batch(case)
    rule: dict[str, Any] = {"scale": 0.3, "window": case.window, "mask": make_mask(case)}
    whole = paged_attention(query, PagedKeys(keys, values, view, **rule), NARROW)
    few, many = slice(0, 3), slice(3, 5)
    parts = [
        replace(
            view,
            query_start=view.query_start[part.start : part.stop + 1],
            context_lens=view.context_lens[part],
            block_table=view.block_table[part],
        )
        for part in (few, many)
    ]
    for plans in ((spread(3), WIDE), (NARROW, split(4, 32)), (spread(4), spread(2))):
        output = torch.full_like(whole, math.nan)
        for part, plan in zip(parts, plans, strict=True):
            found = paged_attention(query, PagedKeys(keys, values, part, **rule), plan, output)
            assert found is output
        torch.testing.assert_close(output, whole, atol=2e-6, rtol=2e-6)


def check_nothing_to_do() -> None:
    kernels = make_kernels(torch.float32)
    query, keys, values, view = make_batch(Case((1,), (3,)))
    empty = replace(view, query_start=torch.zeros(2, dtype=torch.int32), max_query_len=0)
    none = replace(
        empty, query_start=torch.zeros(1, dtype=torch.int32), context_lens=view.context_lens[:0]
    )
    for nothing in (empty, none):
        found = kernels.attention(
            query[:0], PagedKeys(keys, values, nothing, scale=1.0, window=None, mask=CAUSAL)
        )
        assert found.shape == (0, 32)
    assert kernels.rms_norm(torch.empty(0, 8), None, 1e-6).shape == (0, 8)
    assert kernels.gated(torch.empty(0, 8), Activation.SILU).shape == (0, 4)


def check_blind_row() -> None:
    """A row that sees nothing, not even itself, gives zeros, and harms no other."""
    query, keys, values, view = make_batch(Case((2,), (0,)))
    mask = BlockMask(trees=Trees(torch.tensor([1, 0]), torch.zeros(2, dtype=torch.int32)))
    from flashdraft.kernels.cuda.attention.paged import paged_attention

    for plan in (NARROW, split(2, 16), spread(3)):
        found = paged_attention(
            query, PagedKeys(keys, values, view, scale=1.0, window=None, mask=mask), plan
        )
        first = values[view.block_table[0, 0], 0].repeat(1, 2).flatten()
        torch.testing.assert_close(found, torch.stack([first, torch.zeros(32)]))


def make_kernels(dtype: torch.dtype) -> Any:
    from flashdraft.kernels.cuda.backend import TritonKernels

    return TritonKernels(CPU, dtype)


def check_norms(dtype: torch.dtype) -> None:
    kernels, reference = make_kernels(dtype), TorchKernels(CPU, dtype)
    x, delta = torch.randn(2, 3, 40).to(dtype) * 3
    weight = torch.randn(40).to(dtype)
    close = {"atol": 1e-6, "rtol": 1e-5 if dtype == torch.float32 else 2e-3}
    for norm in (weight, None):
        torch.testing.assert_close(
            kernels.rms_norm(x, norm, 1e-6), reference.rms_norm(x, norm, 1e-6), **close
        )
    heads = x.view(3, 2, 20)[:, 1:]
    torch.testing.assert_close(
        kernels.rms_norm(heads, weight[:20], 1e-6),
        reference.rms_norm(heads, weight[:20], 1e-6),
        **close,
    )
    for found, expected in zip(
        kernels.add_rms_norm(x, delta, weight, 1e-6),
        reference.add_rms_norm(x, delta, weight, 1e-6),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, **close)


def check_gates(dtype: torch.dtype) -> None:
    kernels, reference = make_kernels(dtype), TorchKernels(CPU, dtype)
    gate_up = torch.randn(2, 2 * 1100).to(dtype) * 4
    close = {"atol": 1e-5, "rtol": 1e-5 if dtype == torch.float32 else 4e-3}
    for activation in Activation:
        torch.testing.assert_close(
            kernels.gated(gate_up, activation), reference.gated(gate_up, activation), **close
        )


def check_prepare(dtype: torch.dtype, spec: QKVSpec) -> None:
    num_rows, page_size = 4, 16
    angles = torch.rand(50, spec.head_dim // 2) * 6
    rope = RopeTable(angles.cos(), angles.sin())
    qkv = torch.randn(num_rows, spec.width).to(dtype)
    positions, slots = torch.tensor([7, 8, 0, 49]), torch.tensor([33, 34, 0, 63])
    results = []
    for kernels in (make_kernels(dtype), TorchKernels(CPU, dtype)):
        caches = torch.zeros(2, 4, page_size, spec.num_kv_heads, spec.head_dim, dtype=dtype)
        query = kernels.prepare_qkv(qkv, Heads(spec, rope, positions), caches[0], caches[1], slots)
        results.append((query, caches))
    close = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 2e-3}
    (query, caches), (expected_query, expected_caches) = results
    assert query.shape == (num_rows, spec.num_heads, spec.head_dim)
    torch.testing.assert_close(query, expected_query, **close)
    torch.testing.assert_close(caches, expected_caches, **close)


def check_whole() -> None:
    """Heads of no power of two, as a vision tower has them."""
    spec = QKVSpec(2, 2, 20, 1e-6, torch.randn(20), torch.randn(20), v_norm=True)
    angles, qkv = torch.rand(9, 10) * 6, torch.randn(9, spec.width)
    heads = Heads(spec, RopeTable(angles.cos(), angles.sin()), torch.arange(9))
    sequences = WholeSequences(torch.tensor([0, 4, 4, 9], dtype=torch.int32), longest=9)
    found, expected = (
        kernels.attend_whole(qkv, heads, sequences, 0.3)
        for kernels in (make_kernels(torch.float32), TorchKernels(CPU, torch.float32))
    )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def norm_weight() -> Tensor:
    return torch.randn(12)


CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"attention: {name}": lambda case=case: check_attention(case)
        for name, case in ATTENTION.items()
    },
    "parts": lambda: check_parts(None),
    "parts, window": lambda: check_parts(30),
    "parts, picture": lambda: check_parts(9, [(3, 4, 13)]),
    "parts, tree": lambda: check_parts(9, mask="tree"),
    "pictures by their rule": lambda: check_pictures(NARROW),
    "pictures by their rule, spread": lambda: check_pictures(spread(2)),
    "whole": check_whole,
    "nothing to do": check_nothing_to_do,
    "blind row": check_blind_row,
    "norms, float32": lambda: check_norms(torch.float32),
    "norms, float16": lambda: check_norms(torch.float16),
    "gates, float32": lambda: check_gates(torch.float32),
    "gates, float16": lambda: check_gates(torch.float16),
    "prepare, plain": lambda: check_prepare(torch.float32, QKVSpec(3, 1, 8, 1e-6)),
    "prepare, norms": lambda: check_prepare(
        torch.float32,
        QKVSpec(4, 2, 12, 1e-6, q_norm=norm_weight(), k_norm=norm_weight(), v_norm=True),
    ),
    "prepare, shared key and value": lambda: check_prepare(
        torch.float16,
        QKVSpec(
            2, 1, 12, 1e-6, q_norm=norm_weight(), k_norm=norm_weight(), v_norm=True, share_kv=True
        ),
    ),
    "prepare, no queries": lambda: check_prepare(
        torch.float32, QKVSpec(0, 2, 12, 1e-6, k_norm=norm_weight())
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, failures: dict[str, str]) -> None:
    judge(failures[name])


if __name__ == "__main__":
    report(CHECKS)
