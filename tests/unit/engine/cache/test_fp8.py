"""Keys and values in 8 bits: what is stored, what it takes, who refuses it, and the law with it."""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashdraft import LLM, SamplingParams
from flashdraft.cli import build_parser
from flashdraft.cli.model import load_model
from flashdraft.core import Request
from flashdraft.engine.cache.layers import bytes_per_token, cache_layers
from flashdraft.engine.cache.memory import build_cache
from flashdraft.engine.cache.planning import GB
from flashdraft.engine.cache.storage import KVCache, stored_dtype
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.errors import CapacityError, RequestError
from flashdraft.kernels.interface import CAUSAL, Heads, PagedKeys, PageView, QKVSpec, RopeTable
from flashdraft.kernels.torch_backend import TorchKernels
from tests import zoo
from tests.tiny import make_tiny_checkpoint, make_tiny_drafter

FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
PLAIN = EngineConfig(verify=0, ngram=False, cache=CacheOptions(cache_gb=0.01, kv_dtype="fp8"))
DRAFTED = EngineConfig(verify=5, cache=CacheOptions(cache_gb=0.01, kv_dtype="fp8"))
FAMILIES = list(zoo.CONFIGS)


def tokens(generations):
    return {key: generation.token_ids for key, generation in generations.items()}


def storage(engine):
    return [tensor for pair in engine.cache._storage for tensor in pair]


# -- what is stored ------------------------------------------------------------------------------


def write(kernels, qkv, spec, dtype):
    """Rows written to slots 0, 1, ... of an empty cache: queries, keys, values."""
    angles = torch.arange(float(len(qkv) * spec.head_dim // 2)).view(len(qkv), -1)
    rope, rows = RopeTable(angles.cos(), angles.sin()), torch.arange(len(qkv))
    keys, values = torch.zeros(2, 2, 4, spec.num_kv_heads, spec.head_dim, dtype=dtype)
    query = kernels.prepare_qkv(qkv, Heads(spec, rope, rows), keys, values, rows)
    return query, keys, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_rounded_once_to_the_nearest(dtype):
    kernels, spec = TorchKernels(CPU, dtype), QKVSpec(2, 1, 8, 1e-6)
    qkv = (torch.randn(6, spec.width) * 3).to(dtype)
    query, keys, values = write(kernels, qkv, spec, FP8)
    whole_query, whole_keys, whole_values = write(kernels, qkv, spec, dtype)
    assert torch.equal(query, whole_query)
    assert torch.equal(keys.float(), whole_keys.to(FP8).float())
    assert torch.equal(values.float(), whole_values.to(FP8).float())
    assert not torch.equal(values.float(), whole_values.float())


def test_what_is_too_large_saturates_and_nan_stays():
    spec = QKVSpec(0, 1, 8, 1e-6)
    row = torch.tensor([449.0, -464.1, 480.0, -1e30, torch.inf, -torch.inf, torch.nan, 0.002])
    _, _, values = write(TorchKernels(CPU, torch.float32), torch.cat([row, row])[None], spec, FP8)
    stored = values.view(-1, 8)[0].float()
    assert stored[:6].tolist() == [448.0, -448.0, 448.0, -448.0, 448.0, -448.0]
    assert stored[6].isnan() and stored[7] == 2**-9


@pytest.mark.parametrize("window", [None, 3])
def test_attention_is_that_over_the_rounded_values(window):
    """Of the earlier rows and of the step's own: nothing is attended but what was stored."""
    kernels, spec = TorchKernels(CPU, torch.float32), QKVSpec(2, 1, 8, 1e-6)
    view = PageView(
        query_start=torch.tensor([0, 4], dtype=torch.int32),
        context_lens=torch.tensor([2], dtype=torch.int32),
        block_table=torch.tensor([[0, 1]], dtype=torch.int32),
        slots=torch.arange(2, 6),
        page_size=4,
        max_query_len=4,
        max_key_len=6,
    )
    query, keys, values = write(kernels, torch.randn(6, spec.width), spec, FP8)
    rule = {"scale": 0.3, "window": window, "mask": CAUSAL}
    found = kernels.attention(query[2:], PagedKeys(keys, values, view, **rule))
    expected = kernels.attention(query[2:], PagedKeys(keys.float(), values.float(), view, **rule))
    assert torch.equal(found, expected)


def test_the_engine_stores_both_models_in_8_bits():
    target = zoo.tiny_target("gemma4", zoo.kernels("torch"), taps=(0, 2))
    engine = Engine(target, zoo.tiny_drafter(target.kernels), DRAFTED)
    zoo.run(engine, zoo.mixed_requests(2, max_tokens=10))
    assert {tensor.dtype for tensor in storage(engine)} == {FP8}
    assert all(tensor.view(torch.uint8).any() for tensor in storage(engine))


# -- what it takes -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_the_same_memory_holds_as_many_times_more_pages(family):
    target = zoo.tiny_target(family, zoo.kernels("torch"))
    layers, pages = cache_layers(target.config, None), {}
    budget = 50 * 16 * sum(bytes_per_token(layers, torch.float32).values())
    for kv_dtype in ("auto", "fp8"):
        config = EngineConfig(
            max_batch=64, cache=CacheOptions(cache_gb=budget / GB, kv_dtype=kv_dtype)
        )
        cache, _ = build_cache(target, None, config)
        pages[kv_dtype] = sum(pool.num_pages for pool in cache.book_pools)
        scratch = sum(tensor[0].nbytes for pair in cache._storage for tensor in pair)
        size = sum(tensor.nbytes for pair in cache._storage for tensor in pair)
        assert 0.95 * budget < size - scratch <= budget
    assert pages["fp8"] == 4 * pages["auto"]


def test_half_of_bfloat16_and_the_context_that_follows(caplog):
    target = zoo.tiny_target("llama", TorchKernels(CPU, torch.bfloat16))
    per_token = sum(bytes_per_token(cache_layers(target.config, None), torch.bfloat16).values())
    config = EngineConfig(cache=CacheOptions(cache_gb=160 * per_token / GB))
    assert build_cache(target, None, config)[1] == 160
    caplog.set_level(logging.INFO, logger="flashdraft")
    assert (
        build_cache(
            target,
            None,
            dataclasses.replace(config, cache=dataclasses.replace(config.cache, kv_dtype="fp8")),
        )[1]
        == 320
    )
    assert "of float8_e4m3fn, sequences up to 320 tokens" in caplog.text
    too_long = dataclasses.replace(
        config, max_context=321, cache=dataclasses.replace(config.cache, kv_dtype="fp8")
    )
    with pytest.raises(CapacityError, match="at most 320 is possible"):
        build_cache(target, None, too_long)


# -- who refuses it ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["FP8", "int8", "", None, 8, ["fp8"]])
def test_other_names_are_refused(value):
    with pytest.raises(RequestError, match="kv_dtype is .*; it must be 'auto' or 'fp8'"):
        EngineConfig(cache=CacheOptions(kv_dtype=value))


def test_the_native_cpu_kernels_refuse_it_before_anything_is_loaded():
    for dtype, name in (("float32", "cpu-float32"), ("auto", "cpu-int8")):
        with pytest.raises(RequestError, match=rf"{name}.*use a GPU, or dtype='bfloat16'.*'auto'"):
            LLM("no-such-model", device="cpu", dtype=dtype, kv_dtype="fp8")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
def test_cards_without_the_conversion_refuse_it(capability, monkeypatch):
    backend = pytest.importorskip("flashdraft.kernels.cuda.backend")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    why = backend.why_no_fp8(torch.device("cuda"))
    kernels = SimpleNamespace(dtype=torch.bfloat16, why_no_fp8_cache=why)
    assert stored_dtype(kernels, "auto") == torch.bfloat16
    if capability >= (8, 9):
        assert stored_dtype(kernels, "fp8") == FP8
    else:
        found = ".".join(map(str, capability))
        with pytest.raises(RequestError, match=rf"capability {found}, .*needs 8.9.*'auto'"):
            stored_dtype(kernels, "fp8")
    plain_torch = TorchKernels(torch.device("cuda"), torch.bfloat16)
    assert stored_dtype(plain_torch, "fp8") == FP8, "torch converts on any device"


# -- the law -------------------------------------------------------------------------------------


@functools.cache
def plain_answers(family):
    """Each request decoded alone, plainly, in an engine of its own."""
    target = zoo.tiny_target(family, zoo.kernels("torch"))
    requests, answers = zoo.mixed_requests(4, max_tokens=12), {}
    for request in requests:
        answers.update(zoo.run(Engine(target, config=PLAIN), [request]))
    return requests, tokens(answers)


@pytest.mark.parametrize("family", FAMILIES)
def test_scripted_drafts_do_not_change_a_token(family):
    requests, expected = plain_answers(family)
    target = zoo.tiny_target(family, zoo.kernels("torch"))
    proposer = zoo.ScriptedProposer(expected, 0.2, max_drafts=7)
    engine = Engine(target, config=dataclasses.replace(DRAFTED, verify=7), proposer=proposer)
    drafted = zoo.run(engine, requests)
    assert tokens(drafted) == expected
    assert sum(g.stats.accepted for g in drafted.values()) > 10


@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_preemption_prefix_hits_and_small_chunks(family):
    requests, expected = plain_answers(family)
    target = zoo.tiny_target(family, zoo.kernels("torch"), taps=(0, 2))
    drafter = zoo.tiny_drafter(target.kernels)
    small = zoo.cache_for(target, drafter, 7) / 4  # that is of float32
    cache = dataclasses.replace(DRAFTED.cache, cache_gb=small)
    tight = dataclasses.replace(DRAFTED, prefill_chunk=7, max_step_tokens=40, cache=cache)
    first = zoo.run(Engine(target, drafter, tight), requests)
    assert tokens(first) == expected
    assert sum(g.stats.preemptions for g in first.values()) > 0
    roomy = Engine(
        target,
        drafter,
        dataclasses.replace(tight, cache=dataclasses.replace(tight.cache, cache_gb=0.01)),
    )
    again = [dataclasses.replace(r, id=f"again-{r.id}") for r in requests]
    assert tokens(zoo.run(roomy, requests)) == expected
    second = zoo.run(roomy, again)
    assert {key.removeprefix("again-"): ids for key, ids in tokens(second).items()} == expected
    assert sum(g.stats.cached_tokens for g in second.values()) > 0


@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
def test_log_probabilities_are_those_of_any_chunks_and_not_those_of_the_whole_cache(family):
    target = zoo.tiny_target(family, zoo.kernels("torch"), taps=(0, 2))
    drafter = zoo.tiny_drafter(target.kernels)
    params = SamplingParams(max_tokens=10, ignore_eos=True, logprobs=2)
    request = Request("a", [5 + (7 * i) % 60 for i in range(50)], params, seed=1)

    def logprobs(**settings):
        config = dataclasses.replace(DRAFTED, **settings)
        return zoo.run(Engine(target, drafter, config), [request])["a"].logprobs

    expected = logprobs(verify=0)
    assert logprobs() == logprobs(prefill_chunk=9) == expected
    assert logprobs(cache=CacheOptions(cache_gb=DRAFTED.cache.cache_gb)) != expected


def test_drafts_follow_the_same_cache_when_warm():
    """A hit carries the drafter's 8 bits too: the second answer is drafted as the first was."""
    target = zoo.tiny_target("gemma4", zoo.kernels("torch"), taps=(0, 2))
    engine = Engine(target, zoo.tiny_drafter(target.kernels), DRAFTED)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    request = Request("a", [5 + (7 * i) % 60 for i in range(50)], params, seed=1)
    cold, warm = (zoo.run(engine, [request])["a"] for _ in range(2))
    assert warm.stats.cached_tokens >= 48 and warm.token_ids == cold.token_ids
    assert warm.drafted == cold.drafted


# -- from the outside ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    target = make_tiny_checkpoint(tmp_path_factory.mktemp("target"), "qwen3")
    return target, make_tiny_drafter(tmp_path_factory.mktemp("drafter"))


def test_an_llm_drafts_and_decodes_plainly_alike(folders):
    options = {"device": "cpu", "dtype": "bfloat16", "cache_gb": 0.01, "kv_dtype": "fp8"}
    target, drafter = map(str, folders)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = ["the quick fox", "a lazy dog and another one"]
    drafted = LLM(target, draft=drafter, verify=4, **options)
    plain = LLM(target, draft=None, **options)
    texts = [[one.text for one in llm.generate(prompts, params)] for llm in (drafted, plain)]
    assert texts[0] == texts[1]
    assert {tensor.dtype for tensor in storage(drafted.engine)} == {FP8}


def test_the_flag_reaches_the_cache(folders):
    flags = ["--model", str(folders[0]), "--device", "cpu", "--dtype", "bfloat16"]
    flags += ["--draft", "none", "--cache-gb", "0.01"]
    for given, dtype in (([], torch.bfloat16), (["--kv-dtype", "fp8"], FP8)):
        llm = load_model(build_parser().parse_args(["generate", "hello", *flags, *given]))
        assert {tensor.dtype for tensor in storage(llm.engine)} == {dtype}


def test_a_cache_has_the_kernels_dtype_unless_told():
    target = zoo.tiny_target("llama", zoo.kernels("torch"))
    cache = KVCache(cache_layers(target.config, None), {None: 2}, 16, target.kernels)
    assert {tensor.dtype for pair in cache._storage for tensor in pair} == {torch.float32}
