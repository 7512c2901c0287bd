"""Routing and gathering in one Triton launch each against torch, in Triton's interpreter.

What runs in the interpreter is this file as a script (tests/interpreted.py). Rows hold small
integers, routers small multiples of a power of two: every order of addition gives the same logits,
so that choices can be compared. Bfloat16 is left to the GPU tests: the interpreter cuts it off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.interpreted import judge, report

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """Sizes of a router, and its numbers."""

    rows: int
    num_experts: int = 128
    num_chosen: int = 8
    hidden: int = 96
    largest: int = 4  # integer in rows and router
    unit: float = 2.0**-6  # of the router: a softmax over thousands would be all zeros and one
    dtype: torch.dtype = torch.float32


CASES = {
    **{f"{rows} rows, 8 of 128": Case(rows) for rows in (1, 2, 3, 4)},
    **{f"2 rows, {chosen} of 16": Case(2, 16, chosen) for chosen in (1, 4, 8)},
    "3 of 6, which no program divides": Case(3, 6, 3, hidden=40),
    "5 of 13, an odd depth": Case(4, 13, 5, hidden=37),
    "all of 5": Case(2, 5, 5),
    "one expert": Case(2, 1, 1),
    "deeper than is read at a time": Case(2, 9, 2, hidden=5000),
    "rounded to float16": Case(4, 64, 8, 700, largest=30, unit=2.0**-12, dtype=torch.float16),
    "many equals": Case(4, 128, 8, hidden=4, largest=1),
}


def draw(largest: int, *shape: int) -> Tensor:
    return torch.randint(-largest, largest + 1, shape).float()


def check_route(case: Case) -> None:
    from flashdraft.kernels.cuda.experts.routing import choose_rows, route_rows

    x = draw(case.largest, case.rows, case.hidden).to(case.dtype)
    router = (draw(case.largest, case.num_experts, case.hidden) * case.unit).to(case.dtype)
    scale = torch.rand(case.num_experts) + 0.5
    logits = (x.double() @ router.double().T).to(case.dtype)
    expected, shares = choose_rows(logits, case.num_chosen, scale)
    arrivals = torch.zeros(1, dtype=torch.int32)
    for _ in range(2):  # a call leaves the counter as it found it
        chosen, weights = route_rows(x, router, case.num_chosen, scale, arrivals)
        assert not arrivals.any()
        assert chosen.dtype == torch.int64 and weights.dtype == torch.float32
        assert torch.equal(chosen, expected)
        torch.testing.assert_close(weights, shares, atol=1e-7, rtol=1e-6)


def check_ties() -> None:
    """Of equals the first; a row that is not a number stays in bounds and harms no other."""
    from flashdraft.kernels.cuda.experts.routing import route_rows

    x = torch.tensor([[1.0, 0.0], [0.0, 0.0], [torch.nan, 0.0]])
    router = torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.0, 0.0], [2.0, 0.0], [1.0, 0.0]])
    chosen, weights = route_rows(x, router, 3, torch.ones(5), torch.zeros(1, dtype=torch.int32))
    assert chosen[:2].tolist() == [[1, 3, 0], [0, 1, 2]]
    torch.testing.assert_close(weights[1], torch.full((3,), 1 / 3))
    assert chosen[2].tolist() == [0, 1, 2]  # each once: a pair is a row and an expert
    assert weights[2].isnan().all()


def check_strided_rows() -> None:
    from flashdraft.kernels.cuda.experts.routing import choose_rows, route_rows

    wide, router, scale = draw(3, 3, 80), draw(3, 8, 32) / 8, torch.ones(8)
    x = wide[:, 16:48]
    found = route_rows(x, router, 2, scale, torch.zeros(1, dtype=torch.int32))
    expected = choose_rows(x @ router.T, 2, scale)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])


def check_backend(exact: bool) -> None:
    """Any number of rows; few of them in one launch, unless sums must have one order."""
    from flashdraft.kernels.cuda import backend, expert_backend

    kernels = backend.TritonKernels(CPU, torch.float32, exact)
    router, scale = kernels.pack(draw(3, 16, 64) / 16, quantize=False), torch.rand(16) + 0.5
    launches: list[int] = []
    route_rows = expert_backend.route_rows

    def watch(x: Tensor, *others: object) -> object:
        launches.append(x.shape[0])
        return route_rows(x, *others)

    expert_backend.route_rows = watch
    try:
        for num_rows in (0, 1, 4, 5, 40):
            x = draw(3, num_rows, 64)
            found = kernels.route(x, router, 4, scale)
            expected = kernels.choose_experts(kernels.linear(x, router), 4, scale)
            assert torch.equal(found[0], expected[0])
            torch.testing.assert_close(found[1], expected[1], atol=1e-7, rtol=1e-6)
    finally:
        expert_backend.route_rows = route_rows
    assert launches == ([] if exact else [0, 1, 4])
    assert not kernels._arrivals.any()


@dataclass(frozen=True)
class Rows:
    """Rows to be gathered by the experts that they chose."""

    rows: int
    num_experts: int = 16
    num_chosen: int = 4
    tile: int = 16
    depth: int = 64
    reachable: int = 0  # experts; all of them


GATHERED = {
    "one row": Rows(1),
    "100 rows": Rows(100),
    "140 rows, two of a program": Rows(140, num_experts=5, num_chosen=3),
    "600 rows, eight of a program": Rows(600, num_chosen=2, depth=32, tile=64),
    "the same experts": Rows(40, reachable=4),
    "experts nobody chose": Rows(9, num_experts=33, num_chosen=1, tile=32),
    "deeper than a program copies": Rows(3, depth=1056),
}


def check_gathered(case: Rows) -> None:
    from flashdraft.kernels.cuda.experts.routing import gather_rows

    lottery = torch.rand(case.rows, case.reachable or case.num_experts)
    chosen = lottery.argsort(1)[:, : case.num_chosen]
    wide = torch.randn(case.rows, case.depth + 8)
    x = wide[:, : case.depth]
    for is_arranged in (False, True):
        found = gather_rows(x, chosen, case.num_experts, case.tile, is_arranged)
        order = chosen.flatten().sort(stable=True).indices
        assert torch.equal(found.order.long(), order)
        expected = x[order // case.num_chosen]
        if is_arranged:
            expected = expected.view(len(order), -1, 4, 4, 2).transpose(2, 3)
        assert torch.equal(found.x, expected.reshape(found.x.shape))
        tiles, first = [], 0
        for expert, count in enumerate(chosen.flatten().bincount().tolist()):
            begins = range(first, first + count, case.tile)
            tiles += [(expert, i, min(i + case.tile, first + count)) for i in begins]
            first += count
        assert found.num_tiles.item() == len(tiles) <= len(found.expert)
        table = torch.stack([found.expert, found.first, found.last], 1)[: len(tiles)]
        assert [tuple(row) for row in table.tolist()] == tiles


CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"gather: {name}": lambda case=case: check_gathered(case) for name, case in GATHERED.items()
    },
    **{name: lambda case=case: check_route(case) for name, case in CASES.items()},
    "ties": check_ties,
    "rows of a wider tensor": check_strided_rows,
    "backend": lambda: check_backend(exact=False),
    "backend, exact": lambda: check_backend(exact=True),
}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, failures: dict[str, str]) -> None:
    judge(failures[name])


if __name__ == "__main__":
    report(CHECKS)
