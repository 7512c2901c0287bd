"""Pictures: our tower's features, and logits of prompts with pictures, against transformers'.

Both get the same pixels, already of the size that a budget gives, so no resizing is compared.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from flashdraft.core import Picture, PlacedPicture, Request, SamplingParams
from flashdraft.engine.cache.layers import cache_layers
from flashdraft.engine.cache.pages import PageBook
from flashdraft.engine.cache.storage import KVCache, Span
from flashdraft.engine.sequence import Sequence as RunningSequence
from flashdraft.media.sizes import cells_of
from flashdraft.models.layers import ForwardBatch, PictureRows
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.registry import build_target
from tests import zoo

TOLERANCE = 5e-5
BACKENDS = ["torch", "float32"]
CONFIG = json.loads((Path(__file__).parent / "gemma4_pictures.json").read_text())
MOE = {
    "enable_moe_block": True,
    "num_experts": 16,
    "top_k_experts": 4,
    "moe_intermediate_size": 24,
}
PATCH, POOLING = 4, 3
CELL = PATCH * POOLING
BEGIN, PICTURE, END, VIDEO = 499, 500, 502, 504
SIZES = [(160, 120), (90, 200), (50, 50), (300, 40), (1, 30)]
COMMON_SIZES = [(224, 224), (640, 480), (1920, 1080), (3024, 4032), (1240, 1754), (4000, 300)]


class Pair:
    """A random transformers model, saved by transformers, and what it says of prompts."""

    def __init__(self, model, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self._tower = open_target(folder, "float32").vision
        self._known: dict[str, Tensor] = {}

    def features(self, placed: Sequence[PlacedPicture]) -> list[Tensor]:
        return self._tower.encode([one.picture for one in placed])

    def expected(self, name: str) -> Tensor:
        """Logits of one of PROMPTS."""
        if name not in self._known:
            self._known[name] = self.logits(*prompt(name))
        return self._known[name]

    def logits(self, tokens: list[int], placed: Sequence[PlacedPicture]) -> Tensor:
        ids, inputs = torch.tensor([tokens]), as_transformers_takes(placed)
        with torch.no_grad():
            found = self.model(ids, mm_token_type_ids=(ids == PICTURE).long(), **inputs)
        return found.logits[0]


def open_target(folder: Path, backend: str):
    checkpoint = open_checkpoint(folder, vision=True)
    target = build_target(checkpoint.config, checkpoint.source, zoo.kernels(backend))
    assert target.vision is not None
    return target


@pytest.fixture(scope="module", params=["dense", "moe"])
def pair(request, tmp_path_factory):
    text = {**CONFIG["text_config"], **(MOE if request.param == "moe" else {})}
    named = {k: v for k, v in CONFIG.items() if k not in ("model_type", "architectures")}
    config = transformers.Gemma4Config(**{**named, "text_config": text})
    torch.manual_seed(5)
    model = transformers.Gemma4ForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).float()
    randomise(model)
    folder = tmp_path_factory.mktemp(request.param)
    model.eval().save_pretrained(folder)
    return Pair(model, folder)


def randomise(model: torch.nn.Module) -> None:
    """Give every tensor values of its own: constants would hide what is left out."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq") or not tensor.is_floating_point():
                continue
            noise = torch.randn_like(tensor)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                tensor.copy_((1.0 + 0.2 * noise) * tensor.shape[0] ** -0.25)
            elif name.endswith("std_bias"):
                tensor.copy_(noise)
            elif name.endswith("position_embedding_table"):
                tensor.copy_(0.5 * noise)
            elif name.endswith("embed_scale") or tensor.dim() == 0:
                continue
            elif tensor.dim() == 1:
                tensor.copy_(1.0 + 0.2 * noise)
            else:
                tensor.copy_(noise * tensor.shape[-1] ** -0.5)


def picture_of(size: tuple[int, int], budget: int, seed: int = 0) -> Picture:
    """Noise, as large as a picture of this size becomes."""
    rows, columns = cells_of(*size, budget, CELL)
    height, width = CELL * rows, CELL * columns
    generator = torch.Generator().manual_seed(seed + 1000 * size[0] + size[1])
    values = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Picture(values.numpy().tobytes(), width, height, rows * columns, bytes(32))


def as_transformers_takes(placed: Sequence[PlacedPicture]) -> dict[str, Tensor]:
    """Row-major patches and their places, padded to the longest."""
    pictures = [one.picture for one in placed]
    longest = max(9 * picture.num_tokens for picture in pictures)
    values = torch.zeros(len(pictures), longest, 3 * PATCH**2)
    places = torch.full((len(pictures), longest, 2), -1)
    for i, picture in enumerate(pictures):
        rows, columns = picture.height // PATCH, picture.width // PATCH
        pixels = torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8) / 255
        grid = pixels.view(rows, PATCH, columns, PATCH, 3).permute(0, 2, 1, 3, 4)
        values[i, : rows * columns] = grid.reshape(rows * columns, -1)
        index = torch.arange(rows * columns)
        places[i, : rows * columns] = torch.stack([index % columns, index // columns], dim=1)
    return {"pixel_values": values, "image_position_ids": places}


class Probe:
    """A target with a small cache, which computes a whole prompt in one pass."""

    def __init__(self, pair: Pair, backend: str) -> None:
        self.target = open_target(pair.folder, backend)

    def logits(self, tokens: list[int], pictures: PictureRows) -> Tensor:
        layers = cache_layers(self.target.config, None)
        pages = {layer.window: len(tokens) // 4 + 1 for layer in layers}
        cache = KVCache(layers, pages, 4, self.target.kernels)
        book = PageBook(cache.book_pools, 4)
        sequence = RunningSequence(
            Request("probe", tokens, SamplingParams(), 0), frozenset(), len(tokens)
        )
        book.open(sequence, tokens)
        assert book.reserve(sequence, len(tokens))
        rows = cache.rows(book, [Span(sequence, 0, len(tokens))])
        caches = cache.layers(rows.views, 0, len(layers))
        batch = ForwardBatch(rows.positions, rows.end_position, caches, pictures=pictures)
        return self.target.logits(self.target.forward(torch.tensor(tokens), batch).hidden)

    def off(self, logits: Tensor, expected: Tensor) -> float:
        """The largest difference; tokens that no answer has are not compared."""
        forbidden = torch.tensor(self.target.config.forbidden_token_ids)
        assert (logits[:, forbidden] == -torch.inf).all()
        return (logits - expected).index_fill(1, forbidden, 0.0).abs().max().item()


def rows_of(pair: Pair, num_tokens: int, placed: Sequence[PlacedPicture]) -> PictureRows:
    """What a prompt's pass is told of its pictures."""
    is_picture = torch.zeros(num_tokens, dtype=torch.bool)
    features = torch.zeros(num_tokens, CONFIG["text_config"]["hidden_size"])
    ahead = torch.zeros(num_tokens, dtype=torch.int32)
    for one, found in zip(placed, pair.features(placed), strict=True):
        is_picture[one.start : one.end] = True
        features[one.start : one.end] = found
        count = one.picture.num_tokens
        ahead[one.start : one.end] = torch.arange(count - 1, -1, -1, dtype=torch.int32)
    return PictureRows(is_picture, features, ahead)


def prompt_of(parts: Sequence[int | Picture]) -> tuple[list[int], list[PlacedPicture]]:
    """A number of text tokens, or a picture between its markers, one after another."""
    generator = torch.Generator().manual_seed(3)
    tokens: list[int] = []
    placed = []
    for part in parts:
        if isinstance(part, int):
            tokens += torch.randint(2, 490, (part,), generator=generator).tolist()
        else:
            placed.append(PlacedPicture(len(tokens) + 1, part))
            tokens += [BEGIN, *[PICTURE] * part.num_tokens, END]
    return tokens, placed


@pytest.mark.parametrize(
    ("backend", "budget", "sizes"),
    [
        ("torch", 70, SIZES[1:3]),  # row by row it is slow
        ("float32", 70, SIZES),
        ("float32", 140, SIZES),
        ("int8", 70, SIZES[:2]),  # in 8 bits are the text's weights alone
    ],
)
def test_features_match_transformers(pair, backend, budget, sizes):
    """Pictures of all sizes in one call."""
    placed = [PlacedPicture(0, picture_of(size, budget)) for size in sizes]
    found = open_target(pair.folder, backend).vision.encode([one.picture for one in placed])
    with torch.no_grad():
        inputs = as_transformers_takes(placed)
        expected = pair.model.model.get_image_features(**inputs, return_dict=True).pooler_output
    assert [len(one) for one in found] == [one.picture.num_tokens for one in placed]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() <= TOLERANCE


@pytest.mark.parametrize(("backend", "budgets"), [("torch", (7, 12)), ("float32", (12, 70, 140))])
def test_a_picture_has_the_same_features_alone_and_among_others(pair, backend, budgets):
    tower = open_target(pair.folder, backend).vision
    pictures = [picture_of(size, budget) for size in SIZES[:3] for budget in budgets]
    together = tower.encode(pictures)
    assert tower.encode([]) == []
    for picture, found in zip(pictures, together, strict=True):
        assert torch.equal(tower.encode([picture])[0], found)
    for found, again in zip(reversed(together), tower.encode(pictures[::-1]), strict=True):
        assert torch.equal(found, again)


SMALL, LARGE = (160, 120), (120, 160)
PROMPTS = {  # parts: text tokens, or (size, budget) of a picture
    "first": [(SMALL, 70), 9],
    "middle": [20, (SMALL, 70), 50],
    "last": [40, (SMALL, 70)],
    "two": [5, (SMALL, 70), (LARGE, 70), 12],
    "longer than the window": [30, (LARGE, 140), 110],
}


def prompt(name: str) -> tuple[list[int], list[PlacedPicture]]:
    return prompt_of([p if isinstance(p, int) else picture_of(*p) for p in PROMPTS[name]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROMPTS)
def test_logits_match_transformers(pair, backend, name):
    tokens, placed = prompt(name)
    probe = Probe(pair, backend)
    logits = probe.logits(tokens, rows_of(pair, len(tokens), placed))
    assert probe.off(logits, pair.expected(name)) <= TOLERANCE


@pytest.mark.parametrize("pair", ["dense"], indirect=True)  # the tower is the same
def test_features_of_common_sizes_match_transformers(pair):
    tower = open_target(pair.folder, "float32").vision
    pictures = [picture_of(size, 280) for size in COMMON_SIZES]
    for picture, found in zip(pictures, tower.encode(pictures), strict=True):
        assert_features(pair, picture, found)


@pytest.mark.parametrize("pair", ["dense"], indirect=True)
@pytest.mark.parametrize("budget", [280, 560, 1120])
def test_larger_budgets_match_transformers(pair, budget):
    tokens, placed = prompt_of([20, picture_of((640, 480), budget), 9])
    rows = rows_of(pair, len(tokens), placed)
    assert_features(pair, placed[0].picture, rows.features[placed[0].start : placed[0].end])
    probe = Probe(pair, "float32")
    assert probe.off(probe.logits(tokens, rows), pair.logits(tokens, placed)) <= TOLERANCE


def assert_features(pair: Pair, picture: Picture, found: Tensor) -> None:
    inputs = as_transformers_takes([PlacedPicture(0, picture)])
    with torch.no_grad():
        expected = pair.model.model.get_image_features(**inputs, return_dict=True).pooler_output
    assert (found - expected[0]).abs().max() <= TOLERANCE


def all_causal(rows: PictureRows, placed) -> PictureRows:
    return dataclasses.replace(rows, ahead=torch.zeros_like(rows.ahead))


def scaled_features(rows: PictureRows, placed) -> PictureRows:
    return dataclasses.replace(rows, features=rows.features * rows.features.shape[1] ** 0.5)


def two_as_one(rows: PictureRows, placed) -> PictureRows:
    ahead, (first, last) = rows.ahead.clone(), (placed[0].start, placed[-1].end - 1)
    ahead[first : last + 1] = last - torch.arange(first, last + 1)
    return dataclasses.replace(rows, ahead=ahead)


def with_markers(rows: PictureRows, placed) -> PictureRows:
    ahead = rows.ahead.clone()
    for one in placed:
        ahead[one.start - 1 : one.end + 1] = torch.arange(one.picture.num_tokens + 1, -1, -1)
    return dataclasses.replace(rows, ahead=ahead)


def window_on_both_sides(rows: PictureRows, placed) -> PictureRows:
    window = CONFIG["text_config"]["sliding_window"]
    return dataclasses.replace(rows, ahead=rows.ahead.clamp(max=window - 1))


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (all_causal, "middle"),
        (scaled_features, "middle"),
        (two_as_one, "two"),
        (with_markers, "middle"),
        (window_on_both_sides, "longer than the window"),
    ],
)
def test_a_wrong_rule_is_noticed(pair, wrong, name):
    """What these tests would say of the mistakes that other engines made."""
    tokens, placed = prompt(name)
    probe = Probe(pair, "torch")
    logits = probe.logits(tokens, wrong(rows_of(pair, len(tokens), placed), placed))
    assert probe.off(logits, pair.expected(name)) > 1000 * TOLERANCE


def test_full_layers_that_look_ahead_are_noticed(pair):
    tokens, placed = prompt("middle")
    probe = Probe(pair, "torch")
    for layer in probe.target._layers:
        layer.attention._sees_pictures_whole = True
    logits = probe.logits(tokens, rows_of(pair, len(tokens), placed))
    assert probe.off(logits, pair.expected("middle")) > 1000 * TOLERANCE


def film(size: tuple[int, int], gaps: Sequence[int]) -> tuple[list[int], list[PlacedPicture]]:
    """Frames, and so many text tokens before each and behind the last."""
    *before, behind = gaps
    frames = [picture_of(size, 70, seed) for seed, _ in enumerate(before)]
    parts = [part for pair in zip(before, frames, strict=True) for part in pair]
    tokens, placed = prompt_of([*parts, behind])
    return [VIDEO if token == PICTURE else token for token in tokens], placed


def features_of_film(pair: Pair, placed: Sequence[PlacedPicture]):
    pixels, places = as_transformers_takes(placed).values()
    counts = torch.tensor([len(placed)])
    with torch.no_grad():
        return pair.model.model.get_video_features(pixels, places, counts, return_dict=True)


@pytest.mark.parametrize("size", SIZES[:3])
def test_a_films_features_match_transformers_and_are_those_of_pictures(pair, size):
    _, placed = film(size, (6, 7, 7, 9))
    expected = torch.cat(features_of_film(pair, placed).pooler_output)
    found = torch.cat(pair.features(placed))
    assert (found - expected).abs().max() <= TOLERANCE
    with torch.no_grad():
        inputs = as_transformers_takes(placed)
        pictures = pair.model.model.get_image_features(**inputs, return_dict=True).pooler_output
    assert torch.equal(torch.cat(list(pictures)), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gaps", [(6, 7, 7, 20), (40, 7, 1)])
def test_logits_of_films_match_transformers(pair, backend, gaps):
    """Each frame is a block of its own, and stands like a picture behind its time."""
    tokens, placed = film(SMALL, gaps)
    probe, ids = Probe(pair, backend), torch.tensor([tokens])
    with torch.no_grad():
        features = {"video": features_of_film(pair, placed)}
        kinds = 2 * (ids == VIDEO).long()
        expected = pair.model(ids, mm_token_type_ids=kinds, mm_encoder_outputs=features).logits[0]
    rows = rows_of(pair, len(tokens), placed)
    assert probe.off(probe.logits(tokens, rows), expected) <= TOLERANCE
    as_one = probe.logits(tokens, two_as_one(rows, placed))
    assert probe.off(as_one, expected) > 1000 * TOLERANCE
