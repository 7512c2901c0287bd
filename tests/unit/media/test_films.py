"""Films and PDF documents: what they become, and what is said of those that become nothing."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flashdraft.core import Picture
from flashdraft.errors import RequestError
from flashdraft.killable.pool import Limits
from flashdraft.media import decoding, film_child, kinds
from flashdraft.media.kinds import FILM, PDF
from flashdraft.media.limits import MAX_BYTES
from flashdraft.media.pictures import (
    Frame,
    PictureRules,
    file_bytes,
    open_film,
    open_page,
    open_picture,
)
from flashdraft.media.resampling import Bytes
from flashdraft.media.sources import read_data_url
from tests.unit.media.files import encoded
from tests.unit.media.film_files import (
    ENCRYPTED,
    FORMATS,
    filled,
    film,
    grey,
    noise_film,
    pdf,
    sound_alone,
)

ROOT = Path(__file__).parents[3]
RULES = PictureRules(24, 70)


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    yield
    for kind in (FILM, PDF):
        assert len(decoding._pool(kind)._idle) == len(decoding._pool(kind)._all)


def pixels(picture: Picture) -> Bytes:
    return np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3)


def refusal(data: bytes) -> str:
    with pytest.raises(RequestError) as raised:
        open_film(data, 24)
    assert str(raised.value).startswith("A film cannot be taken. ")
    return str(raised.value)


def page_refusal(data: bytes, max_pages: int = 16) -> str:
    with pytest.raises(RequestError) as raised:
        open_page(data, 0, max_pages, RULES)
    assert str(raised.value).startswith("A PDF cannot be taken. ")
    return str(raised.value)


def levels(frames: tuple[Frame, ...]) -> list[float]:
    return [float(pixels(frame.picture).mean()) for frame in frames]


# -- films -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
def test_frames_come_evenly_from_all_of_a_film(kind: str) -> None:
    """Of 40 frames that grow lighter: which of them is seen by how light it is."""
    frames = open_film(film(40, kind), 24)
    expected = [i * 40 // 32 for i in range(32)]
    found = [round(level / 250 * 39) for level in levels(frames)]
    assert found == expected
    assert [frame.time for frame in frames] == [f"00:{i // 10:02d}" for i in expected]


def test_a_frame_is_a_picture_of_its_pixels() -> None:
    """One that has its size already is resized to it, as a picture is."""
    frames = open_film(data := noise_film(), 24)
    for frame, shown in zip(frames, decoded(data), strict=True):
        assert frame.picture == open_picture(encoded(shown), RULES)
    assert len({frame.picture.key for frame in frames}) == len(frames) == 6


def decoded(data: bytes) -> list[Bytes]:
    """Every frame, as PyAV has it."""
    program = (
        "import av, io, sys\n"
        "with av.open(io.BytesIO(sys.stdin.buffer.read())) as file:\n"
        "    for frame in file.decode(video=0):\n"
        "        sys.stdout.buffer.write(frame.to_ndarray(format='rgb24').tobytes())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=data, capture_output=True, timeout=120, check=True
    )
    return list(np.frombuffer(done.stdout, np.uint8).reshape(-1, 72, 96, 3))


@pytest.mark.parametrize("count", [1, 5, 31, 32, 33, 64])
def test_a_short_film_shows_all_it_has_and_none_twice(count: int) -> None:
    frames = open_film(film(count, fps=1), 24)
    assert len(frames) == min(count, 32)
    places = [i * count // len(frames) for i in range(len(frames))]
    assert [frame.time for frame in frames] == [f"{i // 60:02d}:{i % 60:02d}" for i in places]
    assert len({frame.picture.key for frame in frames}) == len(frames)


@pytest.mark.parametrize("announced", [42, 64, 4000])
def test_packets_that_are_no_frames_are_not_counted(
    announced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same frames are shown as of a film whose packets are all frames."""
    data, seen = film(40), list[tuple[int, int]]()

    def use(image: Image.Image) -> dict[str, Any]:
        seen.append(image.size)
        return {"level": np.asarray(image).mean()}

    expected = film_child._sampled(data, use)
    length = film_child._Length(announced, Fraction(10))
    monkeypatch.setattr(film_child, "_length", lambda data: length)
    assert film_child._sampled(data, use) == expected
    assert set(seen) == {(96, 72)}


def test_times_are_cut_to_whole_seconds_and_go_beyond_an_hour() -> None:
    assert [frame.time for frame in open_film(film(4, fps=3), 24)] == ["00:00"] * 3 + ["00:01"]
    assert decoding._checked_time("61:05") == "61:05"


def matrix(data: bytes, *entries: int) -> bytes:
    """A film whose header says how it is to be turned, as cameras write it."""
    start = data.index(b"tkhd") + 4 + 40
    a, b, c, d = (entry << 16 for entry in entries)
    return data[:start] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[start + 36 :]


@pytest.mark.parametrize(
    ("entries", "corner"),
    [
        ((1, 0, 0, 1), (0, 0)),
        ((0, 1, -1, 0), (0, -1)),  # a quarter to the right: x becomes y, y becomes -x
        ((-1, 0, 0, -1), (-1, -1)),
        ((0, -1, 1, 0), (-1, 0)),
    ],
)
def test_films_stand_upright(entries: tuple[int, ...], corner: tuple[int, int]) -> None:
    """Where the stored frame's top left corner, which is white, is seen."""
    stored = grey(0)
    stored[:30, :40] = 255
    (frame,) = open_film(matrix(film([stored]), *entries), 24)
    shown = pixels(frame.picture)
    is_turned = entries[0] == 0
    assert (frame.picture.height > frame.picture.width) == is_turned
    white = {(y, x) for y in (0, -1) for x in (0, -1) if shown[y, x].min() > 200}
    assert white == {corner}


@pytest.mark.parametrize("kind", ["mp4", "mkv"])
def test_words_about_a_film_may_be_in_any_alphabet(kind: str) -> None:
    data = film(3, kind)
    assert b"Lavf" in data
    assert len(open_film(data.replace(b"Lavf", b"\xe4\xff\xfef"), 24)) == 3


def test_sound_is_left_out_and_alone_is_no_film() -> None:
    assert len(open_film(film(10, with_sound=True), 24)) == 10
    assert "It has no frames, only sound, and sound is not read here." in (refusal(sound_alone()))


def test_what_is_no_film() -> None:
    for data in (b"Hello, this is some text.", bytes(5000), encoded(grey(1)), b"RIFF1234AVI LIST"):
        assert "It is no MP4, MOV, WebM or MKV file: it begins with " in refusal(data)
    assert "It is empty: 0 bytes. Send the whole file." in refusal(b"")
    assert "at most 40 are taken. Cut it shorter" in refusal(bytes(MAX_BYTES + 1))


@pytest.mark.parametrize("part", [0.01, 0.05, 0.5, 0.7])
@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_cut_off(kind: str, part: float) -> None:
    data = film(40, kind)
    why = refusal(data[: max(24, int(part * len(data)))])
    assert "It is damaged or cut off: " in why and "Errno" not in why
    assert why.endswith(". Send the whole file, or save it anew.")


def test_damage_in_the_middle() -> None:
    data = bytearray(noise_film())
    start = data.index(b"mdat") + 2000
    data[start : start + 3000] = bytes(3000)
    assert "It is damaged or cut off: " in refusal(bytes(data))


def test_a_header_alone_and_boxes_of_nothing() -> None:
    data = film(40)
    assert "damaged or cut off" in refusal(data[:8] + bytes(2000))
    assert "damaged or cut off" in refusal(b"\x1a\x45\xdf\xa3" + bytes(2000))


def test_frames_that_are_too_large_are_refused_by_the_header(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = film([grey(0, 4112, 2304)], "mov")
    monkeypatch.setattr(decoding, "_FILM_LIMITS", Limits(5.0, 300))
    assert "Its frames are 4112x2304 pixels large, 9.5 million; at most 9.4 million" in (
        refusal(data)
    )


def test_frames_that_grow_on_the_way_are_refused() -> None:
    """Every frame of Motion JPEG has a size of its own."""
    small, large = film([grey(0)] * 2, "mov"), encoded(grey(0, 4160, 2304), "JPEG")
    begin = small.index(b"mdat") + 4
    grown = small[:begin] + large + small[begin + len(large) :]
    assert len(large) > 3000  # more than the whole film: its second frame is gone, too
    assert "damaged or cut off" in refusal(grown)


def test_a_film_of_a_million_frames_is_refused() -> None:
    data = bytearray(film(4))
    start = data.index(b"stsz") + 8  # each of one size, and how many
    data[start : start + 8] = struct.pack(">II", 1, 1_000_000)
    begin = data.index(b"stts") + 8
    data[begin : begin + 8] = struct.pack(">II", 1_000_000, 1)
    begin = time.monotonic()
    why = refusal(bytes(data))
    assert "It has 1000000 frames or more; at most 20000 are taken. " in why or "damaged" in why
    assert time.monotonic() - begin < 20


def test_many_frames_and_long_films_are_refused(tmp_path: Path) -> None:
    assert "at most 20000 are taken. Cut it shorter, or save it with fewer frames a second." in (
        refusal(film([grey(i % 2 * 255, 16, 16) for i in range(20_001)], "mkv", 30))
    )
    assert "It lasts 100 minutes; less than 100 are taken. Cut it shorter." in (
        refusal(film(10, "mkv", Fraction(1, 600)))
    )


def test_time_and_memory_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    data = film([grey(i, 1920, 1088) for i in range(60)])
    monkeypatch.setattr(decoding, "_FILM_LIMITS", Limits(0.1, 1280))
    why = refusal(data)
    assert "Decoding it was stopped: it ran for more than 0.1 s." in why
    assert why.endswith("Cut it shorter, or save it with fewer pixels.")
    monkeypatch.setattr(decoding, "_FILM_LIMITS", Limits(10.0, 40))
    assert "it needed more than 40 MiB of memory" in refusal(data)
    monkeypatch.undo()
    assert len(open_film(film(3), 24)) == 3


def test_nothing_of_a_film_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Liar:
        def __init__(self, frames: object, data: bytes) -> None:
            self.answer = {"type": "answer", "frames": frames, "data": data}

        def ask(self, *_: object, **__: object) -> object:
            return self.answer

    good = ["00:00", 24, 24]
    for frames, data in (
        ([], b""),
        ([good], bytes(3 * 24 * 24 - 1)),
        ([good], bytes(3 * 24 * 24 + 1)),
        ([["<image|>", 24, 24]], bytes(3 * 24 * 24)),
        ([good] * 33, bytes(33 * 3 * 24 * 24)),
        ([["00:00", 24 * 71, 24]], bytes(3 * 24 * 24 * 71)),
    ):
        liar = Liar(frames, data)
        monkeypatch.setattr(decoding, "_pool", lambda kind, liar=liar: liar)
        assert "Decoding it was stopped: it " in refusal(b"x")
    monkeypatch.undo()


# -- pages -----------------------------------------------------------------------------------------


def test_pages_are_pictures_in_order() -> None:
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    data = pdf(
        [(300, 400), (400, 300), (200, 200)],
        [filled(*(level // 255 for level in colour)) for colour in colours],
    )
    for number, colour in enumerate(colours):
        picture, num_pages = open_page(data, number, 16, RULES)
        assert num_pages == 3
        assert (pixels(picture) == colour).all()
    sizes = [open_page(data, n, 16, RULES).picture for n in range(3)]
    assert [(one.width, one.height) for one in sizes] == [(168, 216), (216, 168), (192, 192)]


def test_a_page_lies_on_white_and_the_right_way_up() -> None:
    data = pdf([(240, 240)], [filled(0, 0, 0, "0 120 120 120")])  # y grows upwards in a PDF
    shown = pixels(open_page(data, 0, 1, RULES).picture)
    assert shown[10, 10].tolist() == [0, 0, 0]
    assert [shown[y, x].tolist() for y, x in ((10, -10), (-10, 10), (-10, -10))] == [[255] * 3] * 3


def test_a_page_keeps_its_proportions_whatever_its_paper() -> None:
    small, large = (
        open_page(
            pdf([size], [filled(0, 0, 1, "0 0 1000000 1000000")]), 0, 1, PictureRules(48, 560)
        ).picture
        for size in ((6, 8), (600_000, 800_000))
    )
    assert (small.width, small.height, small.num_tokens) == (960, 1296, 540)
    assert (small.width, small.height) == (large.width, large.height)
    for one in (small, large):
        assert (pixels(one)[:-8, :-8] == (0, 0, 255)).all()


@pytest.mark.parametrize("budget", [70, 1120])
def test_a_page_may_have_any_budget(budget: int) -> None:
    picture = open_page(pdf([(612, 792)]), 0, 1, PictureRules(48, budget)).picture
    assert budget / 2 < picture.num_tokens <= budget
    with pytest.raises(RequestError, match="cannot take 71 tokens"):
        open_page(pdf(), 0, 1, PictureRules(48, 71))


def test_what_is_no_page() -> None:
    assert "It is no PDF: it begins with 'hello'. Save it as one." in page_refusal(b"hello")
    assert "It is no PDF: it begins with " in page_refusal(film(2))
    assert "It is empty: 0 bytes." in page_refusal(b"")
    assert "It is damaged or cut off: its end is missing." in page_refusal(pdf()[:-20])
    assert "It is damaged or cut off: its end is missing." in (
        page_refusal(pdf([(300, 400)] * 40, [b"0 0 m " * 500] * 40)[:20_000])
    )
    assert "It is damaged or cut off: " in page_refusal(b"%PDF-1.7\nnothing\n%%EOF")
    assert "It is encrypted and opens with a password alone. Save it without one." in (
        page_refusal(pdf(trailer=ENCRYPTED))
    )
    assert "It is damaged or cut off: " in page_refusal(pdf([]))  # and not encrypted


def test_too_many_pages() -> None:
    begin = time.monotonic()
    assert "It has 10000 pages; at most 16 are taken here. Send the pages that matter" in (
        page_refusal(pdf([(300, 400)] * 10_000))
    )
    assert "It has 3 pages; at most 2" in page_refusal(pdf([(300, 400)] * 3), max_pages=2)
    assert time.monotonic() - begin < 10


def test_a_count_of_pages_that_is_a_lie() -> None:
    data = pdf([(300, 400)]).replace(b"/Count 1 ", b"/Count 9 ")
    assert open_page(data, 0, 16, RULES).num_pages <= 9
    with pytest.raises(RequestError, match="A PDF cannot be taken. It is damaged or cut off: page"):
        open_page(data, 5, 16, RULES)


def test_pages_of_a_million_points() -> None:
    assert open_page(pdf([(1e6, 1e6)]), 0, 1, RULES).picture.num_tokens == 64
    assert "Page 1 is 1e+06 x 1 points large: too long for its other side." in (
        page_refusal(pdf([(1e6, 1)]))
    )


def test_time_and_memory_of_a_page_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = pdf(contents=[b"q 1 0 0 1 1 1 cm 0 0 9 9 re f Q\n" * 200_000])
    monkeypatch.setattr(decoding, "_LIMITS", Limits(0.3, 1280))
    why = page_refusal(endless)
    assert "Decoding it was stopped: it ran for more than 0.3 s." in why
    assert why.endswith("Send fewer pages, or the pages as pictures.")
    monkeypatch.setattr(decoding, "_LIMITS", Limits(10.0, 4))
    assert "it needed more than 4 MiB of memory" in page_refusal(endless)
    monkeypatch.undo()
    assert open_page(pdf(), 0, 1, RULES).num_pages == 1


def test_a_picture_inside_a_page_may_be_a_bomb() -> None:
    """40,000 x 40,000 black pixels, which it says it has and does not have."""
    bomb = b"q 100 0 0 100 0 0 cm BI /W 40000 /H 40000 /CS /RGB /BPC 8 /F /AHx ID " + b"00>\nEI Q\n"
    begin = time.monotonic()
    try:
        open_page(pdf(contents=[bomb]), 0, 1, RULES)
    except RequestError as error:
        assert "A PDF cannot be taken. " in str(error)
    assert time.monotonic() - begin < 20
    assert open_page(pdf(), 0, 1, RULES).num_pages == 1


# -- what people send ------------------------------------------------------------------------------


def test_bytes_paths_and_data_urls_are_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    text = b64encode(b"abc").decode()
    for value in (b"abc", bytearray(b"abc"), path, "data:video/mp4;base64," + text):
        assert file_bytes(value, FILM) == b"abc"
    assert file_bytes(f"data:application/pdf;base64,{text}", PDF) == b"abc"
    recorded = f"data:video/webm;codecs=vp9;base64,{text}"  # as browsers write it
    assert read_data_url(recorded, FILM) == b"abc"
    for value, kind, why in (
        ("data:image/png;base64,AAAA", FILM, "must be 'data:video/mp4;base64,' and .* WebM or MKV"),
        ("data:video/mp4;base64,AAAA", PDF, "must be 'data:application/pdf;base64,'"),
        ("/etc/passwd", PDF, "A PDF's URL is '/etc/passwd'; it must be"),
        (5, FILM, "A film is 5; it must be the bytes of a file, a pathlib.Path, a data: URL."),
        (tmp_path / "none", PDF, "cannot be read: No such file or directory. Check the PDF's path"),
        (tmp_path, FILM, "Is a directory. Check the film's path"),
    ):
        with pytest.raises(RequestError, match=why):
            file_bytes(value, kind)


@pytest.mark.parametrize("kind", [FILM, PDF])
def test_what_is_not_installed_is_named(kind: kinds.Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds.importlib.util, "find_spec", lambda name: None)
    extra = re.escape(f"flashdraft[{kind.extra}]")
    with pytest.raises(RequestError, match=f"{kind.library} is not installed. Install '{extra}'"):
        if kind is FILM:
            open_film(b"x", 24)
        else:
            open_page(b"x", 0, 1, RULES)
    assert open_picture(encoded(grey(1)), RULES).num_tokens > 0  # needs neither


def test_the_parsers_are_loaded_in_their_own_processes_alone(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from flashdraft.media import decoding, kinds\n"
        "from flashdraft.media.pictures import PictureRules, open_film, open_page, open_picture\n"
        "rules = PictureRules(48, 70)\n"
        "film, pdf, picture = (pathlib.Path(name).read_bytes() for name in sys.argv[1:])\n"
        "open_film(film, 48), open_page(pdf, 0, 1, rules), open_picture(picture, rules)\n"
        "print({'av', 'pypdfium2', 'PIL', 'numpy', 'torch'} & set(sys.modules))\n"
        "for kind in (kinds.FILM, kinds.PDF, kinds.PICTURE):\n"
        "    (one,) = decoding._pool(kind)._all\n"
        "    maps = open(f'/proc/{one._child.pid}/maps').read()\n"
        "    print('avcodec' in maps, 'pdfium' in maps)\n"
    )
    files = [tmp_path / name for name in ("film", "pdf", "picture")]
    for path, data in zip(files, (film(2), pdf(), encoded(grey(1))), strict=True):
        path.write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, files)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    assert done.stdout.split("\n")[:4] == ["set()", "True False", "False True", "False False"]
