"""What steps tried, on the web page: asked for with *Show drafting*, drawn for one step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.browser import Keys, Page
from tests.e2e.scripted_server import Script, ScriptedServer

pytestmark = pytest.mark.alone  # Chromium takes both processors

LONG = " ".join(f"word{i}" for i in range(60))
LEFT, RIGHT, HOME, END = "\ue012", "\ue014", "\ue011", "\ue010"
# a chain 1 2 3, of which 1 is accepted, and a branch 4 5 off it, of which both are
TREE = {"texts": [" a", " b", " c", " d", " e"], "parents": [0, 1, 2, 1, 4], "path": [1, 4, 5]}
READ = """
const done = arguments[arguments.length - 1];
import("/page/answers/tree.js").then((found) => done(((tree) => %s)(found)));
"""


@pytest.fixture
def drafted(page: Page, scripted: ScriptedServer) -> Page:
    """The page after an answer whose steps had branches, with drafting shown."""
    scripted.script = Script(content=LONG, trees=True)
    page.click("#colour")
    page.ask("Say words.")
    page.wait_for_end()
    return page


def ask_module(page: Page, expression: str, *arguments: Any) -> Any:
    """What tree.js says of something."""
    return page.driver.execute_async_script(READ.replace("%s", expression), *arguments)


def strip_keys(page: Page, *keys: str) -> None:
    for key in keys:
        page.find(".strip").send_keys(key)


def texts_of(page: Page, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((t) => t.textContent.trim())"
    found: list[str] = page.driver.execute_script(script, selector)
    return found


def test_trees_are_asked_for_only_where_drafting_is_shown(
    page: Page, scripted: ScriptedServer
) -> None:
    scripted.script = Script(content=LONG, trees=True)
    page.ask("Without.")
    page.wait_for_end()
    page.click("#colour")
    assert page.all("[data-step]") == []
    assert page.find(".strip").get_attribute("role") == "img"
    strip_keys(page, RIGHT)
    assert not page.is_shown(".tree-card")
    page.ask("With.")
    page.wait_for_end()
    first, second = (question["flashdraft"] for question in scripted.questions)
    assert first == {"tokens": True} and second == {"tokens": True, "trees": True}
    assert page.all(".turn:last-child .strip [data-step]")
    assert page.all(".turn:first-child [data-step]") == []


def test_the_strip_walks_from_tree_to_tree(drafted: Page) -> None:
    strip = drafted.find(".strip")
    assert strip.get_attribute("role") == "slider"
    assert "Arrow keys" in strip.get_attribute("aria-label")
    steps = [int(i.get_attribute("data-step")) for i in drafted.all(".strip [data-step]")]
    assert 0 not in steps and len(steps) > 3
    strip_keys(drafted, RIGHT)
    assert drafted.text(".tree-card strong") == f"Step {steps[0]}"
    assert strip.get_attribute("aria-valuenow") == str(steps[0])
    assert "31 tokens tried, 1 accepted" in strip.get_attribute("aria-valuetext")
    strip_keys(drafted, RIGHT)
    assert drafted.text(".tree-card strong") == f"Step {steps[1]}"
    strip_keys(drafted, END, RIGHT)
    assert drafted.text(".tree-card strong") == f"Step {steps[-1]}"
    strip_keys(drafted, HOME, LEFT)
    assert drafted.text(".tree-card strong") == f"Step {steps[0]}"
    strip_keys(drafted, Keys.ESCAPE)
    assert not drafted.is_shown(".tree-card") and drafted.all(".of-step") == []


def test_the_way_that_won_is_that_of_the_answer(drafted: Page) -> None:
    for column in drafted.all(".strip [data-step]"):
        step = column.get_attribute("data-step")
        drafted.run(f"document.querySelector('.answer [data-step=\"{step}\"]').click()")
        assert drafted.text(".tree-card strong") == f"Step {step}"
        for ours, theirs in (("won", "drafted"), ("own", "own")):
            shown = texts_of(drafted, f".tree-drawing g.{ours} text")
            assert shown == texts_of(drafted, f".answer .{theirs}[data-step='{step}']")
        assert len(drafted.all(".tree-drawing g.tried")) + len(drafted.all("g.won")) == 31
        marked = texts_of(drafted, ".answer .of-step")
        assert marked == texts_of(drafted, f".answer [data-step='{step}']") != []


def test_no_two_tokens_stand_in_one_place_and_no_lines_cross(page: Page) -> None:
    """For a thousand random trees: tokens follow theirs by a column, and every line is its own."""
    grown = """
    let state = 7;
    const pick = (n) => (state = (state * 48271) % 2147483647) % n;
    const wrong = [];
    for (let tried = 0; tried < 1000; tried++) {
      const count = 1 + pick(63);
      const parents = Array.from({ length: count }, (_, i) =>
        pick(3) ? Math.max(0, i - pick(3)) : pick(i + 1));
      const path = [];
      for (;;) {
        const at = path.at(-1) ?? 0;
        const next = parents.map((p, i) => [p, i + 1]).filter(([p]) => p === at);
        if (!next.length || !pick(4)) break;
        path.push(next[pick(next.length)][1]);
      }
      const texts = parents.map(() => "x");
      const kept = tree.treeOf({ texts, parents, path, before: "a", own: pick(2) ? "b" : null });
      const layout = tree.layoutOf(kept);
      const places = new Map(layout.map(([node, row, column]) => [node, { row, column }]));
      const cells = new Map();
      const take = (key, owner) => {
        const isTaken = cells.has(key) && (owner === null || cells.get(key) !== owner);
        if (isTaken) wrong.push([tried, key]);
        cells.set(key, owner);
      };
      if (places.size !== count + 1) wrong.push([tried, "lost"]);
      for (const [node, { row, column }] of places) {
        take(`${row},${2 * column}`, null);
        if (!node) continue;
        const from = places.get(parents[node - 1]);
        if (from.column !== column - 1 || from.row > row) wrong.push([tried, node]);
        for (let r = from.row; r <= row; r++) take(`${r},${2 * column - 1}`, parents[node - 1]);
      }
      if (path.some((node) => places.get(node).row !== 0)) wrong.push([tried, "path"]);
    }
    return wrong;"""
    assert ask_module(page, f"(() => {{{grown}}})()") == []


def test_a_tree_in_words_and_by_places(page: Page) -> None:
    tree = json.dumps({**TREE, "before": "x", "own": "\n"})
    assert ask_module(page, f"tree.inWords(tree.treeOf({tree}))") == (
        "5 tokens tried, 3 accepted, 2 of them off the chain; the target went on with “⏎”"
    )
    assert ask_module(page, f"tree.placesOf(tree.treeOf({tree}))") == [
        "Place 1: a (accepted)",
        "Place 2: b, d (accepted)",
        "Place 3: c, e (accepted)",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"texts": []},
        {"texts": ["a"] * 65, "parents": list(range(65)), "path": []},
        {"texts": [1, 2, 3, 4, 5]},
        {"parents": [0, 1, 2, 1]},
        {"parents": [0, 2, 2, 1, 4]},
        {"parents": [-1, 1, 2, 1, 4]},
        {"path": [1, 5]},
        {"path": [9]},
        {"path": None},
    ],
)
def test_what_is_no_tree_is_not_drawn(page: Page, change: dict[str, Any]) -> None:
    assert ask_module(page, f"tree.treeOf({json.dumps(TREE)})") is not None
    assert ask_module(page, f"tree.treeOf({json.dumps({**TREE, **change})})") is None
    assert (
        ask_module(page, "tree.treeOf('<b>')") is None
        and ask_module(page, "tree.treesOf(7)") is None
    )


def test_hovering_shows_a_card_and_leaving_hides_it(drafted: Page) -> None:
    move = """
    const [kind, selector] = arguments;
    document.querySelector(selector).dispatchEvent(
      new PointerEvent(kind, { bubbles: kind !== "pointerleave", pointerType: "mouse" }))"""
    token = ".answer .token[data-step]"
    drafted.driver.execute_script(move, "pointerover", token)
    drafted.wait(lambda: drafted.is_shown(".tree-card"))
    drafted.driver.execute_script(move, "pointerout", token)
    drafted.driver.execute_script(move, "pointerenter", ".tree-card")  # on the way into it
    drafted.run("await new Promise((done) => setTimeout(done, 400))")
    assert drafted.is_shown(".tree-card")
    drafted.driver.execute_script(move, "pointerleave", ".tree-card")
    drafted.wait(lambda: not drafted.is_shown(".tree-card"))


def test_a_card_closes_and_steps_by_its_buttons(drafted: Page) -> None:
    drafted.click(".answer .token[data-step]")
    first = drafted.text(".tree-card strong")
    drafted.click("[aria-label='Later step']")
    second = drafted.text(".tree-card strong")
    assert first != second
    drafted.click("[aria-label='Earlier step']")
    assert drafted.text(".tree-card strong") == first
    drafted.click(".tree-card [aria-label=Close]")
    assert not drafted.is_shown(".tree-card")
    drafted.click(".answer .token[data-step]")
    drafted.click("#colour")  # drafting is not shown any more
    assert not drafted.is_shown(".tree-card")
    drafted.click("#colour")
    drafted.click(".answer .token[data-step]")
    drafted.click("#question")
    assert not drafted.is_shown(".tree-card")
    drafted.click(".answer .token[data-step]")
    drafted.click("#new-chat")
    assert not drafted.is_shown(".tree-card")


def test_escape_closes_the_card_before_it_stops_the_answer(
    page: Page, scripted: ScriptedServer
) -> None:
    scripted.script = Script(content=LONG * 5, trees=True, step_s=0.1)
    page.click("#colour")
    page.ask("Go on.")
    page.wait(lambda: page.all(".strip [data-step]"))
    strip_keys(page, RIGHT, Keys.ESCAPE)
    assert not page.is_shown(".tree-card") and page.text("#send") == "Stop"
    strip_keys(page, Keys.ESCAPE)
    page.wait_for_end()
    assert page.text(".turn-note") == "Stopped."


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_card_stays_on_the_screen(drafted: Page, width: int, theme: str) -> None:
    drafted.set_width(width, 700)
    drafted.prefer(theme)
    for place in ("first", "last"):
        drafted.run(
            "const found = [...document.querySelectorAll('.answer .token[data-step]')];"
            f"found.at({0 if place == 'first' else -1}).click()"
        )
        box = drafted.run(
            "const b = document.querySelector('.tree-card').getBoundingClientRect();"
            "return [b.left, b.top, innerWidth - b.right, innerHeight - b.bottom]"
        )
        assert min(box) >= 0, box
    assert drafted.run("return document.documentElement.scrollWidth <= innerWidth")
    buttons = drafted.all(".tree-card button")
    sizes = [button.size["height"] * button.size["width"] for button in buttons]
    assert min(sizes) >= (24 * 24 if width > 500 else 30 * 44)


def test_trees_are_kept_with_the_chat(drafted: Page) -> None:
    steps = len(drafted.all(".strip [data-step]"))
    drafted.wait(lambda: "#chat/" in drafted.driver.current_url)
    drafted.driver.refresh()
    drafted.wait(lambda: len(drafted.all(".strip [data-step]")) == steps)
    strip_keys(drafted, END)
    assert drafted.is_shown(".tree-drawing svg")


def test_trees_of_a_file_are_checked(page: Page) -> None:
    bad = {**TREE, "parents": [0, 9, 2, 1, 4]}
    steps = [[1, 1, [TREE]], [2, 1, [bad]], [0, 1], [3, 1, "x"], [4, 1, [{}] * 99], ["<b>", 1]]
    turn = {"id": "a", "parent": "", "question": "q", "answer": {"steps": steps}}
    chats = {"format": "flashdraft chats", "version": 1, "conversations": [{"turns": [turn]}]}
    script = """
    const [text, done] = arguments;
    import("/page/chats/exchange.js").then(({ conversationsOf }) => {
      done(conversationsOf("a.json", text)[0].path[0].answer.toJSON().steps);
    });"""
    read = page.driver.execute_async_script(script, json.dumps(chats))
    kept = {**TREE, "before": None, "own": None}
    assert read == [[1, 1, [kept]], [2, 1], [0, 1], [3, 1], [4, 1]]


def test_hostile_tokens_stay_text(page: Page, scripted: ScriptedServer) -> None:
    hostile = "<img src=x onerror=window.pwned=1>"
    scripted.script = Script(content=LONG, trees=True, others=(hostile, "<script>", "a" * 5000))
    page.click("#colour")
    page.ask("Hostile?")
    page.wait_for_end()
    strip_keys(page, RIGHT)
    assert page.all(".tree-card img, .tree-card script") == []
    assert page.run("return window.pwned ?? null") is None
    assert max(map(len, texts_of(page, ".tree-drawing text"))) <= 12
