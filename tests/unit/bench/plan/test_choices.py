"""Which pairs a card holds, in what order, and which of them is the one to take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.plan_check import PAIRS
from flashdraft.bench.plan.choices import (
    CHECKED_FIGURES,
    MODELLED,
    READING_TOKENS_PER_S,
    Choices,
    choose,
)
from flashdraft.bench.plan.gpus import GB, Card, cards_by_memory, custom_card, find_card
from flashdraft.bench.plan.machine import CPU_EFFICIENCY
from flashdraft.bench.plan.pairs import CHECKED, TARGETS, find_pair
from flashdraft.bench.plan.plan import make_plan, needed_bytes
from flashdraft.bench.plan.sizes import count_target
from flashdraft.cli import build_parser
from flashdraft.engine.config import CacheOptions
from flashdraft.errors import RequestError

DENSE, MOE, SMALL = "google/gemma-4-31B-it", "google/gemma-4-26B-A4B-it", "smollm2-135m"
CODER = "Qwen/Qwen3-Coder-30B-A3B-Instruct"


def cpu(memory_gb: float, gb_s: float | None) -> Card:
    size = int(memory_gb * GB)
    bandwidth = None if gb_s is None else gb_s / 1e3
    return Card("a CPU", size, size, bandwidth, 0.5, CPU_EFFICIENCY, is_cpu=True)


def names(choices: Choices) -> list[str]:
    return [one.plan.pair.model for one in choices.fitting]


def test_every_pair_is_told_of_on_every_card_the_largest_first() -> None:
    for card in [*cards_by_memory(), cpu(16, 20.0)]:
        found = choose(card)
        others = [one.pair.model for one in found.others]
        assert sorted(names(found) + others) == sorted(TARGETS)
        sizes = [count_target(one.plan.pair.target).total for one in found.fitting]
        assert sizes == sorted(sizes, reverse=True)
        assert [one.is_recommended for one in found.fitting].count(True) == 1


def test_the_largest_that_writes_faster_than_people_read_is_recommended() -> None:
    for name in ("rtx3090", "rtx5090", "a100", "h200"):
        best = choose(find_card(name)).recommended
        assert best is not None and best.plan.pair.model == DENSE
    # the same memory, read ever more slowly
    rates = []
    for bandwidth, model in ((0.3, DENSE), (0.15, MOE), (1e-6, SMALL)):
        found = choose(custom_card(25.7, bandwidth, find_card("rtx3090")))
        best = found.recommended
        assert best is not None and best.plan.pair.model == model and best.one.plain is not None
        rates.append(best.one.plain.tokens_per_s)
    assert rates[0] > READING_TOKENS_PER_S and rates[1] > READING_TOKENS_PER_S > rates[2]


def test_without_a_bandwidth_the_size_decides() -> None:
    found = choose(custom_card(24.5, None))
    assert names(found)[:2] == [CODER, MOE]  # the first is recommended for code alone
    assert found.recommended is found.fitting[1] and found.fitting[1].figures is None
    slow = choose(cpu(64, None))
    assert slow.recommended is slow.fitting[-1] and names(slow)[-1] == SMALL


def test_a_request_fits_and_what_it_needs_is_what_it_takes() -> None:
    for name in ("rtx3090", "h200"):
        card = find_card(name)
        for one in choose(card).fitting:
            assert one.plan.best.fits and one.plan.best.max_context >= 8192
            assert one.needs_bytes <= card.memory_bytes
            # a card of just so much memory holds it, one of a twentieth less does not
            form = one.plan.best.form
            for share, fits in ((1.001, True), (0.95, False)):
                size = int(one.needs_bytes * share) - card.runtime_bytes
                smaller = replace(card, free_bytes=size)
                plan = make_plan(one.plan.pair, smaller)
                found = next(fit for fit in plan.fits if fit.form == form)
                assert found.fits is fits, (one.plan.pair.model, share)


def test_more_at_once_than_fit_are_cut_and_the_command_says_so() -> None:
    small, large = choose(find_card("rtx3090")), choose(find_card("h200"))
    tight = small.fitting[0]
    assert tight.plan.pair.model == DENSE and 1 <= tight.num_at_once < small.requests == 8
    assert tight.command.endswith(f"--max-context 8192 --max-batch {tight.num_at_once}")
    assert tight.several.plain is not None
    assert tight.several.plain.requests == tight.num_at_once
    assert {one.num_at_once for one in large.fitting} == {8}
    parser = build_parser()
    for one in (*small.fitting, *large.fitting, *choose(cpu(64, 20)).fitting):
        parser.parse_args(one.command.split()[1:])  # exits on what serve does not know


def test_figures_are_modelled_unless_such_steps_were_measured() -> None:
    assert set(CHECKED) == set(PAIRS.values())
    labels = {one.plan.pair.model: one.figures for one in choose(find_card("h200")).fitting}
    assert labels == dict.fromkeys(TARGETS, MODELLED) | dict.fromkeys(CHECKED, CHECKED_FIGURES)
    for card in (find_card("h100"), cpu(64, 20)):
        assert {one.figures for one in choose(card).fitting} == {MODELLED}
    # int8 was timed on no card
    int8 = choose(custom_card(60, None, find_card("h200"))).fitting[0]
    assert (int8.form_name, int8.figures) == ("int8", MODELLED)


def test_what_does_not_fit_says_what_it_needs_and_where_it_would() -> None:
    found = choose(custom_card(12, 0.4))
    assert names(found)[0] == "Qwen/Qwen3-8B"
    for one in found.others:
        assert one.needs_bytes is not None and one.needs_bytes > 12 * GB
        assert one.form_name == "int4, fp8 head" and one.cards[0].title.endswith("(24 GB)")
    nothing = choose(custom_card(0.5, 0.1))
    assert nothing.recommended is None and not nothing.fitting
    assert len(nothing.others) == len(TARGETS)
    assert nothing.others[-1].needs_bytes is not None
    assert nothing.others[-1].needs_bytes < 2 * GB


def test_a_longer_context_leaves_out_who_cannot_take_it() -> None:
    found = choose(find_card("h200"), context=65536)
    assert names(found) == [DENSE, CODER, MOE]
    assert {one.needs_bytes for one in found.others} == {None}
    everywhere = choose(find_card("h200"), context=262144, requests=1)
    assert everywhere.each == 262144 and names(everywhere) == [DENSE, CODER, MOE]
    for context, requests in ((1, 8), (8192, 0), (8192, 1025)):
        with pytest.raises(RequestError):
            choose(find_card("h200"), context=context, requests=requests)


def test_a_cpu_is_offered_what_its_memory_holds_while_it_loads() -> None:
    assert names(choose(cpu(4, 20))) == [SMALL]
    assert names(choose(cpu(16, 20))) == ["Qwen/Qwen3-4B", SMALL]
    large = choose(cpu(128, 20))
    assert names(large) == [DENSE, CODER, MOE, "Qwen/Qwen3-8B", "Qwen/Qwen3-4B", SMALL]
    assert {one.form_name for one in large.fitting} == {"int8"}
    for one in large.fitting:
        assert one.plan.best.fits and one.several.fits  # with the cache that is asked for
        assert ("--cache-gb" in one.command) is (one.plan.pair.model != SMALL)


def test_a_cpus_cache_is_no_larger_than_the_load_needs() -> None:
    (one,) = (x for x in choose(cpu(64, 20)).fitting if x.plan.pair.model == "Qwen/Qwen3-4B")
    size = one.plan.cache_gb
    assert size is not None
    less = CacheOptions(size - 0.1)
    alone = make_plan(one.plan.pair, one.plan.card, context=8192, cache=less)
    both = make_plan(one.plan.pair, one.plan.card, context=1024, concurrency=8, cache=less)
    assert not (alone.fits[0].fits and both.fits[0].fits)
    # one that is asked for is taken as it is
    (given,) = (
        x
        for x in choose(cpu(64, 20), cache=CacheOptions(8)).fitting
        if x.plan.pair.model == "Qwen/Qwen3-4B"
    )
    assert given.plan.cache_gb == 8 and "--cache-gb 8 " in given.command
    assert names(choose(cpu(64, 20), cache=CacheOptions(0.5))) == [SMALL]


def test_needs_grow_with_the_context() -> None:
    pair, card = find_pair(DENSE), find_card("h200")
    form = make_plan(pair, card).best.form
    needs = [needed_bytes(pair, card, form, length) for length in (1024, 8192, 65536)]
    assert needs == sorted(needs) and needs[2] - needs[1] > 4 * GB
