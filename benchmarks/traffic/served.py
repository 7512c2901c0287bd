"""A server of random weights with prescribed acceptance, for users' load through HTTP.

    python -m benchmarks.traffic.served --model 31b --port 8000 &
    flashdraft bench --url http://127.0.0.1:8000 --rate 5 --duration 30 \\
        --prompt-tokens 256-1536 --output-tokens 64-448 --json traffic_http.json

Everything between the socket and the engine is flashdraft's own: the front, its process for text,
the engine's process. Only the weights, the acceptance and the vocabulary are made up; a word that
`flashdraft bench` asks with is one token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.traffic.engines import MODEL_NAMES, Bench, EngineSpec, model_named, prepare
from benchmarks.traffic.vocabulary import MadeUpVocabulary
from benchmarks.traffic.workload import OWN_SAMPLING
from flashdraft.bench.traffic.questions import WORDS
from flashdraft.children import python_command
from flashdraft.engine.engine import Engine
from flashdraft.killable.frames import pack
from flashdraft.llm import LLM
from flashdraft.models.stream_decoder import StreamDecoder
from flashdraft.models.tokenizer import Tokenizer

FOLDER = str(Path(__file__).resolve().parents[2])
RUN_ENGINE = (  # benchmarks are not installed, and a child looks nowhere else
    f"import sys; sys.path.insert(0, {FOLDER!r}); "
    "from benchmarks.traffic.served import run_engine; run_engine(sys.argv[1], sys.argv[2])"
)
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
MAX_CONTEXT = 4096


def serve_engine(connection: socket.socket, arguments: Mapping[str, Any]) -> None:
    """The engine's process: what flashdraft's own does, with weights that are drawn."""
    from flashdraft.server.process.worker import Worker, describe

    name, is_tiny = arguments["model"], arguments["model"].startswith("tiny")
    connection.sendall(pack({"type": "loading", "model": name}))
    bench = Bench.load(
        name,
        device="cpu" if is_tiny else "auto",
        dtype="float32" if is_tiny else "auto",
        seed=arguments["seed"],
        cache_gb=arguments["cache_gb"],
        limits={},
        has_grammars=False,
    )

    def work(engine: Engine) -> None:
        prepare(engine)
        drafter = None if arguments["acceptance"] is None else "drawn"
        kernels = bench.pair.target.kernels
        pair = SimpleNamespace(
            engine=engine,
            model=name,
            drafter_name=drafter,
            kernels=kernels,
            generation_config=OWN_SAMPLING,
        )
        info = describe(cast(LLM, pair))
        connection.sendall(pack({"type": "ready", "info": info, "gauges": engine.load._asdict()}))
        Worker(connection, engine).run()

    routing = arguments["routing"] if bench.routing is not None else None
    spec = EngineSpec(arguments["acceptance"], routing, arguments["max_batch"], MAX_CONTEXT)
    with made_up_tokenizer(bench.pair.target.config.vocab_size) as tokenizer:
        bench.new_decoder = lambda: StreamDecoder(tokenizer)
        bench.use(spec, work)


@contextlib.contextmanager
def made_up_tokenizer(vocab_size: int) -> Iterator[Tokenizer]:
    """The made-up vocabulary as a tokenizer, whose file the processes for text read again."""
    content = MadeUpVocabulary(vocab_size, words=WORDS).to_json()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokenizer.json").write_text(content, encoding="utf-8")
        config = json.dumps({"chat_template": TEMPLATE})
        (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")
        tokenizer = Tokenizer.from_checkpoint(folder)
        assert tokenizer is not None
        yield tokenizer


def serve(found: argparse.Namespace) -> None:
    """The front, until a signal."""
    from flashdraft.server import launch
    from flashdraft.server.settings import ServerSettings

    model = model_named(found.model)
    settings = ServerSettings(port=found.port, served_model_names=(found.model,))
    arguments = {
        "model": found.model,
        "seed": found.seed,
        "acceptance": None if found.plain else found.acceptance or model.alpha,
        "routing": found.routing,
        "max_batch": found.max_batch,
        "cache_gb": found.cache_gb,
    }
    address = (settings.host, settings.port)
    with (
        made_up_tokenizer(model.target_config().vocab_size) as tokenizer,
        socket.create_server(address, backlog=2048) as listener,
    ):
        url = f"http://{settings.host}:{listener.getsockname()[1]}"
        asyncio.run(
            launch.serve(
                listener,
                settings,
                arguments,
                tokenizer,
                on_ready=lambda info: print(f"Serving {found.model} on {url}", flush=True),
                on_stop=lambda is_loaded: None,
                command=python_command("-c", RUN_ENGINE),
            )
        )


def run_engine(descriptor: str, arguments: str) -> None:
    """What the engine's process is started with: an inherited socket, and JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both: the front decides
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the front has gone
        serve_engine(socket.socket(fileno=int(descriptor)), json.loads(arguments))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.traffic.served", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", choices=MODEL_NAMES, required=True)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--plain", action="store_true", help="plain decoding")
    parser.add_argument("--acceptance", type=float, help="of a slot (default: as published)")
    parser.add_argument("--routing", default="degenerate", help="of experts")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--cache-gb", type=float)
    parser.add_argument("--seed", type=int, default=0)
    serve(parser.parse_args(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
