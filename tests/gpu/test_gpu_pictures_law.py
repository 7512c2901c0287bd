"""Pictures through the whole engine on a GPU, with exact kernels: no token is another one.

Passes with prompts are captured, and read what pictures there are from fixed places; the tower runs
between two launches.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch

from flashdraft.core import Picture
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.kernels.select import select_kernels
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.vision.tower import Gemma4VisionTower
from flashdraft.models.weights import Weights
from tests import pictured, zoo
from tests.unit.engine.test_pictures_law import requests
from tests.unit.models.vision.towers import published, tower_shapes

pytestmark = pytest.mark.gpu

ROOMY = CacheOptions(cache_gb=0.05)
PLAIN = EngineConfig(verify=0, ngram=False, prefix_cache=False, cache=ROOMY)


@functools.cache
def target(family, dtype):
    return pictured.tiny_target(select_kernels("cuda", dtype, exact=True), family)


@functools.cache  # the same answers serve many tests
def alone(family, dtype):
    answers, engine = {}, Engine(target(family, dtype), config=PLAIN)
    for one in requests():
        answers.update(zoo.run(engine, [one]))
    return answers


def check(engine, family, dtype):
    done = zoo.run(engine, requests())
    for name, expected in alone(family, dtype).items():
        assert done[name].error is None and done[name].token_ids == expected.token_ids, name
    return done.values()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gemma4", "gemma4_moe"])
def test_a_drafter_and_company_change_no_answer(family, dtype):
    model = target(family, dtype)
    config = EngineConfig(verify=7, cache=ROOMY)
    engine = Engine(model, zoo.tiny_drafter(model.kernels, 8), config)
    engine.prepare(60.0)
    for _ in range(2):  # the second time with the prefix cache, and with what was captured
        done = check(engine, family, dtype)
        assert sum(one.stats.drafted for one in done) > 0
    assert sum(one.stats.cached_tokens for one in done) > 0


@pytest.mark.parametrize("chunk", [7, 40])
def test_chunks_change_no_answer(chunk):
    model = target("gemma4", "float32")
    config = EngineConfig(verify=0, ngram=False, cache=ROOMY, prefill_chunk=chunk)
    check(Engine(model, config=config), "gemma4", "float32")


def test_what_was_shown_before_is_not_seen_again():
    """The fixed places are another picture's, or nobody's, in the next pass."""
    engine = Engine(target("gemma4", "bfloat16"), config=PLAIN)
    engine.prepare(60.0)
    expected = alone("gemma4", "bfloat16")
    order = requests() * 2
    random.Random(1).shuffle(order)
    for one in order:
        (found,) = zoo.run(engine, [one]).values()
        assert found.token_ids == expected[one.id].token_ids, one.id


# -- the tower ---------------------------------------------------------------------------------


def values(name, shape):
    seeded = torch.Generator().manual_seed(sum(name.encode()))
    noise = torch.randn(shape, generator=seeded)
    return 1.0 + 0.1 * noise if len(shape) == 1 else 0.04 * noise


@functools.cache
def tower(device, dtype, exact=False):
    raw = published("26B-A4B")
    raw["vision_config"]["num_hidden_layers"] = 2
    config = ModelConfig.from_hf(raw)
    tensors = {  # of the published tower, with fewer layers
        name: values(name, shape)
        for name, shape in tower_shapes(config.hidden_size).items()
        if ".layers." not in name or int(name.split(".")[4]) < 2
    }
    kernels = select_kernels(device, dtype, exact=exact)
    weights = Weights(zoo.Tensors(tensors), lambda _: None)
    return Gemma4VisionTower(config.vision, config.hidden_size, weights, kernels)


def shown(rows, columns):
    pixels = random.Random(rows).randbytes(3 * rows * columns * 48 * 48)
    return Picture(pixels, 48 * columns, 48 * rows, rows * columns, bytes([rows, columns]) * 16)


SHOWN = [(14, 19), (1, 70), (7, 9)]


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-3), ("bfloat16", 4e-2)])
def test_the_tower_says_what_it_says_on_a_cpu(dtype, limit):
    pictures = [shown(*size) for size in SHOWN]
    found = tower("cuda", dtype).encode(pictures)
    for one, expected in zip(found, tower("cpu", "float32").encode(pictures), strict=True):
        assert one.device.type == "cuda" and one.shape == expected.shape
        error = (one.cpu().float() - expected).norm() / expected.norm()
        assert error < limit


def test_pictures_in_one_pass_are_those_of_passes_of_their_own():
    exact = tower("cuda", "bfloat16", exact=True)
    pictures = [shown(*size) for size in SHOWN]
    together = exact.encode(pictures)
    for one, found in zip(pictures, together, strict=True):
        assert torch.equal(exact.encode([one])[0], found)
