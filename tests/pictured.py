"""A tiny target that takes pictures, a tower that knows them by their keys, and their requests."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashdraft.core import Picture, PlacedPicture, Request, SamplingParams
from flashdraft.kernels.interface import Kernels
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.config.vision import VisionConfig, VisionTokens
from flashdraft.models.layers import Target
from flashdraft.models.registry import build_target
from tests import zoo

BEGIN, PICTURE, END, VIDEO = 58, 60, 59, 57  # ids of the markers and of the placeholders
WINDOW = 20  # of the target's sliding layers
BACKENDS = ["torch", "int8", "float32"]  # the last is the fastest

VISION = VisionConfig(
    hidden_size=24,
    intermediate_size=40,
    num_layers=1,
    num_heads=2,
    head_dim=12,
    patch_size=4,
    pooling=3,
    num_positions=64,
    rope_theta=100.0,
    norm_eps=1e-6,
    standardize=True,
    clipped=False,
    default_budget=70,
    tokens=VisionTokens(BEGIN, PICTURE, END, VIDEO),
)


class KeyTower:
    """Features are noise, seeded by a picture's key; it can be told to fail."""

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size
        self.calls: list[list[bytes]] = []  # the keys of each
        self.errors: dict[bytes, Exception] = {}  # by key

    def encode(self, pictures: Sequence[Picture]) -> list[Tensor]:
        keys = [one.key for one in pictures]
        self.calls.append(keys)
        for key in keys:
            if key in self.errors:
                raise self.errors[key]
        rows = torch.cat([features_of(one, self.hidden_size) for one in pictures])
        return list(rows.split([one.num_tokens for one in pictures]))

    @property
    def encoded(self) -> list[bytes]:
        """The keys of all that it was asked for."""
        return [key for keys in self.calls for key in keys]


def features_of(picture: Picture, hidden_size: int) -> Tensor:
    seed = int.from_bytes(picture.key[:7], "big")
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randn(picture.num_tokens, hidden_size, generator=generator)


def tiny_target(backend: Kernels, family: str = "gemma4", taps: Sequence[int] = (0, 2)) -> Target:
    """A target whose tower is a KeyTower, with the tensors of `zoo.tiny_target`."""
    config = dataclasses.replace(
        ModelConfig.from_hf(zoo.CONFIGS[family]),
        sees_pictures_whole=family != "gemma4_small",
        forbidden_token_ids=(BEGIN, END, PICTURE, VIDEO),
    )
    target = build_target(config, zoo.Tensors(zoo.random_tensors(config)), backend, taps)
    target.config = dataclasses.replace(config, vision=VISION)
    target.vision = KeyTower(config.hidden_size)
    return target


def picture(name: object, num_tokens: int) -> Picture:
    """A picture that differs from those of other names, whatever their size."""
    key = hashlib.sha256(f"{name} {num_tokens}".encode()).digest()
    return Picture(b"", 0, 0, num_tokens, key)


class Frame(NamedTuple):
    """A picture that stands in a film."""

    picture: Picture


def film(name: object, num_frames: int, num_tokens: int) -> list[Frame | list[int]]:
    """Its frames, each behind a time and between its markers."""
    parts: list[Frame | list[int]] = []
    for number in range(num_frames):
        frame = Frame(picture(f"{name}, frame {number}", num_tokens))
        parts += [[*words(4, seed=number), BEGIN], frame, [END]]
    return parts


def request(
    name: str,
    parts: Sequence[Picture | Frame | Sequence[int]],
    params: SamplingParams | None = None,
    seed: int = 0,
) -> Request:
    """A request of texts and pictures, one after another; markers are part of the texts."""
    prompt: list[int] = []
    placed = []
    for part in parts:
        if isinstance(part, Picture):
            placed.append(PlacedPicture(len(prompt), part))
            prompt += [PICTURE] * part.num_tokens
        elif isinstance(part, Frame):
            placed.append(PlacedPicture(len(prompt), part.picture))
            prompt += [VIDEO] * part.picture.num_tokens
        else:
            prompt += part
    params = params or SamplingParams(max_tokens=10)
    return Request(name, prompt, params, seed, pictures=tuple(placed))


def words(count: int, seed: int = 0) -> list[int]:
    """A text without markers."""
    source = random.Random(seed)
    return [source.randrange(4, 57) for _ in range(count)]


def random_parts(source: random.Random, largest: int) -> list[Picture | list[int]]:
    """Texts and pictures in any order, of few kinds: many prompts begin alike."""
    parts: list[Picture | list[int]] = []
    if source.random() < 0.5:
        parts.append(words(source.choice([3, 16, 17]), seed=1))
    for _ in range(source.randint(1, 3)):
        if source.random() < 0.7:
            size = source.choice([1, 2, 9, 16, min(30, largest)])
            parts.append(picture(source.randrange(2), min(size, largest)))
        else:
            parts.append(words(source.choice([1, 5, 15, 16]), seed=source.randrange(2)))
    return parts
