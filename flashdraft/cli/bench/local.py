"""A model in this process, ready to be measured."""

from __future__ import annotations

import argparse
import sys

from flashdraft.bench.results import Results
from flashdraft.bench.run.environment import describe_environment, shown_path
from flashdraft.bench.run.local import LocalRunner
from flashdraft.bench.run.measure import MeasuredEngine, Sweep
from flashdraft.cli.arguments import RECOMMENDED, model_sampling
from flashdraft.cli.bench.results import new_results, shared_settings
from flashdraft.cli.display import Screen
from flashdraft.cli.model import describe_model, load_model, require_template
from flashdraft.core import SamplingParams
from flashdraft.llm import LLM


def open_model(
    arguments: argparse.Namespace, sweep: Sweep, screen: Screen
) -> tuple[MeasuredEngine, Results]:
    """Load the model that the flags name; what measures it, and what its results go into."""
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
        "tree": llm.engine.config.tree,
        **shared_settings(arguments, sweep, params),
    }
    results = new_results(arguments, sweep, settings, describe_environment(sys.argv[1:], llm))
    if arguments.sampling == RECOMMENDED and params.is_greedy:
        results.problems.append("The model's generation_config recommends greedy decoding.")
    return runner, results


def _drafter(llm: LLM) -> str:
    if llm.drafter_name is not None:
        return shown_path(llm.drafter_name)
    return "ngram" if llm.engine.config.ngram else "none"
