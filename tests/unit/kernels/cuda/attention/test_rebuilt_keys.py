"""Keys made of values in the Triton kernels, in the interpreter, against the torch reference.

The kernel folds the norm's weight into the queries and rotates a few dimensions only, so its sums
are others than the reference's: the bounds are those of the other interpreted tests of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashdraft.kernels.cuda.plan import DeviceLimits, plan_attention, plan_exact_attention
from flashdraft.kernels.interface import CAUSAL, Heads, KeyRebuild, PagedKeys, QKVSpec, RopeTable
from flashdraft.kernels.torch_backend import TorchKernels
from tests.interpreted import judge, report
from tests.unit.kernels.cuda.test_interpreter import (
    CPU,
    WIDE,
    Case,
    make_batch,
    make_kernels,
    make_mask,
    split,
    spread,
)

FP8 = torch.float8_e4m3fn
BATCH: dict[str, Any] = {"rows": (1, 7, 0, 3), "contexts": (33, 0, 5, 70)}
# a batch, and how many pairs of a head rotate
ATTENTION: dict[str, tuple[Case, int]] = {
    "decode": (Case((1,), (40,), heads=(3, 1), head_dim=32), 4),
    "first token": (Case((1,), (0,), head_dim=32), 4),
    "prefill over several tiles": (Case((21,), (0,), head_dim=32), 4),
    "a chunk": (Case((9,), (30,), heads=(4, 2), head_dim=32), 4),
    "several sequences": (Case(**BATCH, head_dim=64), 8),
    "several sequences, wide tiles": (Case(**BATCH, head_dim=64, plan=WIDE), 8),
    "head of 512": (Case(**BATCH, head_dim=512, plan=split(5, 16)), 64),
    "every pair rotates": (Case(**BATCH, head_dim=32), 16),
    "an odd number of pairs": (Case(**BATCH, head_dim=64), 21),
    "none rotates": (Case(**BATCH, head_dim=32), 0),
    "padded head": (Case(**BATCH, head_dim=20), 3),
    "large pages": (Case(**BATCH, page_size=32, head_dim=32), 4),
    "float16": (Case(**BATCH, head_dim=64, dtype=torch.float16), 8),
    "bidirectional": (Case(**BATCH, head_dim=32, mask="bidirectional"), 4),
    "tree": (Case(**BATCH, head_dim=32, mask="tree"), 4),
    "window, tree": (Case((9, 0, 2), (33, 5, 0), head_dim=32, window=6, mask="tree"), 4),
    "window": (Case(**BATCH, head_dim=32, window=20), 4),
    "split": (Case((3, 1), (60, 2), head_dim=32, plan=split(4, 16)), 4),
    "split, tree": (Case((9,), (45,), head_dim=32, mask="tree", plan=split(4, 16)), 4),
    "spread": (Case((3, 1, 2), (2, 60, 200), head_dim=32, plan=spread(4)), 4),
    "picture": (Case((20,), (5,), head_dim=32, pictures=[(0, 3, 11)]), 4),
    "spread, fewer keys than splits": (Case((1, 2), (0, 5), head_dim=32, plan=spread(4)), 4),
}


def make_rebuild(head_dim: int, num_rotated: int, dtype: torch.dtype) -> KeyRebuild:
    """Angles of 300 positions; those of pairs that stand still are 0, as the kernel assumes."""
    angles = torch.rand(300, head_dim // 2) * 6
    angles[:, num_rotated:] = 0.0
    weight = torch.linspace(-0.5, 1.5, head_dim).to(dtype)
    return KeyRebuild(weight, RopeTable(angles.cos(), angles.sin()), num_rotated)


def check_attention(case: Case, num_rotated: int, stored: torch.dtype | None = None) -> None:
    """What no row may see is NaN, as in the other tests of attention."""
    from flashdraft.kernels.cuda.attention.paged import paged_attention

    query, _, values, view = make_batch(case)
    rebuild = make_rebuild(case.head_dim, num_rotated, case.dtype)
    values = values.to(stored or case.dtype)
    rule: dict[str, Any] = {"scale": 0.3, "window": case.window, "mask": make_mask(case)}
    found = paged_attention(
        query, PagedKeys(None, values, view, rebuild=rebuild, **rule), case.plan
    )
    safe = replace(view, block_table=view.block_table.clamp(0, values.shape[0] - 1))
    seen = values.float().nan_to_num()
    expected = TorchKernels(CPU, torch.float32).attention(
        query.float(), PagedKeys(None, seen, safe, rebuild=rebuild, **rule)
    )
    assert found.dtype == case.dtype
    tolerance = 4e-6 if case.dtype == torch.float32 else 3e-3
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def check_same_as_stored() -> None:
    """The backend's own two ways, from projection to output."""
    spec = QKVSpec(4, 2, 32, 1e-6, torch.rand(32), torch.rand(32), v_norm=True, share_kv=True)
    assert spec.k_norm is not None
    kernels, rebuild = make_kernels(torch.float32), make_rebuild(32, 4, torch.float32)
    rebuild = replace(rebuild, weight=spec.k_norm)
    view = make_batch(Case((20,), (0,), heads=(4, 2), head_dim=32))[3]
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    rows = torch.arange(20)
    view = replace(view, block_table=table, slots=(rows + 16) % 32)
    qkv, caches = torch.randn(20, spec.width), torch.zeros(3, 2, 16, 2, 32)
    outputs = []
    for keys, values, how in ((caches[0], caches[1], None), (None, caches[2], rebuild)):
        query = kernels.prepare_qkv(qkv, Heads(spec, rebuild.rope, rows), keys, values, view.slots)
        outputs.append(
            kernels.attention(
                query,
                PagedKeys(keys, values, view, scale=1.0, window=None, mask=CAUSAL, rebuild=how),
            )
        )
    assert torch.equal(caches[1], caches[2]) and caches[2].any()
    torch.testing.assert_close(outputs[1], outputs[0], atol=4e-6, rtol=4e-6)


def check_rows_are_alone() -> None:
    """Under one plan a row's bits do not depend on the width of its block."""
    from flashdraft.kernels.cuda.attention.paged import paged_attention

    case = Case((5,), (40,), head_dim=64, plan=split(3, 16))
    query, _, values, view = make_batch(case)
    rule: dict[str, Any] = {"scale": 0.3, "window": None, "mask": CAUSAL}
    rule["rebuild"] = make_rebuild(64, 8, torch.float32)
    together = paged_attention(query, PagedKeys(None, values, view, **rule), case.plan)
    for row in range(5):
        alone = replace(
            view,
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            context_lens=torch.tensor([40 + row], dtype=torch.int32),
            max_query_len=1,
        )
        found = paged_attention(
            query[row : row + 1], PagedKeys(None, values, alone, **rule), case.plan
        )
        assert torch.equal(found[0], together[row])


CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"attention: {name}": lambda given=given: check_attention(*given)
        for name, given in ATTENTION.items()
    },
    **{
        f"attention, fp8 values: {name}": lambda given=ATTENTION[name]: check_attention(
            *given, stored=FP8
        )
        for name in ("decode", "several sequences", "float16", "tree", "split", "spread")
    },
    "same as stored": check_same_as_stored,
    "rows are alone": check_rows_are_alone,
}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, failures: dict[str, str]) -> None:
    judge(failures[name])


@pytest.mark.parametrize(
    ("kilobytes", "stored", "num_rows", "block_m"),
    [
        (227, torch.bfloat16, 1, 16),
        (227, torch.bfloat16, 16, 32),
        (227, FP8, 16, 32),
        (99, torch.bfloat16, 16, 16),
        (99, FP8, 16, 32),
    ],
)
def test_tiles_of_a_large_head_have_threads_to_rotate_with(
    kilobytes: int, stored: torch.dtype, num_rows: int, block_m: int
) -> None:
    """8 warps, and no more rows than their registers and the card's shared memory hold."""
    limits = DeviceLimits(132, kilobytes * 1024)
    view = replace(make_batch(Case((1,), (0,)))[3], max_query_len=num_rows, max_key_len=4096)
    query = torch.empty(num_rows, 32, 512, dtype=torch.bfloat16)
    values = torch.empty(1, 16, 4, 512, dtype=stored)
    rebuild = make_rebuild(512, 64, torch.bfloat16)
    keys = PagedKeys(None, values, view, 1.0, None, CAUSAL, rebuild)
    plan = plan_attention(query, keys, limits)
    assert (plan.block_m, plan.block_n, plan.num_warps) == (block_m, 32, 8)
    exact = plan_exact_attention(query[:1], keys, limits)
    assert exact == plan_exact_attention(query, keys, limits)


if __name__ == "__main__":
    report(CHECKS)
