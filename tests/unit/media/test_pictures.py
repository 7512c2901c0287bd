"""A picture of core from what people call a picture."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from flashdraft.core import Picture
from flashdraft.errors import RequestError
from flashdraft.media import pictures
from flashdraft.media.pictures import PictureRules, open_picture, picture_bytes
from flashdraft.media.resampling import Bytes
from flashdraft.media.sizes import BUDGETS
from tests.unit.media.files import bomb, encoded, noise

RULES = PictureRules(cell=48, budget=70)
ROOT = Path(__file__).parents[3]


def pixels(picture: Picture) -> Bytes:
    shape = (picture.height, picture.width, 3)
    return np.frombuffer(picture.pixels, np.uint8).reshape(shape)


def smooth(width: int, height: int) -> Bytes:
    small = Image.fromarray(noise(width // 8, height // 8))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("size", [(320, 240), (100, 333)])
def test_a_picture_is_that_of_transformers(size: tuple[int, int], budget: int) -> None:
    """Its processor for machines without torchvision rounds elsewhere: two levels, on noise."""
    sent = noise(*size)
    picture = open_picture(encoded(sent), PictureRules(48, budget))
    processor = Gemma4ImageProcessorPil()
    expected = processor(Image.fromarray(sent), max_soft_tokens=budget, return_tensors="np")
    assert picture.num_tokens == expected["num_soft_tokens_per_image"][0]
    count = 9 * picture.num_tokens
    rows, columns = picture.height // 16, picture.width // 16
    patches = pixels(picture).reshape(rows, 16, columns, 16, 3).transpose(0, 2, 1, 3, 4)
    theirs = 255 * expected["pixel_values"][0, :count]
    difference = np.abs(patches.reshape(count, 768) - theirs)
    assert difference.max() < 2.01 and difference.mean() < 0.01
    assert expected["image_position_ids"][0, count - 1].tolist() == [columns - 1, rows - 1]


def test_a_picture_says_what_it_is() -> None:
    picture = open_picture(encoded(smooth(640, 480), "JPEG"), PictureRules(48, 280))
    assert repr(picture) == "Picture(912x672, 266 tokens)"
    assert len(picture.pixels) == 3 * 912 * 672 and len(picture.key) == 32


def test_a_key_is_that_of_the_pixels_and_of_how_they_were_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = noise(336, 480)  # has its size already, for 70 cells of 48 and for 280 of 24
    picture = open_picture(encoded(sent), RULES)
    assert picture.num_tokens == 70 and (pixels(picture) == sent).all()
    assert open_picture(encoded(sent, "WEBP", lossless=True), RULES).key == picture.key
    other = sent.copy()
    other[0, 0, 0] ^= 1
    keys = {
        picture.key,
        open_picture(encoded(other), RULES).key,
        open_picture(encoded(sent), PictureRules(24, 280)).key,
        open_picture(encoded(sent), PictureRules(48, 140)).key,
        open_picture(encoded(sent.transpose(1, 0, 2).copy()), RULES).key,
    }
    monkeypatch.setattr(pictures, "_VERSION", b"another")
    assert len(keys | {open_picture(encoded(sent), RULES).key}) == 6


def test_a_budget_that_no_model_knows() -> None:
    with pytest.raises(RequestError, match="cannot take 71 tokens.* 70, 140, 280, 560, 1120 at"):
        open_picture(encoded(noise()), PictureRules(48, 71))


# -- what people call a picture ------------------------------------------------------------------


def test_bytes_paths_and_data_urls_are_the_same_file(tmp_path: Path) -> None:
    data = encoded(noise())
    path = tmp_path / "picture"  # its name says nothing
    path.write_bytes(data)
    url = "data:image/jpeg;base64," + b64encode(data).decode()
    for value in (data, bytearray(data), memoryview(data), path, url):
        assert picture_bytes(value) == data


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (5, "A picture is 5; it must be the bytes of a file, a pathlib.Path, a data: URL, or an"),
        (None, "A picture is None; it must be"),
        ("/etc/hostname", "A picture's URL is '/etc/hostname'; it must be 'data:image/png;base64,"),
        ("file:///etc/hostname", "it must be 'data:image/png;base64,'"),
        (Path("not/there.png"), r"'not/there.png' cannot be read: No such file.*Check the pict"),
        (Path("a\0b"), "cannot be read: embedded null byte"),
        (Path(os.curdir), "cannot be read: Is a directory. Check the picture's path"),
        (Path(os.devnull), "is no file. Give the path of a picture's file"),
    ],
)
def test_what_is_no_picture(value: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        picture_bytes(value)


def test_a_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RequestError, match="is no file"):
        picture_bytes(tmp_path / "pipe")


def test_a_file_that_is_too_large_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    with path.open("wb") as file:
        file.truncate(1 << 36)
    with pytest.raises(RequestError, match="more than 40 MiB, which is the most.*Make it smaller"):
        picture_bytes(path)


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV"]
)
def test_an_image_of_pillows_is_what_it_shows(mode: str) -> None:
    image = Image.fromarray(noise(336, 480, bands=4))
    by_way = {"La": "LA", "PA": "LA", "RGBa": "RGBA"}.get(mode, "RGB")
    image = image.convert(by_way).convert(mode)
    plain = {"RGBa": "RGBA", "PA": "RGBA", "La": "LA"}.get(mode, mode)
    white = Image.new("RGBA", image.size, "white")
    shown = Image.alpha_composite(white, image.convert(plain).convert("RGBA")).convert("RGB")
    found = open_picture(picture_bytes(image), RULES)
    np.testing.assert_array_equal(pixels(found), np.asarray(shown))


def test_an_image_of_pillows_keeps_its_side_up_and_its_sixteen_bits() -> None:
    stored = encoded(noise(480, 336), "PNG", exif=orientation(6))
    with Image.open(io.BytesIO(stored)) as image:
        found = open_picture(picture_bytes(image), RULES)
    assert found == open_picture(stored, RULES)
    assert (found.width, found.height) == (336, 480)
    grey = np.arange(336 * 480, dtype=np.uint16).reshape(480, 336)
    found = open_picture(picture_bytes(Image.fromarray(grey)), RULES)
    np.testing.assert_array_equal(pixels(found)[..., 1], grey >> 8)


def orientation(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


def test_images_of_pillows_that_are_none() -> None:
    with pytest.raises(RequestError, match="the mode 'F', whose numbers are no colours.*Convert"):
        picture_bytes(Image.new("F", (4, 4)))
    with pytest.raises(RequestError, match="image of 0x4 pixels has none"):
        picture_bytes(Image.new("RGB", (0, 4)))
    with (
        Image.open(io.BytesIO(encoded(noise())[:2000])) as cut,
        pytest.raises(RequestError, match="cannot be read: .*Check its file"),
    ):
        picture_bytes(cut)


def test_an_image_of_pillows_that_is_too_large() -> None:
    image = Image.frombytes("RGB", (4000, 3600), os.urandom(3 * 4000 * 3600))
    with pytest.raises(RequestError, match="has 41.* MiB as PNG; at most 40 .* path of its file"):
        picture_bytes(image)


def test_opening_needs_neither_pillow_nor_torch_here(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from flashdraft.media.pictures import PictureRules, open_picture, picture_bytes\n"
        "data = picture_bytes(pathlib.Path(sys.argv[1]))\n"
        "assert open_picture(data, PictureRules(48, 70)).num_tokens == 70\n"
        "print({'PIL', 'numpy', 'torch'} & set(sys.modules))\n"
    )
    picture = tmp_path / "picture.png"
    picture.write_bytes(encoded(noise(336, 480)))
    done = subprocess.run(
        [sys.executable, "-c", program, str(picture)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_a_bomb_that_pillow_opened_is_refused_here_too() -> None:
    with pytest.raises(RequestError, match="It is 9000x9000 pixels large, 81.0 million; at most"):
        open_picture(bomb(9000, 9000), RULES)
