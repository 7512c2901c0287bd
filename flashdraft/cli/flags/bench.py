"""What may be typed after `flashdraft bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from flashdraft.bench.tasks import PUBLISHED, SAMPLE
from flashdraft.bench.traffic.load import (
    DEFAULT_DURATION_S,
    MAX_RATE,
    REQUEST_LIMIT_S,
    LengthRange,
    OfferedLoad,
)
from flashdraft.cli.arguments import (
    GREEDY,
    KEY_VARIABLE,
    RECOMMENDED,
    add_json_argument,
    add_model_arguments,
)
from flashdraft.cli.parser import Parser, later
from flashdraft.core import SamplingParams
from flashdraft.errors import RequestError

NUM_PROMPTS = 20  # of a task, in a sweep
CONCURRENCY = (1, 4, 8)
MAX_SECONDS = 1e6


def add_arguments(parser: Parser) -> None:
    """The flags of `bench`."""
    parser.description = (
        "Measure plain and drafted decoding in turns, on built-in samples or on "
        "published tasks. The table goes to stdout, progress to stderr. Ctrl-C keeps what was "
        "measured."
    )
    _add_task_arguments(parser)
    _add_run_arguments(parser)
    _add_traffic_arguments(parser)
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
    actions = parser.add_subparsers(metavar="compare", title="or")
    compare = actions.add_parser(
        "compare",
        help="put two results files side by side",
        description="Compare two files that bench --json has written, with ratios and intervals.",
    )
    for name in ("a", "b"):
        compare.add_argument(name, type=Path, metavar=f"{name.upper()}.json")
    compare.set_defaults(run=later("flashdraft.cli.bench.compare"))


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
        metavar="N",
        help=f"of each task, drawn by the seed (default: {NUM_PROMPTS}); with --rate or --clients "
        "requests in all",
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
        default=CONCURRENCY,
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
        help="recommended: as the model's makers sample it, or the server does (default: "
        f"{GREEDY}; with --rate or --clients {RECOMMENDED})",
    )
    for flag, default, text in (
        ("--repeats", 1, "how often everything is measured"),
        ("--seed", 0, "of the prompts drawn and of the sampling"),
    ):
        group.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )


def _add_traffic_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("users' load on the server at --url, instead of a sweep")
    group.add_argument(
        "--rate", type=_rates, metavar="LIST", help="requests a second that come by chance"
    )
    group.add_argument(
        "--clients", type=_counts, metavar="LIST", help="clients, each of whom asks again at once"
    )
    group.add_argument(
        "--duration",
        type=_seconds,
        metavar="S",
        help=f"seconds of each load (default: {DEFAULT_DURATION_S:g}, or until --num-prompts)",
    )
    group.add_argument(
        "--burstiness",
        type=_seconds,
        metavar="X",
        help=f"of --rate: 1 is Poisson, less comes in bursts (default: {OfferedLoad.burstiness:g})",
    )
    for flag, what in (("--prompt-tokens", "prompts"), ("--output-tokens", "answers")):
        group.add_argument(
            flag, type=_length_range, metavar="A-B", help=f"{what} of so many tokens, about"
        )
    for flag, what in (("--slo-ttft", "its first token"), ("--slo-gap", "95 %% of its gaps")):
        group.add_argument(
            flag, type=_seconds, metavar="S", help=f"a request is good with {what} within S seconds"
        )
    group.add_argument(
        "--timeout",
        type=_seconds,
        metavar="S",
        help=f"seconds for one request (default: {REQUEST_LIMIT_S:g})",
    )
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="first tokens and gaps as .svg or .html"
    )


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


def _rates(text: str) -> tuple[float, ...]:
    return tuple(dict.fromkeys(_positive(part, text, MAX_RATE) for part in text.split(",")))


def _seconds(text: str) -> float:
    return _positive(text, text, MAX_SECONDS)


def _positive(part: str, text: str, most: float) -> float:
    try:
        value = float(part)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 < value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0 and at most {most:g}")
    return value


def _length_range(text: str) -> LengthRange:
    try:
        return LengthRange.parse(text)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from None
