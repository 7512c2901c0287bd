"""A server, and perhaps a second one for plain answers, ready to be measured."""

from __future__ import annotations

import argparse
import os
import sys

from flashdraft.bench.results import Results
from flashdraft.bench.run.counters import OURS
from flashdraft.bench.run.endpoint import Asking, EndpointRunner
from flashdraft.bench.run.environment import describe_environment, shown_path
from flashdraft.bench.run.measure import MeasuredEngine, Sweep
from flashdraft.bench.run.served import Served, find_served
from flashdraft.bench.run.stream import Endpoint
from flashdraft.cli.arguments import GREEDY, KEY_VARIABLE, MODEL_DEFAULTS
from flashdraft.cli.bench.results import new_results, shared_settings
from flashdraft.cli.display import LiveLine, Screen
from flashdraft.core import SamplingParams
from flashdraft.errors import RequestError


def open_endpoint(
    arguments: argparse.Namespace, sweep: Sweep, screen: Screen
) -> tuple[MeasuredEngine, Results]:
    """Find the servers that the flags name; what measures them, and what results go into."""
    served = find_server(arguments, arguments.url, screen)
    plain: Served | None = None
    if arguments.plain_url is not None:
        plain = find_server(arguments, arguments.plain_url, screen)
    verify = verify_for(arguments, served)
    is_greedy = arguments.sampling == GREEDY
    asking = Asking(is_greedy, arguments.thinking, arguments.seed, verify)
    runner = EndpointRunner(served, plain, asking)
    screen.note(f"{served.model} at {served.endpoint.url} ({served.kind})")
    settings = {
        "engine": "http",
        "url": served.endpoint.url,
        "model": shown_path(served.model),
        "draft": "the server's",
        **shared_settings(arguments, sweep, SamplingParams() if is_greedy else None),
        **({} if served.kind == OURS else {"verify": "the server's"}),
    }
    environment = {**describe_environment(sys.argv[1:]), "server": served.kind}
    results = new_results(arguments, sweep, settings, environment)
    results.problems += runner.problems()
    results.is_partial |= runner.lacks_metrics
    return runner, results


def find_server(arguments: argparse.Namespace, url: str, screen: Screen) -> Served:
    """Look at a server; while it loads, say so once, and on a terminal how long it takes."""
    key = arguments.api_key or os.environ.get(KEY_VARIABLE)
    model = None if arguments.model == MODEL_DEFAULTS["model"] else arguments.model
    live = LiveLine(screen, below_answer=False)
    say = screen.note

    def tell(text: str) -> None:
        nonlocal say
        say(text)
        say = live.show

    try:
        return find_served(Endpoint.parse(url, key), model, tell)
    finally:
        live.clear()


def verify_for(arguments: argparse.Namespace, served: Served) -> int | None:
    """The fixed verify length to ask for, if any; another server than ours has its own flag."""
    verify = arguments.verify if isinstance(arguments.verify, int) else None
    if verify is not None and served.kind != OURS:
        raise RequestError(
            f"--verify is a flag for flashdraft; {served.endpoint.url} is another server, which "
            "has its own. Drop --verify."
        )
    return verify
