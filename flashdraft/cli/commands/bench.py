"""`flashdraft bench`: plain against drafted on tasks, or a server under users' load."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from flashdraft.bench.run.measure import Sweep, run_sweep
from flashdraft.bench.tasks import Task, load_prompts, load_tasks, tasks_in
from flashdraft.cli.arguments import GREEDY, MODEL_DEFAULTS, RECOMMENDED
from flashdraft.cli.bench.endpoint import open_endpoint
from flashdraft.cli.bench.local import open_model
from flashdraft.cli.bench.results import save, show
from flashdraft.cli.bench.traffic import run_traffic
from flashdraft.cli.display import LiveLine, Screen
from flashdraft.cli.files import STDOUT, check_writable
from flashdraft.cli.flags.bench import CONCURRENCY, NUM_PROMPTS
from flashdraft.errors import FlashdraftError, RequestError
from flashdraft.interrupts import terminate_as_interrupt

EXIT_PARTIAL = 1
EXIT_INTERRUPTED = 130
# flags that a server has been started with, and a client cannot change
_SERVERS_OWN = (
    "draft",
    "tree",
    "device",
    "no_vision",
    "mmproj",
    "lora",
    "dtype",
    "quantize",
    "quantize_head",
    "activations",
    "max_context",
    "cache_gb",
    "kv_dtype",
    "kv_keys",
)

_TRAFFICS_OWN = (
    "duration",
    "burstiness",
    "prompt_tokens",
    "output_tokens",
    "slo_ttft",
    "slo_gap",
    "timeout",
    "plot",
)


def run(arguments: argparse.Namespace) -> int:
    """Measure, and say what was found."""
    is_traffic = arguments.rate is not None or arguments.clients is not None
    _check(arguments)
    _check_kind(arguments, is_traffic)
    if is_traffic:
        arguments.sampling = arguments.sampling or RECOMMENDED
        tasks = [] if arguments.prompt_tokens is not None else _load_tasks(arguments, None)
        return run_traffic(arguments, tasks, Screen.detect())
    arguments.sampling = arguments.sampling or GREEDY
    tasks = _load_tasks(arguments, arguments.num_prompts or NUM_PROMPTS)
    sweep = Sweep(tasks, arguments.concurrency, arguments.max_tokens, arguments.repeats)
    screen = Screen.detect()
    was_interrupted = False
    with terminate_as_interrupt():
        make = open_model if arguments.url is None else open_endpoint
        runner, results = make(arguments, sweep, screen)
        live = LiveLine(screen, below_answer=False)
        try:
            run_sweep(runner, sweep, results, live, lambda: save(arguments, results))
        except KeyboardInterrupt:
            was_interrupted = True
        finally:
            live.clear()
        document = results.document()
        if not document["rows"] and was_interrupted:
            screen.note("Interrupted before anything was measured.")
            return EXIT_INTERRUPTED
        if not document["rows"]:
            raise FlashdraftError("\n".join(["Nothing was measured.", *document["problems"]]))
        show(arguments, document, screen)
    if was_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_PARTIAL if document["is_partial"] else 0


def _load_tasks(arguments: argparse.Namespace, count: int | None) -> list[Task]:
    names, seed = arguments.tasks, arguments.seed
    if names is None and arguments.prompts is None:
        names = tasks_in(arguments.data)
    tasks = [] if names is None else load_tasks(names, arguments.data, count, seed)
    if arguments.prompts is not None:
        tasks.append(load_prompts(arguments.prompts, count, seed))
    return tasks


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be done, before anything is loaded or asked."""
    for name in ("num_prompts", "max_tokens", "repeats"):
        value, flag = getattr(arguments, name), "--" + name.replace("_", "-")
        if value is not None and value < 1:
            raise RequestError(f"{flag} is {value}; it must be at least 1.")
    if arguments.url is None and arguments.plain_url is not None:
        raise RequestError("--plain-url is the baseline of --url; give both.")
    if arguments.url is None and arguments.api_key is not None:
        raise RequestError("--api-key is for --url; in this process there is no door to open.")
    if arguments.url is not None:
        for name in _SERVERS_OWN:
            if getattr(arguments, name) != MODEL_DEFAULTS[name]:
                flag = "--" + name.replace("_", "-")
                raise RequestError(
                    f"{flag} is for the server to be started with; drop it or --url."
                )
    if arguments.json not in (None, STDOUT):
        check_writable(Path(arguments.json))
    if arguments.report is not None:
        _check_folder(arguments.report)


def _check_kind(arguments: argparse.Namespace, is_traffic: bool) -> None:
    """Refuse flags of the other kind of measurement, which would be ignored."""
    if not is_traffic:
        for name in _TRAFFICS_OWN:
            if getattr(arguments, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise RequestError(f"{flag} is of a load; give --rate or --clients with it.")
        return
    if arguments.url is None:
        raise RequestError("--rate and --clients are a load on a server; name it with --url.")
    given = {
        "--concurrency": arguments.concurrency != CONCURRENCY,
        "--repeats": arguments.repeats != 1,
        "--accuracy": arguments.accuracy,
        "--report": arguments.report is not None,
        "--plain-url": arguments.plain_url is not None,
    }
    for flag, is_given in given.items():
        if is_given:
            raise RequestError(f"{flag} is of a sweep; drop it, or --rate and --clients.")
    if arguments.plot is not None:
        check_writable(arguments.plot)


def _check_folder(folder: Path) -> None:
    """Refuse a report's folder that can neither be written in nor made."""
    nearest = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not nearest.is_dir():
        raise RequestError(f"--report is {folder}, but {nearest} is a file; name a folder.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise RequestError(f"--report is {folder}; {nearest} cannot be written: permission denied.")
