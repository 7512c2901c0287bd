"""Sampling rows: the penalties, unsound rows, and the law that rows do not see each other."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashdraft.core import SamplingParams
from flashdraft.engine.sampling.process import (
    LogitsError,
    RequestSampler,
    draft_rows,
    validate_for_vocab,
)
from flashdraft.errors import FlashdraftError, RequestError
from flashdraft.kernels.draw import reference
from flashdraft.kernels.draw.rule import Draw, DrawnRows, SlotSettings
from tests.tree_rows import ancestors_of, as_word

CPU = torch.device("cpu")

SETTINGS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.8},
    {"top_k": 3},
    {"min_p": 0.15},
    {"top_p": 0.7, "top_k": 5, "min_p": 0.02},
]


class Torch:
    """What chooses tokens, in plain torch."""

    def argmax(self, x: Tensor) -> Tensor:
        return x.argmax(-1)

    def draw(self, logits: Tensor, settings: SlotSettings, rows: DrawnRows) -> Draw:
        return reference.draw(logits, settings, rows)


KERNELS = Torch()


def make_sampler(
    params: SamplingParams,
    vocab_size: int,
    seed: int = 7,
    stop_ids: tuple[int, ...] = (),
    prompt_ids: tuple[int, ...] = (),
) -> RequestSampler:
    return RequestSampler(params, seed, vocab_size, stop_ids, prompt_ids, CPU)


def random_rows(num_rows: int, vocab_size: int, seed: int, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread


class Samples(NamedTuple):
    tokens: Tensor
    sound: Tensor


def sample_rows(
    logits: Tensor,
    sampler: RequestSampler,
    history: list[int],
    drafts: list[int],
    first_position: int,
    kernels: Torch,
) -> Samples:
    """Draw from every row of one request, as a slot does; row j follows drafts[:j]."""
    place = torch.arange(len(logits))
    rows = DrawnRows(torch.zeros_like(place), first_position + place)
    if drafts:
        chain = torch.tensor([as_word(path) for path in ancestors_of(range(len(drafts)))])
        rows = replace(rows, followed=torch.tensor([drafts]), ancestors=chain[place])
    drawn = kernels.draw(logits, sampler.settings_after(history), rows)
    return Samples(drawn.tokens.clamp(min=0), drawn.tokens >= 0)


# -- the law: a row's token depends on the row alone ---------------------------------------------

LAW_SETTINGS: list[dict[str, Any]] = [
    {},
    {"min_tokens": 9, "repetition_penalty": 1.3},
    *({"temperature": 0.9, **setting} for setting in SETTINGS),
    {
        "temperature": 1.2,
        "top_p": 0.9,
        "min_tokens": 8,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {3: 2.5, 40: -100.0},
    },
]


@pytest.mark.parametrize("setting", LAW_SETTINGS)
def test_rows_at_once_equal_rows_one_by_one(setting: dict[str, Any]) -> None:
    vocab_size, prompt, history = 4099, (5, 6, 7, 5), [9, 3, 9, 11, 40]
    params = SamplingParams(**setting)
    rows = random_rows(9, vocab_size, seed=4)
    drafts = [9, 1, 4098, 3, 3, 2, 11, 0]
    together = make_sampler(params, vocab_size, 11, (2, 3), prompt)
    samples = sample_rows(rows, together, history, drafts, 9, KERNELS).tokens.tolist()
    for j in range(9):
        alone = make_sampler(params, vocab_size, 11, (2, 3), prompt)
        past = history + drafts[:j]
        row = rows[j : j + 1].clone()
        assert sample_rows(row, alone, past, [], 9 + j, KERNELS).tokens.tolist() == [samples[j]]
        # A sampler that has seen the drafts as rows continues as if it had not.
        again = sample_rows(rows[j : j + 1], together, past, [], 9 + j, KERNELS)
        assert again.tokens.tolist() == [samples[j]]
    assert sample_rows(rows, together, history, drafts, 9, KERNELS).tokens.tolist() == samples


@pytest.mark.parametrize("setting", [{}, {"temperature": 1.0}, {"repetition_penalty": 2.0}])
def test_no_rows_give_no_samples(setting: dict[str, Any]) -> None:
    samples = sample_rows(
        torch.empty(0, 8), make_sampler(SamplingParams(**setting), 8), [], [], 0, KERNELS
    )
    assert samples.tokens.shape == samples.sound.shape == (0,)


@pytest.mark.parametrize("temperature", [1e-300, 1e-8, 1e-4])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    for scale in (1.0, 1e30, 3e38):
        row = torch.tensor([[0.2, -1.0, 1.0, 0.9, -math.inf]]) * scale
        for setting in SETTINGS:
            sampler = make_sampler(SamplingParams(temperature=temperature, **setting), 5)
            samples = sample_rows(row, sampler, [], [], 3, KERNELS)
            assert samples.tokens.tolist() == [2] and samples.sound.tolist() == [True]


class NoWaiting(TorchDispatchMode):
    """Fails on operations whose result the host must wait for when the tensors are on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
            torch.ops.aten.equal,
        ), func
        return func(*args, **(kwargs or {}))


def test_sampling_does_not_wait_for_the_device() -> None:
    rows = random_rows(3, 50, seed=3)
    for setting in SETTINGS:
        sampler = make_sampler(SamplingParams(temperature=1.0, **setting), 50)
        with NoWaiting():
            sample_rows(rows, sampler, [4], [6, 7], 3, KERNELS)
    params = SamplingParams(repetition_penalty=1.2, presence_penalty=0.1, min_tokens=5)
    sampler = make_sampler(params, 50, stop_ids=(2,), prompt_ids=(1, 4))
    with NoWaiting():
        sample_rows(rows, sampler, [4, 5], [6, 7], 3, KERNELS)
        draft_rows(rows, sampler, [4, 5, 8], 3, KERNELS)
    with pytest.raises(AssertionError), NoWaiting():
        rows[torch.tensor(0)]


# -- bias, min_tokens, penalties -----------------------------------------------------------------


def adjusted(sampler: RequestSampler, row: Tensor, output: list[int]) -> Tensor:
    """A row as the sampler's settings leave it after these output tokens."""
    position = torch.tensor([len(sampler.slot_request([]).prompt_ids) + len(output)])
    rows = DrawnRows(torch.zeros(1, dtype=torch.int64), position)
    return reference.adjust(row.unsqueeze(0), sampler.settings_after(output), rows)[0]


def test_one_sampler_over_a_growing_history_is_a_new_one_every_time() -> None:
    chance = random.Random(6)
    for _ in range(50):
        params = SamplingParams(
            repetition_penalty=chance.choice([1.0, 0.7, 1.5]),
            frequency_penalty=chance.choice([0.0, 0.25, -0.5]),
            presence_penalty=chance.choice([0.0, 0.5, -1.5]),
            logit_bias=chance.choice([{3: 0.5}, {0: 5.0, 7: -3.0}]),
            min_tokens=chance.choice([0, 4]),
        )
        prompt = tuple(chance.randrange(12) for _ in range(chance.randrange(6)))
        sampler = make_sampler(params, 12, stop_ids=(1, 5), prompt_ids=prompt)
        output: list[int] = []
        for _ in range(6):
            row = torch.tensor([chance.gauss(0, 3) for _ in range(12)])
            fresh = make_sampler(params, 12, stop_ids=(1, 5), prompt_ids=prompt)
            assert torch.equal(adjusted(sampler, row, output), adjusted(fresh, row, output))
            output += [chance.randrange(12) for _ in range(chance.randrange(3))]


def test_a_history_that_starts_over_is_counted_anew() -> None:
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=2.0)
    row = torch.full((6,), 4.0)
    sampler = make_sampler(params, 6, prompt_ids=(0,))
    for history in ([1, 2, 2], [1, 2, 2, 3], [1, 2], [], [4, 4], [4, 5, 4]):
        expected = adjusted(make_sampler(params, 6, prompt_ids=(0,)), row, history)
        assert torch.equal(adjusted(sampler, row, history), expected)


def test_processing_leaves_its_inputs_alone() -> None:
    rows = random_rows(3, 20, seed=8)
    before = rows.clone()
    params = SamplingParams(temperature=1.0, presence_penalty=1.0, logit_bias={1: 4.0})
    sample_rows(rows, make_sampler(params, 20), [1, 2], [3, 4], 0, KERNELS)
    assert torch.equal(rows, before)


def test_tokens_outside_the_vocabulary_change_nothing() -> None:
    """Placeholders in a prompt, a model's odd eos id, a drafter's mask token."""
    params = SamplingParams(repetition_penalty=1.5, min_tokens=5)
    rows = random_rows(3, 10, seed=9)
    odd = make_sampler(params, 10, stop_ids=(2, 99), prompt_ids=(1, 50))
    plain = make_sampler(params, 10, stop_ids=(2,), prompt_ids=(1,))
    assert torch.equal(adjusted(odd, rows[0], [3]), adjusted(plain, rows[0], [3]))
    samples = sample_rows(rows, odd, [3], [77, -1], 0, KERNELS)
    assert samples.tokens[0] == sample_rows(rows, plain, [3], [0, 0], 0, KERNELS).tokens[0]


# -- rows no token can be chosen from ------------------------------------------------------------


@pytest.mark.parametrize("setting", LAW_SETTINGS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_an_unsound_row_is_reported_alone(setting: dict[str, Any], poison: float) -> None:
    rows = random_rows(3, 64, seed=10)
    rows[1] = poison
    sampler = make_sampler(SamplingParams(**setting), 64, stop_ids=(2, 3))
    samples = sample_rows(rows, sampler, [], [1, 2], 0, KERNELS)
    assert samples.sound.tolist() == [True, False, True]
    assert all(0 <= token < 64 for token in samples.tokens.tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_nan_spoils_a_row_but_minus_infinity_does_not(temperature: float) -> None:
    rows = random_rows(2, 32, seed=11)
    rows[0, 5], rows[1, :31] = math.nan, -math.inf
    sampler = make_sampler(SamplingParams(temperature=temperature, top_p=0.9), 32)
    samples = sample_rows(rows, sampler, [], [1], 0, KERNELS)
    assert samples.sound.tolist() == [False, True] and samples.tokens[1] == 31


def test_masking_every_token_is_unsound() -> None:
    sampler = make_sampler(SamplingParams(min_tokens=2), 4, stop_ids=(0, 1, 2, 3))
    samples = sample_rows(random_rows(3, 4, seed=12), sampler, [], [1, 1], 0, KERNELS)
    assert samples.sound.tolist() == [False, False, True]
    hidden = torch.tensor([[1.0, math.nan, 0.5]])  # NaN where the mask falls is NaN all the same
    sampler = make_sampler(SamplingParams(min_tokens=2), 3, stop_ids=(1,))
    assert sample_rows(hidden, sampler, [], [], 0, KERNELS).sound.tolist() == [False]
    error = LogitsError(17, False, sampler)
    assert isinstance(error, FlashdraftError) and "position 17" in str(error)


# -- drafting with the target's noise ------------------------------------------------------------


@pytest.mark.parametrize(
    "setting", [one for one in LAW_SETTINGS if "repetition_penalty" not in one]
)
def test_a_perfect_drafter_is_always_accepted(setting: dict[str, Any]) -> None:
    rows = random_rows(8, 300, seed=13)
    sampler = make_sampler(SamplingParams(**setting), 300, 5, (2, 3), (1, 2, 3))
    drafts = draft_rows(rows, sampler, [4, 5], 5, KERNELS).tokens.tolist()
    samples = sample_rows(rows, sampler, [4, 5], drafts[:-1], 5, KERNELS).tokens.tolist()
    assert samples == drafts


def test_a_draft_is_penalised_for_what_is_committed_alone() -> None:
    row = torch.zeros(1, 9)
    row[0, 4], row[0, 6] = 5.0, 4.5
    sampler = make_sampler(SamplingParams(presence_penalty=1.0), 9)
    rows = row.repeat(3, 1)
    assert draft_rows(rows, sampler, [], 0, KERNELS).tokens.tolist() == [4, 4, 4]
    assert draft_rows(rows, sampler, [4], 1, KERNELS).tokens.tolist() == [6, 6, 6]
    assert sample_rows(rows, sampler, [], [4, 6], 0, KERNELS).tokens.tolist() == [4, 6, 4]


def test_shared_noise_agrees_more_often_than_a_greedy_draft() -> None:
    num_rows, vocab_size = 1000, 40
    target = random_rows(num_rows, vocab_size, seed=14, spread=1.5)
    drafter = target + random_rows(num_rows, vocab_size, seed=15, spread=0.3)
    sampler = make_sampler(SamplingParams(temperature=1.0), vocab_size)
    samples = sample_rows(target, sampler, [], [], 0, KERNELS).tokens
    coupled = float((draft_rows(drafter, sampler, [], 0, KERNELS).tokens == samples).float().mean())
    greedy = float((drafter.argmax(-1) == samples).float().mean())
    # Independent noise would agree with probability Σ p q, and no coupling beats Σ min(p, q).
    p, q = target.softmax(-1), drafter.softmax(-1)
    best = float(torch.minimum(p, q).sum(-1).mean())
    assert coupled > greedy + 0.2 and coupled > float((p * q).sum(-1).mean()) + 0.2
    assert 0.85 * best < coupled < best + 0.03


# -- validation ----------------------------------------------------------------------------------


def test_ids_outside_the_vocabulary_are_refused() -> None:
    validate_for_vocab(SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[9], top_k=99), 10)
    with pytest.raises(RequestError, match="logit_bias names token 10; .* end at 9"):
        validate_for_vocab(SamplingParams(logit_bias={10: 1.0}), 10)
    with pytest.raises(RequestError, match="stop_token_ids names token 12"):
        validate_for_vocab(SamplingParams(stop_token_ids=[3, 12]), 10)
