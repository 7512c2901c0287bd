"""The web page's settings, files, keys and narrow screens, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.browser import Keys, Page
from tests.e2e.scripted_server import Script, ScriptedServer

pytestmark = pytest.mark.alone  # Chromium takes both processors

LONG = " ".join(f"word{i}" for i in range(400))
GIVE_FILE = """
const [kind, name, type, text] = arguments;
const transfer = new DataTransfer();
transfer.items.add(new File([text], name, { type }));
const made = kind === "paste"
  ? new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true })
  : new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true });
document.querySelector("#question").dispatchEvent(made);
"""


def option(page: Page, selector: str, label: str) -> None:
    page.driver.execute_script(
        "const [select, label] = [document.querySelector(arguments[0]), arguments[1]];"
        "select.value = [...select.options].find((one) => one.text === label).value;"
        "select.dispatchEvent(new Event('change', { bubbles: true }))",
        selector,
        label,
    )


def value(page: Page, name: str) -> str:
    return str(page.find(f"[name={name}]").get_property("value"))


# -- settings ----------------------------------------------------------------------------------


def test_the_settings_show_the_models_real_values(page: Page) -> None:
    page.click("#open-settings")
    facts = page.text("#model-facts")
    assert facts == "scripted, a context of 8,192 tokens, answers of at most 1,024 tokens"
    assert page.find("[name=max_tokens]").get_attribute("placeholder") == "1024"
    assert page.find("[name=max_tokens]").get_attribute("max") == "8192"


def test_thinking_is_offered_where_the_model_can(page: Page, scripted: ScriptedServer) -> None:
    page.wait(lambda: page.is_shown("#thinking"))
    page.run("thinking.value = 'on'; thinking.dispatchEvent(new Event('change'))")
    scripted.script.capabilities = ("completion",)
    page.open()
    page.ask("Think?")
    page.wait_for_end()
    assert not page.is_shown("#thinking")
    assert "chat_template_kwargs" not in scripted.questions[-1]


def test_presets_are_used_saved_and_deleted(page: Page, scripted: ScriptedServer) -> None:
    page.click("#open-settings")
    page.find("[name=system]").send_keys("Be brief.")
    option(page, "#preset", "Creative")
    assert (value(page, "temperature"), value(page, "min_p")) == ("1", "0.05")
    assert value(page, "system") == "Be brief."
    page.find("[name=top_k]").send_keys("12")
    assert page.find("#preset").get_property("value") == ""  # it is Creative no more
    page.find("#preset-name").send_keys("My <b>own</b>", Keys.ENTER)
    assert page.is_shown("#settings")
    option(page, "#preset", "Precise")
    assert (value(page, "temperature"), value(page, "top_k")) == ("0", "")
    page.open()
    page.click("#open-settings")
    assert value(page, "temperature") == "0"
    option(page, "#preset", "My <b>own</b>")
    assert (value(page, "temperature"), value(page, "top_k")) == ("1", "12")
    page.click("#remove-preset")
    assert "<b>" not in page.text("#preset")
    page.click("#apply-settings")
    page.ask("So?")
    page.wait_for_end()
    sent = scripted.questions[-1]
    assert (sent["temperature"], sent["top_k"], sent["min_p"]) == (1, 12, 0.05)


# -- files -------------------------------------------------------------------------------------


def test_text_files_go_with_the_question(
    page: Page, scripted: ScriptedServer, tmp_path: Path
) -> None:
    (tmp_path / "notes.md").write_text("# Notes\n\n```\ncode\n```\n<b>not bold</b>\n")
    page.find("#file-picker").send_keys(str(tmp_path / "notes.md"))
    page.wait(lambda: page.is_shown("#attached"))
    assert "notes.md" in page.text("#attached")
    page.driver.execute_script(GIVE_FILE, "paste", "a.py", "text/x-python", "print(1)")
    page.driver.execute_script(GIVE_FILE, "drop", "b.txt", "text/plain", "gone")
    page.wait(lambda: len(page.all("#attached li")) == 3)
    page.click("#attached [aria-label='Remove b.txt']")
    page.ask("What is in them?")
    page.wait_for_end()
    assert not page.is_shown("#attached")
    expected = (
        "File notes.md:\n````md\n# Notes\n\n```\ncode\n```\n<b>not bold</b>\n````\n\n"
        "File a.py:\n```py\nprint(1)\n```\n\nWhat is in them?"
    )
    assert scripted.questions[-1]["messages"] == [{"role": "user", "content": expected}]
    assert page.text(".question") == "What is in them?"
    assert [found.text.split()[0] for found in page.all(".file summary")] == ["notes.md", "a.py"]
    page.click(".file summary")
    assert "<b>not bold</b>" in page.text(".file pre")
    page.click_action("Edit question")  # the files are edited with it
    assert len(page.all("#attached li")) == 2
    page.find("#question").send_keys(Keys.ESCAPE)
    assert not page.is_shown("#attached")


def test_a_file_of_very_many_marks_goes_like_any_other(
    page: Page, scripted: ScriptedServer, tmp_path: Path
) -> None:
    scripted.script.context = 1_000_000
    page.open()
    (tmp_path / "marks.md").write_text("` " * 300_000)
    page.find("#file-picker").send_keys(str(tmp_path / "marks.md"))
    page.wait(lambda: page.is_shown("#attached li"))
    page.find("#question").send_keys("Marks?", Keys.ENTER)
    page.wait(lambda: page.all(".turn") and page.answer() == "A short answer.")
    page.wait_for_end()
    assert scripted.questions[-1]["messages"][0]["content"].startswith("File marks.md:\n```md\n` ")


def test_files_that_cannot_go_are_refused_with_the_reason(
    page: Page, scripted: ScriptedServer, tmp_path: Path
) -> None:
    scripted.script.context = 100
    page.open()
    for name, content, words in (
        ("long.txt", b"x" * 500, "500 characters; the model's context of 100 tokens"),
        ("raw.bin", b"\xff\xfe\x00\x01", "no text in UTF-8"),
        ("zero.txt", b"a\0b", "is no text"),
        ("big.txt", b"x" * 5_000_000, "4.8 MB; 4.0 MB at most"),
        ("photo.png", b"\x89PNG", "this model takes none"),
    ):
        (tmp_path / name).write_bytes(content)
        page.find("#file-picker").send_keys(str(tmp_path / name))
        page.wait(lambda words=words: words in page.text("#attach-note"))
        assert page.all("#attached li") == []
    assert page.find("#attach-image").get_property("disabled") is True
    (tmp_path / "fits.txt").write_text("short")
    page.find("#file-picker").send_keys(str(tmp_path / "fits.txt"))
    page.wait(lambda: len(page.all("#attached li")) == 1)
    assert not page.is_shown("#attach-note")
    page.find("#question").send_keys(Keys.ENTER)  # a file is a question too
    page.wait_for_end()
    assert "short" in scripted.questions[-1]["messages"][0]["content"]


# -- keys and screens --------------------------------------------------------------------------


def test_keys_have_a_page_of_their_own(page: Page) -> None:
    page.find("#question").send_keys("?")
    assert not page.is_shown("#key-help") and page.find("#question").get_property("value") == "?"
    page.find("#question").send_keys(Keys.CONTROL, "/", Keys.NULL)
    assert page.is_shown("#key-help")
    page.find("#key-help button").send_keys(Keys.ESCAPE)
    assert not page.is_shown("#key-help")
    page.find("#question").send_keys(Keys.CONTROL, "k", Keys.NULL)
    assert page.run("return document.activeElement.id") == "search"
    page.find("#question").send_keys("x", Keys.ENTER)
    page.wait_for_end()
    page.find("#question").send_keys(Keys.CONTROL, Keys.SHIFT, "o", Keys.NULL)
    page.wait(lambda: page.is_shown("#welcome"))


def test_the_composer_is_whole_on_a_phone_while_an_answer_comes(
    page: Page, scripted: ScriptedServer
) -> None:
    scripted.script = Script(content=LONG, step_s=0.02)
    page.set_width(360, 640)
    page.open()
    page.ask("On a phone")
    page.wait(lambda: "word60" in page.answer())
    for selector in ("#question", "#send", "#attach", "#colour", "#thinking"):
        box = page.run(
            f"const b = document.querySelector('{selector}').getBoundingClientRect();"
            "return [b.left, b.top, b.right, b.bottom]"
        )
        assert box[0] >= 0 and box[1] >= 0 and box[2] <= 360 and box[3] <= 640, (selector, box)
    page.run("document.documentElement.style.setProperty('--covered', '250px')")  # a keyboard
    bottom = page.run("return document.querySelector('#composer').getBoundingClientRect().bottom")
    assert bottom <= 640 - 250
    page.click("#send")
    page.wait_for_end()


def test_chats_are_a_drawer_on_a_phone(page: Page) -> None:
    page.set_width(360, 640)
    page.open()
    page.ask("Small")
    page.wait_for_end()
    assert not page.is_shown("#chats")
    page.click("#toggle-chats")
    assert page.is_shown("#chats") and page.run("return document.activeElement.id") == "search"
    assert page.find("#composer").get_property("inert") is True
    page.find("#search").send_keys(Keys.ESCAPE)
    assert not page.is_shown("#chats")
    assert page.run("return document.activeElement.id") == "toggle-chats"
    page.click("#toggle-chats")
    page.run("document.querySelector('.chat-link').click()")
    page.wait(lambda: not page.is_shown("#chats"))
    page.run("document.querySelector('#new-chat').click()")
    page.ask("A chat with a name of some forty letters")
    page.wait_for_end()
    page.click("#toggle-chats")
    page.run("document.querySelector('.more').click()")
    page.click("#chat-menu [data-act=remove]")
    page.wait(lambda: page.is_shown("#toast"))
    box = page.find("#toast").rect
    assert box["width"] > 300 and box["x"] >= 0 and box["x"] + box["width"] <= 360


def test_the_column_of_chats_is_closed_and_stays_so(page: Page) -> None:
    assert page.is_shown("#chats")
    page.click("#toggle-chats")
    page.open()
    assert not page.is_shown("#chats")
    page.click("#toggle-chats")
    assert page.is_shown("#chats")
    boxes = page.run(
        "return ['#chats', '#chat'].map((s) => document.querySelector(s).getBoundingClientRect())"
        ".map((b) => [b.left, b.right])"
    )
    assert boxes[0][1] <= boxes[1][0] and boxes[1][1] <= 1200


def test_what_screen_readers_are_told(page: Page, scripted: ScriptedServer) -> None:
    unnamed = """
    const named = (one) => one.textContent.trim() || one.ariaLabel || one.labels?.length;
    return [...document.querySelectorAll('button, input:not([type=file]), select, textarea, a')]
      .filter((one) => !named(one)).map((one) => one.outerHTML)"""
    scripted.script = Script(content=LONG, step_s=0.01)
    page.ask("Listen")
    page.wait(lambda: page.text("#status") == "Answering")
    assert page.find("#turns").get_attribute("aria-busy") == "true"
    page.wait_for_end()
    assert page.text("#status") == "The answer is complete"
    assert page.find("#turns").get_attribute("aria-busy") == "false"
    assert page.run(unnamed) == []
    assert page.find(".chat-link").get_attribute("aria-current") == "true"
    assert page.find("#toggle-chats").get_attribute("aria-expanded") == "true"
