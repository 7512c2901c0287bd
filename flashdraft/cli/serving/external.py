"""`flashdraft serve --engine vllm|sglang`: their server with our pair, started and watched over.

It turns the flags of `serve` into an engine's settings and says what happens. What the engines
understand is external/'s business; the native engine is serve.py's.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

from flashdraft.bench.plan.pairs import DRAFTERS, TARGETS
from flashdraft.bench.plan.sizes import (
    BF16,
    count_drafter,
    count_target,
    drafter_bytes,
    weight_bytes,
)
from flashdraft.cli.display import Screen
from flashdraft.engine.config import OFF, CacheOptions
from flashdraft.errors import RequestError
from flashdraft.external import sglang, vllm
from flashdraft.external.command import EngineCommand, EngineSettings, Nodes
from flashdraft.external.launch import Health, run_engine
from flashdraft.external.pairs import EnginePair, export_target, read_pair
from flashdraft.external.versions import ENGINES, Installation, check_version, inspect_engine
from flashdraft.server.settings import ServerSettings, url_here

_COMPOSERS: dict[str, Callable[[EnginePair, EngineSettings, Installation, bool], EngineCommand]] = {
    "vllm": vllm.compose,
    "sglang": sglang.compose,
}


def refuse_engine_flags(arguments: argparse.Namespace) -> None:
    """The native engine has none of these; silence would look like consent."""
    names = ("engine_python", "tensor_parallel", "nodes", "node_rank", "head", "ray_address")
    given = ["--" + n.replace("_", "-") for n in names if getattr(arguments, n) is not None]
    given += ["--dry-run"] * arguments.dry_run + ["--"] * bool(arguments.extra)
    if given:
        raise RequestError(f"{given[0]} is for an outside engine; add --engine vllm or sglang.")


def run(
    arguments: argparse.Namespace,
    model: str,
    server: ServerSettings,
    find_port: Callable[[], int],
) -> int:
    """Compose the engine's command, print it and, unless it is a rehearsal, run it.

    `find_port` fails where the port is taken: an engine finds out only after minutes of loading.
    """
    screen, is_rehearsal = Screen.detect(), bool(arguments.dry_run)
    _refuse_native_flags(arguments)
    pair = _with_size(read_pair(model, arguments.draft, TARGETS, DRAFTERS))
    settings = _settings(arguments, server)
    kind = ENGINES[arguments.engine]
    installation = inspect_engine(kind, arguments.engine_python or sys.executable)
    notes = [] if is_rehearsal and installation.version is None else check_version(installation)
    if settings.answers and not is_rehearsal:
        settings = dataclasses.replace(settings, port=find_port())
    command = _COMPOSERS[kind.name](pair, settings, installation, is_rehearsal)
    if pair.drafter is None and arguments.draft == "auto":
        notes.append(f"No drafter is known for {model}: it decodes plainly. Name one with --draft.")
    if arguments.tree not in (None, OFF):
        notes.append(f"{kind.title} drafts chains: --tree {arguments.tree} is flashdraft's alone.")
    for note in (*notes, *command.notes):
        screen.note(note)
    if is_rehearsal:
        if installation.version is None:
            screen.note(f"{kind.title} is not installed here; the flags are those of {kind.known}.")
        if pair.is_exported:
            screen.note(f"{model} would be written to {pair.model} first: it is a GGUF file.")
        print(command.shown())
        return 0
    if pair.is_exported:
        screen.note(f"Writing {model}, a GGUF file, as float32 to {pair.model}, unless it is there")
        export_target(model, Path(pair.model))
    screen.note(command.shown())
    title = f"{kind.title} {installation.version}"
    address = url_here(settings.host, settings.port)
    return run_engine(
        command,
        Health(f"{address}/health", settings.api_key) if settings.answers else None,
        title,
        on_ready=lambda: screen.note(_ready(settings, model, address, title)),
        report=screen.note,
    )


def _refuse_native_flags(arguments: argparse.Namespace) -> None:
    for name, default in (
        ("allow_host", []),
        ("allow_origin", []),
        ("max_queue", ServerSettings.max_queue),
        ("max_pictures", ServerSettings.max_pictures),
        ("log_format", ServerSettings.log_format),
        ("log_prompts", False),
        ("open_objects", False),
        ("quantize", None),
        ("quantize_head", None),
        ("activations", None),
        ("kv_dtype", CacheOptions.kv_dtype),
        ("kv_keys", CacheOptions.kv_keys),
        ("mmproj", None),
        ("lora", None),
    ):
        if getattr(arguments, name) != default:
            raise RequestError(
                f"--{name.replace('_', '-')} is the native engine's; give {arguments.engine} its "
                "own flag after --."
            )


def _settings(arguments: argparse.Namespace, server: ServerSettings) -> EngineSettings:
    nodes = None
    if arguments.nodes is not None:
        if arguments.head is None:
            raise RequestError("--nodes needs --head HOST:PORT, where the machines meet.")
        nodes = Nodes(arguments.nodes, arguments.node_rank or 0, arguments.head)
    elif arguments.node_rank is not None or arguments.head is not None:
        raise RequestError("--node-rank and --head go with --nodes, the number of machines.")
    parallel = arguments.tensor_parallel
    if parallel is None:  # one GPU of every machine, unless said otherwise
        parallel = 1 if nodes is None else nodes.count
    return EngineSettings(
        host=server.host,
        port=server.port,
        served_names=server.served_model_names,
        api_key=server.api_key,
        device=arguments.device,
        dtype=arguments.dtype,
        verify=arguments.verify if isinstance(arguments.verify, int) else None,
        max_context=arguments.max_context,
        max_batch=arguments.max_batch,
        cache_gb=arguments.cache_gb,
        tensor_parallel=parallel,
        nodes=nodes,
        ray_address=arguments.ray_address,
        takes_pictures=not arguments.no_vision,
        media_domains=server.allow_media_domains,
        drain_s=server.drain_timeout_s,
        extra=tuple(arguments.extra),
    )


def _with_size(pair: EnginePair) -> EnginePair:
    """The pair with the bytes of its weights, where its files did not tell them."""
    if pair.weight_bytes is not None or pair.target is None:
        return pair
    config = pair.drafter_config
    drafter = drafter_bytes(None if config is None else count_drafter(config), BF16)
    return dataclasses.replace(
        pair, weight_bytes=weight_bytes(count_target(pair.target), BF16) + drafter
    )


def _ready(settings: EngineSettings, model: str, address: str, title: str) -> str:
    if not settings.answers:
        assert settings.nodes is not None
        return f"Node {settings.nodes.rank} of {settings.nodes.count} runs; rank 0 answers."
    return f"Serving {model} on {address} with {title}"
