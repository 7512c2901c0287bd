"""What may be typed after `flashdraft serve`."""

from __future__ import annotations

import argparse

from flashdraft.cli.arguments import KEY_VARIABLE, NATIVE, add_model_arguments, add_model_name
from flashdraft.cli.parser import Parser
from flashdraft.external.versions import ENGINES
from flashdraft.server.settings import LOG_FORMATS, ServerSettings


def add_arguments(parser: Parser) -> None:
    """The flags of `serve`."""
    parser.description = (
        "Serve a model with OpenAI's and Anthropic's APIs, and a web page at /. Ends "
        "with Ctrl-C or SIGTERM once the running answers are done; a second one ends at once."
    )
    parser.epilog = "What follows -- goes to the outside engine as it is."
    parser.takes_rest = True
    add_model_name(parser)
    add_model_arguments(parser)
    parser.add_argument(
        "--max-batch",
        type=int,
        metavar="N",
        help="answers written at once; more wait (default: 8, and 32 on a GPU)",
    )
    _add_server_arguments(parser)
    _add_engine_arguments(parser)


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default=ServerSettings.host, help="address to listen on (default: %(default)s)"
    )
    group.add_argument(
        "--port",
        type=int,
        default=ServerSettings.port,
        metavar="N",
        help="0 takes any free one (default: %(default)s)",
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"clients must send it; {KEY_VARIABLE} in the environment does the same",
    )
    group.add_argument(
        "--no-auth", action="store_true", help="let other machines in without an API key"
    )
    for flag, metavar, text in (
        ("--allow-host", "NAME", "a further name of this server, as clients' Host header has it"),
        ("--allow-origin", "ORIGIN", "an origin whose web pages may use this server"),
        (
            "--allow-media-domain",
            "HOST",
            "a host whose pictures are fetched for clients that name their address",
        ),
        ("--served-model-name", "NAME", "what clients call the model"),
    ):
        text += "; may be given several times"
        group.add_argument(flag, action="append", default=[], metavar=metavar, help=text)
    group.add_argument(
        "--max-queue",
        type=int,
        default=ServerSettings.max_queue,
        metavar="N",
        help="requests that may wait; one more is refused (default: %(default)s)",
    )
    group.add_argument(
        "--max-pictures",
        type=int,
        default=ServerSettings.max_pictures,
        metavar="N",
        help="pictures that a request may have (default: %(default)s)",
    )
    group.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default=ServerSettings.log_format,
        help="text for people, json for programs, auto by whether stdout is a terminal (default: "
        "%(default)s)",
    )
    group.add_argument(
        "--log-prompts", action="store_true", help="log what clients send, word for word"
    )
    group.add_argument(
        "--open-objects",
        action="store_true",
        help="let objects have more properties than their schema declares, where it does not say",
    )


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """--engine, and what goes with it."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--engine",
        choices=(NATIVE, *ENGINES),
        default=NATIVE,
        help="who runs the model: flashdraft itself, or vLLM or SGLang with the same pair "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--engine-python",
        metavar="PATH",
        help="the Python that the engine is installed in (default: this one)",
    )
    group.add_argument(
        "--tensor-parallel", type=int, metavar="N", help="GPUs that share the model, over all nodes"
    )
    group.add_argument("--nodes", type=int, metavar="N", help="machines that share the model")
    group.add_argument("--node-rank", type=int, metavar="N", help="this machine; 0 answers")
    group.add_argument("--head", metavar="HOST:PORT", help="where the nodes meet, on rank 0")
    group.add_argument(
        "--ray-address", metavar="ADDRESS", help="vLLM on a Ray cluster: HOST:PORT, or auto"
    )
    group.add_argument(
        "--dry-run", action="store_true", help="print the engine's command and do nothing"
    )
