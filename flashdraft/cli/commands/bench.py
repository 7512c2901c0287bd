"""`flashdraft bench`: plain against drafted on tasks, in this process or at an OpenAI endpoint."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashdraft.bench.accuracy.answers import check_answer, why_unchecked
from flashdraft.bench.report.compare import compare_files
from flashdraft.bench.report.page import write_report
from flashdraft.bench.report.table import render_table
from flashdraft.bench.results import Results, save_results, to_json
from flashdraft.bench.run.counters import OURS
from flashdraft.bench.run.endpoint import Asking, EndpointRunner
from flashdraft.bench.run.environment import describe_environment, shown_path
from flashdraft.bench.run.local import LocalRunner
from flashdraft.bench.run.measure import MeasuredEngine, Sweep, run_sweep
from flashdraft.bench.run.served import Served, find_served
from flashdraft.bench.run.stream import Endpoint
from flashdraft.bench.tasks import PUBLISHED, SAMPLE, Task, load_prompts, load_tasks, tasks_in
from flashdraft.cli.arguments import (
    LLM_DEFAULTS,
    Commands,
    add_json_argument,
    add_model_arguments,
    describe_model,
    load_model,
    model_sampling,
    require_template,
)
from flashdraft.cli.commands.serve import KEY_VARIABLE
from flashdraft.cli.display import LiveLine, Screen
from flashdraft.cli.files import STDOUT, check_writable
from flashdraft.core import SamplingParams
from flashdraft.errors import FlashdraftError, RequestError
from flashdraft.interrupts import terminate_as_interrupt
from flashdraft.llm import LLM

GREEDY, RECOMMENDED = "greedy", "recommended"
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


def add_command(commands: Commands) -> None:
    """Add `bench` and `bench compare` to the command line."""
    parser = commands.add_parser(
        "bench",
        help="measure plain against drafted decoding",
        description="Measure plain and drafted decoding in turns, on built-in samples or on "
        "published tasks. The table goes to stdout, progress to stderr. Ctrl-C keeps what was "
        "measured.",
    )
    _add_task_arguments(parser)
    _add_run_arguments(parser)
    group = parser.add_argument_group("a server instead of a model in this process")
    group.add_argument("--url", metavar="URL", help="an OpenAI endpoint: flashdraft, vLLM, SGLang")
    group.add_argument(
        "--plain-url",
        metavar="URL",
        help="a second server without drafting, as the baseline; flashdraft needs none",
    )
    group.add_argument("--api-key", metavar="KEY", help=f"or {KEY_VARIABLE} in the environment")
    add_json_argument(parser)
    parser.add_argument(
        "--report", type=Path, metavar="FOLDER", help="write an HTML report with plots there"
    )
    add_model_arguments(parser)
    parser.set_defaults(run=run)
    actions = parser.add_subparsers(metavar="compare", title="or")
    compare = actions.add_parser(
        "compare",
        help="put two results files side by side",
        description="Compare two files that bench --json has written, with ratios and intervals.",
    )
    for name in ("a", "b"):
        compare.add_argument(name, type=Path, metavar=f"{name.upper()}.json")
    compare.set_defaults(run=run_compare)


def _add_task_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tasks")
    group.add_argument(
        "--tasks",
        type=_names,
        metavar="NAMES",
        help=f"of {', '.join(PUBLISHED)}, separated by commas; or {SAMPLE}, the built-in prompts "
        "(default: all there are in --data, else the samples)",
    )
    group.add_argument(
        "--data", metavar="FOLDER", help="where the tasks' .jsonl files are; hub fetches them"
    )
    group.add_argument(
        "--prompts", type=Path, metavar="FILE", help="your own: .jsonl, or .txt with one a line"
    )
    group.add_argument(
        "--num-prompts",
        type=int,
        default=20,
        metavar="N",
        help="of each task, drawn by the seed (default: %(default)s)",
    )
    group.add_argument(
        "--accuracy",
        action="store_true",
        help="check the answers too; code is run in a closed process",
    )


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument(
        "--concurrency",
        type=_counts,
        default=(1, 4, 8),
        metavar="LIST",
        help="requests in flight, one or several (default: 1,4,8)",
    )
    group.add_argument(
        "--max-tokens",
        type=int,
        default=SamplingParams.max_tokens,
        metavar="N",
        help="longest answer (default: %(default)s)",
    )
    group.add_argument("--thinking", action="store_true", help="let the model think aloud first")
    group.add_argument(
        "--sampling",
        choices=(GREEDY, RECOMMENDED),
        default=GREEDY,
        help="recommended: as the model's makers sample it (default: %(default)s)",
    )
    for flag, default, text in (
        ("--repeats", 1, "how often everything is measured"),
        ("--seed", 0, "of the prompts drawn and of the sampling"),
    ):
        group.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )


def run_compare(arguments: argparse.Namespace) -> int:
    """Print the comparison."""
    print(compare_files(arguments.a, arguments.b))
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Measure, and say what was found."""
    _check(arguments)
    tasks = _load_tasks(arguments)
    sweep = Sweep(tasks, arguments.concurrency, arguments.max_tokens, arguments.repeats)
    screen = Screen.detect()
    was_interrupted = False
    with terminate_as_interrupt():
        make = _open_endpoint if arguments.url is not None else _open_model
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


def _open_model(
    arguments: argparse.Namespace, sweep: Sweep, screen: Screen
) -> tuple[MeasuredEngine, Results]:
    llm = load_model(arguments, max_batch=max(sweep.concurrencies))
    require_template(llm)
    screen.note(describe_model(llm))
    params = SamplingParams()
    if arguments.sampling == RECOMMENDED:
        params = model_sampling(llm.generation_config)
    runner = LocalRunner(llm, params, arguments.thinking, arguments.seed)
    settings = {
        "engine": "in-process",
        "url": None,
        "model": shown_path(llm.model),
        "draft": _drafter(llm),
        **_settings(arguments, sweep, params),
    }
    results = _new_results(arguments, sweep, settings, describe_environment(sys.argv[1:], llm))
    if arguments.sampling == RECOMMENDED and params.is_greedy:
        results.problems.append("The model's generation_config recommends greedy decoding.")
    return runner, results


def _open_endpoint(
    arguments: argparse.Namespace, sweep: Sweep, screen: Screen
) -> tuple[MeasuredEngine, Results]:
    key = arguments.api_key or os.environ.get(KEY_VARIABLE)
    model = None if arguments.model == LLM_DEFAULTS["model"] else arguments.model
    served = _find_served(Endpoint.parse(arguments.url, key), model, screen)
    plain: Served | None = None
    if arguments.plain_url is not None:
        plain = _find_served(Endpoint.parse(arguments.plain_url, key), model, screen)
    verify = arguments.verify if isinstance(arguments.verify, int) else None
    if verify is not None and served.kind != OURS:
        raise RequestError(
            f"--verify is a flag for flashdraft; {served.endpoint.url} is another server, which "
            "has its own. Drop --verify."
        )
    is_greedy = arguments.sampling == GREEDY
    asking = Asking(is_greedy, arguments.thinking, arguments.seed, verify)
    runner = EndpointRunner(served, plain, asking)
    screen.note(f"{served.model} at {served.endpoint.url} ({served.kind})")
    settings = {
        "engine": "http",
        "url": served.endpoint.url,
        "model": shown_path(served.model),
        "draft": "the server's",
        **_settings(arguments, sweep, SamplingParams() if is_greedy else None),
        **({} if served.kind == OURS else {"verify": "the server's"}),
    }
    environment = {**describe_environment(sys.argv[1:]), "server": served.kind}
    results = _new_results(arguments, sweep, settings, environment)
    results.problems += runner.problems()
    results.is_partial |= runner.lacks_metrics
    return runner, results


def _find_served(endpoint: Endpoint, model: str | None, screen: Screen) -> Served:
    """Look at a server; while it loads, say so once, and on a terminal how long it takes."""
    live = LiveLine(screen, below_answer=False)
    say = screen.note

    def tell(text: str) -> None:
        nonlocal say
        say(text)
        say = live.show

    try:
        return find_served(endpoint, model, tell)
    finally:
        live.clear()


def _settings(
    arguments: argparse.Namespace, sweep: Sweep, params: SamplingParams | None
) -> dict[str, Any]:
    """What both ways to run share; without `params` the server chose them."""
    return {
        "verify": arguments.verify,
        "tasks": [task.name for task in sweep.tasks],
        "prompts_per_task": max(len(task.prompts) for task in sweep.tasks),
        "max_tokens": sweep.max_tokens,
        "thinking": arguments.thinking,
        "sampling": arguments.sampling,
        **{name: getattr(params, name, None) for name in ("temperature", "top_p", "top_k")},
        "seed": arguments.seed,
        "concurrency": list(sweep.concurrencies),
        "repeats": sweep.repeats,
        "warm_up_prompts": sweep.num_warm_ups(),
    }


def _drafter(llm: LLM) -> str:
    if llm.drafter_name is not None:
        return shown_path(llm.drafter_name)
    return "ngram" if llm.engine.config.ngram else "none"


def _new_results(
    arguments: argparse.Namespace,
    sweep: Sweep,
    settings: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> Results:
    check = check_answer if arguments.accuracy else None
    results = Results(sweep.tasks, environment, settings, check)
    results.problems += sweep.problems()
    if arguments.accuracy:
        reasons = [why_unchecked(task.checked_as) for task in sweep.tasks]
        pairs = zip(sweep.tasks, reasons, strict=True)
        results.problems += [f"{task.name}: not checked. {why}" for task, why in pairs if why]
    return results


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
            if getattr(arguments, name) != LLM_DEFAULTS[name]:
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


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list like 1,4,8") from None
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a number below 1")
    return tuple(dict.fromkeys(counts))
