"""The CUDA C++ kernel for few rows against the dequantised weight, emulated on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flashdraft.kernels.cuda.quantized import few_rows
from flashdraft.kernels.cuda.quantized.few_rows import (
    Normed,
    Routed,
    beats_triton,
    multiply_few,
    multiply_normed,
)
from flashdraft.kernels.cuda.quantized.few_rows_plan import (
    Experts,
    FewPlan,
    Product,
    describe_product,
    find_sizes,
    plan_few,
)
from flashdraft.kernels.cuda.quantized.layout import Code, pack_quantized
from flashdraft.kernels.interface import Residual
from flashdraft.kernels.kinds import Activation
from flashdraft.kernels.quantized import stack_experts
from flashdraft.kernels.torch_backend import TorchKernels
from tests.unit.kernels.cuda.cross_compile import CARDS
from tests.unit.kernels.cuda.emulated import REFERENCE, check_product
from tests.unit.kernels.cuda.emulated_few_rows import multiply
from tests.unit.kernels.cuda.quantized.test_linear import FEW_ROWS_FORMATS, FORMATS

WIDE = ("int8 row", "fp8 row", "fp8 block")  # their planes
H200 = CARDS["sm_90"].limits


def check(name, num_rows, plan, activation=None, **sizes):
    torch.manual_seed(0)
    weight = FORMATS[name](**sizes)
    x = torch.randn(num_rows, weight.shape[1]).bfloat16()
    found = multiply(x, pack_quantized(weight), plan, activation)
    check_product(found, x, weight, activation)


@pytest.mark.parametrize("name", FEW_ROWS_FORMATS)
@pytest.mark.parametrize("num_rows", [1, 5, 8, 11, 16])
def test_every_format(name, num_rows):
    """Rows that fill no tile, columns that fill no tile, and a warp for several tiles."""
    stored = 1 if num_rows == 1 else 8 if num_rows <= 8 else 16
    tiles = 1 if name in WIDE else 2
    plan = FewPlan(stored, tiles, warps=2, depth=3, num_slices=1, num_blocks=1)
    check(name, num_rows, plan, out=200, depth=512)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("name", FEW_ROWS_FORMATS)
@pytest.mark.parametrize("num_rows", [1, 13])
def test_gates(name, num_rows, activation):
    tiles = 1 if name in WIDE else 2
    stored = 1 if num_rows == 1 else 16
    plan = FewPlan(stored, tiles, warps=2, depth=3, num_slices=2, num_blocks=4)
    check(name, num_rows, plan, activation, out=320, depth=512)


@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize(
    ("tiles", "warps", "depth", "slices", "blocks", "job_pieces"),
    [
        (2, 4, 2, 1, 1, 4),  # a tile for a warp, or more
        (2, 4, 3, 1, 2, 1),  # tiles that two warps share, and two blocks
        (2, 4, 3, 1, 5, 2),  # less than a tile for a warp
        (1, 2, 4, 2, 6, 1),  # parts of slices, and of blocks
        (1, 1, 3, 8, 8, 2),  # one step for a slice
        (2, 1, 3, 1, 32, 4),  # one unit for a warp
        (2, 1, 3, 1, 19, 1),  # two units for some warps, and one for others
        (1, 1, 2, 2, 2, 2),  # whole tiles of slices
    ],
)
def test_every_way_to_share_the_work(num_rows, tiles, warps, depth, slices, blocks, job_pieces):
    stored, pieces = (1, 1) if num_rows == 1 else (16, job_pieces)
    plan = FewPlan(stored, tiles, warps, depth, slices, blocks, pieces)
    check("q4_0", num_rows, plan, out=128, depth=1024)


@pytest.mark.parametrize("num_rows", [1, 16])
def test_more_jobs_for_a_warp_than_it_has_threads(num_rows):
    plan = FewPlan(1 if num_rows == 1 else 16, 2, 1, 3, 2, 2)
    check("q4_0", num_rows, plan, out=1280, depth=256)


def test_large_and_small_numbers_are_exact():
    """Codes are tiny numbers on their way: none may be lost, whatever the range of x."""
    weight = FORMATS["q4_0"](out=128, depth=256)
    plan = FewPlan(8, 2, warps=2, depth=3, num_slices=1, num_blocks=1)
    x = torch.randn(6, 256).bfloat16()
    x *= torch.tensor([1e-12, 1e-6, 1, 1e4, 1e8, 1e12])[:, None].bfloat16()
    found = multiply(x, pack_quantized(weight), plan)
    expected = x.float() @ weight.dequantize().T
    distance = (found.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(distance.max()) < 0.003


def test_a_row_does_not_depend_on_others():
    weight = pack_quantized(FORMATS["q4_0"](out=128, depth=512))
    plan = FewPlan(16, 2, warps=2, depth=3, num_slices=2, num_blocks=4)
    x = torch.randn(16, 512).bfloat16()
    whole = multiply(x, weight, plan)
    x[1:] = float("nan")
    assert torch.equal(multiply(x, weight, plan)[:1], whole[:1])
    assert torch.equal(multiply(x[:1], weight, plan), whole[:1])


def mixture(inner, num_experts=5, hidden=256):
    """Weights of experts, which chose some of them, and what these compute."""
    torch.manual_seed(3)
    gate_up = stack_experts(
        [FORMATS["q4_0"](out=2 * inner, depth=hidden) for _ in range(num_experts)]
    )
    down = stack_experts([FORMATS["q4_0"](out=hidden, depth=inner) for _ in range(num_experts)])
    return gate_up, down, torch.tensor([[4, 0, 3]]), torch.tensor([[0.5, 0.2, 0.3]])


@pytest.mark.parametrize("inner", [128, 256, 704])
def test_a_mixture_for_one_row(inner):
    """Also with rows that are filled up: 704 values take six steps."""
    gate_up, down, chosen, shares = mixture(inner)
    x = torch.randn(1, 256).bfloat16()
    plan = FewPlan(1, 2, warps=2, depth=3, num_slices=1, num_blocks=2)
    packed = pack_quantized(gate_up), pack_quantized(down)
    between = multiply(x, packed[0], plan, Activation.GELU_TANH, Experts(chosen))
    between = between.view(3, inner)
    found = multiply(between, packed[1], plan, experts=Experts(chosen, shares))
    parts = []
    for place, expert in enumerate(chosen[0].tolist()):
        wide = (x.float() @ gate_up.expert(expert).dequantize().T).bfloat16().float()
        inside = REFERENCE.gated(wide, Activation.GELU_TANH)
        torch.testing.assert_close(between[place].float(), inside[0], atol=0.02, rtol=0.02)
        parts.append(between[place : place + 1].float() @ down.expert(expert).dequantize().T)
    expected = (torch.cat(parts) * shares.T).sum(0, keepdim=True)
    spread = float(expected.std())
    torch.testing.assert_close(found.float(), expected, atol=0.01 * spread, rtol=0.01)


@pytest.mark.parametrize(
    ("deltas", "post", "scaled"),
    [(0, False, False), (1, False, False), (1, False, True), (2, True, True), (2, False, False)],
)
@pytest.mark.parametrize("depth", [512, 704])  # 704: the last step is filled up
@pytest.mark.parametrize(("slices", "blocks"), [(1, 2), (2, 4)])
def test_a_row_that_it_sums_up_and_norms(slices, blocks, depth, deltas, post, scaled):
    torch.manual_seed(deltas)
    weight = FORMATS["q4_0"](out=200, depth=depth)
    x, *others = torch.randn(1 + deltas, 1, depth).bfloat16() * 3
    norm, *norms = 1 + torch.rand(4, depth).bfloat16()
    residual = Residual(
        x,
        list(zip(others, norms, strict=False)),
        norms[-1] if post else None,
        torch.tensor([0.7]).bfloat16() if scaled else None,
    )
    kernels = TorchKernels(torch.device("cpu"), torch.bfloat16)
    stream, (row,) = kernels.residual_norms(residual, [norm], 1e-6)
    packed, plan = pack_quantized(weight), FewPlan(1, 2, 2, 3, slices, blocks)
    ours = torch.full_like(x, torch.nan) if deltas else x
    found = multiply(x, packed, plan, normed=Normed(residual, norm, 1e-6, ours))
    torch.testing.assert_close(ours.float(), stream.float(), atol=0.01, rtol=0.01)
    expected = row.float() @ weight.dequantize().T
    spread = float(expected.std())
    torch.testing.assert_close(found.float(), expected, atol=0.01 * spread, rtol=0.01)


def choose(logits, scale, count):
    """What the kernels choose, in words of torch."""
    chances = logits.softmax(0)
    order = sorted(range(len(logits)), key=lambda i: -float(logits[i]))[:count]
    if chances.isnan().any():
        order = list(range(count))
    chosen = torch.tensor([order])
    return chosen, (chances[order] / chances[order].sum() * scale[order])[None]


def route(residual, weight, norm, router_norm, router, scale, count, slices=1, blocks=8):
    """Which it chooses beside a product, and the product."""
    chosen = torch.full((1, count), -1)
    shares, stream = torch.zeros(1, count), torch.empty_like(residual.x)
    routed = Routed(router, router_norm, scale, chosen, shares)
    plan = FewPlan(1, 2, warps=2, depth=3, num_slices=slices, num_blocks=blocks)
    normed = Normed(residual, norm, 1e-6, stream, routed)
    found = multiply(residual.x, pack_quantized(weight), plan, normed=normed)
    return found, chosen, shares


@pytest.mark.parametrize(
    ("num_experts", "slices", "blocks"), [(3, 1, 8), (8, 1, 8), (9, 2, 8), (21, 3, 3), (20, 1, 1)]
)
def test_a_row_that_it_routes(num_experts, slices, blocks):
    """Blocks make one logit each, several or none, and one more chooses."""
    torch.manual_seed(num_experts)
    weight = FORMATS["q4_0"](out=200, depth=704)
    x, delta = torch.randn(2, 1, 704).bfloat16() * 3
    norm, router_norm, post = 1 + torch.rand(3, 704).bfloat16()
    router, scale = (torch.randn(num_experts, 704) / 16).bfloat16(), torch.rand(num_experts) + 0.5
    residual = Residual(x, [(delta, post)])
    inputs = residual, weight, norm, router_norm, router, scale
    found, chosen, shares = route(*inputs, 3, slices, blocks)
    kernels = TorchKernels(torch.device("cpu"), torch.bfloat16)
    _, (row, to_route) = kernels.residual_norms(residual, [norm, router_norm], 1e-6)
    expected = row.float() @ weight.dequantize().T
    spread = float(expected.std())
    torch.testing.assert_close(found.float(), expected, atol=0.01 * spread, rtol=0.01)
    expected = choose((to_route.float() @ router.float().T)[0], scale, 3)
    assert torch.equal(chosen, expected[0])
    torch.testing.assert_close(shares, expected[1], atol=0.02, rtol=0.02)


LOGITS = {
    "different": torch.tensor([0.5, -2.0, 3.0, 0.25, 2.0]),
    "equals": torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0]),
    "far apart": torch.tensor([-300.0, 0.0, 300.0, -1e30, float("-inf")]),
    "no numbers": torch.tensor([0.0, 1.0, torch.nan, 2.0, 3.0]),
    "too large": torch.tensor([0.0, 1.0, torch.inf, 2.0, 3.0]),
    "nothing": torch.full((5,), -torch.inf),
}


@pytest.mark.parametrize("name", LOGITS)
def test_logits_that_it_chooses_by(name):
    """Of a row of ones, so that they are the first values of the router's rows."""
    router, ones = torch.zeros(5, 256, dtype=torch.bfloat16), torch.ones(256).bfloat16()
    router[:, 0] = LOGITS[name].bfloat16()
    weight, scale = FORMATS["q4_0"](out=400, depth=256), torch.rand(5) + 0.5
    _, *found = route(Residual(ones[None]), weight, ones, ones, router, scale, 3)
    chosen, shares = choose(LOGITS[name].bfloat16().float(), scale, 3)
    assert torch.equal(found[0], chosen)
    torch.testing.assert_close(found[1], shares, atol=1e-5, rtol=1e-4, equal_nan=True)
    assert bool(shares.isnan().all()) is (name in ("no numbers", "too large", "nothing"))


def test_logits_are_rounded_before_they_are_compared():
    """As a linear would: the second is larger by less than that, and the first of equals wins."""
    router, ones = torch.zeros(2, 256, dtype=torch.bfloat16), torch.ones(256).bfloat16()
    router[:, 0], router[1, 1] = 1.0, 2**-10
    weight, scale = FORMATS["q4_0"](out=400, depth=256), torch.ones(2)
    _, chosen, shares = route(Residual(ones[None]), weight, ones, ones, router, scale, 2)
    assert chosen.tolist() == [[0, 1]] and shares.tolist() == [[0.5, 0.5]]


def test_experts_of_a_normed_row():
    gate_up, *_ = mixture(128)
    torch.manual_seed(1)
    x, norm = torch.randn(1, 256).bfloat16(), 1 + torch.rand(256).bfloat16()
    row = REFERENCE.rms_norm(x.float(), norm.float(), 1e-6).bfloat16()
    plan = FewPlan(1, 2, warps=2, depth=3, num_slices=1, num_blocks=2)
    experts, packed = Experts(torch.tensor([[3, 0, 4]])), pack_quantized(gate_up)
    normed = Normed(Residual(x), norm, 1e-6, x)
    found = multiply(x, packed, plan, Activation.GELU_TANH, experts, normed)
    assert torch.equal(found, multiply(row, packed, plan, Activation.GELU_TANH, experts))


def test_rows_and_weights_that_it_leaves_to_triton():
    small = pack_quantized(FORMATS["q4_0"](out=128, depth=256))
    large = replace(small, shape=(5376, 8192))
    fp8 = replace(pack_quantized(FORMATS["fp8 row"](out=128, depth=256)), shape=(5376, 8192))
    six = pack_quantized(FORMATS["q6_k"](out=128, depth=256))
    taken = [[n for n in range(20) if beats_triton(n, w)] for w in (small, large, fp8, six)]
    assert taken == [[1], list(range(1, 17)), [1], []]


def test_formats_that_it_leaves_to_triton():
    for name in FORMATS:
        product = describe_product(pack_quantized(FORMATS[name](depth=512)))
        assert (product is not None) is (name in FEW_ROWS_FORMATS)
    small = pack_quantized(FORMATS["q4_0"](out=168))
    assert describe_product(small) is not None and describe_product(small, gated=True) is None
    assert describe_product(pack_quantized(FORMATS["q4_0"](depth=192))) is None  # narrow planes


KINDS = {Code.INT4: (Code.INT4, 32, 4, 1), Code.INT8: (Code.INT8, 32, 2, 1)}
KINDS[Code.FP8] = (Code.FP8, 64, 0, 3)


def products(code):
    """The linears of 31B and 26B, and of their drafters."""
    shapes = [(16384, 5376), (5376, 8192), (5376, 16384), (43008, 5376), (5376, 21504)]
    shapes += [(5376, 32256), (8192, 2816), (2816, 4096), (2816, 5632), (2816, 16896)]
    kind = KINDS[code]
    unit = Product(*kind, 32, 0, 1).step
    yield from (Product(*kind, columns, 0, depth // unit) for columns, depth in shapes)
    yield Product(*kind, 21504, 21504, 5376 // unit)
    yield Product(*kind, 2112, 2112, 2816 // unit)
    if code is Code.INT4:
        yield Product(*kind, 8 * 704, 704, 22, 1, 704, 22)
        yield Product(*kind, 2816, 0, 8 * 6, 2, 2816, 6)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("num_rows", [1, 8, 16])
@pytest.mark.parametrize("code", KINDS)
def test_plans_fit_the_card_and_keep_it_busy(card, num_rows, code):
    limits = CARDS[card].limits
    for product in products(code):
        if product.experts and num_rows > 1:
            continue
        plan = plan_few(num_rows, product, limits)
        assert plan is not None and product.num_steps % plan.num_slices == 0
        sizes = find_sizes(plan, product)
        assert sizes.shared_bytes <= limits.shared_bytes
        assert 0.9 * limits.num_processors < plan.num_blocks <= limits.num_processors
        num_warps = plan.num_blocks // plan.num_slices * plan.warps
        assert sizes.num_tiles * sizes.slice_steps >= num_warps


def test_what_is_slower_or_takes_much_memory_is_not_launched(monkeypatch):
    monkeypatch.setattr(few_rows, "is_readable", lambda x: True)
    monkeypatch.setattr(few_rows, "launch", lambda x, *rest: x)
    small = pack_quantized(FORMATS["q4_0"](out=1024, depth=2048))
    large, head = (replace(small, shape=(rows, 2048)) for rows in (16384, 1 << 20))

    def is_launched(num_rows, weight):
        x = torch.zeros(num_rows, 2048).bfloat16()
        return multiply_few(x, weight, H200, torch.zeros(1)) is not None

    found = [[is_launched(n, weight) for n in (1, 16, 17)] for weight in (small, large, head)]
    assert found == [[True, False, False], [True, True, False], [True, True, False]]


def test_which_rows_are_normed_where_they_are_multiplied(monkeypatch):
    monkeypatch.setattr(few_rows, "can_compile", lambda device: True)
    monkeypatch.setattr(few_rows, "launch", lambda x, *rest, **more: x)
    small = pack_quantized(FORMATS["q4_0"](out=1024, depth=2048))
    large = replace(small, shape=(16384, 2048))
    x, norm = torch.zeros(1, 2048).bfloat16(), torch.ones(2048).bfloat16()
    one, two = [(x, norm)], [(x, norm), (x, norm)]

    def is_taken(residual, weight=small, norm=norm):
        return multiply_normed(residual, norm, 1e-6, weight, H200, torch.zeros(1)) is not None

    scalar = torch.ones(1).bfloat16()
    taken = [Residual(x), Residual(x, one), Residual(x, two, norm, scalar), Residual(x, two)]
    assert all(is_taken(residual, weight) for residual in taken for weight in (small, large))
    assert not is_taken(Residual(x, one, norm))  # which it does not know
    assert not is_taken(Residual(x, [*two, *one]))
    assert not is_taken(Residual(x.expand(2, -1), one))
    assert not is_taken(Residual(x, one, None, scalar.float()))
    assert not is_taken(Residual(x, one), norm=norm.float())
    assert not is_taken(Residual(x, [(torch.zeros(1, 4096).bfloat16()[:, ::2], norm)]))


def test_units_of_one_row_are_small_where_there_are_few():
    """Measured on an H200: linears of 26B and the output of 31B's attention."""
    kind = KINDS[Code.INT4]
    sizes = [(16384, 5376), (5376, 8192), (8192, 2816), (2816, 4096)]
    plans = [plan_few(1, Product(*kind, n, 0, depth // 128), H200) for n, depth in sizes]
    assert [plan.tiles for plan in plans] == [2, 1, 1, 1]


def test_a_weight_too_small_to_go_round_has_no_plan():
    small = describe_product(pack_quantized(FORMATS["q4_0"](out=64, depth=256)))
    assert plan_few(1, small, H200) is None
