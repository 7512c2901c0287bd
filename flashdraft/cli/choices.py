"""The pairs that a card holds, in words for a terminal or a page, and as JSON.

What fits, how fast and which is best is bench/plan/choices.py's; this module only words it.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flashdraft.bench.plan.choices import (
    CHECKED_FIGURES,
    READING_TOKENS_PER_S,
    Choice,
    Choices,
    Misfit,
)
from flashdraft.bench.plan.gpus import GB, TERA, Card
from flashdraft.bench.plan.pairs import FOR_CODE, Pair
from flashdraft.bench.plan.plan import Fit
from flashdraft.bench.plan.sizes import count_drafter, count_target
from flashdraft.bench.plan.speed import Prediction

WIDTH = 80  # of what is no terminal
_HEADING = ("", "MODEL", "WEIGHTS", "GB", "CONTEXT", "1 REQUEST", "{} AT ONCE", "FIGURES")
_LEFT = ("", "MODEL", "WEIGHTS")
_DROPPED = ("CONTEXT", "WEIGHTS", "{} AT ONCE")  # where the terminal is narrow, in this order
_INDENT = "  "


def describe(choices: Choices, width: int = WIDTH, breaks: bool = True) -> Iterator[str]:
    """The choices in words, no line longer than `width`, but commands unless `breaks`."""
    card = choices.card
    yield from textwrap.wrap(f"Models for {card.title}: {describe_card(card)}", width)
    yield ""
    if choices.fitting:
        heading, *lines = _table(choices, width)
        yield heading
        for one, line in zip(choices.fitting, lines, strict=True):
            yield line
            yield from _indented(_drafter_line(one.plan.pair), width)
            yield from _command_lines(one.command, width if breaks else None)
        yield ""
    for other in choices.others:
        yield from textwrap.wrap(_misfit_line(other), width, break_on_hyphens=False)
    if choices.others and choices.fitting:
        yield ""
    for note in notes(choices):
        yield from textwrap.wrap(note, width, break_on_hyphens=False)


def notes(choices: Choices) -> Iterator[str]:
    """What the table's figures mean and what they rest on."""
    if not choices.fitting:
        return
    context, each = f"{choices.context:,}", f"{choices.each:,}"
    rule = f"the largest model for all uses that holds {context} tokens and writes "
    rule += (
        f"{READING_TOKENS_PER_S:g} tokens/s or more without drafts, about twice what people read"
    )
    yield f"* recommended: {rule}{'; none does: the quickest' if _is_slow(choices) else ''}."
    larger = [short_name(one.plan.pair) for one in _larger(choices)]
    if larger and not _is_slow(choices):
        yield f"Larger, and slower than that here: {', '.join(larger)}."
    yield (
        f"GB: all that one request of {context} tokens takes, in 10^9 bytes. CONTEXT: the longest "
        "for one."
    )
    known = [one.figures for one in choices.fitting if one.figures is not None]
    if not known:
        cure = "its kernels were not timed" if choices.card.is_cpu else "give --bandwidth"
        yield f"Speeds are not predicted for {choices.card.title}: {cure}."
        return
    yield (
        f"Tokens/s, plain→drafted, of one request at {each} tokens, and of {choices.requests} such "
        f"at once; (n): no more than n fit. {_basis(choices.card, CHECKED_FIGURES in known)}"
    )
    yield (
        "Drafted: accepted lengths as published for mathematics and code, or as measured by us; "
        "chat brings less."
    )
    if any(one.plan.pair.target.experts is not None for one in choices.fitting):
        yield "A3B, A4B: rows choose their experts evenly, which reads the most."
    if any(one.plan.best.form.flags for one in choices.fitting) and not choices.card.is_cpu:
        yield (
            "Weights are fetched as they are published, mostly in bf16, and made smaller as they "
            "load; flashdraft pull MODEL fetches, and says beforehand how much."
        )
    yield f"More of one: flashdraft plan MODEL{'' if choices.card.is_cpu else ' --gpu NAME'}"


def _basis(card: Card, is_checked: bool) -> str:
    """What the speeds were made of."""
    if card.is_cpu:
        return (
            "All are modelled, from how fast the CPU's 8-bit kernels were timed: too slow, if it "
            "had other work."
        )
    if is_checked:
        return f"All are modelled; {CHECKED_FIGURES}: against steps measured on such a card."
    return "All are modelled: no such card was measured."


def as_json(choices: Choices) -> dict[str, Any]:
    """The choices as one JSON object; bytes in GB of 10^9, null where something is not known."""
    card, best = choices.card, choices.recommended
    return {
        "card": {
            "name": card.title,
            "is_cpu": card.is_cpu,
            "memory_gb": _gb(card.memory_bytes),
            "free_gb": _gb(card.free_bytes),
            "bandwidth_tb_s": card.bandwidth_tb_s,
            "tflops": card.tflops,
        },
        "context": choices.context,
        "requests": choices.requests,
        "tokens_each": choices.each,
        "recommended": None if best is None else best.plan.pair.model,
        "pairs": [_choice_json(one) for one in choices.fitting],
        "do_not_fit": [_misfit_json(one) for one in choices.others],
    }


def describe_card(card: Card) -> str:
    """Its memory, and how fast it is read."""
    free = f"{card.free_bytes / GB:.1f} of {card.memory_bytes / GB:.1f} GB usable"
    if card.bandwidth_tb_s is None:
        return f"{free}, bandwidth not known"
    if not card.is_cpu:
        return f"{free}, {card.bandwidth_tb_s:g} TB/s"
    rate = "" if card.tflops is None else f", {1e3 * card.tflops:.0f} GOP/s"
    read = card.bandwidth_tb_s * TERA / GB
    return f"{free}; its 8-bit kernels read {read:.1f} GB/s{rate}"


def speeds(fit: Fit, at_once: int | None = None) -> str:
    """Plain and drafted tokens/s of a load, and how many of it run at once where not all do."""
    if fit.plain is None:
        return "–"
    drafted = fit.drafted or fit.plain
    both = [_rate(one) for one in (fit.plain, drafted)]
    count = "" if at_once is None else f" ({at_once})"
    return ("→".join(both) if fit.drafted is not None else both[0]) + count


def short_name(pair: Pair) -> str:
    """A model's name without its owner's, and without what most are."""
    return pair.model.rpartition("/")[2].removesuffix("-Instruct")


def short_form(name: str) -> str:
    """A format without what it says of the head."""
    return name.partition(",")[0]


def _table(choices: Choices, width: int) -> Iterator[str]:
    """The heading and a line for each choice, with as many columns as there is room for."""
    rows = [dict(zip(_HEADING, _HEADING, strict=True))]
    rows += [_cells(one, choices.requests) for one in choices.fitting]
    rows[0]["{} AT ONCE"] = f"{choices.requests} AT ONCE"
    columns = list(_HEADING)
    for dropped in (None, *_DROPPED):
        columns = [name for name in columns if name != dropped]
        widths = {name: max(len(row[name]) for row in rows) for name in columns}
        if sum(widths.values()) + 2 * len(columns) - 3 <= width:
            break
    for row in rows:
        cells = [
            row[name].ljust(widths[name]) if name in _LEFT else row[name].rjust(widths[name])
            for name in columns
        ]
        yield f"{cells[0]} {'  '.join(cells[1:])}".rstrip()


def _cells(one: Choice, requests: int) -> dict[str, str]:
    several = None if one.num_at_once == requests else one.num_at_once
    cells = (
        "*" if one.is_recommended else " ",
        short_name(one.plan.pair),
        short_form(one.form_name),
        f"{one.needs_bytes / GB:.1f}",
        f"{one.plan.best.max_context:,}",
        speeds(one.one),
        speeds(one.several, several),
        one.figures or "–",
    )
    return dict(zip(_HEADING, cells, strict=True))


def _drafter_line(pair: Pair) -> str:
    accepted = pair.accepted
    length = "" if accepted is None else f", accepted length {accepted.value:g} ({_origin(pair)})"
    return f"drafter {_drafter(pair)}{length}"


def _origin(pair: Pair) -> str:
    assert pair.accepted is not None
    return "measured" if pair.accepted.is_measured else "published"


def _drafter(pair: Pair) -> str:
    name = pair.drafter_name or "n-grams"
    return "included" if Path(name).is_absolute() else name


def _command_lines(command: str, width: int | None) -> Iterator[str]:
    """The command, ready to be copied: broken lines end in a backslash."""
    line = f"{_INDENT}$"
    for index, word in enumerate(_units(command)):
        if width is not None and index and len(line) + len(word) + 3 > width:
            yield f"{line} \\"
            line = f"{_INDENT}   "
        line += f" {word}"
    yield line


def _units(command: str) -> Iterator[str]:
    """Words of a command; a flag and its value stay together."""
    words, index = shlex.split(command), 0
    while index < len(words):
        has_value = words[index].startswith("--") and index + 1 < len(words)
        yield shlex.join(words[index : index + 1 + has_value])
        index += 1 + has_value


def _indented(text: str, width: int) -> Sequence[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _misfit_line(one: Misfit) -> str:
    if one.needs_bytes is None:
        most = one.pair.target.max_position
        return f"{one.pair.model} takes {most:,} tokens at most."
    line = f"{one.pair.model} does not fit: it needs {one.needs_bytes / GB:.1f} GB "
    line += one.form_name if one.pair.stored else f"in {one.form_name}"
    return f"{line}. The {one.cards[0].title} would hold it." if one.cards else f"{line}."


def _larger(choices: Choices) -> Sequence[Choice]:
    """What stands before the recommended one, for it writes more slowly."""
    best = choices.recommended
    before = [] if best is None else choices.fitting[: choices.fitting.index(best)]
    return [one for one in before if one.plan.pair.model not in FOR_CODE]


def _is_slow(choices: Choices) -> bool:
    best = choices.recommended
    step = None if best is None else best.one.plain
    return step is not None and step.tokens_per_s < READING_TOKENS_PER_S


def _choice_json(one: Choice) -> dict[str, Any]:
    pair, best = one.plan.pair, one.plan.best
    cache = best.cache
    assert cache is not None
    return {
        "model": pair.model,
        "drafter": None if pair.drafter_name is None else _drafter(pair),
        "parameters": {
            "target": count_target(pair.target).total,
            "drafter": None if pair.drafter is None else count_drafter(pair.drafter).total,
        },
        "is_recommended": one.is_recommended,
        "format": one.form_name,
        "memory_gb": {
            "weights": _gb(best.weights_bytes),
            "drafter": _gb(best.drafter_bytes),
            "cache": _gb(cache.needed_bytes),
            "total": _gb(one.needs_bytes),
        },
        "max_context": best.max_context,
        "accepted_length": None
        if pair.accepted is None
        else {
            "value": pair.accepted.value,
            "drafts": pair.accepted.verify,
            "origin": _origin(pair),
        },
        "figures": one.figures,
        "one": _load_json(one.one, 1),
        "several": _load_json(one.several, one.num_at_once),
        "command": one.command,
    }


def _load_json(fit: Fit, at_once: int) -> dict[str, Any]:
    return {
        "at_once": at_once,
        "plain_tokens_per_s": _json_rate(fit.plain),
        "drafted_tokens_per_s": _json_rate(fit.drafted),
        "verify": None if fit.drafted is None else fit.drafted.verify,
    }


def _json_rate(step: Prediction | None) -> float | None:
    return None if step is None else round(step.tokens_per_s, 1)


def _misfit_json(one: Misfit) -> dict[str, Any]:
    return {
        "model": one.pair.model,
        "format": one.form_name,
        "needs_gb": None if one.needs_bytes is None else _gb(one.needs_bytes),
        "max_context": one.pair.target.max_position,
        "smallest_card": one.cards[0].title if one.cards else None,
    }


def _rate(step: Prediction) -> str:
    rate = step.tokens_per_s
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


def _gb(size: float) -> float:
    return round(size / GB, 2)
