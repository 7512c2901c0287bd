"""Settings of slots: set, moved, counted and cleared, and nothing written that nobody needs."""

from __future__ import annotations

import math
from dataclasses import fields

import torch
from torch import Tensor

from flashdraft.core import SamplingParams
from flashdraft.kernels.draw.noise import noise_start
from flashdraft.kernels.draw.rule import (
    BIASED,
    COUNT,
    MAX_TOP,
    PENALISED,
    PROMPT,
    STOP,
    STOPS_LATE,
    SlotRequest,
    SlotSettings,
    upload,
)
from tests.drawn import CPU

PLAIN = SlotRequest(SamplingParams(temperature=0.5, top_k=3, min_p=0.25, logprobs=2), 7, [1, 2])
PENALTY = SlotRequest(
    SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5),
    seed=-3,
    prompt_ids=[4, 4, 5, 99],
    output_ids=[6, 6, 5],
)
LATE = SlotRequest(SamplingParams(min_tokens=3), 0, [1, 2, 3, 4], stop_ids=(8, 9, -1))
BIAS = SlotRequest(SamplingParams(logit_bias={3: -1.5, 0: 2.0}, presence_penalty=1.0), 1, [2])


def columns(settings: SlotSettings, slot: int) -> list[float]:
    tensors = (getattr(settings, field.name) for field in fields(SlotSettings))
    return [one[slot].item() for one in tensors if isinstance(one, Tensor) and one.ndim == 1]


def test_a_slot_takes_a_request() -> None:
    settings = SlotSettings.allocate(4, 12, CPU)
    settings.set({2: PLAIN, 0: PENALTY, 3: LATE})
    assert settings.temperature.tolist() == [0, 0, 0.5, 0]
    assert settings.top_k.tolist() == [12, 12, 3, 12]
    assert settings.top_p.tolist() == [1, 1, 1, 1] and settings.top_p.dtype == torch.float64
    assert settings.least[2] == math.log(0.25) and settings.least[0] == -math.inf
    assert settings.noise.tolist() == [noise_start(-3), 0, noise_start(7), noise_start(0)]
    assert settings.num_top.tolist() == [-1, -1, 2, -1]
    assert settings.flags.tolist() == [PENALISED, 0, 0, STOPS_LATE] == settings.host_flags
    assert settings.free_from[3] == 7
    assert settings.facts[0].tolist() == [0, 0, 0, 0, PROMPT, PROMPT + 1, 2, 0, 0, 0, 0, 0]
    assert settings.facts[3].nonzero().flatten().tolist() == [8, 9]
    assert settings.facts[3, 8] == STOP
    assert not settings.facts[1:3].any() and not settings.bias.any()


def test_a_drafters_rows_are_looked_at_for_grammars_alone() -> None:
    settings = SlotSettings.allocate(3, 12, CPU)
    settings.set({2: PLAIN._replace(is_constrained=True), 0: PLAIN})
    assert settings.num_top.tolist() == [2, -1, 2]
    assert settings.for_drafts.num_top.tolist() == [-1, -1, MAX_TOP]


def test_the_prompt_counts_for_the_repetition_penalty_alone() -> None:
    settings = SlotSettings.allocate(1, 12, CPU)
    settings.set({0: BIAS})
    assert settings.flags[0] == PENALISED | BIASED
    assert not settings.facts.any()
    assert settings.bias[0, :4].tolist() == [2.0, 0.0, 0.0, -1.5]


def test_a_grammar_has_its_own_word_on_stop_tokens() -> None:
    settings = SlotSettings.allocate(1, 12, CPU)
    settings.set({0: LATE._replace(is_constrained=True)})
    assert settings.flags[0] == 0


def test_a_slot_forgets_its_last_request() -> None:
    settings = SlotSettings.allocate(2, 12, CPU)
    settings.set({0: BIAS, 1: PENALTY})
    settings.clear([0, 1])
    assert columns(settings, 0) == columns(SlotSettings.allocate(1, 12, CPU), 0)
    assert settings.host_flags == [0, 0]
    settings.set({0: PENALTY._replace(output_ids=[])})
    expected = {4: PROMPT, 5: PROMPT}
    assert {i: int(f) for i, f in enumerate(settings.facts[0]) if f} == expected
    other = SlotRequest(SamplingParams(logit_bias={5: 1.0}), 0, [])
    settings.set({0: other})
    assert settings.bias[0].nonzero().flatten().tolist() == [5]


def test_committed_tokens_are_counted_where_somebody_looks() -> None:
    settings = SlotSettings.allocate(3, 12, CPU)
    settings.set({0: PENALTY, 1: PLAIN, 2: PENALTY})
    tokens = torch.tensor([[6, 7, 6, 1], [3, 3, 3, 3], [11, -1, 12, 5]])
    settings.count(torch.tensor([0, 1, 2]), tokens, torch.tensor([3, 4, 4]))
    counts = settings.facts & COUNT
    assert counts[0].tolist() == [0, 0, 0, 0, 0, 1, 4, 1, 0, 0, 0, 0]
    assert counts[2].tolist() == [0, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1]
    assert not settings.facts[1].any()


def test_slots_change_places() -> None:
    settings = SlotSettings.allocate(4, 12, CPU)
    settings.set({0: BIAS, 1: PENALTY, 2: PLAIN})
    before = [columns(settings, slot) for slot in range(4)]
    facts, bias = settings.facts.clone(), settings.bias.clone()
    settings.move([2, 0, 1], [0, 1, 3])
    assert [columns(settings, slot) for slot in range(4)] == [before[i] for i in (2, 0, 2, 1)]
    assert settings.host_flags == settings.flags.tolist()
    assert torch.equal(settings.bias[1], bias[0]) and torch.equal(settings.facts[3], facts[1])
    settings.move([], [])


def test_everything_travels_at_once() -> None:
    arrays = [torch.arange(3).numpy(), torch.rand(2, 2).double().numpy(), torch.ones(0).numpy()]
    there = upload(arrays, CPU)
    assert [one.dtype for one in there] == [torch.int64, torch.float64, torch.float64]
    assert all(
        torch.equal(a, torch.from_numpy(b).to(a)) for a, b in zip(there, arrays, strict=True)
    )
