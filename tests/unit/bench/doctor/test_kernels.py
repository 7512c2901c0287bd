"""Doctor's check of the kernels: each operation made wrong, and Triton's in the interpreter.

The interpreter multiplies no bfloat16, so float32 stands for it here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdraft.bench.doctor.checks import check_kernels
from flashdraft.bench.doctor.report import OK, PROBLEM
from flashdraft.engine.config import CacheOptions
from flashdraft.kernels.interface import CAUSAL, PagedKeys
from flashdraft.kernels.kinds import Scheme
from flashdraft.kernels.torch_backend import TorchKernels
from tests.interpreted import judge, report

CPU = torch.device("cpu")
SCHEMES = (Scheme.INT4, Scheme.INT8, Scheme.FP8)


class WrongGate(TorchKernels):
    def gated_linear(self, *given: Any) -> Tensor:
        return super().gated_linear(*given) * 1.01


class WrongRoute(TorchKernels):
    def route(self, *given: Any) -> tuple[Tensor, Tensor]:
        chosen, weights = super().route(*given)
        return chosen.roll(1, dims=1), weights  # each expert with another's weight


class WrongRebuild(TorchKernels):
    def attention(self, query: Tensor, keys: PagedKeys) -> Tensor:
        found = super().attention(query, keys)
        return found if keys.rebuild is None else found * 1.01


class WrongTrees(TorchKernels):
    def attention(self, query: Tensor, keys: PagedKeys) -> Tensor:
        if keys.mask.trees is not None and keys.rebuild is None:
            keys = replace(keys, mask=CAUSAL)  # who is no ancestor is seen too
        return super().attention(query, keys)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (WrongGate, "gated_linear"),
        (WrongRoute, "route"),
        (WrongRebuild, "rebuilt keys"),
        (WrongTrees, "attention of trees"),
    ],
)
def test_a_wrong_operation_is_named_alone(kind: type[TorchKernels], name: str) -> None:
    (finding,) = check_kernels(kind(CPU, torch.float32), cache=CacheOptions(kv_keys="rebuilt"))
    assert finding.status == PROBLEM and f"{name} is off" in finding.text
    names = {word.split(" is off")[0] for word in finding.text.split(": ")[1].split(", ")}
    assert names == {name}


def test_keys_are_rebuilt_only_where_the_pair_does_so() -> None:
    assert check_kernels(WrongRebuild(CPU, torch.float32))[0].status == OK


def check_agreement() -> None:
    from flashdraft.kernels.cuda.backend import TritonKernels

    kernels = TritonKernels(CPU, torch.float32)
    finding = check_kernels(kernels, SCHEMES, CacheOptions(kv_keys="rebuilt"))[0]
    assert finding.status == OK, finding.text


def check_wrong_products(scheme: Scheme) -> None:
    from flashdraft.kernels.cuda import backend, quantized_backend

    multiply = quantized_backend.multiply
    kernels = backend.TritonKernels(CPU, torch.float32)
    try:
        quantized_backend.multiply = lambda *given: multiply(*given) * 1.01
        finding = check_kernels(kernels, [scheme])[0]
        assert finding.status == PROBLEM, finding.text
        for name in ("linear", "gated_linear", "mixture"):
            assert f"{scheme} {name} is off" in finding.text
        assert " with plain torch: linear" not in finding.text
        # weights in floats are not multiplied so
        assert check_kernels(kernels)[0].status == OK
    finally:
        quantized_backend.multiply = multiply


CHECKS: dict[str, Callable[[], None]] = {
    "agreement": check_agreement,
    **{f"wrong {scheme}": lambda scheme=scheme: check_wrong_products(scheme) for scheme in SCHEMES},
}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, failures: dict[str, str]) -> None:
    judge(failures[name])


if __name__ == "__main__":
    report(CHECKS)
