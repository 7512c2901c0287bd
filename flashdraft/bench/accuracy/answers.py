"""Whether an answer to a bench task is right: by its final answer, or by running its code.

Off unless it is asked for. For the code tasks it RUNS CODE THAT A MODEL WROTE, in the sandbox of
sandbox.py and nowhere else. What makes two final answers equal is mathematics.py's affair. It knows
the tasks' fields and not how answers are made; nothing here takes part in a measurement.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from flashdraft.bench.accuracy.mathematics import is_list, number_of, same_answer
from flashdraft.bench.accuracy.sandbox import CodeTest, passes, sandbox_problem

_BOX = re.compile(r"\\f?boxed\s*\{|\\fbox\s*\{")
_NUMBER = re.compile(r"-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:/\d+)?(?<=\d)")
_SAID = re.compile(r"(?:####|\banswer(?:\s+is|\s*[:=]))[:*\s]*", re.IGNORECASE)
_FORMULA = re.compile(r"\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SENTENCE_END = re.compile(r"\.(?:\s|\**$)|[;\n]")
_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE
)
_PYTHON = ("python", "py", "python3")


def check_answer(task: str, row: Mapping[str, Any], text: str) -> bool | None:
    """Whether `text` answers a task's row; None where the row has nothing to check it by.

    Code tasks run the code in `text` with the row's own tests, confined; where this machine cannot
    confine it nothing is run and the answer is None (`why_unchecked` says why). Never call it
    unless the user asked for accuracy.
    """
    check = _CHECKS.get(task)
    if check is None or why_unchecked(task) is not None:
        return None
    try:
        return check(row, text)
    except KeyError:  # somebody's own rows, without the field
        return None


def why_unchecked(task: str) -> str | None:
    """Why a task's answers cannot be checked here; None where they can. May run a trial."""
    if task not in _CHECKS:
        return f"The task {task} has no answers that can be checked."
    return sandbox_problem() if task in _CODE_TASKS else None


def final_answer(text: str) -> str | None:
    """What a text gives as its answer: the last box, else what "the answer is", else None."""
    for start in reversed([found.end() for found in _BOX.finditer(text)]):
        content = _braced(text, start)
        if content is not None and content.strip():
            return content
    marks = list(_SAID.finditer(text))
    if not marks:
        return None
    said = text[marks[-1].end() :]
    formula = _FORMULA.match(said)
    content = formula[formula.lastindex or 0] if formula else _SENTENCE_END.split(said)[0]
    return content.strip(" .*") or None


def extract_code(text: str) -> str:
    """The first block of Python, else the first block that names no language, else all of it."""
    blocks = [(found.group(1).lower(), found.group(2)) for found in _FENCE.finditer(text)]
    for languages in (_PYTHON, ("",)):
        for language, code in blocks:
            if language in languages:
                return textwrap.dedent(code) if code.startswith((" ", "\t")) else code
    return text


def _braced(text: str, start: int) -> str | None:
    """The text up to the brace that closes the one before `start`; None if nothing closes it."""
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0) if text[place - 1] != "\\" else 0
        if depth == 0:
            return text[start:place]
    return None


def _last_number(text: str) -> str | None:
    found = [match.group() for match in _NUMBER.finditer(text) if match.group()]
    return found[-1] if found else None


def _field(row: Mapping[str, Any], name: str) -> str:
    """A row's field as text; KeyError where it has none. A list is its lines."""
    value = row.get(name)
    if isinstance(value, list):
        value = "\n".join(map(str, value))
    if isinstance(value, int | float):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise KeyError(name)
    return value


def _check_number(row: Mapping[str, Any], text: str) -> bool:
    """A task whose answers are numbers: what else stands in the box does not matter."""
    given, wanted = final_answer(text), _field(row, "answer")
    if given is None or (number_of(given) is None and not is_list(given)):
        given = _last_number(given or "") or _last_number(text)
    return given is not None and same_answer(given, wanted)


def _check_mathematics(row: Mapping[str, Any], text: str) -> bool:
    given, wanted = final_answer(text) or _last_number(text), _field(row, "answer")
    return given is not None and same_answer(given, wanted)


def _check_function(row: Mapping[str, Any], text: str) -> bool:
    """A function from its head and docstring: the answer has all of it, or its body alone."""
    head, name, test = (_field(row, one) for one in ("code_prompt", "entry_point", "test"))
    code = extract_code(text)
    if name in _defined(code):
        parts = [head, code]  # the head has imports and helpers that an answer may leave out
    else:
        is_indented = code.lstrip("\n").startswith((" ", "\t"))
        parts = [f"{head}\n{code if is_indented else textwrap.indent(code, '    ')}"]
    return passes(CodeTest(parts, f"{test}\ncheck({name})\n", setup=head, names=[name]))


def _check_program(row: Mapping[str, Any], text: str) -> bool:
    """A small program: the tests are lines that assert."""
    tests, imports = _field(row, "tests"), "\n".join(row.get("test_imports") or ())
    # a task may ask for a function with the name of a built-in one; no other may be replaced
    names = sorted(_defined(str(row.get("answer"))) & _defined(tests, used=True))
    return passes(CodeTest([imports, extract_code(text)], tests, setup=imports, names=names))


def _defined(code: str, used: bool = False) -> set[str]:
    """The names that code defines at its top; or all that it uses."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set(re.findall(r"^def (\w+)", code, re.MULTILINE))
    if used:
        return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    targets = [one for node in tree.body if isinstance(node, ast.Assign) for one in node.targets]
    return {node.name for node in tree.body if isinstance(node, kinds)} | {
        target.id for target in targets if isinstance(target, ast.Name)
    }


_CHECKS: Mapping[str, Callable[[Mapping[str, Any], str], bool]] = {
    "gsm8k": _check_number,
    "math500": _check_mathematics,
    "humaneval": _check_function,
    "mbpp": _check_program,
}
_CODE_TASKS = ("humaneval", "mbpp")
