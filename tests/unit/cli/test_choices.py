"""How the pairs of a card are worded: widths, commands to be copied, notes, and JSON."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from flashdraft.bench.plan.choices import Choices, choose
from flashdraft.bench.plan.gpus import GB, Card, custom_card, find_card
from flashdraft.bench.plan.machine import CPU_EFFICIENCY
from flashdraft.cli import build_parser
from flashdraft.cli.choices import WIDTH, as_json, describe, speeds

DENSE, SMALL = "google/gemma-4-31B-it", "smollm2-135m"
CPU = Card("a CPU", 20 * GB, 20 * GB, 0.02, 0.4, CPU_EFFICIENCY, is_cpu=True)


@pytest.fixture(scope="module")
def tight() -> Choices:
    return choose(find_card("rtx3090"))


@pytest.mark.parametrize("card", [find_card("rtx3090"), find_card("h200"), CPU])
@pytest.mark.parametrize("width", [50, 60, 80, 120])
def test_no_line_is_wider_than_the_terminal(card: Card, width: int) -> None:
    lines = list(describe(choose(card), width))
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for word in ("MODEL", "1 REQUEST", "FIGURES", "modelled", "* recommended", "chat brings less"):
        assert word in " ".join(text.split())
    assert ("CONTEXT  " in text) is (width >= WIDTH)  # columns go before lines break


def test_broken_commands_can_be_copied_and_others_stand_in_one_line(tight: Choices) -> None:
    broken = "\n".join(describe(tight, 50)).replace(" \\\n", " ")
    whole = list(describe(tight, 50, breaks=False))
    for one in tight.fitting:
        assert f"  $ {one.command}" in whole
        pieces = [line for line in broken.splitlines() if line.startswith("  $ ")]
        assert shlex.split(one.command) in [shlex.split(line[4:]) for line in pieces]
    build_parser().parse_args(shlex.split(pieces[0][4:])[1:])


def test_rows_say_what_fits_how_fast_and_what_drafts(tight: Choices) -> None:
    text = "\n".join(describe(tight))
    row = next(line for line in text.splitlines() if "gemma-4-31B-it  " in line)
    assert row.startswith("* gemma-4-31B-it") and row.endswith("modelled")
    assert " int4 " in row and "→" in row and f"({tight.fitting[0].num_at_once})" in row
    assert "drafter z-lab/gemma-4-31B-it-DFlash, accepted length 8.6 (published)" in text
    assert "drafter included, accepted length 5.5 (measured)" in text
    assert "rows choose their experts evenly" in text
    assert text.count("\n* ") == 2  # one row, and what the mark means


def test_what_the_figures_rest_on_is_said() -> None:
    def told(card: Card) -> str:
        return " ".join(" ".join(describe(choose(card), 100)).split())

    assert "no such card was measured" in told(find_card("a100"))
    h200 = told(find_card("h200"))
    assert "checked: against steps measured on such a card" in h200 and " checked " in h200
    cpu = told(CPU)
    assert "8-bit kernels read 20.0 GB/s, 400 GOP/s" in cpu and "kernels were timed" in cpu
    assert "experts" not in cpu and "none does: the quickest" not in cpu
    assert "none does: the quickest" in told(replace(CPU, bandwidth_tb_s=1e-6))
    assert "not predicted for a GPU of 24 GB: give --bandwidth" in told(custom_card(24, None))
    assert "its kernels were not timed" in told(replace(CPU, bandwidth_tb_s=None))


def test_what_does_not_fit_says_where_it_would() -> None:
    text = " ".join(" ".join(describe(choose(custom_card(12, 0.4)))).split())
    assert f"{DENSE} does not fit: it needs 25." in text
    assert "GB in int4, fp8 head. The RTX 4090 (24 GB) would hold it." in text
    nothing = list(describe(choose(custom_card(0.5, 0.4))))
    assert sum("does not fit" in line for line in nothing) == 6
    assert not any("recommended" in line or "$" in line for line in nothing)
    long = "\n".join(describe(choose(find_card("h200"), context=65536)))
    assert f"{SMALL} takes 8,192 tokens at most." in long


def test_json_holds_the_same_rows(tight: Choices) -> None:
    found = json.loads(json.dumps(as_json(tight)))
    assert found["card"]["name"] == "RTX 3090 (24 GB)" and not found["card"]["is_cpu"]
    assert found["recommended"] == DENSE == found["pairs"][0]["model"]
    assert [one["command"] for one in found["pairs"]] == [one.command for one in tight.fitting]
    first = found["pairs"][0]
    assert first["drafter"] == "z-lab/gemma-4-31B-it-DFlash" and first["is_recommended"]
    assert first["parameters"] == {"target": 31273088876, "drafter": 1535967488}
    parts = first["memory_gb"]
    assert parts["weights"] + parts["drafter"] + parts["cache"] < parts["total"] <= 25.77
    assert first["accepted_length"] == {"value": 8.6, "drafts": 15, "origin": "published"}
    assert first["figures"] == "modelled" and first["max_context"] >= 8192
    assert first["one"]["at_once"] == 1 and first["several"]["at_once"] < found["requests"]
    assert first["one"]["drafted_tokens_per_s"] > 3 * first["one"]["plain_tokens_per_s"]
    assert f"{first['one']['plain_tokens_per_s']:.0f}→" in speeds(tight.fitting[0].one)
    assert found["pairs"][-1]["drafter"] == "included"
    small = as_json(choose(custom_card(12, None)))
    assert small["pairs"][0]["one"]["plain_tokens_per_s"] is None
    (refused, *_) = small["do_not_fit"]
    assert (refused["model"], refused["smallest_card"]) == (DENSE, "RTX 4090 (24 GB)")
    assert refused["needs_gb"] > 12 and refused["max_context"] == 262144
