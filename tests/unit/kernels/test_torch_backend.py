"""The reference backend against torch's own attention, plain formulas, and itself row by row."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
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
)
from flashdraft.kernels.kinds import Activation
from flashdraft.kernels.torch_backend import TorchKernels
from tests import picture_rows

CPU = torch.device("cpu")
KERNELS = TorchKernels(CPU, torch.float32)
ROWS, CONTEXTS = (1, 5, 0, 8), (30, 0, 7, 45)
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, SCALE = 6, 2, 16, 16, 0.3


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Batch:
    """Four sequences: their queries, and their keys and values both dense and in pages."""

    def __init__(self, kv_heads: int = KV_HEADS, scattered: bool = True) -> None:
        lengths = [rows + context for rows, context in zip(ROWS, CONTEXTS, strict=True)]
        num_pages = [-(-length // PAGE_SIZE) for length in lengths]
        self.query = torch.randn(sum(ROWS), HEADS, HEAD_DIM)
        self.keys = [torch.randn(length, kv_heads, HEAD_DIM) for length in lengths]
        self.values = [torch.randn(length, kv_heads, HEAD_DIM) for length in lengths]
        total = sum(num_pages) + 3
        self.key_cache = torch.zeros(total, PAGE_SIZE, kv_heads, HEAD_DIM)
        self.value_cache = torch.zeros_like(self.key_cache)
        free = torch.randperm(total).tolist() if scattered else list(range(total))
        table = torch.full((len(ROWS), max(num_pages)), -1, dtype=torch.int32)
        for s, length in enumerate(lengths):
            for page in range(num_pages[s]):
                table[s, page] = free.pop(0)
                part = slice(page * PAGE_SIZE, min(length, (page + 1) * PAGE_SIZE))
                size = part.stop - part.start
                self.key_cache[table[s, page], :size] = self.keys[s][part]
                self.value_cache[table[s, page], :size] = self.values[s][part]
        self.view = PageView(
            query_start=torch.tensor([0, *itertools.accumulate(ROWS)], dtype=torch.int32),
            context_lens=torch.tensor(CONTEXTS, dtype=torch.int32),
            block_table=table,
            slots=torch.empty(0, dtype=torch.int64),
            page_size=PAGE_SIZE,
            max_query_len=max(ROWS),
            max_key_len=max(lengths),
        )

    def attend(self, window: int | None, mask: BlockMask) -> Tensor:
        return KERNELS.attention(
            self.query,
            PagedKeys(
                self.key_cache, self.value_cache, self.view, scale=SCALE, window=window, mask=mask
            ),
        )

    def rows_of(self, s: int) -> slice:
        return slice(int(self.view.query_start[s]), int(self.view.query_start[s + 1]))


def dense_mask(s: int, window: int | None, mask: BlockMask) -> Tensor:
    """The Protocol's rule, one pair at a time."""
    rows, context = ROWS[s], CONTEXTS[s]
    seen = torch.zeros(rows, context + rows, dtype=torch.bool)
    for i, j in itertools.product(range(rows), range(context + rows)):
        distance = context + i - j
        allowed = j < context or distance >= 0 or not mask.causal
        in_window = window is None or -window < distance < window
        seen[i, j] = allowed and in_window
    return seen


@pytest.mark.parametrize("window", [None, 1, 4, 20, 1000])
@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_attention_equals_torch_with_a_dense_mask(
    window: int | None, kind: str, kv_heads: int
) -> None:
    mask = {"causal": CAUSAL, "bidirectional": BIDIRECTIONAL}[kind]
    batch = Batch(kv_heads)
    found = batch.attend(window, mask)
    for s in range(len(ROWS)):
        rows = batch.query[batch.rows_of(s)]
        expected = F.scaled_dot_product_attention(
            rows.transpose(0, 1),
            batch.keys[s].transpose(0, 1).repeat_interleave(HEADS // kv_heads, dim=0),
            batch.values[s].transpose(0, 1).repeat_interleave(HEADS // kv_heads, dim=0),
            attn_mask=dense_mask(s, window, mask),
            scale=SCALE,
        )
        torch.testing.assert_close(found[batch.rows_of(s)], expected.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("name", picture_rows.CASES)
def test_rows_see_their_picture_whole(name: str) -> None:
    batch = picture_rows.Batch(picture_rows.CASES[name])
    assert picture_rows.are_close(batch.attend(KERNELS), batch.expect(batch.case.pictures))


def test_attention_does_not_depend_on_where_the_pages_lie() -> None:
    torch.manual_seed(1)
    scattered = Batch(scattered=True)
    torch.manual_seed(1)
    in_a_row = Batch(scattered=False)
    for s, keys in enumerate(in_a_row.keys):
        assert torch.equal(keys, scattered.keys[s])
    for window in (None, 9):
        assert torch.equal(scattered.attend(window, CAUSAL), in_a_row.attend(window, CAUSAL))


def test_stale_pages_behind_the_window_are_not_read() -> None:
    batch = Batch()
    expected = batch.attend(9, CAUSAL)
    table = batch.view.block_table.clone()
    table[3, :2] = -5  # keys 0 .. 31; the first row at index 45 sees 37 and later
    batch.view = replace(batch.view, block_table=table)
    assert torch.equal(batch.attend(9, CAUSAL), expected)


def test_attention_is_the_same_row_by_row() -> None:
    batch = Batch()
    for window in (None, 9):
        together = batch.attend(window, CAUSAL)
        for s, i in ((s, i) for s, rows in enumerate(ROWS) for i in range(rows)):
            row = int(batch.view.query_start[s]) + i
            view = PageView(
                query_start=torch.tensor([0, 1], dtype=torch.int32),
                context_lens=batch.view.context_lens[s : s + 1] + i,
                block_table=batch.view.block_table[s : s + 1],
                slots=batch.view.slots,
                page_size=PAGE_SIZE,
                max_query_len=1,
                max_key_len=CONTEXTS[s] + i + 1,
            )
            alone = KERNELS.attention(
                batch.query[row : row + 1],
                PagedKeys(
                    batch.key_cache,
                    batch.value_cache,
                    view,
                    scale=SCALE,
                    window=window,
                    mask=CAUSAL,
                ),
            )
            assert torch.equal(alone[0], together[row])


def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate-half RoPE as complex numbers: component j pairs with component j + half."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("num_heads", [6, 0])
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("share_kv", [True, False])
def test_prepare_qkv_equals_the_formulas(num_heads: int, norms: bool, share_kv: bool) -> None:
    weight_q, weight_k, eps = torch.randn(HEAD_DIM), torch.randn(HEAD_DIM), 1e-5
    spec = QKVSpec(
        num_heads,
        KV_HEADS,
        HEAD_DIM,
        eps,
        q_norm=weight_q if norms else None,
        k_norm=weight_k if norms else None,
        v_norm=norms,
        share_kv=share_kv,
    )
    qkv = torch.randn(3, spec.width)
    angles = torch.rand(40, HEAD_DIM // 2) * 6
    positions, slots = torch.tensor([39, 0, 7]), torch.tensor([17, 40, 3])
    caches = torch.zeros(2, 3, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    query = KERNELS.prepare_qkv(
        qkv,
        Heads(spec, RopeTable(angles.cos(), angles.sin()), positions),
        caches[0],
        caches[1],
        slots,
    )
    heads = qkv.view(3, -1, HEAD_DIM)
    raw_query, raw_key = heads[:, :num_heads], heads[:, num_heads : num_heads + KV_HEADS]
    value = raw_key if share_kv else heads[:, num_heads + KV_HEADS :]
    normed_query = rms(raw_query, eps) * weight_q if norms else raw_query
    normed_key = rms(raw_key, eps) * weight_k if norms else raw_key
    torch.testing.assert_close(query, rotate(normed_query, angles[positions]))
    written = caches.view(2, -1, KV_HEADS, HEAD_DIM)
    torch.testing.assert_close(written[0, slots], rotate(normed_key, angles[positions]))
    torch.testing.assert_close(written[1, slots], rms(value, eps) if norms else value)
    written[:, slots] = 0
    assert not written.any()


@pytest.mark.parametrize("activation", Activation)
def test_experts_equal_a_naive_loop(activation: Activation) -> None:
    num_experts, hidden, inner = 5, 12, 8
    gate_up = [torch.randn(2 * inner, hidden) for _ in range(num_experts)]
    down = [torch.randn(hidden, inner) for _ in range(num_experts)]
    x, weights = torch.randn(4, hidden), torch.rand(4, 2)
    chosen = torch.tensor([[0, 3], [3, 0], [4, 1], [0, 4]])
    expected = torch.zeros(4, hidden)
    for row, place in itertools.product(range(4), range(2)):
        expert = int(chosen[row, place])
        gate, up = (gate_up[expert] @ x[row]).chunk(2)
        act = F.silu(gate) if activation is Activation.SILU else F.gelu(gate, approximate="tanh")
        expected[row] += weights[row, place] * (down[expert] @ (act * up))
    found = KERNELS.experts(x, gate_up, down, chosen, weights, activation)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_is_computed_as_if_it_were_alone(dtype: torch.dtype) -> None:
    kernels = TorchKernels(CPU, dtype)
    x = torch.randn(7, 96).to(dtype)
    weight, packed = torch.randn(96).to(dtype), kernels.pack(torch.randn(50, 96))
    operations = {
        "linear": lambda rows: kernels.linear(rows, packed),
        "rms_norm": lambda rows: kernels.rms_norm(rows, weight, 1e-6),
        "add_rms_norm": lambda rows: kernels.add_rms_norm(rows, rows, weight, 1e-6)[1],
        "silu": lambda rows: kernels.gated(rows, Activation.SILU),
        "gelu": lambda rows: kernels.gated(rows, Activation.GELU_TANH),
        "softmax": kernels.softmax,
        "logits": lambda rows: kernels.finish_logits(rows, 0.7, 30.0),
    }
    for name, operation in operations.items():
        together = operation(x)
        alone = torch.cat([operation(x[i : i + 1]) for i in range(7)])
        assert torch.equal(together, alone), name


def test_argmax_takes_the_first_of_equals() -> None:
    x = torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    assert KERNELS.argmax(x).tolist() == [1, 0]
