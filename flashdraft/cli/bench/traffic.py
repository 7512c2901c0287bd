"""`flashdraft bench --rate R | --clients C`: a server under users' load."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashdraft.bench.results import save_results, to_json
from flashdraft.bench.run.environment import describe_environment, shown_path
from flashdraft.bench.tasks import Task
from flashdraft.bench.traffic.load import DEFAULT_DURATION_S, REQUEST_LIMIT_S, OfferedLoad
from flashdraft.bench.traffic.offer import Offer
from flashdraft.bench.traffic.questions import Questions
from flashdraft.bench.traffic.report import draw_loads, draw_page, make_document, render_loads
from flashdraft.cli.arguments import GREEDY
from flashdraft.cli.bench.endpoint import find_server, verify_for
from flashdraft.cli.display import LiveLine, Screen
from flashdraft.cli.files import STDOUT, write_text
from flashdraft.interrupts import interrupt_between_steps

EXIT_PARTIAL = 1
EXIT_INTERRUPTED = 130
PAGE_SUFFIXES = (".html", ".htm")


def run_traffic(arguments: argparse.Namespace, tasks: Sequence[Task], screen: Screen) -> int:
    """Offer the loads that the flags name to the server, and say what came of them."""
    loads = loads_of(arguments)
    served = find_server(arguments, arguments.url, screen)
    screen.note(f"{served.model} at {served.endpoint.url} ({served.kind})")
    questions = Questions(
        served,
        tasks,
        arguments.max_tokens,
        arguments.seed,
        is_greedy=arguments.sampling == GREEDY,
        thinking=arguments.thinking,
        verify=verify_for(arguments, served),
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
    )
    offer = Offer(
        questions,
        loads,
        arguments.timeout or REQUEST_LIMIT_S,
        slo_ttft_s=arguments.slo_ttft,
        slo_gap_s=arguments.slo_gap,
    )
    environment = {**describe_environment(sys.argv[1:]), "server": served.kind}
    settings = _settings(arguments, offer)

    def document() -> dict[str, Any]:
        return make_document(offer.rows, offer.problems, offer.is_partial, settings, environment)

    def save() -> None:
        if arguments.json not in (None, STDOUT):
            save_results(Path(arguments.json), document())

    live = LiveLine(screen, below_answer=False)
    with interrupt_between_steps(signal.SIGTERM) as is_interrupted:
        try:
            offer.run(is_interrupted, live.show, save)
        finally:
            live.clear()
        was_interrupted = is_interrupted()
    if not offer.rows:
        screen.note("Interrupted before anything was measured.")
        return EXIT_INTERRUPTED
    save()
    _show(arguments, document(), screen)
    if was_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_PARTIAL if offer.is_partial else 0


def loads_of(arguments: argparse.Namespace) -> list[OfferedLoad]:
    """One load for every rate and every number of clients."""
    num_requests, duration_s = arguments.num_prompts, arguments.duration
    if num_requests is None and duration_s is None:
        duration_s = DEFAULT_DURATION_S
    ends: dict[str, Any] = {"duration_s": duration_s, "num_requests": num_requests}
    shared = {**ends, "seed": arguments.seed}
    open_ones = [
        OfferedLoad(rate=rate, burstiness=arguments.burstiness or OfferedLoad.burstiness, **shared)
        for rate in arguments.rate or ()
    ]
    return [*open_ones, *[OfferedLoad(clients=n, **shared) for n in arguments.clients or ()]]


def _settings(arguments: argparse.Namespace, offer: Offer) -> dict[str, Any]:
    questions, served = offer.questions, offer.questions.served
    lengths = (questions.prompt_tokens, questions.output_tokens)
    prompt_tokens, output_tokens = (None if one is None else str(one) for one in lengths)
    return {
        "url": served.endpoint.url,
        "model": shown_path(served.model),
        "tasks": [task.name for task in questions.tasks],
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "max_tokens": questions.max_tokens,
        "thinking": questions.thinking,
        "sampling": "greedy" if questions.is_greedy else "the server's",
        "verify": questions.verify,
        "seed": questions.seed,
        "duration_s": offer.loads[0].duration_s,
        "num_requests": offer.loads[0].num_requests,
        "timeout_s": offer.limit_s,
        "slo_ttft_s": offer.slo_ttft_s,
        "slo_gap_s": offer.slo_gap_s,
        "warm_up_requests": offer.num_warm_ups,
    }


def _show(arguments: argparse.Namespace, document: dict[str, Any], screen: Screen) -> None:
    table = render_loads(document)
    if arguments.json == STDOUT:
        screen.note(table)
        screen.write(to_json(document))
    else:
        screen.write(table)
    if arguments.json not in (None, STDOUT):
        screen.note(f"wrote {arguments.json}")
    if arguments.plot is not None:
        is_page = arguments.plot.suffix.lower() in PAGE_SUFFIXES
        write_text(arguments.plot, draw_page(document) if is_page else draw_loads(document))
        screen.note(f"wrote {arguments.plot}")
