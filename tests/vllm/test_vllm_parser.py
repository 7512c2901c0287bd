"""The commands for GPUs, which cannot be run here, before vLLM's own argument parser."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from flashdraft.bench.plan.pairs import DRAFTERS, TARGETS
from flashdraft.external import vllm
from flashdraft.external.command import EngineSettings, Nodes
from flashdraft.external.pairs import read_pair
from flashdraft.external.versions import VLLM, Gpu, Installation
from tests.vllm.vllm_processes import run_python

H200 = Gpu("H200", int(149e9), int(151e9), (9, 0))
SETTINGS = EngineSettings(host="127.0.0.1", port=8000, served_names=("one", "two"))
WISHES: dict[str, dict[str, Any]] = {
    "one": {"max_context": 4096, "max_batch": 8, "cache_gb": 2.5, "dtype": "bfloat16", "verify": 7},
    "two": {"tensor_parallel": 2},
    "ray": {"tensor_parallel": 16, "ray_address": "10.0.0.1:6379"},
    "head": {"tensor_parallel": 4, "nodes": Nodes(2, 0, "10.0.0.1:5000")},
    "node": {"tensor_parallel": 4, "nodes": Nodes(2, 1, "10.0.0.1:5000")},
    "plain": {"verify": 0},
    "text": {"takes_pictures": False},
    "hosts": {"media_domains": ("a.example", "b.example")},
}
# argparse takes a flag's beginning for the flag: each must be there as it is written
PARSE = """
import dataclasses, json, sys
from vllm.config import SpeculativeConfig
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum
parser, serve = FlexibleArgumentParser(), ServeSubcommand()
flags = serve.subparser_init(parser.add_subparsers())._option_string_actions
fields = {field.name for field in dataclasses.fields(SpeculativeConfig)}
backends = AttentionBackendEnum.__members__
shown = {}
for name, words in json.loads(sys.argv[1]).items():
    unknown = [word for word in words if word.startswith("--") and word not in flags]
    read = parser.parse_args(words)
    serve.validate(read)
    drafting = read.speculative_config or {}
    unknown += [key for key in drafting if key not in fields]
    unknown += [b for b in [drafting.get("attention_backend")] if b and b not in backends]
    shown[name] = {
        "unknown": unknown, "backend": str(read.attention_backend),
        "tensor_parallel": read.tensor_parallel_size, "nodes": read.nnodes, "rank": read.node_rank,
        "headless": bool(read.headless), "executor": read.distributed_executor_backend,
        "names": read.served_model_name, "tokens": read.max_num_batched_tokens,
        "drafts": drafting.get("num_speculative_tokens"), "model": read.model_tag,
        "text_only": bool(read.language_model_only), "domains": read.allowed_media_domains,
        "cache": read.kv_cache_memory_bytes, "caching": read.enable_prefix_caching,
    }
print("READ" + json.dumps(shown))
"""


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_vllms_own_parser_reads_every_command(vllm_python: Path) -> None:
    pair = read_pair("google/gemma-4-31B-it", "auto", TARGETS, DRAFTERS)
    here = Installation(VLLM, vllm_python, VLLM.known, "cuda", (H200,) * 8, has_plugin=True)
    commands = {}
    for name, wish in WISHES.items():
        command = vllm.compose(pair, dataclasses.replace(SETTINGS, **wish), here, False)
        commands[name] = command.arguments[command.arguments.index("serve") :]
    done = run_python(vllm_python, ["-c", PARSE, json.dumps(commands)], 240)
    lines = [line for line in done.stdout.splitlines() if line.startswith("READ")]
    assert done.returncode == 0 and lines, done.stdout[-3000:]
    read = json.loads(lines[0].removeprefix("READ"))
    assert read.keys() == WISHES.keys()
    for name, one in read.items():
        assert one["unknown"] == [], name
        assert (one["model"], one["names"]) == (pair.model, ["one", "two"]), name
        assert one["tokens"] == 32768 and one["caching"] is True, name
        assert one["drafts"] == {"plain": None, "one": 7}.get(name, 15), name
        assert "TRITON_ATTN" in one["backend"], name
        assert one["tensor_parallel"] == WISHES[name].get("tensor_parallel", 1), name
        assert one["text_only"] is (name == "text"), name
    hosts = {"text": None, "hosts": ["a.example", "b.example"]}
    assert {n: one["domains"] for n, one in read.items()} == {
        name: hosts.get(name, ["none.invalid"]) for name in WISHES
    }
    assert read["one"]["cache"] == 2_500_000_000
    assert read["ray"]["executor"] == "ray"
    assert [(read[n]["nodes"], read[n]["rank"]) for n in ("head", "node")] == [(2, 0), (2, 1)]
    assert [read[n]["headless"] for n in ("one", "head", "node")] == [False, False, True]
