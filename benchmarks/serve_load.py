"""A running server under load: many streams, clients that leave, bad requests; and its throughput.

    flashdraft serve &
    python -m benchmarks.serve_load http://127.0.0.1:8000 --pid $! --minutes 10 \\
        --output benchmarks/results/serve_load.json
    python -m benchmarks.serve_load http://127.0.0.1:8000 --throughput

Each of the streams sends one request after another until the time is up: chats, completions and
messages of mixed lengths, some with a grammar, some for two answers. One in ten leaves early, one
in twenty is wrong. Every request must end as it was meant to, nothing may run or wait afterwards,
the cache's pages must all be free again (those kept for prefixes count as free), and the memory of
the server's processes must not grow from the middle of the run to its end. --throughput compares
tokens a second drafted and plain on fixed prompts, in turns. The exit status says whether all held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import torch

from benchmarks.accepted_length import describe_environment, report_progress, write_results
from tests.prompts import PROMPTS

CHAT, RAW, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
JSON_HEADER = {"Content-Type": "application/json"}
LEAVE_SHARE, BAD_SHARE, PLAIN_SHARE = 0.10, 0.05, 0.10
SAMPLE_S = 2.0  # between two looks at the memory
GROWTH = 0.05  # of memory, from the middle to the end, that still counts as flat
SETTLE_S = 30.0  # after the last request, until nothing may be held any more
FINISHED = {"stop", "length", "end_turn", "max_tokens"}
CONCURRENCIES = (1, 4, 8)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CODE = "[a-f]{3}-[0-9]{2}"
USER = [{"role": "user", "content": "Hello"}]
BAD: tuple[tuple[str, Mapping[str, Any] | bytes, int], ...] = (
    (CHAT, {"messages": USER, "model": "no-such-model"}, 404),
    (CHAT, {"messages": USER, "temperature": -1}, 400),
    (CHAT, {"messages": USER, "no_such_field": 1}, 400),
    (CHAT, {"messages": [{"role": "robot", "content": "?"}]}, 400),
    (CHAT, {"messages": []}, 400),
    (CHAT, b'{"messages": [', 400),
    (CHAT, b'{"messages": "\xff"}', 400),
    (CHAT, b"[" * 5000, 400),
    (RAW, {"prompt": "x", "n": 0}, 400),
    (RAW, {"prompt": "x", "structured_outputs": {"regex": "("}}, 400),
    (RAW, {"prompt": [10**7]}, 400),
    (RAW, {"prompt": "word " * 100_000}, 400),
    (MESSAGES, {"messages": USER}, 400),
    (MESSAGES, {"messages": USER, "max_tokens": 4, "model": "no-such-model"}, 404),
    ("/v1/nothing", {}, 404),
)


@dataclass(frozen=True)
class Plan:
    """A request, and how it is to end."""

    route: str
    body: Mapping[str, Any] | bytes
    status: int = 200
    answers: int = 1
    grammar: str | None = None  # "json" or "regex"
    leave_after: int | None = None  # chunks of a stream; of a plain request, tenths of a second


@dataclass
class Tally:
    """What the requests came to."""

    ended: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    chunk_s: list[float] = field(default_factory=list)  # between chunks, a step's tokens each
    token_s: list[float] = field(default_factory=list)  # a request's mean
    tokens: int = 0


@dataclass
class Read:
    """What has been read of one answer."""

    texts: dict[int, str] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)  # of the chunks with text
    tokens: int = 0
    is_complete: bool = False

    def add(self, event: Mapping[str, Any]) -> None:
        """Take a response or a stream's event, of any of the three APIs."""
        if "error" in event:
            raise ValueError(f"the stream failed: {event['error']}")
        self.is_complete |= event.get("type") in ("message_stop", "message")
        text = False
        for choice in event.get("choices", []):
            part = choice.get("message") or choice.get("delta") or {}
            text |= self._write(choice["index"], choice.get("text") or part.get("content") or "")
            if choice.get("finish_reason"):
                self.finished[choice["index"]] = choice["finish_reason"]
        for block in event.get("content", []):
            text |= self._write(0, block["text"])
        delta = event.get("delta", {})
        text |= self._write(0, delta.get("text", ""))
        reason = delta.get("stop_reason") or event.get("stop_reason")
        if reason:
            self.finished[0] = reason
        usage = event.get("usage") or {}
        self.tokens = usage.get("completion_tokens", usage.get("output_tokens", self.tokens))
        if text:
            self.times.append(time.perf_counter())

    def _write(self, index: int, text: str) -> bool:
        self.texts[index] = self.texts.get(index, "") + text
        return bool(text)

    def check(self, plan: Plan) -> None:
        """Whether the answer is whole and what was asked for."""
        if not self.is_complete:
            raise ValueError("the stream stopped before its end")
        if len(self.finished) != plan.answers or not set(self.finished.values()) <= FINISHED:
            raise ValueError(f"{plan.answers} answers ended as {self.finished}")
        for index, reason in self.finished.items():
            text = self.texts[index]
            if plan.grammar == "json" and reason in ("stop", "end_turn"):
                json.loads(text)
            if plan.grammar == "regex" and not re.fullmatch(CODE, text):
                raise ValueError(f"{text!r} does not match {CODE}")


def draw(dice: random.Random, model: str) -> Plan:
    """The next request."""
    chance = dice.random()
    if chance < BAD_SHARE:
        route, wrong, status = dice.choice(BAD)
        named = wrong if isinstance(wrong, bytes) else {"model": model, **wrong}
        return Plan(route, named, status)
    leave = dice.randrange(0, 12) if chance < BAD_SHARE + LEAVE_SHARE else None
    route = dice.choice((CHAT, CHAT, RAW, MESSAGES))
    prompt = " ".join(dice.choices(PROMPTS, k=dice.choice((1, 1, 1, 4, 12))))
    limit = dice.choice((4, 16, 32, 64, 128))
    body: dict[str, Any] = {"model": model, "max_tokens": limit, "temperature": dice.choice((0, 1))}
    body |= {"prompt": prompt} if route == RAW else {"messages": user(prompt)}
    if dice.random() >= PLAIN_SHARE:
        body["stream"] = True
        if route != MESSAGES:
            body["stream_options"] = {"include_usage": True}
    answers, grammar, kind = 1, None, dice.random()
    if route != MESSAGES and kind < 0.1:
        answers = body["n"] = 2
    elif route != MESSAGES and kind < 0.2:
        grammar = dice.choice(("json", "regex"))
        constraint = {"json": PERSON} if grammar == "json" else {"regex": CODE}
        body |= {"structured_outputs": constraint, "max_tokens": 64}
    return Plan(route, body, answers=answers, grammar=grammar, leave_after=leave)


def user(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


async def perform(client: httpx.AsyncClient, plan: Plan, tally: Tally) -> None:
    """Send a request and count how it ended."""
    try:
        tally.ended[await exchange(client, plan, tally)] += 1
    except (httpx.HTTPError, ValueError, KeyError, re.error) as error:
        tally.ended["failed"] += 1
        shown = plan.body if isinstance(plan.body, bytes) else json.dumps(plan.body).encode()
        tally.failures.append(f"{plan.route} {shown[:200]!r}: {type(error).__name__}: {error}")


async def exchange(client: httpx.AsyncClient, plan: Plan, tally: Tally) -> str:
    """One request and its end: answered, left or refused."""
    if isinstance(plan.body, bytes) or plan.status != 200:
        content = plan.body if isinstance(plan.body, bytes) else json.dumps(plan.body).encode()
        response = await client.post(plan.route, content=content, headers=JSON_HEADER)
        if response.status_code != plan.status or "error" not in response.json():
            raise ValueError(f"status {response.status_code}, not {plan.status}")
        return "refused"
    start = time.perf_counter()
    if "stream" not in plan.body:
        try:
            async with asyncio.timeout(plan.leave_after and plan.leave_after / 10):
                response = await client.post(plan.route, json=plan.body)
        except TimeoutError:
            return "left"
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}: {response.text[:300]}")
        read = Read(is_complete=True)
        read.add(response.json())
    else:
        async with client.stream("POST", plan.route, json=plan.body) as response:
            if response.status_code != 200:
                text = (await response.aread())[:300]
                raise ValueError(f"status {response.status_code}: {text!r}")
            read = Read()
            async for event in events(response, read):
                read.add(event)
                if plan.leave_after is not None and len(read.times) >= plan.leave_after:
                    return "left"
        count(tally, read, start)
    read.check(plan)
    tally.tokens += read.tokens
    return "answered"


async def events(response: httpx.Response, read: Read) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream; its mark of the end is noted, not given."""
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            read.is_complete = True
        elif line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def count(tally: Tally, read: Read, start: float) -> None:
    """The times of a stream that was read to its end."""
    if not read.times:
        return
    tally.ttft_s.append(read.times[0] - start)
    tally.chunk_s += [b - a for a, b in zip(read.times, read.times[1:], strict=False)]
    if read.tokens > len(read.finished):
        tally.token_s.append((read.times[-1] - read.times[0]) / (read.tokens - len(read.finished)))


def processes(pid: int) -> Iterator[tuple[str, int]]:
    """A server's front and its children, as (name, pid)."""
    yield "front", pid
    for entry in Path(f"/proc/{pid}/task").glob("*/children"):
        for number, child in enumerate(entry.read_text().split()):
            yield f"worker {number}" if number else "worker", int(child)


def memory_mb(pid: int) -> float:
    """The memory a process has of its own, without mapped files."""
    status = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(match.group(1)) / 1024 if match else 0.0


async def watch(pid: int | None, seconds: float, samples: dict[str, list[float]]) -> None:
    """Note the memory of the server's processes until the time is up."""
    deadline = time.monotonic() + seconds
    while pid is not None and time.monotonic() < deadline:
        for name, process in processes(pid):
            samples.setdefault(name, []).append(round(memory_mb(process), 1))
        await asyncio.sleep(SAMPLE_S)


def memory_summary(samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Start, middle and end; the start is before the load, so only the rest must be flat."""
    summary = {}
    for name, values in samples.items():
        tenth = max(len(values) // 10, 1)
        half = len(values) // 2
        middle, end = max(values[half : half + tenth]), max(values[-tenth:])
        is_flat = end <= middle * (1 + GROWTH)
        summary[name] = {
            "start_mb": values[0],
            "middle_mb": middle,
            "end_mb": end,
            "peak_mb": max(values),
            "is_flat": is_flat,
        }
    return summary


async def gauges(client: httpx.AsyncClient) -> dict[str, float]:
    """What /metrics says is held."""
    text = (await client.get("/metrics")).raise_for_status().text
    names = ("requests_running", "requests_waiting", "cache_pages_used", "engine_restarts_total")
    return {
        name: float(match.group(1))
        for name in names
        if (match := re.search(rf"^flashdraft_{name} (\S+)$", text, re.MULTILINE))
    }


async def settled(client: httpx.AsyncClient) -> dict[str, float]:
    """The gauges once nothing is held, or as they stand when that takes too long."""
    deadline = time.monotonic() + SETTLE_S
    while any((held := await gauges(client)).values()) and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
    return held


def percentiles(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=20)
    return {"p50_s": round(cuts[9], 4), "p95_s": round(cuts[18], 4), "count": len(values)}


async def load(client: httpx.AsyncClient, model: str, arguments: Any) -> dict[str, Any]:
    """Streams of requests until the time is up, and whether everything held."""
    tally, samples = Tally(), dict[str, list[float]]()
    seconds = arguments.minutes * 60
    deadline = time.monotonic() + seconds

    async def one_stream(number: int) -> None:
        dice = random.Random(f"{arguments.seed}/{number}")
        while time.monotonic() < deadline:
            await perform(client, draw(dice, model), tally)

    async def progress() -> None:
        while time.monotonic() < deadline:
            await asyncio.sleep(min(15, seconds))
            report_progress(f"{dict(tally.ended)}, {len(tally.failures)} failures")

    streams = [one_stream(number) for number in range(arguments.streams)]
    await asyncio.gather(*streams, progress(), watch(arguments.pid, seconds, samples))
    held, memory = await settled(client), memory_summary(samples)
    is_flat = all(one["is_flat"] for one in memory.values())
    return {
        "streams": arguments.streams,
        "minutes": arguments.minutes,
        "requests": dict(tally.ended),
        "failures": tally.failures,
        "completion_tokens": tally.tokens,
        "ttft": percentiles(tally.ttft_s),
        "between_chunks": percentiles(tally.chunk_s),
        "inter_token": percentiles(tally.token_s),
        "afterwards": held,
        "memory": memory,
        "passed": not tally.failures and not any(held.values()) and is_flat,
    }


async def answer(
    client: httpx.AsyncClient, model: str, prompt: str, arguments: Any, is_plain: bool
) -> tuple[str, int]:
    """A greedy chat answer and how many tokens it took."""
    body: dict[str, Any] = {"model": model, "messages": user(prompt), "temperature": 0}
    body["max_tokens"] = arguments.tokens
    if is_plain:
        body["flashdraft"] = {"verify": 0}
    content = (await client.post(CHAT, json=body)).raise_for_status().json()
    return content["choices"][0]["message"]["content"], content["usage"]["completion_tokens"]


async def measure(
    client: httpx.AsyncClient, model: str, concurrency: int, arguments: Any, is_plain: bool
) -> tuple[float, list[str]]:
    """Tokens a second over the fixed prompts, so many at once; and the texts."""
    gate = asyncio.Semaphore(concurrency)

    async def one(prompt: str) -> tuple[str, int]:
        async with gate:
            return await answer(client, model, prompt, arguments, is_plain)

    start = time.perf_counter()
    found = await asyncio.gather(*(one(prompt) for prompt in PROMPTS[: arguments.prompts]))
    seconds = time.perf_counter() - start
    return sum(tokens for _, tokens in found) / seconds, [text for text, _ in found]


async def throughput(client: httpx.AsyncClient, model: str, arguments: Any) -> dict[str, Any]:
    """Drafted against plain at each concurrency, in turns; the first round is not counted."""
    rates: dict[int, dict[bool, list[float]]] = {c: {True: [], False: []} for c in CONCURRENCIES}
    texts: set[tuple[str, ...]] = set()
    for round_number in range(arguments.rounds + 1):
        for concurrency in CONCURRENCIES:
            for is_plain in (True, False) if round_number % 2 else (False, True):
                rate, found = await measure(client, model, concurrency, arguments, is_plain)
                texts.add(tuple(found))
                if round_number:
                    rates[concurrency][is_plain].append(rate)
                name = "plain" if is_plain else "drafted"
                report_progress(f"round {round_number}, c = {concurrency}, {name}: {rate:.1f}/s")
    rows: dict[str, dict[str, Any]] = {}
    for concurrency, found_rates in rates.items():
        ratios = [d / p for p, d in zip(found_rates[True], found_rates[False], strict=True)]
        rows[str(concurrency)] = {
            "plain_tokens_per_s": [round(rate, 1) for rate in found_rates[True]],
            "drafted_tokens_per_s": [round(rate, 1) for rate in found_rates[False]],
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
    return {
        "prompts": arguments.prompts,
        "max_tokens": arguments.tokens,
        "concurrency": rows,
        "same_text": len(texts) == 1,
        "passed": len(texts) == 1 and all(row["ratio"] >= 1 for row in rows.values()),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A server under load, or its throughput.")
    parser.add_argument("url", help="base URL of a running server")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pid", type=int, help="of the server; its memory is watched")
    parser.add_argument("--throughput", action="store_true", help="drafted against plain instead")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="with --throughput")
    parser.add_argument("--tokens", type=int, default=96, help="with --throughput, at most")
    parser.add_argument("--rounds", type=int, default=3, help="with --throughput")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=arguments.streams)
    async with httpx.AsyncClient(base_url=arguments.url, timeout=300, limits=limits) as client:
        listing = (await client.get("/v1/models")).raise_for_status().json()
        model = listing["data"][0]["id"]
        work = throughput if arguments.throughput else load
        return {"model": model, **await work(client, model, arguments)}


def main() -> int:
    arguments = parse_arguments()
    environment = describe_environment("benchmarks.serve_load", torch.device("cpu"))
    result = {"environment": environment, **asyncio.run(run(arguments))}
    write_results(arguments.output, result)
    print(json.dumps(result, indent=1))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
