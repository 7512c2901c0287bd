"""What answers look like on the web page: formulas, coloured code, and hostile ones of both."""

from __future__ import annotations

import pytest

from tests.e2e.browser import Page
from tests.e2e.scripted_server import Script, ScriptedServer

pytestmark = pytest.mark.alone  # Chromium takes both processors

FORMULAS = r"""Inline $x^2 + \frac{a}{b}$ and \(y_1\), a price of $5 or $10.

$$
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
+ \sqrt{2}
$$

\[ \sum_{i=1}^n i \]

Not one: $\notacommand{$ and $$ alone.
"""
HOSTILE_FORMULAS = [
    r"\href{javascript:window.pwned=1}{click}",
    r"\url{javascript:window.pwned=1}",
    r"\includegraphics[height=1em]{https://example.com/pixel.png}",
    r"\class{evil}{x} \htmlClass{evil}{x} \htmlId{send}{x} \htmlStyle{position:fixed}{x}",
    r"\text{<img src=x onerror=window.pwned=1>}",
    r"\def\x{\x\x}\x",
    r"\def\a{\b\b}\def\b{\c\c}\def\c{\d\d}\def\d{xxxxxxxx}\a\a\a\a\a\a\a\a",
    r"\rule{99999em}{99999em}\hspace{99999em}\raisebox{9999em}{x}",
    r"{" * 3000,
    r"\frac" * 700,
    r"\sqrt{" * 500 + "x" + "}" * 500,
    r"\begin{matrix}" + r"1&2\\" * 800 + r"\end{matrix}",
]
CODE = '''Look:

```python
# says hello
def greet(name: str) -> str:
    """Many
    lines."""
    return f"hello {name}" + str(42)
```

```html
<p class="x">&amp;</p><script>window.pwned = 1</script>
```

```nosuchlanguage
plain <b>text</b>
```
'''
CODE_TEXT = CODE.split("```python\n")[1].split("\n```")[0]
# of the page's languages, each with something that has a colour
SAMPLES = {
    "bash": 'echo "$HOME" # x',
    "c": "int main(void) { return 0; }",
    "cpp": "class A { public: int x = 1; };",
    "css": "a { color: red; }",
    "diff": "-old\n+new",
    "dockerfile": "FROM debian\nRUN true",
    "go": "func main() { return 1 }",
    "ini": "[a]\nb = 1",
    "java": "class A { int x = 1; }",
    "js": "const x = `a ${1}`; // y",
    "json": '{"a": 1}',
    "tsx": 'const a = <b c="d">e</b>;',
    "kotlin": "fun main() { val x = 1 }",
    "lua": "local x = 1 -- y",
    "html": '<a b="c">d</a>',
    "ruby": "def x; 'y'; end",
    "rust": "fn main() { let x = 1; }",
    "sql": "SELECT 1 FROM a",
    "toml": "a = 1",
    "ts": "let x: number = 1;",
    "yaml": "a: 1",
    "csharp": "class A { int x = 1; }",
}


def test_formulas_are_set(page: Page, scripted: ScriptedServer) -> None:
    scripted.script = Script(content=FORMULAS, step_s=0.002)
    page.ask("Formulas?")
    page.wait_for_end()
    page.wait(lambda: len(page.all(".answer math")) == 4)
    assert page.all(".answer .formula:not(.display) math mfrac")
    assert len(page.all(".answer .display math[display=block]")) == 2
    assert page.all(".answer .display mtable mtd") and page.all(".answer msqrt")
    assert "a price of $5 or $10." in page.answer()
    assert r"$\notacommand{$ and $$ alone." in page.answer()
    script = "return document.querySelector('.formula math').namespaceURI"
    assert page.run(script) == "http://www.w3.org/1998/Math/MathML"
    page.click("#colour")  # who wrote which token shows in the source
    assert page.all(".answer math") == []
    assert page.all(".answer .formula .token.drafted")
    assert r"$x^2 + \frac{a}{b}$" in page.answer()
    page.click("#colour")
    page.wait(lambda: len(page.all(".answer math")) == 4)


def test_hostile_formulas_do_nothing(page: Page, scripted: ScriptedServer) -> None:
    content = "\n\n".join(f"$${tex}$$" for tex in HOSTILE_FORMULAS)
    scripted.script = Script(content=content + "\n\n$$e = mc^2$$")
    page.ask("Hostile?")
    page.wait_for_end()
    page.wait(lambda: page.run("return document.querySelector('.formula:last-child math')"), 30)
    inside = "a, img, script, [href], [src], [id], [onclick], .evil, semantics, annotation-xml"
    assert page.run(f"return document.querySelectorAll('.answer :is({inside})').length") == 0
    outside = """
    const box = document.querySelector('.answer').getBoundingClientRect();
    return [...document.querySelectorAll('.formula.set')].filter((found) => {
      const one = found.getBoundingClientRect();
      return one.left < box.left - 1 || one.right > box.right + 1 || one.height > 700;
    }).length"""
    assert page.run(outside) == 0
    assert page.run("return window.pwned ?? null") is None
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    page.ask("Still there?")
    page.wait_for_end()


@pytest.mark.parametrize("coloured", [False, True])
def test_code_is_coloured(page: Page, scripted: ScriptedServer, coloured: bool) -> None:
    if coloured:
        page.click("#colour")
    scripted.script = Script(content=CODE, step_s=0.005)
    page.ask("Code?")
    page.wait_for_end()
    page.wait(lambda: page.all("figure:nth-of-type(2) .syntax-name"))
    words = page.run(
        "return [...document.querySelectorAll('figure:first-of-type .syntax-keyword')]"
        ".map((e) => e.textContent)"
    )
    assert words[:2] == ["def", "return"]
    assert page.text("figure .syntax-comment") == "# says hello"
    assert page.text("figure:first-of-type code") == CODE_TEXT
    assert page.text("figure:nth-of-type(2) code").endswith("<script>window.pwned = 1</script>")
    assert page.all("figure:nth-of-type(3) [class^=syntax]") == []
    assert page.run("return document.querySelectorAll('.answer :is(script, b)').length") == 0
    assert page.run("return window.pwned ?? null") is None
    # the colours of drafting are under those of the language
    assert bool(page.all("figure [class^=syntax] > .token.drafted")) == coloured
    if coloured:
        page.click("#colour")
        page.wait(lambda: page.text("figure .syntax-comment") == "# says hello")
        assert page.all("figure .token") == []


def test_every_language_has_colours(page: Page, scripted: ScriptedServer) -> None:
    content = "\n\n".join(f"```{name}\n{code}\n```" for name, code in SAMPLES.items())
    scripted.script = Script(content=content)
    page.ask("All?")
    page.wait_for_end()
    plain = """return [...document.querySelectorAll('figure')].filter(
      (one) => !one.querySelector('[class^=syntax]')).map((one) => one.textContent)"""
    page.wait(lambda: page.run(plain) == [])
    shown = "return [...document.querySelectorAll('figure code')].map((one) => one.textContent)"
    assert page.run(shown) == list(SAMPLES.values())


def test_what_takes_too_long_to_colour_stays_plain(page: Page, scripted: ScriptedServer) -> None:
    """The worker is ended, and the next block finds a new one."""
    scripted.script = Script(content="```python\nx = 1\n```")
    page.ask("First")
    page.wait_for_end()
    page.wait(lambda: page.all(".syntax-number"))
    page.run(
        "window.post = Worker.prototype.postMessage; "
        "Worker.prototype.postMessage = function (job) { "
        "if (!job.code?.includes('slow')) window.post.call(this, job); }"
    )
    scripted.script = Script(content="```python\nslow = 1\n```\n\n```python\nquick = 2\n```")
    page.ask("Second")
    page.wait_for_end()
    assert page.text(".turn:last-child code") == "slow = 1"
    page.wait(lambda: page.all(".turn:last-child figure:last-child .syntax-number"), 20)
    assert page.all(".turn:last-child figure:first-child .syntax-number") == []


def test_nothing_is_asked_of_another_host_and_no_text_becomes_markup(
    page: Page, scripted: ScriptedServer
) -> None:
    links = "![a](https://example.com/a.png) <https://example.com> https://example.com/x?y=z"
    frames = "<iframe src=https://example.com></iframe><link rel=stylesheet href=//example.com>"
    scripted.script = Script(content=f"{links}\n\n{frames}\n\n{FORMULAS}\n\n{CODE}")
    page.ask("Who is asked?")
    page.wait_for_end()
    page.wait(lambda: page.all(".answer math") and page.all(".syntax-keyword"))
    loaded = page.run("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert len(loaded) > 20
    assert [name for name in loaded if not name.startswith(page.url)] == []
    assert (
        page.run("return document.querySelectorAll('.answer :is(iframe, img, link)').length") == 0
    )
    for anchor in page.all(".answer a"):
        assert anchor.get_attribute("rel") == "noopener noreferrer nofollow"
    page.driver.get_log("browser")
    refused = "try { document.body.innerHTML = '<b>x</b>'; return false } catch { return true }"
    assert page.run(refused), "the browser must refuse markup from text"
    page.driver.get_log("browser")  # it says so itself


def test_a_long_answer_draws_its_end_only(page: Page, scripted: ScriptedServer) -> None:
    """Blocks that are whole stay as they are while the answer grows, and so do earlier turns."""
    scripted.script = Script(content="\n\n".join(f"Paragraph {i}." for i in range(60)))
    page.ask("One")
    page.wait_for_end()
    scripted.script.step_s = 0.01
    page.run(
        "window.touched = 0; new MutationObserver((all) => { window.touched += all.length; })"
        ".observe(document.querySelector('.turn .answer'), "
        "{ subtree: true, childList: true, characterData: true })"
    )
    page.ask("Two")
    page.wait(lambda: "Paragraph 3." in page.answer())
    page.run("window.third = document.querySelectorAll('.turn:last-child .answer > p')[2]")
    page.wait_for_end()
    assert page.run("return window.third.isConnected") is True
    assert page.run("return window.touched") == 0
