"""`flashdraft plan` as numbers: what fits on a card, in which format, how fast, and what to type.

Brings sizes (sizes.py), speeds (speed.py) and a card (gpus.py) together and draws the
conclusions. The engine's own budget decides what fits; no weights are read, nothing is run. Formats
stand from the most exact to the smallest, so the first that holds the load is the one to run.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flashdraft.bench.plan.gpus import GB, Card, cards_by_memory
from flashdraft.bench.plan.pairs import Pair
from flashdraft.bench.plan.sizes import (
    CPU_FORMATS,
    FLOAT8,
    GPU_FORMATS,
    CachePlan,
    StoredFormat,
    count_drafter,
    count_target,
    drafter_bytes,
    loading_bytes,
    plan_cache,
    stored_formats,
    weight_bytes,
)
from flashdraft.bench.plan.speed import Prediction, predict, predict_best
from flashdraft.engine.cache.layers import shares_keys
from flashdraft.engine.cache.planning import DEFAULT_CPU_GB, GPU_SHARE
from flashdraft.engine.config import DEFAULT_CACHE, CacheOptions, EngineConfig
from flashdraft.errors import RequestError

DEFAULT_CONTEXT = 8192
MAX_CONCURRENCY = 1024  # no search goes beyond
UNLIMITED_BYTES = 10**15
# in the names of cards that have no fp8 instructions, which an fp8 cache needs: 8.9 and newer do
_OLDER_CARDS = ("3090", "a6000", "a100")


@dataclass(frozen=True)
class Fit:
    """The pair on the card in one format."""

    form: StoredFormat
    weights_bytes: float
    drafter_bytes: float
    budget_bytes: int  # for the cache: a share of what the weights leave, the rest is activations'
    cache: CachePlan | None  # None = the weights alone do not fit
    max_context: int  # of so many sequences as were asked for; 0 = none
    max_concurrency: int  # of sequences as long as was asked for
    plain: Prediction | None  # of those that fit; None = none does, or the bandwidth is not known
    drafted: Prediction | None  # at the best verify length; None = nothing is known of drafts

    @property
    def fits(self) -> bool:
        return self.cache is not None and self.cache.fits


@dataclass(frozen=True)
class Plan:
    """A pair, a card and a load, with every format's outcome."""

    pair: Pair
    card: Card
    context: int
    concurrency: int
    fits: tuple[Fit, ...]
    cache_gb: float | None = None  # asked for; None = the engine's own choice

    @property
    def best(self) -> Fit:
        """What to run: the first format that holds the whole load, or else the most of it."""
        whole = next((fit for fit in self.fits if fit.fits), None)
        return whole or max(self.fits, key=lambda fit: (fit.max_concurrency, fit.max_context))

    @property
    def num_at_once(self) -> int:
        """How many of the sequences asked for can run at once, each at its full length."""
        return self.concurrency if self.best.fits else self.best.max_concurrency

    @property
    def command(self) -> str | None:
        """What serves this load, as much of it at once as fits; None = not even one."""
        return serve_command(self, self.num_at_once) if self.num_at_once else None


def serve_command(plan: Plan, max_batch: int) -> str:
    """What serves the pair in its best format, so many requests at once."""
    words = ["flashdraft", "serve", plan.pair.model]
    if plan.pair.draft != "auto":
        words += ["--draft", plan.pair.draft]
    words += [*plan.pair.sight, *plan.best.form.flags]
    words += [] if plan.cache_gb is None else ["--cache-gb", f"{plan.cache_gb:g}"]
    words += ["--max-context", str(plan.context), "--max-batch", str(max_batch)]
    return shlex.join(words)


def make_plan(
    pair: Pair,
    card: Card,
    *,
    context: int | None = None,
    concurrency: int = 1,
    cache: CacheOptions = DEFAULT_CACHE,
) -> Plan:
    """Every format on this card, for so many sequences of so many tokens."""
    longest = pair.target.max_position
    if context is None:
        context = min(DEFAULT_CONTEXT, longest)
    if not 2 <= context <= longest:
        raise RequestError(
            f"--context is {context}; {pair.model} takes 2 to {longest} tokens, prompt and answer."
        )
    if not 1 <= concurrency <= MAX_CONCURRENCY:
        raise RequestError(f"--concurrency is {concurrency}; it must be 1 to {MAX_CONCURRENCY}.")
    formats = formats_of(pair, card)
    if cache.kv_dtype == "fp8":
        if not _reads_fp8(card):
            raise RequestError(
                f"--kv-dtype is fp8, which {card.title} cannot read; it takes a GPU of compute "
                "capability 8.9 or newer. Leave it out, or name another card."
            )
        formats = [_with_fp8_cache(form) for form in formats]
    if cache.kv_keys == "rebuilt":
        _refuse_rebuilt_keys(pair, card)
        formats = [_with_rebuilt_keys(form) for form in formats]
    fits = tuple(_fit(pair, card, form, context, concurrency, cache.cache_gb) for form in formats)
    return Plan(pair, card, context, concurrency, fits, cache.cache_gb)


def advice(plan: Plan) -> list[str]:
    """What would fit where the load does not: less of it, a smaller cache, a larger card."""
    best = plan.best
    if best.fits:
        return []
    found, wanted = [], f"{plan.concurrency} × {plan.context:,} tokens"
    if best.max_context:
        found.append(f"--context {best.max_context}: the longest for {plan.concurrency} at once")
    if best.max_concurrency:
        found.append(f"--concurrency {best.max_concurrency}: the most at {plan.context:,} tokens")
    found += _smaller_caches(plan, wanted)
    for card in cards_by_memory():
        form = _first_that_fits(plan, card, formats_of(plan.pair, card))
        if form is not None:
            found.append(f"a larger card: {wanted} in {form.name} fit on the {card.title}")
            break
    else:
        found.append(f"no single card of the table holds {wanted} in any format")
    return found


def _smaller_caches(plan: Plan, wanted: str) -> list[str]:
    """Each way to a smaller cache that is enough by itself; if none is, both of them together."""
    best, forms = plan.best.form, [fit.form for fit in plan.fits]
    narrow, fewer = [], []
    if best.cache_dtype != FLOAT8 and _reads_fp8(plan.card):
        narrow = [_with_fp8_cache(form) for form in forms]
    if best.kv_keys == "stored" and _rebuilds_keys(plan.pair, plan.card):
        fewer = [_with_rebuilt_keys(form) for form in forms]
    needs = "if the card has compute capability 8.9 or newer"
    ways = [(f"--kv-dtype fp8, {needs}", narrow), ("--kv-keys rebuilt", fewer)]
    fitting = [(flags, _first_that_fits(plan, plan.card, smaller)) for flags, smaller in ways]
    found = [f"{flags}: {wanted} fit in {form.name}" for flags, form in fitting if form is not None]
    if found or not (narrow and fewer):
        return found
    together, flags = list(map(_with_rebuilt_keys, narrow)), "--kv-dtype fp8 --kv-keys rebuilt"
    form = _first_that_fits(plan, plan.card, together)
    if form is not None:
        return [f"{flags}, {needs}: {wanted} fit in {form.name}"]
    fits = [_fit(plan.pair, plan.card, one, plan.context, plan.concurrency) for one in together]
    most = max(fits, key=lambda fit: fit.max_context)
    if most.max_context < 2 * max(1, plan.best.max_context):
        return []
    load = f"{plan.concurrency} × {most.max_context:,} tokens"
    return [f"{flags}, {needs}: {load} fit in {most.form.name}"]


def formats_of(pair: Pair, card: Card) -> Sequence[StoredFormat]:
    if card.is_cpu:
        return CPU_FORMATS
    return stored_formats(pair) if pair.stored else GPU_FORMATS


def _reads_fp8(card: Card) -> bool:
    return not card.is_cpu and not any(name in card.title.lower() for name in _OLDER_CARDS)


def _with_fp8_cache(form: StoredFormat) -> StoredFormat:
    flags = (*form.flags, "--kv-dtype", "fp8")
    return replace(form, flags=flags, cache_dtype=FLOAT8)


def _rebuilds_keys(pair: Pair, card: Card) -> bool:
    return not card.is_cpu and shares_keys(pair.target)


def _refuse_rebuilt_keys(pair: Pair, card: Card) -> None:
    if _rebuilds_keys(pair, card):
        return
    reason = f"which the kernels of {card.title} cannot do; it takes a GPU"
    if not shares_keys(pair.target):
        reason = f"but {pair.model} has no layers that share key and value; Gemma 4's full ones do"
    raise RequestError(f"--kv-keys is rebuilt, {reason}. Leave it out.")


def _with_rebuilt_keys(form: StoredFormat) -> StoredFormat:
    return replace(form, flags=(*form.flags, "--kv-keys", "rebuilt"), kv_keys="rebuilt")


def _first_that_fits(
    plan: Plan, card: Card, formats: Sequence[StoredFormat]
) -> StoredFormat | None:
    for form in formats:
        if _fit(plan.pair, card, form, plan.context, plan.concurrency).fits:
            return form
    return None


def break_even(plan: Plan, fit: Fit) -> float:
    """The accepted length from which drafting pays, at the verify length chosen or the longest."""
    pair, plain = plan.pair, fit.plain
    assert pair.drafter is not None and plain is not None
    chosen = fit.drafted.verify if fit.drafted is not None else 0
    drafted = predict(
        pair,
        plan.card,
        requests=plain.requests,
        context=plain.context,
        verify=chosen or pair.drafter.num_slots,
        form=fit.form,
        accepted_length=1.0,
    )
    return drafted.step_s / plain.step_s


def _fit(
    pair: Pair,
    card: Card,
    form: StoredFormat,
    context: int,
    concurrency: int,
    cache_gb: float | None = None,
) -> Fit:
    size = count_target(pair.target)
    weights = weight_bytes(size, form)
    drafting = drafter_bytes(None if pair.drafter is None else count_drafter(pair.drafter), form)
    left = card.free_bytes - weights - drafting
    if left < loading_bytes(size, form):
        left = -1.0
    device = "cpu" if card.is_cpu else "cuda"
    budget = _cache_budget(card, left, cache_gb)

    def cache(length: int, batch: int) -> CachePlan:
        config = EngineConfig.for_device(
            device,
            max_batch=batch,
            max_context=length,
            cache=CacheOptions(kv_keys=form.kv_keys),
        )
        return plan_cache(pair, form.cache_dtype, budget, config, length)

    longest, found = pair.target.max_position, None
    max_context = max_concurrency = 0
    if left > 0:
        found = cache(context, concurrency)
        max_context = _largest(2, longest, lambda length: cache(length, concurrency).fits)
        max_concurrency = _largest(1, MAX_CONCURRENCY, lambda batch: cache(context, batch).fits)
    plain = drafted = None
    batch = concurrency if found is not None and found.fits else max_concurrency
    if batch and card.bandwidth_tb_s is not None and form.is_predicted:
        plain = predict(pair, card, requests=batch, context=context, verify=0, form=form)
        if pair.accepted is not None:
            drafted = predict_best(pair, card, requests=batch, context=context, form=form)
    return Fit(
        form=form,
        weights_bytes=weights,
        drafter_bytes=drafting,
        budget_bytes=budget,
        cache=found,
        max_context=max_context,
        max_concurrency=max_concurrency,
        plain=plain,
        drafted=drafted,
    )


def needed_bytes(pair: Pair, card: Card, form: StoredFormat, context: int) -> int:
    """Memory of such a card that one request of so many tokens takes, all counted."""
    without_end = replace(card, free_bytes=UNLIMITED_BYTES)
    fit = _fit(pair, without_end, form, context, 1, UNLIMITED_BYTES / GB)
    assert fit.cache is not None
    rest = float(fit.cache.needed_bytes)
    if card.is_cpu:
        rest = max(rest, loading_bytes(count_target(pair.target), form))
    else:
        rest /= GPU_SHARE
    return int(card.runtime_bytes + fit.weights_bytes + fit.drafter_bytes + rest)


def _cache_budget(card: Card, left: float, cache_gb: float | None) -> int:
    """What the engine gives the cache of the memory that weights leave."""
    if card.is_cpu:
        return int(min(max(0.0, left), (cache_gb or DEFAULT_CPU_GB) * GB))
    share = max(0.0, left) * GPU_SHARE
    return int(share if cache_gb is None else min(max(0.0, left), cache_gb * GB))


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number from low to high that fits, where all below it do; 0 = none."""
    if not fits(low):
        return 0
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
