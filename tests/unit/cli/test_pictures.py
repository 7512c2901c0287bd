"""Pictures in the terminal: named by flags and in chats, read once, saved by their names."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flashdraft.cli import main
from flashdraft.cli.chat.conversation import Conversation, Turn
from flashdraft.cli.chat.saved import load_chat, save_chat
from flashdraft.cli.chat.session import Chat
from flashdraft.cli.chat.talk import Talk
from flashdraft.cli.display import Screen
from flashdraft.cli.pictures import PictureFile, content_of, read_picture, typed_path
from flashdraft.core import Picture, PlacedPicture, SamplingParams
from flashdraft.errors import RequestError
from flashdraft.media.pictures import PictureRules
from tests.unit.chat.picture_factory import open_by_name
from tests.unit.cli.test_commands import ScriptedLLM

WIDE, TALL = b"640x480", b"300x400"


class SeeingLLM(ScriptedLLM):
    """Sees pictures whose bytes are a size."""

    sees_pictures = True

    def chat_pictures(self, messages: list[dict[str, Any]]) -> tuple[PlacedPicture, ...]:
        parts = [part for m in messages if isinstance(m["content"], list) for part in m["content"]]
        pictures = [
            open_by_name(one["image"], PictureRules(48, one.get("max_soft_tokens", 280)))
            for one in parts
            if one["type"] == "image"
        ]
        return tuple(PlacedPicture(number, one) for number, one in enumerate(pictures))


@pytest.fixture(autouse=True)
def opens_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_one(data: bytes, rules: PictureRules) -> Picture:
        if data == b"broken":
            raise RequestError("A picture cannot be taken. It is broken.")
        return open_by_name(data, rules)

    monkeypatch.setattr("flashdraft.cli.pictures.open_picture", open_one)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "wide one.png", tmp_path / "tall"]
    for path, data in zip(paths, (WIDE, TALL), strict=True):
        path.write_bytes(data)
    return paths


def use(monkeypatch: pytest.MonkeyPatch, llm: ScriptedLLM, command: str) -> None:
    monkeypatch.setattr(f"flashdraft.cli.commands.{command}.load_model", lambda _: llm)


def must_not_load(_: object) -> None:
    raise AssertionError("the model was loaded")


def new_chat(llm: ScriptedLLM) -> Chat:
    screen = Screen(io.StringIO(), io.StringIO(), False, False, False)
    model: Any = llm
    return Chat(Talk(model, SamplingParams(), screen, Conversation()), screen)


def notes(chat: Chat) -> str:
    assert isinstance(chat._screen.err, io.StringIO)
    return chat._screen.err.getvalue()


def shown(message: dict[str, Any]) -> Sequence[Any]:
    """A content in brief."""
    if isinstance(message["content"], str):
        return [message["content"]]
    return [part.get("image", part.get("text")) for part in message["content"]]


# -- generate --------------------------------------------------------------------------------------


def test_pictures_go_before_the_prompt_and_json_counts_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: list[Path]
) -> None:
    llm = SeeingLLM(["a cat"])
    use(monkeypatch, llm, "generate")
    named = [word for path in files for word in ("--image", str(path))]
    assert main(["generate", "What is it?", *named, "--system", "Be brief.", "--json"]) == 0
    system, asked = llm.prompts[0]
    assert shown(system) == ["Be brief."] and shown(asked) == [WIDE, TALL, "What is it?"]
    assert all("max_soft_tokens" not in part for part in asked["content"])
    assert json.loads(capsys.readouterr().out)["pictures"] == [
        {"width": 912, "height": 672, "tokens": 266},
        {"width": 672, "height": 912, "tokens": 266},
    ]
    assert main(["generate", "x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pictures"] == []


def test_how_many_tokens_a_picture_may_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: list[Path]
) -> None:
    llm = SeeingLLM(["a cat"])
    use(monkeypatch, llm, "generate")
    flags = ["--image", str(files[0]), "--image-tokens", "70", "--json"]
    assert main(["generate", "x", *flags]) == 0
    assert llm.prompts[0][0]["content"][0]["max_soft_tokens"] == 70
    assert json.loads(capsys.readouterr().out)["pictures"][0]["tokens"] == 63


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--image", "none.png"], "none.png' cannot be read: No such file"),
        (["--image", "."], "cannot be read: Is a directory"),
        (["--image", "~nobody-here/x.png"], "is no name of a file"),
        (["--image", "BROKEN"], "--image 'BROKEN': A picture cannot be taken. It is broken."),
        (["--image", "WIDE", "--no-vision"], "--image needs what --no-vision leaves out; drop one"),
        (["--mmproj", "none.gguf"], "There is no mmproj file 'none.gguf': name a .gguf file, or"),
        (["--mmproj", "org/name"], "There is no mmproj file 'org/name': name a .gguf file, or one"),
        (["--image-tokens", "100", "--image", "WIDE"], "it must be one of 70, 140, 280, 560, 1120"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_what_is_wrong_is_said_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: str,
    flags: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("WIDE").write_bytes(WIDE)
    Path("BROKEN").write_bytes(b"broken")
    monkeypatch.setattr(f"flashdraft.cli.commands.{command}.load_model", must_not_load)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    before = ["generate", "x"] if command == "generate" else ["chat"]
    assert main([*before, *flags]) == 2
    said = capsys.readouterr().err.replace(f"{tmp_path}{os.sep}", "")
    assert words in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--raw", "--image", "x"], "--image needs the chat template, which --raw leaves out"),
        (["--image-tokens", "70"], "--image-tokens is for pictures; add --image FILE, or drop it"),
    ],
)
def test_what_does_not_go_together(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main(["generate", "x", *flags]) == 2
    assert words in capsys.readouterr().err


# -- chat ------------------------------------------------------------------------------------------


def test_pictures_of_flags_are_the_first_questions(
    monkeypatch: pytest.MonkeyPatch, files: list[Path]
) -> None:
    llm = SeeingLLM(["ok"])
    use(monkeypatch, llm, "chat")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"what?\nand now?\n/image {files[1]}\nthis?\n"))
    assert main(["run", "--image", str(files[0]), "--image-tokens", "140"]) == 0
    said = [shown(message) for message in llm.prompts[-1]]
    assert said == [[WIDE, "what?"], ["ok"], ["and now?"], ["ok"], [TALL, "this?"]]
    assert llm.prompts[-1][-1]["content"][0]["max_soft_tokens"] == 140


def test_run_answers_once_about_a_picture(
    monkeypatch: pytest.MonkeyPatch, files: list[Path]
) -> None:
    llm = SeeingLLM(["ok"])
    use(monkeypatch, llm, "chat")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["run", "org/model", "what is it?", "--image", str(files[0])]) == 0
    assert [shown(message) for message in llm.prompts[0]] == [[WIDE, "what is it?"]]


def test_several_pictures_go_with_the_next_question_alone(files: list[Path]) -> None:
    llm = SeeingLLM(["ok"])
    chat = new_chat(llm)
    wide, tall = files
    for line in (f"/image {wide}", f"/image '{wide}'", f"/image {tall}", "which?", "and?"):
        assert chat.take(line)
    assert shown(llm.prompts[-1][0]) == [WIDE, WIDE, TALL, "which?"]
    assert shown(llm.prompts[-1][-1]) == ["and?"]
    assert "wide one.png goes with the next question: 266 tokens, 1 picture now." in notes(chat)
    assert "tall goes with the next question: 266 tokens, 3 pictures now." in notes(chat)


def test_pictures_that_wait_can_be_let_go_of(files: list[Path]) -> None:
    llm = SeeingLLM(["ok"])
    chat = new_chat(llm)
    for line in (f"/image {files[0]}", "/image", "one", f"/image {files[0]}", "/reset", "two"):
        chat.take(line)
    assert [shown(message) for message in llm.prompts[-1]] == [["two"]]
    assert "The next question has no pictures." in notes(chat)


def test_pictures_of_a_question_that_failed_wait_for_the_next(files: list[Path]) -> None:
    llm = SeeingLLM(["ok"])
    chat = new_chat(llm)
    chat.take(f"/image {files[0]}")
    llm.error = "The device ran out of memory."
    with pytest.raises(Exception, match="out of memory"):
        chat.take("first")
    llm.error = None
    chat.take("second")
    assert [shown(message) for message in llm.prompts[-1]] == [[WIDE, "second"]]


def test_a_picture_that_is_wrong_changes_nothing(files: list[Path]) -> None:
    llm = SeeingLLM(["ok"])
    chat = new_chat(llm)
    chat.take(f"/image {files[0]}")
    with pytest.raises(RequestError, match="cannot be read"):
        chat.take("/image none.png")
    chat.take("what?")
    assert shown(llm.prompts[-1][0]) == [WIDE, "what?"]


def test_a_file_that_changes_later_changes_no_conversation(files: list[Path]) -> None:
    llm = SeeingLLM(["ok"])
    chat = new_chat(llm)
    chat.take(f"/image {files[0]}")
    files[0].write_bytes(TALL)
    chat.take("what?")
    assert shown(llm.prompts[-1][0]) == [WIDE, "what?"]


def test_a_path_may_be_typed_as_a_terminal_drops_it(tmp_path: Path) -> None:
    path = tmp_path / "my cat's picture.png"
    path.write_bytes(WIDE)
    quoted = str(path).replace("'", "'\\''")
    escaped = str(path).replace(" ", "\\ ").replace("'", "\\'")
    for typed in (str(path), f"'{quoted}'", f'"{path}"', escaped):
        assert typed_path(typed) == path
    assert typed_path("it's not there.png") == Path("it's not there.png")
    assert typed_path("not there.png") == Path("not there.png")


# -- files of conversations ------------------------------------------------------------------------


def test_a_saved_chat_names_its_pictures_and_reads_them_again(files: list[Path]) -> None:
    path = files[0].parent / "talk.json"
    chat = new_chat(SeeingLLM(["ok"]))
    chat.take(f"/image {files[0]}")
    chat.take("what?")
    chat.take(f"/save {path}")
    assert path.stat().st_size < 2000
    parts = json.loads(path.read_text())["messages"][0]["content"]
    assert parts == [{"type": "image", "image": str(files[0])}, {"type": "text", "text": "what?"}]
    llm = SeeingLLM(["good"])
    other = new_chat(llm)
    other.take(f"/load {path}")
    other.take("and?")
    assert shown(llm.prompts[-1][0]) == [WIDE, "what?"]
    files[0].unlink()
    with pytest.raises(RequestError, match=r"message 1: .*wide one.png' cannot be read"):
        other.take(f"/load {path}")
    other.take("still there?")
    assert shown(llm.prompts[-1][0]) == [WIDE, "what?"]


def test_a_conversation_comes_back_with_pictures_and_their_budgets(files: list[Path]) -> None:
    pictures = (read_picture(files[0], 560), read_picture(files[1]))
    talk = Conversation(None, [Turn("which?", "both", pictures), Turn("and?", "none")])
    path = files[0].parent / "talk.json"
    save_chat(path, talk, {}, "tiny")
    assert load_chat(path).conversation == talk
    save_chat(path.with_suffix(".md"), talk, {}, "tiny")
    text = path.with_suffix(".md").read_text()
    assert text.startswith(f"## user\n\n[picture: {files[0]}]\n[picture: {files[1]}]\nwhich?\n")


def test_a_model_that_sees_nothing_loads_no_pictures(files: list[Path]) -> None:
    path = files[0].parent / "talk.json"
    talk = Conversation(None, [Turn("which?", "both", (read_picture(files[0]),))])
    save_chat(path, talk, {}, "tiny")
    llm = SeeingLLM(["ok"])
    llm.sees_pictures = False
    with pytest.raises(RequestError, match="has pictures, and the model sees none; take them out"):
        new_chat(llm).take(f"/load {path}")


IMAGE = {"type": "image", "image": "none.png"}
TEXT = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    ("role", "content", "words"),
    [
        ("user", [IMAGE], "it must be a string, or in a question pictures and a text"),
        ("user", [TEXT, TEXT], "before its text; there may be pictures, as"),
        ("user", [{"type": "image"}, TEXT], "before its text; there may be pictures"),
        ("user", ["none.png", TEXT], "before its text"),
        ("user", [IMAGE, IMAGE], "it must be a string"),
        ("user", [{**IMAGE, "max_soft_tokens": 3}, TEXT], "max_soft_tokens of 3; .* one of 70, "),
        ("user", [IMAGE, TEXT], "message 1: .*none.png' cannot be read"),
        ("user", [{**IMAGE, "image": "\ud800"}, TEXT], "not UTF-8 text"),
        ("assistant", [IMAGE, TEXT], "it must be a string"),
    ],
)
def test_wrong_pictures_in_a_file_are_refused(
    tmp_path: Path, role: str, content: Any, words: str
) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps({"messages": [{"role": role, "content": content}]}))
    with pytest.raises(RequestError, match=words) as error:
        load_chat(path)
    assert len(str(error.value)) < 500


def test_a_part_has_the_files_name_or_its_bytes(files: list[Path]) -> None:
    one = read_picture(files[0], 70)
    assert one == PictureFile(files[0], WIDE, 70)
    assert content_of("x", []) == "x"
    assert content_of("x", [one]) == [
        {"type": "image", "image": WIDE, "max_soft_tokens": 70},
        {"type": "text", "text": "x"},
    ]
