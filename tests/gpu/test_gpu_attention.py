"""The Triton kernels on a real GPU, at real sizes, against the torch reference in float32.

`pytest tests/gpu/test_gpu_attention.py` prints a table of errors, plans and speeds at its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

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
)
from flashdraft.kernels.kinds import Activation
from flashdraft.kernels.torch_backend import TorchKernels
from tests.tree_rows import make_trees, random_tree

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PAGE_SIZE = 16
# The largest error of an element (values are of size one); the error's norm over the output's.
LARGEST = {BF16: 3e-2, FP16: 5e-3, FP32: 1e-4}
RELATIVE = {BF16: 6e-3, FP16: 1e-3, FP32: 2e-5}


@dataclass(frozen=True)
class Case:
    """A batch for attention: query rows and earlier keys of every sequence, and the rest."""

    heads: tuple[int, int]
    head_dim: int
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    window: int | None = None
    mask: str = "causal"
    dtype: torch.dtype = BF16


WIDTHS = {"rows": (1, 2, 8, 16, 33, 64), "contexts": (8192, 0, 5, 1023, 4096, 300)}
DECODE = {"rows": (1,) * 4, "contexts": (0, 17, 1000, 8192)}
SHORT = {"rows": (1,) * 3, "contexts": (0, 16, 300)}
PREFILL = {"rows": (300, 1, 0, 16), "contexts": (700, 2000, 40, 17)}
SMALL, MID, SLIDING, FULL = ((9, 3), 64), ((16, 2), 128), ((8, 4), 256), ((16, 2), 512)

CASES = {
    "decode 64": Case(*SMALL, **DECODE),
    "decode 64 short": Case(*SMALL, **SHORT),
    "decode 128": Case(*MID, **DECODE),
    "decode 256 window": Case(*SLIDING, **DECODE, window=1024),
    "decode 512": Case(*FULL, **DECODE),
    "widths 64": Case(*SMALL, **WIDTHS),
    "widths 128, no groups": Case((4, 4), 128, **WIDTHS),
    "widths 256": Case(*SLIDING, **WIDTHS),
    "widths 256 window": Case(*SLIDING, **WIDTHS, window=1024),
    "widths 512": Case(*FULL, **WIDTHS),
    "prefill 64": Case(*SMALL, **PREFILL),
    "prefill 128": Case(*MID, **PREFILL),
    "prefill 256 window": Case(*SLIDING, **PREFILL, window=256),
    "prefill 512": Case(*FULL, **PREFILL),
    "prefill 64, float16": Case(*SMALL, **PREFILL, dtype=FP16),
    "block 128 bidirectional": Case(*MID, (16, 16, 7), (8000, 0, 33), mask="bidirectional"),
    "block 128 bidirectional window": Case(
        *MID, (16, 16, 7), (8000, 0, 33), window=2048, mask="bidirectional"
    ),
    "block 128 window of 5": Case(*MID, (16, 33), (500, 3), window=5, mask="bidirectional"),
    "tree 64": Case(*SMALL, (16, 3, 64), (2000, 0, 15), mask="tree"),
    "tree 128": Case(*MID, (16, 3, 64), (2000, 0, 15), mask="tree"),
    "tree 256 window": Case(*SLIDING, (16, 3, 64), (2000, 0, 1015), window=1024, mask="tree"),
    "tree 256 window of 16": Case(*SLIDING, (64, 33), (500, 3), window=16, mask="tree"),
    "tree 512": Case(*FULL, (16, 3), (900, 0), mask="tree"),
    "tree 64, float32": Case(*SMALL, (16, 3, 64), (2000, 0, 15), mask="tree", dtype=FP32),
    "float32 64": Case(*SMALL, **WIDTHS, dtype=FP32),
    "float32 128": Case(*MID, (16, 1, 2), (2000, 8192, 0), dtype=FP32),
    "float32 256 window": Case(*SLIDING, (16, 1, 2), (2000, 900, 0), window=256, dtype=FP32),
    "float32 512": Case(*FULL, (16, 1, 2), (300, 2000, 0), dtype=FP32),
    "odd head": Case((6, 2), 96, (16, 1), (500, 33)),
}


def triton_kernels(dtype: torch.dtype, exact: bool = False) -> Any:
    from flashdraft.kernels.cuda.backend import TritonKernels

    return TritonKernels(CUDA, dtype, exact)


def make_batch(case: Case) -> tuple[Tensor, Tensor, Tensor, PageView]:
    """Queries and pages in random order. What no row may see is NaN, its page numbers nonsense."""
    lengths = [rows + context for rows, context in zip(case.rows, case.contexts, strict=True)]
    num_pages = [-(-length // PAGE_SIZE) for length in lengths]
    free = torch.randperm(sum(num_pages) + 7).tolist()
    shape = (PAGE_SIZE, case.heads[1], case.head_dim)
    caches = torch.full((2, len(free), *shape), float("nan"), device=CUDA, dtype=case.dtype)
    table = torch.full((len(lengths), max(num_pages) + 2), -9, dtype=torch.int32)
    for s, length in enumerate(lengths):
        mine = torch.tensor([free.pop() for _ in range(num_pages[s])], dtype=torch.int32)
        seen = 0 if case.window is None else max(0, case.contexts[s] - case.window + 1)
        content = torch.randn(2, num_pages[s] * PAGE_SIZE, *shape[1:], device=CUDA)
        content[:, :seen] = content[:, length:] = float("nan")
        caches[:, mine.long()] = content.view(2, num_pages[s], *shape).to(case.dtype)
        table[s, : num_pages[s]] = mine
        table[s, : seen // PAGE_SIZE] = 2**31 - 1 if s % 2 else -(2**31)
    query = torch.randn(sum(case.rows), case.heads[0], case.head_dim, device=CUDA)
    view = PageView(
        query_start=torch.tensor([0, *itertools.accumulate(case.rows)], dtype=torch.int32).to(CUDA),
        context_lens=torch.tensor(case.contexts, dtype=torch.int32).to(CUDA),
        block_table=table.to(CUDA),
        slots=torch.empty(0, dtype=torch.int64),
        page_size=PAGE_SIZE,
        max_query_len=max(case.rows),
        max_key_len=max(lengths),
    )
    return query.to(case.dtype), caches[0], caches[1], view


def make_rule(case: Case) -> dict[str, Any]:
    mask = CAUSAL if case.mask == "causal" else BIDIRECTIONAL
    if case.mask == "tree":
        found = [random_tree(rows, 15, seed) for seed, rows in enumerate(case.rows)]
        trees = make_trees(case.rows, found)
        mask = BlockMask(trees=Trees(trees.ancestors.to(CUDA), trees.depths.to(CUDA)))
    return {"scale": case.head_dim**-0.5, "window": case.window, "mask": mask}


def reference(
    query: Tensor, keys: Tensor, values: Tensor, view: PageView, rule: dict[str, Any]
) -> Tensor:
    safe = replace(view, block_table=view.block_table.clamp(0, keys.shape[0] - 1))
    caches = (keys.float().nan_to_num(), values.float().nan_to_num())
    return TorchKernels(CUDA, FP32).attention(query.float(), PagedKeys(*caches, safe, **rule))


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_the_reference(name: str, report: list[str]) -> None:
    case = CASES[name]
    batch, rule = make_batch(case), make_rule(case)
    kernels = triton_kernels(case.dtype)
    found = kernels.attention(batch[0], PagedKeys(*batch[1:], **rule))
    expected = reference(*batch, rule)
    error = found.float() - expected
    largest, relative = error.abs().max().item(), (error.norm() / expected.norm()).item()
    plan = plan_of(kernels, *batch, case.window)
    report.append(f"{name:34} max {largest:.1e}  relative {relative:.1e}  {tuple(plan)}")
    assert found.dtype == case.dtype and not found.isnan().any()
    assert largest <= LARGEST[case.dtype]
    assert relative <= RELATIVE[case.dtype]
    assert torch.equal(found, kernels.attention(batch[0], PagedKeys(*batch[1:], **rule))), (
        "two runs differ"
    )


def plan_of(
    kernels: Any, query: Tensor, keys: Tensor, values: Tensor, view: PageView, window: int | None
) -> Any:
    from flashdraft.kernels.cuda.plan import plan_attention

    given = PagedKeys(keys, values, view, 1.0, window, CAUSAL)
    return plan_attention(query, given, kernels._limits)


@pytest.mark.parametrize("name", ["widths 64", "widths 256 window", "widths 512"])
def test_exact_attention_of_a_row_does_not_depend_on_its_block(name: str) -> None:
    case = CASES[name]
    query, keys, values, view = make_batch(case)
    kernels, rule = triton_kernels(case.dtype, exact=True), make_rule(case)
    together = kernels.attention(query, PagedKeys(keys, values, view, **rule))
    error = together.float() - reference(query, keys, values, view, rule)
    assert error.abs().max() <= LARGEST[case.dtype]
    owner = torch.tensor([s for s, rows in enumerate(case.rows) for _ in range(rows)]).to(CUDA)
    place = torch.arange(len(owner)).to(CUDA) - view.query_start[owner]
    alone = replace(
        view,
        query_start=torch.arange(len(owner) + 1, dtype=torch.int32).to(CUDA),
        context_lens=(view.context_lens[owner] + place).int(),
        block_table=view.block_table[owner],
        max_query_len=1,
    )
    assert torch.equal(kernels.attention(query, PagedKeys(keys, values, alone, **rule)), together)


@pytest.mark.parametrize("window", [None, 1024])
def test_attention_can_be_captured_and_replayed_with_other_lengths(window: int | None) -> None:
    """No launch waits for the device, and what a graph reads may change between replays."""
    case = Case(*MID, (4, 4), (40000, 500), window)
    query, keys, values, view = make_batch(case)
    keys, values, rule = keys.nan_to_num(), values.nan_to_num(), make_rule(case)
    kernels = triton_kernels(case.dtype)
    kernels.attention(query, PagedKeys(keys, values, view, **rule))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.attention(query, PagedKeys(keys, values, view, **rule))
    view.block_table.clamp_(0, keys.shape[0] - 1)
    for contexts in ((40000, 500), (17, 0), (1, 400), (9000, 499)):
        view.context_lens.copy_(torch.tensor(contexts))
        graph.replay()
        expected = reference(query, keys, values, view, rule)
        assert (found.float() - expected).abs().max() < LARGEST[BF16]


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_row_kernels_equal_the_reference(dtype: torch.dtype) -> None:
    kernels, plain = triton_kernels(dtype), TorchKernels(CUDA, dtype)
    rough = {"atol": 2e-2, "rtol": 1.6e-2} if dtype == BF16 else {"atol": 1e-5, "rtol": 1e-5}
    x, delta = torch.randn(2, 37, 5376, device=CUDA).to(dtype)
    weight = torch.randn(5376, device=CUDA).to(dtype)
    for activation in Activation:
        torch.testing.assert_close(
            kernels.gated(x, activation), plain.gated(x, activation), **rough
        )
    torch.testing.assert_close(
        kernels.rms_norm(x, weight, 1e-6), plain.rms_norm(x, weight, 1e-6), **rough
    )
    for found, expected in zip(
        kernels.add_rms_norm(x, delta, weight, 1e-6),
        plain.add_rms_norm(x, delta, weight, 1e-6),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, **rough)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("kind", ["plain", "norms", "shared", "no queries"])
def test_prepare_qkv_equals_the_reference(kind: str, dtype: torch.dtype) -> None:
    norm = torch.randn(256, device=CUDA)
    spec = {
        "plain": QKVSpec(9, 3, 64, 1e-6),
        "norms": QKVSpec(8, 4, 256, 1e-6, q_norm=norm, k_norm=norm, v_norm=True),
        "shared": QKVSpec(8, 2, 256, 1e-6, q_norm=norm, k_norm=norm, v_norm=True, share_kv=True),
        "no queries": QKVSpec(0, 4, 256, 1e-6, k_norm=norm),
    }[kind]
    angles = torch.rand(5000, spec.head_dim // 2, device=CUDA) * 6
    rope = RopeTable(angles.cos(), angles.sin())
    qkv = torch.randn(33, spec.width, device=CUDA).to(dtype)
    positions = torch.randint(0, 5000, (33,), device=CUDA)
    slots = torch.randperm(20 * PAGE_SIZE, device=CUDA)[:33]
    results = []
    for kernels in (triton_kernels(dtype), TorchKernels(CUDA, dtype)):
        shape = (2, 20, PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
        caches = torch.zeros(shape, device=CUDA, dtype=dtype)
        query = kernels.prepare_qkv(qkv, Heads(spec, rope, positions), caches[0], caches[1], slots)
        results.append((query, caches))
    close = {"atol": 3e-2, "rtol": 1.6e-2} if dtype == BF16 else {"atol": 1e-5, "rtol": 1e-5}
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, **close)


def microseconds(call: Callable[[], object], repeats: int) -> float:
    call()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(repeats):
        call()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / repeats * 1e3


def graphed(call: Callable[[], object], repeats: int) -> Callable[[], object]:
    """The call, so many times in one graph: what the device needs, without the host's part."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return graph.replay


@pytest.mark.parametrize(
    ("heads", "head_dim", "num_seqs", "width", "window"),
    [
        ((9, 3), 64, 1, 1, None),
        ((64, 8), 128, 8, 16, None),
        ((32, 16), 256, 1, 16, 1024),
        ((32, 4), 512, 1, 1, None),
        ((32, 4), 512, 1, 16, None),
        ((32, 4), 512, 16, 8, None),
    ],
)
def test_attention_is_faster_than_the_reference(
    heads: tuple[int, int],
    head_dim: int,
    num_seqs: int,
    width: int,
    window: int | None,
    report: list[str],
) -> None:
    case = Case(heads, head_dim, (width,) * num_seqs, (8192,) * num_seqs, window)
    batch, rule = make_batch(case), make_rule(case)
    keys, values = batch[1].nan_to_num(), batch[2].nan_to_num()
    safe = replace(batch[3], block_table=batch[3].block_table.clamp(0, keys.shape[0] - 1))
    kernels, plain = triton_kernels(BF16), TorchKernels(CUDA, BF16)

    def attend() -> Tensor:
        return kernels.attention(batch[0], PagedKeys(keys, values, safe, **rule))

    ours, launched = microseconds(graphed(attend, 20), 5) / 20, microseconds(attend, 50)
    theirs = microseconds(
        lambda: plain.attention(batch[0], PagedKeys(keys, values, safe, **rule)), 3
    )
    seen = min(8192, window or 8192) + width
    num_bytes = 2 * num_seqs * seen * heads[1] * head_dim * 2
    report.append(
        f"{heads} heads of {head_dim}, {num_seqs} x {width} rows, window {window}: "
        f"{ours:.1f} us in a graph ({num_bytes / ours / 1e3:.0f} GB/s of keys and values), "
        f"{launched:.1f} us launched; reference {theirs:.0f} us"
    )
    assert launched < theirs
