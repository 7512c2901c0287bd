"""Keys that are not stored: what the cache keeps, what it takes, who refuses it, and the law."""

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
from flashdraft.engine.cache.layers import CacheLayer, bytes_per_token, cache_layers
from flashdraft.engine.cache.memory import build_cache
from flashdraft.engine.cache.planning import GB
from flashdraft.engine.cache.storage import KVCache, check_keys
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.errors import CapacityError, RequestError
from flashdraft.kernels.select import select_kernels
from flashdraft.kernels.torch_backend import TorchKernels
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.registry import build_target
from tests import zoo
from tests.tiny import make_tiny_checkpoint, make_tiny_drafter

CPU = torch.device("cpu")
PLAIN = EngineConfig(verify=0, ngram=False, cache=CacheOptions(cache_gb=0.01, kv_keys="rebuilt"))
DRAFTED = EngineConfig(verify=5, cache=CacheOptions(cache_gb=0.01, kv_keys="rebuilt"))
FAMILIES = ["gemma4", "gemma4_moe"]
KV_DTYPES = ["auto", "fp8"]


def tokens(generations):
    return {key: generation.token_ids for key, generation in generations.items()}


def storage(engine):
    return engine.cache._storage


# -- what is kept --------------------------------------------------------------------------------


def test_full_layers_keep_the_value_alone_and_the_drafter_both():
    target = zoo.tiny_target("gemma4", zoo.kernels("torch"), taps=(0, 2))
    engine = Engine(target, zoo.tiny_drafter(target.kernels), DRAFTED)
    zoo.run(engine, zoo.mixed_requests(2, max_tokens=10))
    kept = [key is not None for key, _ in storage(engine)]
    assert kept == [True, True, False, False, True, True]
    assert all(value.any() for _, value in storage(engine))


def test_a_layer_has_one_tensor_or_two():
    layers = [CacheLayer(2, 8, None), CacheLayer(1, 16, None, has_keys=False), CacheLayer(1, 4, 24)]
    cache = KVCache(layers, {None: 3, 24: 2}, 4, zoo.kernels("torch"))
    shapes = [
        (key is None or key.shape == value.shape, value.shape) for key, value in cache._storage
    ]
    assert shapes == [(True, (4, 4, 2, 8)), (True, (4, 4, 1, 16)), (True, (3, 4, 1, 4))]
    assert [key is None for key, _ in cache._storage] == [False, True, False]
    per_token = bytes_per_token(layers, torch.bfloat16)
    assert per_token == {None: (2 * 2 * 8 + 1 * 16) * 2, 24: 2 * 4 * 2}


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_bytes_of_the_shared_layers_are_halved_exactly(kv_dtype):
    target = zoo.tiny_target("gemma4", zoo.kernels("torch"))
    dtype = torch.float32 if kv_dtype == "auto" else torch.float8_e4m3fn
    stored, rebuilt = (
        bytes_per_token(cache_layers(target.config, None, way), dtype)
        for way in ("stored", "rebuilt")
    )
    assert rebuilt == {None: stored[None] // 2, 20: stored[20]} and stored[None] % 2 == 0
    sizes = {}
    for way in ("stored", "rebuilt"):
        config = EngineConfig(
            cache=CacheOptions(cache_gb=1.0, kv_dtype=kv_dtype, kv_keys=way), max_batch=2
        )
        cache, _ = build_cache(target, None, config)
        full = [pair for pair in cache._storage if pair[1].shape[3] == 16]
        sizes[way] = sum(one.nbytes for pair in full for one in pair if one is not None)
    assert sizes["stored"] == 2 * sizes["rebuilt"]


def test_the_same_memory_holds_a_longer_context(caplog):
    kernels = TorchKernels(CPU, torch.bfloat16)
    config = ModelConfig.from_hf({**zoo.CONFIGS["gemma4"], "layer_types": ["full_attention"] * 4})
    tensors = zoo.Tensors(zoo.random_tensors(config))
    target = build_target(config, tensors, kernels, ())
    per_token = sum(bytes_per_token(cache_layers(target.config, None), torch.bfloat16).values())
    engine_config = EngineConfig(cache=CacheOptions(cache_gb=160 * per_token / GB))
    assert build_cache(target, None, engine_config)[1] == 160
    rebuilt = dataclasses.replace(
        engine_config, cache=dataclasses.replace(engine_config.cache, kv_keys="rebuilt")
    )
    caplog.set_level(logging.INFO, logger="flashdraft")
    assert build_cache(target, None, rebuilt)[1] == 320
    assert "of bfloat16, keys rebuilt, sequences up to 320 tokens" in caplog.text
    with pytest.raises(CapacityError, match="at most 320 is possible"):
        build_cache(target, None, dataclasses.replace(rebuilt, max_context=321))


@pytest.mark.parametrize(
    ("family", "kv_keys", "helps"),
    [("gemma4", "stored", True), ("gemma4", "rebuilt", False), ("llama", "stored", False)],
)
def test_it_is_advised_on_a_gpu_where_it_would_help(family, kv_keys, helps):
    kernels = TorchKernels(torch.device("cuda"), torch.bfloat16)
    model = ModelConfig.from_hf(zoo.CONFIGS[family])
    target = SimpleNamespace(kernels=kernels, config=model, vision=None)
    config = EngineConfig(cache=CacheOptions(cache_gb=1e-5, kv_keys=kv_keys), max_context=500)
    with pytest.raises(CapacityError, match="kv_dtype='fp8'") as caught:
        build_cache(target, None, config)
    assert ("kv_keys='rebuilt'" in str(caught.value)) == helps


# -- who refuses it ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["Rebuilt", "none", "", None, True, ["rebuilt"]])
def test_other_names_are_refused(value):
    with pytest.raises(RequestError, match="kv_keys is .*; it must be 'stored' or 'rebuilt'"):
        EngineConfig(cache=CacheOptions(kv_keys=value))


def test_the_native_cpu_kernels_refuse_it_before_anything_is_loaded():
    for dtype, name in (("float32", "cpu-float32"), ("auto", "cpu-int8")):
        remedy = rf"{name}.*for a Gemma 4 whose .*use a GPU, or dtype='bfloat16'.*kv_keys='stored'"
        with pytest.raises(RequestError, match=remedy):
            LLM("no-such-model", device="cpu", dtype=dtype, kv_keys="rebuilt")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_target_that_shares_nothing_refuses_it(family, tmp_path, monkeypatch):
    folder = make_tiny_checkpoint(tmp_path, family)
    monkeypatch.setattr(
        "flashdraft.models.pairs.OpenPair.build", lambda *given: pytest.fail("weights were read")
    )
    name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family]
    with pytest.raises(RequestError, match=rf"'rebuilt', but {name} has .*kv_keys='stored'"):
        LLM(str(folder), draft=None, device="cpu", dtype="bfloat16", kv_keys="rebuilt")
    with pytest.raises(RequestError, match="kv_keys is 'rebuilt'"):
        Engine(zoo.tiny_target(family, zoo.kernels("torch")), config=PLAIN)


def test_a_gemma_of_two_projections_refuses_it_too():
    config = ModelConfig.from_hf({**zoo.CONFIGS["gemma4"], "attention_k_eq_v": False})
    with pytest.raises(RequestError, match="a projection of its own for values"):
        check_keys(zoo.kernels("torch"), "rebuilt", config)
    check_keys(zoo.kernels("torch"), "stored", config)
    # no other dtype would help: that is said first
    with pytest.raises(RequestError, match="a projection of its own") as refusal:
        check_keys(select_kernels("cpu", "float32"), "rebuilt", config)
    assert "bfloat16" not in str(refusal.value)


# -- the law -------------------------------------------------------------------------------------


@functools.cache
def plain_answers(family, kv_dtype, kv_keys="rebuilt"):
    """Each request decoded alone, plainly, in an engine of its own."""
    target = zoo.tiny_target(family, zoo.kernels("torch"))
    requests, answers = zoo.mixed_requests(4, max_tokens=12), {}
    config = dataclasses.replace(
        PLAIN, cache=dataclasses.replace(PLAIN.cache, kv_dtype=kv_dtype, kv_keys=kv_keys)
    )
    for request in requests:
        answers.update(zoo.run(Engine(target, config=config), [request]))
    return requests, tokens(answers)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float32_the_text_is_that_of_stored_keys(family):
    """The keys are the same to the bit, so every token is."""
    assert plain_answers(family, "auto") == plain_answers(family, "auto", "stored")


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_scripted_drafts_do_not_change_a_token(family, kv_dtype):
    requests, expected = plain_answers(family, kv_dtype)
    target = zoo.tiny_target(family, zoo.kernels("torch"))
    proposer = zoo.ScriptedProposer(expected, 0.2, max_drafts=7)
    config = dataclasses.replace(
        DRAFTED, verify=7, cache=dataclasses.replace(DRAFTED.cache, kv_dtype=kv_dtype)
    )
    drafted = zoo.run(Engine(target, config=config, proposer=proposer), requests)
    assert tokens(drafted) == expected
    assert sum(g.stats.accepted for g in drafted.values()) > 10


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_preemption_prefix_hits_and_small_chunks(kv_dtype):
    requests, expected = plain_answers("gemma4", kv_dtype)
    target = zoo.tiny_target("gemma4", zoo.kernels("torch"), taps=(0, 2))
    drafter = zoo.tiny_drafter(target.kernels)
    per_token = bytes_per_token(
        cache_layers(target.config, drafter.config, "rebuilt"), torch.float32
    )
    share = 1 if kv_dtype == "auto" else 4
    tight = dataclasses.replace(
        DRAFTED,
        prefill_chunk=7,
        max_step_tokens=40,
        cache=dataclasses.replace(
            DRAFTED.cache, cache_gb=sum(per_token.values()) * 16 * 7 / share / GB, kv_dtype=kv_dtype
        ),
    )
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


@pytest.mark.parametrize("run_ahead", [False, True])
def test_steps_ahead_of_the_host_read_the_same_cache(run_ahead):
    requests, expected = plain_answers("gemma4", "auto")
    target = zoo.tiny_target("gemma4", zoo.kernels("torch"), taps=(0, 2))
    config = dataclasses.replace(DRAFTED, run_ahead=run_ahead)
    engine = Engine(target, zoo.tiny_drafter(target.kernels), config)
    assert tokens(zoo.run(engine, requests)) == expected


def test_log_probabilities_of_8_bits_are_those_of_any_chunks_and_not_those_of_rounded_keys():
    target = zoo.tiny_target("gemma4", zoo.kernels("torch"))
    params = SamplingParams(max_tokens=10, ignore_eos=True, logprobs=2)
    request = Request("a", [5 + (7 * i) % 60 for i in range(50)], params, seed=1)

    def logprobs(kv_keys="rebuilt", **settings):
        cache = dataclasses.replace(PLAIN.cache, kv_dtype="fp8", kv_keys=kv_keys)
        config = dataclasses.replace(PLAIN, cache=cache, **settings)
        return zoo.run(Engine(target, config=config), [request])["a"].logprobs

    expected = logprobs()
    assert logprobs(prefill_chunk=9) == expected
    assert logprobs(kv_keys="stored") != expected


# -- from the outside ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    target = make_tiny_checkpoint(tmp_path_factory.mktemp("target"), "gemma4")
    return target, make_tiny_drafter(tmp_path_factory.mktemp("drafter"))


def test_an_llm_drafts_and_decodes_plainly_alike(folders):
    options = {"device": "cpu", "dtype": "bfloat16", "cache_gb": 0.01, "kv_keys": "rebuilt"}
    target, drafter = map(str, folders)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = ["the quick fox", "a lazy dog and another one"]
    drafted = LLM(target, draft=drafter, verify=4, **options)
    plain = LLM(target, draft=None, **options)
    texts = [[one.text for one in llm.generate(prompts, params)] for llm in (drafted, plain)]
    assert texts[0] == texts[1]
    assert [key is None for key, _ in storage(drafted.engine)] == [False, True, False]


def test_the_flag_reaches_the_cache(folders):
    flags = ["--model", str(folders[0]), "--device", "cpu", "--dtype", "bfloat16"]
    flags += ["--draft", "none", "--cache-gb", "0.01"]
    for given, is_rebuilt in (([], False), (["--kv-keys", "rebuilt"], True)):
        llm = load_model(build_parser().parse_args(["generate", "hello", *flags, *given]))
        assert [key is None for key, _ in storage(llm.engine)] == [False, is_rebuilt]
