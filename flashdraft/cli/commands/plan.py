"""`flashdraft plan [MODEL]`: what fits on a GPU and how fast it should be, before loading anything.

Of one model cli/plan.py tells everything; without one all known models stand beside each other, in
the words of cli/choices.py. No network is asked, and no weights are read.
"""

from __future__ import annotations

import argparse
import shutil
import sys

from flashdraft.bench.plan.choices import choose
from flashdraft.bench.plan.gpus import Card, custom_card, find_card
from flashdraft.bench.plan.machine import this_machine, with_speed
from flashdraft.bench.plan.pairs import find_pair
from flashdraft.bench.plan.plan import make_plan
from flashdraft.cli import choices, plan
from flashdraft.cli.arguments import cache_options
from flashdraft.cli.files import write_json
from flashdraft.engine.config import CacheOptions
from flashdraft.errors import RequestError


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, or the same as JSON; without a model every known one."""
    if arguments.model is None:
        return _run_all(arguments)
    found = make_plan(
        find_pair(arguments.model, arguments.draft, not arguments.no_vision),
        _card(arguments),
        context=arguments.context,
        concurrency=1 if arguments.concurrency is None else arguments.concurrency,
        cache=cache_options(arguments),
    )
    if arguments.json is not None:
        write_json(arguments.json, plan.as_json(found))
    else:
        print("\n".join(plan.describe(found)))
    return 0


def _run_all(arguments: argparse.Namespace) -> int:
    for flag, value, usual in (
        ("--draft", arguments.draft, "auto"),
        ("--kv-keys", arguments.kv_keys, CacheOptions.kv_keys),
    ):
        if value != usual:
            raise RequestError(
                f"{flag} is {value!r}, which is for one model; name it, as in "
                f"flashdraft plan MODEL {flag} {value}."
            )
    if arguments.no_vision:
        raise RequestError(
            "--no-vision is for one model; name it, as in flashdraft plan MODEL --no-vision."
        )
    found = choose(
        _card(arguments),
        context=arguments.context,
        requests=arguments.concurrency,
        cache=cache_options(arguments),
    )
    if arguments.json is not None:
        write_json(arguments.json, choices.as_json(found))
    else:
        is_terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if is_terminal else choices.WIDTH
        print("\n".join(choices.describe(found, width, breaks=is_terminal)))
    return 0


def _card(arguments: argparse.Namespace) -> Card:
    card = None if arguments.gpu is None else find_card(arguments.gpu)
    if card is None and arguments.memory is None:
        card = with_speed(this_machine())
    if arguments.memory is None and arguments.bandwidth is None and card is not None:
        return card
    return custom_card(arguments.memory, arguments.bandwidth, card)
