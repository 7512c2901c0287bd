"""The web page in a real browser: the race, and what it says when the server cannot answer."""

from __future__ import annotations

import json

import pytest

from tests.e2e.browser import Keys, Page
from tests.e2e.scripted_server import Failure, Script, ScriptedServer

pytestmark = pytest.mark.alone  # Chromium takes both processors

LONG = " ".join(f"word{i}" for i in range(400))


# -- race --------------------------------------------------------------------------------------


def test_a_race_runs_both_in_turn_and_compares(page: Page, scripted: ScriptedServer) -> None:
    scripted.script = Script(content=LONG, step_s=0.002)
    page.open("/#race")
    page.find("#race-prompt").send_keys(Keys.CONTROL, "a")
    page.find("#race-prompt").send_keys("Race!", Keys.ENTER)
    page.wait(lambda: page.is_shown("#lane-plain.running"))
    assert not page.is_shown("#lane-drafted.running")  # one after the other is the default
    page.wait(lambda: page.is_shown("#verdict[data-state=done]"), 30)
    warm, plain, drafted = scripted.questions
    assert warm["max_tokens"] == 1 and "verify" not in drafted["flashdraft"]
    assert plain["flashdraft"] == {"verify": 0, "tokens": True}
    for question in (plain, drafted):
        assert (question["temperature"], question["seed"]) == (0, 1)
        assert question["messages"][-1]["content"] == "Race!"
        assert question["max_tokens"] == 256
    characters = len(" ".join(f"word{i}" for i in range(256)))
    assert f"Identical text. All {characters:,} characters agree." in page.text("#verdict")
    assert "as fast drafted as plain" in page.text("#verdict")
    assert page.text("#lane-plain .answer") == page.text("#lane-drafted .answer")
    assert page.is_shown("#lane-drafted.won")
    clocks = [float(page.text(f"#lane-{n} .clock")[:-1]) for n in ("plain", "drafted")]
    assert clocks[0] > clocks[1] > 0
    assert page.all("#lane-plain .token.drafted") == [] and page.all("#lane-drafted .token.drafted")


def test_a_race_can_be_sampled_with_one_seed(page: Page, scripted: ScriptedServer) -> None:
    page.open("/#race")
    page.find("#race-drawing").send_keys("sampled")
    for temperature in (0.2, 1.5):  # the server's own, then that of the settings
        page.click("#race-start")
        page.wait(lambda: page.is_shown("#verdict[data-state=done]"))
        for question in scripted.questions[-2:]:
            assert (question["temperature"], question["seed"]) == (temperature, 1)
        page.click("#open-settings")
        page.find("[name=temperature]").send_keys("1.5")
        page.click("#apply-settings")
        page.run("document.querySelector('#verdict').dataset.state = ''")


def test_a_race_together_says_that_the_machine_is_shared(
    page: Page, scripted: ScriptedServer
) -> None:
    scripted.script = Script(content=LONG, step_s=0.005)
    page.open("/#race")
    page.find("#race-order").send_keys("at the same")
    assert page.is_shown("#race-note")
    page.click("#race-start")
    page.wait(
        lambda: page.is_shown("#lane-plain.running") and page.is_shown("#lane-drafted.running")
    )
    page.wait(lambda: page.is_shown("#verdict[data-state=done]"), 30)
    assert "Identical text." in page.text("#verdict")


def test_a_race_shows_where_texts_part(page: Page, scripted: ScriptedServer) -> None:
    scripted.script = Script(content="the same until here", plain_content="the same until there")
    page.open("/#race")
    page.click("#race-start")
    page.wait(lambda: page.is_shown("#verdict[data-state=done]"))
    assert "The texts part at character 16." in page.text("#verdict")
    assert page.find("#verdict [data-identical]").get_attribute("data-identical") == "false"


def test_a_race_can_be_stopped_and_survives_a_failure(page: Page, scripted: ScriptedServer) -> None:
    scripted.script = Script(content=LONG, step_s=0.05)
    page.open("/#race")
    page.click("#race-start")
    page.wait(lambda: page.is_shown("#lane-plain.running"))
    page.find("#race-start").send_keys(Keys.ESCAPE)
    page.wait(lambda: "Stopped" in page.text("#verdict"))
    scripted.script = Script(failures=[Failure(500, "it broke")])
    page.click("#race-start")
    page.wait(lambda: "it broke" in page.text("#verdict"))
    page.click("#verdict button")
    page.wait(lambda: "Identical text." in page.text("#verdict"))


# -- errors ------------------------------------------------------------------------------------


def test_a_full_server_is_told_with_its_seconds(page: Page, scripted: ScriptedServer) -> None:
    scripted.script.failures = [Failure(429, "256 wait", {"Retry-After": "7"})]
    page.ask("Room?")
    page.wait(lambda: page.is_shown(".error"))
    assert "as many requests waiting" in page.text(".error") and "256 wait" in page.text(".error")
    assert "in 7 s" in page.text(".error button") or "in 6 s" in page.text(".error button")
    page.click_action("Try again")
    page.wait(lambda: page.answer() == "A short answer.")
    page.wait_for_end()
    assert not page.is_shown(".error") and len(page.all(".turn")) == 1


def test_a_restarting_engine_is_told_until_it_is_back(page: Page, scripted: ScriptedServer) -> None:
    scripted.script = Script(failures=[Failure(503, "restarting")], is_ready=False)
    page.ask("There?")
    page.wait(lambda: page.is_shown("#banner"))
    assert "engine is starting" in page.text("#banner") and page.is_shown(".error")
    scripted.script.is_ready = True
    page.wait(lambda: not page.is_shown("#banner"))
    page.click_action("Try again")
    page.wait(lambda: page.answer() == "A short answer.")


def test_an_answer_that_breaks_off_is_kept_and_said(page: Page, scripted: ScriptedServer) -> None:
    scripted.script = Script(content=LONG, steps_before_cut=4)
    page.ask("Half?")
    page.wait(lambda: page.is_shown(".error"))
    assert "ended before the answer did" in page.text(".error")
    assert page.answer().startswith("word0 word1")


def test_a_refusal_shows_the_servers_words(page: Page, scripted: ScriptedServer) -> None:
    scripted.script.failures = [Failure(400, "temperature is 7000; at most 100")]
    page.ask("Hot?")
    page.wait(lambda: page.is_shown(".error"))
    assert "temperature is 7000; at most 100" in page.text(".error")


def test_a_key_is_asked_for_and_kept_in_the_tab(page: Page, scripted: ScriptedServer) -> None:
    scripted.script.key = "right"
    page.open()
    page.wait(lambda: page.is_shown("#key-dialog"))
    page.find("#key").send_keys("wrong", Keys.ENTER)
    page.wait(lambda: page.is_shown("#key-dialog") and "does not know" in page.text("#key-note"))
    page.find("#key").send_keys("right", Keys.ENTER)
    page.wait(lambda: page.text("#model") == "scripted" and not page.is_shown("#key-dialog"))
    page.open()
    page.ask("Open?")
    page.wait(lambda: page.answer() == "A short answer.")
    stored = page.run("return [JSON.stringify(localStorage), sessionStorage['flashdraft.key']]")
    assert "right" not in stored[0] and json.loads(stored[1]) == "right"
    page.wait_for_end()
    scripted.script.key = "changed"  # in the middle of a conversation
    page.ask("Still?")
    page.wait(lambda: page.is_shown("#key-dialog"))
    page.find("#key").send_keys("changed", Keys.ENTER)
    page.wait(lambda: page.text(".turn:last-child .question") == "Still?" and page.answer())
    page.wait_for_end()
    assert not page.is_shown(".error")


def test_a_server_that_is_gone_is_told(page: Page) -> None:
    other = ScriptedServer()
    gone = Page(page.driver, other.url)
    gone.open()
    other.stop()
    gone.ask("Anyone?")
    gone.wait(lambda: gone.is_shown("#banner") and gone.is_shown(".error"))
    assert "does not answer" in gone.text("#banner")
