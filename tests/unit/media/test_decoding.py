"""Files that people send: what they show, and what is said of those that show nothing."""

from __future__ import annotations

import io
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flashdraft.errors import CapacityError, RequestError
from flashdraft.killable.pool import Limits
from flashdraft.media import decoding
from flashdraft.media.limits import MAX_BYTES
from flashdraft.media.resampling import Bytes
from tests.unit.media.files import bomb, encoded, noise, png

SIZE = (96, 72)  # 4 x 3 cells of 24; with 12 tokens it keeps its size
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    yield
    assert len(decoding._pool(decoding.PICTURE)._idle) == len(decoding._pool(decoding.PICTURE)._all)


def shown(data: bytes, size: tuple[int, int] = SIZE) -> Bytes:
    """What a file of this size shows, not resized."""
    budget = size[0] // 24 * (size[1] // 24)
    found = decoding.decode(data, budget, 24)
    assert (found.width, found.height) == size
    return np.frombuffer(found.pixels, np.uint8).reshape(size[1], size[0], 3)


def pids() -> list[int]:
    return [process._child.pid for process in decoding._pool(decoding.PICTURE)._all]


def refusal(data: bytes) -> str:
    with pytest.raises(RequestError) as raised:
        decoding.decode(data, 70, 48)
    assert str(raised.value).startswith("A picture cannot be taken. ")
    return str(raised.value)


# -- what they show --------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "more"), [("PNG", {}), ("WEBP", {"lossless": True})])
def test_pixels_that_are_kept_are_those_that_were_sent(kind: str, more: dict[str, Any]) -> None:
    np.testing.assert_array_equal(shown(encoded(noise(*SIZE), kind, **more)), noise(*SIZE))


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("GIF", "P"), ("WEBP", "RGB")]
    + [("PNG", "1"), ("PNG", "L"), ("PNG", "P"), ("GIF", "L")],
)
def test_every_mode_shows_what_pillow_shows(kind: str, mode: str) -> None:
    data = encoded(Image.fromarray(noise(*SIZE)).convert(mode), kind)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(shown(data), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_pictures_stand_upright(kind: str, orientation: int) -> None:
    """Red lies where the picture's top left corner is, green at the top right, as people see it."""
    upright = np.zeros((72, 96, 3), np.uint8)
    upright[:24, :24, 0] = upright[:24, -24:, 1] = 255
    stored = {  # how a camera stores what is to be turned back so
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }[orientation](upright)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(np.ascontiguousarray(stored), kind, exif=exif)
    found = shown(data).astype(int)
    assert np.abs(found - upright).mean() < 5
    assert np.argwhere(found[..., 0] > 200).max() < 28


def test_damaged_exif_turns_nothing() -> None:
    data = encoded(noise(*SIZE), exif=b"MM\x00\x2a\xff\xff\xff\xff\x00\x01")
    np.testing.assert_array_equal(shown(data), noise(*SIZE))


def test_what_is_transparent_is_white_whatever_lies_below() -> None:
    hidden = noise(*SIZE, bands=4)
    hidden[:36, :, 3], hidden[36:, :, 3] = 0, 255
    for kind, more in (("PNG", {}), ("WEBP", {"lossless": True, "exact": True})):
        found = shown(encoded(hidden, kind, **more))
        assert (found[:36] == 255).all()
        np.testing.assert_array_equal(found[36:], hidden[36:, :, :3])


@pytest.mark.parametrize(
    ("mode", "see_through"), [("L", 7), ("P", 7), ("P", bytes(range(256))), ("RGB", (7, 7, 7))]
)
def test_a_colour_that_stands_for_transparency(mode: str, see_through: Any) -> None:
    """HF's processor shows it white too, by Pillow."""
    image = Image.fromarray(noise(*SIZE, bands=1)[:, :, 0] // 16).convert(mode)
    data = encoded(image, transparency=see_through)
    white = Image.new("RGBA", SIZE, "white")
    with Image.open(io.BytesIO(data)) as stored:
        expected = np.asarray(Image.alpha_composite(white, stored.convert("RGBA")).convert("RGB"))
    assert (expected == 255).all(axis=-1).any()
    np.testing.assert_array_equal(shown(data), expected)


def test_half_transparent_is_mixed_with_white() -> None:
    image = Image.new("RGBA", SIZE, (100, 0, 255, 128))
    assert shown(encoded(image))[0, 0].tolist() == [177, 127, 255]


@pytest.mark.parametrize("colour", [0, 2, 4, 6])
def test_sixteen_bits_become_eight(colour: int) -> None:
    """Grey, colours, and both with transparency; Pillow by itself would show most of grey white."""
    bands = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    values = np.random.default_rng(1).integers(0, 1 << 16, (72, 96, bands), np.uint16)
    if bands in (2, 4):
        values[..., -1] = 0xFFFF
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in values)
    expected = (values >> 8).astype(np.uint8)[..., : bands - 1 if bands in (2, 4) else bands]
    found = shown(png(*SIZE, 16, colour, lines))
    np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


def test_transparent_grey_of_sixteen_bits() -> None:
    values = np.full((72, 96), 0x1234, np.uint16)
    values[:10] = 0x1235
    data = encoded(Image.fromarray(values), transparency=0x1235)
    found = shown(data)
    assert (found[:10] == 255).all() and (found[10:] == 0x12).all()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "MPO"])
def test_of_several_frames_the_first(kind: str) -> None:
    frames = [Image.new("RGB", SIZE, colour) for colour in ("red", "blue", "lime")]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50)
    assert shown(data).mean(axis=(0, 1)) == pytest.approx([255, 0, 0], abs=2)


def test_a_colour_profile_changes_nothing() -> None:
    profile = bytes(range(256)) * 4  # nobody reads it
    data = encoded(noise(*SIZE), icc_profile=profile)
    assert profile[:8] not in data and b"iCCP" in data
    np.testing.assert_array_equal(shown(data), noise(*SIZE))


# -- bad ones --------------------------------------------------------------------------------------


def test_a_bomb_is_refused_by_its_header() -> None:
    data = bomb(12_000, 12_000)
    assert len(data) < 18_000
    begin = time.monotonic()
    assert refusal(data).endswith(
        "It is 12000x12000 pixels large, 144.0 million; at most 50 million are taken, and 65535 a "
        "side. Make it smaller."
    )
    assert time.monotonic() - begin < 10


def huge(kind: str) -> bytes:
    """Headers that announce what does not follow."""
    match kind:
        case "PNG":
            return png(2**31 - 1, 2**31 - 1, 8, 6, b"")
        case "long PNG":
            return png(70_000, 1, 8, 0, bytes(70_001))
        case "GIF":
            return b"GIF89a\xff\xff\xff\xff" + encoded(noise(), "GIF")[10:]
        case "JPEG":
            data = bytearray(encoded(noise(), "JPEG"))
            start = data.index(b"\xff\xc0") + 5
            data[start : start + 4] = struct.pack(">HH", 60_000, 60_000)
            return bytes(data)
        case "lossy WEBP":
            data = bytearray(encoded(noise(), "WEBP"))
            data[26:30] = struct.pack("<HH", 16_383, 16_383)
            return bytes(data)
        case "lossless WEBP":
            data = bytearray(encoded(noise(), "WEBP", lossless=True))
            data[21:25] = b"\xff\xff\xff\x0f"
            return bytes(data)
        case _:
            data = bytearray(encoded(noise(bands=4), "WEBP"))
            assert data[12:16] == b"VP8X"
            data[24:30] = b"\xff\xff\x00\xff\xff\x00"
            return bytes(data)


@pytest.mark.parametrize(
    "kind",
    ["PNG", "long PNG", "GIF", "JPEG", "lossy WEBP", "lossless WEBP", "extended WEBP"],
)
def test_sides_are_checked_before_pixels_are_made(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_LIMITS", Limits(5.0, 64))  # no room for the pixels
    why = refusal(huge(kind))
    assert re.search(r"It is \d+x\d+ pixels large, .* at most 50 million are taken", why), why


@pytest.mark.parametrize("size", [(0, 10), (10, 0), (0, 0)])
def test_no_pixels(size: tuple[int, int]) -> None:
    assert "are damaged or cut off" in (why := refusal(png(*size, 8, 2, b""))) or (
        f"It is {size[0]}x{size[1]} pixels large: it has none. Save it anew." in why
    )


@pytest.mark.parametrize("part", [0.05, 0.5, 0.97])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_what_is_cut_off(kind: str, part: float) -> None:
    data = encoded(noise(), kind)
    assert f"Its {kind} data are damaged or cut off: " in (
        why := refusal(data[: max(24, int(part * len(data)))])
    )
    assert "object at" not in why
    assert why.endswith(". Send the whole file, or save it anew.")


def test_damage_in_the_middle() -> None:
    data = bytearray(encoded(noise()))
    data[len(data) // 2] ^= 0xFF
    assert "Its PNG data are damaged or cut off: " in refusal(bytes(data))


@pytest.mark.parametrize(
    "data",
    [
        b"Hello, this is some text.",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7\n",
        b"\0",
        encoded(noise(), "BMP"),
        encoded(noise(), "TIFF"),
        encoded(noise(), "AVIF"),
        encoded(noise(), "PPM"),
        b"RIFF\x24\0\0\0WAVEfmt ",
    ],
)
def test_what_is_no_picture(data: bytes) -> None:
    why = refusal(data)
    begin = repr(data[:24].decode("latin-1"))
    assert f"It is no PNG, JPEG, WebP or GIF file: it begins with {begin}." in why
    assert why.endswith("Convert it to one of them.")


def test_the_content_decides_even_against_its_first_bytes() -> None:
    assert "Its JPEG data are damaged" in refusal(b"\xff\xd8\xff" + encoded(noise())[3:])


def test_nothing_and_too_much() -> None:
    assert "It is empty: 0 bytes. Send the whole file." in refusal(b"")
    why = refusal(bytes(MAX_BYTES + 1))
    assert "It has 40.0 MiB; at most 40 are taken. Make it smaller, or save it as JPEG." in why


# -- processes -------------------------------------------------------------------------------------


def test_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_LIMITS", Limits(0.05, 1280))
    why = refusal(bomb(7000, 7000))
    assert "Decoding it was stopped: it ran for more than 0.05 s." in why
    assert why.endswith("Make it smaller, or save it anew as PNG or JPEG.")
    monkeypatch.undo()
    np.testing.assert_array_equal(shown(encoded(noise(*SIZE))), noise(*SIZE))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF"])
def test_memory_is_limited(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("RGB", (5000, 4000), "red"), kind)
    monkeypatch.setattr(decoding, "_LIMITS", Limits(10.0, 20))
    why = refusal(data)
    assert "Decoding it was stopped: it needed more than 20 MiB of memory" in why
    monkeypatch.undo()
    np.testing.assert_array_equal(shown(encoded(noise(*SIZE))), noise(*SIZE))


def test_the_largest_is_taken_within_the_limits() -> None:
    found = decoding.decode(bomb(8165, 6123), 70, 48)  # 49,994,295 pixels
    assert len(found.pixels) == 3 * found.width * found.height and not any(found.pixels)


def kill_in_the_middle(sent: list[signal.Signals]) -> tuple[list[Any], threading.Thread]:
    """A process gets these signals while it has a question; its outcome, and who waits for it."""
    decoding.rest()
    shown(encoded(noise(*SIZE)))
    (pid,) = pids()
    os.kill(pid, signal.SIGSTOP)  # it answers nothing from here on
    outcome = list[Any]()

    def ask() -> None:
        try:
            outcome.append(shown(encoded(noise(*SIZE))))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while decoding._pool(decoding.PICTURE)._idle:
        time.sleep(0.01)
    time.sleep(0.1)
    for one in sent:
        os.kill(pid, one)
    return outcome, thread


def test_a_crash_is_a_refusal_of_one_picture() -> None:
    outcome, thread = kill_in_the_middle([signal.SIGSEGV, signal.SIGCONT])
    thread.join(30)
    (found,) = outcome
    assert isinstance(found, RequestError) and not isinstance(found, CapacityError)
    assert "stopped: it needed more than 1280 MiB of memory, or crashed (SIGSEGV)." in str(found)
    np.testing.assert_array_equal(shown(encoded(noise(*SIZE))), noise(*SIZE))


def test_a_process_that_somebody_kills_is_replaced() -> None:
    outcome, thread = kill_in_the_middle([signal.SIGKILL])
    thread.join(30)
    np.testing.assert_array_equal(outcome[0], noise(*SIZE))


def test_pictures_are_decoded_side_by_side() -> None:
    data = encoded(noise(*SIZE))
    found = list[Bytes]()
    threads = [threading.Thread(target=lambda: found.append(shown(data))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 8 and all((one == noise(*SIZE)).all() for one in found)
    assert len(pids()) <= decoding._pool(decoding.PICTURE).size


def test_pixels_that_are_none_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Liar:
        def ask(self, *_: object, **__: object) -> dict[str, Any]:
            return {"type": "answer", "width": 48, "height": 4800, "pixels": "AAAA"}

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "_pool", lambda kind: Liar())
        assert "it made no picture of the right size" in refusal(b"x")


def test_processes_end_with_the_program_and_no_file_is_left(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from flashdraft.media import decoding\n"
        "decoding.decode(pathlib.Path(sys.argv[1]).read_bytes(), 70, 48)\n"
        "print([one._child.pid for one in decoding._pool(decoding.PICTURE)._all][0])\n"
    )
    picture = tmp_path / "picture.png"
    picture.write_bytes(encoded(noise()))
    done = subprocess.run(
        [sys.executable, "-c", program, str(picture)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
    assert list(tmp_path.iterdir()) == [picture]


def test_resting_ends_them() -> None:
    shown(encoded(noise(*SIZE)))
    before = pids()
    decoding.rest()
    assert before and pids() == []
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
