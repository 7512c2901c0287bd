"""Results files of flashdraft bench, read with their shape checked.

A file comes from another machine, another version or an editor: what the table, the report and the
comparison rely on is checked here, once, and what does not fit is named in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from flashdraft.bench.results import BUCKETS, DRAFT, DRAFTS, PLAIN, Document, load_results
from flashdraft.errors import RequestError

MAX_NAMED = 5
MAX_NUMBER = 1e15  # no honest count or time is larger
ABSENT = object()


class Leaf(NamedTuple):
    """A single value: the test it must pass, and that test in words."""

    fits: Callable[[Any], bool]
    expected: str


class Maybe(NamedTuple):
    """A form, or null; with `absent` the key may be missing too."""

    form: Any
    absent: bool = False


class Each(NamedTuple):
    """An object whose every value has this form; its keys must be digits, where asked."""

    form: Any
    by_number: bool = False


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= MAX_NUMBER  # not a number compares as false


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


NUMBER = Leaf(_is_number, "a number from 0 up")
ABOVE_ZERO = Leaf(lambda value: _is_number(value) and value > 0, "a number above 0")
COUNT = Leaf(_is_whole, "a whole number from 0 up")
TEXT = Leaf(lambda value: isinstance(value, str), "text")
FLAG = Leaf(lambda value: isinstance(value, bool), "true or false")
MODE = Leaf(lambda value: value in (PLAIN, DRAFT), f"{PLAIN!r} or {DRAFT!r}")
REQUEST = Leaf(
    lambda value: (
        isinstance(value, list)
        and len(value) == 4
        and ABOVE_ZERO.fits(value[0])
        and _is_number(value[1])
        and _is_whole(value[2])
        and (value[3] is None or _is_whole(value[3]))
    ),
    "[seconds, seconds to the first token, output tokens, steps or null]",
)

ROW = {
    "task": TEXT,
    "concurrency": COUNT,
    "mode": MODE,
    **dict.fromkeys(("tokens_per_s", "wall_s"), NUMBER),
    **dict.fromkeys(("num_prompts", "output_tokens", "prompt_tokens"), COUNT),
    **dict.fromkeys(("ttft_p50_s", "ttft_p95_s", "itl_p50_s", "itl_p95_s"), Maybe(NUMBER)),
    **dict.fromkeys(("mean_accepted_length", "mean_accepted_length_pooled"), Maybe(NUMBER)),
    "accepted_histogram": Each(COUNT, by_number=True),
    "accepted_by_position": [NUMBER],
    "trees": Maybe(dict.fromkeys(DRAFTS, COUNT), absent=True),
    "buckets": dict.fromkeys(BUCKETS, Maybe(NUMBER)),
    "accuracy": Maybe({"correct": COUNT, "total": COUNT}),
    "requests": [REQUEST],
}
SETTINGS = {
    **dict.fromkeys(("engine", "model", "sampling"), TEXT),
    "url": Maybe(TEXT),
    "draft": Maybe(TEXT),
    "thinking": FLAG,
    **dict.fromkeys(("max_tokens", "warm_up_prompts"), COUNT),
    "prompts_per_task": Maybe(COUNT),
    **dict.fromkeys(("temperature", "top_p", "top_k"), Maybe(NUMBER, absent=True)),
}
DOCUMENT = {
    "is_partial": FLAG,
    "problems": [TEXT],
    "environment": {
        **dict.fromkeys(("device", "platform", "dtype", "kernels"), Maybe(TEXT, absent=True)),
        **dict.fromkeys(("cpu_count", "threads"), Maybe(COUNT, absent=True)),
    },
    "settings": SETTINGS,
    "prompts_sha256": Each(TEXT),
    "rows": [ROW],
    "speedup": Each(Each(ABOVE_ZERO)),
    "identical": Each(Each({"same": COUNT, "total": COUNT})),
}


def read_document(path: Path) -> Document:
    """A results file with everything in it that is read later; anything else is refused."""
    document = load_results(path)
    problems = [*_misfits(document, DOCUMENT, "")]
    if not problems:
        names = Counter((row["task"], row["concurrency"], row["mode"]) for row in document["rows"])
        problems = [f"two rows are {name}" for name, count in names.items() if count > 1]
    if problems:
        more = "; and more" if len(problems) > MAX_NAMED else ""
        raise RequestError(
            f"{path} is a damaged results file: {'; '.join(problems[:MAX_NAMED])}{more}. Take a "
            "fresh copy, or run the benchmark again with --json."
        )
    return document


def _misfits(value: Any, form: Any, where: str) -> Iterator[str]:
    """What does not have its form, by its place in the file; keys that are not asked for may be."""
    if isinstance(form, Maybe):
        if value is not None and not (value is ABSENT and form.absent):
            yield from _misfits(value, form.form, where)
    elif value is ABSENT:
        yield f"{where} is missing"
    elif isinstance(form, Leaf):
        if not form.fits(value):
            yield f"{where} is {_shortened(value)}, expected {form.expected}"
    elif isinstance(form, list):
        if not isinstance(value, list):
            yield f"{where} is no list"
        else:
            for place, item in enumerate(value, start=1):
                yield from _misfits(item, form[0], f"{where} {place}")
    elif not isinstance(value, dict):
        yield f"{where} is no object"
    elif isinstance(form, Each):
        for key, item in value.items():
            if form.by_number and not (key.isascii() and key.isdigit() and len(key) < 5):
                yield f"{where} has the key {_shortened(key)}, expected a number"
            yield from _misfits(item, form.form, f"{where} {key}")
    else:
        for key, part in form.items():
            yield from _misfits(value.get(key, ABSENT), part, f"{where} {key}".strip())


def _shortened(value: Any) -> str:
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        return "a number beyond all counting"  # too long to print, for Python too
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
