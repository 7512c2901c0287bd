"""The same greedy requests to a flashdraft server and to vLLM: answers, usage, finish reasons.

    python -m benchmarks.serve_vllm_diff export FOLDER          # the default target in float32
    vllm serve FOLDER --served-model-name smollm2-135m --dtype float32 --max-model-len 1024 …
    flashdraft serve smollm2-135m --dtype float32 --max-context 1024 --port 8601
    python -m benchmarks.serve_vllm_diff compare http://127.0.0.1:8601 http://127.0.0.1:8602 \\
        --output benchmarks/results/serve_vllm_diff.json

Every request that may be streamed is sent both ways. Compared are the status, each choice's text
and finish reason, the tokens counted, log-probabilities within TOLERANCE, and the names in the JSON
(ours may have more). A difference needs a reason in JUSTIFIED (serve_vllm_cases.py); one without
makes the exit status 1. It knows nothing of either server's inside, and does not start them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import httpx2 as httpx
import torch
from safetensors.torch import save_file

from benchmarks.accepted_length import describe_environment, report_progress, write_results
from benchmarks.serve_vllm_cases import JSON_HEADER, JUSTIFIED, Case, cases
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.sources import resolve_source
from flashdraft.models.tokenizer import Tokenizer

TOLERANCE = 1e-3  # of log-probabilities: float32 on both sides, other kernels and orders of sums
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
KEYED_BY_TOKEN = ("choices[].logprobs.top_logprobs[]", "prompt_logprobs[]")


@dataclass
class Choice:
    """One answer: its text and what was said of it."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top: list[list[tuple[float, str]] | None] = field(default_factory=list)

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Take an answer, or a stream's next piece of it."""
        part = chunk.get("message") or chunk.get("delta") or {}
        self.text += chunk.get("text") or part.get("content") or ""
        self.finish_reason = chunk.get("finish_reason") or self.finish_reason
        found = chunk.get("logprobs") or {}
        for one in found.get("content") or []:
            self.tokens.append(one["token"])
            self.logprobs.append(one["logprob"])
            self.top.append(likeliest((t["token"], t["logprob"]) for t in one["top_logprobs"]))
        self.tokens += found.get("tokens") or []
        self.logprobs += found.get("token_logprobs") or []
        self.top += [one and likeliest(one.items()) for one in found.get("top_logprobs") or []]


def likeliest(pairs: Iterable[tuple[str, float]]) -> list[tuple[float, str]]:
    """Tokens by falling log-probability, which are all that can be compared where names are not."""
    return sorted(((value, token) for token, value in pairs), reverse=True)


@dataclass
class Answer:
    """What a server said, plain or streamed, in one form."""

    status: int
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, int] | None = None
    other: dict[str, Any] = field(default_factory=dict)  # of routes that answer nothing
    names: set[str] = field(default_factory=set)  # in the JSON, such as choices[].index
    nulls: set[str] = field(default_factory=set)  # names that are only ever null

    def add(self, content: Mapping[str, Any]) -> None:
        """Take a response, or a stream's next chunk."""
        for name, value in names_in(content):
            (self.nulls if value is None else self.names).add(name)
        self.nulls -= self.names
        for chunk in content.get("choices", []):
            self.choices.setdefault(chunk["index"], Choice()).add(chunk)
        if content.get("usage"):
            self.usage = {name: content["usage"].get(name) for name in COUNTS}
        for name in ("tokens", "count", "prompt"):
            if name in content:
                self.other[name] = content[name]


def names_in(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The names in a JSON value, each with the way to it; keys that are tokens are no names."""
    if isinstance(value, list):
        for one in value:
            yield from names_in(one, path + "[]")
    elif isinstance(value, Mapping) and not path.endswith(KEYED_BY_TOKEN):
        for name, inner in value.items():
            way = f"{path}.{name}".lstrip(".")
            yield way, inner
            yield from names_in(inner, way)


def ask(client: httpx.Client, model: str, case: Case, is_stream: bool) -> Answer:
    """Send a case's request and read the answer."""
    if isinstance(case.body, bytes):
        response = client.post(case.route, content=case.body, headers=JSON_HEADER)
        return Answer(response.status_code)
    body = {name: value for name, value in case.body.items() if value is not None}
    body = {"model": model, **body}
    if is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", case.route, json=body) as response:
        answer = Answer(response.status_code)
        if response.status_code != 200:
            response.read()
        elif not is_stream:
            answer.add(json.loads(response.read()))
        else:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    answer.add(json.loads(line.removeprefix("data: ")))
    return answer


def differences(ours: Answer, theirs: Answer) -> Iterator[tuple[str, Any, Any]]:
    """The fields in which two answers differ, with both values."""
    if ours.status != theirs.status:
        yield "status", ours.status, theirs.status
    if ours.status != 200 or theirs.status != 200:
        return
    for name in sorted(theirs.names - ours.names - ours.nulls):
        yield "name " + name, "missing", "present"
    for name in sorted(theirs.nulls - ours.names - ours.nulls):
        yield "null name " + name, "missing", None
    for name, mine, other in (
        ("usage", ours.usage, theirs.usage),
        ("content", ours.other, theirs.other),
        ("choices", sorted(ours.choices), sorted(theirs.choices)),
    ):
        if mine != other:
            yield name, mine, other
    for index in sorted(ours.choices.keys() & theirs.choices.keys()):
        choices = ours.choices[index], theirs.choices[index]
        for name in ("text", "finish_reason", "tokens"):
            mine, other = (getattr(choice, name) for choice in choices)
            if name == "tokens" and mine and mine == other[:-1]:
                yield "tokens before the end", mine, other
            elif mine != other:
                yield name, mine, other
        yield from logprob_differences(*choices)


def logprob_differences(mine: Choice, other: Choice) -> Iterator[tuple[str, Any, Any]]:
    """Where log-probabilities part by more than TOLERANCE, over the places both have."""
    for place, (a, b) in enumerate(zip(mine.logprobs, other.logprobs, strict=False)):
        if (a is None) != (b is None) or (a is not None and b is not None and not is_near(a, b)):
            yield f"logprob at {place}", a, b
    for place, (first, second) in enumerate(zip(mine.top, other.top, strict=False)):
        if not first or not second or len(first) != len(second):
            is_same = not first and not second
        else:
            pairs = list(zip(first, second, strict=True))
            is_same = all(is_near(a[0], b[0]) for a, b in pairs)
            if is_same and {token for _, token in first} != {token for _, token in second}:
                yield f"top tokens at {place}", first, second
        if not is_same:
            yield f"top_logprobs at {place}", first, second


def is_near(a: float, b: float) -> bool:
    return abs(a - b) <= TOLERANCE


def reason_for(case: str, name: str) -> str | None:
    """Why this may differ; None where nothing says so."""
    for reason in JUSTIFIED:
        if fnmatchcase(case, reason.cases) and fnmatchcase(name, reason.field):
            return reason.why
    return None


def export(folder: Path, model: str) -> None:
    """A known target as a float32 checkpoint folder that vLLM opens."""
    path = resolve_source(model).path
    checkpoint, tokenizer = open_checkpoint(path), Tokenizer.from_checkpoint(path)
    if tokenizer is None:
        raise SystemExit(f"{model} has no tokenizer, which a server needs.")
    folder.mkdir(parents=True, exist_ok=True)
    source = checkpoint.source
    tensors = {name: source.read(name).float().contiguous() for name in source.names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "config.json": {**checkpoint.raw_config, "torch_dtype": "float32", "hidden_act": "silu"},
        "generation_config.json": checkpoint.generation_config,
        "tokenizer_config.json": {
            **tokenizer.special_tokens,
            "chat_template": tokenizer.chat_template,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }
    for name, content in settings.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")


def compare(ours_url: str, theirs_url: str, only: str, at_once: int) -> dict[str, Any]:
    """Send every case to both; what differed, and in how many cases nothing did."""
    urls = {"flashdraft": ours_url, "vllm": theirs_url}
    clients = {name: httpx.Client(base_url=url, timeout=300) for name, url in urls.items()}
    models = {
        name: client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        for name, client in clients.items()
    }

    def one(way: tuple[Case, bool]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        case, is_stream = way
        ours, theirs = (ask(clients[name], models[name], case, is_stream) for name in urls)
        name = case.name + (" (stream)" if is_stream else "")
        parted = [
            {"case": name, "field": f, "ours": a, "vllm": b, "reason": reason_for(name, f)}
            for f, a, b in differences(ours, theirs)
        ]
        report_progress(f"{name}: {ours.status} {theirs.status}, {len(parted)} differences")
        tokens = (ours.usage or {}).get("completion_tokens")
        row = {"case": name, "status": [ours.status, theirs.status], "tokens": tokens}
        return {**row, "same": all(map(is_of_name, parted))}, parted

    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(one, ways(only)))
    return {
        "versions": {name: c.get("/version").json()["version"] for name, c in clients.items()},
        "model": models["flashdraft"],
        "requests_at_once": at_once,
        "cases": [row for row, _ in found],
        "differences": collapsed(one for _, parted in found for one in parted),
    }


def collapsed(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first of each kind of difference in a case, with how often it was there.

    Differences of names are counted over all cases of a route.
    """
    kept: dict[tuple[str, str], dict[str, Any]] = {}
    for one in found:
        route = one["case"].partition(":")[0] + " (stream)" * one["case"].endswith(" (stream)")
        case = f"{route}: any" if is_of_name(one) else one["case"]
        key = case, one["field"].split(" at ")[0]
        kept.setdefault(key, {**one, "case": case, "count": 0})["count"] += 1
    return list(kept.values())


def is_of_name(difference: Mapping[str, Any]) -> bool:
    """Whether it is the JSON's names that differ, not what they hold."""
    return difference["field"].startswith(("name ", "null name "))


def ways(only: str) -> Iterator[tuple[Case, bool]]:
    """Every case whose name matches, and its stream."""
    for case in cases():
        if fnmatchcase(case.name, only):
            yield case, False
            if case.streams:
                yield case, True


def table(result: Mapping[str, Any]) -> Iterator[str]:
    """What to print: a line a kind of difference, the unexplained ones in full."""
    rows, found = result["cases"], result["differences"]
    same = sum(row["same"] for row in rows)
    tokens = sum(row["tokens"] or 0 for row in rows)
    yield f"{len(rows)} requests, {tokens} tokens; the same contents in {same}"
    kinds: dict[str, Counter[str]] = {}
    for one in found:
        if one["reason"] is not None:
            name = one["field"].split(" at ")[0]
            kinds.setdefault(one["reason"], Counter())[name] += one["count"]
    for reason, names in kinds.items():
        yield reason
        yield "    " + ", ".join(f"{name} ({count})" for name, count in sorted(names.items()))
    for one in unexplained(found):
        shown = {side: json.dumps(one[side], ensure_ascii=False)[:400] for side in ("ours", "vllm")}
        yield f"UNEXPLAINED {one['case']}, {one['field']}"
        yield f"    ours {shown['ours']}"
        yield f"    vllm {shown['vllm']}"


def unexplained(found: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [one for one in found if one["reason"] is None]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="flashdraft's answers against vLLM's.")
    commands = parser.add_subparsers(dest="command", required=True)
    exporting = commands.add_parser("export", help="write the target as a float32 folder")
    exporting.add_argument("folder", type=Path)
    exporting.add_argument("--model", default="smollm2-135m")
    comparing = commands.add_parser("compare", help="send the requests and compare")
    comparing.add_argument("ours", help="base URL of flashdraft serve --dtype float32")
    comparing.add_argument("theirs", help="base URL of vllm serve --dtype float32")
    comparing.add_argument("--at-once", type=int, default=4, help="requests sent at once")
    comparing.add_argument("--only", default="*", help="cases whose names match this pattern")
    comparing.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.command == "export":
        export(arguments.folder, arguments.model)
        return 0
    result = compare(arguments.ours, arguments.theirs, arguments.only, arguments.at_once)
    environment = describe_environment("benchmarks.serve_vllm_diff", torch.device("cpu"))
    result = {"environment": environment, "dtype": "float32", "tolerance": TOLERANCE, **result}
    write_results(arguments.output, result)
    print("\n".join(table(result)))
    return 1 if unexplained(result["differences"]) else 0


if __name__ == "__main__":
    sys.exit(main())
