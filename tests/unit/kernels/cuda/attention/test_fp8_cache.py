"""The Triton kernels over a cache in 8 bits: in the interpreter, and compiled for every card.

The interpreter's own conversion to 8 bits neither carries a rounding into the exponent nor knows
NaN, so torch's stands in for it; on a GPU, tests/gpu/test_gpu_fp8_cache.py looks at the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdraft.kernels.cuda.plan import LEAST_FP8_CAPABILITY
from flashdraft.kernels.interface import (
    BIDIRECTIONAL,
    CAUSAL,
    Heads,
    PagedKeys,
    PageView,
    QKVSpec,
    RopeTable,
)
from flashdraft.kernels.quantized import LARGEST_FP8
from flashdraft.kernels.torch_backend import TorchKernels
from tests.interpreted import judge, report
from tests.unit.kernels.cuda import cross_compile
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
BATCH: dict[str, Any] = {"rows": (1, 5, 0, 3), "contexts": (33, 0, 5, 50)}
ATTENTION = {
    "head of 64": Case(**BATCH, head_dim=64),
    "head of 128": Case(**BATCH, head_dim=128, heads=(4, 2)),
    "head of 256, window": Case(**BATCH, head_dim=256, window=20),
    "head of 512": Case(**BATCH, head_dim=512, plan=split(4, 16)),
    "padded head": Case(**BATCH, head_dim=20),
    "float16": Case(**BATCH, head_dim=64, dtype=torch.float16, plan=WIDE),
    "bidirectional window": Case(**BATCH, window=4, mask="bidirectional"),
    "tree": Case(**BATCH, head_dim=64, mask="tree"),
    "window, tree": Case(**BATCH, window=5, mask="tree"),
    "split, window": Case((2, 3), (90, 20), head_dim=64, window=30, plan=split(4, 16)),
    "split, tree": Case((9,), (45,), mask="tree", plan=split(4, 16)),
    "picture": Case((20,), (5,), head_dim=64, window=9, pictures=[(0, 3, 13)]),
    "spread": Case((3, 1, 2), (2, 60, 120), head_dim=64, plan=spread(4)),
    "spread, window": Case((2, 3, 1), (90, 3, 40), window=30, plan=spread(3)),
}


# -- in the interpreter --------------------------------------------------------------------------


def mend_interpreter() -> None:
    """Let torch convert to and from 8 bits, and to NaN what the kernel should have cut off."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert: Any = interpreter._convert_float
    views = {tl.float8e4nv: FP8, tl.float16: torch.float16, tl.float32: torch.float32}

    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if tl.float8e4nv not in (source, target):
            return convert(data, source, target, rounding)
        values = torch.from_numpy(data.copy()).view(views[source])
        values = values.where(values.float().abs() <= LARGEST_FP8, torch.nan).to(views[target])
        bits = torch.uint8 if target == tl.float8e4nv else values.dtype
        return values.view(bits).numpy()

    interpreter._convert_float = converted


def check_attention(case: Case) -> None:
    """What no row may see is NaN, as in the other tests of attention; 8 bits have it too."""
    from flashdraft.kernels.cuda.attention.paged import paged_attention

    query, keys, values, view = make_batch(replace(case, dtype=torch.float32))
    query, keys, values = query.to(case.dtype), keys.to(FP8), values.to(FP8)
    rule: dict[str, Any] = {"scale": 0.3, "window": case.window, "mask": make_mask(case)}
    found = paged_attention(query, PagedKeys(keys, values, view, **rule), case.plan)
    safe = replace(view, block_table=view.block_table.clamp(0, keys.shape[0] - 1))
    seen = [cache.float().nan_to_num().to(FP8) for cache in (keys, values)]
    reference = TorchKernels(CPU, torch.float32)
    expected = reference.attention(query.float(), PagedKeys(*seen, safe, **rule))
    assert found.dtype == case.dtype
    tolerance = 4e-6 if case.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def check_prepare(dtype: torch.dtype, spec: QKVSpec, size: float = 1.0) -> None:
    """The same bits as the reference, but where a sum's order put a value on another side."""
    angles = torch.rand(50, spec.head_dim // 2) * 6
    rope = RopeTable(angles.cos(), angles.sin())
    qkv = (torch.randn(4, spec.width) * size).to(dtype)
    positions, slots = torch.tensor([7, 8, 0, 49]), torch.tensor([33, 34, 0, 63])
    results = []
    for kernels in (make_kernels(dtype), TorchKernels(CPU, dtype)):
        caches = torch.zeros(2, 4, 16, spec.num_kv_heads, spec.head_dim, dtype=FP8)
        query = kernels.prepare_qkv(qkv, Heads(spec, rope, positions), caches[0], caches[1], slots)
        results.append((query, caches.float()))
    (query, caches), (expected_query, expected) = results
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 2e-3}
    torch.testing.assert_close(query, expected_query, **close)
    torch.testing.assert_close(caches, expected, atol=2**-9, rtol=2**-3)
    assert (caches != expected).sum() <= 0.01 * 2 * 4 * spec.num_kv_heads * spec.head_dim
    assert (caches != 0).sum() > 0.9 * 2 * 4 * spec.num_kv_heads * spec.head_dim
    if size > 100:
        assert (caches.abs() == LARGEST_FP8).sum() > 4 and caches.isfinite().all()


def check_nan_stays() -> None:
    """A broken row is stored as broken, as in any other dtype, and spoils no neighbour."""
    spec = QKVSpec(1, 1, 16, 1e-6)
    rope, rows = RopeTable(torch.ones(2, 8), torch.zeros(2, 8)), torch.arange(2)
    qkv = torch.ones(2, spec.width)
    qkv[0] = torch.nan
    caches = torch.zeros(2, 1, 16, 1, 16, dtype=FP8)
    make_kernels(torch.float32).prepare_qkv(
        qkv, Heads(spec, rope, rows), caches[0], caches[1], rows
    )
    stored = caches.float()[:, 0, :2, 0]
    assert stored[:, 0].isnan().all() and (stored[:, 1] == 1.0).all()


def check_own_rows_are_read_back() -> None:
    """A first row sees itself alone: its output is its own value, as rounded."""
    spec, kernels = QKVSpec(2, 1, 16, 1e-6), make_kernels(torch.float32)
    rope, rows = RopeTable(torch.ones(1, 8), torch.zeros(1, 8)), torch.zeros(1, dtype=torch.int64)
    qkv, caches = torch.randn(1, spec.width), torch.zeros(2, 1, 16, 1, 16, dtype=FP8)
    query = kernels.prepare_qkv(qkv, Heads(spec, rope, rows), caches[0], caches[1], rows)
    view = replace(make_batch(Case((1,), (0,)))[3], block_table=torch.zeros(1, 1).int())
    found = kernels.attention(query, PagedKeys(*caches, view, scale=1.0, window=None, mask=CAUSAL))
    assert torch.equal(found, qkv[:, -16:].to(FP8).float().repeat(1, 2))


NORM = torch.linspace(0.2, 2.0, 64)
CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"attention: {name}": lambda case=case: check_attention(case)
        for name, case in ATTENTION.items()
    },
    "prepare, plain": lambda: check_prepare(torch.float32, QKVSpec(3, 1, 64, 1e-6)),
    "prepare, too large": lambda: check_prepare(torch.float32, QKVSpec(3, 1, 64, 1e-6), 400.0),
    "prepare, norms": lambda: check_prepare(
        torch.float32, QKVSpec(4, 2, 64, 1e-6, q_norm=NORM, k_norm=NORM, v_norm=True)
    ),
    "prepare, shared key and value": lambda: check_prepare(
        torch.float16,
        QKVSpec(2, 1, 64, 1e-6, q_norm=NORM, k_norm=NORM, v_norm=True, share_kv=True),
    ),
    "prepare, no queries": lambda: check_prepare(
        torch.float32, QKVSpec(0, 2, 64, 1e-6, k_norm=NORM)
    ),
    "NaN stays": check_nan_stays,
    "own rows are read back": check_own_rows_are_read_back,
}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, failures: dict[str, str]) -> None:
    judge(failures[name])


# -- compiled ------------------------------------------------------------------------------------


def make(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def make_compiled(dtype: torch.dtype) -> Any:
    from flashdraft.kernels.cuda.backend import TritonKernels

    return TritonKernels(torch.device("meta"), dtype, exact=False)


def prepare() -> None:
    norm = make(512, dtype=torch.bfloat16)
    spec = QKVSpec(4, 2, 512, 1e-6, q_norm=norm, k_norm=norm, v_norm=True, share_kv=True)
    rope = RopeTable(*(make(9, 256, dtype=torch.float32) for _ in range(2)))
    cache, rows = make(1, 16, 2, 512, dtype=FP8), make(1, dtype=torch.int64)
    qkv = make(1, spec.width, dtype=torch.bfloat16)
    make_compiled(torch.bfloat16).prepare_qkv(qkv, Heads(spec, rope, rows), cache, cache, rows)


def attend(
    dtype: torch.dtype,
    head_dim: int,
    heads: tuple[int, int],
    num_rows: int,
    num_keys: int,
    window: int | None,
) -> None:
    cache = make(1, 16, heads[1], head_dim, dtype=FP8)
    view = PageView(
        query_start=make(2, dtype=torch.int32),
        context_lens=make(1, dtype=torch.int32),
        block_table=make(1, num_keys // 16 + 1, dtype=torch.int32),
        slots=make(0, dtype=torch.int64),
        page_size=16,
        max_query_len=num_rows,
        max_key_len=num_keys,
    )
    query = make(num_rows, heads[0], head_dim, dtype=dtype)
    mask = CAUSAL if window is None else BIDIRECTIONAL
    make_compiled(dtype).attention(
        query, PagedKeys(cache, cache, view, scale=1.0, window=window, mask=mask)
    )


COMPILED: dict[str, cross_compile.Case] = {
    "prepare": prepare,
    "decode 64": lambda: attend(torch.float16, 64, (9, 3), 1, 1000, 512),
    "verify 512": lambda: attend(torch.bfloat16, 512, (32, 4), 16, 4096, None),
}
KERNELS = {
    "prepare": "dense.rows._prepare",
    "decode 64": "attention.paged._attend",
    "verify 512": "attention.paged._attend",
}


@pytest.mark.parametrize("name", cross_compile.CARDS)
def test_compiles_and_fits_where_the_cache_is_offered(name: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    card = cross_compile.CARDS[name]
    for case, found in cross_compile.compile_cases(__file__, name).items():
        if divmod(card.capability, 10) < LEAST_FP8_CAPABILITY:
            assert "fp8e4nv not supported" in found.failure
            continue
        assert not found.failure, found.failure
        [each] = [each for each in found.compiled if each.kernel == KERNELS[case]]
        assert each.shared_bytes <= card.limits.shared_bytes
        assert each.copies_ahead or case == "prepare"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        cross_compile.report(sys.argv[1], COMPILED)
    else:
        mend_interpreter()
        report(CHECKS)
