"""Films and PDFs in conversations: every form, their places in prompts, every refusal."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.video_utils import VideoMetadata

from flashdraft.chat import sight as sights
from flashdraft.chat.messages import check_messages
from flashdraft.chat.pictures import (
    PicturePrompt,
    WrittenFrame,
    place_pictures,
    take_pictures,
    with_pages,
    write_films,
)
from flashdraft.chat.sight import Sight
from flashdraft.chat.templates import encode_chat, encode_with_pictures, render_chat
from flashdraft.core import Picture
from flashdraft.errors import RequestError
from flashdraft.media.pictures import Frame, PictureRules, open_picture
from flashdraft.models.config.vision import VisionTokens
from flashdraft.models.tokenizer import Tokenizer
from tests.unit.chat.picture_factory import (
    CELL,
    NO_TOOLS,
    TEXT_ONLY,
    open_by_name,
    picture_tokenizer,
    vision_config,
    vision_tokens,
)
from tests.unit.media.files import encoded, noise
from tests.unit.media.film_files import filled, film, pdf

TOKENS = VisionTokens(begin=101, picture=102, end=103, video=104)
FILM_URL = "data:video/mp4;base64," + base64.b64encode(b"film").decode()
PDF_TEXT = base64.b64encode(b"document").decode()
PDF_URL = "data:application/pdf;base64," + PDF_TEXT
WITH_FILMS = NO_TOOLS.replace(
    "{% endif %}{% endfor %}{% endif %}<turn|>",
    "{% elif p.type == 'video' %}<|video|>{% endif %}{% endfor %}{% endif %}<turn|>",
)


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def opened(num_tokens: int) -> Picture:
    return Picture(b"", 1, 1, num_tokens, bytes([num_tokens]))


def checked(part: dict[str, Any], **options: Any) -> dict[str, Any]:
    ((message),) = check_messages([user(part)], **options)
    (found,) = message["content"]
    assert isinstance(found, dict)
    return found


# -- what may be given -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video", "video": FILM_URL},
        {"type": "video_url", "video_url": {"url": FILM_URL}},
        {"type": "video_url", "video_url": FILM_URL},
        {"type": "input_video", "video_url": FILM_URL},
    ],
)
def test_every_form_of_a_film_becomes_one(part: dict[str, Any]) -> None:
    assert checked(part) == {"type": "video", "video": FILM_URL}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "pdf", "pdf": PDF_URL},
        {"type": "file", "file": {"file_data": PDF_URL, "filename": "a.pdf"}},
        {"type": "input_file", "file_data": PDF_URL, "filename": "a.pdf"},
        {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": PDF_TEXT},
        },
    ],
)
def test_every_form_of_a_pdf_becomes_one(part: dict[str, Any]) -> None:
    assert checked(part) == {"type": "pdf", "pdf": PDF_URL}
    assert checked({**part, "max_soft_tokens": 1120})["max_soft_tokens"] == 1120


def test_who_calls_from_python_may_name_files() -> None:
    for kind in ("video", "pdf"):
        for name in ("a file", Path("a file")):
            part = checked({"type": kind, kind: name}, may_name_files=True)
            assert part == {"type": kind, kind: Path("a file")}
        with pytest.raises(RequestError, match="has 'a file' for a (film|PDF); give a data: URL"):
            checked({"type": kind, kind: "a file"})
        assert checked({"type": kind, kind: bytearray(b"x")})[kind] == b"x"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "video"}, "has None for a film; give a data: URL, such as data:video/mp4;base64"),
        ({"type": "video", "video": b""}, "is a film of no bytes"),
        ({"type": "video_url", "video_url": {"url": "https://a.example/a"}}, "nothing is fetched"),
        (
            {"type": "video", "video": FILM_URL, "max_soft_tokens": 280},
            "always the same: leave out",
        ),
        ({"type": "video", "video": FILM_URL, "detail": "high"}, "always the same: leave out"),
        (
            {"type": "pdf", "pdf": ""},
            "has '' for a PDF; give a data: URL, such as data:application",
        ),
        (
            {"type": "pdf", "pdf": PDF_URL, "max_soft_tokens": 3},
            r"max_soft_tokens is 3; it must be",
        ),
        (
            {"type": "file", "file": {"file_id": "f"}},
            "does not hold its file; send the file itself",
        ),
        ({"type": "file"}, "has None for a PDF"),
        ({"type": "input_file", "file_url": "https://x"}, "does not hold its file"),
        ({"type": "document", "source": {"type": "text", "data": "x"}}, "does not hold its file"),
        ({"type": "document", "source": {"type": "url", "url": "x"}}, "does not hold its file"),
    ],
)
def test_what_is_no_film_and_no_pdf_is_refused(part: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        checked(part)


@pytest.mark.parametrize("part", [{"type": "video", "video": b"x"}, {"type": "pdf", "pdf": b"x"}])
def test_they_stand_where_pictures_do(part: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="in a message of the role 'assistant'; (film|PDF)s may"):
        check_messages([{"role": "assistant", "content": [part]}])
    check_messages([{"role": "tool", "content": [part]}])


# -- their places ----------------------------------------------------------------------------------


def test_a_film_is_its_frames_behind_their_times() -> None:
    film = [WrittenFrame([7, 8], opened(2)), WrittenFrame([9], opened(1))]
    ids, placed = place_pictures([1, 104, 102, 2], [opened(3)], TOKENS, [film])
    assert ids == [1, 7, 8, 101, 104, 104, 103, 9, 101, 104, 103, 101, 102, 102, 102, 103, 2]
    assert [(one.start, one.end) for one in placed] == [(4, 6), (9, 10), (12, 15)]


def test_a_model_without_a_mark_for_films_takes_none() -> None:
    tokens = VisionTokens(101, 102, 103)
    with pytest.raises(RequestError, match="takes no films: its config.json names no placeholder"):
        place_pictures([104], [], tokens, [[]])
    assert place_pictures([104], [], tokens) == PicturePrompt([104], ())


@pytest.mark.parametrize(
    ("ids", "count", "words"),
    [
        (
            [1, 104],
            0,
            "1 places for 0 films: a text in the conversation holds the model's own mark",
        ),
        ([1], 1, "0 places for 1 films: the model's chat template leaves films out where they"),
    ],
)
def test_places_and_films_are_as_many(ids: list[int], count: int, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        place_pictures(ids, [], TOKENS, [[WrittenFrame([1], opened(1))]] * count)


def test_pages_stand_where_their_pdf_stood() -> None:
    said = check_messages(
        [user({"type": "image", "image": b"a"}, {"type": "pdf", "pdf": b"2"}, text("b"))]
        + [{"role": "assistant", "content": "c"}, user({"type": "pdf", "pdf": b"1"})]
    )
    made = with_pages(said, lambda given: [opened(n) for n in range(1, int(given.image) + 1)])
    assert [part["type"] for part in made[0]["content"]] == ["image", "image", "image", "text"]
    assert [part.get("image") for part in made[0]["content"][:3]] == [b"a", opened(1), opened(2)]
    assert made[1] == said[1] and len(made[2]["content"]) == 1
    assert take_pictures(made).messages[2]["content"] == [{"type": "image"}]


# -- with templates --------------------------------------------------------------------------------


class Prompter:
    """A tokenizer with a template, and a model that sees."""

    def __init__(self, template: str = WITH_FILMS) -> None:
        self.tokenizer = picture_tokenizer(template)
        self.tokens = vision_tokens(self.tokenizer)
        self.sight = Sight(vision_config(self.tokens), open_by_name)

    def prompt(self, *parts: Any, **options: Any) -> PicturePrompt:
        return encode_with_pictures(self.tokenizer, [user(*parts)], self.sight, **options)


def shown(tokenizer: Tokenizer, tokens: VisionTokens, prompt: PicturePrompt) -> str:
    """The prompt in words, every picture and frame as its size in tokens."""
    ids = prompt.token_ids
    for one in reversed(prompt.pictures):
        assert len(set(ids[one.start : one.end])) == 1
        assert (ids[one.start - 1], ids[one.end]) == (tokens.begin, tokens.end)
        name = tokenizer.encode(f"({one.picture.num_tokens})")
        ids = ids[: one.start - 1] + name + ids[one.end + 1 :]
    return tokenizer.decode(ids, skip_special=False)


def test_films_and_pdfs_of_a_conversation_are_opened_and_placed() -> None:
    one = Prompter()
    prompt = one.prompt(
        {"type": "video", "video": film(3, fps=1)},
        text("and"),
        {"type": "image", "image": b"640x480"},
        {"type": "pdf", "pdf": pdf([(300, 400), (400, 300)])},
    )
    said = shown(one.tokenizer, one.tokens, prompt)
    assert said == "<|turn>user\n00:00 (63) 00:01 (63) 00:02 (63)and(266)(540)(540)<turn|>\n"
    kinds = [prompt.token_ids[placed.start] for placed in prompt.pictures]
    assert kinds == [one.tokens.video] * 3 + [one.tokens.picture] * 3


def test_a_pdf_takes_the_tokens_it_is_told_to() -> None:
    one = Prompter()
    part = {"type": "pdf", "pdf": pdf([(300, 400)])}
    for given, count in (({}, 540), ({"max_soft_tokens": 70}, 63), ({"detail": "low"}, 63)):
        (placed,) = one.prompt({**part, **given}).pictures
        assert placed.picture.num_tokens == count


def test_a_template_that_drops_films_is_noticed() -> None:
    with pytest.raises(
        RequestError, match="0 places for 1 films: the model's chat template leaves"
    ):
        Prompter(NO_TOOLS).prompt({"type": "video", "video": film(1)})
    with pytest.raises(RequestError, match="without pictures"):
        Prompter(TEXT_ONLY).prompt({"type": "video", "video": film(1)})


def test_a_text_that_names_the_mark_of_a_film_is_noticed() -> None:
    with pytest.raises(RequestError, match="1 places for 0 films"):
        Prompter().prompt(text("<|video|>"))


def test_who_cannot_see_refuses_all_of_them() -> None:
    tokenizer = picture_tokenizer(WITH_FILMS)
    for part in ({"type": "video", "video": b"x"}, {"type": "pdf", "pdf": b"x"}):
        with pytest.raises(RequestError, match="The model sees no pictures"):
            encode_with_pictures(tokenizer, [user(part)], None)
        with pytest.raises(RequestError, match="Only text is taken here"):
            render_chat(tokenizer, [user(part)])
    with pytest.raises(RequestError, match="A PDF is not opened here; send its pages"):
        encode_chat(tokenizer, [user({"type": "pdf", "pdf": b"x"})])


def test_a_model_without_films_says_so_before_it_opens_one() -> None:
    one = Prompter()
    without = VisionTokens(one.tokens.begin, one.tokens.picture, one.tokens.end)
    one.sight = Sight(vision_config(without), open_by_name)
    with pytest.raises(RequestError, match="takes no films"):
        one.prompt({"type": "video", "video": b"broken"})


def test_which_one_is_wrong_is_said() -> None:
    with pytest.raises(RequestError, match="^Film 2 of 2: A film cannot be taken. It is no MP4"):
        Prompter().prompt(
            {"type": "video", "video": film(1)}, {"type": "video", "video": b"broken"}
        )
    with pytest.raises(RequestError, match="A PDF cannot be taken. It is no PDF"):
        Prompter().prompt({"type": "pdf", "pdf": b"broken"})


def test_a_conversations_films_and_pdfs_are_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, calls = Prompter(), list[str]()
    for name in ("open_film", "open_page"):
        original = getattr(sights, name)

        def counted(*given: Any, name: str = name, original: Any = original) -> Any:
            calls.append(name)
            return original(*given)

        monkeypatch.setattr(sights, name, counted)
    parts = [{"type": "video", "video": film(2)}, {"type": "pdf", "pdf": pdf([(9, 9)] * 2)}]
    first = one.prompt(*parts)
    assert one.prompt(*parts) == first
    assert calls == ["open_page", "open_page", "open_film"]
    one.prompt({**parts[1], "max_soft_tokens": 70})
    assert calls[3:] == ["open_page", "open_page"]


def test_what_is_kept_is_no_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sights, "MAX_KEPT_BYTES", 1)
    one = Prompter()
    for red in (0, 1):
        one.prompt({"type": "pdf", "pdf": pdf(contents=[filled(red, 0, 0)])})
    one.prompt({"type": "video", "video": film(1)})
    assert len(one.sight._kept) == 1
    one.sight.close()


# -- beside transformers ---------------------------------------------------------------------------

FRAMES = [Frame(time, opened(3)) for time in ("00:00", "00:07", "12:34", "99:59")]
SURROUNDINGS = ["{}", "a{}b", " {} ", "\n\n{}\n\n", "7{}7", "00:{}:00", "x {}", "<|turn>{}<turn|>"]


@pytest.mark.parametrize("around", SURROUNDINGS)
def test_ids_are_those_of_transformers_processor(around: str) -> None:
    """It puts a text in place of the mark before it encodes; here ids take its place after."""
    tokenizer = picture_tokenizer(WITH_FILMS)
    tokens = vision_tokens(tokenizer)
    metadata = VideoMetadata(
        total_num_frames=6000, fps=1, frames_indices=[0, 7, 12 * 60 + 34, 99 * 60 + 59]
    )
    marks = SimpleNamespace(boi_token="<|image>", eoi_token="<image|>", video_token="<|video|>")
    inputs = {"num_soft_tokens_per_video": [3], "video_metadata": [metadata]}
    replaced = Gemma4Processor.replace_video_token(marks, inputs, 0)
    expected = tokenizer.encode(around.format(replaced))
    (written,) = write_films([FRAMES], tokenizer.encode_batch)
    found = place_pictures(tokenizer.encode(around.format("<|video|>")), [], tokens, [written])
    assert found.token_ids == expected


def test_a_real_film_is_as_large_as_a_picture_of_70_tokens() -> None:
    one = Prompter()
    (placed,) = one.prompt({"type": "video", "video": film([noise(96, 72)])}).pictures
    still = open_picture(encoded(noise(96, 72)), PictureRules(CELL, 70))
    assert (placed.picture.width, placed.picture.height) == (still.width, still.height)
