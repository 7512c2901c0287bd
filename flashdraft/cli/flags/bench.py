"""What may be typed after `flashdraft bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from flashdraft.bench.tasks import PUBLISHED, SAMPLE
from flashdraft.cli.arguments import (
    GREEDY,
    KEY_VARIABLE,
    RECOMMENDED,
    add_json_argument,
    add_model_arguments,
)
from flashdraft.cli.parser import Parser, later
from flashdraft.core import SamplingParams


def add_arguments(parser: Parser) -> None:
    """The flags of `bench`."""
    parser.description = (
        "Measure plain and drafted decoding in turns, on built-in samples or on "
        "published tasks. The table goes to stdout, progress to stderr. Ctrl-C keeps what was "
        "measured."
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
    actions = parser.add_subparsers(metavar="compare", title="or")
    compare = actions.add_parser(
        "compare",
        help="put two results files side by side",
        description="Compare two files that bench --json has written, with ratios and intervals.",
    )
    for name in ("a", "b"):
        compare.add_argument(name, type=Path, metavar=f"{name.upper()}.json")
    compare.set_defaults(run=later("flashdraft.cli.commands.compare"))


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
