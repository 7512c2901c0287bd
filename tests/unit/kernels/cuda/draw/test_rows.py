"""The draw in Triton's interpreter against the rule in torch, bit for bit, on hostile rows.

A row is cut into far smaller parts than on a GPU, so that a few hundred tokens pass through every
launch: what is picked, what is searched, and what has more equals than there is room for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flashdraft.core import SamplingParams
from flashdraft.kernels.draw import arithmetic, noise, reference
from flashdraft.kernels.draw.rule import DrawnRows, HeadProducts, SlotRequest, SlotSettings
from tests.drawn import CPU, PENALISED, Rows, assert_equal, make_rows, siblings
from tests.interpreted import judge, report

PLANS: dict[str, dict[str, int]] = {
    "small": {"sub": 16, "parts": 4, "blocks": 2, "room": 32, "max_picked": 9, "search_block": 128},
    "roomy": {"sub": 8, "parts": 8, "blocks": 8, "room": 512, "max_picked": 9, "search_block": 512},
    "tight": {"sub": 8, "parts": 8, "blocks": 4, "room": 4, "max_picked": 9, "search_block": 512},
}
SAMPLED = {"temperature": 1.0, "min_p": 0.0, "logprobs": None}


def compare(batch: Rows, plan: str) -> None:
    from flashdraft.kernels.cuda.draw.rows import DrawPlan, draw

    head = HeadProducts(batch.logits)
    found = draw(head, batch.settings, batch.rows, DrawPlan(**PLANS[plan]))
    assert_equal(found, reference.draw(batch.logits, batch.settings, batch.rows))


def check_random(plan: str, vocab_size: int, masked: bool, **fixed: Any) -> None:
    seed = vocab_size + 1000 * masked
    compare(make_rows(seed, vocab_size, num_slots=7, masked=masked, **fixed), plan)


def check_head(plan: str, softcap: float | None, multiplier: float) -> None:
    """From a head's products, some of whose tokens are forbidden."""
    from flashdraft.kernels.cuda.dense.logits import finish_logits
    from flashdraft.kernels.cuda.draw.rows import DrawPlan, draw

    batch = make_rows(5, 219, num_slots=7, masked=True)
    forbidden = torch.arange(219) % 5 == 2
    for dtype, banned in itertools.product((torch.float32, torch.bfloat16), (None, forbidden)):
        head = HeadProducts(batch.logits.to(dtype), multiplier, softcap, banned)
        found = draw(head, batch.settings, batch.rows, DrawPlan(**PLANS[plan]))
        assert_equal(found, reference.draw(finish_logits(*head), batch.settings, batch.rows))
        if banned is not None:
            assert not banned[found.tokens.clamp(min=0)].any()


def check_levels(plan: str, **setting: Any) -> None:
    """Rows of few different values: where kept tokens end, there are equals."""
    random, vocab_size = np.random.default_rng(0), 203
    settings = SlotSettings.allocate(1, vocab_size, CPU)
    settings.set({0: SlotRequest(SamplingParams(temperature=1.0, **setting), 5, [])})
    levels = np.stack([random.integers(0, 2 + n % 4, vocab_size) for n in range(4)])
    logits = torch.from_numpy(levels.astype(np.float32) * np.float32(0.3))
    rows = DrawnRows(torch.zeros(4, dtype=torch.int64), torch.arange(4))
    compare(Rows(logits, settings, rows, []), plan)


def check_arithmetic() -> None:
    random = np.random.default_rng(0)
    bits = torch.from_numpy(random.integers(0, 2**31, 4096).astype(np.int32))
    bits[:4] = torch.tensor([0, 1, 2**31 - 1, 2**31 - 2])
    scaled = torch.from_numpy(-random.exponential(9.0, 4096).astype(np.float32))
    noises, weights = torch.empty(4096), torch.empty(4096, dtype=torch.int64)
    hashed = torch.empty(4096, dtype=torch.int32)
    key = torch.tensor([noise.noise_start(-7), 123456])
    apply[(1,)](bits, scaled, noises, weights, hashed, key, 4096)
    assert torch.equal(noises, arithmetic.gumbel(bits))
    assert torch.equal(weights, arithmetic.weigh(scaled))
    assert torch.equal(hashed, noise.random_bits(noise.noise_key(-7, 123456), 4096, CPU))


def check_tree(num_rows: int, depth: int) -> None:
    """Rows of trees: as the rule has it, and as if every row's path were committed."""
    from flashdraft.kernels.cuda.draw.rows import DrawPlan, draw

    plan, num_slots = DrawPlan(**PLANS["roomy"]), 1 if num_rows > 20 else 3
    settings = PENALISED | {"temperature": 0.0}
    batch = make_rows(num_rows, 61, num_slots, num_rows, depth=depth, **settings).tempted()
    found = draw(HeadProducts(batch.logits), *batch.drawable[1:], plan)
    assert_equal(found, reference.draw(*batch.drawable))
    assert_equal(found, reference.draw(*batch.committed().drawable))


def check_siblings() -> None:
    from flashdraft.kernels.cuda.draw.rows import DrawPlan, draw

    batch, tokens = siblings()
    found = draw(HeadProducts(batch.logits), *batch.drawable[1:], DrawPlan(**PLANS["small"]))
    assert found.tokens.tolist() == tokens


def check_alone() -> None:
    from flashdraft.kernels.cuda.draw.rows import DrawPlan, draw

    plan, batch = DrawPlan(**PLANS["small"]), make_rows(11, 150, num_slots=7)
    together = draw(HeadProducts(batch.logits), batch.settings, batch.rows, plan)
    for row in range(0, len(batch.logits), 4):
        one = batch.alone(row)
        for found, expected in zip(
            draw(HeadProducts(one.logits), *one.drawable[1:], plan), together, strict=True
        ):
            assert torch.equal(found[0].nan_to_num(0.5), expected[row].nan_to_num(0.5))


def check_unread_masks() -> None:
    """Rows without a mask read nothing of the table, here an empty one."""
    from flashdraft.kernels.cuda.draw.rows import DrawPlan, draw

    batch = make_rows(13, 150, num_slots=7)
    none, empty = torch.full_like(batch.rows.owner, -1), torch.empty(0, 5, dtype=torch.int32)
    rows = replace(batch.rows, masks=empty, mask_of=none)
    head = HeadProducts(batch.logits)
    found = draw(head, batch.settings, rows, DrawPlan(**PLANS["small"]))
    assert_equal(found, reference.draw(*batch.drawable))


def check_few_allowed() -> None:
    """Where a mask leaves fewer tokens than top-k wants, these alone are looked at."""
    from flashdraft.kernels.cuda.draw import rows as kernels

    seen = []
    make_notes = kernels._make_notes
    kernels._make_notes = lambda *shape: seen.append(make_notes(*shape)) or seen[0]
    vocab_size, allowed = 300, [3, 4, 250]
    settings = SlotSettings.allocate(1, vocab_size, CPU)
    params = SamplingParams(temperature=1.0, top_k=7, top_p=0.95)
    settings.set({0: SlotRequest(params, 5, [])})
    bits = np.zeros(10 * 32, dtype=np.uint8)
    bits[allowed] = 1
    masks = torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))[None]
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(1, vocab_size))).float()
    zero = torch.zeros(1, dtype=torch.int64)
    drawn = DrawnRows(zero, zero + 9, masks=masks, mask_of=zero)
    try:
        head, plan = HeadProducts(logits), kernels.DrawPlan(**PLANS["small"])
        found = kernels.draw(head, settings, drawn, plan)
    finally:
        kernels._make_notes = make_notes
    assert_equal(found, reference.draw(logits, settings, drawn))
    assert seen[0].num_found.tolist() == [3]
    assert seen[0].mode.tolist() == [kernels.PICKS.value]


def check_backend() -> None:
    from flashdraft.kernels.cuda.backend import TritonKernels

    batch = make_rows(12, 77, num_slots=14)
    found = TritonKernels(CPU, torch.float32).draw(*batch.drawable)
    assert_equal(found, reference.draw(*batch.drawable))
    none = TritonKernels(CPU, torch.float32).draw(*batch.alone(len(batch.logits)).drawable)
    assert [len(one) for one in none] == [0] * 5


CHECKS: dict[str, Callable[[], None]] = {
    "arithmetic": check_arithmetic,
    "tokens beside a path": check_siblings,
    "a row alone": check_alone,
    "masks that nobody has": check_unread_masks,
    "a mask of few": check_few_allowed,
    "the backend": check_backend,
}
for _vocab, _masked in itertools.product((1, 33, 300), (False, True)):
    CHECKS[f"{_vocab} tokens{', masked' * _masked}"] = lambda v=_vocab, m=_masked: check_random(
        "small", v, m
    )
for _rows, _depth in ((6, 3), (33, 5), (64, 9)):
    CHECKS[f"a tree of {_rows}"] = lambda n=_rows, d=_depth: check_tree(n, d)
for _cap, _multiplier in ((None, 1.0), (3.0, 0.25), (30.0, 1.0)):
    CHECKS[f"a head, {_cap}, {_multiplier}"] = lambda c=_cap, m=_multiplier: check_head(
        "small", c, m
    )
for _plan in PLANS:
    for _name, _setting in {
        "free": {"top_k": 0, "top_p": 1.0},
        "top-k": {"top_k": 7, "top_p": 1.0},
        "large top-k": {"top_k": 120, "top_p": 1.0},
        "large top-k and top-p": {"top_k": 120, "top_p": 0.8},
        "top-p": {"top_k": 0, "top_p": 0.9},
        "top-k and top-p": {"top_k": 7, "top_p": 0.7},
    }.items():
        CHECKS[f"{_plan}, {_name}"] = lambda p=_plan, s=_setting: check_random(
            p, 259, False, **SAMPLED | s
        )
        CHECKS[f"{_plan}, {_name}, levels"] = lambda p=_plan, s=_setting: check_levels(p, **s)


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, failures: dict[str, str]) -> None:
    judge(failures[name])


if __name__ == "__main__":  # in the interpreter's process
    import triton
    import triton.language as tl

    from flashdraft.kernels.cuda.draw import arithmetic as interpreted

    @triton.jit
    def apply(
        bits: tl.tensor,
        scaled: tl.tensor,
        noises: tl.tensor,
        weights: tl.tensor,
        hashed: tl.tensor,
        key: tl.tensor,
        COUNT: tl.constexpr,
    ) -> None:
        places = tl.arange(0, COUNT)
        tl.store(noises + places, interpreted.gumbel(tl.load(bits + places)))
        tl.store(weights + places, interpreted.weigh(tl.load(scaled + places)))
        start = interpreted.noise_key(tl.load(key), tl.load(key + 1))
        tl.store(hashed + places, interpreted.random_bits(start, places))

    report(CHECKS)
