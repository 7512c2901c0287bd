"""What it costs that templates and tokenizers run in processes of their own.

    python -m benchmarks.text_processes MODEL --label after \\
        --output benchmarks/results/text_processes.json
    python -m benchmarks.text_processes URL --pid PID --label memory --output …

The first form renders and encodes a chat of about 2,000 tokens as the server does, one at a time
and 32 at once, then beside a text of a million characters; run it in a checkout of another commit
with another label and compare. MODEL is a folder with a tokenizer, or the default model's name. The
second sends a million characters to /tokenize a thousand times and looks at the memory of the
server's front. Results of one label replace those that were there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2 as httpx

from benchmarks.accepted_length import write_results
from flashdraft.bench.run.environment import describe_environment
from flashdraft.models.sources import resolve_source
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.server.answering.questions import ChatInput, conversation_ids
from flashdraft.server.answering.serving import Serving
from flashdraft.server.settings import ServerSettings

SENTENCE = "The quick brown fox jumps over the lazy dog and thinks about {} things for a while. "
LONG = 1_000_000
REPEATS, AT_ONCE, ROUNDS = 300, 32, 20
TOKENIZED, LOOK_EVERY = 1000, 50


def conversation(num_turns: int = 9, num_sentences: int = 12) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [
        {
            "role": roles[turn % 2],
            "content": "".join(SENTENCE.format(turn * n) for n in range(num_sentences)),
        }
        for turn in range(num_turns)
    ]


def summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50_ms": round(statistics.median(ordered) * 1000, 3),
        "p99_ms": round(ordered[int(0.99 * (len(ordered) - 1))] * 1000, 3),
        "max_ms": round(ordered[-1] * 1000, 3),
    }


async def measure(serving: Serving) -> dict[str, Any]:
    messages = conversation()

    async def ask() -> float:
        begin = time.perf_counter()
        await conversation_ids(serving, ChatInput(messages), None)
        return time.perf_counter() - begin

    num_tokens = len(await conversation_ids(serving, ChatInput(messages), None))
    for _ in range(20):  # a server has all of its processes before its first request
        await asyncio.gather(ask(), ask())
    one = [await ask() for _ in range(REPEATS)]
    many = []
    for _ in range(ROUNDS):
        many += await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
    text = (SENTENCE * (LONG // len(SENTENCE) + 1))[:LONG]
    beside: list[float] = []
    begin = time.perf_counter()
    long = asyncio.create_task(serving.tokenize(text))
    await asyncio.sleep(0.02)
    while not long.done():
        beside.append(await ask())
    return {
        "tokens": num_tokens,
        "one": summary(one),
        f"{AT_ONCE} at once": summary(many),
        "beside a million characters": summary(beside),
        "a million characters_ms": round((time.perf_counter() - begin) * 1000, 1),
    }


def memory_of_processes(tokenizer: Tokenizer) -> list[int] | None:
    """MiB resident in each process of the tokenizer; None where it has none."""
    pool = getattr(tokenizer, "pool", None)
    if pool is None:
        return None
    return [resident_mib(process._child.pid) for process in pool._all]


def resident_mib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) // 1024
    raise ValueError(f"process {pid} has no memory")


def measure_model(model: str) -> dict[str, Any]:
    tokenizer = Tokenizer.from_checkpoint(resolve_source(model).path)
    assert tokenizer is not None, "a model with a tokenizer is needed"
    engine: Any = SimpleNamespace(info=SimpleNamespace(max_context=1_000_000))
    serving = Serving(engine, tokenizer, ServerSettings(), cast(Any, None))
    found = asyncio.run(measure(serving))
    return {**found, "vocabulary": tokenizer.vocab_size, "mib": memory_of_processes(tokenizer)}


def measure_front(url: str, pid: int) -> dict[str, Any]:
    text = (SENTENCE * (LONG // len(SENTENCE) + 1))[:LONG]
    looks = []
    with httpx.Client(base_url=url, timeout=600) as client:
        client.get("/health").raise_for_status()
        client.post("/tokenize", json={"prompt": "hello"}).raise_for_status()
        looks.append(resident_mib(pid))
        for number in range(1, TOKENIZED + 1):
            client.post("/tokenize", json={"prompt": text}).raise_for_status()
            if number % LOOK_EVERY == 0:
                looks.append(resident_mib(pid))
    return {"calls": TOKENIZED, "characters": LONG, "front_mib": looks}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a model, or the URL of a server")
    parser.add_argument("--pid", type=int, help="the process of the server")
    parser.add_argument("--label", default="after")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if options.pid is not None:
        found = measure_front(options.model, options.pid)
    else:
        found = measure_model(options.model)
    found["environment"] = describe_environment(sys.argv)
    print(json.dumps(found, indent=1))
    if options.output is not None:
        known = json.loads(options.output.read_text()) if options.output.is_file() else {}
        write_results(options.output, {**known, options.label: found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
