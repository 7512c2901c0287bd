"""The web page's chats in a real browser: kept, found, renamed, deleted, branched, carried away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.browser import Keys, Page
from tests.e2e.scripted_server import Failure, Script, ScriptedServer

pytestmark = pytest.mark.alone  # Chromium takes both processors

LONG = " ".join(f"word{i}" for i in range(400))
NO_DATABASE = """
const refuse = () => { throw new DOMException("no", "SecurityError"); };
Object.defineProperty(window, "indexedDB", { get: refuse });
"""


@pytest.fixture
def other_tab(page: Page) -> Iterator[Page]:
    """A second tab of the same browser; the first one has the focus again at the end."""
    first = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    other = Page(page.driver, page.url)
    other.set_width(1200, 900)
    other.open()
    page.driver.switch_to.window(first)
    yield other
    page.driver.switch_to.window(other.handle)
    page.driver.close()
    page.driver.switch_to.window(first)


def titles(page: Page) -> list[str]:
    return [link.get_property("textContent") for link in page.all(".chat-link")]


def ask_new(page: Page, question: str) -> None:
    page.click("#new-chat")
    page.ask(question)
    page.wait_for_end()


def choose(page: Page, title: str, action: str) -> None:
    """An action of a chat's menu."""
    row = next(row for row in page.all(".chat-row") if row.text.startswith(title))
    page.driver.execute_script("arguments[0].querySelector('.more').click()", row)
    page.click(f"#chat-menu [data-act={action}]")


def questions(page: Page) -> list[str]:
    return [found.text for found in page.all(".question")]


def download(page: Page, folder: Path, name: str) -> str:
    page.wait(lambda: (folder / name).is_file())
    return (folder / name).read_text(encoding="utf-8")


def save_into(page: Page, folder: Path) -> None:
    settings = {"behavior": "allow", "downloadPath": str(folder)}
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", settings)


# -- the list ----------------------------------------------------------------------------------


def test_chats_are_kept_listed_and_opened_again(page: Page, scripted: ScriptedServer) -> None:
    ask_new(page, "First things")
    scripted.script.content = "Another answer."
    ask_new(page, "Second things")
    assert titles(page) == ["Second things", "First things"]
    assert page.text(".chat-list .group") == "Today"
    page.open()
    page.wait(lambda: titles(page) == ["Second things", "First things"])
    assert page.all(".turn") == []
    page.all(".chat-link")[1].click()
    page.wait(lambda: questions(page) == ["First things"])
    assert page.answer() == "A short answer." and "tok/s" in page.text(".gauge")
    assert page.driver.title == "First things · flashdraft"
    page.driver.back()
    page.wait(lambda: page.is_shown("#welcome"))
    page.driver.forward()
    page.wait(lambda: questions(page) == ["First things"])
    page.ask("And on")
    page.wait_for_end()
    assert titles(page)[0] == "First things"  # the latest is on top
    assert len(scripted.questions[-1]["messages"]) == 3


def test_chats_are_searched_by_title_question_and_answer(
    page: Page, scripted: ScriptedServer
) -> None:
    scripted.script.content = "The capital is Lisbon."
    ask_new(page, "Portugal?")
    scripted.script.content = "Madrid, they say."
    ask_new(page, "Spain?")
    for words, expected in (
        ("LISBON capital", ["Portugal?"]),
        ("spain", ["Spain?"]),
        ("madrid lisbon", []),
        ("", ["Spain?", "Portugal?"]),
    ):
        page.run("search.value = ''")
        page.find("#search").send_keys(words or " ")
        page.wait(lambda expected=expected: titles(page) == expected)
    page.find("#search").send_keys("nothing at all")
    page.wait(lambda: page.text("#no-chats") == "No chat has these words.")
    page.find("#search").send_keys(Keys.ESCAPE)
    page.wait(lambda: len(titles(page)) == 2)


def test_a_chat_is_renamed(page: Page) -> None:
    ask_new(page, "Dull name")
    choose(page, "Dull name", "rename")
    page.find(".rename").send_keys("Better <b>name</b>", Keys.ENTER)
    page.wait(lambda: titles(page) == ["Better <b>name</b>"])
    assert page.driver.title == "Better <b>name</b> · flashdraft"
    page.ask("More")  # what is written next leaves the name alone
    page.wait_for_end()
    choose(page, "Better", "rename")
    page.find(".rename").send_keys("No", Keys.ESCAPE)
    page.driver.refresh()
    page.wait(lambda: titles(page) == ["Better <b>name</b>"])


def test_a_deleted_chat_comes_back_by_undo(page: Page) -> None:
    ask_new(page, "Keep me")
    ask_new(page, "Delete me")
    choose(page, "Delete me", "remove")
    page.wait(lambda: titles(page) == ["Keep me"])
    assert page.is_shown("#welcome") and "Delete me" in page.text("#toast")
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)  # the focus is there
    page.wait(lambda: titles(page) == ["Delete me", "Keep me"])
    page.all(".chat-link")[0].click()
    page.wait(lambda: questions(page) == ["Delete me"])
    choose(page, "Delete me", "remove")
    page.wait(lambda: titles(page) == ["Keep me"])
    page.driver.refresh()
    page.wait(lambda: titles(page) == ["Keep me"])


def test_what_was_deleted_a_while_ago_is_gone_for_good(page: Page) -> None:
    ask_new(page, "Old secret")
    choose(page, "Old secret", "remove")
    page.wait(lambda: titles(page) == [])
    page.run(
        "indexedDB.open('flashdraft').onsuccess = ({ target }) => {"
        " const store = target.result.transaction('conversations', 'readwrite')"
        ".objectStore('conversations');"
        " store.getAll().onsuccess = (e) => { for (const one of e.target.result)"
        " store.put({ ...one, deleted: one.deleted - 120000 }); target.result.close(); } }"
    )
    count = """
    const done = arguments[0];
    indexedDB.open('flashdraft').onsuccess = ({ target }) => {
      const all = ["conversations", "turns", "tokens"];
      const t = target.result.transaction(all);
      Promise.all(all.map((n) => new Promise((r) => {
        t.objectStore(n).count().onsuccess = (e) => r(e.target.result); }))).then((x) => {
          target.result.close(); done(x); });
    };
    """
    assert page.driver.execute_async_script(count) == [1, 1, 1]
    page.open()
    page.wait(lambda: page.driver.execute_async_script(count) == [0, 0, 0])


def test_very_many_chats_are_listed_in_parts_and_all_found(page: Page, tmp_path: Path) -> None:
    turn = {"id": "a", "parent": "", "question": "q"}
    chats = [
        {"title": f"Chat {i}", "updated": 1000 + i, "turns": [turn | {"question": f"q{i}"}]}
        for i in range(230)
    ]
    whole = {"format": "flashdraft chats", "version": 1, "conversations": chats}
    (tmp_path / "many.json").write_text(json.dumps(whole))
    page.find("#import-picker").send_keys(str(tmp_path / "many.json"))
    page.wait(lambda: "230 chats" in page.text("#toast"))
    assert len(page.all(".chat-link")) == 200 and page.text(".chat-link") == "Chat 229"
    page.find("#search").send_keys("q7")
    page.wait(lambda: len(page.all(".chat-link")) == 11)
    page.find("#search").send_keys(Keys.ESCAPE)
    page.wait(lambda: len(page.all(".chat-link")) == 200)
    page.run("document.querySelector('.group button').click()")
    assert len(page.all(".chat-link")) == 230


def test_the_chat_that_was_wanted_last_is_shown(page: Page) -> None:
    ask_new(page, "One")
    ask_new(page, "Two")
    ask_new(page, "Three")
    page.run("const all = document.querySelectorAll('.chat-link'); all[1].click(); all[2].click()")
    page.wait(lambda: questions(page) == ["One"])
    page.run("location.hash = document.querySelectorAll('.chat-link')[1].hash; location.hash = ''")
    page.wait(lambda: page.is_shown("#welcome"))
    page.wait(lambda: page.all(".turn") == [])


# -- tabs --------------------------------------------------------------------------------------


def test_two_tabs_agree(page: Page, other_tab: Page, scripted: ScriptedServer) -> None:
    ask_new(page, "Shared")
    address = page.driver.current_url
    page.driver.switch_to.window(other_tab.handle)
    other_tab.wait(lambda: titles(other_tab) == ["Shared"])
    other_tab.all(".chat-link")[0].click()
    other_tab.wait(lambda: questions(other_tab) == ["Shared"])
    assert page.driver.current_url == address
    other_tab.ask("From the other tab")
    other_tab.wait_for_end()
    page.driver.switch_to.window(page.handle)
    page.wait(lambda: questions(page) == ["Shared", "From the other tab"])
    page.wait(lambda: page.answer() == "A short answer.")
    page.ask("And from here")
    page.wait_for_end()
    assert len(scripted.questions[-1]["messages"]) == 5
    page.driver.switch_to.window(other_tab.handle)
    other_tab.wait(lambda: len(questions(other_tab)) == 3)
    choose(other_tab, "Shared", "remove")
    other_tab.wait(lambda: titles(other_tab) == [])
    page.driver.switch_to.window(page.handle)
    page.wait(lambda: page.is_shown("#welcome") and titles(page) == [])


def test_what_another_tab_asked_meanwhile_is_shown_at_the_end(
    page: Page, other_tab: Page, scripted: ScriptedServer
) -> None:
    page.ask("Shared")
    page.wait_for_end()
    scripted.script = Script(content=LONG, step_s=0.04)
    page.ask("Slow")
    page.wait(lambda: "word3" in page.answer())
    scripted.script = Script(content="Quick.")
    page.driver.switch_to.window(other_tab.handle)
    other_tab.wait(lambda: titles(other_tab) == ["Shared"])
    other_tab.all(".chat-link")[0].click()
    other_tab.wait(lambda: questions(other_tab) == ["Shared", "Slow"])
    other_tab.all(".turn")[0].find_elements("css selector", ".actions button")[1].click()
    other_tab.wait(lambda: other_tab.answer() == "Quick.")
    other_tab.wait_for_end()
    choose(other_tab, "Shared", "rename")
    other_tab.find(".rename").send_keys("Ours", Keys.ENTER)
    page.driver.switch_to.window(page.handle)
    page.wait(lambda: page.driver.title == "Ours · flashdraft")
    page.wait_for_end()
    page.wait(lambda: page.text(".turn .branches span") in ("1/2", "2/2"))


def test_another_model_of_the_server_is_noticed(page: Page, scripted: ScriptedServer) -> None:
    page.ask("Before")
    page.wait_for_end()
    scripted.script.model = "another"
    page.ask("After")
    page.wait_for_end()
    assert page.answer() == "A short answer." and not page.is_shown(".error")
    assert page.text("#model") == "another" and scripted.questions[-1]["model"] == "another"


def test_escape_closes_the_menu_and_not_the_answer(page: Page, scripted: ScriptedServer) -> None:
    scripted.script = Script(content=LONG, step_s=0.02)
    page.ask("Long one")
    page.wait(lambda: "word3" in page.answer())
    page.run("document.querySelector('.more').click()")
    assert page.is_shown("#chat-menu")
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.wait(lambda: not page.is_shown("#chat-menu"))
    page.wait_for_end()
    assert page.answer() == LONG


def test_an_answer_whose_chat_another_tab_deletes_brings_nothing_back(
    page: Page, other_tab: Page, scripted: ScriptedServer
) -> None:
    scripted.script = Script(content=LONG, step_s=0.02)
    page.ask("Long one")
    page.wait(lambda: "word9" in page.answer())
    page.driver.switch_to.window(other_tab.handle)
    other_tab.wait(lambda: titles(other_tab) == ["Long one"])
    choose(other_tab, "Long one", "remove")
    other_tab.wait(lambda: titles(other_tab) == [])
    page.driver.switch_to.window(page.handle)
    page.wait_for_end()  # it goes on undisturbed
    page.driver.refresh()
    page.wait(lambda: page.is_shown("#welcome"))
    assert titles(page) == []


# -- where nothing is kept ---------------------------------------------------------------------


def test_without_a_database_the_page_works_and_says_so(page: Page) -> None:
    added = page.driver.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument", {"source": NO_DATABASE}
    )
    try:
        page.open()
        assert "keeps nothing" in page.text("#keeping")
        ask_new(page, "One")
        ask_new(page, "Two")
        assert titles(page) == ["Two", "One"]
        page.all(".chat-link")[1].click()
        page.wait(lambda: questions(page) == ["One"])
        page.find("#search").send_keys("short two")
        page.wait(lambda: titles(page) == ["Two"])
        page.find("#search").send_keys(Keys.ESCAPE)
        page.wait(lambda: len(titles(page)) == 2)
        choose(page, "Two", "remove")
        page.wait(lambda: titles(page) == ["One"])
        page.driver.refresh()
        page.wait(lambda: page.is_shown("#welcome") and titles(page) == [])
    finally:
        page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_a_full_browser_is_told_and_the_chat_can_be_exported(page: Page, tmp_path: Path) -> None:
    save_into(page, tmp_path)
    page.run(
        "window.put = IDBObjectStore.prototype.put; IDBObjectStore.prototype.put = () => { "
        "throw new DOMException('full', 'QuotaExceededError'); }"
    )
    page.ask("No room")
    page.wait_for_end()
    assert page.answer() == "A short answer."
    assert "no room" in page.text("#keeping")
    choose(page, "No room", "exportMarkdown")
    assert "A short answer." in download(page, tmp_path, "No room.md")
    page.ask("Still none")
    page.wait_for_end()
    assert questions(page) == ["No room", "Still none"] and "no room" in page.text("#keeping")
    page.run("IDBObjectStore.prototype.put = window.put")
    page.ask("Room again")  # what could not be kept before is kept now
    page.wait_for_end()
    page.wait(lambda: "kept in this browser" in page.text("#keeping"))
    page.driver.refresh()
    page.wait(lambda: questions(page) == ["No room", "Still none", "Room again"])


def test_the_conversation_of_version_0_2_is_moved(page: Page) -> None:
    turns = [
        {"question": f"Q{i}", "answer": {"content": {"text": f"A{i}", "runs": []}}}
        for i in range(3)
    ]
    page.run(f"sessionStorage.setItem('flashdraft.turns', {json.dumps(json.dumps(turns))})")
    page.open()
    page.wait(lambda: questions(page) == ["Q0", "Q1", "Q2"])
    assert page.answer() == "A2" and titles(page) == ["Q0"]
    page.open()
    page.wait(lambda: titles(page) == ["Q0"])
    assert page.all(".turn") == []  # once is enough


# -- while an answer comes ---------------------------------------------------------------------


def test_an_answer_goes_on_while_another_chat_is_open(page: Page, scripted: ScriptedServer) -> None:
    scripted.script = Script(content=LONG, step_s=0.02)
    page.ask("Slow one")
    page.wait(lambda: "word3" in page.answer())
    page.click("#new-chat")
    assert page.text("#send") == "Send" and page.all(".turn") == []
    scripted.script = Script(content="Quick.")
    page.ask("Quick one")
    page.wait(lambda: page.answer() == "Quick.")
    page.wait_for_end()
    assert titles(page) == ["Quick one", "Slow one"]
    page.all(".chat-link")[1].click()
    page.wait(lambda: questions(page) == ["Slow one"])
    page.wait_for_end()
    assert page.answer() == LONG


def test_a_reload_in_the_middle_keeps_what_had_come(page: Page, scripted: ScriptedServer) -> None:
    scripted.script = Script(content=LONG, step_s=0.1)
    page.ask("Cut me")
    page.wait(lambda: "word150" in page.answer(), 30)
    page.driver.refresh()
    page.wait(lambda: questions(page) == ["Cut me"])
    assert page.answer().startswith("word0 word1 word2")
    assert page.text(".turn-note") in ("Not finished yet.", "The answer was cut off.")
    scripted.script = Script()
    page.click_action("Retry")
    page.wait(lambda: page.answer() == "A short answer.")


def test_a_failed_first_question_is_kept_and_can_be_asked_again(
    page: Page, scripted: ScriptedServer
) -> None:
    scripted.script.failures = [Failure(500, "broken")]
    page.ask("Try")
    page.wait(lambda: page.is_shown(".error"))
    page.driver.refresh()
    page.wait(lambda: questions(page) == ["Try"])
    page.click_action("Retry")
    page.wait(lambda: page.answer() == "A short answer.")


# -- branches ----------------------------------------------------------------------------------


def test_any_question_can_be_edited_and_the_branches_stay(
    page: Page, scripted: ScriptedServer
) -> None:
    for question in ("One", "Two", "Three"):
        page.ask(question)
        page.wait_for_end()
    scripted.script.content = "From the branch."
    page.all(".turn")[1].find_elements("css selector", ".actions button")[-1].click()
    assert page.find("#question").get_property("value") == "Two"
    page.find("#question").send_keys(" instead", Keys.ENTER)
    page.wait_for_end()
    assert questions(page) == ["One", "Two instead"] and page.answer() == "From the branch."
    sent = [message["content"] for message in scripted.questions[-1]["messages"]]
    assert sent == ["One", "A short answer.", "Two instead"]
    assert page.text(".turn:last-child .branches span") == "2/2"
    page.click(".turn:last-child [aria-label='Previous version']")
    page.wait(lambda: questions(page) == ["One", "Two", "Three"])
    page.ask("Four")
    page.wait_for_end()
    assert len(scripted.questions[-1]["messages"]) == 7
    page.driver.refresh()  # the tree and the choice are kept
    page.wait(lambda: questions(page) == ["One", "Two", "Three", "Four"])
    page.click("[aria-label='Next version']")
    page.wait(lambda: questions(page) == ["One", "Two instead"])


def test_an_edit_puts_aside_what_was_being_written(page: Page) -> None:
    page.ask("One")
    page.wait_for_end()
    page.find("#question").send_keys("half a thought")
    page.click_action("Edit")
    assert page.find("#question").get_property("value") == "One"
    page.find("#question").send_keys(Keys.ESCAPE)
    assert page.find("#question").get_property("value") == "half a thought"
    page.click_action("Edit")
    page.find("#question").send_keys(" more", Keys.ENTER)
    page.wait_for_end()
    assert questions(page) == ["One more"]
    assert page.find("#question").get_property("value") == "half a thought"


def test_retry_with_other_settings_changes_that_answer_alone(
    page: Page, scripted: ScriptedServer
) -> None:
    page.ask("Vary")
    page.wait_for_end()
    scripted.script.content = "Warmer."
    page.click_action("Retry with")
    assert page.text("#settings-title") == "Answer again with" and not page.is_shown(
        "[name=system]"
    )
    page.find("[name=temperature]").send_keys("1.5")
    page.find("[name=seed]").send_keys("7", Keys.ENTER)
    page.wait(lambda: page.answer() == "Warmer.")
    page.wait_for_end()
    assert scripted.questions[-1]["temperature"] == 1.5 and scripted.questions[-1]["seed"] == 7
    assert "temperature 1.5" in page.text(".turn-note")
    assert page.text(".branches span") == "2/2"
    page.ask("Plain again")
    page.wait_for_end()
    assert not {"temperature", "seed"} & scripted.questions[-1].keys()
    page.click_action("Retry with")
    page.find("[name=temperature]").send_keys("0.1", Keys.ESCAPE)
    page.click("#open-settings")
    assert page.find("[name=temperature]").get_property("value") == ""


def test_an_answer_that_reached_its_length_goes_on(page: Page, scripted: ScriptedServer) -> None:
    page.run("thinking.value = 'on'; thinking.dispatchEvent(new Event('change'))")
    page.click("#open-settings")
    page.find("[name=max_tokens]").send_keys("5")
    page.click("#apply-settings")
    scripted.script.content = "one two three four five six"
    page.ask("Count")
    page.wait_for_end()
    assert page.answer() == "one two three four five"
    scripted.script.content = " six seven"
    page.click_action("Continue")
    page.wait(lambda: page.answer() == "one two three four five six seven")
    page.wait_for_end()
    sent = scripted.questions[-1]
    assert sent["continue_final_message"] is True and "chat_template_kwargs" not in sent
    assert sent["messages"][-1] == {"role": "assistant", "content": "one two three four five"}
    assert "7 tokens" in page.text(".gauge") and len(page.all(".turn")) == 1
    assert "Continue" not in page.text(".actions")
    page.click("#colour")
    assert (
        page.run(
            "return [...document.querySelectorAll('.answer .token')]"
            ".map((t) => t.textContent).join('')"
        )
        == "one two three four five six seven"
    )


# -- files -------------------------------------------------------------------------------------


def test_chats_leave_as_json_and_come_back_whole(
    page: Page, scripted: ScriptedServer, tmp_path: Path
) -> None:
    save_into(page, tmp_path)
    scripted.script.content = "**Bold** answer."
    page.click("#colour")
    page.ask("Carry me")
    page.wait_for_end()
    page.click_action("Retry")
    page.wait_for_end()
    ask_new(page, "Me too")
    page.click("#export-all")
    exported = json.loads(download(page, tmp_path, "flashdraft-chats.json"))
    assert exported["format"] == "flashdraft chats" and len(exported["conversations"]) == 2
    page.forget()
    page.open()
    page.find("#import-picker").send_keys(str(tmp_path / "flashdraft-chats.json"))
    page.wait(lambda: titles(page) == ["Me too", "Carry me"])
    assert page.text("#toast") == "2 chats imported."
    page.all(".chat-link")[1].click()
    page.wait(lambda: questions(page) == ["Carry me"])
    assert page.text(".answer strong") == "Bold" and page.text(".branches span") == "2/2"
    page.click("#colour")
    assert page.all(".answer .token.drafted") and page.is_shown(".strip")
    page.find("#import-picker").send_keys(str(tmp_path / "flashdraft-chats.json"))
    page.wait(lambda: len(titles(page)) == 4)  # an import never replaces anything


def test_more_chats_than_a_file_may_hold_leave_in_several(page: Page) -> None:
    """What is exported can be imported: 20,000 turns and 32 MiB are a file's limits."""
    read_back = page.driver.execute_async_script(
        """
        const done = arguments[0];
        const names = ["exchange", "conversation"];
        Promise.all(names.map((name) => import(`/page/chats/${name}.js`))).then((modules) => {
          const [{ toJson, conversationsOf, MAX_FILE_BYTES }, { Conversation, Turn }] = modules;
          const turnsOf = (talk) => [...talk.branches.values()].flat().length;
          const talk = (length, question) => new Conversation(
            { title: "Long" }, Array.from({ length }, () => new Turn({ question })));
          const back = (talks) => toJson(talks).map((text) => {
            if (new Blob([text]).size > MAX_FILE_BYTES) throw new Error("too large");
            return conversationsOf("x.json", text).map(turnsOf);
          });
          const wide = "é".repeat(5 * 1024 * 1024); // 10 MiB as a file has it
          done([
            back([9000, 9000, 9000].map((length) => talk(length, "a"))),
            back([1, 1, 1, 1].map((length) => talk(length, wide))),
            back([]),
          ]);
        }).catch((error) => done(String(error)));"""
    )
    assert read_back == [[[9000, 9000], [9000]], [[1, 1, 1], [1]], []]


def test_a_chat_leaves_as_markdown_and_comes_back(
    page: Page, scripted: ScriptedServer, tmp_path: Path
) -> None:
    save_into(page, tmp_path)
    tricky = "# Not a title\n\n<!-- flashdraft: question -->\n\\<!-- flashdraft: answer -->\n- done"
    scripted.script.content = tricky
    page.ask("Some? Title/with: signs")
    page.wait_for_end()
    scripted.script.content = "Second answer."
    page.ask("And then?")
    page.wait_for_end()
    choose(page, "Some?", "exportMarkdown")
    text = download(page, tmp_path, "Some Titlewith signs.md")
    assert text.startswith("# Some? Title/with: signs\n") and "## Answer\n\nSecond answer." in text
    choose(page, "Some?", "remove")
    page.find("#import-picker").send_keys(str(tmp_path / "Some Titlewith signs.md"))
    page.wait(lambda: titles(page) == ["Some? Title/with: signs"])
    page.all(".chat-link")[0].click()
    page.wait(lambda: questions(page) == ["Some? Title/with: signs", "And then?"])
    page.ask("What was said?")
    page.wait_for_end()
    assert [m["content"] for m in scripted.questions[-1]["messages"]] == [
        "Some? Title/with: signs",
        tricky,
        "And then?",
        "Second answer.",
        "What was said?",
    ]


HOSTILE_TURN = {
    "id": "__proto__",
    "parent": "",
    "question": "<img src=x onerror=window.pwned=1>",
    "files": [{"name": "<b>x</b>", "text": "<script>window.pwned=1</script>"}],
    "at": "soon",
    "asked": {"temperature": "<i>", "seed": 3},
    "answer": {
        "content": {"text": "<script>window.pwned=1</script>", "runs": [[-5, "<b>", {}], "x"]},
        "steps": [[1e9, 1], [1, 2], "y"],
        "stats": {"tokens_per_s": "<b>"},
        "numTokens": -1,
        "finish": "constructor",
    },
}


def test_a_strangers_file_stays_text(page: Page, tmp_path: Path) -> None:
    turns = [HOSTILE_TURN, HOSTILE_TURN | {"id": "constructor", "parent": "__proto__"}]
    conversation = {"title": "<img src=x onerror=window.pwned=1>", "turns": turns, "chosen": []}
    whole = {"format": "flashdraft chats", "version": 1, "conversations": [conversation]}
    (tmp_path / "bad.json").write_text(json.dumps(whole))
    page.find("#import-picker").send_keys(str(tmp_path / "bad.json"))
    page.wait(lambda: titles(page) == [conversation["title"]])
    page.click("#colour")
    page.all(".chat-link")[0].click()
    page.wait(lambda: len(questions(page)) == 2)
    assert page.answer() == "<script>window.pwned=1</script>"
    assert page.text(".turn:last-child .turn-note") == ""
    assert page.run("return document.querySelectorAll('#turns :is(img, script)').length") == 0
    assert page.run("return window.pwned ?? null") is None
    page.ask("Goes on")
    page.wait_for_end()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ('{"format": "other"}', "another one"),
        ('{"format": "flashdraft chats", "version": 1, "conversations": [{}]}', "no turns"),
        (
            '{"format": "flashdraft chats", "version": 1, "conversations": '
            '[{"turns": [{"id": "a", "parent": "b", "question": "q"}]}]}',
            "not there",
        ),
        (
            '{"format": "flashdraft chats", "version": 1, "conversations": '
            '[{"turns": [{"id": "a", "parent": "a", "question": 3}]}]}',
            "no text",
        ),
        ("# Only words", "no question"),
        ("\udcff", "UTF-8"),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused(
    page: Page, tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "wrong.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    page.find("#import-picker").send_keys(str(tmp_path / "wrong.json"))
    page.wait(lambda: page.is_shown("#toast"))
    assert words in page.text("#toast") and "Nothing was imported." in page.text("#toast")
    assert titles(page) == []


def test_a_strangers_title_is_one_line(page: Page, tmp_path: Path) -> None:
    """A second line would be a question of its own in Markdown."""
    save_into(page, tmp_path)
    title = "Mine\n\n<!-- flashdraft: question -->\n\nForged"
    turns = [{"id": "a", "parent": "", "question": "Real"}]
    chats = [{"title": title, "turns": turns}]
    whole = {"format": "flashdraft chats", "version": 1, "conversations": chats}
    (tmp_path / "title.json").write_text(json.dumps(whole))
    page.find("#import-picker").send_keys(str(tmp_path / "title.json"))
    page.wait(lambda: titles(page) == ["Mine <!-- flashdraft: question --> Forged"])
    choose(page, "Mine", "exportMarkdown")
    text = download(page, tmp_path, "Mine -- flashdraft question -- Forged.md")
    assert text.splitlines().count("<!-- flashdraft: question -->") == 1


def test_turns_that_follow_each_other_in_a_circle_do_no_harm(page: Page, tmp_path: Path) -> None:
    turns = [
        {"id": "a", "parent": "b", "question": "A"},
        {"id": "b", "parent": "a", "question": "B"},
    ]
    whole = {"format": "flashdraft chats", "version": 1, "conversations": [{"turns": turns}]}
    (tmp_path / "circle.json").write_text(json.dumps(whole))
    page.find("#import-picker").send_keys(str(tmp_path / "circle.json"))
    page.wait(lambda: titles(page) == ["Imported chat"])
    page.all(".chat-link")[0].click()
    page.wait(lambda: page.driver.title == "Imported chat · flashdraft")
    page.ask("Works")
    page.wait_for_end()
