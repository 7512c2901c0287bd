"""The results that a measurement fills: its settings, how answers are judged, how it is shown."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashdraft.bench.accuracy.answers import check_answer, why_unchecked
from flashdraft.bench.report.page import write_report
from flashdraft.bench.report.table import render_table
from flashdraft.bench.results import Results, save_results, to_json
from flashdraft.bench.run.measure import Sweep
from flashdraft.cli.display import Screen
from flashdraft.cli.files import STDOUT
from flashdraft.core import SamplingParams


def shared_settings(
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


def new_results(
    arguments: argparse.Namespace,
    sweep: Sweep,
    settings: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> Results:
    """Empty results, with what is known before the first answer."""
    check = check_answer if arguments.accuracy else None
    results = Results(sweep.tasks, environment, settings, check)
    results.problems += sweep.problems()
    if arguments.accuracy:
        reasons = [why_unchecked(task.checked_as) for task in sweep.tasks]
        pairs = zip(sweep.tasks, reasons, strict=True)
        results.problems += [f"{task.name}: not checked. {why}" for task, why in pairs if why]
    return results


def save(arguments: argparse.Namespace, results: Results) -> None:
    """After every row: whatever happens next, it is kept."""
    if arguments.json not in (None, STDOUT):
        save_results(Path(arguments.json), results.document())


def show(arguments: argparse.Namespace, document: dict[str, Any], screen: Screen) -> None:
    """The table, and the files that the flags name."""
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
