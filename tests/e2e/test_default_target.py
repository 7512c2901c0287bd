"""The default target itself: the law on real prompts, and transformers' own text."""

from __future__ import annotations

import functools
import random
import subprocess
import sys

import pytest
import torch

from flashdraft import LLM, SamplingParams
from flashdraft.core import Request
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.registry import build_target
from flashdraft.models.sources import resolve_source
from tests import zoo
from tests.prompts import PROMPTS

pytestmark = [pytest.mark.weights, pytest.mark.alone, pytest.mark.timeout(900)]

MODEL = "smollm2-135m"


@functools.cache
def load(dtype: str, draft: str | None = "ngram") -> LLM:
    return LLM(MODEL, dtype=dtype, draft=draft, device="cpu", max_batch=8, cache_gb=1.0)


def prompt_ids(llm: LLM) -> list[list[int]]:
    return [llm.chat_prompt([{"role": "user", "content": prompt}]) for prompt in PROMPTS]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_law_on_twenty_prompts(dtype):
    """Greedy and sampled: alone and plain against batches of drafts right three times in four."""
    llm = load(dtype)
    requests = [
        Request(
            f"r{i}",
            ids,
            SamplingParams(max_tokens=40, temperature=0.8 if i % 2 else 0.0, top_p=0.95),
            seed=i,
        )
        for i, ids in enumerate(prompt_ids(llm))
    ]
    plain = Engine(llm.engine.target, config=EngineConfig(verify=0, ngram=False, max_batch=1))
    expected = {key: g.token_ids for key, g in zoo.run(plain, requests).items()}
    answers = {key: list(tokens) for key, tokens in expected.items()}
    proposer = zoo.ScriptedProposer(answers, 0.25, max_drafts=15)
    config = EngineConfig(
        max_batch=8, prefill_chunk=24, cache=CacheOptions(cache_gb=0.06), verify=7
    )
    drafted = Engine(llm.engine.target, config=config, proposer=proposer)
    result = zoo.run(drafted, requests)
    assert {key: g.token_ids for key, g in result.items()} == expected
    assert sum(g.stats.accepted for g in result.values()) > 100


@pytest.mark.timeout(1200)  # two models in float32: minutes on a small machine
def test_greedy_text_equals_transformers_over_128_tokens():
    """At every place its first choice, after our tokens so far, is ours: so its text is ours."""
    transformers = pytest.importorskip("transformers")
    llm = load("float32")
    checkpoint = open_checkpoint(resolve_source(MODEL).path)
    raw = checkpoint.raw_config
    config = transformers.LlamaConfig(**{k: v for k, v in raw.items() if k != "model_type"})
    model = transformers.LlamaForCausalLM(config).eval()
    state = {name: checkpoint.source.read(name).float() for name in checkpoint.source.names()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    ids = prompt_ids(llm)
    ours = llm.generate(ids, SamplingParams(max_tokens=128))
    for prompt, answer in zip(ids, ours, strict=True):
        found = list(answer.token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + found[:-1]])).logits[0, len(prompt) - 1 :]
        assert found == logits.argmax(1).tolist()
        ends = [token in checkpoint.config.eos_token_ids for token in found]
        assert not any(ends[:-1]) and (ends[-1] or len(found) == 128)


def test_int8_agrees_with_float32_on_most_tokens():
    """Teacher-forced: how often both formats would choose the same next token."""
    full, small = load("float32"), load("int8")
    random.seed(0)
    agreed = total = 0
    for prompt in prompt_ids(full)[:6]:
        answer = full.generate([prompt], SamplingParams(max_tokens=48))[0].token_ids
        for end in range(0, len(answer), 6):
            forced = prompt + answer[:end]
            one = small.generate([forced], SamplingParams(max_tokens=1, ignore_eos=True))[0]
            agreed += one.token_ids[0] == answer[end]
            total += 1
    assert agreed / total > 0.85


def test_a_target_built_twice_is_the_same():
    llm = load("int8")
    checkpoint = open_checkpoint(resolve_source(MODEL).path)
    again = build_target(checkpoint.config, checkpoint.source, llm.kernels)
    request = Request("a", prompt_ids(llm)[0], SamplingParams(max_tokens=12), seed=0)
    config = EngineConfig(verify=0, ngram=False)
    first = zoo.run(Engine(llm.engine.target, config=config), [request])["a"]
    assert zoo.run(Engine(again, config=config), [request])["a"].token_ids == first.token_ids


@pytest.mark.weights
def test_a_forked_process_goes_on_drafting() -> None:
    """With a prompt and an answer long enough that torch would use threads of its own."""
    script = (
        "import os, signal, sys\n"
        "from flashdraft import LLM, SamplingParams\n"
        "llm = LLM(max_context=512)\n"
        "params = SamplingParams(max_tokens=24, ignore_eos=True)\n"
        "ask = lambda first: llm.generate([list(range(first, first + 300))], params)[0].token_ids\n"
        "expected = ask(500)\n"
        "ask(100)\n"
        "llm.engine.book.forget_cached()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(100)\n"
        "    os._exit(ask(500) != expected)\n"
        "sys.exit(os.waitpid(child, 0)[1] != 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=280, check=False)
    assert done.returncode == 0
