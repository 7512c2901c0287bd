"""`flashdraft bench`: plain against drafted on tasks, in this process or at an OpenAI endpoint."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from flashdraft.bench.report.page import write_report
from flashdraft.bench.report.table import render_table
from flashdraft.bench.results import Results, save_results, to_json
from flashdraft.bench.run.measure import Sweep, run_sweep
from flashdraft.bench.tasks import Task, load_prompts, load_tasks, tasks_in
from flashdraft.cli.arguments import MODEL_DEFAULTS
from flashdraft.cli.bench.endpoint import open_endpoint
from flashdraft.cli.bench.local import open_model
from flashdraft.cli.display import LiveLine, Screen
from flashdraft.cli.files import STDOUT, check_writable
from flashdraft.errors import FlashdraftError, RequestError
from flashdraft.interrupts import terminate_as_interrupt

EXIT_PARTIAL = 1
EXIT_INTERRUPTED = 130
# flags that a server has been started with, and a client cannot change
_SERVERS_OWN = (
    "draft",
    "device",
    "dtype",
    "quantize",
    "quantize_head",
    "max_context",
    "cache_gb",
    "kv_dtype",
    "kv_keys",
)


def run(arguments: argparse.Namespace) -> int:
    """Measure, and say what was found."""
    _check(arguments)
    tasks = _load_tasks(arguments)
    sweep = Sweep(tasks, arguments.concurrency, arguments.max_tokens, arguments.repeats)
    screen = Screen.detect()
    was_interrupted = False
    with terminate_as_interrupt():
        make = open_model if arguments.url is None else open_endpoint
        runner, results = make(arguments, sweep, screen)
        live = LiveLine(screen, below_answer=False)
        try:
            run_sweep(runner, sweep, results, live, lambda: _save(arguments, results))
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
        _show(arguments, document, screen)
    if was_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_PARTIAL if document["is_partial"] else 0


def _load_tasks(arguments: argparse.Namespace) -> list[Task]:
    count, seed = arguments.num_prompts, arguments.seed
    names = arguments.tasks
    if names is None and arguments.prompts is None:
        names = tasks_in(arguments.data)
    tasks = [] if names is None else load_tasks(names, arguments.data, count, seed)
    if arguments.prompts is not None:
        tasks.append(load_prompts(arguments.prompts, count, seed))
    return tasks


def _save(arguments: argparse.Namespace, results: Results) -> None:
    """After every row: whatever happens next, it is kept."""
    if arguments.json not in (None, STDOUT):
        save_results(Path(arguments.json), results.document())


def _show(arguments: argparse.Namespace, document: dict[str, Any], screen: Screen) -> None:
    table = render_table(document)
    if arguments.json == STDOUT:
        screen.note(table)
        screen.write(to_json(document))
    else:
        screen.write(table if table.endswith("\n") else table + "\n")
    if arguments.json not in (None, STDOUT):
        screen.note(f"wrote {arguments.json}")
    if arguments.report is not None:
        write_report(document, arguments.report)
        screen.note(f"wrote the report to {arguments.report}")


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be done, before anything is loaded or asked."""
    for name in ("num_prompts", "max_tokens", "repeats"):
        value, flag = getattr(arguments, name), "--" + name.replace("_", "-")
        if value < 1:
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


def _check_folder(folder: Path) -> None:
    """Refuse a report's folder that can neither be written in nor made."""
    nearest = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not nearest.is_dir():
        raise RequestError(f"--report is {folder}, but {nearest} is a file; name a folder.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise RequestError(f"--report is {folder}; {nearest} cannot be written: permission denied.")
