"""The default pair on a vLLM that `flashdraft serve --engine vllm` started.

The same text as ours, as many accepted tokens, healthy sampling, counters that the bench reads.
vLLM's CPU runner is its V1 runner; the V2 runner of its GPU releases is not reached here.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashdraft import LLM, Generation, SamplingParams
from flashdraft.bench.run.counters import Page, acceptance_between, look
from flashdraft.bench.run.served import find_served
from flashdraft.bench.run.stream import Endpoint
from flashdraft.cli import main
from flashdraft.core import Request
from tests import zoo
from tests.prompts import PROMPTS
from tests.vllm.vllm_processes import Server, free_port, serving

pytestmark = [pytest.mark.vllm, pytest.mark.weights, pytest.mark.timeout(900)]

MODEL = "smollm2-135m"
VERIFY = 15
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, dtype="float32", device="cpu", verify=VERIFY, max_batch=4, max_context=1024)


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    return [llm.chat_prompt([{"role": "user", "content": prompt}]) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def ours(llm: LLM, prompts: list[list[int]]) -> list[Generation]:
    return llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS))


@pytest.fixture(scope="module")
def server(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Started as a user starts it; the target is written out for vLLM by the command itself."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "flashdraft", "serve", MODEL, "--dtype", "float32"),
        *("--engine", "vllm", "--engine-python", str(vllm_python), "--port", str(port)),
        *("--max-context", "1024", "--max-batch", "4"),
    ]
    log = tmp_path_factory.mktemp("vllm") / "log.txt"
    with serving(command, f"http://127.0.0.1:{port}", log) as started:
        yield started
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "vLLM outlived the command"


def complete(server: Server, prompt: list[int], **settings: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "return_token_ids": True, **settings}
    return server.post("/v1/completions", body)


def complete_all(server: Server, prompts: list[list[int]], **settings: Any) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda prompt: complete(server, prompt, **settings), prompts))


@pytest.fixture(scope="module")
def looks(server: Server, prompts: list[list[int]]) -> tuple[list[dict[str, Any]], Page, Page]:
    """vLLM's greedy answers, and its counters before and after them."""
    endpoint = Endpoint.parse(server.url)
    before = look(endpoint)
    answers = complete_all(server, prompts, temperature=0, max_tokens=MAX_TOKENS)
    after = look(endpoint)
    assert before is not None and after is not None, "vLLM has no metrics"
    return answers, before, after


def test_the_bench_knows_the_server(server: Server) -> None:
    served = find_served(Endpoint.parse(server.url), None)
    assert (served.kind, served.model, served.has_metrics) == ("vllm", MODEL, True)


def test_greedy_answers_are_ours(ours: list[Generation], looks: Any) -> None:
    answers, _, _ = looks
    assert len(answers) == len(ours) == 20
    for prompt, mine, theirs in zip(PROMPTS, ours, answers, strict=True):
        assert "status" not in theirs, theirs
        choice = theirs["choices"][0]
        assert choice["token_ids"] == mine.token_ids, prompt
        assert choice["text"] == mine.text, prompt


def test_accepted_length_is_ours(ours: list[Generation], looks: Any) -> None:
    """Pooled: the tokens of all decode steps by their number; prefills give a token each.

    vLLM's own counters also count what it accepts beyond an answer's last token, and are a little
    higher for it where answers are short.
    """
    answers, before, after = looks
    theirs = acceptance_between("vllm", before, after)
    assert theirs is not None and len(theirs.verified) == VERIFY
    drafts = theirs.verified[0]
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers) - len(answers)
    steps = sum(answer.stats.steps for answer in ours)
    assert sum(answer.stats.decode_tokens for answer in ours) == tokens
    counted = 1 + sum(theirs.accepted) / drafts
    print(
        f"\naccepted length, pooled: ours {tokens / steps:.3f} ({steps} steps), "
        f"vLLM {tokens / drafts:.3f} ({drafts} steps; by its counters {counted:.3f})"
    )
    assert tokens / steps > 1.5, "the drafter does nothing, and the comparison says nothing"
    assert abs(steps / drafts - 1) < 0.05
    assert tokens / drafts <= counted < 1.15 * tokens / drafts


def test_the_bench_command_measures_it(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accepted lengths come from vLLM's counters; only the baseline, another server, is missing."""
    path = tmp_path / "bench.json"
    words = ["bench", "--url", server.url, "--tasks", "sample-chat", "--num-prompts", "2"]
    words += ["--concurrency", "1", "--max-tokens", str(MAX_TOKENS), "--json", str(path)]
    assert main(words) == 0, capsys.readouterr().err
    document = json.loads(path.read_text(encoding="utf-8"))
    (problem,) = document["problems"]
    assert problem.startswith("There is no plain baseline")
    assert not document["is_partial"] and document["environment"]["server"] == "vllm"
    (row,) = document["rows"]
    assert (row["task"], row["mode"], row["num_prompts"]) == ("sample-chat", "draft", 2)
    assert 1.0 < row["mean_accepted_length_pooled"] <= VERIFY + 1
    assert f"{row['mean_accepted_length_pooled']:.2f} pooled" in capsys.readouterr().out


@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.0])
def test_sampled_answers_are_likely(
    server: Server, llm: LLM, prompts: list[list[int]], temperature: float
) -> None:
    """In the target's own eyes; tokens by chance would be at about -11 each."""
    total = count = 0.0
    some = prompts[:4]
    answers = complete_all(server, some, temperature=temperature, top_p=0.95, max_tokens=24)
    for prompt, answer in zip(some, answers, strict=True):
        assert "status" not in answer, answer
        tokens = answer["choices"][0]["token_ids"]
        request = Request("score", prompt + tokens, SamplingParams(max_tokens=1), 0)
        request = replace(request, prompt_logprobs=0)
        scored = zoo.run(llm.engine, [request], check=False)["score"].prompt_logprobs
        assert scored is not None
        total += sum(one.logprob for one in scored[len(prompt) :] if one is not None)
        count += len(tokens)
    assert count > 40 and total / count > -3.0


def test_top_k_alone_keeps_the_engine(
    server: Server, ours: list[Generation], prompts: list[list[int]]
) -> None:
    one = complete(server, prompts[0], temperature=1.0, top_k=1, max_tokens=24)
    assert "status" not in one, one
    assert one["choices"][0]["token_ids"] == ours[0].token_ids[:24]
    many = complete(server, prompts[0], temperature=1.0, top_k=20, seed=3, max_tokens=24)
    assert many["usage"]["completion_tokens"] > 0
