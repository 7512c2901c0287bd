"""What a target's weights take, and the refusal of those that do not fit, before they are read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdraft.engine.cache import memory
from flashdraft.engine.cache.memory import check_weights_fit, target_bytes
from flashdraft.errors import CapacityError
from flashdraft.kernels.kinds import Scheme
from flashdraft.kernels.torch_backend import TorchKernels
from tests import zoo

SHAPES = {
    "model.embed_tokens.weight": (100, 64),
    "model.layers.0.mlp.up_proj.weight": (10, 64),
    "model.layers.0.router.proj.weight": (4, 64),
    "model.norm.weight": (64,),
}
HEAD = {"lm_head.weight": (100, 64)}
INT4 = 64 // 2 + 64 // 32 * 2  # bytes of a row
FP8 = 64 + 4


def source_of(shapes: dict[str, tuple[int, ...]]) -> zoo.Tensors:
    return zoo.Tensors({name: torch.zeros(shape) for name, shape in shapes.items()})


def kernels_with(
    quantize: Scheme | None = None, head: Scheme | None = None, least_values: int = 0
) -> Any:
    kernels: Any = TorchKernels(torch.device("cpu"), torch.bfloat16)
    kernels.quantize, kernels.quantize_head = quantize, head
    kernels.holds = lambda num_values: num_values >= least_values
    return kernels


def test_floats_take_their_dtype() -> None:
    values = sum(math.prod(shape) for shape in SHAPES.values())
    assert target_bytes(source_of(SHAPES), kernels_with()) == 2 * values


def test_what_is_quantised_takes_less_and_router_and_vectors_do_not() -> None:
    rest = 2 * (4 * 64 + 64)
    kernels = kernels_with(Scheme.INT4)
    assert target_bytes(source_of(SHAPES), kernels) == 100 * 64 * 2 + 10 * INT4 + rest
    kernels = kernels_with(Scheme.INT4, Scheme.FP8)
    assert target_bytes(source_of(SHAPES), kernels) == 100 * FP8 + 10 * INT4 + rest
    # a head of its own is quantised, the table stays
    both = 100 * FP8 + 100 * 64 * 2 + 10 * INT4 + rest
    assert target_bytes(source_of(SHAPES | HEAD), kernels) == both


def test_rows_of_no_groups_length_count_as_floats() -> None:
    source = source_of({"x.weight": (3, 50)})
    assert target_bytes(source, kernels_with(Scheme.INT4)) == 2 * 150


def test_weights_that_are_stored_in_few_bits_count_as_they_are() -> None:
    class Stored(zoo.Tensors):
        def quantized_bytes(self, name: str) -> Any:
            return 7 if name.endswith("up_proj.weight") else None

    tensors: dict[str, Tensor] = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    floats = 2 * (100 * 64 + 4 * 64 + 64)
    for scheme in (None, Scheme.INT8):
        assert target_bytes(Stored(tensors), kernels_with(scheme)) == 7 + floats
    # where the backend makes floats of them they count as floats
    kernels = kernels_with(least_values=641)
    assert target_bytes(Stored(tensors), kernels) == 2 * 10 * 64 + floats


def test_weights_too_small_to_be_worth_it_count_as_floats() -> None:
    rest = 2 * (10 * 64 + 4 * 64 + 64)
    kernels = kernels_with(Scheme.INT4, Scheme.FP8, least_values=641)
    assert target_bytes(source_of(SHAPES), kernels) == 100 * FP8 + rest


def test_too_large_a_model_is_refused_with_what_would_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory.torch.cuda, "mem_get_info", lambda device: (12_000, 10**9))
    kernels = kernels_with()
    kernels.device = torch.device("cuda")
    with pytest.raises(CapacityError, match=r"in bfloat16.*quantize='int4', choose a smaller"):
        check_weights_fit(source_of(SHAPES), None, kernels, "tiny")
    kernels.dtype = torch.float16  # which quantize does not go with
    with pytest.raises(CapacityError, match=r"in float16.*on the GPU, choose a smaller"):
        check_weights_fit(source_of(SHAPES), None, kernels, "tiny")
    kernels.dtype = torch.bfloat16
    kernels.quantize = kernels.quantize_head = Scheme.INT4
    check_weights_fit(source_of(SHAPES), None, kernels, "tiny")


def test_a_model_that_is_small_already_is_not_told_to_become_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stored(zoo.Tensors):
        def quantized_bytes(self, name: str) -> Any:
            return 10**9 if name.endswith("up_proj.weight") else None

    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    monkeypatch.setattr(memory.torch.cuda, "mem_get_info", lambda device: (12_000, 10**9))
    kernels = kernels_with()
    kernels.device = torch.device("cuda")
    match = r"1\.0 GB of weights in the format of its file.*on the GPU, choose a smaller"
    with pytest.raises(CapacityError, match=match):
        check_weights_fit(Stored(tensors), None, kernels, "tiny")
