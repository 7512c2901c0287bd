"""The rule in numpy equals the rule in torch bit for bit, whatever the rows' neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashdraft.kernels.cpu import backend as cpu_backend
from flashdraft.kernels.draw import host, reference
from flashdraft.kernels.torch_backend import TorchKernels
from tests.drawn import CPU, assert_equal, make_rows


@pytest.mark.parametrize("vocab_size", [1, 2, 31, 33, 257, 1024, 3001])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_reference(vocab_size: int, masked: bool) -> None:
    for seed in range(12 if vocab_size < 3000 else 6):
        batch = make_rows(seed * 7919 + vocab_size, vocab_size, rows_each=3, masked=masked)
        expected = reference.draw(batch.logits, batch.settings, batch.rows)
        assert_equal(host.draw(batch.logits, batch.settings, batch.rows), expected)


@pytest.mark.parametrize(
    "fixed",
    [
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.0},
        {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "min_p": 0.0},
        {"temperature": 1.2, "top_k": 0, "top_p": 1.0, "min_p": 0.03},
        {},
    ],
)
def test_equals_the_reference_over_a_whole_vocabulary(fixed: dict[str, float]) -> None:
    batch = make_rows(3, 49152, num_slots=14, **fixed)
    expected = reference.draw(batch.logits, batch.settings, batch.rows)
    assert_equal(host.draw(batch.logits, batch.settings, batch.rows), expected)


def test_a_row_alone_is_the_row_in_a_batch() -> None:
    batch = make_rows(1, 501, masked=True)
    together = host.draw(batch.logits, batch.settings, batch.rows)
    for row in range(len(batch.logits)):
        one = batch.alone(row)
        alone = host.draw(one.logits, one.settings, one.rows)
        for found, expected in zip(alone, together, strict=True):
            assert torch.equal(found[0].nan_to_num(0.5), expected[row].nan_to_num(0.5))


def test_totals_are_made_for_those_who_want_them() -> None:
    batch = make_rows(2, 301)
    full = host.draw(batch.logits, batch.settings, batch.rows)
    lean = host.draw(batch.logits, batch.settings, replace(batch.rows, totals=False))
    wanted = batch.settings.num_top[batch.rows.owner] >= 0
    assert torch.equal(lean.tokens, full.tokens)
    assert torch.equal(lean.log_total[wanted].nan_to_num(0), full.log_total[wanted].nan_to_num(0))
    assert lean.log_total[~wanted].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_torch_backend_draws_on_the_host(dtype: torch.dtype) -> None:
    batch = make_rows(4, 301)
    logits = batch.logits.to(dtype)
    found = TorchKernels(CPU, dtype).draw(logits, batch.settings, batch.rows)
    assert_equal(found, reference.draw(logits.float(), batch.settings, batch.rows))


@pytest.mark.skipif(not cpu_backend.available(), reason="the native kernels are not built")
def test_the_native_backend_draws_the_same() -> None:
    batch = make_rows(5, 1001)
    found = cpu_backend.CpuKernels(quantize=False).draw(*batch.drawable)
    assert_equal(found, reference.draw(*batch.drawable))


def test_no_rows() -> None:
    batch = make_rows(6, 40)
    none = replace(
        batch.rows,
        owner=batch.rows.owner[:0],
        positions=batch.rows.positions[:0],
        ancestors=None,
        followed=None,
    )
    for implementation in (host.draw, reference.draw):
        drawn = implementation(batch.logits[:0], batch.settings, none)
        assert [len(one) for one in drawn] == [0] * 5
