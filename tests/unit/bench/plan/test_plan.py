"""What fits where, what is said when nothing does, and how cards are found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flashdraft.bench.plan.gpus import GB, MIB, cards_by_memory, custom_card, find_card, recognise
from flashdraft.bench.plan.pairs import find_pair
from flashdraft.bench.plan.plan import Plan, advice, break_even, make_plan
from flashdraft.cli import build_parser
from flashdraft.engine.config import CacheOptions
from flashdraft.errors import CheckpointError, ModelNotFoundError, RequestError
from tests.tiny import make_tiny_checkpoint
from tests.unit.models.gguf.factory import LLAMA, random_values, write_gguf

DENSE, MOE = "google/gemma-4-31B-it", "google/gemma-4-26B-A4B-it"


def plan(model: str, gpu: str, context: int | None = None, concurrency: int = 1) -> Plan:
    return make_plan(find_pair(model), find_card(gpu), context=context, concurrency=concurrency)


def test_what_fits_on_which_card() -> None:
    def formats(model: str, *gpus: str) -> list[str]:
        bests = [plan(model, gpu).best for gpu in gpus]
        assert all(best.fits for best in bests)
        return [best.form.name for best in bests]

    found = formats(DENSE, "rtx4090", "rtx5090", "a6000", "a100-80", "h200")
    assert found == ["int4, int8 head"] * 2 + ["int8", "bf16", "bf16"]
    found = formats(MOE, "rtx4090", "rtx5090", "a6000", "a100-80")
    assert found == ["int4, int8 head", "int8", "int8", "bf16"]
    assert formats("Qwen/Qwen3-8B", "rtx4090", "rtx5090", "h200") == ["bf16"] * 3


def test_limits_are_the_last_that_fit() -> None:
    asked = plan(DENSE, "rtx5090", concurrency=2)
    for index in (3, 4):  # int4
        fit = asked.fits[index]
        assert fit.fits and fit.max_context < 262144
        assert plan(DENSE, "rtx5090", fit.max_context, 2).fits[index].fits
        assert not plan(DENSE, "rtx5090", fit.max_context + 16, 2).fits[index].fits
        assert plan(DENSE, "rtx5090", concurrency=fit.max_concurrency).fits[index].fits
        assert not plan(DENSE, "rtx5090", concurrency=fit.max_concurrency + 1).fits[index].fits


def test_more_memory_never_holds_less() -> None:
    pair = find_pair(DENSE)
    bests = [make_plan(pair, card).best for card in cards_by_memory()]
    batches = [make_plan(pair, card).fits[0].max_concurrency for card in cards_by_memory()]
    assert batches == sorted(batches) and batches[0] == 0 and batches[-1] > 8
    assert all(best.fits for best in bests)


def test_a_load_that_fits_is_served_as_it_was_asked_for() -> None:
    found = plan(DENSE, "h200", 16384, 8)
    assert found.command == f"flashdraft serve {DENSE} --max-context 16384 --max-batch 8"
    assert advice(found) == []
    best = found.best
    assert best.form.name == "bf16" and best.plain is not None and best.drafted is not None
    assert best.plain.requests == 8 and best.drafted.tokens_per_s > 3 * best.plain.tokens_per_s


def test_the_command_carries_the_flags_of_its_format() -> None:
    start, end = f"flashdraft serve {DENSE} ", " --max-context 8192 --max-batch 1"
    assert plan(DENSE, "rtx5090").command == f"{start}--quantize int4{end}"
    assert plan(DENSE, "a6000").command == f"{start}--quantize int8{end}"
    words = [" ".join(fit.form.flags) for fit in plan(DENSE, "h200").fits]
    assert words == ["", *(f"--quantize {one}" for one in ("int8", "fp8", "int4"))] + [
        "--quantize int4 --quantize-head fp8"
    ]
    parser = build_parser()
    for fit in plan(DENSE, "h200").fits:
        parser.parse_args(["serve", DENSE, *fit.form.flags])  # exits on what serve does not know


def test_an_fp8_cache_holds_twice_as_much() -> None:
    pair, card = find_pair(DENSE), find_card("rtx4090")
    wide, half = (
        make_plan(pair, card, cache=CacheOptions(kv_dtype=one)).best for one in ("auto", "fp8")
    )
    assert wide.cache is not None and half.cache is not None
    assert half.cache.needed_bytes == wide.cache.needed_bytes // 2
    assert half.max_context > 2 * wide.max_context
    asked = make_plan(pair, card, context=half.max_context, cache=CacheOptions(kv_dtype="fp8"))
    assert "--quantize int4" in str(asked.command) and "--kv-dtype fp8" in str(asked.command)
    # and is advised where it is what would do
    assert any("--kv-dtype fp8" in line for line in advice(plan(DENSE, "rtx4090", 60000)))


def test_an_fp8_cache_is_refused_where_it_cannot_be_read() -> None:
    pair = find_pair(DENSE)
    for name in ("rtx3090", "a6000", "a100"):
        with pytest.raises(RequestError, match="--kv-dtype is fp8.*capability 8.9"):
            make_plan(pair, find_card(name), cache=CacheOptions(kv_dtype="fp8"))
        assert not any("fp8" in line for line in advice(plan(DENSE, name, 262144, 2)))
    for name in ("rtx6000ada", "l40s", "h100"):
        make_plan(pair, find_card(name), cache=CacheOptions(kv_dtype="fp8"))
    with pytest.raises(RequestError, match="'int3'; it must be 'auto' or 'fp8'"):
        make_plan(pair, find_card("h200"), cache=CacheOptions(kv_dtype="int3"))


def test_a_cache_without_shared_keys_holds_twice_as_much_of_the_full_layers() -> None:
    pair, card = find_pair(DENSE, "none"), find_card("h200")
    both, values = (
        make_plan(pair, card, context=131072, cache=CacheOptions(kv_keys=one)).best
        for one in ("stored", "rebuilt")
    )
    assert both.cache is not None and values.cache is not None
    saved = both.cache.needed_bytes - values.cache.needed_bytes
    assert saved == 131072 * 40960 and f"{saved / GB:.1f}" == "5.4"
    assert values.max_concurrency > both.max_concurrency
    assert not values.form.is_measured and both.form.is_measured
    assert values.plain is not None and both.plain is not None
    assert both.plain.num_bytes - values.plain.num_bytes == pytest.approx(saved)
    asked = make_plan(pair, card, cache=CacheOptions(kv_dtype="fp8", kv_keys="rebuilt")).command
    assert "--kv-dtype fp8 --kv-keys rebuilt" in str(asked)
    build_parser().parse_args(str(asked).split()[1:])  # exits on what serve does not know
    # and is advised where it is what would do
    told = advice(make_plan(pair, card, context=262144, concurrency=6))
    assert any(line.startswith("--kv-keys rebuilt: 6 × 262,144 tokens fit") for line in told)


def test_both_ways_to_a_smaller_cache_are_advised_where_neither_is_enough() -> None:
    def told(context: int, card: str = "rtx4090") -> list[str]:
        return [line for line in advice(plan(DENSE, card, context)) if line.startswith("--kv")]

    pair, card = find_pair(DENSE), find_card("rtx4090")
    asked = make_plan(
        pair, card, context=98304, cache=CacheOptions(kv_dtype="fp8", kv_keys="rebuilt")
    )
    [line] = told(98304)
    assert line.startswith("--kv-dtype fp8 --kv-keys rebuilt, if the card has")
    assert line.endswith(f"1 × 98,304 tokens fit in {asked.best.form.name}") and asked.best.fits
    # where one is enough both would be too much
    assert told(30000) and "rebuilt" not in "".join(told(30000))
    # and where both are not, how far they reach
    [line] = told(262144)
    most = max(fit.max_context for fit in asked.fits)
    assert "--kv-dtype fp8 --kv-keys rebuilt, if the card has" in line
    assert line.endswith(f"1 × {most:,} tokens fit in int4, fp8 head") and 98304 < most < 262144
    assert told(131072, "rtx3090") == []  # it reads no fp8


def test_rebuilt_keys_are_refused_where_there_are_none() -> None:
    gpu, cpu = find_card("h200"), replace(find_card("h200"), title="a CPU", is_cpu=True)
    with pytest.raises(RequestError, match="smollm2-135m has no layers that share key and value"):
        make_plan(find_pair("smollm2-135m"), gpu, cache=CacheOptions(kv_keys="rebuilt"))
    with pytest.raises(RequestError, match="a CPU cannot do; it takes a GPU"):
        make_plan(find_pair(DENSE), cpu, cache=CacheOptions(kv_keys="rebuilt"))
    with pytest.raises(RequestError, match="'none'; it must be 'stored' or 'rebuilt'"):
        make_plan(find_pair(DENSE), gpu, cache=CacheOptions(kv_keys="none"))
    small = find_pair("smollm2-135m")
    load = make_plan(small, find_card("rtx3090"), concurrency=1024)
    assert not load.best.fits and not any("--kv-keys" in line for line in advice(load))


def test_a_load_that_fits_in_part_is_served_in_part() -> None:
    found = plan(DENSE, "rtx5090", 8192, 8)
    at_once = found.num_at_once
    assert 0 < at_once < 8 and f"--max-batch {at_once}" in str(found.command)
    assert found.best.plain is not None and found.best.plain.requests == at_once
    assert any("--context" in line for line in advice(found))


def test_what_would_fit_is_named() -> None:
    found = plan(DENSE, "rtx3090", 131072)
    assert found.command is None and not found.best.fits and found.best.plain is None
    lines = advice(found)
    assert lines[0].startswith(f"--context {found.best.max_context}:")
    assert found.best.max_context == max(fit.max_context for fit in found.fits) > 0
    assert any("larger card" in line and "48 GB" in line for line in lines)
    nowhere = plan(DENSE, "rtx3090", 262144, 64)
    assert any("no single card" in line for line in advice(nowhere))


def test_at_break_even_drafted_is_as_fast_as_plain() -> None:
    found = plan(MOE, "h200")
    plain, drafted = found.best.plain, found.best.drafted
    assert plain is not None and drafted is not None
    length = break_even(found, found.best)
    assert 1 < length < drafted.accepted_length
    assert length / drafted.step_s == pytest.approx(plain.tokens_per_s)


def test_a_cpu_holds_what_its_own_formats_take() -> None:
    card = replace(custom_card(16, None), is_cpu=True, title="a CPU")
    found = make_plan(find_pair("smollm2-135m"), card)
    assert [fit.form.name for fit in found.fits] == ["int8", "float32"]
    assert found.best.fits and found.best.budget_bytes == GB and found.best.plain is None
    assert "--device cpu --dtype int8" in str(found.command)


@pytest.mark.parametrize(("context", "concurrency"), [(262145, 1), (1, 1), (4096, 0), (4096, -3)])
def test_loads_that_cannot_be_are_refused(context: int, concurrency: int) -> None:
    with pytest.raises(RequestError, match=str(context if concurrency == 1 else concurrency)):
        plan(DENSE, "h200", context, concurrency)


def test_cards_by_name() -> None:
    names = ("h200", "H200", "NVIDIA H200", "RTX 5090", "rtx-5090", "a100-80", "a6000/48")
    titles = [find_card(name).title for name in names]
    assert titles == ["H200 (141 GB)"] * 3 + ["RTX 5090 (32 GB)"] * 2 + [
        "A100 (80 GB)",
        "RTX A6000 (48 GB)",
    ]
    with pytest.raises(RequestError, match="rtx9999.*known are .*h200.*--memory"):
        find_card("rtx9999")
    with pytest.raises(RequestError, match="a100-40"):
        find_card("a100-40")


def test_cards_by_figures() -> None:
    card = custom_card(40, 1.5)
    assert card.memory_bytes == 40 * GB and card.bandwidth_tb_s == 1.5
    half = custom_card(70, None, find_card("h200"))
    assert half.memory_bytes == 70 * GB and half.bandwidth_tb_s == 4.8
    for memory, bandwidth in ((-1.0, None), (0.0, None), (24.0, -1.0), (float("nan"), None)):
        with pytest.raises(RequestError, match="must be above 0"):
            custom_card(memory, bandwidth)
    with pytest.raises(RequestError, match="--memory or --gpu"):
        custom_card(None, 2.0)


def test_cards_by_the_drivers_name() -> None:
    found = recognise("NVIDIA H100 PCIe", 81559 * MIB, 70 * GB)
    assert found.bandwidth_tb_s == 2.0 and found.free_bytes == 70 * GB
    assert recognise("NVIDIA H100 80GB HBM3", 81559 * MIB, 70 * GB).bandwidth_tb_s == 3.35
    assert recognise("NVIDIA A100-SXM4-40GB", 40960 * MIB, 40 * GB).bandwidth_tb_s is None
    assert recognise("Some other card", 8 * GB, 8 * GB).tflops is None
    laptop = recognise("NVIDIA GeForce RTX 4090 Laptop GPU", 24564 * MIB, 8 * GB)
    assert laptop.bandwidth_tb_s is None


def test_folders_and_files_bring_their_own_config(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "gemma4")
    pair = find_pair(str(folder))
    assert pair.drafter is None and pair.target.family == "gemma"
    found = make_plan(pair, find_card("h200"), context=512)
    assert found.best.fits and found.best.plain is not None and found.best.drafted is None
    for file in folder.glob("*.safetensors"):
        file.unlink()  # sizes come from config.json alone
    assert find_pair(str(folder)).target == pair.target
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match="lacks the key"):
        find_pair(str(folder))


def test_a_gguf_file_brings_its_own_config(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": random_values(96, 64)}
    tensors |= {f"blk.{index}.attn_norm.weight": random_values(64) for index in range(2)}
    path = write_gguf(tmp_path / "tiny.gguf", "llama", LLAMA, tensors)
    assert make_plan(find_pair(str(path)), find_card("rtx4090"), context=16).best.fits


def test_drafters_are_known_or_folders() -> None:
    assert find_pair(MOE, "none").drafter is None
    included = find_pair("smollm2-135m").drafter_name
    assert included is not None
    assert find_pair("smollm2-135m", included).accepted is not None
    with pytest.raises(ModelNotFoundError, match="known are z-lab/"):
        find_pair(MOE, "somebody/else")
    with pytest.raises(CheckpointError):
        find_pair(MOE, included)  # of another target


def test_unknown_models_are_refused_with_what_is_known() -> None:
    for name in ("meta/other", "", "x" * 5000, "no\0where"):
        with pytest.raises(ModelNotFoundError, match="known are smollm2-135m, google.*folder"):
            find_pair(name)
    with pytest.raises(ModelNotFoundError, match="not a .gguf"):
        find_pair(__file__)
