"""The web page in a real browser: asking, stopping, what answers look like, themes, a phone.

The fixtures, and what they need, stand in conftest.py; the race and errors in test_page_race.py.
"""

from __future__ import annotations

import pytest

from tests.e2e.browser import Keys, Page
from tests.e2e.scripted_server import Script, ScriptedServer

pytestmark = pytest.mark.alone  # Chromium takes both processors

LONG = " ".join(f"word{i}" for i in range(400))
MARKDOWN = """\
# Title

Text with **bold**, *italic*, `code <b>`, [a link](https://example.com/x) and ~~gone~~.

| name | size |
|:-----|-----:|
| a\\|b | 1 |
| **c** | 2 |

1. first
   - inner
2. second

> quoted

```python
def f(x):
    return x * 2  # <not a tag>
```
"""
GROW = r"""
const done = arguments[0];
const BITS = ["*", "**", "_", "`", "```", "~~", "\\", "\n", "\n\n", "\r\n", " ", "   ", "- ", "1. ",
  "> ", "# ", "---", "|", "|-|-|", "http://x.y", "[t](http://z)", "![i](x)",
  "$", "$$", "\\(x\\)", "\\[", "\\]", "- [x] ", "<b>", "a", "é", "😀"];
let state = 1;
const pick = (n) => (state = (state * 48271) % 2147483647) % n;
import("/page/answers/markdown.js").then(({ renderMarkdown }) => {
  const failures = [];
  let tried = 0;
  for (; tried < 150; tried++) {
    const whole = Array.from({ length: 1 + pick(30) }, () => BITS[pick(BITS.length)]).join("");
    const leaf = (parent, text, at) => {
      const isTrue = [...Array(text.length).keys()].every(
        (k) => text[k] === "\n" || whole[at(k)] === text[k]);
      if (!isTrue) failures.push(["misplaced", whole, text]);
      parent.append(text);
    };
    const [grown, fresh] = [document.createElement("div"), document.createElement("div")];
    for (let end = 1; end <= whole.length; end++) {
      renderMarkdown(grown, whole.slice(0, end), { leaf }, "");
    }
    renderMarkdown(fresh, whole, { leaf }, "");
    if (grown.innerHTML !== fresh.innerHTML) failures.push(["differs", whole]);
  }
  done({ failures, tried });
});
"""
HOSTILE = """\
<script>window.pwned = 1</script><img src=x onerror="window.pwned = 1">

[click](javascript:window.pwned=1) ![see](https://example.com/pixel.png) <b onclick=x>bold</b>

```html
</code></pre><script>window.pwned = 1</script>
```

| <i>a</i> | b |
|---|---|
| <svg onload="window.pwned=1"> | "><script>window.pwned=1</script> |
"""


# -- asking ------------------------------------------------------------------------------------


def test_a_question_streams_its_answer(page: Page, scripted: ScriptedServer) -> None:
    scripted.script = Script(content=LONG, step_s=0.02)
    page.ask("Say words.")
    page.wait(lambda: "word3" in page.answer())
    assert page.text("#send") == "Stop" and "word399" not in page.answer()
    assert page.find("#turns").get_attribute("aria-busy") == "true"
    page.wait(lambda: page.is_shown(".live .gauge .track"))  # the gauge moves while it streams
    page.wait_for_end()
    assert page.answer() == LONG and page.text(".question") == "Say words."
    assert "400 tokens" in page.text(".gauge") and "tokens a step" in page.text(".gauge")
    assert page.text("#status") == "The answer is complete"
    (question,) = scripted.questions
    assert question["messages"] == [{"role": "user", "content": "Say words."}]
    assert question["model"] == "scripted" and question["stream"] is True
    assert question["flashdraft"] == {"tokens": True}
    assert not {"temperature", "chat_template_kwargs", "seed"} & question.keys()


def test_shift_enter_breaks_the_line_and_history_is_sent(
    page: Page, scripted: ScriptedServer
) -> None:
    page.find("#question").send_keys("one", Keys.SHIFT, Keys.ENTER, Keys.NULL, "two")
    page.find("#question").send_keys(Keys.ENTER)
    page.wait_for_end()
    page.ask("three")
    page.wait_for_end()
    assert [m["content"] for m in scripted.questions[-1]["messages"]] == [
        "one\ntwo",
        "A short answer.",
        "three",
    ]


@pytest.mark.parametrize("how", ["escape", "button"])
def test_stop_keeps_what_was_said_and_tells_the_server(
    page: Page, scripted: ScriptedServer, how: str
) -> None:
    scripted.script = Script(content=LONG, step_s=0.03)
    page.ask("Go on.")
    page.wait(lambda: "word9" in page.answer())
    if how == "escape":
        page.find("#question").send_keys(Keys.ESCAPE)
    else:
        page.click("#send")
    page.wait_for_end()
    assert page.answer().startswith("word0 word1") and "word399" not in page.answer()
    assert page.text(".turn-note") == "Stopped."
    page.wait(lambda: scripted.num_abandoned == 1)


def test_retry_asks_the_same_again(page: Page, scripted: ScriptedServer) -> None:
    page.ask("Once more.")
    page.wait_for_end()
    scripted.script.content = "Another answer."
    page.click_action("Retry")
    page.wait(lambda: page.answer() == "Another answer.")
    page.wait_for_end()
    assert len(page.all(".turn")) == 1
    assert scripted.questions[0]["messages"] == scripted.questions[1]["messages"]


def test_the_last_question_can_be_edited(page: Page, scripted: ScriptedServer) -> None:
    page.ask("Wrong")
    page.wait_for_end()
    page.click_action("Edit")
    assert page.find("#question").get_property("value") == "Wrong"
    page.find("#question").send_keys(Keys.ESCAPE)
    assert not page.is_shown("#editing") and page.find("#question").get_property("value") == ""
    page.find("#question").send_keys(Keys.ARROW_UP)  # the same by key
    page.find("#question").send_keys(" no more", Keys.ENTER)
    page.wait_for_end()
    assert [t.text for t in page.all(".question")] == ["Wrong no more"]
    assert len(scripted.questions[-1]["messages"]) == 1


def test_the_conversation_outlives_a_reload_until_a_new_chat(page: Page) -> None:
    page.ask("Remember this.")
    page.wait_for_end()
    page.driver.refresh()
    page.wait(lambda: page.is_shown(".turn"))
    assert page.answer() == "A short answer." and "tok/s" in page.text(".gauge")
    page.click("#new-chat")
    assert page.all(".turn") == [] and page.is_shown("#welcome")
    page.driver.refresh()
    page.wait(lambda: page.is_shown("#welcome"))


def test_settings_reach_the_request_and_are_remembered(
    page: Page, scripted: ScriptedServer
) -> None:
    page.click("#open-settings")
    page.find("[name=system]").send_keys("Be brief.")
    for name, value in (("temperature", "0.5"), ("top_k", "20"), ("max_tokens", "2")):
        page.find(f"[name={name}]").send_keys(value)
    page.click("#settings .primary")
    page.run("thinking.value = 'on'; thinking.dispatchEvent(new Event('change'))")
    page.open()
    page.ask("Hello?")
    page.wait_for_end()
    (question,) = scripted.questions
    assert question["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (question["temperature"], question["top_k"], question["max_tokens"]) == (0.5, 20, 2)
    assert question["chat_template_kwargs"] == {"enable_thinking": True}
    assert page.text(".turn-note") == "The answer reached its longest length."


def test_an_empty_setting_shows_what_the_server_takes(page: Page) -> None:
    page.wait(lambda: page.find("[name=temperature]").get_attribute("placeholder") == "0.2")
    assert page.find("[name=top_p]").get_attribute("placeholder") == "0.9"
    assert page.find("[name=top_k]").get_attribute("placeholder") == "off"
    assert page.find("[name=seed]").get_attribute("placeholder") == "random"


def test_thinking_is_folded(page: Page, scripted: ScriptedServer) -> None:
    scripted.script = Script(content="Four.", reasoning="Two and two are <b>four</b>.")
    page.ask("2 + 2?")
    page.wait_for_end()
    assert page.answer() == "Four." and "Thought for" in page.text(".thinking summary")
    assert not page.is_shown(".thoughts")
    page.find(".thinking summary").send_keys(Keys.ENTER)
    assert page.is_shown(".thoughts")
    assert page.text(".thoughts") == "Two and two are <b>four</b>."
    page.ask("And now?")
    page.wait_for_end()
    assert scripted.questions[-1]["messages"][1] == {"role": "assistant", "content": "Four."}


# -- what an answer looks like -----------------------------------------------------------------


@pytest.mark.parametrize("coloured", [False, True])
def test_markdown_is_rendered(page: Page, scripted: ScriptedServer, coloured: bool) -> None:
    scripted.script = Script(content=MARKDOWN, step_s=0.005)
    if coloured:
        page.click("#colour")
    page.ask("Show me.")
    page.wait_for_end()
    assert page.text(".answer h3") == "Title"
    assert page.text(".answer p strong") == "bold" and page.text(".answer em") == "italic"
    assert page.text(".answer p code") == "code <b>" and page.text(".answer del") == "gone"
    assert page.find(".answer a").get_property("href") == "https://example.com/x"
    cells = [e.get_property("textContent") for e in page.all(".answer td")]
    assert cells == ["a|b", "1", "c", "2"] and page.all(".answer td.right")
    assert page.text(".answer ol > li ul li") == "inner" and len(page.all(".answer ol > li")) == 2
    assert page.text(".answer blockquote") == "quoted"
    assert page.text(".answer pre code") == "def f(x):\n    return x * 2  # <not a tag>"
    assert page.text(".code-head span") == "python"


def test_a_code_block_can_be_copied(page: Page, scripted: ScriptedServer) -> None:
    scripted.script = Script(content=MARKDOWN)
    page.run(
        "navigator.clipboard.writeText = (text) => { window.copied = text; "
        "return Promise.resolve(); }"
    )
    page.ask("Show me.")
    page.wait_for_end()
    page.click(".code-head .copy")
    page.wait(lambda: page.text(".code-head .copy") == "Copied")
    page.click(".code-head .copy")
    page.wait(lambda: page.text(".code-head .copy") == "Copy")
    page.run("return new Promise((done) => setTimeout(done, 1600))")
    assert page.text(".code-head .copy") == "Copy"
    assert page.run("return window.copied").startswith("def f(x):\n    return")


@pytest.mark.parametrize("coloured", [False, True])
def test_hostile_text_stays_text(page: Page, scripted: ScriptedServer, coloured: bool) -> None:
    scripted.script = Script(content=HOSTILE, reasoning="<script>window.pwned = 1</script>")
    if coloured:
        page.click("#colour")
    page.ask("<img src=x onerror=window.pwned=1>")
    page.wait_for_end()
    shown = page.answer()
    assert '<script>window.pwned = 1</script><img src=x onerror="window.pwned = 1">' in shown
    assert "[click](javascript:window.pwned=1)" in shown and "<b onclick=x>" in shown
    assert '<svg onload="window.pwned=1">' in shown
    inside = "script, img, svg, b, i:not(.strip i), [onclick], [onerror], [onload]"
    assert page.run(f"return document.querySelectorAll('.turn :is({inside})').length") == (
        len(page.all(".gauge b"))
    )
    links = [a.get_property("href") for a in page.all(".turn a")]
    assert links == ["https://example.com/pixel.png"]  # named, never loaded
    assert page.run("return window.pwned ?? null") is None


def test_tokens_are_coloured_by_who_wrote_them(page: Page, scripted: ScriptedServer) -> None:
    scripted.script = Script(content="Naïve **bold** text, and\na second line.")
    page.ask("Colours?")
    page.wait_for_end()
    assert page.all(".answer .token") == [] and not page.is_shown(".strip")
    page.click("#colour")
    assert page.is_shown("#legend") and page.is_shown(".strip")
    script = "return [...document.querySelectorAll('.answer .token')].map((t) => [t.textContent, "
    tokens = page.run(script + "t.classList.contains('drafted')])")
    # the prompt's own token, then 1, 5, 0 and 2 drafts with one of the target's after each
    assert tokens == [
        ["Naïve", False],
        [" ", True],
        ["bold", True],
        [" text", True],
        [",", True],
        [" and", False],
        ["\na", False],
        [" second", True],
        [" line", True],
        [".", False],
    ]
    script = (
        "return [...document.querySelectorAll('.strip i')].map((i) => [i.offsetHeight, i.title])"
    )
    columns = page.run(script)
    assert [height // 6 for height, _ in columns] == [1, 2, 6, 1, 3]
    assert columns[2][1] == "step 2: 5 accepted + 1 of the target's own"
    page.driver.refresh()  # the choice and the colours are kept
    page.wait(lambda: page.is_shown(".turn"))
    assert len(page.all(".answer .token.drafted")) == 6


def test_a_growing_answer_is_drawn_like_a_whole_one(page: Page) -> None:
    """Random markdown, character by character; every leaf also knows where it stands."""
    found = page.driver.execute_async_script(GROW)
    assert found["failures"] == [] and found["tried"] == 150


@pytest.mark.parametrize(
    "text", ["[" * 20_000, "*a " * 9_000, "x" + "`" * 20_000, "> " * 9_000, "$a " * 9_000]
)
def test_no_text_takes_long_to_draw(page: Page, scripted: ScriptedServer, text: str) -> None:
    scripted.script = Script(content=text + "end")
    page.ask("Hard?")
    page.wait_for_end()
    assert page.answer().endswith("end")


@pytest.mark.parametrize(
    "text",
    [
        "# a" + " " * 12_000 + "b",
        "# a" + "#" * 80_000 + "b",
        "a|b\n-" + " " * 80_000 + "x|",
        "~" * 80_000 + "`",
        "~~~" + " " * 80_000 + "`",
        "- a" + "\n" * 40_000 + "  b",
        "\\(" * 40_000,
        "\\[\n" * 20_000,
        "|" + "a|" * 4_000 + "\n|" + "-|" * 4_000 + "\n" + "|\n" * 8_000,
        "|" + "a|" * 150 + "\n|" + "-|" * 150 + "\n" + "|\n" * 20_000,
        "- a\n" * 140_000,
        "a|b\n-|-\n" + "a|b\n" * 140_000,
    ],
)
def test_a_drawing_costs_what_its_text_costs(page: Page, text: str) -> None:
    """These once took as long as the square or the cube of their length."""
    page.driver.set_script_timeout(20)
    milliseconds = page.driver.execute_async_script(
        """
        const [text, done] = arguments;
        import("/page/answers/markdown.js").then(({ renderMarkdown }) => {
          const start = performance.now();
          const pen = { leaf: (parent, part) => parent.append(part) };
          renderMarkdown(document.createElement("div"), text, pen, "");
          done(performance.now() - start);
        });""",
        text,
    )
    assert milliseconds < 6_000


def test_short_rows_of_a_table_are_filled(page: Page, scripted: ScriptedServer) -> None:
    scripted.script = Script(content="|a|b|c|\n|-|-|-|\n|1|\n|1|2|3|4|")
    page.ask("Table?")
    page.wait_for_end()
    spans = (
        "return [...document.querySelectorAll('tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => [cell.textContent, cell.colSpan]))"
    )
    assert page.run(spans) == [[["1", 1], ["", 2]], [["1", 1], ["2", 1], ["3", 1]]]


def test_headings_lose_the_marks_that_close_them(page: Page, scripted: ScriptedServer) -> None:
    scripted.script = Script(content="# One ## \n\n## Two#a #\n\n### Three")
    page.ask("Headings?")
    page.wait_for_end()
    shown = "return [...document.querySelectorAll('.answer > *')].map((one) => one.textContent)"
    assert page.run(shown) == ["One", "Two#a", "Three"]


# -- looks -------------------------------------------------------------------------------------


def test_dark_and_light_follow_the_system_and_the_switch(page: Page) -> None:
    light = page.background()
    page.prefer("dark")
    dark = page.background()
    assert light != dark and page.text("#theme") == "Light"
    page.click("#theme")
    assert page.background() == light and page.text("#theme") == "Dark"
    page.open()
    assert page.background() == light  # the choice is kept, against the system's
    page.click("#theme")
    page.prefer("light")
    assert page.background() == dark
    page.run(  # another tab's choice
        "window.dispatchEvent(new StorageEvent('storage', "
        "{ key: 'flashdraft.theme', newValue: 'light' }))"
    )
    assert page.background() == light and page.text("#theme") == "Dark"


@pytest.mark.parametrize("view", ["/", "/#race"])
def test_a_phone_needs_no_sideways_scrolling(
    page: Page, scripted: ScriptedServer, view: str
) -> None:
    wide = "| " + " | ".join("abcdefghij" * 2 for _ in range(6)) + " |"
    content = f"{MARKDOWN}\n\n{wide}\n{'|---' * 6}|\n{wide}\n\n{'unbroken' * 30}"
    scripted.script = Script(content=content)
    page.set_width(320, 640)
    page.open(view)
    if view == "/":
        page.click("#colour")
        page.ask("Everything, on a small screen.")
        page.wait_for_end()
    else:
        page.run("document.querySelector('#race-start').click()")
        page.wait(lambda: page.is_shown("#verdict[data-state=done]"))
    assert page.run("return document.documentElement.scrollWidth") <= 320
    for selector in ("#send", "#open-settings", "#theme") if view == "/" else ("#race-start",):
        box = page.find(selector).rect
        assert box["x"] >= 0 and box["x"] + box["width"] <= 320
    page.click("#open-settings")
    assert page.find("#settings").rect["width"] <= 320


def test_the_skip_link_leaves_the_chat_alone(page: Page) -> None:
    page.ask("Stay")
    page.wait_for_end()
    address = page.driver.current_url
    page.run("document.querySelector('.skip').focus()")
    page.find(".skip").send_keys(Keys.ENTER)
    assert page.run("return document.activeElement.id") == "question"
    assert page.driver.current_url == address
    assert [found.text for found in page.all(".question")] == ["Stay"]


def test_everything_is_reached_by_tab_and_shows_its_focus(page: Page) -> None:
    page.run("document.querySelector('.views a').focus()")
    seen = []
    for _ in range(20):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        element = page.driver.switch_to.active_element
        seen.append(element.get_attribute("id") or element.text)
        if seen[-1] not in ("question", "thinking"):
            assert element.value_of_css_property("outline-style") != "none", seen[-1]
        if seen[-1] == "thinking":
            break
    expected = ["Race", "new-chat", "open-settings", "theme", "question", "send", "colour"]
    assert [name for name in seen if name in expected] == expected
