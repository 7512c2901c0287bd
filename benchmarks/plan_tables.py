"""What `flashdraft plan` says of cards that people own, in the README and in docs/choosing.md.

    python -m benchmarks.plan_tables           # write them
    python -m benchmarks.plan_tables --check   # 1 and a diff where they are out of date

The cards are the table's, the CPU is the one in benchmarks/results/plan_cpu.json. Everything
outside the markers is left alone.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.marked import Section, run
from benchmarks.plan_cpu import RESULTS, card_of, summary
from flashdraft.bench.plan.choices import Choice, Choices, choose
from flashdraft.bench.plan.gpus import GB, Card, find_card
from flashdraft.bench.plan.pairs import TARGETS, find_pair
from flashdraft.bench.plan.sizes import count_target
from flashdraft.cli.choices import describe, short_form, short_name, speeds

ROOT = Path(__file__).parents[1]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "choosing.md"
BEGIN = "<!-- which model on which card: written by python -m benchmarks.plan_tables -->"
END = "<!-- end of which model on which card -->"
CHECKED_HERE = (
    "How near that is on this CPU: decode steps of the default pair, to which two of the formula's "
    "constants were fitted, and of a model with layers of Qwen3 4B and random weights, beside the "
    "prediction."
)
WIDTH = 128
GPUS = ("rtx3090", "rtx4090", "rtx5090", "rtxpro6000", "h200")


def read_cpu(path: Path = RESULTS) -> Mapping[str, Any]:
    """The results file of the CPU."""
    document: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def page_section(cpu: Mapping[str, Any]) -> str:
    """The command's output for every card and the CPU."""
    parts = [""]
    for name, choices in _all_choices(cpu):
        command = "flashdraft plan" if choices.card.is_cpu else f"flashdraft plan --gpu {name}"
        parts += [f"### {choices.card.title}", "", "```console", f"$ {command}"]
        parts += [*describe(choices, breaks=False), "```", ""]
    parts += [_source(cpu, "../"), "", *textwrap.wrap(f"{CHECKED_HERE} {summary(cpu)}", WIDTH)]
    return "\n".join([*parts, "", ""])


def readme_section(cpu: Mapping[str, Any]) -> str:
    """Every pair on every card in one table, and what starts the recommended ones."""
    found = [choices for _, choices in _all_choices(cpu)]
    models = sorted(TARGETS, key=lambda name: -count_target(find_pair(name).target).total)
    heads = ["CPU" if one.card.is_cpu else one.card.title for one in found]
    lines = ["", _row(["modelled tok/s", *heads]), _row(["---"] * (len(heads) + 1))]
    for model in models:
        cells = [_cell(one, model) for one in found]
        lines.append(_row([f"{short_name(find_pair(model))}, modelled", *cells]))
    lines += ["", "```sh"]
    for choices in found:
        best = choices.recommended
        assert best is not None
        where = "CPU" if choices.card.is_cpu else choices.card.title
        lines.append(f"{best.command}  # {where}")
    return "\n".join([*lines, "```", "", _source(cpu, ""), "", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both, or say whether they are up to date."""
    return run(
        _sections,
        "python -m benchmarks.plan_tables",
        "Which model on which card, for the README.",
        arguments,
    )


def _sections() -> Iterator[Section]:
    cpu = read_cpu()
    yield Section(README, readme_section(cpu), BEGIN, END)
    yield Section(PAGE, page_section(cpu), BEGIN, END)


def _all_choices(cpu: Mapping[str, Any]) -> Iterator[tuple[str, Choices]]:
    cards: list[tuple[str, Card]] = [(name, find_card(name)) for name in GPUS]
    for name, card in [*cards, ("", card_of(cpu["card"]))]:
        yield name, choose(card)


def _cell(choices: Choices, model: str) -> str:
    """Format, memory and speeds of one request; in bold where recommended."""
    one = next((one for one in choices.fitting if one.plan.pair.model == model), None)
    if one is None:
        return "–"
    text = f"{short_form(one.form_name)}, {one.needs_bytes / GB:.1f} GB, {_speed(one)}"
    return f"**{text}**" if one.is_recommended else text


def _speed(one: Choice) -> str:
    return f"{speeds(one.one)}{', checked' if one.figures == 'checked' else ''}"


def _source(cpu: Mapping[str, Any], to_root: str) -> str:
    card, file = cpu["card"], f"{to_root}benchmarks/results/{RESULTS.name}"
    return (
        f"CPU: {card['title']}, {card['memory_gb']:.0f} GB, its kernels timed on "
        f"{cpu['environment']['date']}:\n`python -m benchmarks.plan_cpu` ([file]({file}))."
    )


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
