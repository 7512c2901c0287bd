"""A twin has everything of a thing but its values."""

from __future__ import annotations

import functools

import torch

from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.engine.twin import describe, imagine
from flashdraft.kernels.torch_backend import TorchKernels
from flashdraft.models.drafter.config import DrafterConfig
from tests import zoo


def test_tensors_keep_what_kernels_are_compiled_for() -> None:
    whole = torch.arange(60, dtype=torch.int32).view(6, 10)
    tensors = [whole, whole[1:, 3:], whole.T, whole[:, 2], torch.tensor(3.0)]
    tensors += [torch.empty(0, 4), torch.empty(0, 0), torch.empty(3, 0, 0)]
    for found, twin in zip(tensors, imagine(describe(tensors)), strict=True):
        assert twin.device.type == "meta"
        assert (twin.shape, twin.stride(), twin.dtype) == (
            found.shape,
            found.stride(),
            found.dtype,
        )
        assert twin.data_ptr() % 16 == (found.data_ptr() - whole.data_ptr()) % 16 or not found.ndim


def test_one_thing_in_two_places_stays_one_thing() -> None:
    shared = torch.zeros(3)
    first, (second,) = imagine(describe((shared, [shared])))
    assert first is second


class SlowKernels(TorchKernels):
    """Somebody's own, over one of ours."""

    delay = 1.0


def stranger() -> None:
    """A function that the twin's process does not know."""


def test_what_comes_from_elsewhere_is_left_out_or_is_what_it_extends() -> None:
    kernels = SlowKernels(torch.device("cpu"), torch.float32)
    twin = imagine(describe({"own": kernels, "accept": stranger, "len": len}))
    assert type(twin["own"]) is TorchKernels and twin["own"].device.type == "meta"
    assert twin["accept"] is None and twin["len"] is len
    partly = imagine(describe(functools.partial(DrafterConfig.from_hf)))
    assert partly.func == DrafterConfig.from_hf


def test_the_steps_of_an_engine_have_a_twin_that_takes_no_room() -> None:
    kernels = TorchKernels(torch.device("cpu"), torch.float32)
    target = zoo.tiny_target("gemma4", kernels, taps=(0, 2))
    config = EngineConfig(run_ahead=True, ngram=True, verify=7, cache=CacheOptions(cache_gb=0.05))
    engine = Engine(target, zoo.tiny_drafter(kernels), config)
    before = engine.steps.slots.tables.clone()
    words = describe(engine.steps)
    assert len(words) < 100_000  # the cache alone has 50 MB
    twin = imagine(words)
    assert twin.slots.tables.shape == before.shape and twin.slots.tables.is_meta
    assert twin.sizes == engine.steps.sizes and twin.num_nodes == engine.steps.num_nodes
    assert engine.steps.slots.tables.equal(before) and not engine.steps.slots.tables.is_meta
