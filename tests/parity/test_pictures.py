"""Pictures: our tower's features, and logits of prompts with pictures, against transformers'.

Both get the same pixels, already of the size that a budget gives, so no resizing is compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
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
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.engine.sequence import Sequence as RunningSequence
from flashdraft.media.sizes import cells_of
from flashdraft.models.config.vision import LIMITS
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
# as E2B and E4B: inputs of every layer's own, whose row for pictures is not a token's
SMALL = {
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "use_bidirectional_attention": None,
    "pad_token_id": 3,
}
SMALL_TOWER = {"standardize": False, "use_clipped_linears": True}
SOUNDS = {  # which nobody reads
    "model_type": "gemma4_audio",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [4, 2],
    "output_proj_dims": 24,
}
TEXTS = {"dense": {}, "moe": MOE, "small": SMALL}
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
        # of logits; the small model's layers add more to the stream
        self.tolerance = TOLERANCE * (
            2 if model.config.text_config.hidden_size_per_layer_input else 1
        )
        self._tower = open_target(folder, "float32").vision
        self._known: dict[str, Tensor] = {}
        self._answer: list[int] = []

    def features(self, placed: Sequence[PlacedPicture]) -> list[Tensor]:
        return self._tower.encode([one.picture for one in placed])

    def expected(self, name: str) -> Tensor:
        """Logits of one of PROMPTS."""
        if name not in self._known:
            self._known[name] = self.logits(*prompt(name))
        return self._known[name]

    def greedy(self, name: str, count: int, banned: Sequence[int]) -> list[int]:
        """So many tokens behind one of PROMPTS."""
        tokens, placed = prompt(name)
        while len(self._answer) < count:
            logits = self.logits([*tokens, *self._answer], placed)[-1]
            logits = logits.index_fill(0, torch.tensor(banned), -torch.inf)
            self._answer.append(int(logits.argmax()))
        return self._answer

    def logits(self, tokens: list[int], placed: Sequence[PlacedPicture]) -> Tensor:
        ids, inputs = torch.tensor([tokens]), as_transformers_takes(placed)
        with torch.no_grad():
            found = self.model(ids, mm_token_type_ids=(ids == PICTURE).long(), **inputs)
        return found.logits[0]


def open_target(folder: Path, backend: str, taps: Sequence[int] = ()):
    checkpoint = open_checkpoint(folder, vision=True)
    target = build_target(checkpoint.config, checkpoint.source, zoo.kernels(backend), taps)
    assert target.vision is not None
    return target


@pytest.fixture(scope="module", params=TEXTS)
def pair(request, tmp_path_factory):
    text = {**CONFIG["text_config"], **TEXTS[request.param]}
    named = {k: v for k, v in CONFIG.items() if k not in ("model_type", "architectures")}
    if request.param == "small":
        tower = {**CONFIG["vision_config"], **SMALL_TOWER}
        named |= {"vision_config": tower, "audio_config": SOUNDS}
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
            elif name.endswith(LIMITS):
                tensor.fill_(limit(name, noise.abs().item()))
            elif name.endswith("embed_scale") or tensor.dim() == 0:
                continue
            elif tensor.dim() == 1:
                tensor.copy_(1.0 + 0.2 * noise)
            else:
                tensor.copy_(noise * tensor.shape[-1] ** -0.5)


def limit(name: str, chance: float) -> float:
    """One that is reached; in the first layer matrices of the same inputs allow the same."""
    side = 1.0 if name.endswith("max") else -1.2
    inner = 0.1 if "o_proj" in name or "down_proj" in name else 0.6
    is_shared = "input" in name and ".layers.0." in name
    return side * inner * (1.0 if is_shared else 0.7 + 0.5 * chance)


def picture_of(size: tuple[int, int], budget: int, seed: int = 0) -> Picture:
    """Noise, as large as a picture of this size becomes."""
    rows, columns = cells_of(*size, budget, CELL)
    height, width = CELL * rows, CELL * columns
    generator = torch.Generator().manual_seed(seed + 1000 * size[0] + size[1])
    values = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    pixels = values.numpy().tobytes()
    return Picture(pixels, width, height, rows * columns, hashlib.sha256(pixels).digest())


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
    """A target with a small cache, run by hand."""

    def __init__(self, pair: Pair, backend: str) -> None:
        self.target = open_target(pair.folder, backend)

    def logits(self, tokens: list[int], pictures: PictureRows) -> Tensor:
        """Of a whole prompt in one pass."""
        self.open(tokens)
        return self.forward(0, tokens, pictures)

    def open(self, tokens: list[int]) -> None:
        layers = cache_layers(self.target.config, None)
        pages = {layer.window: len(tokens) // 4 + 1 for layer in layers}
        self.cache = KVCache(layers, pages, 4, self.target.kernels)
        self.book = PageBook(self.cache.book_pools, 4)
        request = Request("probe", tokens, SamplingParams(), 0)
        self.sequence = RunningSequence(request, frozenset(), len(tokens))
        self.book.open(self.sequence, tokens)

    def forward(self, start: int, tokens: list[int], pictures: PictureRows | None) -> Tensor:
        """Of tokens at start .. and on; what lies beyond is overwritten."""
        self.book.truncate(self.sequence, start)
        assert self.book.reserve(self.sequence, start + len(tokens))
        rows = self.cache.rows(self.book, [Span(self.sequence, start, len(tokens))])
        caches = self.cache.layers(rows.views, 0, len(self.target.config.cached_layers))
        batch = ForwardBatch(rows.positions, rows.end_position, caches, pictures=pictures)
        logits = self.target.logits(self.target.forward(torch.tensor(tokens), batch).hidden)
        self.book.recycle(self.sequence, start)
        return logits

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
    assert probe.off(logits, pair.expected(name)) <= pair.tolerance


def cut(rows: PictureRows, start: int, end: int) -> PictureRows:
    return PictureRows(*(one[start:end] for one in vars(rows).values()))


@pytest.mark.parametrize("name", ["two", "longer than the window"])
def test_logits_match_in_chunks_and_behind_drafts_that_are_taken_back(pair, name):
    """A prompt with its pictures, cut around them, and an answer that is verified in blocks."""
    tokens, placed = prompt(name)
    answer = torch.randint(2, 490, (12,), generator=torch.Generator().manual_seed(8)).tolist()
    whole, probe = [*tokens, *answer], Probe(pair, "float32")
    rows, expected = rows_of(pair, len(tokens), placed), pair.logits(whole, placed)
    probe.open(whole)
    cuts = [0, 3, *(end for one in placed for end in (one.start - 1, one.end)), len(tokens)]
    found = [
        probe.forward(start, tokens[start:end], cut(rows, start, end))
        for start, end in zip(cuts, cuts[1:], strict=False)
        if start < end
    ]
    for start, kept in ((0, 3), (3, 5), (8, 4)):
        place, block = len(tokens) + start, answer[start : start + 5]
        wrong = [block[0], *((token + 7) % 490 for token in block[1:])]
        anchor = probe.forward(place, wrong, None)[:1]
        assert probe.off(anchor, expected[place : place + 1]) <= pair.tolerance
        found.append(probe.forward(place, block, None)[:kept])
    assert probe.off(torch.cat(found), expected) <= pair.tolerance


@pytest.mark.parametrize("pair", ["small"], indirect=True)
@pytest.mark.parametrize("drafts", ["plain", "ngram", "drafter"])
def test_greedy_answers_are_those_of_transformers(pair, drafts):
    """Past the window, whoever drafts; no answer has what stands for a picture."""
    tokens, placed = prompt("longer than the window")
    target = open_target(pair.folder, "float32", (0, 2))
    banned = target.config.forbidden_token_ids
    assert set(banned) >= {BEGIN, PICTURE, END, VIDEO}
    expected = pair.greedy("longer than the window", 10, banned)
    drafter = None
    if drafts == "drafter":
        drafter = zoo.tiny_drafter(target.kernels, vocab_size=512, hidden_size=64)
    settings = {"verify": 0 if drafts == "plain" else 7, "ngram": drafts == "ngram"}
    engine = Engine(target, drafter, EngineConfig(**settings, cache=CacheOptions(0.02)))
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    one = Request("a", tokens, params, 0, pictures=tuple(placed))
    done = zoo.run(engine, [one])["a"]
    assert done.token_ids == expected
    assert done.stats.picture_tokens == placed[0].picture.num_tokens
    if drafts != "ngram":  # nothing may have come up before
        assert (done.stats.drafted > 0) is (drafts == "drafter")


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
    assert probe.off(probe.logits(tokens, rows), pair.logits(tokens, placed)) <= pair.tolerance


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
    """What these tests would say of the mistakes that other engines made.

    Small models are causal, so whatever is said of rows ahead changes nothing in them.
    """
    tokens, placed = prompt(name)
    probe = Probe(pair, "float32")
    logits = probe.logits(tokens, wrong(rows_of(pair, len(tokens), placed), placed))
    matters = wrong is scaled_features or probe.target.config.sees_pictures_whole
    off = probe.off(logits, pair.expected(name))
    assert off > 1000 * TOLERANCE if matters else off <= pair.tolerance


def test_full_layers_that_look_ahead_are_noticed(pair):
    tokens, placed = prompt("middle")
    probe = Probe(pair, "float32")
    for layer in probe.target._layers:
        layer.attention._sees_pictures_whole = True
    logits = probe.logits(tokens, rows_of(pair, len(tokens), placed))
    assert probe.off(logits, pair.expected("middle")) > 1000 * TOLERANCE


def with_the_placeholders_row(target, monkeypatch) -> None:
    monkeypatch.setattr(target._inputs, "_pad", PICTURE)


def with_the_first_row(target, monkeypatch) -> None:
    monkeypatch.setattr(target._inputs, "_pad", 0)


def without_features(target, monkeypatch) -> None:
    """A layer's inputs are made of what stood there before them."""
    inputs = target._inputs
    monkeypatch.setattr(
        target, "_inputs", lambda ids, _, seen: inputs(ids, target.embed(ids), seen)
    )


def sliding_layers_look_ahead(target, monkeypatch) -> None:
    for layer in target._layers:
        if layer.attention._window is not None:
            monkeypatch.setattr(layer.attention, "_sees_pictures_whole", True)


@pytest.mark.parametrize("pair", ["small"], indirect=True)
@pytest.mark.parametrize(
    "wrong",
    [
        with_the_placeholders_row,
        with_the_first_row,
        without_features,
        sliding_layers_look_ahead,
    ],
)
def test_a_wrong_rule_of_small_models_is_noticed(pair, wrong, monkeypatch):
    tokens, placed = prompt("middle")
    probe = Probe(pair, "float32")
    wrong(probe.target, monkeypatch)
    logits = probe.logits(tokens, rows_of(pair, len(tokens), placed))
    assert probe.off(logits, pair.expected("middle")) > 1000 * TOLERANCE


@pytest.mark.parametrize("pair", ["small"], indirect=True)
@pytest.mark.parametrize("place", ["_qkv", "_output", "_gate_up", "_down"])
@pytest.mark.parametrize("side", ["inputs", "least", "most"])
def test_a_limit_that_is_left_out_is_noticed(pair, place, side):
    """Of one matrix, or of those of the same inputs; in the first layer these are one product."""
    shown = PlacedPicture(0, picture_of((50, 50), 12))
    tower = open_target(pair.folder, "float32").vision
    counts = [len(getattr(layer, place)._clipped) for layer in tower._layers]
    assert counts == [1, 1, 1] if place in ("_output", "_down") else counts[0] == 1 < counts[1]
    linears = getattr(tower._layers[-1], place)
    one = linears._clipped[-1]
    none = {"inputs": (-math.inf, math.inf), "least": one.least * 99, "most": one.most * 99}
    (right,) = tower.encode([shown.picture])
    linears._clipped[-1] = one._replace(**{side: none[side]})
    (wrong,) = tower.encode([shown.picture])
    assert_features(pair, shown.picture, right)
    assert (wrong - right).abs().max() > 100 * TOLERANCE


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


@pytest.mark.parametrize(
    ("backend", "gaps"),
    [("torch", (40, 7, 1)), ("float32", (40, 7, 1)), ("float32", (6, 7, 7, 20))],
)
def test_logits_of_films_match_transformers(pair, backend, gaps):
    """Each frame is a block of its own, and stands like a picture behind its time."""
    tokens, placed = film(SMALL, gaps)
    probe, ids = Probe(pair, backend), torch.tensor([tokens])
    with torch.no_grad():
        features = {"video": features_of_film(pair, placed)}
        kinds = 2 * (ids == VIDEO).long()
        expected = pair.model(ids, mm_token_type_ids=kinds, mm_encoder_outputs=features).logits[0]
    rows = rows_of(pair, len(tokens), placed)
    assert probe.off(probe.logits(tokens, rows), expected) <= pair.tolerance
    off = probe.off(probe.logits(tokens, two_as_one(rows, placed)), expected)
    is_seen_whole = probe.target.config.sees_pictures_whole
    assert off > 1000 * TOLERANCE if is_seen_whole else off <= pair.tolerance
