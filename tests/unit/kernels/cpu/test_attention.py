"""The native CPU kernels' attention: right values, and the exactness contract, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashdraft.kernels.cpu.backend import CpuKernels, available
from flashdraft.kernels.interface import (
    BIDIRECTIONAL,
    CAUSAL,
    BlockMask,
    Heads,
    PagedKeys,
    PageView,
    QKVSpec,
    RopeTable,
)
from flashdraft.kernels.torch_backend import TorchKernels

if not available():
    pytest.skip("the native kernels are not built", allow_module_level=True)

REFERENCE = TorchKernels(torch.device("cpu"), torch.float32)
PAGE_SIZE = 8
LENGTHS = ((1, 0), (9, 30), (3, 50), (40, 5), (2, 100), (16, 0))  # (rows, context)


def make_kernels(threads: int = 1) -> CpuKernels:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    kernels = CpuKernels(quantize=False)
    torch.set_num_threads(before)
    return kernels


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# --- queries, keys, values ------------------------------------------------------------------------


def make_rope(positions: int, dim: int) -> RopeTable:
    angles = torch.rand(positions, dim // 2) * 6
    return RopeTable(angles.cos(), angles.sin())


@pytest.mark.parametrize("num_heads", [6, 0])
@pytest.mark.parametrize("share_kv", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dim", [6, 20, 64])
def test_prepare_qkv(num_heads: int, share_kv: bool, normed: bool, dim: int) -> None:
    norm = torch.randn(dim) if normed else None
    spec = QKVSpec(num_heads, 2, dim, 1e-6, norm, norm, v_norm=normed, share_kv=share_kv)
    kernels, rope, qkv = make_kernels(), make_rope(50, dim), torch.randn(40, spec.width)
    positions, slots = torch.randint(0, 50, (40,)), torch.randperm(64)[:40]

    def prepare(by: CpuKernels | TorchKernels, sizes: Sequence[int]) -> list[Tensor]:
        keys, values = torch.zeros(8, 8, 2, dim), torch.zeros(8, 8, 2, dim)
        parts = [t.split(list(sizes)) for t in (qkv, positions, slots)]
        queries = [
            by.prepare_qkv(part, Heads(spec, rope, position), keys, values, slot)
            for part, position, slot in zip(*parts, strict=True)
        ]
        return [torch.cat(queries), keys, values]

    whole = prepare(kernels, [40])
    for result, expected in zip(whole, prepare(REFERENCE, [40]), strict=True):
        assert torch.allclose(result, expected, rtol=1e-5, atol=2e-6)
    for sizes in ([1] * 40, [17, 23], [39, 1]):
        for result, same in zip(prepare(kernels, sizes), whole, strict=True):
            assert torch.equal(result, same)


def test_prepare_qkv_refuses_places_that_do_not_exist() -> None:
    kernels, rope, spec = make_kernels(), make_rope(10, 8), QKVSpec(2, 1, 8, 1e-6)
    cache, qkv = torch.zeros(2, 4, 1, 8), torch.randn(1, spec.width)

    def prepare(position: int, slot: int) -> None:
        kernels.prepare_qkv(
            qkv,
            Heads(spec, rope, torch.tensor([position])),
            cache,
            cache.clone(),
            torch.tensor([slot]),
        )

    prepare(9, 7)
    for position in (-1, 10, 2**40):
        with pytest.raises(IndexError, match="position"):
            prepare(position, 0)
    for slot in (-1, 8, 2**40):
        with pytest.raises(IndexError, match="slot"):
            prepare(0, slot)


# --- attention ------------------------------------------------------------------------------------


def make_view(
    query_lens: Sequence[int], contexts: Sequence[int], pages: Sequence[Sequence[int]]
) -> PageView:
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    table = torch.full((len(pages), max(map(len, pages))), -1, dtype=torch.int32)
    for row, numbers in zip(table, pages, strict=True):
        row[: len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
    slots = torch.zeros(int(starts[-1]), dtype=torch.int64)  # attention does not read them
    longest = max(a + b for a, b in zip(query_lens, contexts, strict=True))
    lens = torch.tensor(contexts, dtype=torch.int32)
    return PageView(starts, lens, table, slots, PAGE_SIZE, max(query_lens), longest)


class Sequences:
    """Random sequences in shuffled pages, and their attention under any grouping."""

    def __init__(
        self, lengths: Sequence[tuple[int, int]], heads: int, kv_heads: int, dim: int
    ) -> None:
        self.query_lens = [query for query, _ in lengths]
        self.contexts = [context for _, context in lengths]
        self.scale = dim**-0.5
        self.query = torch.randn(sum(self.query_lens), heads, dim)
        counts = [-(-sum(pair) // PAGE_SIZE) for pair in lengths]
        numbers = torch.randperm(sum(counts) + 3).tolist()
        self.pages = [[numbers.pop() for _ in range(count)] for count in counts]
        shape = (sum(counts) + 3, PAGE_SIZE, kv_heads, dim)
        self.keys, self.values = torch.randn(shape), torch.randn(shape)

    def attend(
        self, kernels: CpuKernels | TorchKernels, mask: BlockMask, window: int | None
    ) -> Tensor:
        view = make_view(self.query_lens, self.contexts, self.pages)
        return self.attend_view(kernels, self.query, view, mask, window)

    def attend_view(
        self,
        kernels: CpuKernels | TorchKernels,
        query: Tensor,
        view: PageView,
        mask: BlockMask,
        window: int | None,
    ) -> Tensor:
        return kernels.attention(
            query,
            PagedKeys(self.keys, self.values, view, scale=self.scale, window=window, mask=mask),
        )


@pytest.mark.parametrize("window", [None, 1, 5, 33])
@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 10), (16, 2, 128), (40, 1, 6)]
)
def test_attention_matches_torch(
    heads: int, kv_heads: int, dim: int, kind: str, window: int | None
) -> None:
    sequences = Sequences(LENGTHS, heads, kv_heads, dim)
    mask = {"causal": CAUSAL, "bidirectional": BIDIRECTIONAL}[kind]
    result = sequences.attend(make_kernels(), mask, window)
    expected = sequences.attend(REFERENCE, mask, window)
    assert torch.allclose(result, expected, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 1, 256), (8, 1, 512)])
def test_attention_of_large_heads(heads: int, kv_heads: int, dim: int) -> None:
    sequences = Sequences(((5, 20), (1, 33)), heads, kv_heads, dim)
    result = sequences.attend(make_kernels(), CAUSAL, None)
    assert torch.allclose(result, sequences.attend(REFERENCE, CAUSAL, None), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dim", [64, 24, 10, 8])
def test_attention_does_not_depend_on_chunks(dim: int, window: int | None) -> None:
    """A causal prompt at once, in chunks of every size, or row by row."""
    kernels, context, count = make_kernels(), 27, 40
    sequences = Sequences([(count, context)], 6, 2, dim)
    whole = sequences.attend(kernels, CAUSAL, window)
    for size in (*range(1, 12), 16, 25, 39):
        parts = []
        for start in range(0, count, size):
            rows = sequences.query[start : start + size]
            view = make_view([len(rows)], [context + start], sequences.pages)
            parts.append(sequences.attend_view(kernels, rows, view, CAUSAL, window))
        assert torch.equal(torch.cat(parts), whole), f"chunks of {size}"


@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
@pytest.mark.parametrize("window", [None, 7])
def test_attention_does_not_depend_on_the_batch(kind: str, window: int | None) -> None:
    kernels, sequences = make_kernels(), Sequences(LENGTHS, 6, 2, 64)
    mask = {"causal": CAUSAL, "bidirectional": BIDIRECTIONAL}[kind]
    whole = sequences.attend(kernels, mask, window).split(sequences.query_lens)
    queries = sequences.query.split(sequences.query_lens)
    for order in ([5, 3, 1, 0, 2, 4], [2, 4], [0], [1], [3], [5]):
        view = make_view(
            [sequences.query_lens[s] for s in order],
            [sequences.contexts[s] for s in order],
            [sequences.pages[s] for s in order],
        )
        rows = torch.cat([queries[s] for s in order])
        result = sequences.attend_view(kernels, rows, view, mask, window)
        assert torch.equal(result, torch.cat([whole[s] for s in order]))


def test_attention_does_not_depend_on_pages() -> None:
    kernels, sequences = make_kernels(), Sequences(LENGTHS, 6, 2, 64)
    whole = sequences.attend(kernels, CAUSAL, None)
    order = torch.randperm(len(sequences.keys))
    sequences.keys, sequences.values = sequences.keys[order], sequences.values[order]
    place = order.argsort().tolist()
    sequences.pages = [[place[page] for page in pages] for pages in sequences.pages]
    assert torch.equal(sequences.attend(kernels, CAUSAL, None), whole)


def test_attention_never_touches_hidden_keys() -> None:
    """Stale table entries behind the window, and rubbish in every key that no row sees."""
    kernels, window = make_kernels(), 10
    sequences = Sequences([(4, 50)], 6, 2, 64)
    clean = sequences.attend(kernels, CAUSAL, window)
    first = (50 + 1 - window) // PAGE_SIZE  # the page of the first row's first visible key
    sequences.pages[0][:first] = [2**31 - 1] * first
    rubbish = torch.ones(sequences.keys.shape[:2], dtype=torch.bool)
    for key in range(50 + 1 - window, 54):
        rubbish[sequences.pages[0][key // PAGE_SIZE], key % PAGE_SIZE] = False
    sequences.keys[rubbish] = float("nan")
    sequences.values[rubbish] = float("inf")
    assert torch.equal(sequences.attend(kernels, CAUSAL, window), clean)


def test_attention_keeps_a_hidden_key_out_of_other_rows() -> None:
    kernels, sequences = make_kernels(), Sequences([(4, 12)], 6, 2, 64)
    clean = sequences.attend(kernels, CAUSAL, None)
    last = 15  # the own key of the last row, which no other row sees
    place = (sequences.pages[0][last // PAGE_SIZE], last % PAGE_SIZE)
    sequences.keys[place] = float("nan")
    sequences.values[place] = float("nan")
    result = sequences.attend(kernels, CAUSAL, None)
    assert torch.equal(result[:3], clean[:3])
    assert result[3].isnan().all()


def test_attention_of_no_rows() -> None:
    kernels, sequences = make_kernels(), Sequences([(0, 5), (2, 3)], 6, 2, 64)
    alone = make_view([2], [3], sequences.pages[1:])
    assert torch.equal(
        sequences.attend(kernels, CAUSAL, None),
        sequences.attend_view(kernels, sequences.query, alone, CAUSAL, None),
    )


@pytest.mark.parametrize("lengths", [LENGTHS, [(1, 300)], [(5, 70)]])
def test_attention_does_not_depend_on_threads(lengths: Sequence[tuple[int, int]]) -> None:
    sequences = Sequences(lengths, 6, 2, 64)
    alone = sequences.attend(make_kernels(threads=1), CAUSAL, None)
    for threads in (2, 3):
        assert torch.equal(sequences.attend(make_kernels(threads), CAUSAL, None), alone)


def test_wrong_page_views_are_refused() -> None:
    kernels, sequences = make_kernels(), Sequences([(4, 20)], 6, 2, 64)
    view = make_view(sequences.query_lens, sequences.contexts, sequences.pages)
    wrong = [
        replace(view, query_start=torch.tensor([0, 5], dtype=torch.int32)),
        replace(view, query_start=torch.tensor([-1, 4], dtype=torch.int32)),
        replace(view, query_start=torch.tensor([0, 4])),
        replace(view, context_lens=torch.tensor([-1], dtype=torch.int32)),
        replace(view, context_lens=torch.tensor([1000], dtype=torch.int32)),
        replace(view, block_table=view.block_table[:, :2].contiguous()),
        replace(view, page_size=4),
    ]
    for bad in wrong:
        with pytest.raises(ValueError):
            sequences.attend_view(kernels, sequences.query, bad, CAUSAL, None)
    for page in (-1, len(sequences.keys), 2**31 - 1):
        table = view.block_table.clone()
        table[0, 1] = page
        with pytest.raises(IndexError, match="page"):
            sequences.attend_view(
                kernels, sequences.query, replace(view, block_table=table), CAUSAL, None
            )
    with pytest.raises(ValueError, match="window"):
        sequences.attend_view(kernels, sequences.query, view, CAUSAL, 0)


OUT_OF_MEMORY = """
import resource, sys, torch
from flashdraft.kernels.cpu import levels
from flashdraft.kernels.cpu.backend import CpuKernels
from flashdraft.kernels.interface import CAUSAL, PagedKeys, PageView
levels.use(sys.argv[1])
size, count = 2**16, 2**9
cache, query = torch.zeros(1, size, 1, 4), torch.zeros(1, 1, 4)
view = PageView(
    torch.tensor([0, 1], dtype=torch.int32),
    torch.tensor([size * count - 1], dtype=torch.int32),
    torch.zeros(1, count, dtype=torch.int32),
    torch.zeros(1, dtype=torch.int64), size, 1, size * count,
)
kernels = CpuKernels(False)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
try:
    kernels.attention(query, PagedKeys(cache, cache, view, 1.0, None, CAUSAL))
except MemoryError:
    print("refused")
print(float(kernels.argmax(torch.tensor([[0.0, 1.0]]))))
"""


def test_attention_without_memory_raises(level: str) -> None:
    command = [sys.executable, "-c", OUT_OF_MEMORY, level]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.stdout.split() == ["refused", "1.0"], run.stderr
