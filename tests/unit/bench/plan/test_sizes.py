"""Sums of the known pairs against published figures, and the cache's plan against the engine's."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from flashdraft.bench.plan.gpus import GB
from flashdraft.bench.plan.pairs import DRAFTERS, TARGETS, Pair, find_pair
from flashdraft.bench.plan.sizes import (
    CPU_FORMATS,
    FP8,
    GPU_FORMATS,
    INT4,
    INT8,
    LEAST_VALUES,
    cache_bytes,
    count_drafter,
    count_target,
    drafter_bytes,
    loading_bytes,
    plan_cache,
    stored_formats,
    weight_bytes,
)
from flashdraft.engine.cache.layers import CacheLayer, bytes_per_token, cache_layers
from flashdraft.engine.cache.memory import build_cache
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.errors import CapacityError, CheckpointError
from flashdraft.kernels.kinds import Scheme, quantized_bytes
from flashdraft.kernels.torch_backend import TorchKernels
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.sources import default_drafter, known_models, resolve_source
from tests.tiny import CONFIGS, make_tiny_checkpoint
from tests.unit.models.gguf.factory import LLAMA, Types, random_values, write_gguf
from tests.unit.models.packed.test_compressed import write_model
from tests.unit.models.vision.towers import PUBLISHED, published, tower_shapes

DENSE, MOE = "google/gemma-4-31B-it", "google/gemma-4-26B-A4B-it"
BF16 = torch.bfloat16
META = TorchKernels(torch.device("meta"), BF16)


def test_every_model_known_by_name_can_be_planned() -> None:
    assert {model.name for model in known_models()} == set(TARGETS)
    for name in TARGETS:
        pair = find_pair(name)
        assert pair.drafter is not None and pair.accepted is not None
        assert pair.drafter_name == default_drafter(name)
        assert pair.drafter_name in DRAFTERS or name == "smollm2-135m"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_tower_for_pictures_is_counted_and_stays_float(name: str) -> None:
    config = ModelConfig.from_hf(published(name))
    text, both = count_target(config.without_vision("")), count_target(config)
    tower = sum(map(math.prod, tower_shapes(config.hidden_size).values()))
    assert (text.vision, both.vision) == (0, tower) and both.total - text.total == tower
    for form in (*GPU_FORMATS, *CPU_FORMATS):
        each = 4 if form.is_cpu else 2
        added = weight_bytes(both, form) - weight_bytes(text, form)
        assert added == pytest.approx(each * tower)
        assert both.layer_bytes(form) == text.layer_bytes(form)  # no step reads it


@pytest.mark.parametrize(
    ("name", "target", "drafter"),
    [
        ("smollm2-135m", 134_515_008, 19_361_152),
        (DENSE, 30_697_345_340 + 575_743_536, 1_535_967_488),
        (MOE, 25_233_141_790 + 572_794_416, 429_689_088),
        ("Qwen/Qwen3-4B", 4_022_468_096, None),
        ("Qwen/Qwen3-8B", 8_190_735_360, None),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", 30_532_122_624, 473_995_264),
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


@pytest.mark.parametrize("family", CONFIGS)
def test_parameters_are_those_of_a_checkpoint(tmp_path: Path, family: str) -> None:
    checkpoint = open_checkpoint(make_tiny_checkpoint(tmp_path, family))
    stored = sum(math.prod(checkpoint.source.shape(n)) for n in checkpoint.source.names())
    assert count_target(checkpoint.config).total == stored


# of the text; published for bf16, fp8 and int4 with an 8-bit head; int8 and its scales are ours
@pytest.mark.parametrize(
    ("name", "resident"),
    [(DENSE, (61.4, 32.6, 30.7, 18.0, 17.9)), (MOE, (50.4, 26.8, 25.2, 14.6, 14.5))],
)
def test_weights_in_every_format(name: str, resident: tuple[float, ...]) -> None:
    size = count_target(find_pair(name).target.without_vision(""))
    assert size.light == 0
    bare = replace(size, spare=0)
    found = [weight_bytes(bare, form) / GB for form in GPU_FORMATS]
    assert found == pytest.approx(resident, abs=0.1)


def test_rows_that_a_gpu_fills_up_are_counted() -> None:
    size = count_target(find_pair(MOE).target.without_vision(""))
    assert size.spare == 30 * 2816 * (128 * 64 + 64)  # 704 values of 768, and 2112 of 2176
    (int4,) = (form for form in GPU_FORMATS if form.name == "int4, int8 head")
    assert weight_bytes(size, int4) / GB == pytest.approx(14.99, abs=0.02)  # as loaded on the card
    assert count_target(find_pair(DENSE).target).spare == 0


def test_bits_are_those_of_the_kernels() -> None:
    backend = pytest.importorskip("flashdraft.kernels.cuda.backend")
    assert backend.MIN_QUANTIZED_VALUES == LEAST_VALUES
    for scheme, bits in ((Scheme.INT4, INT4), (Scheme.INT8, INT8), (Scheme.FP8, FP8)):
        values = 5376 * 21504
        assert 8 * quantized_bytes((21504, 5376), scheme) / values == pytest.approx(bits, abs=0.01)


@pytest.mark.parametrize(("name", "measured"), [(DENSE, 3.19), (MOE, 0.92)])
def test_a_drafter_takes_what_it_took_on_the_card_and_a_byte_at_least(
    name: str, measured: float
) -> None:
    drafter = find_pair(name).drafter
    assert drafter is not None
    size = count_drafter(drafter)
    found = [drafter_bytes(size, form) / GB / measured for form in GPU_FORMATS]
    assert found == pytest.approx([1, 8.5 / 16, 8 / 16, 8.5 / 16, 8.5 / 16], abs=0.01)
    assert drafter_bytes(None, GPU_FORMATS[0]) == 0


def test_a_cpu_takes_copies_of_the_head_while_it_packs() -> None:
    for name, copies in (("Qwen/Qwen3-4B", 2), ("Qwen/Qwen3-8B", 3)):  # tied, and not
        size = count_target(find_pair(name).target)
        assert {loading_bytes(size, form) for form in CPU_FORMATS} == {4 * copies * size.head}
        assert {loading_bytes(size, form) for form in GPU_FORMATS} == {0}


def test_small_weights_stay_floats_on_a_gpu(tmp_path: Path) -> None:
    config = open_checkpoint(make_tiny_checkpoint(tmp_path, "llama")).config
    size = count_target(config)
    assert size.layers == 0 < size.light
    assert {weight_bytes(size, form) for form in GPU_FORMATS} == {2 * size.total}


def test_an_embedding_table_beside_the_head_stays_float() -> None:
    size = count_target(find_pair("Qwen/Qwen3-8B").target)
    assert size.table == size.head == 151936 * 4096
    coded = size.total - size.table - size.small
    assert weight_bytes(size, GPU_FORMATS[2]) == coded + 2 * (size.table + size.small)


def stored_everywhere(name: str, bits: float) -> Pair:
    """A pair whose file has every matrix in so many bits."""
    pair = find_pair(name)
    hidden, wide = pair.target.hidden_size, pair.target.intermediate_size
    sizes = {"model.embed_tokens.weight": hidden * pair.target.vocab_size}
    for index, layer in enumerate(pair.target.layers):
        query, key = (layer.head_dim * n for n in (layer.num_heads, layer.num_kv_heads))
        parts = {"q": query, "k": key, "o": query} | ({} if layer.share_kv else {"v": key})
        for part, rows in parts.items():
            sizes[f"model.layers.{index}.self_attn.{part}_proj.weight"] = rows * hidden
        for part in ("gate", "up", "down"):
            sizes[f"model.layers.{index}.mlp.{part}_proj.weight"] = wide * hidden
    return replace(pair, stored={one: int(n * bits / 8) for one, n in sizes.items()})


def test_a_file_in_few_bits_takes_what_it_stores() -> None:
    pair = stored_everywhere(DENSE, 4.5)
    assert pair.drafter is not None
    size, drafter = count_target(pair.target), count_drafter(pair.drafter)
    plain, other = stored_formats(pair)
    few = size.total - size.small - size.vision
    expected = few * 4.5 / 8 + 2 * (size.small + size.vision)
    assert weight_bytes(size, plain) == pytest.approx(expected)
    assert weight_bytes(size, other) == pytest.approx(expected)
    assert drafter_bytes(drafter, plain) == 2 * (drafter.total + drafter.copies)
    assert drafter_bytes(drafter, other) < 0.54 * drafter_bytes(drafter, plain)
    assert plain.flags == () and other.flags == ("--quantize", "int8")
    # a head that the file has as floats is what `--quantize` makes of it
    del cast(dict[str, int], pair.stored)["model.embed_tokens.weight"]
    assert [form.head_bits for form in stored_formats(pair)] == [16, 8.5]


def test_a_gguf_file_is_planned_as_it_is_stored(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": random_values(LEAST_VALUES // 64, 64)}
    tensors |= {f"blk.{index}.attn_norm.weight": random_values(64) for index in range(2)}
    kinds = {"token_embd.weight": Types.Q4_0}
    pair = find_pair(str(write_gguf(tmp_path / "tiny.gguf", "llama", LLAMA, tensors, kinds)))
    assert dict(pair.stored) == {"model.embed_tokens.weight": LEAST_VALUES * 9 // 16}
    (form,) = stored_formats(pair)  # nothing else is large enough to become smaller
    size = count_target(pair.target)
    assert size.head_bytes(form) == LEAST_VALUES * 9 // 16
    assert weight_bytes(size, form) == size.head_bytes(form) + 2 * (size.light + size.small)


@pytest.mark.parametrize(("kind", "least", "most"), [("int4", 4, 7), ("fp8", 8, 11)])
def test_a_compressed_folder_is_planned_as_it_is_stored(
    tmp_path: Path, kind: str, least: float, most: float
) -> None:
    folder, _ = write_model(tmp_path, "gemma4_moe", kind)
    pair, source = find_pair(str(folder)), open_checkpoint(folder).source
    stored = {name: source.quantized_bytes(name) for name in source.names()}
    assert pair.stored == {name: size for name, size in stored.items() if size is not None}
    (form, *_) = stored_formats(pair)
    assert form.expert_bits is not None and least <= form.expert_bits <= most
    experts = sum(size for name, size in pair.stored.items() if ".experts." in name)
    rest = count_target(pair.target)
    floats = rest.total - rest.experts * rest.num_experts
    assert weight_bytes(rest, form) == pytest.approx(experts + 2 * floats)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        find_pair(str(folder))


@pytest.mark.weights
def test_the_default_models_file_is_the_one_planned_for() -> None:
    pair = find_pair("smollm2-135m")
    source = open_checkpoint(resolve_source("smollm2-135m").path).source
    head = "model.embed_tokens.weight"
    assert pair.stored == {head: source.quantized_bytes(head)}
    assert count_target(pair.target).layers == 0  # so that nothing else stays in few bits


def layers_of(name: str, draft: str = "auto", kv_keys: str = "stored") -> list[CacheLayer]:
    pair = find_pair(name, draft)
    return cache_layers(pair.target, pair.drafter, kv_keys)


@pytest.mark.parametrize(
    ("name", "gigabytes"), [(DENSE, (1.17, 3.52, 22.3)), (MOE, (0.29, 0.88, 5.58))]
)
def test_keys_and_values_stop_growing_at_the_window(
    name: str, gigabytes: tuple[float, ...]
) -> None:
    plain = layers_of(name, "none")
    found = [cache_bytes(plain, BF16, context) / GB for context in (4096, 32768, 262144)]
    assert found == pytest.approx(gigabytes, abs=0.05 if name == DENSE else 0.005)
    fp8 = [cache_bytes(plain, torch.float8_e4m3fn, context) / GB for context in (4096, 32768)]
    assert fp8 == pytest.approx([one / 2 for one in found[:2]])
    drafted = layers_of(name)
    per_token = 2 * 8 * 128 * 2  # a drafter's layer: 8 heads of 128, keys and values
    for context, windowed in ((1000, 1000), (262144, 2048)):
        extra = cache_bytes(drafted, BF16, context) - cache_bytes(plain, BF16, context)
        assert extra == per_token * (4 * windowed + context)


@pytest.mark.parametrize(("name", "per_token"), [(DENSE, 81920), (MOE, 20480)])
def test_rebuilt_keys_halve_the_full_layers_of_the_target_alone(name: str, per_token: int) -> None:
    for draft, extra in (("none", 0), ("auto", 2 * 8 * 128 * 2)):
        both, values = (
            bytes_per_token(layers_of(name, draft, way), BF16) for way in ("stored", "rebuilt")
        )
        assert both[None] == per_token + extra and values[None] == per_token // 2 + extra
        assert {**values, None: 0} == {**both, None: 0}


def built(pair: Pair, config: EngineConfig) -> dict[int | None, int]:
    """What the engine builds, on a device that holds nothing."""
    config_of = pair.target
    target = SimpleNamespace(kernels=META, config=config_of, vision=config_of.vision)
    drafter = None if pair.drafter is None else SimpleNamespace(config=pair.drafter)
    cache, _ = build_cache(cast(Any, target), cast(Any, drafter), config)
    return {pool.window: pool.num_pages for pool in cache.book_pools}


@pytest.mark.parametrize("draft", ["auto", "none"])
@pytest.mark.parametrize(
    ("name", "context", "kv_keys"),
    [
        (DENSE, 8192, "stored"),
        (DENSE, 8192, "rebuilt"),
        (MOE, 32768, "stored"),
        (MOE, 32768, "rebuilt"),
        ("smollm2-135m", 512, "stored"),
    ],
)
@pytest.mark.parametrize(("batch", "gigabytes"), [(1, 4.0), (8, 12.0), (32, 40.0), (8, 5.0)])
def test_the_plan_is_the_engines(
    name: str, context: int, kv_keys: str, draft: str, batch: int, gigabytes: float
) -> None:
    pair = find_pair(name, draft)
    config = EngineConfig.for_device(
        "cuda",
        max_batch=batch,
        max_context=context,
        cache=CacheOptions(cache_gb=gigabytes, kv_keys=kv_keys),
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
