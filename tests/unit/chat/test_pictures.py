"""Pictures in conversations: where they may stand, their places in prompts, every refusal."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashdraft.chat.messages import check_messages
from flashdraft.chat.pictures import GivenPicture, PicturePrompt, place_pictures, take_pictures
from flashdraft.chat.sight import Sight
from flashdraft.chat.templates import encode_chat, encode_with_pictures, render_chat
from flashdraft.core import Picture
from flashdraft.errors import RequestError
from flashdraft.media.pictures import PictureRules
from flashdraft.models.config.vision import VisionTokens
from tests.unit.chat.chat_factory import TOOLS
from tests.unit.chat.picture_factory import (
    BEHIND_RESULTS,
    CELL,
    DROPS_IN_RESULTS,
    NO_TOOLS,
    TEXT_ONLY,
    open_by_name,
    picture_tokenizer,
    stored_template,
    vision_config,
    vision_tokens,
)

WIDE, TALL, SQUARE = b"640x480", b"300x400", b"224x224"
URL = "data:image/png;base64," + base64.b64encode(WIDE).decode()
TOKENS = VisionTokens(begin=101, picture=102, end=103, video=104)
STORED = stored_template()
needs_stored = pytest.mark.skipif(STORED is None, reason="Gemma 4's template is not here")


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def picture(image: Any = WIDE, **more: Any) -> dict[str, Any]:
    return {"type": "image", "image": image, **more}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def opened(num_tokens: int) -> Picture:
    return Picture(b"", 1, 1, num_tokens, bytes([num_tokens]))


def checked_part(part: Any, **options: Any) -> dict[str, Any]:
    ((message),) = check_messages([user(part)], **options)
    (found,) = message["content"]
    assert isinstance(found, dict)
    return found


# -- what may be given, and by whom ----------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": URL},
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
    ],
)
def test_every_form_of_a_picture_becomes_one(part: dict[str, Any]) -> None:
    assert checked_part(part) == picture(URL)


@pytest.mark.parametrize(
    ("part", "budget"),
    [
        (picture(max_soft_tokens=1120), 1120),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, 70),
        ({"type": "input_image", "image_url": URL, "detail": "high"}, 560),
        ({"type": "input_image", "image_url": URL, "detail": "auto", "max_soft_tokens": 140}, 140),
        ({"type": "input_image", "image_url": URL, "detail": "low", "max_soft_tokens": 70}, 70),
    ],
)
def test_how_many_tokens_a_picture_may_take(part: dict[str, Any], budget: int) -> None:
    assert checked_part(part)["max_soft_tokens"] == budget


def test_who_calls_from_python_may_name_files() -> None:
    for name in ("cat.png", Path("cat.png")):
        assert checked_part(picture(name), may_name_files=True)["image"] == Path("cat.png")
    for kept in (bytearray(WIDE), memoryview(WIDE)):
        assert checked_part(picture(kept)) == picture(WIDE)


def test_an_image_of_pillows_is_taken_and_pillow_is_not_loaded_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Image:
        pass

    one = Image()
    monkeypatch.setitem(sys.modules, "PIL.Image", SimpleNamespace(Image=Image))
    assert checked_part(picture(one), may_name_files=True)["image"] is one
    with pytest.raises(RequestError, match="for a picture; give a data: URL"):
        checked_part(picture(one))
    monkeypatch.delitem(sys.modules, "PIL.Image")
    with pytest.raises(RequestError, match="give bytes, a path, a PIL image, or a data: URL"):
        checked_part(picture(one), may_name_files=True)
    assert "PIL.Image" not in sys.modules


FORMS = r"give a data: URL, such as data:image/png;base64,…\."


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (picture("cat.png"), rf"content\[0\] has 'cat.png' for a picture; {FORMS}"),
        (picture(Path("cat.png")), "for a picture; give a data: URL"),
        (picture("https://a.example/c.png"), "is at 'https://a.example/c.png', and nothing is"),
        (picture("file:///etc/passwd"), "is at 'file:///etc/passwd', and nothing is fetched here"),
        (picture(b""), "is a picture of no bytes"),
        (picture(""), "has '' for a picture"),
        (picture(5), "has 5 for a picture"),
        ({"type": "image"}, "has None for a picture"),
        ({"type": "image", "url": URL}, "has None for a picture"),
        ({"type": "image_url", "image_url": {}}, "has None for a picture"),
        (picture(max_soft_tokens=100), r"max_soft_tokens is 100; .* 70, 140, 280, 560, 1120\."),
        (picture(max_soft_tokens=True), "max_soft_tokens is True"),
        (picture(max_soft_tokens=280.0), "max_soft_tokens is 280.0"),
        (picture(detail="original"), r"detail is 'original'; it must be one of low, auto, high\."),
        (picture(detail=["low"]), r"detail is \['low'\]"),
        (
            picture(detail="low", max_soft_tokens=560),
            r"detail of 'low', which is 70 tokens, and max_soft_tokens of 560; give one of them\.",
        ),
    ],
)
def test_what_is_no_picture_is_refused(part: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        check_messages([user(part)])


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_pictures_stand_in_user_messages_and_tool_results_alone(role: str) -> None:
    words = rf"content\[1\] is a picture in a message of the role '{role}'; pictures may stand in"
    with pytest.raises(RequestError, match=words):
        check_messages([{"role": role, "content": [text("a"), picture()]}])
    check_messages([{"role": "tool", "content": [text("a"), picture()]}])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("input_audio", "there is no hearing in these models: send what is said as text"),
        ("audio", "no hearing"),
        ("smell", "a part is a text, a picture, a film or a PDF"),
    ],
)
def test_other_parts_are_refused_with_what_to_send(kind: str, words: str) -> None:
    with pytest.raises(RequestError, match=rf"content\[1\] is '{kind}'; .*{words}"):
        check_messages([user(text("a"), {"type": kind})])


def test_pictures_beside_the_content_would_be_lost() -> None:
    with pytest.raises(RequestError, match="images beside its content; pictures are parts of"):
        check_messages([{"role": "user", "content": "What is this?", "images": ["aGk="]}])
    check_messages([{"role": "user", "content": "What is this?", "images": []}])


def test_pictures_are_taken_out_in_order_and_the_callers_messages_stay() -> None:
    said = [
        user(picture(WIDE), text("a"), picture(TALL, max_soft_tokens=70)),
        {"role": "assistant", "content": "b"},
        user(picture(SQUARE)),
    ]
    bare, given, films = take_pictures(check_messages(said))
    assert films == []
    assert given == [GivenPicture(WIDE, None), GivenPicture(TALL, 70), GivenPicture(SQUARE, None)]
    assert bare[0]["content"] == [{"type": "image"}, text("a"), {"type": "image"}]
    assert bare[1:] == [said[1], user({"type": "image"})]
    assert said[0]["content"][0] == picture(WIDE)


# -- their places ----------------------------------------------------------------------------------


def test_every_placeholder_grows_to_its_picture() -> None:
    ids, placed = place_pictures([1, 102, 2, 102, 102], [opened(3), opened(1), opened(2)], TOKENS)
    assert ids == [1, 101, 102, 102, 102, 103, 2, 101, 102, 103, 101, 102, 102, 103]
    assert [(one.start, one.end) for one in placed] == [(2, 5), (8, 9), (11, 13)]
    assert [one.picture.num_tokens for one in placed] == [3, 1, 2]
    assert place_pictures([1, 2], [], TOKENS) == PicturePrompt([1, 2], ())


@pytest.mark.parametrize(
    ("ids", "count", "words"),
    [
        ([1, 102], 0, r"has 1 places for 0 pictures: a text in the conversation holds the model's"),
        ([102, 102], 1, "Spell the mark in another way"),
        ([1], 1, r"0 places for 1 pictures: the model's chat template leaves pictures out"),
        ([102], 2, "Put all of them into user messages"),
        ([102, 104], 1, "has 1 places for 0 films: .* holds the model's own mark for a film"),
    ],
)
def test_places_and_pictures_are_as_many(ids: list[int], count: int, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        place_pictures(ids, [opened(1)] * count, TOKENS)


# -- with templates --------------------------------------------------------------------------------


class Prompter:
    """A tokenizer with a template, and a model that sees."""

    def __init__(self, template: str) -> None:
        self.tokenizer = picture_tokenizer(template)
        self.tokens = vision_tokens(self.tokenizer)
        self.opened: list[tuple[bytes, PictureRules]] = []
        self.sight = Sight(vision_config(self.tokens), self.open)

    def open(self, data: bytes, rules: PictureRules) -> Picture:
        self.opened.append((data, rules))
        return open_by_name(data, rules)

    def prompt(self, *messages: Any, **options: Any) -> PicturePrompt:
        return encode_with_pictures(self.tokenizer, messages, self.sight, **options)

    def shown(self, *messages: Any, **options: Any) -> str:
        """The prompt in words, every picture as its size in tokens."""
        ids, placed = self.prompt(*messages, **options)
        for one in reversed(placed):
            assert set(ids[one.start : one.end]) == {self.tokens.picture}
            assert (ids[one.start - 1], ids[one.end]) == (self.tokens.begin, self.tokens.end)
            name = self.tokenizer.encode(f"({one.picture.num_tokens})")
            ids = ids[: one.start - 1] + name + ids[one.end + 1 :]
        return self.tokenizer.decode(ids, skip_special=False)


CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": {}}}],
}


def result(*parts: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c1", "content": list(parts)}


@needs_stored
def test_gemmas_own_template_has_every_picture_in_its_place() -> None:
    prompter = Prompter(STORED or "")
    said = user(picture(), text("Left."), picture(TALL, max_soft_tokens=70), text("Right."))
    end = "<|turn>model\n<|channel>thought\n<channel|>"
    asked = "<|turn>user\n\n\n(266)\n\nLeft.\n\n(63)\n\nRight.<turn|>\n"
    assert prompter.shown(said) == asked + end
    system = {"role": "system", "content": [text("Be"), text("brief.")]}
    assert prompter.shown(system, said) == "<|turn>system\nBe\nbrief.<turn|>\n" + asked + end


@needs_stored
def test_gemmas_own_template_has_a_picture_that_a_tool_returned_in_a_turn_of_its_own() -> None:
    prompter = Prompter(STORED or "")
    shown = prompter.shown(user(text("Look!")), CALL, result(text("Here:"), picture(SQUARE)))
    assert "<|turn>tool\nHere:\n\n(256)\n\n<turn|>\n<|turn>model\n" in shown
    assert "tool_response" in prompter.shown(user(text("Look!")), CALL, result(text("nothing")))


def test_a_template_that_puts_a_tools_picture_behind_its_text() -> None:
    shown = Prompter(BEHIND_RESULTS).shown(user(text("Look!")), CALL, result(picture(), text("ok")))
    assert "<|tool_response>ok<tool_response|>(266)<turn|>" in shown


def test_a_template_that_drops_a_tools_picture_is_found_out() -> None:
    prompter = Prompter(DROPS_IN_RESULTS)
    said = (user(picture(), text("Look!")), CALL)
    assert "(266)Look!" in prompter.shown(*said, result(text("ok")))
    prompter.opened.clear()
    with pytest.raises(RequestError, match="has 1 places for 2 pictures: .*into user messages"):
        prompter.prompt(*said, result(text("ok"), picture(TALL)))
    assert prompter.opened == []


def test_results_that_are_told_in_words_keep_their_pictures() -> None:
    shown = Prompter(NO_TOOLS).shown(
        user(text("Look!")),
        CALL,
        result(text("one")),
        result(text("two"), picture(SQUARE)),
        result(text("three")),
        tools=TOOLS[1:],
    )
    wrapped = [f"<tool_response>\n{word}\n</tool_response>" for word in ("one", "two", "three")]
    assert wrapped[0] + wrapped[1] + "(256)" + wrapped[2] in shown


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([user(picture(), text("x"))], "it reads user messages as text, without pictures"),
        ([user(text("x")), CALL, result(picture())], "tool messages as text, .* a user message"),
    ],
)
def test_a_template_of_texts_alone_never_loses_a_picture(messages: Any, words: str) -> None:
    prompter = Prompter(TEXT_ONLY + "{# tools #}")
    assert "a\nb" in prompter.shown(user(text("a"), text("b")))
    with pytest.raises(RequestError, match=words):
        prompter.prompt(*messages)
    assert prompter.opened == []


def test_a_part_that_a_text_is_printed_from_is_no_picture() -> None:
    printing = "{% for m in messages %}{{ m.content }}{% if m.content is not string %}{% endif %}"
    reads = "{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="0 places for 1 pictures|reads user messages as text"):
        Prompter(printing + reads).prompt(user(text("a"), picture()))


@pytest.mark.parametrize("pictures", [0, 1])
def test_a_mark_in_a_text_is_no_place(pictures: int) -> None:
    prompter = Prompter(NO_TOOLS)
    said = user(*[picture()] * pictures, text("What does <|image|> mean?"))
    with pytest.raises(RequestError, match=rf"has {pictures + 1} places for {pictures} pictures"):
        prompter.prompt(said)
    with pytest.raises(RequestError, match="mark for a film"):
        prompter.prompt(user(text("What does <|video|> mean?")))
    assert "<|image>" in prompter.shown(user(text("and <|image>?")))


def test_a_question_with_a_picture_cannot_be_continued_behind_it() -> None:
    prompter = Prompter(NO_TOOLS)
    shown = prompter.shown(user(picture(), text("It is")), continues_last=True)
    assert shown == "<|turn>user\n(266)It is"
    with pytest.raises(RequestError, match="the last message ends with a picture, so no text"):
        prompter.prompt(user(text("It is"), picture()), continues_last=True)


# -- sight -----------------------------------------------------------------------------------------


def test_a_model_without_sight_refuses_before_anything_is_opened() -> None:
    tokenizer = picture_tokenizer(NO_TOOLS)
    with pytest.raises(RequestError, match="sees no pictures: it has no vision tower, or was"):
        encode_with_pictures(tokenizer, [user(picture("none.png"))], None, may_name_files=True)
    mark = [user(text("<|image|>"))]  # to a model without sight it is a word like any other
    assert encode_with_pictures(tokenizer, mark, None).token_ids == encode_chat(tokenizer, mark)


def test_who_opens_pictures_itself_gets_one_placeholder_for_each() -> None:
    prompter = Prompter(NO_TOOLS)
    said = [user(picture(b"of another opener"), text("x"), picture(TALL))]
    ids = encode_chat(prompter.tokenizer, said)
    assert ids.count(prompter.tokens.picture) == 2 and prompter.opened == []
    with pytest.raises(RequestError, match="Only text is taken here"):
        render_chat(prompter.tokenizer, said)


def test_pictures_get_the_models_cells_and_its_usual_budget() -> None:
    prompter = Prompter(NO_TOOLS)
    _, placed = prompter.prompt(user(picture(), picture(URL, max_soft_tokens=560)))
    assert prompter.opened == [
        (WIDE, PictureRules(CELL, 280)),
        (WIDE, PictureRules(CELL, 560)),
    ]
    assert [one.picture.num_tokens for one in placed] == [266, 540]


def test_a_path_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a picture.of-any-name"
    path.write_bytes(TALL)
    prompter = Prompter(NO_TOOLS)
    for name in (path, str(path)):
        assert "(266)" in prompter.shown(user(picture(name)), may_name_files=True)
    assert [data for data, _ in prompter.opened] == [TALL]  # the second time it was kept
    with pytest.raises(RequestError, match="none.png.* cannot be read: No such file"):
        prompter.prompt(user(picture(tmp_path / "none.png")), may_name_files=True)


def test_the_last_pictures_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashdraft.chat.sight.MAX_KEPT_BYTES", 3 * CELL**2 * (266 + 266))
    prompter = Prompter(NO_TOOLS)
    names = [b"640x480", b"641x480", b"642x480"]
    for name in [*names[:2], *names[:2], names[2], names[1], names[0]]:
        prompter.prompt(user(picture(name)))
    assert [data for data, _ in prompter.opened] == [*names, names[0]]
    prompter.sight.close()
    prompter.prompt(user(picture(names[0])))
    assert len(prompter.opened) == 5


def test_of_several_pictures_it_is_said_which_cannot_be_opened() -> None:
    def fail(data: bytes, rules: PictureRules) -> Picture:
        if data == TALL:
            raise RequestError("It is broken.")
        return open_by_name(data, rules)

    prompter = Prompter(NO_TOOLS)
    sight = Sight(vision_config(prompter.tokens), fail)
    for parts, words in (
        ([picture(TALL)], "^It is broken"),
        ([picture(), picture(TALL), picture()], "^Picture 2 of 3: It is broken"),
    ):
        with pytest.raises(RequestError, match=words):
            encode_with_pictures(prompter.tokenizer, [user(*parts)], sight)
