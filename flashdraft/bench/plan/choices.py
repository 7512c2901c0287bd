"""`flashdraft plan` without a model: which of the known pairs a card holds, and the one to take.

Every pair is planned for one request of so many tokens (plan.py), and for several that share as
many; speeds are told at the length of these. The largest model comes first, and the first that
writes faster than people read is recommended. It draws conclusions from plans and reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from flashdraft.bench.plan.gpus import GB, Card, cards_by_memory
from flashdraft.bench.plan.pairs import CHECKED, FOR_CODE, TARGETS, Pair, find_pair
from flashdraft.bench.plan.plan import (
    DEFAULT_CONTEXT,
    Fit,
    Plan,
    formats_of,
    make_plan,
    needed_bytes,
    serve_command,
)
from flashdraft.bench.plan.sizes import count_target
from flashdraft.engine.cache.planning import DEFAULT_CPU_GB
from flashdraft.engine.config import DEFAULT_CACHE, CacheOptions

READING_TOKENS_PER_S = 10.0  # about twice what people read
DEFAULT_REQUESTS = 8
MODELLED, CHECKED_FIGURES = "modelled", "checked"
_LEAST_TOKENS = 128  # of one of several requests
_STEPS_PER_GB = 10  # in which a CPU's cache is asked for


@dataclass(frozen=True)
class Choice:
    """A pair that the card holds."""

    plan: Plan  # of one request at its full length; its speeds do not count
    one: Fit  # the same format with one short request
    several: Fit  # and with several
    num_at_once: int  # of these
    needs_bytes: int  # of the card's memory, by one request at its full length
    is_recommended: bool = False

    @property
    def form_name(self) -> str:
        return self.plan.best.form.name

    @property
    def figures(self) -> str | None:
        """How its speeds are known; None = there are none."""
        if self.one.plain is None:
            return None
        is_measured = self.plan.card.efficiency.is_measured and self.plan.best.form.is_measured
        return CHECKED_FIGURES if is_measured and self.plan.pair.model in CHECKED else MODELLED

    @property
    def command(self) -> str:
        """What serves it."""
        return serve_command(self.plan, self.num_at_once)


@dataclass(frozen=True)
class Misfit:
    """A pair that the card does not hold."""

    pair: Pair
    form_name: str  # the smallest
    needs_bytes: int | None  # None = no card helps: the model takes no such context
    cards: tuple[Card, ...]  # the smallest of the table that holds it


@dataclass(frozen=True)
class Choices:
    """All known pairs on one card."""

    card: Card
    context: int  # of one request, for which there is memory
    requests: int  # that are several
    each: int  # tokens of every one of them, and of the one whose speed is told
    fitting: tuple[Choice, ...]  # the largest model first
    others: tuple[Misfit, ...]

    @property
    def recommended(self) -> Choice | None:
        return next((one for one in self.fitting if one.is_recommended), None)


def choose(
    card: Card,
    *,
    context: int | None = None,
    requests: int | None = None,
    cache: CacheOptions = DEFAULT_CACHE,
) -> Choices:
    """Every known pair on this card, for one request of so many tokens, and several of a share."""
    context = DEFAULT_CONTEXT if context is None else context
    requests = DEFAULT_REQUESTS if requests is None else requests
    each = min(context, max(_LEAST_TOKENS, context // max(1, requests)))
    pairs = sorted(map(find_pair, TARGETS), key=lambda one: -count_target(one.target).total)
    fitting, others = [], []
    for pair in pairs:
        found = _consider(pair, card, context, requests, each, cache)
        if found is None:
            others.append(_misfit(pair, card, context))
        else:
            fitting.append(found)
    best = _recommend(card, fitting)
    marked = tuple(replace(one, is_recommended=one is best) for one in fitting)
    return Choices(card, context, requests, each, marked, tuple(others))


def _consider(
    pair: Pair, card: Card, context: int, requests: int, each: int, cache: CacheOptions
) -> Choice | None:
    """The pair as a choice, with a cache that holds the load; None where nothing does."""
    if context > pair.target.max_position:
        return None
    for asked in _caches(pair, card, context, requests, each, cache):
        plan = make_plan(pair, card, context=context, cache=asked)
        if not plan.best.fits:
            continue
        place = plan.fits.index(plan.best)
        one, several = (
            make_plan(pair, card, context=each, concurrency=batch, cache=asked).fits[place]
            for batch in (1, requests)
        )
        at_once = requests if several.fits else several.max_concurrency
        needs = needed_bytes(pair, card, plan.best.form, context)
        return Choice(plan, one, several, at_once, needs)
    return None


def _caches(
    pair: Pair, card: Card, context: int, requests: int, each: int, cache: CacheOptions
) -> Iterator[CacheOptions]:
    """Sizes of the cache to try: on a CPU the smallest that hold several requests, or one."""
    if not card.is_cpu or cache.cache_gb is not None:
        yield cache
        return

    def sized(tenths: int) -> CacheOptions:
        size = tenths / _STEPS_PER_GB
        return cache if size <= DEFAULT_CPU_GB else replace(cache, cache_gb=size)

    def holds(tenths: int, length: int, batch: int) -> bool:
        asked = sized(tenths)
        return make_plan(pair, card, context=length, concurrency=batch, cache=asked).fits[0].fits

    most = int(card.free_bytes / GB * _STEPS_PER_GB)
    least = int(DEFAULT_CPU_GB * _STEPS_PER_GB)

    def both(tenths: int) -> bool:
        return holds(tenths, context, 1) and holds(tenths, each, requests)

    for enough in (both, lambda tenths: holds(tenths, context, 1)):
        size = _smallest(least, most, enough)
        if size is not None:
            yield sized(size)


def _smallest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The smallest number from low to high that is enough, where all above it are."""
    if low > high or not fits(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _misfit(pair: Pair, card: Card, context: int) -> Misfit:
    form = formats_of(pair, card)[0 if card.is_cpu else -1]
    if context > pair.target.max_position:
        return Misfit(pair, form.name, None, ())
    large = [
        other
        for other in cards_by_memory()
        if other.memory_bytes >= needed_bytes(pair, other, formats_of(pair, other)[-1], context)
    ]
    return Misfit(pair, form.name, needed_bytes(pair, card, form, context), tuple(large[:1]))


def _recommend(card: Card, fitting: list[Choice]) -> Choice | None:
    """The largest that writes faster than people read; without speeds the largest, on a GPU."""
    fitting = [one for one in fitting if one.plan.pair.model not in FOR_CODE]
    if not fitting:
        return None

    rates = [(one, one.one.plain.tokens_per_s) for one in fitting if one.one.plain is not None]
    if not rates:
        return fitting[-1 if card.is_cpu else 0]
    quick = [one for one, rate in rates if rate >= READING_TOKENS_PER_S]
    return quick[0] if quick else max(rates, key=lambda pair: pair[1])[0]
