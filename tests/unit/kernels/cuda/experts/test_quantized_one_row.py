"""A mixture for one row in four products, emulated on a CPU, against the composed one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flashdraft.kernels import composed
from flashdraft.kernels.composed import compose_mixture
from flashdraft.kernels.cuda import backend, quantized_backend
from flashdraft.kernels.cuda.experts import quantized_one_row
from flashdraft.kernels.cuda.plan import DeviceLimits
from flashdraft.kernels.cuda.quantized import few_rows
from flashdraft.kernels.cuda.quantized.layout import pack_quantized
from flashdraft.kernels.interface import Mixture, Residual
from flashdraft.kernels.kinds import Activation
from flashdraft.kernels.quantized import stack_experts
from flashdraft.kernels.torch_backend import TorchKernels
from tests.unit.kernels.cuda.cross_compile import CARDS
from tests.unit.kernels.cuda.emulated_few_rows import multiply
from tests.unit.kernels.cuda.quantized.test_linear import FORMATS

HIDDEN, INNER, NUM_EXPERTS, NUM_CHOSEN = 512, 256, 5, 3
LIMITS: DeviceLimits = CARDS["sm_90"].limits._replace(num_processors=8)
TORCH = TorchKernels(torch.device("cpu"), torch.bfloat16)


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """How many there were; each is emulated."""
    made = []

    def launch(x, weight, product, plan, arrivals, activation=None, experts=None, normed=None):
        made.append(plan)
        return multiply(x, weight, plan, activation, experts, normed)

    for module in (few_rows, quantized_one_row):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(few_rows, "can_compile", lambda device: True)
    return made


def weight(out, depth):
    return FORMATS["q4_0"](out=out, depth=depth)


def mixture():
    """The same in few bits, and as floats."""
    torch.manual_seed(4)
    gate_up, down = weight(2 * INNER, HIDDEN), weight(HIDDEN, INNER)
    many = [weight(2 * INNER, HIDDEN) for _ in range(NUM_EXPERTS)]
    experts = stack_experts(many), stack_experts([weight(HIDDEN, INNER) for _ in many])
    norms = 1 + torch.rand(3, HIDDEN).bfloat16()
    parts = Mixture(
        norm=norms[0],
        gate_up=pack_quantized(gate_up),
        down=pack_quantized(down),
        router_norm=norms[1],
        router=(torch.randn(NUM_EXPERTS, HIDDEN) / 8).bfloat16(),
        num_chosen=NUM_CHOSEN,
        scale=torch.rand(NUM_EXPERTS) + 0.5,
        experts_norm=norms[2],
        expert_gate_up=pack_quantized(experts[0]),
        expert_down=pack_quantized(experts[1]),
        activation=Activation.GELU_TANH,
        eps=1e-6,
    )
    floats = replace(
        parts,
        gate_up=gate_up.dequantize().bfloat16(),
        down=down.dequantize().bfloat16(),
        expert_gate_up=TORCH.pack_experts(experts[0]),
        expert_down=TORCH.pack_experts(experts[1]),
    )
    return parts, floats


def residual(num_rows=1):
    x, delta = torch.randn(2, num_rows, HIDDEN).bfloat16()
    return Residual(x, [(delta, 1 + torch.rand(HIDDEN).bfloat16())])


def mix(residual, parts, limits=LIMITS):
    return quantized_one_row.mix_row(residual, parts, limits, torch.zeros(1))


def test_a_row_in_four_launches(launches):
    parts, floats = mixture()
    for seed in range(3):
        torch.manual_seed(seed)
        row = residual()
        found, expected = mix(row, parts), compose_mixture(TORCH, row, floats)
        assert len(launches) == 4 * (seed + 1)
        torch.testing.assert_close(found[0], expected[0], atol=0.02, rtol=0.01)
        for mine, theirs in zip(found[1:], expected[1:], strict=True):
            distance = (mine.float() - theirs.float()).norm() / theirs.float().norm()
            assert float(distance) < 0.02


def test_what_it_leaves_to_others(launches):
    """And nothing is launched before that is known."""
    parts, _ = mixture()
    six = pack_quantized(FORMATS["q6_k"](out=HIDDEN, depth=INNER))
    assert mix(residual(2), parts) is None
    assert mix(residual(), replace(parts, gate_up=torch.zeros(2 * INNER, HIDDEN))) is None
    assert mix(residual(), replace(parts, down=six)) is None
    assert mix(residual(), replace(parts, router=parts.gate_up)) is None
    assert mix(residual(), replace(parts, num_chosen=NUM_EXPERTS + 1)) is None
    many = torch.zeros(32, HIDDEN).bfloat16()
    scale = torch.ones(32)
    several = replace(parts, router=many, scale=scale, num_chosen=quantized_one_row.MAX_CHOSEN + 1)
    assert mix(residual(), several) is None
    many = torch.zeros(quantized_one_row.MAX_EXPERTS + 1, HIDDEN).bfloat16()
    assert mix(residual(), replace(parts, router=many, scale=torch.ones(len(many)))) is None
    for router in (parts.router.float(), many[:NUM_EXPERTS, ::2], many[:NUM_EXPERTS, :128]):
        assert mix(residual(), replace(parts, router=router)) is None
    wide = torch.ones(2 * HIDDEN).bfloat16()
    for norm in (wide[::2], wide[1 : 1 + HIDDEN], wide[:HIDDEN].float()):
        for name in ("norm", "router_norm", "experts_norm"):
            assert mix(residual(), replace(parts, **{name: norm})) is None
    assert mix(residual(), replace(parts, scale=parts.scale.bfloat16())) is None
    assert mix(residual(), parts, LIMITS._replace(shared_bytes=8 << 10)) is None
    assert not launches


@pytest.mark.parametrize("num_processors", [3, 4])
def test_a_card_with_fewer_processors_than_experts(launches, num_processors):
    parts, floats = mixture()
    row = residual()
    found = mix(row, parts, LIMITS._replace(num_processors=num_processors))
    assert len(launches) == 4 and launches[0].num_blocks < num_processors < NUM_EXPERTS
    expected = compose_mixture(TORCH, row, floats)[2].float()
    assert float((found[2].float() - expected).norm() / expected.norm()) < 0.02


def test_the_backend_takes_it_unless_it_must_be_exact(monkeypatch):
    monkeypatch.setattr(quantized_backend, "mix_row", lambda *inputs: "in four launches")
    monkeypatch.setattr(composed, "compose_mixture", lambda *inputs: "composed")
    parts, _ = mixture()
    for exact, expected in ((False, "in four launches"), (True, "composed")):
        kernels = backend.TritonKernels(torch.device("cpu"), torch.bfloat16, exact)
        assert kernels.mixture(residual(), parts) == expected
    monkeypatch.setattr(quantized_backend, "mix_row", lambda *inputs: None)
    kernels = backend.TritonKernels(torch.device("cpu"), torch.bfloat16)
    assert kernels.mixture(residual(), parts) == "composed"


def test_a_product_without_a_plan_is_known_before_the_first_launch(launches, monkeypatch):
    parts, _ = mixture()
    plan_few = quantized_one_row.plan_few

    def plan_others(num_rows, product, limits):
        is_last_of_the_mlp = not product.experts and not product.up_rows
        return None if is_last_of_the_mlp else plan_few(num_rows, product, limits)

    monkeypatch.setattr(quantized_one_row, "plan_few", plan_others)
    assert mix(residual(), parts) is None and not launches
