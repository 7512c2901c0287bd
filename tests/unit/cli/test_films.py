"""Films and PDFs in the terminal: named by flags and in chats, read once, saved by their names."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from flashdraft.cli import main
from flashdraft.cli.chat.conversation import Conversation, Turn
from flashdraft.cli.chat.saved import load_chat, save_chat
from flashdraft.cli.pictures import PictureFile, read_picture
from flashdraft.core import Picture, PlacedPicture
from flashdraft.errors import RequestError
from flashdraft.media.kinds import FILM, PDF, PICTURE
from tests.unit.cli.test_commands import ScriptedLLM
from tests.unit.cli.test_pictures import must_not_load, new_chat, notes, use
from tests.unit.media.files import encoded, noise
from tests.unit.media.film_files import film, pdf

FILES = {"film": film(3), "pages": pdf([(300, 400)] * 2), "still": encoded(noise(60, 40))}


class SeeingLLM(ScriptedLLM):
    """Sees films of three frames and PDFs of two pages."""

    sees_pictures = True

    def chat_pictures(self, messages: list[dict[str, Any]]) -> tuple[PlacedPicture, ...]:
        counts = {"image": 1, "pdf": 2, "video": 3, "text": 0}
        parts = [part for m in messages if isinstance(m["content"], list) for part in m["content"]]
        picture = Picture(b"", 1, 1, 10, bytes(32))
        return tuple(
            PlacedPicture(0, picture) for part in parts for _ in range(counts[part["type"]])
        )


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, data in FILES.items():
        Path(name).write_bytes(data)


def kinds(message: dict[str, Any]) -> list[str]:
    return [part["type"] for part in message["content"]]


def test_pages_and_frames_go_before_the_prompt_and_json_counts_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = SeeingLLM(["a cat"])
    use(monkeypatch, llm, "generate")
    flags = ["--video", "film", "--pdf", "pages", "--image", "still", "--image-tokens", "140"]
    assert main(["generate", "What is it?", *flags, "--json"]) == 0
    (asked,) = llm.prompts[0]
    assert kinds(asked) == ["image", "pdf", "video", "text"]
    image, document, film, _ = asked["content"]
    assert document == {"type": "pdf", "pdf": FILES["pages"], "max_soft_tokens": 140}
    assert film == {"type": "video", "video": FILES["film"]}
    assert image["max_soft_tokens"] == 140
    assert len(json.loads(capsys.readouterr().out)["pictures"]) == 6


def test_run_answers_once_about_a_pdf(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = SeeingLLM(["ok"])
    use(monkeypatch, llm, "chat")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["run", "org/model", "what is it?", "--pdf", "pages"]) == 0
    assert kinds(llm.prompts[0][0]) == ["pdf", "text"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--pdf", "none"],
            "none' cannot be read: No such file or directory. Check the PDF's path",
        ),
        (["--pdf", "film"], "--pdf 'film': A PDF cannot be taken. It is no PDF"),
        (["--video", "pages"], "--video 'pages': A film cannot be taken. It is no MP4"),
        (["--video", "film", "--no-vision"], "--video needs what --no-vision leaves out; drop one"),
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
    monkeypatch.setattr(f"flashdraft.cli.commands.{command}.load_model", must_not_load)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    before = ["generate", "x"] if command == "generate" else ["chat"]
    assert main([*before, *flags]) == 2
    said = capsys.readouterr().err.replace(f"{tmp_path}{os.sep}", "")
    assert words in said and said.count("\n") == 1


def test_what_does_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--pdf", "--video"):
        assert main(["generate", "x", "--raw", flag, "pages"]) == 2
        assert f"{flag} needs the chat template, which --raw leaves out" in capsys.readouterr().err
    assert main(["generate", "x", "--video", "film", "--image-tokens", "70"]) == 2
    assert "--image-tokens is for pictures; add --image FILE" in capsys.readouterr().err


def test_a_chat_shows_whatever_is_named_by_what_it_is() -> None:
    llm = SeeingLLM(["ok"])
    chat = new_chat(llm)
    for line in ("/image still", "/image pages", "/image film", "which?"):
        chat.take(line)
    assert kinds(llm.prompts[-1][0]) == ["image", "pdf", "video", "text"]
    said = notes(chat)
    assert "still goes with the next question: 10 tokens, 1 picture now." in said
    assert "pages goes with the next question: 2 pages, 20 tokens, 2 files now." in said
    assert "film goes with the next question: 3 frames, 30 tokens, 3 files now." in said


def test_a_conversation_comes_back_with_its_films_and_pdfs(tmp_path: Path) -> None:
    found = (read_picture("pages", 560, None), read_picture("film", 560, None))
    assert [(one.kind, one.budget) for one in found] == [(PDF, 560), (FILM, None)]
    talk = Conversation(None, [Turn("which?", "both", found)])
    save_chat(tmp_path / "talk.json", talk, {}, "tiny")
    assert load_chat(tmp_path / "talk.json").conversation == talk
    save_chat(tmp_path / "talk.md", talk, {}, "tiny")
    text = (tmp_path / "talk.md").read_text()
    assert text.startswith(f"## user\n\n[PDF: {tmp_path / 'pages'}]\n[film: {tmp_path / 'film'}]\n")
    (tmp_path / "film").unlink()
    with pytest.raises(RequestError, match=r"message 1: .*film' cannot be read"):
        load_chat(tmp_path / "talk.json")


def test_a_picture_that_begins_like_a_film_is_a_picture() -> None:
    Path("still").write_bytes(encoded(noise(60, 40), "AVIF"))
    assert read_picture("still", None, None) == PictureFile(
        Path("still").absolute(), Path("still").read_bytes(), None, PICTURE
    )
