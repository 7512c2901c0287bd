"""`flashdraft serve [MODEL]`: the HTTP server, for OpenAI and Anthropic clients and browsers.

With `--engine vllm` or `sglang` it is theirs, and serving/external.py starts it.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashdraft.cli.arguments import (
    KEY_VARIABLE,
    NATIVE,
    cache_options,
    take_model_name,
    weight_options,
)
from flashdraft.cli.display import Screen
from flashdraft.cli.serving import external, notes
from flashdraft.cli.serving.values import check_values
from flashdraft.errors import FlashdraftError, RequestError, printable
from flashdraft.interrupts import terminate_as_interrupt
from flashdraft.models.pairs import find_drafter, find_sources
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.server.settings import ServerSettings
from flashdraft.status_line import STATUS

ENDING = "Finishing the running answers; the same signal again ends at once."
NOT_LOADED = "Stopped before the model was loaded."


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    model = take_model_name(arguments)
    settings = ServerSettings(
        host=arguments.host,
        port=arguments.port,
        api_key=_api_key(arguments),
        no_auth=arguments.no_auth,
        allow_hosts=tuple(arguments.allow_host),
        allow_origins=tuple(arguments.allow_origin),
        served_model_names=tuple(arguments.served_model_name) or (_public_name(model),),
        allow_media_domains=tuple(arguments.allow_media_domain),
        max_queue=arguments.max_queue,
        max_pictures=arguments.max_pictures,
        log_prompts=arguments.log_prompts,
        log_format=arguments.log_format,
        open_objects=arguments.open_objects,
    )
    check_values(arguments)
    if arguments.engine != NATIVE:
        return external.run(arguments, model, settings, lambda: _free_port(settings))
    external.refuse_engine_flags(arguments)
    screen = Screen.detect()
    with STATUS.during("Loading the server …"):
        launch = _load_server()
    try:
        # what is wrong with a port or a flag is better known before the model is loaded
        with _listen(settings) as listener, terminate_as_interrupt():
            address = notes.address_of(listener)
            with STATUS.during(f"Loading {printable(model)} …"):
                path = _fetch(model, arguments)
                tokenizer = _load_tokenizer(model, path)
            screen.note(f"Loading {model} …")
            asyncio.run(
                launch.serve(
                    listener,
                    settings,
                    _llm_arguments(arguments, model),
                    tokenizer,
                    log_in_words=notes.is_log_in_words(settings, screen),
                    on_ready=lambda _: notes.say_ready(model, address, settings, screen),
                    on_stop=lambda is_loaded: screen.note(ENDING if is_loaded else NOT_LOADED),
                )
            )
    except KeyboardInterrupt:  # a signal before the server could hear it
        screen.note(NOT_LOADED)
    return 0


def _api_key(arguments: argparse.Namespace) -> str | None:
    """The key as it was given: an empty one is refused later and does not mean none."""
    given: str | None = arguments.api_key
    return os.environ.get(KEY_VARIABLE) if given is None else given


def _public_name(model: str) -> str:
    """A folder's or a file's own name: where it lies is nobody's business."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def _llm_arguments(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    names = ("verify", "tree", "device", "dtype", "max_context", "max_batch")
    return {
        "model": model,
        "draft": None if arguments.draft == "none" else arguments.draft,
        **{name: getattr(arguments, name) for name in names},
        "vision": not arguments.no_vision,
        "mmproj": arguments.mmproj,
        "lora": arguments.lora,
        **weight_options(arguments)._asdict(),
        **asdict(cache_options(arguments)),
    }


def _load_server() -> Any:
    try:
        return importlib.import_module("flashdraft.server.launch")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("flashdraft"):
            raise
        raise FlashdraftError(
            f'The server needs the package {error.name}: pip install "flashdraft[serve]".'
        ) from None


def _fetch(model: str, arguments: argparse.Namespace) -> Path:
    """Where the model is; it and what goes with it are fetched here, where they are missing."""
    drafter = None if arguments.draft == "none" else find_drafter(model, arguments.draft)
    return find_sources(model, drafter, not arguments.no_vision, arguments.mmproj).target


def _load_tokenizer(model: str, path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_checkpoint(path)
    if tokenizer is None:
        raise RequestError(
            f"{model} has no tokenizer; the server needs one. LLM.generate in Python takes token "
            "ids."
        )
    return tokenizer


def _listen(settings: ServerSettings) -> socket.socket:
    host, port = settings.host, settings.port
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise FlashdraftError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}. Is another server running "
            "there? Choose another --port."
        ) from None


def _free_port(settings: ServerSettings) -> int:
    with _listen(settings) as listener:
        return int(listener.getsockname()[1])
