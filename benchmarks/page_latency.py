"""How quick the web page stays with a long conversation: python -m benchmarks.page_latency

    python -m benchmarks.page_latency --output benchmarks/results/page_latency.json

Chromium, headless, opens a chat of many turns: prose, tables, code and formulas. Measured are the
time from the click on the chat until its turns are drawn; from a key to the frame that shows it, at
rest and while an answer comes; and the gaps between frames while the page is scrolled from its
beginning to its end. Each with and without drafting shown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashdraft.bench.run.environment import describe_environment
from tests.e2e.browser import Page, start_browser
from tests.e2e.scripted_server import Script, ScriptedServer

TEXT = "The drafter proposes a block, and the target keeps what it would have written itself. "
PARTS = (
    TEXT * 3,
    "- one **bold** point\n- another, with `code`\n  - and one below it",
    "```python\ndef square(x: int) -> int:\n    return x * x  # by itself\n```",
    "| name | size |\n|---|---:|\n| drafter | 8 MB |\n| target | 98 MB |",
    "The area is $\\pi r^2$, and\n\n$$\\int_0^1 x^2 \\, dx = \\frac{1}{3}$$",
)
TOKENS_PER_TURN = 100
STREAMED_STEP_S = 0.02
TYPED = "How quick is a key when the page is long and somebody types a sentence into it?"
WATCH_KEYS = """
window.keyTimes = [];
document.querySelector("#question").addEventListener("keydown", ({ timeStamp }) => {
  requestAnimationFrame(() => {
    const channel = new MessageChannel(); // after the frame that this key is drawn in
    channel.port1.onmessage = () => window.keyTimes.push(performance.now() - timeStamp);
    channel.port2.postMessage(null);
  });
}, true);
"""
SCROLL = """
const done = arguments[0];
const gaps = [];
let before = null;
const end = () => document.scrollingElement.scrollHeight - innerHeight;
window.scrollTo(0, 0);
const step = (now) => {
  if (before !== null) gaps.push(now - before);
  before = now;
  if (scrollY >= end() - 1) done(gaps);
  else { window.scrollBy(0, 400); requestAnimationFrame(step); }
};
requestAnimationFrame(step);
"""
OPEN = """
const [done, turns] = [arguments[1], arguments[0]];
const start = performance.now();
document.querySelector(".chat-link").click();
const look = () => {
  if (document.querySelectorAll(".turn").length < turns) requestAnimationFrame(look);
  else requestAnimationFrame(() => done(performance.now() - start));
};
requestAnimationFrame(look);
"""


def conversation(num_turns: int) -> dict[str, Any]:
    """A chat as the page exports it, of about a hundred tokens a turn."""
    turns = []
    for i in range(num_turns):
        text = "\n\n".join((PARTS[0], PARTS[1 + i % (len(PARTS) - 1)]))
        size = -(-len(text) // TOKENS_PER_TURN)
        starts = range(0, len(text), size)
        runs = [[min(size, len(text) - at), int(k % 4 != 0), k // 4] for k, at in enumerate(starts)]
        steps = [[3, 1]] * (len(runs) // 4)
        answer = {"content": {"text": text, "runs": runs}, "steps": steps, "finish": "stop"}
        answer["numTokens"] = len(runs)
        parent = str(i - 1) if i else ""
        turn = {"id": str(i), "parent": parent, "question": f"Question {i}?", "at": i + 1}
        turns.append(turn | {"answer": answer})
    found = {"title": "Long", "turns": turns}
    return {"format": "flashdraft chats", "version": 1, "conversations": [found]}


def summary(times: Sequence[float]) -> dict[str, float]:
    """Milliseconds: the middle, the slow end, the slowest, and how many there are."""
    ordered = sorted(times)
    slow = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    rounded = {"p50_ms": statistics.median(ordered), "p95_ms": slow, "max_ms": ordered[-1]}
    return {name: round(value, 1) for name, value in rounded.items()} | {"count": len(ordered)}


def load() -> list[float]:
    """What else the machine does."""
    return [round(one, 2) for one in os.getloadavg()]


def type_keys(page: Page) -> dict[str, float]:
    """From a key to the frame with it, for each key of a sentence."""
    page.run("window.keyTimes.length = 0; document.querySelector('#question').value = ''")
    field = page.find("#question")
    for character in TYPED:
        field.send_keys(character)
    page.wait(lambda: page.run("return window.keyTimes.length") >= len(TYPED))
    page.run("document.querySelector('#question').value = ''")
    return summary(page.run("return window.keyTimes"))


def measure(page: Page, server: ScriptedServer, num_turns: int) -> dict[str, Any]:
    """Everything, in the page's present colours."""
    page.open()
    page.run(WATCH_KEYS)
    found: dict[str, Any] = {"empty": {"type": type_keys(page)}}
    opened = page.driver.execute_async_script(OPEN, num_turns)
    found["open_ms"] = round(opened, 1)
    time.sleep(3)  # formulas and code get their looks
    found["scroll"] = summary(page.driver.execute_async_script(SCROLL))
    found["type"] = type_keys(page)
    server.script = Script(content=TEXT * 200, step_s=STREAMED_STEP_S)
    page.ask("And now?")
    page.wait(lambda: "proposes" in page.answer())
    found["type_while_an_answer_comes"] = type_keys(page)
    page.click("#send")
    page.wait_for_end()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    before = load()
    server = ScriptedServer()
    with tempfile.TemporaryDirectory() as folder:
        driver = start_browser(Path(folder, "profile"))
        driver.set_script_timeout(120)
        try:
            page = Page(driver, server.url)
            page.set_width(1280, 900)
            page.open()
            chat = Path(folder, "long.json")
            found: dict[str, Any] = {}
            for name in ("plain", "coloured"):
                page.forget()
                page.open()
                chat.write_text(json.dumps(conversation(options.turns)))
                page.find("#import-picker").send_keys(str(chat))
                page.wait(lambda: page.is_shown(".chat-link"), 60)
                if name == "coloured":
                    page.click("#colour")
                found[name] = measure(page, server, options.turns)
            version = driver.capabilities["browserVersion"]
        finally:
            driver.quit()
            server.stop()
    whole = {
        "environment": describe_environment(sys.argv[1:])
        | {"command": "python -m benchmarks.page_latency " + " ".join(sys.argv[1:])},
        "browser": f"Chromium {version}, headless, no GPU",
        "turns": options.turns,
        "tokens": options.turns * TOKENS_PER_TURN,
        "load_average": {"before": before, "after": load()},
        "measured": found,
    }
    options.output.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
