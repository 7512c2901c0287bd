"""What runs in a killable process of films alone: a file's bytes become some of its frames.

python -m flashdraft.media.film_child DESCRIPTOR; decoding.py starts it. No other process of ours
loads PyAV. Frames are taken evenly from all of a film, as the models were trained, and then are
pictures like others. Sound is left out. What a film says of its length and its size is checked
before anything is decoded.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple

import av
import av.logging
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from flashdraft.errors import quoted, shortened
from flashdraft.killable.child import RefusalError, serve
from flashdraft.killable.frames import DATA, Message
from flashdraft.media.child import fitted, warm_up
from flashdraft.media.kinds import film_format
from flashdraft.media.limits import (
    FILM_FORMATS,
    MAX_FILM_FRAMES,
    MAX_FILM_S,
    MAX_FRAME_PIXELS,
    NUM_FRAMES,
    USUAL_FPS,
)

_CODECS = {"h264", "hevc", "av1", "libdav1d", "vp8", "vp9", "mpeg4", "mjpeg", "prores"}
_CODEC_NAMES = "H.264, H.265, AV1, VP8, VP9, MPEG-4, Motion JPEG and ProRes"
_SHOWN_BYTES = 24
_MAX_MISSING_S = 0.5  # a film's head may be so much wrong about its length
_UPRIGHT = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    270: Image.Transpose.ROTATE_270,
}


class _Length(NamedTuple):
    num_frames: int
    fps: Fraction


def answer(message: Message) -> Message:
    """One message's answer; RefusalError, of the kind "film", where there is none."""
    if message["type"] == "load":
        warm_up()
        return {}
    found = _sampled(message[DATA], lambda image: fitted(image, message["budget"], message["cell"]))
    sizes = [(time, shown["width"], shown["height"]) for time, shown in found]
    return {"frames": sizes, DATA: b"".join(shown[DATA] for _, shown in found)}


def _sampled(data: bytes, use: Callable[[Image.Image], Message]) -> list[tuple[str, Message]]:
    """Times, and what becomes of the frames there."""
    try:
        length = _length(data)
        for _ in range(2):
            wanted = _places(length.num_frames)
            found, num_decoded = _frames(data, wanted, use)
            if len(found) == len(wanted):
                return [(_time(i / length.fps), one) for i, one in zip(wanted, found, strict=True)]
            # some of its packets are no frames: now their number is known
            length = length._replace(num_frames=num_decoded)
            if num_decoded == 0:
                break
    except (MemoryError, RefusalError):
        raise
    except Exception as error:  # a damaged file raises anything
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise _damaged(shortened(said).rstrip(".")) from None
    raise _damaged("no frame of it can be decoded")


def _places(num_frames: int) -> list[int]:
    """The frames that are shown; of a film that has few, all."""
    count = min(NUM_FRAMES, num_frames)
    return [i * num_frames // count for i in range(count)]


def _time(seconds: Fraction) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes:02d}:{rest:02d}"


def _length(data: bytes) -> _Length:
    """How long a film is. Its packets are counted: many do not say it, and some say it wrong."""
    with _opened(data) as container:
        stream = _stream(container)
        fps = Fraction(stream.average_rate or USUAL_FPS)
        if fps <= 0:
            fps = Fraction(USUAL_FPS)
        _check_length(stream.frames, fps)
        count, end = 0, Fraction(0)
        for packet in container.demux():
            if packet.size == 0:
                continue
            if packet.pts is not None and packet.time_base:
                end = max(end, (packet.pts + (packet.duration or 0)) * packet.time_base)
            if packet.stream.index == stream.index and not packet.is_discard:
                count += 1
                if count > MAX_FILM_FRAMES:
                    _check_length(count, fps)
        announced = Fraction((container.duration or 0) + (container.start_time or 0), av.time_base)
        if announced - end > _MAX_MISSING_S:
            raise _damaged(f"it should last {float(announced):.1f} s and ends at {float(end):.1f}")
        if count == 0:
            raise _damaged("it has no frame")
    _check_length(count, fps)
    return _Length(count, fps)


def _check_length(num_frames: int, fps: Fraction) -> None:
    if num_frames > MAX_FILM_FRAMES:
        raise RefusalError(
            "film",
            f"It has {num_frames} frames or more; at most {MAX_FILM_FRAMES} are taken. Cut it "
            "shorter, or save it with fewer frames a second.",
        )
    if num_frames / fps >= MAX_FILM_S:
        raise RefusalError(
            "film",
            f"It lasts {float(num_frames / fps / 60):.0f} minutes; less than {MAX_FILM_S // 60} "
            "are taken. Cut it shorter.",
        )


def _frames(
    data: bytes, wanted: list[int], use: Callable[[Image.Image], Message]
) -> tuple[list[Message], int]:
    """What becomes of the wanted frames that are there, and how many frames were decoded."""
    found, count = list[Message](), 0
    with _opened(data) as container:
        stream = _stream(container)
        context = stream.codec_context
        context.thread_count = 1  # its memory and its time are what the limits count
        context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}  # the size may change on the way
        for frame in container.decode(stream):
            if frame.is_corrupt:
                raise _damaged(f"frame {count + 1} is")
            if count == wanted[len(found)]:
                found.append(use(_upright(frame)))
            count += 1
            if len(found) == len(wanted):
                break
    return found, count


def _upright(frame: VideoFrame) -> Image.Image:
    _check_size(frame.width, frame.height)
    image = Image.fromarray(frame.to_ndarray(format="rgb24"))
    turn = _UPRIGHT.get(round(frame.rotation) % 360)
    return image if turn is None else image.transpose(turn)


@contextmanager
def _opened(data: bytes) -> Iterator[InputContainer]:
    file, kind = io.BytesIO(data), _format(data)
    with av.open(
        file,
        "r",
        format=kind,
        io_open=_nothing_else,
        metadata_errors="replace",  # words about a film in an old alphabet are no damage
    ) as container:
        yield container


def _nothing_else(url: str, flags: int, options: dict[str, Any]) -> Any:
    raise RefusalError("film", "It needs another file. Save all of it in one file.")


def _format(data: bytes) -> str:
    """By the content; a reader of another format is never tried."""
    if (found := film_format(data)) is not None:
        return found
    begin = quoted(data[:_SHOWN_BYTES].decode("latin-1"))
    raise RefusalError(
        "film", f"It is no {FILM_FORMATS} file: it begins with {begin}. Convert it to one of them."
    )


def _stream(container: InputContainer) -> VideoStream:
    """The film's pictures, their size checked."""
    for stream in container.streams.video:
        if stream.disposition & av.stream.Disposition.attached_pic:
            continue  # a cover
        if stream.codec_context is None:
            raise _damaged("it does not say how its frames are coded")
        if (name := stream.codec_context.name) not in _CODECS:
            raise RefusalError(
                "film",
                f"Its frames are coded as {quoted(name)}; {_CODEC_NAMES} are read. Convert it.",
            )
        _check_size(stream.codec_context.width, stream.codec_context.height)
        return stream
    if container.streams.audio:
        raise RefusalError("film", "It has no frames, only sound, and sound is not read here.")
    raise _damaged("it has no frames")


def _check_size(width: int, height: int) -> None:
    if min(width, height) < 1:
        raise _damaged(f"its frames are {width}x{height} pixels large")
    if width * height > MAX_FRAME_PIXELS:
        raise RefusalError(
            "film",
            f"Its frames are {width}x{height} pixels large, {width * height / 1e6:.1f} million; at "
            f"most {MAX_FRAME_PIXELS / 1e6:.1f} million are taken. Make them smaller.",
        )


def _damaged(what: str) -> RefusalError:
    return RefusalError(
        "film", f"It is damaged or cut off: {what}. Send the whole file, or save it anew."
    )


def main() -> int:
    """The process."""
    av.logging.set_level(None)  # nobody reads it
    serve(int(sys.argv[1]), answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
