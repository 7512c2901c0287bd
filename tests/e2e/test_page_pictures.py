"""Pictures on the web page: attached, dropped, pasted, taken off, sent, kept; never an answer's."""

from __future__ import annotations

import base64
import io
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flashdraft.server.http.security import PAGE_HEADERS
from tests.e2e.browser import Page
from tests.e2e.scripted_server import ScriptedServer

GIVE_PICTURE = """
const [way, name, type, text] = arguments;
const data = new DataTransfer();
data.items.add(new File([Uint8Array.from(atob(text), (one) => one.charCodeAt(0))], name, { type }));
const place = document.querySelector("#question");
const event = way === "paste"
  ? new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true })
  : new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true });
place.dispatchEvent(event);
"""
THUMBNAILS = "#attached .picture"


def png(width: int = 40, height: int = 30, seed: int | None = None) -> bytes:
    file = io.BytesIO()
    picture = Image.new("RGB", (width, height), "red")
    if seed is not None:
        noise = random.Random(seed).randbytes(3 * width * height)
        picture = Image.frombytes("RGB", (width, height), noise)
    picture.save(file, "PNG")
    return file.getvalue()


def address(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@pytest.fixture
def seeing(page: Page, scripted: ScriptedServer) -> Page:
    """The page of a model that takes pictures."""
    scripted.script.capabilities = ("completion", "vision")
    page.open()
    return page


def give(page: Page, way: str, name: str, data: bytes, kind: str = "image/png") -> None:
    text = base64.b64encode(data).decode()
    page.driver.execute_script(GIVE_PICTURE, way, name, kind, text)


def wait_for(page: Page, count: int) -> None:
    page.wait(lambda: len(page.all(THUMBNAILS)) == count)


def source(found: Any) -> str:
    return str(found.get_property("src"))


def test_pictures_are_attached_taken_off_sent_kept_and_sent_again(
    seeing: Page, scripted: ScriptedServer, tmp_path: Path
) -> None:
    page, one, other = seeing, png(), png(41, 31)
    assert page.find("#attach-image").get_property("disabled") is False
    assert page.find("#image-picker").get_attribute("accept") == "image/*"  # a phone's camera too
    (tmp_path / "cat.png").write_bytes(one)
    page.find("#image-picker").send_keys(str(tmp_path / "cat.png"))
    wait_for(page, 1)
    give(page, "paste", "shot.png", other)
    wait_for(page, 2)
    give(page, "drop", "gone.png", png(9, 9))
    wait_for(page, 3)
    page.click("#attached [aria-label='Remove gone.png']")
    assert [source(found) for found in page.all(THUMBNAILS)] == [address(one), address(other)]
    page.ask("What are they?")
    page.wait_for_end()
    assert not page.is_shown("#attached")
    question = {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": address(one)}},
            {"type": "image_url", "image_url": {"url": address(other)}},
            {"type": "text", "text": "What are they?"},
        ],
    }
    assert scripted.questions[-1]["messages"] == [question]
    page.run("location.reload()")
    page.wait(
        lambda: [source(p) for p in page.all(".turn .picture")] == [*map(address, (one, other))]
    )
    assert page.find(".turn .picture").get_property("alt") == "cat.png"
    page.wait(lambda: page.find(".turn .picture").get_property("naturalWidth") == 40)
    page.ask("And now?")
    page.wait(lambda: len(page.all(".turn")) == 2)
    page.wait_for_end()
    first, _, last = scripted.questions[-1]["messages"]
    assert first == question and last == {"role": "user", "content": "And now?"}


def test_a_picture_alone_is_a_question_and_comes_back_when_it_is_edited(
    seeing: Page, scripted: ScriptedServer
) -> None:
    give(seeing, "paste", "shot.png", png())
    wait_for(seeing, 1)
    seeing.click("#send")
    seeing.wait(lambda: len(scripted.questions) == 1)
    seeing.wait_for_end()
    (message,) = scripted.questions[-1]["messages"]
    assert message["content"] == [{"type": "image_url", "image_url": {"url": address(png())}}]
    seeing.click_action("Edit question")
    assert [source(found) for found in seeing.all(THUMBNAILS)] == [address(png())]


def test_a_large_picture_is_made_smaller(seeing: Page, scripted: ScriptedServer) -> None:
    large = png(2600, 200, seed=1)
    assert len(large) > 1024 * 1024
    give(seeing, "paste", "large.png", large)
    wait_for(seeing, 1)
    seeing.ask("What is it?")
    seeing.wait_for_end()
    url = scripted.questions[-1]["messages"][0]["content"][0]["image_url"]["url"]
    sent = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))))
    assert sent.format == "JPEG" and sent.size == (2048, 158)


def test_what_is_no_picture_is_refused(seeing: Page) -> None:
    give(seeing, "paste", "photo.png", b"\x89PNG broken")
    seeing.wait(lambda: "cannot be read as a picture" in seeing.text("#attach-note"))
    assert seeing.all("#attached li") == []


def test_a_model_without_eyes_is_offered_no_pictures(page: Page) -> None:
    assert page.find("#attach-image").get_property("disabled") is True
    give(page, "drop", "photo.png", png())
    page.wait(lambda: "this model takes none" in page.text("#attach-note"))
    assert page.all("#attached li") == []


def test_pdfs_and_films_go_as_what_they_are(page: Page, scripted: ScriptedServer) -> None:
    scripted.script.capabilities = ("completion", "vision", "pdf", "video")
    page.open()
    give(page, "drop", "report.pdf", b"%PDF-1.7 and more", "application/pdf")
    page.wait(lambda: [one.text for one in page.all("#attached p")] == ["report.pdf"])
    give(page, "paste", "clip.mp4", b"a film", "video/mp4")
    page.wait(lambda: [one.text for one in page.all("#attached p")] == ["report.pdf", "clip.mp4"])
    page.ask("What are they?")
    page.wait_for_end()
    urls = [
        f"data:{kind};base64,{base64.b64encode(data).decode()}"
        for kind, data in (("application/pdf", b"%PDF-1.7 and more"), ("video/mp4", b"a film"))
    ]
    (question,) = scripted.questions[-1]["messages"]
    assert question["content"] == [
        {"type": "file", "file": {"filename": "report.pdf", "file_data": urls[0]}},
        {"type": "video_url", "video_url": {"url": urls[1]}},
        {"type": "text", "text": "What are they?"},
    ]
    page.run("location.reload()")
    page.wait(lambda: [one.text for one in page.all(".turn p.size")] == ["report.pdf", "clip.mp4"])
    page.ask("And now?")
    page.wait(lambda: len(page.all(".turn")) == 2)
    page.wait_for_end()
    assert scripted.questions[-1]["messages"][0] == question


def test_who_cannot_read_pdfs_and_films_is_offered_none(seeing: Page) -> None:
    give(seeing, "drop", "report.pdf", b"%PDF-1.7", "application/pdf")
    seeing.wait(lambda: "is a PDF, and this model takes none" in seeing.text("#attach-note"))
    give(seeing, "drop", "clip.mp4", b"a film", "video/mp4")
    seeing.wait(lambda: "is a film, and this model takes none" in seeing.text("#attach-note"))
    assert seeing.all("#attached li") == []


def test_an_answer_shows_no_pictures(seeing: Page, scripted: ScriptedServer) -> None:
    here = address(png())
    scripted.script.content = f"![a]({here}) <img src='{here}'> ![b](https://example.com/b.png)"
    seeing.ask("Show me one.")
    seeing.wait_for_end()
    link = ".turn a[href='https://example.com/b.png']"  # where it is may be gone to, by a click
    seeing.wait(lambda: seeing.text(link) == "b")
    assert seeing.all(".turn img") == []


def test_the_page_may_show_nothing_from_elsewhere() -> None:
    rules = dict(rule.split(" ", 1) for rule in PAGE_HEADERS["Content-Security-Policy"].split("; "))
    assert rules["img-src"] == "data:"
