"""Quantised experts in Triton against their dequantised weights, in Triton's interpreter.

What runs in the interpreter is this file as a script (tests/interpreted.py). Rows are float32
there: it multiplies bfloat16 tiles as their bit patterns. The instructions that a GPU unpacks codes
with are left to the GPU tests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from flashdraft.kernels.cuda.quantized.layout import pack_quantized
from flashdraft.kernels.kinds import Activation
from flashdraft.kernels.quantized import stack_experts
from flashdraft.kernels.torch_backend import TorchKernels
from tests.interpreted import judge, report
from tests.unit.kernels.cuda.quantized.test_linear import FORMATS

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A mixture, and how its rows choose."""

    rows: int
    format: str = "q4_0"
    down_format: str = ""  # the same
    routing: str = "uniform"
    num_experts: int = 4
    num_chosen: int = 2
    hidden: int = 128
    inner: int = 64
    num_processors: int = 1
    activation: Activation = Activation.GELU_TANH


CASES = {
    **{
        f"{name}, {rows} rows": Case(rows, name)
        for name in ("q4_0", "q8_0", "fp8 row")
        for rows in (1, 5)
    },
    **{f"{name}, 3 rows": Case(3, name) for name in ("float32 scales", "q4_1", "int8 row")},
    **{
        f"{name} up": Case(2, name, "q4_0", hidden=256, inner=32)
        for name in ("q4_k", "q6_k", "asymmetric 128")
    },
    **{
        f"{name} down": Case(2, "fp8 row", name, hidden=64, inner=256, num_chosen=1)
        for name in ("q4_k", "q6_k", "fp8 block")
    },
    "16 rows": Case(16),
    "40 rows": Case(40, inner=32),
    "40 rows, one expert": Case(40, routing="degenerate", num_chosen=1),
    "40 rows, the same experts": Case(40, "q8_0", routing="degenerate", inner=32),
    "64 rows, 8 of 12": Case(64, "fp8 row", num_experts=12, num_chosen=8, hidden=64, inner=32),
    "16 rows, one expert": Case(16, "fp8 row", routing="degenerate", num_chosen=1),
    "16 rows, three choices": Case(16, "q8_0", num_chosen=3, activation=Activation.SILU),
    "7 rows, experts nobody chose": Case(7, routing="some", num_experts=9),
    "one row, one choice": Case(1, num_chosen=1, activation=Activation.SILU),
    "one row, eight choices": Case(1, num_chosen=8, num_experts=20, hidden=64, inner=32),
    "inner 48": Case(3, "q8_0", "w4a16 16", inner=48),
    "inner 48, fp8": Case(11, "fp8 row", inner=48),
    "inner 96": Case(1, inner=96),
    "inner 176": Case(2, "fp8 row", "w4a16 16", num_chosen=1, inner=176),
    "inner 704": Case(1, num_chosen=1, hidden=64, inner=704, num_experts=3),
    "hidden 160, which no step divides": Case(3, hidden=160),
    "hidden 160, fp8": Case(20, "fp8 row", hidden=160, inner=32),
    "a depth cut in two": Case(1, hidden=1024, inner=32),
    "a depth cut in two, 2 rows": Case(2, "fp8 row", num_experts=2, hidden=1024, inner=48),
    "more programs than work": Case(2, num_processors=132, inner=32),
}


def make_stack(name, num_experts, out, depth):
    return stack_experts([FORMATS[name](out=out, depth=depth) for _ in range(num_experts)])


def make_choice(case):
    """[rows, num_chosen]: different experts in every row."""
    reachable = {
        "uniform": case.num_experts,
        "some": max(case.num_chosen, case.num_experts // 2),
        "degenerate": case.num_chosen,
    }[case.routing]
    lottery = torch.rand(case.rows, reachable)
    return lottery.argsort(1)[:, : case.num_chosen] + case.num_experts - reachable


def make_mixture(case):
    gate_up = make_stack(case.format, case.num_experts, 2 * case.inner, case.hidden)
    down = make_stack(case.down_format or case.format, case.num_experts, case.hidden, case.inner)
    x = torch.randn(case.rows, case.hidden) * case.hidden**-0.5
    return x, gate_up, down, make_choice(case), torch.rand(case.rows, case.num_chosen)


def check_mixture(case):
    from flashdraft.kernels.cuda.experts.quantized import mix_quantized

    x, gate_up, down, chosen, weights = make_mixture(case)
    packed = pack_quantized(gate_up), pack_quantized(down)
    arrivals = torch.zeros(4096, dtype=torch.int32)
    found = mix_quantized(
        x, *packed, chosen, weights, case.activation, case.num_processors, arrivals
    )
    assert not arrivals.any()  # a call leaves the counters as it found them
    # Only now: memory that it gives back would hold what the kernels must write themselves.
    expected = TorchKernels(CPU, torch.float32).experts(
        x, list(gate_up.dequantize()), list(down.dequantize()), chosen, weights, case.activation
    )
    largest = float(expected.abs().max())  # formats differ in size by far
    assert 0.0 < largest < float("inf")
    torch.testing.assert_close(found, expected, atol=2e-5 * largest, rtol=0.0)


def check_rows_alone(exact):
    """Of an equal plan a row's bits are its own; with `exact` plans cut the depth alike."""
    from flashdraft.kernels.cuda.experts.quantized import mix_quantized

    case = Case(8 if exact else 3, "fp8 row", hidden=1024, inner=32, num_experts=3)
    x, gate_up, down, chosen, weights = make_mixture(case)
    packed = pack_quantized(gate_up), pack_quantized(down)
    arrivals = torch.zeros(4096, dtype=torch.int32)

    def run(rows):
        return mix_quantized(
            x[rows], *packed, chosen[rows], weights[rows], case.activation, 1, arrivals, exact
        )

    together = run(torch.arange(case.rows))
    if exact:
        pieces = [run(torch.arange(1)), run(torch.arange(1, 4)), run(torch.arange(4, 8))]
        assert torch.equal(torch.cat(pieces), together)
    else:
        turned = torch.arange(case.rows).roll(1)
        assert torch.equal(run(turned), together[turned])
        x[1:], weights[1:] = torch.randn_like(x[1:]), torch.rand_like(weights[1:])
        chosen[1:] = make_choice(case)[1:]
        assert torch.equal(run(torch.arange(case.rows))[0], together[0])


def check_harmless_neighbours():
    """A row that is not finite does no harm to those that chose the same experts."""
    from flashdraft.kernels.cuda.experts.quantized import mix_quantized

    x, gate_up, down, chosen, weights = make_mixture(Case(5, routing="degenerate"))
    packed = pack_quantized(gate_up), pack_quantized(down)
    arrivals = torch.zeros(4096, dtype=torch.int32)
    x[2] = torch.inf
    found = mix_quantized(x, *packed, chosen, weights, Activation.SILU, 2, arrivals)
    assert found[[0, 1, 3, 4]].isfinite().all()


def check_repeated_choices():
    """A row that names an expert more than once does no harm to the others."""
    from flashdraft.kernels.cuda.experts.quantized import mix_quantized

    x, gate_up, down, chosen, weights = make_mixture(Case(6))
    packed = pack_quantized(gate_up), pack_quantized(down)
    arrivals = torch.zeros(4096, dtype=torch.int32)
    rest = (weights, Activation.SILU, 2, arrivals)
    expected = mix_quantized(x, *packed, chosen, *rest)
    for broken in (0, 5):
        others = [row for row in range(6) if row != broken]
        repeated = chosen.clone()
        repeated[broken] = chosen[broken, 0]
        found = mix_quantized(x, *packed, repeated, *rest)
        torch.testing.assert_close(found[others], expected[others])


def check_nothing():
    from flashdraft.kernels.cuda.experts.quantized import mix_quantized

    x, gate_up, down, chosen, weights = make_mixture(Case(0))
    packed = pack_quantized(gate_up), pack_quantized(down)
    found = mix_quantized(x, *packed, chosen, weights, Activation.SILU, 2, torch.zeros(0))
    assert found.shape == (0, 128)


def check_weights(name):
    """A stack in one launch has the bits of its experts one by one."""
    from flashdraft.kernels.cuda.quantized.linear import dequantize

    stack = make_stack(name, 3, 70, 512)
    packed, alone = pack_quantized(stack), [pack_quantized(stack.expert(i)) for i in range(3)]
    found = dequantize(packed, torch.float32)
    assert torch.equal(found, torch.stack([dequantize(one, torch.float32) for one in alone]))
    torch.testing.assert_close(found, stack.dequantize(), rtol=1e-6, atol=1e-6)
    rows = torch.tensor([69, 0, 33])
    assert torch.equal(dequantize(packed, torch.float32, rows), found[:, rows])
    assert torch.equal(dequantize(packed, torch.float32, first=31, count=35), found[:, 31:66])


CHECKS = {
    **{name: lambda case=case: check_mixture(case) for name, case in CASES.items()},
    "neighbours, one plan": lambda: check_rows_alone(exact=False),
    "neighbours, exact": lambda: check_rows_alone(exact=True),
    "neighbours that are not finite": check_harmless_neighbours,
    "repeated choices": check_repeated_choices,
    "nothing to do": check_nothing,
    **{f"{n} itself": lambda n=n: check_weights(n) for n in FORMATS},
}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name, failures):
    judge(failures[name])


def test_the_plan_cuts_the_depth_where_there_are_few_rows():
    pytest.importorskip("triton")
    from flashdraft.kernels.cuda.experts.quantized import plan_quantized_experts

    weights = [
        replace(pack_quantized(make_stack("q4_0", 1, out, depth)), shape=(128, out, depth))
        for out, depth in ((2 * 704, 2816), (2816, 704))
    ]
    plans = {rows: plan_quantized_experts(rows, 8, *weights, 132) for rows in (1, 8, 16, 33, 64)}
    assert plans[1].up_splits > 1 and plans[8].up_splits == 1
    assert [plan.block_m for plan in plans.values()] == [8, 8, 16, 32, 32]
    exact = [plan_quantized_experts(rows, 8, *weights, 132, exact=True) for rows in plans]
    assert {plan.up_splits for plan in exact} == {plans[1].up_splits}


if __name__ == "__main__":
    report(CHECKS)
