"""The Triton kernels of a mixture of experts, in Triton's interpreter, against the torch reference.

Triton reads TRITON_INTERPRET when it is imported, so all checks run in one other process, which is
this file as a script; each test then looks at its own result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdraft.kernels.cuda.experts.plan import (
    ALL_ROWS,
    FEW_ROWS,
    FLOAT32,
    MANY_ROWS,
    ONE_ROW,
    SOME_ROWS,
    ExpertsPlan,
    TilePlan,
    plan_exact_experts,
    plan_experts,
)
from flashdraft.kernels.interface import Residual
from flashdraft.kernels.kinds import Activation
from flashdraft.kernels.torch_backend import TorchKernels
from tests.interpreted import judge, report

CPU = torch.device("cpu")
SMALL = ExpertsPlan(TilePlan(16, 32, 4, 2), TilePlan(16, 16, 4, 2, resident=2), block_m=16)
ALL = SMALL._replace(splits=3)
LARGE = ExpertsPlan(TilePlan(32, 64, 4, 2), TilePlan(64, 64, 4, 2), block_m=32)


@dataclass(frozen=True)
class Case:
    """Sizes of a mixture, and how its rows choose."""

    rows: int
    routing: str = "uniform"
    num_experts: int = 6
    num_chosen: int = 2
    hidden: int = 48
    inner: int = 40
    activation: Activation = Activation.GELU_TANH
    dtype: torch.dtype = torch.float32
    plan: ExpertsPlan = SMALL


CASES = {
    "one row": Case(1, plan=ONE_ROW),
    "one row, whole tiles": Case(1, hidden=256, inner=64, num_chosen=4, plan=ONE_ROW),
    "one row, three choices": Case(1, num_chosen=3, activation=Activation.SILU, plan=ONE_ROW),
    "one row, deeper than a tile": Case(1, inner=200, plan=ONE_ROW),
    "one row, whole tiles, deeper": Case(1, hidden=256, inner=256, num_chosen=4, plan=ONE_ROW),
    "one row, float16": Case(1, dtype=torch.float16, plan=ONE_ROW),
    "one row, sorted": Case(1),
    "2 rows": Case(2),
    "7 rows": Case(7, activation=Activation.SILU),
    "7 rows, three choices": Case(7, num_chosen=3),
    "7 rows, degenerate": Case(7, "degenerate"),
    "16 rows, degenerate": Case(16, "degenerate"),
    "16 rows, experts nobody chose": Case(16, "some", num_experts=9),
    "16 rows, whole tiles": Case(16, hidden=64, inner=32),
    "16 rows, float16": Case(16, dtype=torch.float16),
    "all 2 rows": Case(2, plan=ALL),
    "all 7 rows, three choices": Case(7, num_chosen=3, activation=Activation.SILU, plan=ALL),
    "all 16 rows, degenerate": Case(16, "degenerate", plan=ALL),
    "all 16 rows, experts nobody chose": Case(16, "some", num_experts=9, plan=ALL),
    "all 16 rows, whole tiles": Case(16, hidden=64, inner=32, plan=ALL),
    "all 16 rows, float16": Case(16, dtype=torch.float16, plan=ALL),
    "all 29 rows": Case(29, num_experts=20, num_chosen=8, plan=ALL._replace(block_m=32)),
    "33 rows": Case(33, num_experts=128, num_chosen=8, hidden=32, inner=16),
    "33 rows, degenerate": Case(33, "degenerate", plan=LARGE),
    "64 rows": Case(64, plan=LARGE),
    "64 rows, degenerate": Case(64, "degenerate"),
    "200 rows": Case(200, num_experts=5, plan=LARGE),
    "600 rows, more pairs than a sorting block": Case(600, "some", num_experts=3, plan=LARGE),
}


def make_choice(case: Case) -> Tensor:
    """[rows, num_chosen]: different experts in every row."""
    reachable = {
        "uniform": case.num_experts,
        "some": max(case.num_chosen, case.num_experts // 2),
        "degenerate": case.num_chosen,
    }[case.routing]
    lottery = torch.rand(case.rows, reachable)
    return lottery.argsort(1)[:, : case.num_chosen] + case.num_experts - reachable


def check_mixture(case: Case) -> None:
    from flashdraft.kernels.cuda.experts.few_rows import mix_few_rows
    from flashdraft.kernels.cuda.experts.grouped import mix_rows
    from flashdraft.kernels.cuda.experts.one_row import mix_one_row

    x = torch.randn(case.rows, case.hidden).to(case.dtype)
    gate_up = torch.randn(case.num_experts, 2 * case.inner, case.hidden) * case.hidden**-0.5
    down = torch.randn(case.num_experts, case.hidden, case.inner) * case.inner**-0.5
    gate_up, down = gate_up.to(case.dtype), down.to(case.dtype)
    chosen, weights = make_choice(case), torch.rand(case.rows, case.num_chosen)
    routed: Any = (chosen, weights, case.activation)
    if case.plan.splits:
        found = mix_few_rows(x, gate_up, down, *routed, case.plan, num_processors=3)
    elif case.plan.block_m:
        found = mix_rows(x, gate_up, down, *routed, case.plan, num_processors=3)
    else:
        found = mix_one_row(x, gate_up, down, *routed, case.plan)
    expected = TorchKernels(CPU, torch.float32).experts(
        x.float(), list(gate_up.float()), list(down.float()), *routed
    )
    assert found.dtype == case.dtype
    tolerance = 1e-5 if case.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def check_backend(exact: bool) -> None:
    """The whole branch through the backend; exact: a row's bits do not depend on the others."""
    from flashdraft.kernels.cuda.backend import TritonKernels

    kernels, reference = TritonKernels(CPU, torch.float32, exact), TorchKernels(CPU, torch.float32)
    x, scale = torch.randn(5, 32), torch.rand(4) + 0.5
    gate_up, down = torch.randn(4, 16, 32) / 6, torch.randn(4, 32, 8) / 3

    def run(by: Any, rows: Tensor) -> Tensor:
        chosen, weights = by.choose_experts(rows[:, :4].contiguous(), 2, scale)
        packed = by.pack_experts(gate_up), by.pack_experts(down)
        return by.experts(rows, *packed, chosen, weights, Activation.GELU_TANH)

    torch.testing.assert_close(run(kernels, x), run(reference, x), atol=1e-5, rtol=1e-5)
    alone = torch.cat([run(kernels, x[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(alone, run(reference, x), atol=1e-5, rtol=1e-5)
    if exact:
        assert torch.equal(alone, run(kernels, x))
    assert run(kernels, x[:0]).shape == (0, 32)


def check_choice(num_experts: int, num_chosen: int, dtype: torch.dtype) -> None:
    from flashdraft.kernels.cuda.experts.routing import choose_rows

    logits, scale = torch.randn(9, num_experts).to(dtype) * 3, torch.rand(num_experts)
    logits[4] = torch.arange(num_experts).flip(0)
    reference = TorchKernels(CPU, torch.float32)
    found, expected = (
        choose(logits, num_chosen, scale) for choose in (choose_rows, reference.choose_experts)
    )
    assert found[0].dtype == torch.int64 and found[1].dtype == torch.float32
    chances = logits.float().softmax(-1)
    torch.testing.assert_close(chances.gather(1, found[0]), chances.gather(1, expected[0]))
    torch.testing.assert_close(found[1] / scale[found[0]], expected[1] / scale[expected[0]])


def check_ties() -> None:
    from flashdraft.kernels.cuda.experts.routing import choose_rows

    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0] * 5, [float("nan")] * 5])
    chosen, weights = choose_rows(logits, 3, torch.ones(5))
    assert chosen[:2].tolist() == [[1, 3, 0], [0, 1, 2]]
    torch.testing.assert_close(weights[1], torch.full((3,), 1 / 3))
    assert chosen[2].tolist() == [0, 1, 2]  # broken, but each once
    assert weights[2].isnan().all()


def check_sorting() -> None:
    from flashdraft.kernels.cuda.experts.routing import sort_pairs

    for num_pairs, num_experts, tile in ((1, 6, 16), (300, 6, 16), (2500, 128, 64), (40, 128, 16)):
        experts = torch.randint(0, (num_experts + 1) // 2, (num_pairs,))
        pairs = sort_pairs(experts.unsqueeze(1), num_experts, tile)
        assert torch.equal(pairs.order.long(), experts.sort(stable=True).indices)
        num_tiles, covered = int(pairs.num_tiles), list[int]()
        assert num_tiles <= pairs.max_tiles
        for t in range(num_tiles):
            members = list(range(int(pairs.first[t]), int(pairs.last[t])))
            assert 0 < len(members) <= tile
            assert set(experts[pairs.order[members].long()].tolist()) == {int(pairs.expert[t])}
            covered += members
        assert covered == list(range(num_pairs))


def check_residual(
    dtype: torch.dtype, num_deltas: int, post: bool, scalar: bool, num_outputs: int
) -> None:
    from flashdraft.kernels.cuda.backend import TritonKernels

    x, *deltas = torch.randn(1 + num_deltas, 3, 40).to(dtype) * 2
    vectors = iter(torch.randn(8, 40).to(dtype))
    pairs = [(delta, next(vectors)) for delta in deltas]
    residual = Residual(
        x,
        pairs,
        next(vectors) if post else None,
        torch.tensor([0.7]).to(dtype) if scalar else None,
    )
    arguments: Any = (residual, [next(vectors) for _ in range(num_outputs)], 1e-6)
    stream, normed = TritonKernels(CPU, dtype).residual_norms(*arguments)
    expected_stream, expected = TorchKernels(CPU, dtype).residual_norms(*arguments)
    close = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 4e-3}
    torch.testing.assert_close([stream, *normed], [expected_stream, *expected], **close)
    assert len(normed) == num_outputs


CHECKS: dict[str, Callable[[], None]] = {
    **{f"mixture: {name}": lambda case=case: check_mixture(case) for name, case in CASES.items()},
    "backend": lambda: check_backend(exact=False),
    "backend, exact": lambda: check_backend(exact=True),
    "choice of 8 in 128": lambda: check_choice(128, 8, torch.float32),
    "choice of 3 in 6, float16": lambda: check_choice(6, 3, torch.float16),
    "ties": check_ties,
    "sorting": check_sorting,
    "residual, dense after attention": lambda: check_residual(torch.float32, 1, False, False, 1),
    "residual, dense after MLP": lambda: check_residual(torch.float32, 1, False, True, 1),
    "residual, experts after attention": lambda: check_residual(torch.float32, 1, False, False, 3),
    "residual, experts after MLP": lambda: check_residual(torch.float32, 2, True, True, 1),
    "residual, last layer": lambda: check_residual(torch.float16, 2, True, True, 0),
    "residual, two outputs": lambda: check_residual(torch.float16, 2, False, False, 2),
}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, failures: dict[str, str]) -> None:
    judge(failures[name])


@pytest.mark.parametrize(
    ("rows", "itemsize", "plan"),
    [
        (1, 2, ONE_ROW),
        (1, 4, ONE_ROW),
        (2, 2, ALL_ROWS),
        (16, 2, ALL_ROWS),
        (17, 2, FEW_ROWS),
        (64, 2, FEW_ROWS),
        (16, 4, FLOAT32),
        (65, 2, SOME_ROWS),
        (1024, 2, SOME_ROWS),
        (2048, 2, MANY_ROWS),
    ],
)
def test_the_plan_follows_the_rows(rows: int, itemsize: int, plan: ExpertsPlan) -> None:
    assert plan_experts(rows, num_chosen=8, num_experts=128, itemsize=itemsize) == plan
    assert plan_exact_experts(itemsize).block_m == 16 and plan_exact_experts(itemsize).splits == 0


if __name__ == "__main__":
    report(CHECKS)
