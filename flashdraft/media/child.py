"""What runs in a killable process: a file's bytes become the pixels that a vision tower takes.

python -m flashdraft.media.child DESCRIPTOR; decoding.py starts it. It imports no torch. The content
says what a file is. Colour profiles are ignored: numbers are taken as they are stored, as models
were trained. Of 16 bits the high byte counts; of several frames the first.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Iterator

import numpy as np
from PIL import (
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    WebPImagePlugin,
)

from flashdraft.errors import quoted, shortened
from flashdraft.killable.child import RefusalError, serve
from flashdraft.killable.frames import DATA, Message
from flashdraft.media.limits import FORMATS, MAX_PIXELS, MAX_SIDE
from flashdraft.media.resampling import Bytes, Resampler
from flashdraft.media.sizes import cells_of

# Named, they are all that is loaded; Pillow would look through its forty others for a stranger.
_PLUGINS = (GifImagePlugin, JpegImagePlugin, MpoImagePlugin, PngImagePlugin, WebPImagePlugin)
_ORIENTATION = 0x0112  # in EXIF
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_STRIP_PIXELS = 1 << 18  # handled at once, so that little is in memory twice
_SHOWN_BYTES = 24


def answer(message: Message) -> Message:
    """One message's answer; RefusalError, of the kind "picture", where there is none."""
    if message["type"] == "load":
        warm_up()
        return {}
    return fitted(_decoded(message[DATA]), message["budget"], message["cell"])


def warm_up() -> None:
    """Have the memory of the resampler's library counted before the first picture's."""
    Resampler(64, 48).across(np.zeros((64, 64, 3), np.uint8))


def fitted(image: Image.Image, budget: int, cell: int) -> Message:
    """An answer: the picture as large as so many cells make it."""
    cells = cells_of(image.width, image.height, budget, cell)
    width, height = (count * cell for count in (cells.columns, cells.rows))
    return {"width": width, "height": height, DATA: _resized(image, width, height).tobytes()}


def _decoded(data: bytes) -> Image.Image:
    """A file's first frame, upright, in its own mode."""
    kind = _kind(data)
    if kind == "WEBP":  # its decoder makes room for all pixels before it says how many they are
        _check_size(*_webp_size(data))
    try:
        image = Image.open(io.BytesIO(data), formats=(kind,))
        _check_size(*image.size)
        image.load()
    except (MemoryError, RefusalError):
        raise
    except Exception as error:  # a damaged file raises anything
        raise RefusalError("picture", _damaged(kind, error)) from None
    try:
        turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:  # the pixels are whole; what lies beside them is not
        turn = None
    return image if turn is None else image.transpose(turn)


def _kind(data: bytes) -> str:
    """Pillow's name of a format."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    begin = quoted(data[:_SHOWN_BYTES].decode("latin-1"))
    raise RefusalError(
        "picture", f"It is no {FORMATS} file: it begins with {begin}. Convert it to one of them."
    )


def _webp_size(data: bytes) -> tuple[int, int]:
    def number(start: int, count: int) -> int:
        return int.from_bytes(data[start : start + count], "little")

    if data[12:16] == b"VP8X":
        return number(24, 3) + 1, number(27, 3) + 1
    if data[12:16] == b"VP8L":
        return (number(21, 4) & 0x3FFF) + 1, (number(21, 4) >> 14 & 0x3FFF) + 1
    return number(26, 2) & 0x3FFF, number(28, 2) & 0x3FFF


def _check_size(width: int, height: int) -> None:
    if min(width, height) < 1:
        raise RefusalError(
            "picture", f"It is {width}x{height} pixels large: it has none. Save it anew."
        )
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise RefusalError(
            "picture",
            f"It is {width}x{height} pixels large, {width * height / 1e6:.1f} million; at most "
            f"{MAX_PIXELS // 1_000_000} million are taken, and {MAX_SIDE} a side. Make it smaller.",
        )


def _damaged(kind: str, error: Exception) -> str:
    what = shortened(str(error) or type(error).__name__).rstrip(".")
    if "BytesIO object at" in what:  # an address says nothing to people
        what = "its header cannot be read"
    return f"Its {kind} data are damaged or cut off: {what}. Send the whole file, or save it anew."


def _resized(image: Image.Image, width: int, height: int) -> Bytes:
    """[height, width, 3]."""
    if image.size == (width, height):
        return np.concatenate(list(_strips(image)))
    across, down = Resampler(image.width, width), Resampler(image.height, height)
    narrowed = np.empty((image.height, width, 3), np.uint8)
    top = 0
    for strip in _strips(image):
        narrowed[top : top + len(strip)] = across.across(strip)
        top += len(strip)
    return down.down(narrowed)


def _strips(image: Image.Image) -> Iterator[Bytes]:
    """The picture's opaque pixels, some rows at a time, [rows, width, 3]."""
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        yield _opaque(image.crop((0, top, image.width, min(top + rows, image.height))))


def _opaque(strip: Image.Image) -> Bytes:
    """What is transparent lies on white."""
    if strip.mode.startswith("I"):  # grey in 16 bits, which Pillow would cut off at 255
        grey = np.asarray(strip).astype(np.uint16)
        light = (grey >> 8).astype(np.uint8)
        light[grey == strip.info.get("transparency", -1)] = 255
        return np.repeat(light[:, :, None], 3, axis=2)
    if strip.has_transparency_data:
        white = Image.new("RGBA", strip.size, "white")
        strip = Image.alpha_composite(white, strip.convert("RGBA"))
    return np.asarray(strip if strip.mode == "RGB" else strip.convert("RGB"))


def main() -> int:
    """The process."""
    Image.MAX_IMAGE_PIXELS = None  # there is a limit of our own
    warnings.simplefilter("ignore")  # nobody reads them
    serve(int(sys.argv[1]), answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
