"""The tower's tensors: which are asked for, and where they stay. Values are parity tests'."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from flashdraft.core import Picture
from flashdraft.engine.cache.memory import target_bytes
from flashdraft.errors import CheckpointError, RequestError
from flashdraft.files import write_whole
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.registry import build_target
from flashdraft.models.stored import LEFT_OUT
from flashdraft.models.vision.tower import Gemma4VisionTower
from flashdraft.models.weights import Weights, stays_float
from tests import zoo
from tests.unit.models.vision.towers import (
    PUBLISHED,
    published,
    published_small,
    small_tower_shapes,
    tower_shapes,
)


class Shapes:
    """A checkpoint of zeros that takes no memory."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def names(self) -> Iterable[str]:
        return self.shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def read(self, name: str) -> Tensor:
        return torch.zeros(()).expand(self.shapes[name])

    def read_matrix(self, name: str, device: torch.device | None = None) -> Tensor:
        return self.read(name)

    def quantized_bytes(self, name: str) -> None:
        return None


class Unpacked(zoo.TorchKernels):
    """Kernels that keep no weights."""

    def pack(self, *parts: Tensor, quantize: bool = True) -> None:
        assert not quantize, "the tower stays in floats"


@pytest.mark.parametrize("name", [*PUBLISHED, "E4B"])
def test_every_tensor_of_a_published_tower_has_its_place(name: str) -> None:
    is_small = name == "E4B"
    config = ModelConfig.from_hf(published_small() if is_small else published(name))
    shapes = (small_tower_shapes if is_small else tower_shapes)(config.hidden_size)
    assert len(shapes) == (659 if is_small else 356)
    kernels = Unpacked(torch.device("cpu"), torch.bfloat16)
    asked: list[str] = []
    weights = Weights(Shapes(shapes), asked.append)
    assert config.vision is not None
    Gemma4VisionTower(config.vision, config.hidden_size, weights, kernels)
    weights.finish()
    assert sorted(asked) == sorted(shapes) and all(map(stays_float, shapes))
    num_values = config.hidden_size * config.vision.hidden_size  # of the projection
    num_values += 167_365_056 if is_small else 569_550_384
    assert sum(map(math.prod, shapes.values())) == num_values
    assert target_bytes(Shapes(shapes), kernels) == 2 * num_values


TEXT = {**zoo.CONFIGS["gemma4"], "vocab_size": 67}
TINY = {
    "model_type": "gemma4_vision",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 2,
    "position_embedding_size": 30,
    "standardize": False,
}
WHOLE = {
    "model_type": "gemma4",
    "architectures": ["Gemma4ForConditionalGeneration"],
    "text_config": TEXT,
    "vision_config": TINY,
    **{"boi_token_id": 60, "image_token_id": 61, "eoi_token_id": 62, "video_token_id": 63},
}


def tiny_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embedder.input_proj.weight": (16, 12),
        "vision_tower.patch_embedder.position_embedding_table": (2, 30, 16),
        "embed_vision.embedding_projection.weight": (32, 16),
    }
    for name, shape in tower_shapes(32).items():
        if ".layers.0." in name or ".layers.1." in name:
            sizes = {1152: 16, 4304: 24, 72: 8}
            shapes[name.removeprefix("model.")] = tuple(sizes[size] for size in shape)
    return shapes


def write(folder: Path, prefix: str, changes: dict[str, tuple[int, ...] | None]) -> Path:
    torch.manual_seed(1)
    shapes = {f"{prefix}{name}": shape for name, shape in tiny_shapes().items()}
    tensors = zoo.random_tensors(ModelConfig.from_hf(WHOLE))
    for name, shape in {**shapes, **changes}.items():
        if shape is not None:
            tensors[name] = torch.randn(shape)
    write_whole(folder / "config.json", json.dumps(WHOLE))
    save_file(tensors, folder / "model.safetensors")
    return folder


def target_of(folder: Path, vision: bool = True):
    checkpoint = open_checkpoint(folder, vision)
    return build_target(checkpoint.config, checkpoint.source, zoo.kernels("int8"))


def picture(width: int, height: int) -> Picture:
    values = torch.arange(width * height * 3) % 251
    pixels = values.to(torch.uint8).numpy().tobytes()
    return Picture(pixels, width, height, (width // 6) * (height // 6), bytes(32))


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_tower_is_loaded_from_files(tmp_path: Path, prefix: str) -> None:
    stray = {f"{prefix}embed_vision.embedding.weight": (5, 16)}
    target = target_of(write(tmp_path, prefix, stray))
    (features,) = target.vision.encode([picture(12, 18)])
    assert features.shape == (6, 32) and features.isfinite().all()


def test_a_tower_can_be_left_out(tmp_path: Path) -> None:
    write(tmp_path, "model.", {})
    assert target_of(tmp_path, vision=False).vision is None
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.vision is None and checkpoint.config.why_no_vision == LEFT_OUT
    assert not any("vision" in name for name in checkpoint.source.names())


def test_files_without_a_tower_are_read_as_text(tmp_path: Path, caplog) -> None:
    write(tmp_path, "model.", {f"model.{name}": None for name in tiny_shapes()})
    assert target_of(tmp_path).vision is None
    assert "hold none of its vision tower's tensors" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.embed_vision.embedding_projection.weight": None}, "no tensor 'model.embed_vision"),
        ({"model.vision_tower.strange.weight": (2,)}, "no place in the model.*strange"),
        ({"model.vision_tower.encoder.layers.0.self_attn.q_norm.weight": (9,)}, r"shape \[9\]"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, changes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        target_of(write(tmp_path, "model.", changes))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (picture(12, 17), "12 × 17 pixels .*multiples of 6"),
        (Picture(bytes(432), 12, 12, 3, bytes(32)), "3 tokens"),
        (Picture(bytes(431), 12, 12, 4, bytes(32)), "432 bytes, not 431"),
        (picture(66, 6), "33 patches long; the model knows 30"),
    ],
)
def test_pictures_that_do_not_fit(tmp_path: Path, wrong: Picture, message: str) -> None:
    target = target_of(write(tmp_path, "model.", {}))
    with pytest.raises(RequestError, match=message):
        target.vision.encode([wrong])
