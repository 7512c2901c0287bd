"""The pictures of a bench run: valid SVG, in scale, complete, and no markup from the figures."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from flashdraft.bench.report.plots import Plot, make_plots
from flashdraft.svg import PANEL_WIDTH, Axes, Series, bar_panel, inline_panel, ticks
from tests.bench_document import bench_document

SVG = "{http://www.w3.org/2000/svg}"


def plots_of(document: dict[str, Any]) -> dict[str, Plot]:
    return {plot.name: plot for plot in make_plots(document)}


def parsed(plot: Plot) -> ElementTree.Element:
    return ElementTree.fromstring(plot.to_svg())


def bars(picture: ElementTree.Element, tone: str) -> list[ElementTree.Element]:
    groups = [g for g in picture.iter(f"{SVG}g") if g.attrib.get("class") == tone]
    return [bar for group in groups for bar in group.iter(f"{SVG}rect") if "height" in bar.attrib]


def texts(picture: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in picture.iter(f"{SVG}text")]


def test_there_is_a_picture_for_each_question_and_a_panel_for_each_task() -> None:
    plots = plots_of(bench_document())
    assert list(plots) == [
        "throughput",
        "accepted_lengths",
        "acceptance_by_slot",
        "first_token",
        "between_tokens",
    ]
    for plot in plots.values():
        words = texts(parsed(plot))
        assert plot.title in words and plot.caption in words
        assert {"GSM8K", "MATH-500", "HumanEval", "MBPP", "MT-Bench"} <= set(words)
        assert {key.name for key in plot.keys} <= set(words)


def test_bars_are_as_high_as_the_speeds() -> None:
    document = bench_document(tasks=("gsm8k", "mbpp"), concurrency=(1, 4))
    picture = parsed(plots_of(document)["throughput"])
    for tone, mode in (("plain", "plain"), ("drafted", "draft")):
        speeds = [row["tokens_per_s"] for row in document["rows"] if row["mode"] == mode]
        heights = [float(bar.attrib["height"]) for bar in bars(picture, tone)[1:]]  # but the key
        ratios = [height / value for height, value in zip(heights, speeds, strict=True)]
        assert ratios == pytest.approx([ratios[0]] * 4, rel=0.01), "one scale for all tasks"
    assert f"{document['speedup']['mbpp']['4']:.2f}×" in texts(picture)


def test_a_histogram_shows_shares_of_the_steps() -> None:
    document = bench_document(tasks=("gsm8k",), concurrency=(1,))
    document["rows"][1]["accepted_histogram"] = {"1": 30, "3": 10}
    found = bars(parsed(plots_of(document)["accepted_lengths"]), "tone0")[1:]
    heights = [float(bar.attrib["height"]) for bar in found]
    assert heights[0] == pytest.approx(3 * heights[2], rel=0.01) and heights[1] == 0
    assert "75 % of steps" in (found[0].findtext(f"{SVG}title") or "")


def test_lines_differ_by_more_than_colour_and_fall_with_acceptance() -> None:
    document = bench_document(tasks=("gsm8k",), concurrency=(1, 8))
    for row in document["rows"]:
        row["accepted_by_position"] = [0.9, 0.5] if row["mode"] == "draft" else []
    lines = list(parsed(plots_of(document)["acceptance_by_slot"]).iter(f"{SVG}polyline"))
    assert len({line.attrib["stroke-dasharray"] for line in lines}) == 2
    (_, high), (_, low) = (point.split(",") for point in lines[0].attrib["points"].split())
    assert float(high) < float(low)


def test_long_waits_are_in_seconds_and_short_ones_in_milliseconds() -> None:
    document = bench_document(tasks=("gsm8k",))
    document["rows"][0]["ttft_p95_s"] = 7.5
    plots = plots_of(document)
    assert "s" in texts(parsed(plots["first_token"]))
    assert "ms" in texts(parsed(plots["between_tokens"]))


def test_what_an_endpoint_does_not_tell_is_not_drawn() -> None:
    document = bench_document(tasks=("gsm8k", "mbpp"))
    for row in document["rows"]:
        row["accepted_histogram"], row["accepted_by_position"] = {}, []
        row["itl_p50_s"] = row["itl_p95_s"] = None
    assert list(plots_of(document)) == ["throughput", "first_token"]


@pytest.mark.parametrize("num_levels", [1, 2, 9])
def test_any_number_of_loads_fits_its_panel(num_levels: int) -> None:
    document = bench_document(
        tasks=("gsm8k",), concurrency=tuple(range(1, num_levels + 1)), num_prompts=3
    )
    for plot in make_plots(document):
        panel = ElementTree.fromstring(inline_panel(plot.panels[0].drawing, "gsm8k"))
        for bar in panel.iter("rect"):
            left, width = float(bar.attrib["x"]), float(bar.attrib["width"])
            assert left >= 0 and left + width <= PANEL_WIDTH
            assert float(bar.attrib["height"]) >= 0 and float(bar.attrib["y"]) >= 0


def test_nothing_measured_is_no_error() -> None:
    assert make_plots(bench_document(tasks=())) == []
    only_zero = [Series("a", "tone0", [0.0, None])]
    assert "<rect" in bar_panel("t", ["1", "2"], only_zero, Axes("x", "y"))
    empty = bar_panel("t", ["1"], [Series("a", "tone0", [None])], Axes("x", "y"))
    assert "not measured" in empty


def test_names_cannot_become_markup() -> None:
    document = bench_document(tasks=("gsm8k",))
    for row in document["rows"]:
        row["task"] = "</text><script>alert('&')</script>"
    for plot in make_plots(document):
        assert "script" not in {element.tag for element in parsed(plot).iter()}
        assert "<script" not in plot.to_svg()


@pytest.mark.parametrize(("low", "high"), [(0, 10), (1.13, 1.17), (0, 123456), (-3, 4)])
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 3 <= len(found) <= 7
    assert all(low <= tick <= high for tick in found)


@pytest.mark.parametrize("high", [0.013, 0.9, 3, 47, 520, 123456])
def test_ticks_are_few_round_and_start_at_zero(high: float) -> None:
    found = ticks(0, high)
    assert found[0] == 0 and 3 <= len(found) <= 7 and found[-1] <= high
