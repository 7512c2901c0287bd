"""docs/python.md: its code runs as it stands and satisfies a type checker; mistakes do not."""

from __future__ import annotations

import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
MISTAKES = """
from flashdraft import LLM, AsyncLLM, Generation, GrammarSpec, SamplingParams

llm = LLM("x", max_contxt=5)  # wrong: call-arg
llm.generate("a", max_tokens=8)  # wrong: call-arg
llm.generate("a", SamplingParams(best_of=8))  # wrong: call-arg
llm.create_completion("a")  # wrong: attr-defined
llm("a")  # wrong: operator
llm.generate("a")[0].outputs  # wrong: attr-defined
llm.generate("a")[0]["choices"]  # wrong: index
llm.chat([{"role": "user"}], grammar={"type": "object"})  # wrong: call-overload
llm.get_tokenizer().apply_chat_template([])  # wrong: attr-defined
SamplingParams(max_tokens=None, n=2, temperature=1, stop="x", top_k=-1)
one: Generation = llm.chat([{"role": "user", "content": "a"}], chat_template_kwargs={})
many: list[Generation] = llm.chat([[{"role": "user", "content": "a"}]], use_tqdm=False)
few: list[Generation] = llm.generate([[5, 6], [7]], sampling_params=[SamplingParams()] * 2)


async def ask(llm: AsyncLLM) -> None:
    one: Generation = await llm.chat([{"role": "user", "content": "a"}])
    many: list[Generation] = await llm.generate("a", grammar=GrammarSpec.regex("a+"))
    async for event in llm.stream("a", verify=0):
        event.pieces
        event.piece  # wrong: attr-defined
    await llm.generat("a")  # wrong: attr-defined
"""


def check(path: Path) -> list[tuple[int, str]]:
    """The file's lines that mypy finds wrong, each with the code of what is."""
    command = [sys.executable, "-m", "mypy", "--strict", "--show-absolute-path", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    wrong = rf"^{re.escape(str(path.resolve()))}:(\d+): error: .*\[([\w-]+)\]$"
    found = re.findall(wrong, done.stdout, re.MULTILINE)
    return [(int(line), code) for line, code in found]


def test_the_pages_code_satisfies_a_type_checker(tmp_path: Path) -> None:
    path = tmp_path / f"page_{uuid.uuid4().hex}.py"
    path.write_text("\n".join(BLOCKS), encoding="utf-8")
    assert len(BLOCKS) >= 8 and check(path) == []


def test_a_type_checker_sees_mistakes(tmp_path: Path) -> None:
    """What is said at run time of words that do not exist hides nothing from it."""
    # mypy keeps what it said of a name, with the path that the file had then
    path = tmp_path / f"mistakes_{uuid.uuid4().hex}.py"
    path.write_text(MISTAKES, encoding="utf-8")
    wrong = [
        (number, line.rpartition("# wrong: ")[2])
        for number, line in enumerate(MISTAKES.splitlines(), 1)
        if "# wrong: " in line
    ]
    assert check(path) == wrong


@pytest.mark.weights
@pytest.mark.alone  # two models at once, as a reader has them
def test_the_pages_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {"__name__": "page"}
    for block in BLOCKS:
        exec(compile(block, "docs/python.md", "exec"), namespace)
    shown = capsys.readouterr().out
    assert "LLM('smollm2-135m'" in shown and len(shown.splitlines()) > 10
    namespace["llm"].close()


def test_every_page_of_ours_that_it_names_is_there() -> None:
    pages = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", PAGE)
    assert {"server.md", "tour.ipynb"} <= set(pages)
    assert [name for name in pages if not (ROOT / "docs" / name).exists()] == []
