"""docs/engines.md holds true: its commands parse, its sums are those of the planner."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import torch

from flashdraft.bench.plan.gpus import find_card
from flashdraft.bench.plan.pairs import DRAFTERS, TARGETS, Pair, find_pair
from flashdraft.bench.plan.sizes import (
    BF16,
    cache_bytes,
    count_drafter,
    count_target,
    weight_bytes,
)
from flashdraft.cli import build_parser
from flashdraft.engine.cache.layers import cache_layers
from flashdraft.external.launch import DRAIN_S
from flashdraft.external.memory import (
    GB,
    MOST_BATCHED_TOKENS,
    RUNTIME_BYTES,
    USABLE,
    activation_bytes,
)
from flashdraft.external.pairs import read_pair
from flashdraft.external.versions import SGLANG, VLLM
from flashdraft.external.vllm_plugin.releases import RELEASES, TRIED

PAGE = (Path(__file__).parents[3] / "docs" / "engines.md").read_text(encoding="utf-8")
NAMES = {"31B": "google/gemma-4-31B-it", "26B-A4B": "google/gemma-4-26B-A4B-it"}
CARDS = {"H100": "h100", "RTX PRO 6000": "rtxpro6000", "H200": "h200", "B200": "b200"}
CARDS["B300"] = "b300"


@cache
def weights(name: str) -> float:
    pair = find_pair(NAMES[name])
    assert pair.drafter is not None
    return weight_bytes(count_target(pair.target), BF16) + 2 * count_drafter(pair.drafter).total


def kept(pair: Pair, context: int) -> int:
    return cache_bytes(cache_layers(pair.target, pair.drafter), torch.bfloat16, context)


def room(name: str, card: str, count: int) -> float:
    pair = read_pair(NAMES[name], "auto", TARGETS, DRAFTERS)
    each = USABLE * find_card(card).memory_bytes - RUNTIME_BYTES
    return count * each - weights(name) - MOST_BATCHED_TOKENS * activation_bytes(pair, 1)


def test_commands_parse() -> None:
    lines = re.findall(r"^flashdraft (.*)$", PAGE, re.MULTILINE)
    assert len(lines) > 10
    for line in lines:
        build_parser().parse_args(shlex.split(line))


def test_the_versions_are_those_we_check() -> None:
    assert f"vllm/vllm-openai:v{VLLM.known}" in PAGE
    assert f"`pip install vllm=={VLLM.known}`" in PAGE
    assert f"lmsysorg/sglang:v{SGLANG.known}" in PAGE


def test_the_releases_are_those_of_the_table() -> None:
    rows = re.findall(
        r"^\| ([\d., ]+) \| (starts.*?) \| (yes|no)[^|]* \| (yes|no)[^|]* \|$", PAGE, re.M
    )
    said = {
        name: (serve == "starts", scaled == "yes", mended == "yes")
        for names, serve, scaled, mended in rows
        for name in names.split(", ")
    }
    assert said == {
        name: (name == TRIED.rpartition(".")[0], release.scales_drafters, release.mends_cpu)
        for name, release in RELEASES.items()
    }
    major, minor = list(RELEASES)[-1].split(".")
    assert f"| before {next(iter(RELEASES))} | refused" in PAGE
    assert f"| {major}.{int(minor) + 1} and later | starts with the flags of {TRIED}" in PAGE


def test_a_container_is_given_time_to_drain() -> None:
    (grace,) = re.findall(r"terminationGracePeriodSeconds: (\d+)", PAGE)
    assert int(grace) > DRAIN_S
    assert f"gives the engine {DRAIN_S:.0f} s" in PAGE


@pytest.mark.parametrize("name", NAMES)
def test_sums_of_one_sequence(name: str) -> None:
    assert f"**{weights(name) / GB:.1f} GB**" in PAGE
    cells = [kept(find_pair(NAMES[name]), k * 1024) / GB for k in (1, 8, 32, 128, 256)]
    assert f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |" in PAGE


def test_sums_of_servers() -> None:
    rows = re.findall(r"^\| (\d) × ([\w ]+) \| ([\d.]+) GB \| (.*?) \| (.*?) \|$", PAGE, re.M)
    assert len(rows) == 7
    for count, card, memory, *cells in rows:
        assert memory == f"{find_card(CARDS[card]).memory_bytes / GB:.1f}"
        for name, cell in zip(NAMES, cells, strict=True):
            left, pair = room(name, CARDS[card], int(count)), find_pair(NAMES[name])
            numbers = [int(left / kept(pair, k * 1024)) for k in (8, 128)]
            assert cell == f"{left / GB:.1f} GB, {numbers[0]}, {numbers[1]}", (card, name)


def test_sums_of_a_cluster() -> None:
    at_once = {
        name: int(room(name, "h200", 1) / kept(find_pair(NAMES[name]), 8192)) for name in NAMES
    }
    assert f"takes L ÷ {at_once['31B']} GPUs, 26B-A4B L ÷ {at_once['26B-A4B']}" in PAGE
    dense, experts = (-(-10000 // at_once[name]) for name in NAMES)
    assert f"{dense} GPUs or {-(-dense // 8)} machines of eight" in " ".join(PAGE.split())
    assert f"{experts} GPUs or {-(-experts // 8)} machines for 26B-A4B" in " ".join(PAGE.split())
    assert f"{-(-1_000_000 // 3939)} GPUs, {-(-1_000_000 // 3939 // 8)}" in " ".join(PAGE.split())
