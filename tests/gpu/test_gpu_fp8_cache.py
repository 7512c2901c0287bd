"""A cache in 8 bits on a real GPU: its kernels against the torch reference, and the law with it.

`pytest tests/gpu/test_gpu_fp8_cache.py` prints what attention takes over 8 and over 16 bits.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashdraft.engine.cache.memory import GB, build_cache
from flashdraft.engine.cache.storage import stored_dtype
from flashdraft.engine.config import EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.errors import RequestError
from flashdraft.kernels.cuda.plan import LEAST_FP8_CAPABILITY
from flashdraft.kernels.interface import Heads, PagedKeys, QKVSpec, RopeTable
from flashdraft.kernels.select import select_kernels
from flashdraft.kernels.torch_backend import TorchKernels
from tests import zoo
from tests.gpu.test_gpu_attention import (
    CASES,
    CUDA,
    LARGEST,
    PAGE_SIZE,
    RELATIVE,
    Case,
    graphed,
    make_batch,
    make_rule,
    microseconds,
    reference,
    triton_kernels,
)

pytestmark = pytest.mark.gpu
FP8 = torch.float8_e4m3fn
NAMES = [name for name in CASES if not name.startswith("widths 128")]


@pytest.fixture(autouse=True)
def prepared() -> None:
    """A card that can do it."""
    if torch.cuda.get_device_capability() < LEAST_FP8_CAPABILITY:
        with pytest.raises(RequestError, match="compute capability"):
            stored_dtype(select_kernels("cuda", "bfloat16"), "fp8")
        pytest.skip("this GPU does not convert 8-bit floats, and flashdraft says so")


def rounded(case: Case) -> tuple[Tensor, Tensor, Tensor, object]:
    """A batch as the other tests have it, NaN and all, with its cache in 8 bits."""
    query, keys, values, view = make_batch(case)
    return query, keys.to(FP8), values.to(FP8), view


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_attention_equals_the_reference(name: str, exact: bool) -> None:
    case = CASES[name]
    batch, rule = rounded(case), make_rule(case)
    kernels = triton_kernels(case.dtype, exact)
    found, expected = (
        kernels.attention(batch[0], PagedKeys(*batch[1:], **rule)),
        reference(*batch, rule),
    )
    error = found.float() - expected
    assert found.dtype == case.dtype and not found.isnan().any()
    assert error.abs().max() <= LARGEST[case.dtype]
    assert error.norm() / expected.norm() <= RELATIVE[case.dtype]
    assert torch.equal(found, kernels.attention(batch[0], PagedKeys(*batch[1:], **rule))), (
        "two runs differ"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [0.01, 1.0, 400.0])
@pytest.mark.parametrize("kind", ["plain", "norms", "shared"])
def test_prepare_qkv_stores_what_the_reference_stores(
    kind: str, size: float, dtype: torch.dtype
) -> None:
    norm = torch.rand(512, device=CUDA) + 0.5
    spec = {
        "plain": QKVSpec(9, 3, 64, 1e-6),
        "norms": QKVSpec(8, 4, 512, 1e-6, q_norm=norm, k_norm=norm, v_norm=True),
        "shared": QKVSpec(8, 2, 512, 1e-6, q_norm=norm, k_norm=norm, v_norm=True, share_kv=True),
    }[kind]
    angles = torch.rand(5000, spec.head_dim // 2, device=CUDA) * 6
    rope = RopeTable(angles.cos(), angles.sin())
    qkv = (torch.randn(33, spec.width, device=CUDA) * size).to(dtype)
    positions = torch.randint(0, 5000, (33,), device=CUDA)
    slots = torch.randperm(20 * PAGE_SIZE, device=CUDA)[:33]
    stored = []
    for kernels in (triton_kernels(dtype), TorchKernels(CUDA, dtype)):
        shape = (2, 20, PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
        caches = torch.zeros(shape, device=CUDA, dtype=FP8)
        kernels.prepare_qkv(qkv, Heads(spec, rope, positions), caches[0], caches[1], slots)
        stored.append(caches.float())
    found, expected = stored
    assert found.isfinite().all()
    # the nearest, or its neighbour where the two sums before it rounded differently
    torch.testing.assert_close(found, expected, atol=2**-9, rtol=2**-3)
    num_stored = 2 * 33 * spec.num_kv_heads * spec.head_dim
    assert (found != expected).sum() <= (0.02 if dtype != torch.float32 else 0.001) * num_stored
    if kind == "plain" and size > 100:
        assert (found.abs() == 448.0).sum() > 0.1 * num_stored


def test_nan_and_infinity() -> None:
    spec = QKVSpec(1, 1, 64, 1e-6)
    rope = RopeTable(torch.ones(4, 32, device=CUDA), torch.zeros(4, 32, device=CUDA))
    qkv = torch.ones(4, spec.width, device=CUDA, dtype=torch.bfloat16)
    qkv[0], qkv[1], qkv[2] = torch.nan, torch.inf, -1e30
    caches = torch.zeros(2, 1, PAGE_SIZE, 1, 64, device=CUDA, dtype=FP8)
    rows = torch.arange(4, device=CUDA)
    triton_kernels(torch.bfloat16).prepare_qkv(qkv, Heads(spec, rope, rows), *caches, rows)
    values = caches[1].float()[0, :4, 0]
    assert values[0].isnan().all()
    assert values[1:, 0].tolist() == [448.0, -448.0, 1.0]


# -- the engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(zoo.CONFIGS))
def test_exact_kernels_keep_the_law(family: str) -> None:
    """Whole-step graphs, prefix hits and a batch that changes; greedy and sampled."""
    kernels = select_kernels("cuda", "bfloat16", exact=True)
    target = zoo.tiny_target(family, kernels, taps=(0, 2))
    requests = zoo.mixed_requests(8, max_tokens=32)
    config = EngineConfig(cache_gb=0.05, verify=0, ngram=False, kv_dtype="fp8")
    plain = zoo.run(Engine(target, config=config), requests)
    drafter = zoo.tiny_drafter(kernels)
    engine = Engine(target, drafter, replace(config, verify=7))
    drafted = zoo.run(engine, requests)
    again = zoo.run(engine, [dataclasses.replace(r, id=f"again-{r.id}") for r in requests])
    assert sum(g.stats.cached_tokens for g in again.values()) > 0
    for key, one in plain.items():
        assert drafted[key].token_ids == one.token_ids
        assert again[f"again-{key}"].token_ids == one.token_ids


def test_the_cache_takes_half_of_the_memory() -> None:
    target = zoo.tiny_target("gemma4", select_kernels("cuda", "bfloat16"))
    sizes, pages = [], []
    for kv_dtype in ("auto", "fp8"):
        config = EngineConfig(cache_gb=0.02, max_batch=10_000, kv_dtype=kv_dtype)
        before = torch.cuda.memory_allocated()
        cache, _ = build_cache(target, None, config)
        sizes.append(torch.cuda.memory_allocated() - before)
        pages.append(sum(pool.num_pages for pool in cache.book_pools))
        del cache
    assert all(0.9 * 0.02 * GB < size < 1.05 * 0.02 * GB for size in sizes)
    assert 1.98 < pages[1] / pages[0] < 2.02


@pytest.mark.parametrize(
    ("heads", "head_dim", "num_seqs", "width"),
    [((32, 4), 512, 1, 1), ((32, 4), 512, 1, 16), ((32, 4), 512, 8, 16), ((64, 8), 128, 8, 16)],
)
def test_long_contexts_are_not_slower_than_in_16_bits(
    heads: tuple[int, int],
    head_dim: int,
    num_seqs: int,
    width: int,
    report: list[str],
) -> None:
    case = Case(heads, head_dim, (width,) * num_seqs, (32_000,) * num_seqs)
    query, keys, values, view = make_batch(case)
    keys, values, rule = keys.nan_to_num(), values.nan_to_num(), make_rule(case)
    kernels = triton_kernels(case.dtype)
    times = []
    for dtype in (case.dtype, FP8):
        caches = (keys.to(dtype), values.to(dtype))

        def attend(caches: tuple[Tensor, Tensor] = caches) -> Tensor:
            return kernels.attention(query, PagedKeys(*caches, view, **rule))

        times.append(microseconds(graphed(attend, 20), 5) / 20)
    num_values = 2 * num_seqs * 32_000 * heads[1] * head_dim
    report.append(
        f"{heads} heads of {head_dim}, {num_seqs} x {width} rows over 32,000 keys: "
        f"16 bits {times[0]:.1f} us ({2 * num_values / times[0] / 1e3:.0f} GB/s), "
        f"8 bits {times[1]:.1f} us ({num_values / times[1] / 1e3:.0f} GB/s)"
    )
    assert times[1] < 1.25 * times[0]
