"""Sums of the known pairs against published figures, and the cache's plan against the engine's."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from flashdraft.bench.gpus import GB
from flashdraft.bench.plan_pairs import DRAFTERS, TARGETS, Pair, find_pair
from flashdraft.bench.plan_sizes import (
    GPU_FORMATS,
    cache_bytes,
    cache_layers,
    count_drafter,
    count_target,
    drafter_bytes,
    plan_cache,
    weight_bytes,
)
from flashdraft.engine.config import EngineConfig
from flashdraft.engine.memory import build_cache
from flashdraft.errors import CapacityError
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.sources import default_drafter, known_models
from tests.tiny import make_tiny_checkpoint

DENSE, MOE = "google/gemma-4-31B-it", "google/gemma-4-26B-A4B-it"
BF16 = torch.bfloat16
META = SimpleNamespace(device=torch.device("meta"), dtype=BF16)


def test_every_model_known_by_name_can_be_planned() -> None:
    assert {model.name for model in known_models()} == set(TARGETS)
    for name in TARGETS:
        pair = find_pair(name)
        assert pair.drafter is not None and pair.accepted is not None
        assert pair.drafter_name == default_drafter(name)
        assert pair.drafter_name in DRAFTERS or name == "smollm2-135m"


@pytest.mark.parametrize(
    ("name", "target", "drafter"),
    [
        ("smollm2-135m", 134_515_008, 19_361_152),
        (DENSE, 30_697_345_340, 1_535_967_488),
        (MOE, 25_233_141_790, 429_689_088),
        ("Qwen/Qwen3-4B", 4_022_468_096, None),
        ("Qwen/Qwen3-8B", 8_190_735_360, None),
    ],
)
def test_parameters_are_counted_to_the_last_one(
    name: str, target: int, drafter: int | None
) -> None:
    pair = find_pair(name)
    assert count_target(pair.target).total == target
    assert pair.drafter is not None
    if drafter is not None:
        assert count_drafter(pair.drafter).total == drafter


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma4", "gemma4-moe"])
def test_parameters_are_those_of_a_checkpoint(tmp_path: Path, family: str) -> None:
    checkpoint = open_checkpoint(make_tiny_checkpoint(tmp_path, family))
    stored = sum(math.prod(checkpoint.source.shape(n)) for n in checkpoint.source.names())
    assert count_target(checkpoint.config).total == stored


@pytest.mark.parametrize(
    ("name", "resident"),
    [(DENSE, (61.4, 32.1, 30.7, 19.3, 17.9)), (MOE, (50.4, 26.0, 25.2, 15.2, 14.5))],
)
def test_weights_in_every_format(name: str, resident: tuple[float, ...]) -> None:
    size = count_target(find_pair(name).target)
    found = [weight_bytes(size, form) / GB for form in GPU_FORMATS]
    assert found == pytest.approx(resident, abs=0.1)
    assert [form.is_loadable for form in GPU_FORMATS] == [True, False, False, False, False]


@pytest.mark.parametrize(("name", "measured"), [(DENSE, 3.19), (MOE, 0.92)])
def test_a_drafter_takes_what_it_took_on_the_card(name: str, measured: float) -> None:
    drafter = find_pair(name).drafter
    assert drafter is not None
    size = count_drafter(drafter)
    assert [drafter_bytes(size, form) / GB for form in GPU_FORMATS] == pytest.approx(
        [measured] * len(GPU_FORMATS), abs=0.02
    )
    assert drafter_bytes(None, GPU_FORMATS[0]) == 0


@pytest.mark.parametrize(
    ("name", "gigabytes"), [(DENSE, (1.17, 3.52, 22.3)), (MOE, (0.29, 0.88, 5.58))]
)
def test_keys_and_values_stop_growing_at_the_window(
    name: str, gigabytes: tuple[float, ...]
) -> None:
    plain = cache_layers(find_pair(name, "none"))
    found = [cache_bytes(plain, BF16, context) / GB for context in (4096, 32768, 262144)]
    assert found == pytest.approx(gigabytes, abs=0.05 if name == DENSE else 0.005)
    drafted = cache_layers(find_pair(name))
    per_token = 2 * 8 * 128 * 2  # a drafter's layer: 8 heads of 128, keys and values
    for context, windowed in ((1000, 1000), (262144, 2048)):
        extra = cache_bytes(drafted, BF16, context) - cache_bytes(plain, BF16, context)
        assert extra == per_token * (4 * windowed + context)


def built(pair: Pair, config: EngineConfig) -> dict[int | None, int]:
    """What the engine builds, on a device that holds nothing."""
    target = SimpleNamespace(kernels=META, config=pair.target)
    drafter = None if pair.drafter is None else SimpleNamespace(config=pair.drafter)
    cache, _ = build_cache(cast(Any, target), cast(Any, drafter), config)
    return {pool.window: pool.num_pages for pool in cache.book_pools}


@pytest.mark.parametrize("draft", ["auto", "none"])
@pytest.mark.parametrize(("name", "context"), [(DENSE, 8192), (MOE, 32768), ("smollm2-135m", 512)])
@pytest.mark.parametrize(("batch", "gigabytes"), [(1, 4.0), (8, 12.0), (32, 40.0), (8, 5.0)])
def test_the_plan_is_the_engines(
    name: str, context: int, draft: str, batch: int, gigabytes: float
) -> None:
    pair = find_pair(name, draft)
    config = EngineConfig.for_device(
        "cuda", max_batch=batch, max_context=context, cache_gb=gigabytes
    )
    plan = plan_cache(pair, BF16, int(gigabytes * GB), config, context)
    assert plan.reserved_bytes <= gigabytes * GB
    try:
        assert plan.pages == built(pair, config)
    except CapacityError:
        assert not plan.fits


def test_a_cache_fits_from_the_very_budget_that_holds_its_load() -> None:
    pair = find_pair("smollm2-135m")  # no windows: the sum is simple
    config = EngineConfig.for_device("cuda", max_batch=3, max_context=4096)
    plan = plan_cache(pair, BF16, 10 * GB, config, 4096)
    per_token = 35 * 2 * 3 * 64 * 2
    assert plan.needed_bytes == 3 * 4096 * per_token
    assert plan_cache(pair, BF16, plan.needed_bytes, config, 4096).fits
    assert not plan_cache(pair, BF16, plan.needed_bytes - 1, config, 4096).fits
