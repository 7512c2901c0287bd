"""One pair's plan in words for a terminal, and as JSON.

The numbers are bench/plan/plan.py's; this module only words them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashdraft.bench.plan.gpus import GB, Card
from flashdraft.bench.plan.pairs import Pair
from flashdraft.bench.plan.plan import Fit, Plan, advice, break_even
from flashdraft.bench.plan.sizes import cache_bytes, count_drafter, count_target
from flashdraft.bench.plan.speed import FEW_BITS_SHARES, Prediction, explain
from flashdraft.cli.choices import describe_card
from flashdraft.engine.cache.layers import bytes_per_token, cache_layers
from flashdraft.engine.cache.planning import DEFAULT_CPU_GB, GPU_SHARE


def describe(plan: Plan) -> Iterator[str]:
    """The plan in words, line by line."""
    card, pair = plan.card, plan.pair
    yield f"{pair.model}, {_drafting(pair)}"
    yield f"on {card.title}: {describe_card(card)}"
    yield ""
    yield f"Memory in GB, for {plan.concurrency} × {plan.context:,} tokens:"
    yield from _table(plan)
    yield from _memory_notes(plan)
    yield ""
    speed = list(_speed(plan))
    yield from [*speed, ""] if speed else []
    if plan.command is not None:
        if plan.num_at_once < plan.concurrency:
            yield f"{plan.num_at_once} of {plan.concurrency} at once at full length; others wait:"
        yield f"Run: {plan.command}"
    found = advice(plan)
    if found:
        yield "For the whole load:" if plan.command else "It fits in no format. What would:"
        yield from (f"  {line}" for line in found)


def _table(plan: Plan) -> Iterator[str]:
    heading = ["FORMAT", "WEIGHTS", "DRAFTER", "CACHE", "ROOM", "FITS", "MAX CONTEXT", "MAX BATCH"]
    has_speed = any(fit.plain is not None for fit in plan.fits)
    rows = [heading + ["PLAIN TOK/S", "DRAFTED"] * has_speed + ["FLAGS"]]
    for fit in plan.fits:
        row = [fit.form.name, _gb(fit.weights_bytes), _gb(fit.drafter_bytes)]
        row += ["–" if fit.cache is None else _gb(fit.cache.needed_bytes)]
        row += [_gb(fit.budget_bytes), _state(plan, fit)]
        row += [f"{fit.max_context:,}" if fit.max_context else "–"]
        row += [str(fit.max_concurrency or "–")]
        if has_speed:
            row += [_rate(fit.plain, fit), _rate(fit.drafted, fit)]
        rows.append([*row, " ".join(fit.form.flags)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *middle, last = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in middle), last[0]]
        yield "  ".join(cells).rstrip()


def _state(plan: Plan, fit: Fit) -> str:
    if fit.fits:
        return "yes"
    return f"{fit.max_concurrency} of {plan.concurrency}" if fit.max_concurrency else "no"


def _memory_notes(plan: Plan) -> Iterator[str]:
    """Where the columns come from, with the numbers in."""
    dtype = plan.best.form.cache_dtype
    layers = cache_layers(plan.pair.target, plan.pair.drafter, plan.best.form.kv_keys)
    terms = []
    for window, cost in sorted(bytes_per_token(layers, dtype).items(), key=lambda one: one[0] or 0):
        seen = min(plan.context, window or plan.context)
        terms.append(f"{seen:,} × {cost:,} B" + (" (window)" if window else ""))
    tower = count_target(plan.pair.target).vision * plan.best.form.float_bits / 8
    if tower:
        yield (
            f"WEIGHTS: {_gb(tower)} GB of them is the tower for pictures, in floats; "
            "--no-vision leaves it out."
        )
    each = _gb(cache_bytes(layers, dtype, plan.context))
    yield f"Keys and values of one sequence: {' + '.join(terms)} = {each} GB."
    yield (
        "CACHE: whole pages, with what prompts write before pages behind a window are given back."
    )
    if plan.card.is_cpu:
        yield f"ROOM: {DEFAULT_CPU_GB:g} GB, or what --cache-gb says, where there is as much."
    elif plan.cache_gb is not None:
        yield "ROOM: what --cache-gb says, where there is as much."
    else:
        yield (
            f"ROOM: {GPU_SHARE:g} × what weights and drafter leave; the rest is for activations "
            "and captured steps."
        )


def _speed(plan: Plan) -> Iterator[str]:
    fit, pair, card = plan.best, plan.pair, plan.card
    if not plan.num_at_once:
        return
    if fit.plain is None:
        cure = "`flashdraft bench` measures it" if card.is_cpu else "give --bandwidth"
        yield f"Speed: not predicted for {card.title}; {cure}."
        return
    plain, drafted = fit.plain, fit.drafted
    load = f"{plain.requests} at once, {plain.context:,} tokens in"
    yield f"Speed of steady decoding expected in format {fit.form.name!r}, {load}:"
    yield f"plain: {plain.tokens_per_s:,.0f} tokens/s"
    yield from (f"  {line}" for line in explain(plain, card))
    if drafted is not None and pair.accepted is not None:
        ratio = drafted.tokens_per_s / plain.tokens_per_s
        yield (
            f"drafted: {drafted.tokens_per_s:,.0f} tokens/s, {ratio:.1f} times plain, at verify "
            f"length {drafted.verify}"
        )
        yield from (f"  {line}" for line in explain(drafted, card))
        yield (
            f"  accepted length: {pair.accepted.value:g} at {pair.accepted.verify} draft tokens, "
            f"{pair.accepted.origin}; break-even at {break_even(plan, fit):.1f}"
        )
    elif pair.drafter is not None:
        yield (
            "drafted: the accepted length of this pair is not known; verifying the whole block "
            f"pays from {break_even(plan, fit):.1f} on"
        )
    yield from _shared_notes(plan, plain, drafted)


def _speed_note(fit: Fit) -> str | None:
    """What a speed is worth that follows from no measured step."""
    if fit.plain is None or fit.form.is_measured:
        return None
    if fit.form.is_cpu:
        return (
            "≈: modelled from how fast the CPU's 8-bit kernels read and multiply, timed just now."
        )
    four, eight = FEW_BITS_SHARES.values()
    return (
        "≈: this format was not measured. Weights of 4 and 8 bits are taken to be read at "
        f"{four:g} and {eight:g} of the bandwidth, as int4 and fp8 were on an H200."
    )


def _shared_notes(plan: Plan, plain: Prediction, drafted: Prediction | None) -> Iterator[str]:
    experts = plan.pair.target.experts
    if experts is not None:
        steps = [step for step in (plain, drafted) if step is not None]
        counts = [
            f"{step.distinct_experts:.1f} for {step.requests * (step.verify + 1)} rows"
            for step in steps
        ]
        yield (
            f"Experts read per layer: {experts.num_experts} × (1 − (1 − {experts.num_chosen}/"
            f"{experts.num_experts})^rows) = {', '.join(counts)}; fewer where tokens agree."
        )
    if not plan.card.is_cpu:
        is_measured = plan.card.efficiency.is_measured
        known = "measured on this card" if is_measured else "measured on an H200 and assumed here"
        yield (
            f"Shares of bandwidth and arithmetic and times per kernel are {known}: bf16, int4, fp8."
        )
    note = _speed_note(plan.best)
    yield from [] if note is None else [note]


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as one JSON object; bytes in GB of 10^9, null where something is not known."""
    pair, card = plan.pair, plan.card
    return {
        "model": pair.model,
        "drafter": _drafter_name(pair),
        "parameters": {
            "target": count_target(pair.target).total,
            "drafter": None if pair.drafter is None else count_drafter(pair.drafter).total,
        },
        "accepted_length": None if pair.accepted is None else pair.accepted.value,
        "card": {
            "name": card.title,
            "memory_gb": round(card.memory_bytes / GB, 2),
            "free_gb": round(card.free_bytes / GB, 2),
            "bandwidth_tb_s": card.bandwidth_tb_s,
            "tflops": card.tflops,
            "is_measured": card.efficiency.is_measured,
        },
        "context": plan.context,
        "concurrency": plan.concurrency,
        "formats": [_fit_json(fit, card) for fit in plan.fits],
        "format": plan.best.form.name,
        "fits": plan.best.fits,
        "command": plan.command,
        "advice": advice(plan),
    }


def _fit_json(fit: Fit, card: Card) -> dict[str, Any]:
    cache = fit.cache
    return {
        "name": fit.form.name,
        "flags": list(fit.form.flags),
        "weights_gb": round(fit.weights_bytes / GB, 3),
        "drafter_gb": round(fit.drafter_bytes / GB, 3),
        "cache_gb": None if cache is None else round(cache.needed_bytes / GB, 3),
        "reserved_gb": None if cache is None else round(cache.reserved_bytes / GB, 3),
        "room_gb": round(fit.budget_bytes / GB, 3),
        "fits": fit.fits,
        "max_context": fit.max_context,
        "max_concurrency": fit.max_concurrency,
        "speed_note": _speed_note(fit),
        "plain": _step_json(fit.plain, card),
        "drafted": _step_json(fit.drafted, card),
    }


def _step_json(step: Prediction | None, card: Card) -> dict[str, Any] | None:
    if step is None:
        return None
    return {
        "requests": step.requests,
        "verify": step.verify,
        "accepted_length": round(step.accepted_length, 3),
        "read_gb": round(step.num_bytes / GB, 3),
        "distinct_experts": step.distinct_experts and round(step.distinct_experts, 1),
        "floor_ms": round(1e3 * step.floor_s, 3),
        "step_ms": round(1e3 * step.step_s, 3),
        "tokens_per_s": round(step.tokens_per_s, 1),
        "formula": "; ".join(explain(step, card)),
    }


def _drafter_name(pair: Pair) -> str | None:
    if pair.drafter_name is None or pair.draft != "auto":
        return pair.drafter_name
    return "included" if Path(pair.drafter_name).is_absolute() else pair.drafter_name


def _drafting(pair: Pair) -> str:
    name = _drafter_name(pair)
    if name is not None:
        return "drafted by its included drafter" if name == "included" else f"drafted by {name}"
    return "plain decoding" if pair.draft == "none" else "drafted by n-gram lookup, not predicted"


def _gb(size: float) -> str:
    return f"{size / GB:.2f}" if size < 10 * GB else f"{size / GB:.1f}"


def _rate(step: Prediction | None, fit: Fit) -> str:
    if step is None:
        return "–"
    return f"{'' if fit.form.is_measured else '≈ '}{step.tokens_per_s:,.0f}"
