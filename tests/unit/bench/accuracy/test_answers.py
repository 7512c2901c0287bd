"""Right and wrong answers to rows of our own, in the forms that models write them."""

from __future__ import annotations

from typing import Any

import pytest

from flashdraft.bench.accuracy import answers as accuracy
from flashdraft.bench.accuracy.answers import (
    check_answer,
    extract_code,
    final_answer,
    why_unchecked,
)
from flashdraft.bench.accuracy.mathematics import same_answer
from flashdraft.bench.accuracy.sandbox import CodeTest, sandbox_problem

needs_sandbox = pytest.mark.skipif(
    sandbox_problem() is not None, reason="this machine cannot confine code"
)

SAME = [
    ("18", "18"),
    ("18.00", "18"),
    ("\\$1,250", "1250"),
    ("1,250,000", "1250000"),
    ("12,\\!500", "12500"),
    ("12{,}500", "12500"),
    ("18.", "18"),
    ("18 dollars per day", "18"),
    ("18\\text{ km}", "18"),
    ("7\\mbox{ m}^2", "7"),
    ("35\\%", "35"),
    ("35%", "35"),
    ("40^\\circ", "40"),
    ("40^{\\circ}", "40^\\circ"),
    ("0.5", "\\frac{1}{2}"),
    (".5", "1/2"),
    ("\\dfrac{2}{4}", "\\frac12"),
    ("\\tfrac 34", "0.75"),
    ("-\\frac{3}{4}", "\\frac{-3}{4}"),
    ("2\\frac{1}{2}", "2.5"),
    ("2 1/2", "\\frac{5}{2}"),
    ("x = 7", "7"),
    ("\\(7\\)", "$7$"),
    ("\\text{Tuesday}", "tuesday"),
    ("\\text{(B)}", "B"),
    ("\\left( 1, \\frac{1}{2} \\right)", "(1, 0.5)"),
    ("[1, 2)", "[1,2)"),
    ("3, -1", "-1,3"),
    ("1 \\pm \\sqrt{2}", "1-\\sqrt{2}, 1+\\sqrt{2}"),
    ("\\{2, 1\\}", "1, 2"),
    ("(-\\infty, 1] \\cup (2, \\infty)", "(-\\infty,1]\\cup(2,\\infty)"),
    ("\\frac{1}{\\sqrt{3}}", "\\frac{\\sqrt3}{3}"),
    ("2\\sqrt{2}", "\\sqrt{8}"),
    ("\\sqrt[3]{-8}", "-2"),
    ("2\\pi", "\\pi \\cdot 2"),
    ("3 + 2i", "2i+3"),
    ("x^{2} + 2x + 1", "(x+1)^2"),
    ("y = 3x - 1", "3x-1"),
    ("3 \\times 10^{4}", "30000"),
    ("101_{2}", "101_2"),
    ("\\begin{pmatrix} 1 \\\\ 0.5 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 1/2 \\end{pmatrix}"),
]
DIFFERENT = [
    ("", "0"),
    ("18", "81"),
    ("0.33", "\\frac{1}{3}"),
    ("1,5", "15"),
    ("(1,2)", "(2,1)"),
    ("[1,2]", "(1,2)"),
    ("(1,2)", "1,2,3"),
    ("1,1", "1,2"),
    ("tea", "ate"),
    ("2xy", "2ab"),
    ("x+1", "x-1"),
    ("B", "C"),
    ("2\\frac{1}{2}", "1"),
    ("101_2", "101_3"),
    ("-5", "5"),
    ("\\begin{pmatrix} 1 & 2 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ("9^{9^{9^{9}}}", "1"),
    ("((((9^64)^64)^64)^64)^64", "2"),
    ("1/0", "0"),
    ("(" * 240 + "1" + ")" * 240, "2"),
    ("9" * 100_000, "9"),
    ("\\frac{", "\\frac"),
]


@pytest.mark.parametrize(("given", "wanted"), SAME)
def test_same_answers(given: str, wanted: str) -> None:
    assert same_answer(given, wanted)
    assert same_answer(wanted, given)


@pytest.mark.parametrize(("given", "wanted"), DIFFERENT, ids=range(len(DIFFERENT)))
def test_different_answers(given: str, wanted: str) -> None:
    assert not same_answer(given, wanted)
    assert not same_answer(wanted, given)


def test_the_final_answer_is_the_last_that_is_whole() -> None:
    assert final_answer("First \\boxed{1}, so \\boxed{\\frac{1}{2^{3}}}.") == "\\frac{1}{2^{3}}"
    assert final_answer("So \\boxed{5}. Check: \\boxed{\\frac{1}{") == "5"
    assert final_answer("\\boxed{\\{1, 2\\}}") == "\\{1, 2\\}"
    assert final_answer("The answer is 12. No: the answer is **13**.\nBye") == "13"
    assert final_answer("3 + 4 = 7\n#### 7") == "7"
    assert final_answer("The final answer is:\n\n$\\frac{1}{2}$, since 1 + 1 = 2") == "\\frac{1}{2}"
    assert final_answer("Answer: 2.5 because of 7. Or 9.") == "2.5 because of 7"
    assert final_answer("It is 7.") is None


@pytest.mark.parametrize(
    "text",
    [
        "so \\boxed{1,200}",
        "so \\boxed{\\$1200.00}",
        "so \\boxed{1200 \\text{ apples}}",
        "so \\boxed{n = 1200}",
        "so \\boxed{\\text{Ann has } 1200}",
        "The answer is $1,200.",
        "That makes 300 and 900, 1200 in all.",
        "#### 1200",
    ],
)
def test_arithmetic(text: str) -> None:
    row = {"answer": "1,200"}
    assert check_answer("gsm8k", row, text) is True
    assert check_answer("gsm8k", {"answer": "12"}, text) is False


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{4 pi}", "4"),
        ("\\boxed{4\\pi}", "4"),
        ("\\boxed{4 π}", "4"),
        ("\\boxed{18,18}", "18"),
        ("\\boxed{3, 18}", "18"),
    ],
)
def test_more_than_the_number_is_not_the_number(text: str, answer: str) -> None:
    for task in ("gsm8k", "math500"):
        assert check_answer(task, {"answer": answer}, text) is False
    assert check_answer("math500", {"answer": "4\\pi"}, text) is text.startswith("\\boxed{4")


def test_mathematics() -> None:
    row = {"answer": "\\frac{3}{8}"}
    assert check_answer("math500", row, "Hence \\boxed{0.375}.") is True
    assert check_answer("math500", row, "Hence the answer is 3/8.") is True
    assert check_answer("math500", row, "Hence \\boxed{\\frac{8}{3}}.") is False
    assert check_answer("math500", row, "I do not know.") is False
    assert check_answer("math500", row, "") is False


def test_code_is_found() -> None:
    assert extract_code("Here:\n```python\na = 1\n```\nand\n```python\nb = 2\n```") == "a = 1\n"
    assert extract_code("```\nshell\n```\n```py\na = 1\n```") == "a = 1\n"
    assert extract_code("```bash\nls\n```\n```\na = 1\n```") == "a = 1\n"
    assert extract_code("It is:\n```python\na = 1\nb = ") == "a = 1\nb = "
    assert extract_code("1. So:\n   ```python\n   a = 1\n   ```") == "a = 1\n"
    assert extract_code("a = 1") == "a = 1"


HEAD = (
    "from typing import List\n\n\ndef base(x: int) -> int:\n    return x + 1\n\n\n"
    'def grow(numbers: List[int]) -> List[int]:\n    """ One more each.\n    """\n'
)
FUNCTION: dict[str, Any] = {
    "code_prompt": HEAD,
    "entry_point": "grow",
    "test": (
        "def check(candidate):\n    assert candidate([1, 2]) == [base(1), base(2)]\n"
        "    assert candidate([]) == []\n"
    ),
}
WHOLE = "def grow(numbers: List[int]) -> List[int]:\n    return [base(n) for n in numbers]\n"


@needs_sandbox
@pytest.mark.parametrize(
    ("text", "passes"),
    [
        (f"Sure:\n```python\n{WHOLE}```", True),  # neither the import nor the helper
        (f"```python\n{HEAD}    return [n + 1 for n in numbers]\n```", True),
        ("    return [n + 1 for n in numbers]\n", True),
        ("return [n + 1 for n in numbers]", True),
        ("```python\ngrow = lambda numbers: [n + 1 for n in numbers]\n```", True),
        ("```python\nfrom __future__ import annotations\n" + WHOLE + "```", True),
        ("```python\ndef other(numbers):\n    return [n + 1 for n in numbers]\n```", False),
        (
            "```python\ndef base(x): return 0\ndef grow(numbers): return [0] * len(numbers)```",
            False,
        ),
        ("I cannot do that.", False),
        ("", False),
    ],
)
def test_functions(text: str, passes: bool) -> None:
    assert check_answer("humaneval", FUNCTION, text) is passes


@needs_sandbox
def test_programs() -> None:
    row: dict[str, Any] = {
        "tests": ["assert math.isclose(half(3), 1.5)", "assert set(sum([1])) == {1}"],
        "test_imports": ["import math"],
        "answer": "def sum(x): return x\ndef half(x): return x / 2",
    }
    right = "```python\ndef half(x):\n    return math.ceil(x) / 2\ndef sum(x): return x\n```"
    assert check_answer("mbpp", row, right) is True
    assert check_answer("mbpp", row, right.replace("/ 2", "/ 3")) is False
    # what the tests are made of is not the answer's to define
    cheat = "def half(x): return 1.5\ndef sum(x): return x\ndef set(x): return {1}"
    assert check_answer("mbpp", row, cheat) is True
    wrong = cheat.replace("def sum(x): return x", "def sum(x): return [2]")
    assert check_answer("mbpp", row, wrong) is False


def test_what_cannot_be_checked_is_none() -> None:
    assert check_answer("mt_bench", {"answer": None}, "text") is None
    assert check_answer("mine", {}, "text") is None
    for task in ("gsm8k", "math500"):
        assert check_answer(task, {"answer": None}, "\\boxed{1}") is None
    for task in ("humaneval", "mbpp"):
        assert check_answer(task, {"tests": []}, "x = 1") is None
    assert "mt_bench" in str(why_unchecked("mt_bench"))
    assert why_unchecked("gsm8k") is None


def test_no_code_is_run_without_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(test: CodeTest) -> bool:
        raise AssertionError("code was run")

    monkeypatch.setattr(accuracy, "sandbox_problem", lambda: "No sandbox here.")
    monkeypatch.setattr(accuracy, "passes", run)
    assert check_answer("humaneval", FUNCTION, WHOLE) is None
    assert why_unchecked("humaneval") == "No sandbox here."
