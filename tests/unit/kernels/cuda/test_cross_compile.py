"""Every Triton kernel compiles for every generation of cards, and fits it, on a machine without.

One line of CASES is one call of the backend, with the plan that it chooses on that card. A kernel
that no line launches is a failure: whoever writes one adds a line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdraft.kernels.cuda.plan import (
    LinearPlan,
    plan_attention,
    plan_exact_linear,
    plan_linear,
)
from flashdraft.kernels.interface import (
    BIDIRECTIONAL,
    CAUSAL,
    BlockMask,
    Heads,
    KeyRebuild,
    PagedKeys,
    PageView,
    QKVSpec,
    Residual,
    RopeTable,
    Trees,
)
from flashdraft.kernels.kinds import Activation, Scheme
from tests.unit.kernels.cuda.cross_compile import (
    CARDS,
    Case,
    Found,
    compile_cases,
    launched_kernels,
    report,
)

pytestmark = pytest.mark.timeout(900)  # the first test of a card waits for all of its kernels

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
LEAST_FP8_CAPABILITY = 89  # the engine refuses such a cache on older cards
STREAMING = {  # these read memory in a loop, and must copy while they compute
    "attention.paged._attend",
    "dense.linear._multiply",
    "experts.few_rows._up_few",
    "experts.few_rows._down_few",
    "experts.grouped._up",
    "experts.grouped._down",
    "quantized.linear._multiply",
}
MAX_SPILLED = 128  # a few registers cost nothing; a tile of the wrong size takes hundreds of bytes
# heads, key heads, window
HEADS = {64: (9, 3, None), 128: (64, 8, 2048), 256: (32, 16, 1024), 512: (32, 4, None)}
# columns, depth
LINEARS = {
    "26B qkv": (8192, 2816),
    "26B full qkv": (9216, 2816),
    "26B output": (2816, 4096),
    "26B full output": (2816, 8192),
    "26B gate": (4224, 2816),
    "26B down": (2816, 2112),
    "26B router": (128, 2816),
    "31B qkv": (16384, 5376),
    "31B full qkv": (18432, 5376),
    "31B output": (5376, 8192),
    "31B full output": (5376, 16384),
    "31B gate": (43008, 5376),
    "31B down": (5376, 21504),
    "drafter taps": (5376, 32256),
    "26B head": (262144, 2816),
    "31B head": (262144, 5376),
}
SMALL_LINEARS = {"SmolLM2 qkv": (960, 576), "SmolLM2 down": (576, 1536)}


def make(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def kernels(dtype: torch.dtype = BF16, exact: bool = False) -> Any:
    from flashdraft.kernels.cuda.backend import TritonKernels

    return TritonKernels(torch.device("meta"), dtype, exact)


def make_attention(
    head_dim: int,
    num_rows: int,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, PageView, int | None]:
    """Queries of one sequence, a cache, where its 4096 keys lie in it, and the window."""
    num_heads, num_kv_heads, window = HEADS[head_dim]
    view = PageView(
        query_start=make(2, dtype=torch.int32),
        context_lens=make(1, dtype=torch.int32),
        block_table=make(1, 256, dtype=torch.int32),
        slots=make(num_rows, dtype=torch.int64),
        page_size=16,
        max_query_len=num_rows,
        max_key_len=4096,
    )
    query = make(num_rows, num_heads, head_dim, dtype=dtype)
    return query, make(64, 16, num_kv_heads, head_dim, dtype=cache_dtype or dtype), view, window


def attend(
    head_dim: int,
    num_rows: int,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    mask: BlockMask = CAUSAL,
    exact: bool = False,
) -> None:
    query, cache, view, window = make_attention(head_dim, num_rows, dtype, cache_dtype)
    kernels(dtype, exact).attention(
        query, PagedKeys(cache, cache, view, scale=1.0, window=window, mask=mask)
    )


def attend_values(
    num_rows: int,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    mask: BlockMask = CAUSAL,
    exact: bool = False,
) -> None:
    """Gemma 4's full layers with keys made of values; 64 pairs of 256 rotate."""
    query, values, view, window = make_attention(512, num_rows, dtype, cache_dtype)
    rope = RopeTable(*(make(4096, 256, dtype=FP32) for _ in range(2)))
    rule: dict[str, Any] = {"scale": 1.0, "window": window, "mask": mask}
    rebuild = KeyRebuild(make(512, dtype=dtype), rope, 64)
    kernels(dtype, exact).attention(query, PagedKeys(None, values, view, rebuild=rebuild, **rule))


def multiply(
    num_rows: int, shape: tuple[int, int], dtype: torch.dtype = BF16, exact: bool = False
) -> None:
    kernels(dtype, exact).linear(make(num_rows, shape[1], dtype=dtype), make(*shape, dtype=dtype))


def mix(num_rows: int, dtype: torch.dtype = BF16, exact: bool = False) -> None:
    """Gemma 4 26B's experts."""
    gate_up, down = make(128, 2 * 704, 2816, dtype=dtype), make(128, 2816, 704, dtype=dtype)
    chosen, weights = make(num_rows, 8, dtype=torch.int64), make(num_rows, 8, dtype=FP32)
    x = make(num_rows, 2816, dtype=dtype)
    kernels(dtype, exact).experts(x, gate_up, down, chosen, weights, Activation.GELU_TANH)


def mix_qwen3(num_rows: int) -> None:
    """Qwen3 Coder 30B's experts."""
    gate_up, down = make(128, 2 * 768, 2048), make(128, 2048, 768)
    chosen, weights = make(num_rows, 8, dtype=torch.int64), make(num_rows, 8, dtype=FP32)
    x = make(num_rows, 2048)
    kernels().experts(x, gate_up, down, chosen, weights, Activation.SILU)


def make_quantized(scheme: str, *shape: int) -> Any:
    """A weight in few bits, packed, of no more than a shape."""
    from flashdraft.kernels.cuda.quantized.layout import pack_quantized
    from flashdraft.kernels.kinds import Scheme
    from flashdraft.kernels.quantized import Quantized, code_dtype

    found, (*rows, depth) = Scheme(scheme.removesuffix("_k")), shape
    numbers = {"int4": 32, "int4_k": 32, "int6": 16, "int8": 32, "fp8": depth}
    group, kind = numbers[scheme], {"int6": torch.int8, "int4_k": torch.uint8}.get(scheme)
    scale = make(*rows, depth // group, dtype=kind or FP16)
    over = None if kind is None else make(*rows, depth // 256, dtype=FP16)
    lows = (scale, over) if scheme == "int4_k" else (None, None)
    codes = make(*shape, dtype=code_dtype(found))
    return pack_quantized(Quantized(found, codes, scale, group, 0, lows[0], over, lows[1]))


def multiply_few_bits(scheme: str, num_rows: int, shape: tuple[int, int]) -> None:
    kernels().linear(make(num_rows, shape[1]), make_quantized(scheme, *shape))


def multiply_rounded(
    scheme: str, num_rows: int, shape: tuple[int, int], activation: Activation | None = None
) -> None:
    from flashdraft.kernels.cuda.quantized.layout import round_activations

    x, weight = make(num_rows, shape[1]), make_quantized(scheme, *shape)
    rounded = round_activations(weight, Scheme(scheme))
    assert rounded.activations is not None
    if activation is None:
        kernels().linear(x, rounded)
    else:
        kernels().gated_linear(x, rounded, activation)


def gate_few_bits(scheme: str, num_rows: int, inner: int, depth: int) -> None:
    weight = make_quantized(scheme, 2 * inner, depth)
    kernels().gated_linear(make(num_rows, depth), weight, Activation.GELU_TANH)


def mix_few_bits(scheme: str, num_rows: int) -> None:
    """Gemma 4 26B's experts; few of them, for nothing depends on their number but memory."""
    weights = (make_quantized(scheme, 16, *shape) for shape in ((2 * 704, 2816), (2816, 704)))
    chosen, shares = make(num_rows, 8, dtype=torch.int64), make(num_rows, 8, dtype=FP32)
    kernels().experts(make(num_rows, 2816), *weights, chosen, shares, Activation.GELU_TANH)


def dequantize_stack(scheme: str) -> None:
    """Gemma 4 26B's gates and ups."""
    from flashdraft.kernels.cuda.quantized.linear import dequantize

    dequantize(make_quantized(scheme, 128, 2 * 704, 2816), BF16)


def route(num_rows: int, dtype: torch.dtype = BF16) -> None:
    """Gemma 4 26B's router."""
    x, router = make(num_rows, 2816, dtype=dtype), make(128, 2816, dtype=dtype)
    kernels(dtype).route(x, router, 8, make(128, dtype=FP32))


def gather(num_rows: int, is_arranged: bool) -> None:
    """Rows of Gemma 4 26B for the experts' kernels in CUDA C++."""
    from flashdraft.kernels.cuda.experts.routing import gather_rows

    chosen = make(num_rows, 8, dtype=torch.int64)
    gather_rows(make(num_rows, 2816), chosen, 128, 64, is_arranged)


def prepare(
    spec: QKVSpec,
    cache_dtype: torch.dtype = BF16,
    stores_keys: bool = True,
    num_rows: int = 16,
) -> None:
    rope = RopeTable(*(make(9, spec.head_dim // 2, dtype=FP32) for _ in range(2)))
    cache = make(64, 16, spec.num_kv_heads, spec.head_dim, dtype=cache_dtype)
    rows = make(num_rows, dtype=torch.int64)
    keys = cache if stores_keys else None
    kernels().prepare_qkv(make(num_rows, spec.width), Heads(spec, rope, rows), keys, cache, rows)


def norm_residual(hidden: int, num_deltas: int, num_outputs: int) -> None:
    x, weight = make(1, hidden), make(hidden)
    deltas, post = [(x, weight)] * num_deltas, weight if num_deltas == 2 else None
    residual = Residual(x, deltas, post, make(1))
    kernels().residual_norms(residual, [weight] * num_outputs, 1e-6)


def lose(vocab_size: int, softcap: float | None) -> None:
    from flashdraft.kernels.cuda.loss import loss_rows

    labels, best = make(8, dtype=torch.int64), make(8, dtype=torch.int64)
    loss, chance = make(8, dtype=FP32), make(8, dtype=FP32)
    loss_rows(make(8, vocab_size), labels, 1.0, softcap, loss, chance, best)


def finish(vocab_size: int, dtype: torch.dtype, softcap: float | None, forbids: bool) -> None:
    forbidden = make(vocab_size, dtype=torch.bool) if forbids else None
    kernels(dtype).finish_logits(make(16, vocab_size, dtype=dtype), 1.0, softcap, forbidden)


def draw(num_rows: int, vocab_size: int, dtype: torch.dtype, plain: bool = False) -> None:
    from flashdraft.kernels.draw.rule import DrawnRows, HeadProducts, SlotSettings
    from flashdraft.kernels.nodes import MAX_NODES

    settings = SlotSettings.allocate(8, vocab_size, torch.device("meta"))
    owner = make(num_rows, dtype=torch.int64)
    masks = make(3, -(-vocab_size // 32), dtype=torch.int32)
    followed = make(8, MAX_NODES, dtype=torch.int64)
    rows = DrawnRows(owner, owner)
    if not plain:
        rows = DrawnRows(owner, owner, followed, owner, masks, mask_of=owner)
    banned = None if plain else make(vocab_size, dtype=torch.bool)
    head = HeadProducts(make(num_rows, vocab_size, dtype=dtype), 1.0, 30.0, banned)
    kernels(dtype).draw(head, settings, rows)


def go_on(width: int, is_given: bool, depth: int | None = None) -> None:
    from tests.advanced import make_step

    step = make_step(0, 8, width, is_given, looks_up=True, max_depth=depth)
    step = step.copied(torch.device("meta"))
    kernels().advance(*step)


def lay_out(num_slots: int, width: int, num_rows: int | None = None) -> None:
    from flashdraft.kernels.layout import DraftedSlots, SlotTables
    from flashdraft.kernels.nodes import TreeNodes
    from tests.laid_out import make_drafted, make_nodes, make_rows, make_slots

    meta = torch.device("meta")
    drafted = DraftedSlots(*(one.to(meta) for one in make_drafted(0, num_slots, width)))
    *tensors, page_size = make_slots(0, num_slots, 2)
    slots = SlotTables(*(one.to(meta) for one in tensors), page_size)
    num_rows = num_slots if num_rows is None else num_rows
    counts = kernels().share_rows(drafted, num_rows)
    nodes = TreeNodes(*(one.to(meta) for one in make_nodes(0, num_slots, width)))
    for one in (None, counts):
        kernels().lay_out(slots, nodes, one, num_rows, make_rows(999, num_slots, 2, meta))


def grow(num_slots: int, count: int, num_nodes: int) -> None:
    from tests.grown import grow_by, make_drawn, make_offered

    meta = torch.device("meta")
    kernels().offer(*make_drawn(0).to(meta), max(count, 1))
    grow_by(kernels(), make_offered(0, num_slots, 15, count, meta), num_nodes)


def follow_paths(num_rows: int, count: int, is_sure: bool) -> None:
    from flashdraft.kernels.paths import PathScores, SlotCandidates
    from tests.grown import make_drawn
    from tests.pathed import make_paths

    meta, drawn = torch.device("meta"), make_drawn(0)
    candidates, scores = make_paths(drawn, 16, 0, is_sure)
    sure = None if scores.sure is None else scores.sure.to(meta)
    told = (
        SlotCandidates(*(one.to(meta) for one in candidates)),
        PathScores(scores.added.to(meta), sure),
    )
    moved = drawn.to(meta)
    offers = kernels().offer_paths(*told, moved.settings, moved.rows, count)
    kernels().follow(offers, num_rows)


def convolve(num_rows: int, features: int) -> None:
    from flashdraft.kernels.convolution import Convolution

    changes = make(num_rows, 4 * (features // 16)).chunk(2, dim=1)[0]
    places = make(num_rows, dtype=torch.int64)
    kernels().convolve(make(num_rows, features), Convolution(make(2, features), changes, places))


def settle(num_slots: int) -> None:
    from flashdraft.kernels.settle import PagedTensor, Settled

    caches = make(9, 16, 4, 256), make(9, 16, 2, 512, dtype=FP8)
    stored = [PagedTensor(cache, pool) for pool, cache in enumerate(caches)]
    path, places = make(num_slots, 16, dtype=torch.int64), make(2, 99, dtype=torch.int64)
    starts, nowhere = make(num_slots, dtype=torch.int32), make(2, dtype=torch.int64)
    kernels().settler(stored)(Settled(path, starts, places, nowhere))


def trees(num_rows: int) -> BlockMask:
    ancestors, depths = make(num_rows, dtype=torch.int64), make(num_rows, dtype=torch.int32)
    return BlockMask(trees=Trees(ancestors, depths))


def pictures(num_rows: int) -> BlockMask:
    return BlockMask(ahead=make(num_rows, dtype=torch.int32))


NORM = make(512)
SHARED = QKVSpec(32, 4, 512, 1e-6, q_norm=NORM, k_norm=NORM, v_norm=True, share_kv=True)
CASES: dict[str, Case] = {
    "norm of 2816, no weight": lambda: kernels().rms_norm(make(1, 2816), None, 1e-6),
    "norm of a sum of 5376": lambda: kernels().add_rms_norm(
        make(64, 5376), make(64, 5376), make(5376), 1e-6
    ),
    "gate, silu": lambda: kernels().gated(make(16, 3072), Activation.SILU),
    "gate, gelu": lambda: kernels().gated(make(16, 43008), Activation.GELU_TANH),
    "residual norms of 5376": lambda: norm_residual(5376, 1, 1),
    "residual norms of 2816": lambda: norm_residual(2816, 2, 3),
    "heads of 64": lambda: prepare(QKVSpec(9, 3, 64, 1e-6)),
    "heads of 512, shared": lambda: prepare(SHARED),
    "heads of 512, values alone": lambda: prepare(SHARED, stores_keys=False),
    "heads of a drafter's context": lambda: prepare(QKVSpec(0, 8, 128, 1e-6, k_norm=NORM[:128])),
    "heads of 512, fp8 cache": lambda: prepare(SHARED, FP8),
    "routing of one row": lambda: kernels().choose_experts(make(1, 128), 8, make(128, dtype=FP32)),
    **{f"route of {m} rows": lambda m=m: route(m) for m in (1, 2, 4)},
    "route of 4 rows, float32": lambda: route(4, FP32),
    "rows for experts": lambda: gather(500, is_arranged=False),
    "rows for experts in few bits": lambda: gather(1024, is_arranged=True),
    "int4 linear of a prompt": lambda: multiply_few_bits("int4", 257, LINEARS["31B gate"]),
    "loss over 49152": lambda: lose(49152, None),
    "loss over 262144, capped": lambda: lose(262144, 30.0),
    "logits of 262144, capped": lambda: finish(262144, BF16, 30.0, True),
    "logits of 100003": lambda: finish(100003, FP32, None, False),
    "rows of one slot": lambda: lay_out(1, 15),
    "keys of accepted paths": lambda: settle(8),
    "rows of 32 slots": lambda: lay_out(32, 15),
    "rows without drafts": lambda: lay_out(8, 0),
    "trees": lambda: grow(8, 8, 63),
    "paths": lambda: follow_paths(1, 8, False),
    "paths of a head that is sure": lambda: follow_paths(1, 8, True),
    "convolutions": lambda: convolve(128, 5376),
    "chains": lambda: grow(8, 0, 15),
    "slots that go on": lambda: go_on(15, is_given=False),
    "slots that go on behind trees": lambda: go_on(63, is_given=False, depth=15),
    "slots that go on without drafts": lambda: go_on(0, is_given=True),
    "draw over 262144": lambda: draw(16, 262144, FP32),
    "draw over 262144, half": lambda: draw(1, 262144, BF16, plain=True),
    "draw over 100003": lambda: draw(64, 100003, FP32, plain=True),
    "attention of 64, trees": lambda: attend(64, 16, FP16, mask=trees(16)),
    "attention of 512, 16 rows, trees": lambda: attend(512, 16, mask=trees(16)),
    "attention of 128, bidirectional, exact": lambda: attend(
        128, 16, mask=BIDIRECTIONAL, exact=True
    ),
    "attention of 256, exact": lambda: attend(256, 16, exact=True),
    "attention of 256, 16 rows, fp8 cache": lambda: attend(256, 16, cache_dtype=FP8),
    "attention of 512, 1 row, fp8 cache": lambda: attend(512, 1, cache_dtype=FP8),
    "attention of 512, 16 rows, fp8 cache": lambda: attend(512, 16, cache_dtype=FP8),
    "attention over values, exact": lambda: attend_values(16, exact=True),
    "attention over values, trees": lambda: attend_values(16, mask=trees(16)),
    "attention over values, float32": lambda: attend_values(16, FP32),
    "attention over values, 1 row, fp8 cache": lambda: attend_values(1, cache_dtype=FP8),
    "attention over values, 16 rows, fp8 cache": lambda: attend_values(16, cache_dtype=FP8),
    "attention of 64, float32": lambda: attend(64, 16, FP32),
    "attention of 512, float32": lambda: attend(512, 16, FP32),
    "linear 26B gate, 1 row": lambda: multiply(1, LINEARS["26B gate"]),
    "experts, exact": lambda: mix(1024, exact=True),
    "experts of 1 row, float32": lambda: mix(1, FP32),
    "experts of 16 rows, float32": lambda: mix(16, FP32),
    "Qwen3's experts of 1 row": lambda: mix_qwen3(1),
    "Qwen3's experts of 16 rows": lambda: mix_qwen3(16),
    "Qwen3's experts of 512 rows": lambda: mix_qwen3(512),
}
AS_BEFORE: dict[
    str, Case
] = {  # what steps launch that are of another number of rows than some before
    "rows of 32 slots": lambda: lay_out(32, 15, 251),
    "trees": lambda: grow(5, 7, 17),
    "heads of 512, shared": lambda: prepare(SHARED, num_rows=13),
    "draw over 262144": lambda: draw(13, 262144, FP32),
    "draw over 100003": lambda: draw(1, 100003, FP32, plain=True),
    "gate, gelu": lambda: kernels().gated(make(13, 43008), Activation.GELU_TANH),
    "attention of 256, 2048 rows": lambda: attend(256, 1999),
    "attention of 512, 2048 rows": lambda: attend(512, 1999),
    "attention of 256, 2048 rows, pictures": lambda: attend(256, 1999, mask=pictures(1999)),
    "attention of 256, 2048 rows, trees": lambda: attend(256, 1999, mask=trees(1999)),
    "experts of 1024 rows": lambda: mix(1001),
    "rows for experts": lambda: gather(300, is_arranged=False),
}
CASES |= {f"{name}, as before": case for name, case in AS_BEFORE.items()}
for _scheme in ("int4", "int4_k", "int6", "int8", "fp8"):
    for _rows in (1, 16, 64):
        CASES[f"{_scheme} linear, {_rows} rows"] = lambda n=_scheme, m=_rows: multiply_few_bits(
            n, m, (5376, 8192)
        )
    CASES[f"{_scheme} table"] = lambda n=_scheme: kernels().embed(
        make(16, dtype=torch.int64), make_quantized(n, 49152, 512)
    )
    CASES[f"{_scheme} stack as floats"] = lambda n=_scheme: dequantize_stack(n)
for _scheme in ("int4", "int8", "fp8"):
    for _rows in (1, 16):
        CASES[f"{_scheme} gated linear, {_rows} rows"] = lambda n=_scheme, m=_rows: gate_few_bits(
            n, m, 21504, 5376
        )
    for _rows in (1, 16, 64):
        CASES[f"{_scheme} experts, {_rows} rows"] = lambda n=_scheme, m=_rows: mix_few_bits(n, m)
for _dim in HEADS:
    for _rows in (1, 16, 64, 2048):
        CASES[f"attention of {_dim}, {_rows} rows"] = lambda d=_dim, m=_rows: attend(d, m)
for _rows in (1, 16, 2048):
    for _kind, _mask in (("pictures", pictures), ("trees", trees)):
        CASES[f"attention of 256, {_rows} rows, {_kind}"] = lambda m=_rows, mask=_mask: attend(
            256, m, mask=mask(m)
        )
for _rows in (1, 16, 2048):
    CASES[f"attention over values, {_rows} rows"] = lambda m=_rows: attend_values(m)
for _scheme in ("fp8", "int8"):
    for _rows in (1, 17, 64, 512):
        CASES[f"{_scheme} linear of rounded rows, {_rows} rows"] = lambda n=_scheme, m=_rows: (
            multiply_rounded(n, m, (5376, 8192))
        )
        CASES[f"{_scheme} gated linear of rounded rows, {_rows}"] = lambda n=_scheme, m=_rows: (
            multiply_rounded(n, m, (2 * 21504, 5376), Activation.SILU)
        )
for _name, _shape in LINEARS.items():
    for _rows in (16, 32):
        CASES[f"linear {_name}, {_rows} rows"] = lambda m=_rows, s=_shape: multiply(m, s)
for _name, _shape in (LINEARS | SMALL_LINEARS).items():
    CASES[f"linear {_name}, exact"] = lambda s=_shape: multiply(64, s, exact=True)
    CASES[f"linear {_name}, float32"] = lambda s=_shape: multiply(16, s, FP32, exact=True)
for _rows in (1, 2, 16, 64, 1024, 4096):
    CASES[f"experts of {_rows} rows"] = lambda m=_rows: mix(m)


@pytest.fixture(scope="module")
def running() -> Iterator[dict[str, Future[dict[str, Found]]]]:
    """Every card's kernels, being compiled."""
    pytest.importorskip("triton", reason="Triton is not installed")
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        yield {card: pool.submit(compile_cases, __file__, card) for card in CARDS}


@pytest.mark.parametrize(
    ("card", "name"),
    [
        (card, name)
        for card in CARDS
        for name in CASES
        if "fp8" not in name or CARDS[card].capability >= LEAST_FP8_CAPABILITY
    ],
)
def test_compiles_and_fits(
    card: str, name: str, running: dict[str, Future[dict[str, Found]]]
) -> None:
    found = running[card].result()[name]
    assert not found.failure, found.failure
    assert found.compiled, "nothing was launched"
    for each in found.compiled:
        assert each.shared_bytes <= CARDS[card].limits.shared_bytes, each
        assert each.spilled_bytes <= MAX_SPILLED, each
        if each.kernel in STREAMING and each.is_half:
            assert each.copies_ahead, f"{each.kernel} waits for its copies"


@pytest.mark.parametrize("card", CARDS)
def test_no_kernel_is_left_out(card: str, running: dict[str, Future[dict[str, Found]]]) -> None:
    found = running[card].result().values()
    missing = launched_kernels() - {each.kernel for case in found for each in case.compiled}
    assert not missing, f"{missing}: add a line to CASES that launches them"


@pytest.mark.parametrize("card", CARDS)
def test_kernels_start_early_where_the_card_can(
    card: str, running: dict[str, Future[dict[str, Found]]]
) -> None:
    found = running[card].result()
    can = CARDS[card].capability >= 90
    for name in ("norm of 2816, no weight", "attention of 128, 1 rows", "linear 26B gate, 1 row"):
        assert {each.starts_early for each in found[name].compiled} == {can}
    assert can or not any(each.starts_early for case in found.values() for each in case.compiled)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", AS_BEFORE)
def test_another_number_of_rows_compiles_nothing(
    name: str, card: str, running: dict[str, Future[dict[str, Found]]]
) -> None:
    """Steps have any number of rows, and whoever is in one would wait for the compiler."""
    found = running[card].result()
    one, other = (found[case].compiled for case in (name, f"{name}, as before"))
    assert {each.digest for each in other} <= {each.digest for each in one}


@pytest.mark.parametrize("card", CARDS)
def test_routing_and_prompts_take_few_launches(
    card: str, running: dict[str, Future[dict[str, Found]]]
) -> None:
    found = running[card].result()
    launched = {name: [each.kernel for each in found[name].compiled] for name in found}
    assert launched["route of 4 rows"] == ["experts.routing._route"]
    assert launched["int4 stack as floats"] == ["quantized.linear._dequantize"]
    assert launched["int4 linear of a prompt"] == ["quantized.linear._dequantize"] * 4


@pytest.mark.parametrize("card", CARDS)
def test_streams_are_never_starved(card: str) -> None:
    """A linear or head that reads memory has two copies on their way while it computes."""
    limits = CARDS[card].limits
    plans: list[LinearPlan | None] = []
    plans += [plan_exact_linear(*shape, 2, limits) for shape in LINEARS.values()]
    plans += [plan_linear(m, *shape, 2, limits) for m in (1, 32) for shape in LINEARS.values()]
    assert all(plan is not None and plan.num_stages >= 3 for plan in plans)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_blocks_and_prompts_fill_the_tensor_cores(card: str, head_dim: int) -> None:
    """Heads of 512 too, but for the cards with 99 KB."""
    limits = CARDS[card].limits
    for num_rows in (64, 2048):
        query, cache, view, window = make_attention(head_dim, num_rows)
        keys = PagedKeys(cache, cache, view, 1.0, window, CAUSAL)
        assert plan_attention(query, keys, limits).block_m >= 64


if __name__ == "__main__":
    report(sys.argv[1], CASES)
