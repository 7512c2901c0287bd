"""Keys made of values on a real GPU: the kernels at real sizes, the engine, and what it saves.

`pytest tests/gpu/test_gpu_rebuilt_keys.py` prints a table of errors and speeds at its end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.kernels.interface import Heads, KeyRebuild, PagedKeys, PageView, QKVSpec, RopeTable
from flashdraft.kernels.torch_backend import TorchKernels
from tests import zoo
from tests.gpu.test_gpu_attention import (
    BF16,
    CUDA,
    DECODE,
    FP16,
    FP32,
    FULL,
    LARGEST,
    PREFILL,
    RELATIVE,
    WIDTHS,
    Case,
    graphed,
    make_batch,
    make_rule,
    microseconds,
    triton_kernels,
)

pytestmark = pytest.mark.gpu
FP8 = torch.float8_e4m3fn
CASES = {
    "decode": Case(*FULL, **DECODE),
    "widths": Case(*FULL, **WIDTHS),
    "prefill": Case(*FULL, **PREFILL),
    "31B": Case((32, 4), 512, (1, 16), (4096, 900)),
    "tree": Case(*FULL, (16, 3, 64), (900, 0, 20), mask="tree"),
    "bidirectional": Case(*FULL, (16, 7), (500, 33), mask="bidirectional"),
    "float16": Case(*FULL, **PREFILL, dtype=FP16),
    "float32": Case(*FULL, (16, 1, 2), (300, 2000, 0), dtype=FP32),
    "small head": Case((4, 1), 32, (3, 1), (70, 20)),
}


def make_rebuild(head_dim: int, dtype: torch.dtype, num_positions: int = 9000) -> KeyRebuild:
    """Gemma 4's rotation: an eighth of the head's dimensions in pairs, by angles of a million."""
    num_rotated = head_dim // 8
    frequencies = torch.zeros(head_dim // 2, device=CUDA)
    exponents = torch.arange(num_rotated, device=CUDA) * 2 / head_dim
    frequencies[:num_rotated] = 1e6**-exponents
    angles = torch.arange(num_positions, device=CUDA).unsqueeze(1) * frequencies
    weight = (0.1 + 0.05 * torch.randn(head_dim, device=CUDA)).to(dtype)
    return KeyRebuild(weight, RopeTable(angles.cos(), angles.sin()), num_rotated)


def reference(
    query: Tensor, values: Tensor, view: PageView, rebuild: KeyRebuild, rule: dict[str, Any]
) -> Tensor:
    safe = replace(view, block_table=view.block_table.clamp(0, values.shape[0] - 1))
    seen = values.float().nan_to_num()
    kernels = TorchKernels(CUDA, FP32)
    return kernels.attention(query.float(), PagedKeys(None, seen, safe, rebuild=rebuild, **rule))


@pytest.mark.parametrize("stored", [None, FP8], ids=["whole", "fp8"])
@pytest.mark.parametrize("name", CASES)
def test_attention_equals_the_reference(
    name: str, stored: torch.dtype | None, report: list[str]
) -> None:
    case = CASES[name]
    kernels = triton_kernels(case.dtype)
    if stored is not None and kernels.why_no_fp8_cache is not None:
        pytest.skip("this GPU reads no 8-bit floats")
    query, _, values, view = make_batch(case)
    values, rebuild = values.to(stored or case.dtype), make_rebuild(case.head_dim, case.dtype)
    rule = {**make_rule(case), "scale": 1.0}  # as Gemma 4 has it
    found = kernels.attention(query, PagedKeys(None, values, view, rebuild=rebuild, **rule))
    error = found.float() - (expected := reference(query, values, view, rebuild, rule))
    largest, relative = error.abs().max().item(), (error.norm() / expected.norm()).item()
    report.append(f"{name:16} {stored or case.dtype} max {largest:.1e}  relative {relative:.1e}")
    assert found.dtype == case.dtype and not found.isnan().any()
    assert largest <= LARGEST[case.dtype]
    assert relative <= RELATIVE[case.dtype]
    again = kernels.attention(query, PagedKeys(None, values, view, rebuild=rebuild, **rule))
    assert torch.equal(found, again), "two runs differ"


def test_exact_attention_of_a_row_does_not_depend_on_its_block() -> None:
    case = CASES["widths"]
    query, _, values, view = make_batch(case)
    kernels = triton_kernels(case.dtype, exact=True)
    rule = {**make_rule(case), "scale": 1.0, "rebuild": make_rebuild(512, case.dtype)}
    together = kernels.attention(query, PagedKeys(None, values, view, **rule))
    owner = torch.tensor([s for s, rows in enumerate(case.rows) for _ in range(rows)]).to(CUDA)
    place = torch.arange(len(owner)).to(CUDA) - view.query_start[owner]
    alone = replace(
        view,
        query_start=torch.arange(len(owner) + 1, dtype=torch.int32).to(CUDA),
        context_lens=(view.context_lens[owner] + place).int(),
        block_table=view.block_table[owner],
        max_query_len=1,
    )
    assert torch.equal(kernels.attention(query, PagedKeys(None, values, alone, **rule)), together)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_values_are_written_as_ever_without_keys(dtype: torch.dtype) -> None:
    norm = torch.randn(512, device=CUDA).to(dtype)
    spec = QKVSpec(8, 2, 512, 1e-6, q_norm=norm, k_norm=norm, v_norm=True, share_kv=True)
    rope = make_rebuild(512, dtype).rope
    qkv = torch.randn(33, spec.width, device=CUDA).to(dtype)
    places, kernels = torch.randperm(320, device=CUDA)[:33], triton_kernels(dtype)
    caches = torch.zeros(3, 20, 16, 2, 512, device=CUDA, dtype=dtype)
    both = kernels.prepare_qkv(qkv, Heads(spec, rope, places), caches[0], caches[1], places)
    alone = kernels.prepare_qkv(qkv, Heads(spec, rope, places), None, caches[2], places)
    assert torch.equal(both, alone) and torch.equal(caches[1], caches[2]) and caches[2].any()


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_drafted_and_plain_tokens_are_equal(kv_dtype: str) -> None:
    kernels = triton_kernels(BF16, exact=True)
    if kv_dtype == "fp8" and kernels.why_no_fp8_cache is not None:
        pytest.skip("this GPU reads no 8-bit floats")
    target = zoo.tiny_target("gemma4", kernels, taps=(0, 2))
    requests = zoo.mixed_requests(4, max_tokens=24)
    cache = CacheOptions(0.05, kv_dtype, "rebuilt")
    plain = Engine(target, config=EngineConfig(verify=0, ngram=False, cache=cache))
    drafted = Engine(target, zoo.tiny_drafter(kernels), EngineConfig(verify=5, cache=cache))
    answers = [
        {key: one.token_ids for key, one in zoo.run(engine, requests).items()}
        for engine in (plain, drafted)
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("width", [1, 16])
@pytest.mark.parametrize("context", [8192, 131072])
def test_speed_beside_that_of_stored_keys(width: int, context: int, report: list[str]) -> None:
    """No bound: what reading half of the bytes is worth is to be learned here."""
    case = Case((32, 4), 512, (width,), (context,))
    query, keys, values, view = make_batch(case)
    keys, values = keys.nan_to_num(), values.nan_to_num()
    view = replace(view, block_table=view.block_table.clamp(0, keys.shape[0] - 1))
    kernels, rule = triton_kernels(BF16), make_rule(case)
    rebuild = make_rebuild(512, BF16, context + width)

    def stored() -> Tensor:
        return kernels.attention(query, PagedKeys(keys, values, view, **rule))

    def rebuilt() -> Tensor:
        return kernels.attention(query, PagedKeys(None, values, view, rebuild=rebuild, **rule))

    times = [microseconds(graphed(call, 20), 5) / 20 for call in (stored, rebuilt)]
    report.append(
        f"31B's full layer, {width} rows, {context} keys: {times[0]:.1f} us with stored keys, "
        f"{times[1]:.1f} us with rebuilt ones ({times[0] / times[1]:.2f} times the speed)"
    )
    assert rebuilt().isfinite().all()
