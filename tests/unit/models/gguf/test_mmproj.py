"""Towers in files of their own: read as a folder's, found beside a model, and refused in words."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from flashdraft.bench.plan.pairs import find_pair
from flashdraft.bench.plan.sizes import count_target
from flashdraft.core import Picture
from flashdraft.engine.cache.memory import target_bytes
from flashdraft.errors import CheckpointError, FlashdraftError, RequestError, UnsupportedModelError
from flashdraft.llm import LLM
from flashdraft.models.config.vision import NO_TOWER, VisionTokens
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.gguf.names import tower_names
from flashdraft.models.loading import Checkpoint, open_checkpoint
from flashdraft.models.registry import build_target
from tests import zoo
from tests.seeing_checkpoint import BUDGET, CELL, make_seeing_checkpoint
from tests.seeing_gguf import TOWER_KEYS, tower_tensors, write_text, write_tower
from tests.unit.models.gguf.factory import Types, random_values, write_gguf
from tests.unit.models.gguf.test_file import write_llama
from tests.unit.models.vision.towers import small_tower_shapes, tower_shapes
from tests.unit.server.seeing import png

ASKED = "the quick brown"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_checkpoint(tmp_path_factory.mktemp("seeing") / "tiny")


@pytest.fixture(scope="module")
def text(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(folder, tmp_path_factory.mktemp("text") / "tiny.gguf")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As E2B and E4B."""
    return make_seeing_checkpoint(tmp_path_factory.mktemp("small") / "tiny", small=True)


@pytest.fixture
def model(text: Path, tmp_path: Path) -> Path:
    """The text model, alone in a folder."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(text.read_bytes())
    return path


def picture(rows: int, columns: int, seed: int = 0) -> Picture:
    height, width = CELL * rows, CELL * columns
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Picture(values.numpy().tobytes(), width, height, rows * columns, bytes(32))


PICTURES = [picture(3, 5), picture(4, 2, seed=1)]


def features(checkpoint: Checkpoint, backend: str = "float32") -> Tensor:
    target = build_target(checkpoint.config, checkpoint.source, zoo.kernels(backend))
    assert target.vision is not None
    return torch.cat(target.vision.encode(PICTURES))


# -- what is read ------------------------------------------------------------------------------


def test_a_model_with_its_tower_is_the_folders_model(folder: Path, model: Path) -> None:
    write_tower(folder, model.parent / "mmproj-F32.gguf")
    ours, theirs = open_checkpoint(model, vision=True), open_checkpoint(folder, vision=True)
    assert set(ours.source.names()) == set(theirs.source.names())
    for name in theirs.source.names():
        assert ours.source.shape(name) == theirs.source.shape(name)
        assert torch.equal(ours.source.read(name), theirs.source.read(name)), name
    tower, reference = ours.config.vision, theirs.config.vision
    assert tower is not None and reference is not None
    assert tower.tokens == VisionTokens(499, 500, 502, 504)
    assert tower.norm_eps == pytest.approx(reference.norm_eps, rel=1e-6)  # stored in 32 bits
    assert tower.default_budget == 280  # Gemma's own: no file says it
    same = {"norm_eps": reference.norm_eps, "default_budget": BUDGET}
    assert dataclasses.replace(tower, **same) == reference
    assert ours.config.sees_pictures_whole and ours.config.why_no_vision is None
    assert ours.config.layers == theirs.config.layers
    assert torch.equal(features(ours), features(theirs))


def test_a_small_model_with_its_tower_is_the_folders_model(small: Path, tmp_path: Path) -> None:
    """What goes through the tower has limits, and pictures are seen as text is."""
    model = write_text(small, tmp_path / "tiny.gguf")
    keys = {"clip.has_audio_encoder": True, "clip.audio.projector_type": "gemma4a"}
    sounds = {"a.blk.0.attn_q.input_max": random_values(1)}
    write_tower(small, tmp_path / "mmproj.gguf", keys=keys, tensors=sounds)
    ours, theirs = open_checkpoint(model, vision=True), open_checkpoint(small, vision=True)
    assert set(ours.source.names()) == set(theirs.source.names())
    for name in theirs.source.names():
        assert ours.source.shape(name) == theirs.source.shape(name)
        assert torch.equal(ours.source.read(name), theirs.source.read(name)), name
    tower = ours.config.vision
    assert tower is not None and tower.clipped and not tower.standardize
    assert not ours.config.sees_pictures_whole and not theirs.config.sees_pictures_whole
    assert ours.config.per_layer == theirs.config.per_layer is not None
    assert torch.equal(features(ours), features(theirs))
    expected = ask(small)
    assert expected[0] != expected[1] and ask(model) == expected


def test_a_small_models_sounds_are_refused_in_words(small: Path) -> None:
    """It loads with its part for them, which stays unread."""
    content = [{"type": "audio", "audio": b"RIFF"}, {"type": "text", "text": ASKED}]
    with LLM(small, device="cpu", dtype="float32", draft=None) as llm:
        assert llm.sees_pictures
        with pytest.raises(RequestError, match="there is no hearing in these models"):
            llm.chat([{"role": "user", "content": content}])


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose tower has rows of whole blocks."""
    sizes = {"hidden_size": 64, "head_dim": 32, "global_head_dim": 32, "intermediate_size": 96}
    return make_seeing_checkpoint(tmp_path_factory.mktemp("wide") / "tiny", **sizes)


WIDE_KEYS = {"clip.vision.embedding_length": 64, "clip.vision.feed_forward_length": 96}


@pytest.mark.parametrize(
    ("kind", "bound"),
    [(Types.F16, 2e-3), (Types.BF16, 2e-2), (Types.Q8_0, 3e-2), (Types.Q4_0, 0.5)],
)
def test_what_is_stored_in_few_bits_becomes_floats(
    wide: Path, model: Path, tmp_path: Path, kind: Types, bound: float
) -> None:
    path = write_tower(wide, tmp_path / "mmproj.gguf", kind, WIDE_KEYS)
    stored = {one.format.name for one in GGUFFile(path).tensors.values()}
    assert stored == {"F32", kind.name}
    checkpoint = open_checkpoint(model, vision=True)
    assert all(checkpoint.source.quantized_bytes(name) is None for name in tower_of(checkpoint))
    found, exact = features(checkpoint), features(open_checkpoint(wide, vision=True))
    assert 0 < (found - exact).abs().max() / exact.abs().max() < bound
    rounded = {
        name: gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        for name, values in tower_tensors(wide).items()
        if values.ndim == 2
    }
    floats = write_tower(wide, tmp_path / "floats.gguf", keys=WIDE_KEYS, tensors=rounded)
    assert torch.equal(features(open_checkpoint(model, True, floats)), found)


def tower_of(checkpoint: Checkpoint) -> list[str]:
    return [name for name in checkpoint.source.names() if "vision" in name]


def test_a_pooling_that_is_stated_is_read(folder: Path, model: Path) -> None:
    write_tower(
        folder, model.parent / "mmproj.gguf", keys={"clip.vision.projector.scale_factor": 2}
    )
    config = open_checkpoint(model, vision=True).config.vision
    assert config is not None and (config.pooling, config.cell) == (2, 8)


def test_a_tower_without_standards(folder: Path, model: Path) -> None:
    absent = {"v.std_bias": None, "v.std_scale": None}
    write_tower(folder, model.parent / "mmproj.gguf", tensors=absent)
    checkpoint = open_checkpoint(model, vision=True)
    assert checkpoint.config.vision is not None and not checkpoint.config.vision.standardize
    assert features(checkpoint).isfinite().all()


def test_what_is_for_sounds_is_left_out(folder: Path, model: Path) -> None:
    keys = {"clip.has_audio_encoder": True, "clip.audio.projector_type": "gemma4a"}
    sounds = {"a.blk.0.attn_q.weight": random_values(8, 8), "mm.a.fc.weight": random_values(8, 8)}
    write_tower(folder, model.parent / "mmproj.gguf", keys=keys, tensors=sounds)
    assert len(tower_of(open_checkpoint(model, vision=True))) == len(tower_tensors(folder))


def test_the_published_towers_tensors_have_their_names(tmp_path: Path) -> None:
    tensors = {"v.std_bias": random_values(1152)}
    path = write_gguf(tmp_path / "m.gguf", "clip", {"vision.block_count": 27}, tensors)
    assert set(tower_names(GGUFFile(path)).values()) == tower_shapes(5376).keys()
    tensors = {"v.blk.15.ffn_down.output_max": random_values(1)}
    path = write_gguf(tmp_path / "s.gguf", "clip", {"vision.block_count": 16}, tensors)
    assert set(tower_names(GGUFFile(path)).values()) == small_tower_shapes(2560).keys()


def test_the_older_key_of_the_type(folder: Path, model: Path) -> None:
    keys = {"clip.vision.projector_type": None, "clip.projector_type": "gemma4v"}
    write_tower(folder, model.parent / "mmproj.gguf", keys=keys)
    assert open_checkpoint(model, vision=True).config.vision is not None


def test_memory_and_plans_count_the_tower(folder: Path, model: Path) -> None:
    path = write_tower(folder, model.parent / "mmproj.gguf", Types.Q8_0)
    num_values = sum(values.size for values in tower_tensors(folder).values())
    kernels = zoo.kernels("float32")
    sizes = [
        target_bytes(open_checkpoint(model, vision).source, kernels) for vision in (False, True)
    ]
    assert sizes[1] - sizes[0] == 4 * num_values
    for pair in (find_pair(str(model)), find_pair(str(model), mmproj=str(path))):
        assert count_target(pair.target).vision == num_values
    assert count_target(find_pair(str(model), vision=False).target).vision == 0


def ask(path: Path, **options: Any) -> list[list[int]]:
    """Answers about a red picture, a blue one, and none."""
    shown = [
        [{"type": "image", "image": png(color=color), "max_soft_tokens": BUDGET}]
        for color in ("red", "blue")
    ]
    with LLM(path, device="cpu", dtype="float32", draft="ngram", **options) as llm:
        return [
            llm.chat(
                [{"role": "user", "content": [*parts, {"type": "text", "text": ASKED}]}]
            ).token_ids
            for parts in [*shown, []]
        ]


def test_answers_about_pictures_are_the_folders(folder: Path, model: Path, tmp_path: Path) -> None:
    expected = ask(folder)
    assert expected[0] != expected[1]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    tower = write_tower(folder, elsewhere / "any-name.gguf")
    assert ask(model, mmproj=tower) == expected
    tower.rename(model.parent / "tiny-mmproj-f32.gguf")
    assert ask(model) == expected


# -- which file ----------------------------------------------------------------------------------


def test_without_a_file_beside_it_the_model_reads_text(model: Path) -> None:
    config = open_checkpoint(model, vision=True).config
    assert config.vision is None and config.why_no_vision == NO_TOWER
    assert not config.sees_pictures_whole


def test_it_is_left_out_where_nobody_is_to_see(folder: Path, model: Path) -> None:
    path = write_tower(folder, model.parent / "mmproj.gguf")
    for named in (None, path):
        checkpoint = open_checkpoint(model, vision=False, mmproj=named)
        assert checkpoint.config.vision is None and tower_of(checkpoint) == []
    with LLM(model, vision=False, mmproj="no such file", device="cpu", dtype="float32") as llm:
        assert not llm.sees_pictures  # what is left out need not be there


def test_of_one_tower_in_several_formats_the_best_is_taken(folder: Path, model: Path) -> None:
    kinds = {"Q8_0": Types.Q8_0, "f32": Types.F32, "F16": Types.F16, "bf16": Types.BF16}
    paths = {
        name: write_tower(folder, model.parent / f"mmproj-tiny-{name}.gguf", kind)
        for name, kind in kinds.items()
    }
    for best in ("bf16", "F16", "f32", "Q8_0"):
        taken = features(open_checkpoint(model, vision=True))
        assert torch.equal(taken, features(open_checkpoint(model, True, paths[best])))
        paths[best].unlink()


def test_of_several_towers_one_has_to_be_named(folder: Path, model: Path) -> None:
    paths = [write_tower(folder, model.parent / f"mmproj-{name}.gguf") for name in "ab"]
    message = r"2 mmproj files beside \S+tiny\.gguf fit it: mmproj-a\.gguf, mmproj-b\.gguf\. Name"
    with pytest.raises(
        RequestError, match=message + ".* by --mmproj, .* --no-vision .*vision=False"
    ):
        open_checkpoint(model, vision=True)
    assert open_checkpoint(model, True, paths[1]).config.vision is not None
    assert open_checkpoint(model).config.vision is None


def test_one_that_fits_is_found_among_others(
    folder: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tower(folder, model.parent / "mmproj-a.gguf")
    keys = {"clip.vision.projector_type": "gemma3"}
    write_tower(folder, model.parent / "mmproj-b.gguf", keys=keys)
    (model.parent / "mmproj-c.gguf").write_bytes(b"GGUF and nothing else")
    with caplog.at_level(logging.WARNING):
        assert open_checkpoint(model, vision=True).config.vision is not None
    assert caplog.text == ""


def test_one_that_does_not_fit_leaves_the_text(
    folder: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"clip.vision.projector_type": "gemma3"}
    path = write_tower(folder, model.parent / "mmproj.gguf", keys=keys)
    config = open_checkpoint(model, vision=True).config
    assert config.vision is None and f"{path} holds a tower of type" in str(config.why_no_vision)
    assert "Gemma4ForCausalLM takes no pictures." in caplog.text and str(path) in caplog.text


def test_models_that_cannot_see_do_not_look(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "llama.gguf"
    write_llama(model)
    paths = [write_tower(folder, tmp_path / f"mmproj-{name}.gguf") for name in "ab"]
    assert open_checkpoint(model, vision=True).config.vision is None and caplog.text == ""
    with pytest.raises(
        UnsupportedModelError, match=r"llama\.gguf is a llama model; .* only Gemma 4"
    ):
        open_checkpoint(model, True, paths[0])


def test_folders_have_their_own(folder: Path, tmp_path: Path) -> None:
    path = write_tower(folder, tmp_path / "mmproj.gguf")
    with pytest.raises(UnsupportedModelError, match="is a folder, and mmproj files are for GGUF"):
        LLM(folder, mmproj=path, device="cpu", dtype="float32")
    with pytest.raises(RequestError, match="takes no mmproj file: only Gemma 4 in a .gguf file"):
        find_pair(str(folder), mmproj=str(path))


@pytest.mark.parametrize("name", ["absent.gguf", "org/name", ""])
def test_what_is_named_must_be_a_file(model: Path, name: str) -> None:
    with pytest.raises(
        FlashdraftError, match="There is no mmproj file .*name a .gguf file, or one"
    ):
        LLM(model, mmproj=name, device="cpu", dtype="float32")


# -- what is refused -----------------------------------------------------------------------------

SHORT = {"v.blk.2.ffn_up.weight": None}
WIDE = {"mm.input_projection.weight": random_values(96, 48)}
FLAT = {"v.patch_embd.weight": random_values(48, 48)}
LONG = {"v.position_embd.weight": random_values(512, 48)}
WRONG = {"v.blk.1.attn_q.weight": random_values(48, 40)}
LIMITED = {"v.blk.0.attn_q.input_max": random_values(1)}
STRANGE = {"v.blk.0.out_scale.weight": random_values(48)}
VISION = "clip.vision."


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ({f"{VISION}projector_type": "gemma3"}, {}, "a tower of type 'gemma3', which is another"),
        ({f"{VISION}projector_type": "gemma4uv"}, {}, "'gemma4uv', which is Gemma 4 12B's"),
        ({f"{VISION}projector_type": None}, {}, "a tower of type None"),
        (
            {"clip.has_vision_encoder": None, "clip.has_audio_encoder": True},
            {},
            "holds no tower for pictures, only one for sounds",
        ),
        ({}, WIDE, "is made for a model whose rows have 96 values; this one's have 64"),
        ({}, SHORT, r"lacks tensors of Gemma 4's tower: 'v\.blk\.2\.ffn_up\.weight'\. Fetch"),
        ({}, {**SHORT, "v.std_bias": None}, r"tower: 'v\.std_bias' and 1 others"),
        ({}, FLAT, r"'v\.patch_embd\.weight' has shape \[48, 48\], its keys ask for \[48, 3, 4, 4"),
        ({}, LONG, r"'v\.position_embd\.weight' has shape \[512, 48\]; it must have 3 dimen"),
        ({}, WRONG, r"attn_q\.weight' has shape \[48, 40\], its keys ask for \[48, 48\]"),
        ({f"{VISION}patch_size": 2}, {}, r"\[48, 3, 4, 4\], its keys ask for \[48, 3, 2, 2\]"),
        ({f"{VISION}patch_size": [4, 8]}, {}, "clip.vision.patch_size must be one number"),
        ({f"{VISION}embedding_length": 64}, {}, r"has shape \[48\S.*, its keys ask for \[64"),
        ({}, LIMITED, r"lacks tensors .*'v\.blk\.0\.attn_q\.input_min' and 82 others"),
        ({}, STRANGE, r"tensor 'v\.blk\.0\.out_scale\.weight' has no place in Gemma 4's tower"),
        ({f"{VISION}image_mean": [0.5, 0.5, 0.5]}, {}, r"'clip\.vision\.image_mean' = \[0\.5"),
        ({"clip.use_silu": True}, {}, "'clip.use_silu' = True; only False is supported"),
        ({f"{VISION}window_size": 7}, {}, "window_size' = 7; flashdraft does not know what it"),
        ({f"{VISION}block_count": 10**9}, {}, "block_count is 1000000000, but the file has"),
        (
            {f"{VISION}attention.head_count": None},
            {},
            "no metadata key 'clip.vision.attention.head",
        ),
        (
            {f"{VISION}projector.scale_factor": 10**6},
            {},
            "no tower that can be run. .*pooling_kern",
        ),
    ],
)
def test_a_tower_that_cannot_be_had_is_refused(
    folder: Path, model: Path, keys: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    path = write_tower(folder, model.parent / "mmproj.gguf", keys=keys, tensors=tensors)
    with pytest.raises((UnsupportedModelError, CheckpointError)) as found:
        open_checkpoint(model, vision=True, mmproj=path)
    assert re.search(message, str(found.value)) and str(path) in str(found.value)
    beside = open_checkpoint(model, vision=True).config  # not named, it only leaves the model blind
    assert beside.vision is None and re.search(message.split(". .*")[-1], str(beside.why_no_vision))


def test_keys_that_say_nothing_pass(folder: Path, model: Path) -> None:
    assert f"{VISION}image_size" in TOWER_KEYS
    keys = {
        **{"clip.use_gelu": True, "clip.use_silu": False, f"{VISION}window_size": 0},
        **{f"{VISION}is_deepstack_layers": [False] * 3, f"{VISION}image_max_pixels": 645120},
    }
    write_tower(folder, model.parent / "mmproj.gguf", keys=keys)
    assert open_checkpoint(model, vision=True).config.vision is not None


def test_another_models_file_is_no_tower(model: Path, text: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'gemma4' and no tower for pictures; name an"):
        open_checkpoint(model, True, text)


def test_a_vocabulary_without_the_marks(folder: Path, text: Path, tmp_path: Path) -> None:
    path = write_text(folder, tmp_path / "m.gguf", **{"tokenizer.ggml.tokens": ["a"] * 512})
    write_tower(folder, tmp_path / "mmproj.gguf")
    why = open_checkpoint(path, vision=True).config.why_no_vision
    assert re.search("lacks the tokens .*boi_token_id, image_token_id, eoi_token_id", str(why))


def test_a_tower_named_as_the_model(folder: Path, tmp_path: Path) -> None:
    path = write_tower(folder, tmp_path / "mmproj.gguf")
    with pytest.raises(
        UnsupportedModelError, match="own file, and this one by --mmproj .in Python"
    ):
        open_checkpoint(path)
