"""How models hand their matrices to a backend: where to, in what parts, and with what names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashdraft.errors import CheckpointError, FlashdraftError, RequestError
from flashdraft.kernels.quantized import Matrix
from flashdraft.kernels.torch_backend import TorchKernels
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.registry import build_target
from flashdraft.models.weights import Weights
from tests import zoo


class Recording(TorchKernels):
    """Notes the shapes that every packing method is given."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), torch.float32)
        self.packed: list[tuple[str, list[tuple[int, ...]]]] = []

    def _note(self, how: str, *parts: Matrix) -> None:
        self.packed.append((how, [tuple(part.shape) for part in parts]))

    def pack(self, *parts: Matrix, quantize: bool = True) -> Any:
        self._note("matrix" if quantize else "whole", *parts)
        return super().pack(*parts, quantize=quantize)

    def pack_head(self, *parts: Matrix) -> Any:
        self._note("head", *parts)
        return TorchKernels.pack(self, *parts)

    def pack_embedding(self, matrix: Matrix, head: Any | None) -> Any:
        self._note("table" if head is None else "tied table", matrix)
        return TorchKernels.pack(self, matrix) if head is None else head

    def pack_experts(self, weight: Matrix) -> Any:
        self._note("experts", weight)
        return [TorchKernels.pack(self, one) for one in weight]


def packed_by(family: str) -> list[tuple[str, list[tuple[int, ...]]]]:
    kernels = Recording()
    zoo.tiny_target(family, kernels)
    return kernels.packed


def test_parts_of_the_same_inputs_are_packed_together() -> None:
    packed = packed_by("qwen3")
    assert [how for how, _ in packed[:2]] == ["table", "head"]
    qkv, output, gate_up, down = (shapes for _, shapes in packed[2:6])
    assert len(qkv) == 3 and len(gate_up) == 2 and len(output) == len(down) == 1
    assert {how for how, _ in packed[2:]} == {"matrix"}


def test_a_tied_table_comes_with_its_head_and_the_router_stays_whole() -> None:
    packed = packed_by("gemma4_moe")
    assert [how for how, _ in packed[:2]] == ["head", "tied table"]
    kinds = [how for how, _ in packed]
    assert kinds.count("whole") == 4 and kinds.count("experts") == 8
    parts = {len(shapes) for how, shapes in packed if how == "matrix"}
    assert parts == {1, 2, 3}  # full layers have no v of their own


@pytest.mark.parametrize("error", [CheckpointError, RequestError])
def test_what_a_backend_refuses_is_named(error: type[FlashdraftError]) -> None:
    class Refusing(Recording):
        def pack(self, *parts: Matrix, quantize: bool = True) -> Any:
            raise error("no such weight")

    expected = r"'model\.layers\.0\.self_attn\.q_proj\.weight' and .*v_proj.*: no such weight"
    with pytest.raises(error, match=expected):
        zoo.tiny_target("llama", Refusing())


def test_matrices_go_straight_to_the_backends_device() -> None:
    config = ModelConfig.from_hf(zoo.CONFIGS["llama"])
    devices: set[torch.device | None] = set()

    class Watched(zoo.Tensors):
        def read_matrix(self, name: str, device: torch.device | None = None) -> torch.Tensor:
            devices.add(device)
            return super().read_matrix(name, device)

    kernels = zoo.kernels("torch")
    build_target(config, Watched(zoo.random_tensors(config)), kernels)
    assert devices == {kernels.device}


def test_a_matrix_is_taken_once_and_in_its_shape() -> None:
    weights = Weights(zoo.Tensors({"x": torch.zeros(2, 3)}))
    with pytest.raises(CheckpointError, match=r"'x' has shape \[2, 3\]"):
        weights.take_matrix("x", (3, 2), torch.device("cpu"))
    weights.take_matrix("x", (2, 3), torch.device("cpu"))
    with pytest.raises(CheckpointError, match="read twice"):
        weights.take("x", (2, 3))
    weights.finish()
