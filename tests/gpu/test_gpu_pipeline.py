"""Steps as CUDA graphs, read one behind: on exact kernels they change no token."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time

import pytest
import torch

from flashdraft.core import Request, SamplingParams
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.engine.step.trees import Proposed
from flashdraft.engine.streams import MOST_GRAPHS, Graphs
from flashdraft.kernels.select import select_kernels
from tests import zoo
from tests.unit.engine.step.test_pipeline import Oracle, greedy_requests, tokens

pytestmark = pytest.mark.gpu

PLAIN = EngineConfig(verify=0, ngram=False, cache=CacheOptions(cache_gb=0.05), run_ahead=False)
AHEAD = EngineConfig(verify=7, ngram=False, cache=CacheOptions(cache_gb=0.05), max_batch=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", list(zoo.CONFIGS))
def test_exact_steps_change_no_token(family, dtype):
    kernels = select_kernels("cuda", dtype, exact=True)
    target = zoo.tiny_target(family, kernels, taps=(0, 2))
    requests = greedy_requests(9)
    expected = tokens(zoo.run(Engine(target, config=PLAIN), requests))
    for verify in (None, 0, 1, 7):
        config = dataclasses.replace(AHEAD, verify=verify)
        engine = Engine(target, zoo.tiny_drafter(kernels, 8), config)
        assert tokens(zoo.run(engine, requests)) == expected
        assert tokens(zoo.run(engine, requests)) == expected  # now with everything captured
        assert len(engine._pipeline._steps.graphs)


@pytest.mark.parametrize("family", ["llama", "gemma4_moe"])
def test_replayed_steps_are_the_steps_that_were_captured(family):
    kernels = select_kernels("cuda", "bfloat16")
    target = zoo.tiny_target(family, kernels, taps=(0, 2))
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    requests = [Request(f"r{i}", [5 + i, 9, 12], params, i) for i in range(4)]
    engines = [Engine(target, zoo.tiny_drafter(kernels, 8), AHEAD) for _ in range(2)]
    engines[1].steps.graphs.call = lambda key, function: function()
    first, second = (tokens(zoo.run(engine, requests)) for engine in engines)
    assert first == second


@pytest.mark.parametrize("has_drafter", [False, True])
def test_nothing_is_captured_once_steps_are_prepared(has_drafter):
    kernels = select_kernels("cuda", "bfloat16")
    target = zoo.tiny_target("gemma4", kernels, taps=(0, 2))
    drafter = zoo.tiny_drafter(kernels, 8) if has_drafter else None
    config = dataclasses.replace(AHEAD, verify=None, ngram=True, max_batch=12)
    engine = Engine(target, drafter, config)
    engine.prepare(seconds=120.0)
    prepared = set(engine.steps.graphs)
    assert 0 < len(prepared) <= MOST_GRAPHS and not engine.steps.graphs.failed
    kinds = [{}, {"temperature": 1.0, "top_p": 0.9}, {"logprobs": 3, "presence_penalty": 0.5}]
    requests = [
        Request(f"r{i}", [5 + i, 9, 12, 9, 12] * (1 + 5 * i), SamplingParams(max_tokens=60, **k), i)
        for i, k in enumerate(kinds * 6)
    ]
    zoo.run(engine, requests)
    assert set(engine.steps.graphs) == prepared


def test_sampled_steps_change_no_token():
    kernels = select_kernels("cuda", "float32", exact=True)
    target = zoo.tiny_target("gemma4", kernels, taps=(0, 2))
    settings = [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}, {}]
    requests = [
        Request(f"r{i}", [5 + i, 9, 30], SamplingParams(max_tokens=40, **settings[i % 3]), i)
        for i in range(6)
    ]
    expected = tokens(zoo.run(Engine(target, config=PLAIN), requests))
    engine = Engine(target, zoo.tiny_drafter(kernels, 8), AHEAD)
    for _ in range(3):
        assert tokens(zoo.run(engine, requests)) == expected


def test_the_host_is_one_step_behind():
    kernels = select_kernels("cuda", "bfloat16")
    target = zoo.tiny_target("llama", kernels)
    engine = Engine(target, config=dataclasses.replace(AHEAD, verify=0))
    engine.submit(Request("r", [5, 6, 7], SamplingParams(max_tokens=300, ignore_eos=True), 0))
    while engine.has_work:
        engine.step()
        if not engine._pipeline.is_flying and engine.has_work:
            assert engine._pipeline._num_launched < 3 or engine._live["r"].sequence.num_left < 3
    torch.cuda.synchronize()
    begin = time.perf_counter()
    engine.submit(Request("r", [5, 6, 7], SamplingParams(max_tokens=300, ignore_eos=True), 0))
    while engine.has_work:
        engine.step()
    assert (time.perf_counter() - begin) / 300 < 0.003


def test_a_drafter_that_is_right_is_accepted():
    kernels = select_kernels("cuda", "float32", exact=True)
    target = zoo.tiny_target("gemma4", kernels, taps=(0, 2))
    requests = greedy_requests(6)
    free = [
        dataclasses.replace(r, params=dataclasses.replace(r.params, ignore_eos=True, max_tokens=60))
        for r in requests
    ]
    answers = tokens(zoo.run(Engine(target, config=PLAIN), free))
    engine = Engine(target, zoo.tiny_drafter(kernels, 8), AHEAD)
    engine._pipeline._steps.graphs.captures = False  # the oracle works on the host
    host = Oracle(engine, answers, wrong=0.3)

    engine.steps.pieces._drafts_of = lambda shape: Proposed(*(x.cuda() for x in host.draft(shape)))
    drafted = zoo.run(engine, requests)
    assert tokens(drafted) == tokens(zoo.run(Engine(target, config=PLAIN), requests))
    assert sum(g.stats.accepted for g in drafted.values()) > 10


def test_what_cannot_be_captured_costs_no_other_its_graph():
    device = torch.device("cuda")
    graphs, x = Graphs(device), torch.ones(8, device=device)
    for key, function in (("waits", lambda: x.sum().item()), ("adds", lambda: x + 1)):
        graphs.call(key, function)
        graphs.call(key, function)  # run as it is where a capture went wrong
    assert graphs.failed == {"waits"} and list(graphs) == ["adds"]
    assert torch.equal(graphs.call("adds", lambda: x + 1), torch.full_like(x, 2))


COMPILED_AHEAD = """
import subprocess, sys, tempfile
from pathlib import Path
from flashdraft.children import module_command, python_environment
from flashdraft.engine import ahead
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.kernels.select import select_kernels
from tests import zoo

folder, family, tree = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
kernels = select_kernels("cuda", "bfloat16")
target = zoo.tiny_target(family, kernels, taps=(0, 2))
settings = {"tree": int(tree)} if int(tree) else {}
config = EngineConfig(ngram=True, cache=CacheOptions(cache_gb=0.05), max_batch=12, **settings)
engine = Engine(target, zoo.tiny_drafter(kernels, 8), config)
count = lambda: len({path.parent for path in folder.rglob("*.cubin")})
before, rows = count(), engine.scheduler.max_step_tokens
words = ahead.describe((engine.steps, rows, tuple(kernels.compiles_for)))
subprocess.run(module_command(ahead.__name__), input=words, env=python_environment(), check=True)
by_child = count() - before
ahead._start = lambda described: subprocess.Popen(["true"])
engine.prepare(200.0)
print(by_child, count() - before - by_child)
"""


@pytest.mark.parametrize("family, tree", [("gemma4", 0), ("gemma4", 15), ("gemma4_moe", 0)])
def test_what_is_compiled_ahead_is_what_is_launched(tmp_path, family, tree):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", COMPILED_AHEAD, str(tmp_path), family, str(tree)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    by_child, missing = map(int, said.stdout.split())
    assert by_child > 20 and missing == 0
